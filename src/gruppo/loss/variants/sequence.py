"""One ratio per sequence."""

import math
from typing import Unpack

from gruppo.loss.aggregate import sequence_mean, sequence_mean_token_sum, token_mean
from gruppo.loss.level import ClippedMean, CorrectedSum, sequence_level, sequence_sum_level, sequence_token_level
from gruppo.loss.surrogate import Clip, GammaWeight, PolicyGradient
from gruppo.loss.variants.named import ClipRange, LossOptions, NamedLoss, read_clip_range


class GSPOTokenLoss(NamedLoss):
    """GSPO-token, arXiv:2507.18071: the sequence's ratio with the token's gradient; admits one advantage per token."""

    paper = "arXiv:2507.18071"

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=sequence_token_level,
            surrogate=Clip(low, high),
            aggregate=sequence_mean,
            clip_range=(low, high),
            options=options,
        )


class GMPOLoss(NamedLoss):
    """Geometric-Mean Policy Optimization, arXiv:2507.20673: token ratios clipped in log space, then their mean.

    `log_clip` is the distance in log space, one number or (low, high).
    """

    paper = "arXiv:2507.20673"

    def __init__(self, *, log_clip: ClipRange = 0.4, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(log_clip)
        super().__init__(
            level=ClippedMean(low, high),
            surrogate=PolicyGradient(),
            aggregate=sequence_mean,
            clip_range=(-math.expm1(-low), math.expm1(high)),
            options=options,
        )


class LUSPOLoss(NamedLoss):
    """Length-Unbiased Sequence Policy Optimization, arXiv:2602.05261: GSPO times the sequence's length.

    (The paper clips at 2e-3, 2.5e-3.)
    """

    paper = "arXiv:2602.05261"

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=sequence_level,
            surrogate=Clip(low, high),
            aggregate=sequence_mean_token_sum,
            clip_range=(low, high),
            options=options,
        )


class VESPOLoss(NamedLoss):
    """VESPO, arXiv:2602.10693: a soft weight on the product of a sequence's ratios.

    `positive` and `negative` are (k, lambda) of the weight for each sign of the advantage. A `correction` goes into the
    product, not in front of the loss.
    """

    paper = "arXiv:2602.10693"

    def __init__(
        self,
        *,
        positive: tuple[float, float] = (2.0, 3.0),
        negative: tuple[float, float] = (3.0, 2.0),
        **options: Unpack[LossOptions],
    ) -> None:
        correction = options.pop("correction", None)
        super().__init__(
            level=sequence_sum_level if correction is None else CorrectedSum(correction),
            surrogate=GammaWeight(positive, negative),
            aggregate=token_mean,
            options=options,
        )
