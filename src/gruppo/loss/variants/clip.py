"""The ratio and what bounds it: GRPO and the losses that differ from it by one part."""

from typing import Unpack

from gruppo.errors import InputError
from gruppo.loss.aggregate import ConstantLength, local_token_mean, sequence_mean, token_mean
from gruppo.loss.level import sequence_level, token_level
from gruppo.loss.surrogate import Clip, ClippedWeight, DualClip, SoftGate
from gruppo.loss.variants.named import ClipRange, LossOptions, NamedLoss, read_clip_range


class GRPOLoss(NamedLoss):
    """Group Relative Policy Optimization, arXiv:2402.03300: token ratios, PPO clip, mean over sequences."""

    paper = "arXiv:2402.03300"

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=token_level,
            surrogate=Clip(low, high),
            aggregate=sequence_mean,
            clip_range=(low, high),
            options=options,
        )


class GSPOLoss(NamedLoss):
    """Group Sequence Policy Optimization, arXiv:2507.18071: one ratio per sequence. (The paper clips at 3e-4, 4e-4.)"""

    paper = "arXiv:2507.18071"

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=sequence_level,
            surrogate=Clip(low, high),
            aggregate=sequence_mean,
            clip_range=(low, high),
            options=options,
        )


class SAPOLoss(NamedLoss):
    """Soft Adaptive Policy Optimization, arXiv:2511.20347: a soft gate on the ratio in place of the clip.

    `clip_range` does not enter the loss; it is the band that metrics count. `tau` is one number or
    (positive, negative); the paper uses (1.0, 1.05).
    """

    paper = "arXiv:2511.20347"

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
        super().__init__(
            level=token_level,
            surrogate=SoftGate(positive, negative),
            aggregate=sequence_mean,
            clip_range=read_clip_range(clip_range),
            options=options,
        )


class CISPOLoss(NamedLoss):
    """Clipped IS-weight Policy Optimization, arXiv:2506.13585: the capped ratio weighs log p; mean over tokens.

    The cap is 1 + high; there is no lower bound (`low` is only what metrics count).
    """

    paper = "arXiv:2506.13585"

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range, low_acts=False)
        super().__init__(
            level=token_level,
            surrogate=ClippedWeight(high),
            aggregate=token_mean,
            clip_range=(low, high),
            options=options,
        )


class BNPOLoss(NamedLoss):
    """Clip with the mean over the tokens of the local batch, as `bnpo` of other trainers.

    The one loss that depends on how many ranks and calls share a step, by definition; never on micro-batches. It is
    unrelated to Beta Normalization Policy Optimization, arXiv:2506.02864, which is an advantage.
    """

    paper = "none"

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=token_level,
            surrogate=Clip(low, high),
            aggregate=local_token_mean,
            clip_range=(low, high),
            options=options,
        )


class DRGRPOLoss(NamedLoss):
    """GRPO Done Right, arXiv:2503.20783: a constant length in the mean, so that length earns nothing."""

    paper = "arXiv:2503.20783"

    def __init__(
        self,
        *,
        clip_range: ClipRange = 0.2,
        max_completion_length: int = 1024,
        **options: Unpack[LossOptions],
    ) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=token_level,
            surrogate=Clip(low, high),
            aggregate=ConstantLength(max_completion_length),
            clip_range=(low, high),
            options=options,
        )


class DAPOLoss(NamedLoss):
    """Decoupled Clip and Dynamic sAmpling Policy Optimization, arXiv:2503.14476: clip-higher, mean over tokens."""

    paper = "arXiv:2503.14476"

    def __init__(self, *, clip_range: ClipRange = (0.2, 0.28), **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=token_level,
            surrogate=Clip(low, high),
            aggregate=token_mean,
            clip_range=(low, high),
            options=options,
        )


class DualClipLoss(NamedLoss):
    """GRPO with a cap on the ratio where A < 0, arXiv:1912.09729: a token that comes back likely cannot explode."""

    paper = "arXiv:1912.09729"

    def __init__(self, *, clip_range: ClipRange = 0.2, cap: float = 3.0, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=token_level,
            surrogate=DualClip(low, high, cap),
            aggregate=token_mean,
            clip_range=(low, high),
            options=options,
        )


class TwoSidedLoss(NamedLoss):
    """The two-sided clip of INTELLECT-2, arXiv:2505.07291: -min(min(r, delta)*A, clip(r)*A).

    For A > 0 the clip is reached before delta, so this is `DualClip` under another name.
    """

    paper = "arXiv:2505.07291"

    def __init__(self, *, clip_range: ClipRange = 0.2, delta: float = 4.0, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=token_level,
            surrogate=DualClip(low, high, delta),
            aggregate=token_mean,
            clip_range=(low, high),
            options=options,
        )
