"""Terms that are added to the policy term: KL to the reference, entropy bonus, pull, likelihood, covariance penalty.

    loss = policy + sum over terms of coef * total,   total = sum_t weight_t * value_t

A term is a name, a coefficient and a value: a part that is called as `value(inputs, log_ratio_T)` and gives `[T]`.
Token weights (`gruppo.loss.weights`) do not touch it. A coefficient of 0 switches it off.

An estimator of the KL takes `delta = logp - ref` `[T]`, bounded to +-40, and the log-ratio `[T]` of the level.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs
from gruppo.loss.parts import describe, part, trait
from gruppo.loss.weights import Share, covariance, covariance_means, cut_below_top

__all__ = [
    "KL_ESTIMATORS", "KL_NAMES", "CovariancePenalty", "Term", "abs_kl", "k1", "k2", "k3", "k3_straight_through",
    "ratio_k1", "ratio_k3",
]  # fmt: skip

MAX_DELTA = 40.0

KLEstimator = Callable[[Tensor, Tensor], Tensor]


@part(per_token=True)
def k1(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """k1 = delta"""
    return delta_T


@part(per_token=True)
def k2(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """k2 = delta^2 / 2"""
    return delta_T.square() / 2


@part(per_token=True)
def k3(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """k3 = exp(-delta) - 1 + delta, never negative"""
    return torch.expm1(-delta_T) + delta_T


@part(per_token=True)
def abs_kl(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """|delta|"""
    return delta_T.abs()


@part(per_token=True)
def ratio_k1(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """r * delta"""
    return log_ratio_T.exp() * delta_T


@part(per_token=True)
def ratio_k3(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """r * k3, the importance-corrected k3 of arXiv:2512.02556; its gradient differs from k3's even at r = 1"""
    return log_ratio_T.exp() * k3(delta_T, log_ratio_T)


@part(per_token=True)
def k3_straight_through(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """the value of k3 with the gradient of k2, which is that of KL(policy || reference) on-policy"""
    slope_T = k2(delta_T, log_ratio_T)
    return slope_T - slope_T.detach() + k3(delta_T, log_ratio_T).detach()


KL_ESTIMATORS: tuple[KLEstimator, ...] = (k1, k2, k3, ratio_k1)
"""The estimators 0 to 3."""

_EVERY_KL = (k1, k2, k3, abs_kl, ratio_k1, ratio_k3, k3_straight_through)
KL_NAMES: dict[str, KLEstimator] = {estimator.__name__: estimator for estimator in _EVERY_KL} | {"absolute": abs_kl}
"""Every estimator by name."""


def resolve_kl(estimator: int | str | KLEstimator) -> KLEstimator:
    """An estimator by its number or name, or the part itself."""
    if callable(estimator):
        return estimator
    if isinstance(estimator, str) and estimator in KL_NAMES:
        return KL_NAMES[estimator]
    if isinstance(estimator, bool) or not isinstance(estimator, int) or not 0 <= estimator < len(KL_ESTIMATORS):
        raise InputError(
            f"kl_estimator must be 0 (k1), 1 (k2), 2 (k3), 3 (ratio*k1) or a function, got {estimator!r}; by name: "
            f"{', '.join(KL_NAMES)}"
        )
    return KL_ESTIMATORS[estimator]


@dataclass(frozen=True)
class Term:
    """`coef * sum_t weight_t * value_t`, added to the loss."""

    name: str
    """Its key in `LossOutput.terms`."""
    coef: float
    """A negative one is a bonus."""
    value: Callable[[LossInputs, Tensor], Tensor]
    place: Literal["policy", "token", "step"] = "token"
    """Place where it is added. "policy": to the surrogate before the token weights, reported within the policy term;
    "token": to the loss of a token; "step": to the loss of the step, as a mean `[]` of its own."""

    def __post_init__(self) -> None:
        if not isinstance(self.coef, int | float) or isinstance(self.coef, bool) or not math.isfinite(self.coef):
            raise InputError(f"the coefficient of {self.name} must be a finite number, got {self.coef!r}")
        if not callable(self.value):
            raise InputError(f"{self.name} must be a function or a part of gruppo.loss, got {self.value!r}")


@part(per_token=lambda kl: trait(kl.estimator, "per_token"), needs={"ref_logps"})
@dataclass(frozen=True)
class ReferenceKL:
    """Penalty towards the reference policy."""

    estimator: KLEstimator

    def __post_init__(self) -> None:
        if not callable(self.estimator):
            raise InputError(f"kl must be a function or a part of gruppo.loss, got {self.estimator!r}")

    def __str__(self) -> str:
        return f"{describe(self.estimator)}, delta = logp - ref"

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        assert inputs.ref_logps is not None, "PolicyLoss checks `needs` before it calls a term"
        delta_T = (inputs.logps - inputs.ref_logps).clamp(-MAX_DELTA, MAX_DELTA)
        return self.estimator(delta_T, log_ratio_T)


@part(per_token=True, needs={"entropies"})
def entropy(inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
    """the policy's entropy"""
    assert inputs.entropies is not None, "PolicyLoss checks `needs` before it calls a term"
    return inputs.entropies


@part(per_token=True)
def squared_log_ratio(inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
    """(log r)^2, which pulls the policy back to the one its ratio is over"""
    return log_ratio_T.square()


@part(per_token=True, zero_without_advantage=True, survey_reads_policy=False)
@dataclass(frozen=True)
class PositiveNLL:
    """mean of -logp over the tokens of the step with A > 0"""

    def survey(self, inputs: LossInputs, log_ratio_T: Tensor) -> dict[str, Tensor]:
        return {"positive_tokens": inputs.segments.sum((inputs.advantages > 0).to(inputs.logps.dtype)).sum()}

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        positive_T = (inputs.advantages > 0).to(inputs.logps.dtype)
        count = inputs.totals.number("positive_tokens").clamp(min=1).to(inputs.logps.dtype)
        return -torch.dot(positive_T, inputs.logps) / count


@part(per_token=True)
@dataclass(frozen=True)
class _HighCovariance(Share):
    share: float

    def __str__(self) -> str:
        return f"|log r| of the {self.share:g} of all tokens with the highest (A - mean A)*(logp - mean logp)"

    def survey(self, inputs: LossInputs, log_ratio_T: Tensor) -> dict[str, Tensor]:
        means = covariance_means(inputs)
        values = covariance(inputs, means)[inputs.segments.mask]
        return means | {"covariance_cut": cut_below_top(values, max(int(self.share * len(values)), 1))}

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        return log_ratio_T.abs() * (covariance(inputs) > inputs.totals.number("covariance_cut"))


def CovariancePenalty(share: float = 2e-4, coef: float = 1.0) -> Term:
    """KL-Cov, arXiv:2505.22617: |log r| of the tokens with the highest covariance of log-prob and advantage.

    `share` of all tokens of the step, at least one; tokens that are equal are taken together.
    """
    return Term("covariance", coef, _HighCovariance(share), place="policy")
