"""KL penalties towards the reference policy, per token.

Each takes `delta = logp - ref` `[T]`, bounded to +-40, and the log-ratio `[T]` of the level, and gives `[T]`.
Facts about their gradients on-policy (arXiv:2506.09477, 2512.21852): k1's has mean 0, k2's is that of
KL(policy || reference), k3's is that of KL(reference || policy).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.part import says

MAX_DELTA = 40.0

KLEstimator = Callable[[Tensor, Tensor], Tensor]


@says(is_per_token=True)
def k1(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """k1 = delta"""
    return delta_T


@says(is_per_token=True)
def k2(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """k2 = delta^2 / 2"""
    return delta_T.square() / 2


@says(is_per_token=True)
def k3(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """k3 = exp(-delta) - 1 + delta, never negative"""
    return torch.expm1(-delta_T) + delta_T


@says(is_per_token=True)
def absolute(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """|delta|"""
    return delta_T.abs()


@says(is_per_token=True)
def ratio_k1(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """r * delta"""
    return log_ratio_T.exp() * delta_T


@says(is_per_token=True)
def ratio_k3(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """r * k3, the importance-corrected k3 of arXiv:2512.02556; its gradient differs from k3's even at r = 1"""
    return log_ratio_T.exp() * k3(delta_T, log_ratio_T)


@says(is_per_token=True)
def k3_straight_through(delta_T: Tensor, log_ratio_T: Tensor) -> Tensor:
    """the value of k3 with the gradient of k2, which is that of KL(policy || reference) on-policy"""
    slope_T = k2(delta_T, log_ratio_T)
    return slope_T - slope_T.detach() + k3(delta_T, log_ratio_T).detach()


KL_ESTIMATORS: tuple[KLEstimator, ...] = (k1, k2, k3, ratio_k1)
"""The estimators 0 to 3."""

KL_NAMES: dict[str, KLEstimator] = {
    part.__name__: part for part in (k1, k2, k3, absolute, ratio_k1, ratio_k3, k3_straight_through)
}
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
