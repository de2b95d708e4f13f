"""Clip rates of token-level clipping: GRPO, DAPO, BNPO, Dr. GRPO (and the band of SAPO)."""

from torch import Tensor

from gruppo.loss.inputs import LossInputs
from gruppo.metric.base import PolicyMetric
from gruppo.metric.functional import token_ratio


class GRPOMetric(PolicyMetric):
    """A token is clipped when its gradient is cut off: low where A < 0, high where A > 0."""

    def clipped(self, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
        ratio_T = token_ratio(inputs)
        low_T = (ratio_T < self.low) & (inputs.advantages < 0)
        high_T = (ratio_T > self.high) & (inputs.advantages > 0)
        return low_T, high_T, inputs.segments.mask
