"""Correction for the gap between the sampler's log-probs and the trainer's.

The tokens were drawn from the sampler, whose numbers differ from the trainer's by precision and kernels (and by
staleness). rho = exp(old - sampler) weighs them back. A correction takes LossInputs and gives a weight `[T]`
without gradient that multiplies the policy term, never the KL.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs

MAX_LOG_RHO = 10.0


def log_rho(inputs: LossInputs) -> Tensor:
    """old - sampler per token, bounded to +-10, without gradient."""
    assert inputs.sampler_logps is not None, "PolicyLoss checks `needs` before it calls a correction"
    return (inputs.old_logps - inputs.sampler_logps).detach().clamp(-MAX_LOG_RHO, MAX_LOG_RHO)


@dataclass(frozen=True)
class TruncatedWeight:
    """Truncated importance sampling: rho, kept within bounds."""

    is_per_token: ClassVar[bool] = True

    high: float = 2.0
    low: float = 0.0

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)

    def __str__(self) -> str:
        return f"clip(rho, {self.low:g}, {self.high:g}), rho = exp(old - sampler)"

    def __call__(self, inputs: LossInputs) -> Tensor:
        return log_rho(inputs).exp().clamp(self.low, self.high)


@dataclass(frozen=True)
class MaskedWeight:
    """IcePop, arXiv:2510.18855: rho where it lies within bounds, else 0.

    With `level="sequence"` a token's rho is the geometric mean over its sequence, which is kept or dropped whole.
    """

    low: float = 0.5
    high: float = 5.0
    level: Literal["token", "sequence"] = "token"

    @property
    def is_per_token(self) -> bool:
        return self.level == "token"

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)
        if self.level not in ("token", "sequence"):
            raise InputError(f"level must be 'token' or 'sequence', got {self.level!r}")

    def __str__(self) -> str:
        rho = "rho = exp(old - sampler)" if self.level == "token" else "rho = exp(mean_t(old - sampler))"
        return f"rho where it is in [{self.low:g}, {self.high:g}], else 0; {rho}"

    def __call__(self, inputs: LossInputs) -> Tensor:
        log_rho_T = log_rho(inputs)
        if self.level == "sequence":
            log_rho_T = inputs.segments.spread(inputs.segments.mean(log_rho_T))
        rho_T = log_rho_T.exp()
        return torch.where((rho_T >= self.low) & (rho_T <= self.high), rho_T, 0)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise InputError(f"bounds must satisfy 0 <= low < high, got low={low:g}, high={high:g}")
