"""The published losses, each a few lines that name their parts. Equations, papers and peers: `docs/losses.md`."""

import math
from typing import TypedDict, Unpack

from gruppo.errors import InputError
from gruppo.loss.aggregate import ConstantLength, local_token_mean, sequence_mean, token_mean
from gruppo.loss.kl import KLEstimator, resolve_kl
from gruppo.loss.level import sequence_level, token_level
from gruppo.loss.policy import Aggregate, Correction, Level, PolicyLoss, Surrogate
from gruppo.loss.surrogate import Clip, ClippedWeight, SoftGate

ClipRange = float | tuple[float, float]
"""One number for both sides, or (low, high): the ratio may move in [1 - low, 1 + high]."""


class LossOptions(TypedDict, total=False):
    """Keywords that every named loss takes."""

    beta: float  # coefficient of the KL penalty (0: none)
    kl_estimator: int | KLEstimator  # 0 k1, 1 k2, 2 k3 (default), 3 ratio*k1, or a function
    entropy_coef: float  # coefficient of the entropy bonus (0: none)
    correction: Correction | None  # weight for the gap between sampler and trainer


class _NamedLoss(PolicyLoss):
    def __init__(
        self,
        level: Level,
        surrogate: Surrogate,
        aggregate: Aggregate,
        clip_range: tuple[float, float],
        options: LossOptions,
    ) -> None:
        known = LossOptions.__annotations__
        for name in options:
            if name not in known:
                hint = _PEER_NAMES.get(name, f"it takes clip_range, {', '.join(known)}")
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}; {hint}")
        self.clip_range = clip_range
        super().__init__(
            level=level,
            surrogate=surrogate,
            aggregate=aggregate,
            kl=resolve_kl(options.get("kl_estimator", 2)),
            correction=options.get("correction"),
            beta=options.get("beta", 0.0),
            entropy_coef=options.get("entropy_coef", 0.0),
        )


_PEER_NAMES = {
    "epsilon": "it is called clip_range here",
    "epsilon_high": "give both sides as clip_range=(low, high)",
    "tau_pos": "give both as tau=(positive, negative)",
    "tau_neg": "give both as tau=(positive, negative)",
}


class GRPOLoss(_NamedLoss):
    """Group Relative Policy Optimization, arXiv:2402.03300: token ratios, PPO clip, mean over sequences."""

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(token_level, Clip(low, high), sequence_mean, (low, high), options)


class GSPOLoss(_NamedLoss):
    """Group Sequence Policy Optimization, arXiv:2507.18071: one ratio per sequence. (The paper clips at 3e-4, 4e-4.)"""

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(sequence_level, Clip(low, high), sequence_mean, (low, high), options)


class SAPOLoss(_NamedLoss):
    """Soft Adaptive Policy Optimization, arXiv:2511.20347: a soft gate on the ratio in place of the clip.

    `clip_range` does not enter the loss; it is the band that metrics count. `tau` is one number or
    (positive, negative); the paper uses (1.0, 1.05).
    """

    def __init__(
        self,
        *,
        clip_range: ClipRange = 0.2,
        tau: float | tuple[float, float] = 1.0,
        **options: Unpack[LossOptions],
    ) -> None:
        pair = tau if isinstance(tau, tuple | list) else (tau, tau)
        if len(pair) != 2:
            raise InputError(f"tau must be a number or (positive, negative), got {tau!r}")
        positive, negative = pair
        super().__init__(token_level, SoftGate(positive, negative), sequence_mean, read_clip_range(clip_range), options)


class CISPOLoss(_NamedLoss):
    """Clipped IS-weight Policy Optimization, arXiv:2506.13585: the capped ratio weighs log p; mean over tokens.

    The cap is 1 + high; there is no lower bound (`low` is only what metrics count).
    """

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(token_level, ClippedWeight(high), token_mean, (low, high), options)


class BNPOLoss(_NamedLoss):
    """Clip with the mean over the tokens of the local batch, as `bnpo` of other trainers.

    The one loss that depends on how many ranks and calls share a step, by definition; never on micro-batches. It is
    unrelated to Beta Normalization Policy Optimization, arXiv:2506.02864, which is an advantage.
    """

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(token_level, Clip(low, high), local_token_mean, (low, high), options)


class DRGRPOLoss(_NamedLoss):
    """GRPO Done Right, arXiv:2503.20783: a constant length in the mean, so that length earns nothing."""

    def __init__(
        self,
        *,
        clip_range: ClipRange = 0.2,
        max_completion_length: int = 1024,
        **options: Unpack[LossOptions],
    ) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(token_level, Clip(low, high), ConstantLength(max_completion_length), (low, high), options)


class DAPOLoss(_NamedLoss):
    """Decoupled Clip and Dynamic sAmpling Policy Optimization, arXiv:2503.14476: clip-higher, mean over tokens."""

    def __init__(self, *, clip_range: ClipRange = (0.2, 0.28), **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(token_level, Clip(low, high), token_mean, (low, high), options)


def read_clip_range(clip_range: ClipRange) -> tuple[float, float]:
    """(low, high) from a number or a pair; refuses what cannot be a trust region."""
    pair = clip_range if isinstance(clip_range, tuple | list) else (clip_range, clip_range)
    if len(pair) != 2 or not all(isinstance(x, int | float) and not isinstance(x, bool) for x in pair):
        raise InputError(f"clip_range must be a number or (low, high), got {clip_range!r}")
    low, high = pair
    if not (low > 0 and high > 0 and math.isfinite(low) and math.isfinite(high)):
        raise InputError(
            f"clip_range must be positive, got {clip_range!r}; it is the distance from 1: 0.2 allows [0.8, 1.2]"
        )
    if low > high:
        raise InputError(f"clip_range is (low, high) with low <= high, got {clip_range!r}; did you mean {(high, low)}?")
    return float(low), float(high)
