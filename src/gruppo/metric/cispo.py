"""Clip rates of capped weights."""

from torch import Tensor

from gruppo.loss.inputs import LossInputs
from gruppo.metric.base import PolicyMetric
from gruppo.metric.functional import above, below


class CISPOMetric(PolicyMetric):
    """A token is clipped when its ratio is out of bounds, whatever its advantage: the cap acts on all."""

    def count_clipped(self, inputs: LossInputs, ratio_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        # The ratio of a slot that is not scored is 1, which no band leaves out.
        return inputs.segments.length.sum(), below(ratio_T, self.low).sum(), above(ratio_T, self.high).sum()
