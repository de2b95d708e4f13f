"""Clip rates of sequence-level clipping."""

from torch import Tensor

from gruppo.loss.inputs import LossInputs
from gruppo.metric.base import PolicyMetric
from gruppo.metric.functional import sequence_ratio


class GSPOMetric(PolicyMetric):
    """A sequence is clipped when its geometric-mean ratio is out of bounds on the side its advantage pushes.

    With one advantage per token the sign of their mean decides. Sequences without scored tokens are not counted.
    """

    def count_clipped(self, inputs: LossInputs, ratio_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ratio_S = sequence_ratio(inputs)
        advantage_S = inputs.segments.mean(inputs.advantages)
        low_S = (ratio_S < self.low) & (advantage_S < 0)
        high_S = (ratio_S > self.high) & (advantage_S > 0)
        return (inputs.segments.length > 0).sum(), low_S.sum(), high_S.sum()
