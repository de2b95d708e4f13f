"""What the named losses share: their common keywords, and how a clip range is read."""

import math
from typing import Any, TypedDict

from gruppo.errors import InputError
from gruppo.loss.kl import KLEstimator, resolve_kl
from gruppo.loss.policy import Aggregate, Correction, Level, PolicyLoss, Rejected, Select, Surrogate

ClipRange = float | tuple[float, float]
"""One number for both sides, or (low, high): the ratio may move in [1 - low, 1 + high]."""


class LossOptions(TypedDict, total=False):
    """Keywords that every named loss takes."""

    beta: float  # coefficient of the KL penalty (0: none)
    kl_estimator: int | str | KLEstimator  # 0 k1, 1 k2, 2 k3 (default), 3 ratio*k1, a name, or a function
    entropy_coef: float  # coefficient of the entropy bonus (0: none)
    correction: Correction | None  # weight for the gap between sampler and trainer
    select: Select | None  # which tokens the policy term acts on
    rejected: Rejected  # do tokens that correction or selection drop count in the means?


class NamedLoss(PolicyLoss):
    """A loss with a name and a paper. A subclass names its parts; what it fixes, its keywords cannot change."""

    paper: str = ""
    """arXiv id, or where else it is from."""

    def __init__(
        self,
        *,
        level: Level,
        surrogate: Surrogate,
        aggregate: Aggregate,
        options: LossOptions,
        clip_range: tuple[float, float] | None = None,
        **fixed: Any,
    ) -> None:
        known = LossOptions.__annotations__
        for name in options:
            if name not in known:
                hint = _PEER_NAMES.get(name, f"it takes clip_range, {', '.join(known)}")
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}; {hint}")
            if name in fixed:
                raise TypeError(
                    f"{type(self).__name__}() got an unexpected keyword argument {name!r}; its own {name} is what "
                    "makes it this loss. PolicyLoss takes any composition"
                )
        self.clip_range = clip_range
        given: dict[str, Any] = {name: value for name, value in options.items() if name != "kl_estimator"}
        super().__init__(
            level=level,
            surrogate=surrogate,
            aggregate=aggregate,
            kl=resolve_kl(options.get("kl_estimator", 2)),
            **given,
            **fixed,
        )


_PEER_NAMES = {
    "epsilon": "it is called clip_range here",
    "epsilon_high": "give both sides as clip_range=(low, high)",
    "tau_pos": "give both as tau=(positive, negative)",
    "tau_neg": "give both as tau=(positive, negative)",
}


def read_clip_range(clip_range: ClipRange, *, low_acts: bool = True) -> tuple[float, float]:
    """(low, high) from a number or a pair; refuses what cannot be a trust region.

    With `low_acts=False` the lower side does nothing, and may be any.
    """
    pair = clip_range if isinstance(clip_range, tuple | list) else (clip_range, clip_range)
    if len(pair) != 2 or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in pair):
        raise InputError(f"clip_range must be a number or (low, high), got {clip_range!r}")
    low, high = pair
    if not (low > 0 and high > 0 and math.isfinite(low) and math.isfinite(high)):
        raise InputError(
            f"clip_range must be positive, got {clip_range!r}; it is the distance from 1: 0.2 allows [0.8, 1.2]"
        )
    if low_acts and low > high:
        raise InputError(f"clip_range is (low, high) with low <= high, got {clip_range!r}; did you mean {(high, low)}?")
    return float(low), float(high)
