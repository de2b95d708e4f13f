"""The formulas of the metrics, per token or per sequence."""

import torch
from torch import Tensor

from gruppo.loss.inputs import LossInputs
from gruppo.loss.kl import MAX_DELTA
from gruppo.loss.level import token_level


def approx_kl(new_logps_T: Tensor, old_logps_T: Tensor) -> Tensor:
    """k3 of KL(old || new) from tokens drawn from old: r - 1 - log r, r = new / old.

    Never negative; the difference is bounded to +-40.
    """
    diff_T = (new_logps_T - old_logps_T).clamp(-MAX_DELTA, MAX_DELTA)
    return (torch.expm1(diff_T) - diff_T).clamp(min=0)


def token_ratio(inputs: LossInputs) -> Tensor:
    """The ratio that a token-level loss sees `[T]`."""
    return token_level(inputs).exp()


def sequence_ratio(inputs: LossInputs) -> Tensor:
    """The ratio that a sequence-level loss sees, once per sequence `[S]`."""
    return inputs.segments.mean(token_level(inputs)).exp()
