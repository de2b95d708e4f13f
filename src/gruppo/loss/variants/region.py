"""Other trust regions than a clip of the ratio: on the probability, on the second moment, against two policies."""

import math
from typing import Unpack

from gruppo.loss.aggregate import token_mean
from gruppo.loss.base import Base
from gruppo.loss.correction import TruncatedWeight
from gruppo.loss.level import sampler_level, token_level
from gruppo.loss.select import SecondMoment
from gruppo.loss.surrogate import Clip, ClippedWeight, PolicyGradient
from gruppo.loss.trust_region import KLRegion, ProbabilityBand, TVRegion
from gruppo.loss.variants.named import ClipRange, LossOptions, NamedLoss, read_clip_range


class DPPOTVLoss(NamedLoss):
    """Divergence PPO by total variation, arXiv:2602.04879: probabilities may move by `region`, ratios by any.

    `anchor="sampler"` takes ratio and region over the sampler's own log-probs, which is the authors' form; "old" takes
    both over the trainer's, which is verl's form. (The authors' ablation takes the region alone over the trainer's.)
    """

    paper = "arXiv:2602.04879"

    def __init__(
        self, *, region: ClipRange = 0.2, cap: float = 20.0, anchor: Base = "old", **options: Unpack[LossOptions]
    ) -> None:
        low, high = read_clip_range(region)
        super().__init__(
            level=sampler_level if anchor == "sampler" else token_level,
            surrogate=ClippedWeight(cap - 1),
            aggregate=token_mean,
            options=options,
            select=TVRegion(low, high, anchor),
        )


class DPPOKLLoss(NamedLoss):
    """Divergence PPO by the KL of "this token or any other", arXiv:2602.04879. `anchor` as for `DPPOTVLoss`."""

    paper = "arXiv:2602.04879"

    def __init__(
        self, *, region: ClipRange = 0.05, cap: float = 20.0, anchor: Base = "old", **options: Unpack[LossOptions]
    ) -> None:
        low, high = read_clip_range(region)
        super().__init__(
            level=sampler_level if anchor == "sampler" else token_level,
            surrogate=ClippedWeight(cap - 1),
            aggregate=token_mean,
            options=options,
            select=KLRegion(low, high, anchor),
        )


class PrimeLoss(NamedLoss):
    """The default loss of prime-rl, arXiv:2602.02276: ratio over the sampler, DPPO's region, a pull of (log r)^2."""

    paper = "arXiv:2602.02276"

    def __init__(self, *, region: ClipRange = 0.2, pull: float = 1e-3, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(region)
        super().__init__(
            level=sampler_level,
            surrogate=PolicyGradient(),
            aggregate=token_mean,
            options=options,
            select=TVRegion(low, high, "sampler"),
            pull=pull,
        )


class IPOLoss(NamedLoss):
    """prime-rl's IPO: as `PrimeLoss`, with a region that bounds moves both ways. Unrelated to IPO of preferences."""

    paper = "prime-rl"

    def __init__(self, *, threshold: float = 0.1, pull: float = 1e-3, **options: Unpack[LossOptions]) -> None:
        super().__init__(
            level=sampler_level,
            surrogate=PolicyGradient(),
            aggregate=token_mean,
            options=options,
            select=ProbabilityBand(threshold, "sampler"),
            pull=pull,
        )


class M2POLoss(NamedLoss):
    """Second-Moment Trust PO, arXiv:2510.01161: no clip; tokens that make the mean of (log r)^2 too large go."""

    paper = "arXiv:2510.01161"

    def __init__(self, *, threshold: float = 0.04, **options: Unpack[LossOptions]) -> None:
        super().__init__(
            level=token_level,
            surrogate=PolicyGradient(),
            aggregate=token_mean,
            options=options,
            select=SecondMoment(threshold),
        )


class DecoupledPPOLoss(NamedLoss):
    """Decoupled PPO (AReaL), arXiv:2505.24298: clip around the trainer's old policy, weight over the sampler.

    `correction` defaults to rho itself, without a bound.
    """

    paper = "arXiv:2505.24298"

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        options.setdefault("correction", TruncatedWeight(high=math.inf))
        super().__init__(
            level=token_level,
            surrogate=Clip(low, high),
            aggregate=token_mean,
            clip_range=(low, high),
            options=options,
        )
