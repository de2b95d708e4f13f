"""The metric that counts as clipped what a loss clips."""

from typing import Any

from gruppo.loss.level import sequence_level, sequence_token_level
from gruppo.loss.policy import PolicyLoss
from gruppo.loss.surrogate import ClippedWeight
from gruppo.metric.base import PolicyMetric
from gruppo.metric.cispo import CISPOMetric
from gruppo.metric.grpo import GRPOMetric
from gruppo.metric.gspo import GSPOMetric


def metric_for(loss: PolicyLoss, **options: Any) -> PolicyMetric:
    """Sequence ratios are counted per sequence, capped weights whatever the advantage, all else per token."""
    cls = GRPOMetric
    if loss.level in (sequence_level, sequence_token_level):
        cls = GSPOMetric
    elif isinstance(loss.surrogate, ClippedWeight):
        cls = CISPOMetric
    return cls(**options) if loss.clip_range is None else cls.from_loss(loss, **options)
