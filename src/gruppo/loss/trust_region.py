"""Trust regions on the token's probability itself: selections that need nothing of the rest of the step.

A ratio says little about a token whose probability is tiny: 1e-6 -> 2e-6 is a ratio of 2 and a change of nothing.
These look at the change of the probability, p - base, where `base` is the trainer's old policy or the sampler.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.base import AgainstBase, Base, check_base
from gruppo.loss.inputs import LossInputs
from gruppo.loss.select import TokenMask


@dataclass(frozen=True)
class TVRegion(AgainstBase, TokenMask):
    """DPPO-TV, arXiv:2602.04879: leaves out a token that has moved too far the way its advantage pushes."""

    low: float = 0.2
    high: float = 0.2
    base: Base = "old"

    def __post_init__(self) -> None:
        _check(self.base, self.low, self.high)

    def __str__(self) -> str:
        return f"keeps p - {self.base} <= {self.high:g} where A > 0, >= -{self.low:g} elsewhere; p = exp(logp)"

    def keep(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        moved_T = inputs.logps.detach().exp() - self.base_logps(inputs).exp()
        return torch.where(inputs.advantages > 0, moved_T <= self.high, moved_T >= -self.low)


@dataclass(frozen=True)
class KLRegion(AgainstBase, TokenMask):
    """DPPO-KL, arXiv:2602.04879: as `TVRegion`, by the KL of "this token or any other" between base and policy."""

    low: float = 0.05
    high: float = 0.05
    base: Base = "old"

    def __post_init__(self) -> None:
        _check(self.base, self.low, self.high)

    def __str__(self) -> str:
        return (
            f"keeps KL2({self.base} || p) <= {self.high:g} or p <= {self.base} where A > 0, "
            f"<= {self.low:g} or p >= {self.base} elsewhere"
        )

    def keep(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        logps_T, base_T = inputs.logps.detach(), self.base_logps(inputs)
        # -expm1(logp) is 1 - p without cancellation; 1e-8 keeps the logarithm of a certain token finite
        rest_T, base_rest_T = -logps_T.expm1() + 1e-8, -base_T.expm1() + 1e-8
        kl_T = base_T.exp() * (base_T - logps_T) + (base_rest_T - 1e-8) * (base_rest_T / rest_T).log()
        is_up_T = logps_T > base_T
        up_T, down_T = (kl_T <= self.high) | ~is_up_T, (kl_T <= self.low) | (logps_T >= base_T)
        return torch.where(inputs.advantages > 0, up_T, down_T)


@dataclass(frozen=True)
class ProbabilityBand(AgainstBase, TokenMask):
    """Leaves out a token whose probability has moved by more than the threshold, whichever way (prime-rl's IPO)."""

    threshold: float = 0.1
    base: Base = "old"

    def __post_init__(self) -> None:
        _check(self.base, self.threshold, self.threshold)

    def __str__(self) -> str:
        return f"keeps |p - {self.base}| <= {self.threshold:g}, p = exp(logp)"

    def keep(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        moved_T = inputs.logps.detach().exp() - self.base_logps(inputs).exp()
        return moved_T.abs() <= self.threshold


def _check(base: str, low: float, high: float) -> None:
    check_base(base)
    if not (low >= 0 and high >= 0):
        raise InputError(f"bounds must be 0 or more, got {low!r} and {high!r}")
