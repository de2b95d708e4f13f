"""Metrics of a step: how far the policy moved, what its loss clipped, how far sampler and trainer are apart.

`gruppo.keys` and `docs/metrics.md` list keys, formulas and healthy ranges. Subclass `Metric` for your own
(`docs/extending.md`).
"""

from gruppo.metric.base import Metric, largest, total
from gruppo.metric.mismatch import MismatchMetric
from gruppo.metric.policy import CISPOMetric, GRPOMetric, GSPOMetric, PolicyMetric, approx_kl, metric_for, pass_at_k

__all__ = [
    "CISPOMetric", "GRPOMetric", "GSPOMetric", "Metric", "MismatchMetric", "PolicyMetric", "approx_kl", "largest",
    "metric_for", "pass_at_k", "total",
]  # fmt: skip
