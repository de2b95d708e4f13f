"""The formulas of the metrics, per token or per sequence."""

import math

import torch
from torch import Tensor

from gruppo.loss.inputs import LossInputs
from gruppo.loss.level import MAX_LOG_RATIO, token_level
from gruppo.loss.terms import MAX_DELTA


def approx_kl(new_logps_T: Tensor, old_logps_T: Tensor) -> Tensor:
    """k3 of KL(old || new) from tokens drawn from old: r - 1 - log r, r = new / old.

    Never negative; the difference is bounded to +-40.
    """
    return kl_and_ratio(new_logps_T, old_logps_T)[0]


def kl_and_ratio(new_logps_T: Tensor, old_logps_T: Tensor) -> tuple[Tensor, Tensor]:
    """`approx_kl` and the ratio that a token-level loss sees, from one exponential, without gradient."""
    diff_T = (new_logps_T - old_logps_T).clamp_(-MAX_DELTA, MAX_DELTA)
    ratio_T = diff_T.expm1()
    kl_T = (ratio_T - diff_T).clamp_(min=0)
    return kl_T, ratio_T.add_(1).clamp_(max=math.exp(MAX_LOG_RATIO))


def token_ratio(inputs: LossInputs) -> Tensor:
    """The ratio that a token-level loss sees `[T]`."""
    return token_level(inputs).exp()


def sequence_ratio(inputs: LossInputs) -> Tensor:
    """The ratio that a sequence-level loss sees, once per sequence `[S]`."""
    return inputs.segments.mean(token_level(inputs)).exp()


def above(values: Tensor, bound: float) -> Tensor:
    """1.0 where values > bound, else 0.0. A comparison that writes floats takes a third of one that writes bools."""
    return torch.gt(values, bound, out=torch.empty_like(values))


def below(values: Tensor, bound: float) -> Tensor:
    """1.0 where values < bound, else 0.0."""
    return torch.lt(values, bound, out=torch.empty_like(values))
