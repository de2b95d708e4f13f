"""Correction for the gap between the sampler's log-probs and the trainer's.

The tokens were drawn from the sampler, whose numbers differ from the trainer's by precision and kernels (and by
staleness). rho = exp(old - sampler) weighs them back. A correction takes LossInputs and gives a weight `[T]`
without gradient that multiplies the policy term, never the KL. A weight of exactly 0 rejects a token; whether it still
counts in the means is PolicyLoss's `rejected`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.base import AgainstBase, Base, check_base
from gruppo.loss.inputs import LossInputs
from gruppo.loss.part import describe, fact

MAX_LOG_RHO = 10.0

RhoLevel = Literal["token", "sequence", "sequence_sum"]
"""A token's own rho, its sequence's geometric mean, or its sequence's product."""

_WORDS = {
    "token": "exp(old - sampler)",
    "sequence": "exp(mean_t(old - sampler))",
    "sequence_sum": "exp(sum_t(old - sampler))",
}


def log_rho(inputs: LossInputs) -> Tensor:
    """old - sampler per token, bounded to +-10, without gradient."""
    assert inputs.sampler_logps is not None, "PolicyLoss checks `needs` before it calls a correction"
    return (inputs.old_logps - inputs.sampler_logps).detach().clamp(-MAX_LOG_RHO, MAX_LOG_RHO)


def rho_at(level: RhoLevel, inputs: LossInputs) -> Tensor:
    """rho of each token at the level, `[T]`. A product over a sequence is bounded like a token's: e^+-10."""
    log_rho_T, segments = log_rho(inputs), inputs.segments
    if level == "sequence":
        log_rho_T = segments.spread(segments.mean(log_rho_T))
    elif level == "sequence_sum":
        log_rho_T = segments.spread(segments.sum(log_rho_T).clamp(-MAX_LOG_RHO, MAX_LOG_RHO))
    return log_rho_T.exp()


class _BoundedRho:
    """What corrections with bounds on rho share: fields `low`, `high` and `level`."""

    needs: ClassVar[frozenset[str]] = frozenset({"sampler_logps"})

    low: float
    high: float
    level: RhoLevel

    @property
    def is_per_token(self) -> bool:
        return self.level == "token"

    def __post_init__(self) -> None:
        _check_bounds(self.low, self.high)
        _check_level(self.level)


@dataclass(frozen=True)
class TruncatedWeight(_BoundedRho):
    """Truncated importance sampling: rho, kept within bounds."""

    weighs_by_rho: ClassVar[bool] = True

    high: float = 2.0
    low: float = 0.0
    level: RhoLevel = "token"

    def __str__(self) -> str:
        return f"clip(rho, {self.low:g}, {self.high:g}), rho = {_WORDS[self.level]}"

    def __call__(self, inputs: LossInputs) -> Tensor:
        return rho_at(self.level, inputs).clamp(self.low, self.high)


@dataclass(frozen=True)
class MaskedWeight(_BoundedRho):
    """IcePop, arXiv:2510.18855: rho where it lies within bounds, else 0.

    With `level="sequence"` a token's rho is the geometric mean over its sequence, with "sequence_sum" the product; the
    sequence is then kept or dropped whole.
    """

    weighs_by_rho: ClassVar[bool] = True

    low: float = 0.5
    high: float = 5.0
    level: RhoLevel = "token"

    def __str__(self) -> str:
        return f"rho where it is in [{self.low:g}, {self.high:g}], else 0; rho = {_WORDS[self.level]}"

    def __call__(self, inputs: LossInputs) -> Tensor:
        rho_T = rho_at(self.level, inputs)
        return torch.where((rho_T >= self.low) & (rho_T <= self.high), rho_T, 0)


@dataclass(frozen=True)
class KeepWithin(_BoundedRho):
    """1 where rho lies within bounds, else 0: a mask alone, to be used with another weight or none.

    Sequence-masked TIS is `Product((TruncatedWeight(), KeepWithin(0.999, 1.002, "sequence")))`.
    """

    low: float = 0.5
    high: float = 2.0
    level: RhoLevel = "token"

    def __str__(self) -> str:
        return f"1 where rho is in [{self.low:g}, {self.high:g}], else 0; rho = {_WORDS[self.level]}"

    def __call__(self, inputs: LossInputs) -> Tensor:
        rho_T = rho_at(self.level, inputs)
        return ((rho_T >= self.low) & (rho_T <= self.high)).to(rho_T.dtype)


@dataclass(frozen=True)
class OffPolicySequenceMask(AgainstBase):
    """OPSM, arXiv:2512.02556: drop a sequence with A < 0 once the policy has moved away from it.

    It has when mean_t(base - logp) exceeds the threshold; `base` is the sampler, or the trainer's old policy.
    """

    is_per_token: ClassVar[bool] = False

    threshold: float = 0.1
    base: Base = "sampler"

    def __post_init__(self) -> None:
        check_base(self.base)

    def __str__(self) -> str:
        return f"0 where A < 0 and mean_t({self.base} - logp) > {self.threshold:g}, else 1"

    def __call__(self, inputs: LossInputs) -> Tensor:
        segments = inputs.segments
        moved_T = segments.spread(segments.mean(self.base_logps(inputs) - inputs.logps.detach()))
        return 1 - ((inputs.advantages < 0) & (moved_T > self.threshold)).to(moved_T.dtype)


@dataclass(frozen=True)
class Product:
    """Several corrections at once: their product. A token that one of them rejects is rejected."""

    parts: tuple[Callable[[LossInputs], Tensor], ...]

    def __post_init__(self) -> None:
        if len(self.parts) < 2 or not all(callable(p) for p in self.parts):
            raise InputError(f"Product takes two or more corrections, got {self.parts!r}")
        if any(hasattr(p, "survey") for p in self.parts):
            raise InputError("Normalized goes around a Product, not into it: Normalized(Product((...)))")

    @property
    def is_per_token(self) -> bool:
        return all(fact(p, "is_per_token") for p in self.parts)

    @property
    def needs(self) -> frozenset[str]:
        return frozenset().union(*(fact(p, "needs") for p in self.parts))

    @property
    def weighs_by_rho(self) -> bool:
        return any(fact(p, "weighs_by_rho") for p in self.parts)

    def __str__(self) -> str:
        return " * ".join(f"({describe(p)})" for p in self.parts)

    def __call__(self, inputs: LossInputs) -> Tensor:
        weight_T = self.parts[0](inputs)
        for part in self.parts[1:]:
            weight_T = weight_T * part(inputs)
        return weight_T


@dataclass(frozen=True)
class Normalized:
    """A correction divided by its mean over the whole step: over tokens, or over sequences if it weighs those."""

    correction: Callable[[LossInputs], Tensor]

    @property
    def is_per_token(self) -> bool:
        return fact(self.correction, "is_per_token")

    @property
    def needs(self) -> frozenset[str]:
        return fact(self.correction, "needs")

    @property
    def weighs_by_rho(self) -> bool:
        return fact(self.correction, "weighs_by_rho")

    def __str__(self) -> str:
        return f"({describe(self.correction)}) / its mean over the step"

    def survey(self, log_ratio_T: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        weight_T, segments = self.correction(inputs), inputs.segments
        if self.is_per_token:
            total, count = segments.sum(weight_T).sum(), segments.length.sum()
        else:
            total, count = segments.mean(weight_T).sum(), (segments.length > 0).sum()
        mean = total.double() / count.clamp(min=1)
        return {"correction_mean": torch.where(mean > 0, mean, 1.0)}

    def __call__(self, inputs: LossInputs) -> Tensor:
        weight_T = self.correction(inputs)
        return weight_T / inputs.totals.number("correction_mean").to(weight_T.dtype)


def _check_bounds(low: float, high: float) -> None:
    if not 0 <= low < high:
        raise InputError(f"bounds must satisfy 0 <= low < high, got low={low:g}, high={high:g}")


def _check_level(level: str) -> None:
    if level not in _WORDS:
        raise InputError(f"level must be 'token' or 'sequence' (or 'sequence_sum'), got {level!r}")


CORRECTIONS: dict[str, Callable[[LossInputs], Tensor]] = {
    "truncate": TruncatedWeight(),
    "truncate_sequence": TruncatedWeight(level="sequence"),
    "truncate_product": TruncatedWeight(level="sequence_sum"),
    "mask": MaskedWeight(),
    "mask_sequence": MaskedWeight(level="sequence"),
    "truncate_mask_sequence": Product((TruncatedWeight(), KeepWithin(0.999, 1.002, "sequence"))),
    "off_policy_mask": OffPolicySequenceMask(),
}
"""Corrections by the name that `TrainConfig.correction` takes."""
