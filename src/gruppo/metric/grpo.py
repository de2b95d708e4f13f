"""Clip rates of token-level clipping: GRPO, DAPO, BNPO, Dr. GRPO (and the band of SAPO)."""

import torch
from torch import Tensor

from gruppo.loss.inputs import LossInputs
from gruppo.metric.base import PolicyMetric
from gruppo.metric.functional import above, below


class GRPOMetric(PolicyMetric):
    """A token is clipped when its gradient is cut off: low where A < 0, high where A > 0."""

    def count_clipped(self, inputs: LossInputs, ratio_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The ratio of a slot that is not scored is 1, which no band leaves out.
        low = torch.dot(below(ratio_T, self.low), below(inputs.advantages, 0))
        high = torch.dot(above(ratio_T, self.high), above(inputs.advantages, 0))
        return inputs.segments.length.sum(), low, high
