"""The log-prob itself in place of a ratio, and a loss that imitates what went well."""

from typing import Unpack

from gruppo.loss.aggregate import sequence_mean_token_sum, token_mean
from gruppo.loss.level import token_level
from gruppo.loss.surrogate import Clip, LogProb
from gruppo.loss.variants.named import ClipRange, LossOptions, NamedLoss, read_clip_range


class REINFORCELoss(NamedLoss):
    """REINFORCE (Williams 1992): the gradient of the expected reward; sum over a sequence, mean over sequences."""

    paper = "Williams 1992"

    def __init__(self, **options: Unpack[LossOptions]) -> None:
        super().__init__(level=token_level, surrogate=LogProb(), aggregate=sequence_mean_token_sum, options=options)


class GPGLoss(NamedLoss):
    """Group Policy Gradient, arXiv:2504.02546: -A*logp, mean over tokens. Its factor alpha belongs to the advantage."""

    paper = "arXiv:2504.02546"

    def __init__(self, **options: Unpack[LossOptions]) -> None:
        super().__init__(level=token_level, surrogate=LogProb(), aggregate=token_mean, options=options)


class DROLoss(NamedLoss):
    """Direct Reward Optimization, arXiv:2405.19107: -(A*logp - strength/2 * (log r)^2); off-policy by design."""

    paper = "arXiv:2405.19107"

    def __init__(self, *, strength: float = 0.1, **options: Unpack[LossOptions]) -> None:
        super().__init__(
            level=token_level, surrogate=LogProb(), aggregate=token_mean, options=options, pull=strength / 2
        )


class VAPOLoss(NamedLoss):
    """The policy loss of VAPO, arXiv:2504.05118: DAPO's, plus the mean negative log-likelihood of what went well.

    What went well are the tokens with A > 0: a loss sees no rewards. With 0/1 rewards and group baselines these are
    the correct completions of every group that has a wrong one.
    """

    paper = "arXiv:2504.05118"

    def __init__(
        self, *, clip_range: ClipRange = (0.2, 0.28), nll_coef: float = 0.1, **options: Unpack[LossOptions]
    ) -> None:
        low, high = read_clip_range(clip_range)
        super().__init__(
            level=token_level,
            surrogate=Clip(low, high),
            aggregate=token_mean,
            clip_range=(low, high),
            options=options,
            nll_coef=nll_coef,
        )
