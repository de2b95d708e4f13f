"""Losses that act on some tokens of the step only."""

from typing import Unpack

from gruppo.loss.aggregate import token_mean
from gruppo.loss.level import token_level
from gruppo.loss.select import ClipCovariance, CovariancePenalty, TopEntropy
from gruppo.loss.surrogate import Clip, PolicyGradient
from gruppo.loss.variants.named import ClipRange, LossOptions, NamedLoss, read_clip_range


class TopEntropyLoss(NamedLoss):
    """Beyond the 80/20 rule, arXiv:2506.01939: DAPO's loss on the fifth of all tokens with the highest entropy."""

    paper = "arXiv:2506.01939"

    def __init__(
        self, *, clip_range: ClipRange = (0.2, 0.28), share: float = 0.2, **options: Unpack[LossOptions]
    ) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=token_level,
            surrogate=Clip(low, high),
            aggregate=token_mean,
            clip_range=(low, high),
            options=options,
            select=TopEntropy(share),
        )


class ClipCovLoss(NamedLoss):
    """Clip-Cov, arXiv:2505.22617: a few random tokens of high covariance are left out, to keep the entropy up."""

    paper = "arXiv:2505.22617"

    def __init__(
        self,
        *,
        clip_range: ClipRange = 0.2,
        share: float = 2e-4,
        bounds: tuple[float, float] = (1.0, 5.0),
        seed: int = 0,
        **options: Unpack[LossOptions],
    ) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=token_level,
            surrogate=Clip(low, high),
            aggregate=token_mean,
            clip_range=(low, high),
            options=options,
            select=ClipCovariance(share, *bounds, clip=(low, high), seed=seed),
        )


class KLCovLoss(NamedLoss):
    """KL-Cov, arXiv:2505.22617: the few tokens of highest covariance pay for every move of their ratio."""

    paper = "arXiv:2505.22617"

    def __init__(self, *, share: float = 2e-4, coef: float = 1.0, **options: Unpack[LossOptions]) -> None:
        super().__init__(
            level=token_level,
            surrogate=PolicyGradient(),
            aggregate=token_mean,
            options=options,
            select=CovariancePenalty(share, coef),
        )
