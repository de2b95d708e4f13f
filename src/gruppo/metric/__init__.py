"""Metrics of a step: what the policy did to the tokens it was trained on.

    functional.py  the formulas, per token
    state.py       sums, maxima and a top-K that merge: over micro-batches, and over ranks
    base.py        accumulate / calculate / reset, shared by all
    grpo.py gspo.py cispo.py   what counts as clipped
    choose.py      metric_for(loss): the one of these that fits a loss
    high_kl.py     the K tokens that moved most
    mismatch.py    how far sampler and trainer are apart
    pass_at_k.py   unbiased pass@k, for evaluation

Keys, formulas and healthy ranges: `docs/metrics.md`. To add a metric for another loss, subclass `PolicyMetric` and
say in `clipped` which tokens or sequences its loss clips.
"""

from gruppo.metric.base import PolicyMetric
from gruppo.metric.choose import metric_for
from gruppo.metric.cispo import CISPOMetric
from gruppo.metric.grpo import GRPOMetric
from gruppo.metric.gspo import GSPOMetric
from gruppo.metric.mismatch import MismatchMetric
from gruppo.metric.pass_at_k import pass_at_k

__all__ = ["CISPOMetric", "GRPOMetric", "GSPOMetric", "MismatchMetric", "PolicyMetric", "metric_for", "pass_at_k"]
