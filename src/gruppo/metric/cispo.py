"""Clip rates of capped weights."""

from torch import Tensor

from gruppo.loss.inputs import LossInputs
from gruppo.metric.base import PolicyMetric
from gruppo.metric.functional import token_ratio


class CISPOMetric(PolicyMetric):
    """A token is clipped when its ratio is out of bounds, whatever its advantage: the cap acts on all."""

    def clipped(self, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        ratio_T = token_ratio(inputs)
        return ratio_T < self.low, ratio_T > self.high, inputs.segments.mask
