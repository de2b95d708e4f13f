"""The metric that counts as clipped what a loss clips."""

from typing import Any

from gruppo.loss.policy import PolicyLoss
from gruppo.metric.base import PolicyMetric
from gruppo.metric.cispo import CISPOMetric
from gruppo.metric.grpo import GRPOMetric
from gruppo.metric.gspo import GSPOMetric


def metric_for(loss: PolicyLoss, **options: Any) -> PolicyMetric:
    """The metric of a loss: sequence ratios are counted per sequence, capped weights whatever the advantage, all else
    per token. A loss that clips nothing gets no clip rates."""
    cls = GRPOMetric
    if loss.has_sequence_ratio:
        cls = GSPOMetric
    elif loss.caps_every_sign:
        cls = CISPOMetric
    return cls(epsilon=None, **options) if loss.clip_range is None else cls.from_loss(loss, **options)
