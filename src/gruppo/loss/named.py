"""Named losses, each a few lines that list its parts. `docs/losses.md` has equations and papers.

To add one, write a class here: `name` registers it in LOSSES, `__all__` makes it public. Parts passed to
`super().__init__` cannot be changed by keywords.
"""

import math
from typing import Any, ClassVar, TypedDict, Unpack

from gruppo.errors import InputError
from gruppo.loss.parts import (
    Clip,
    ClippedMean,
    ClippedWeight,
    ConstantLength,
    DualClip,
    GammaWeight,
    LogProb,
    PolicyGradient,
    SoftGate,
    local_token_mean,
    sampler_level,
    sequence_level,
    sequence_mean,
    sequence_mean_token_sum,
    sequence_sum_level,
    sequence_token_level,
    token_level,
    token_mean,
)
from gruppo.loss.policy import PolicyLoss, Rejected, Weights
from gruppo.loss.terms import CovariancePenalty, KLEstimator, resolve_kl
from gruppo.loss.weights import (
    Anchor,
    ClipCovariance,
    CorrectedSum,
    KLRegion,
    ProbabilityBand,
    SecondMoment,
    TopEntropy,
    TruncatedWeight,
    TVRegion,
)

__all__ = [
    "LOSSES", "BNPOLoss", "CISPOLoss", "ClipCovLoss", "DAPOLoss", "DPPOKLLoss", "DPPOTVLoss", "DRGRPOLoss", "DROLoss",
    "DecoupledPPOLoss", "DualClipLoss", "GMPOLoss", "GPGLoss", "GRPOLoss", "GSPOLoss", "GSPOTokenLoss", "IPOLoss",
    "KLCovLoss", "LUSPOLoss", "LossOptions", "M2POLoss", "NamedLoss", "PrimeRLLoss", "REINFORCELoss", "SAPOLoss",
    "TopEntropyLoss", "TwoSidedLoss", "VAPOLoss", "VESPOLoss",
]  # fmt: skip

ClipRange = float | tuple[float, float]
"""One number for both sides, or (low, high): the ratio may move within [1 - low, 1 + high]."""

LOSSES: dict[str, type["NamedLoss"]] = {}
"""Losses by the name that `TrainConfig.loss` takes."""


class LossOptions(TypedDict, total=False):
    """Keywords that every named loss takes."""

    beta: float  # coefficient of the KL penalty (0: none)
    kl_estimator: int | str | KLEstimator  # 0 k1, 1 k2, 2 k3 (default), 3 ratio*k1, a name, or a function
    entropy_coef: float  # coefficient of the entropy bonus (0: none)
    correction: Weights  # weights for the gap between sampler and trainer
    select: Weights  # tokens the policy term acts on
    rejected: Rejected  # do tokens that correction or selection drop count in the means?


class NamedLoss(PolicyLoss):
    """A loss with a name and a paper: `class MyLoss(NamedLoss, paper="mine")`.

    Its constructor takes its own keywords and `**options`, and hands the options on beside the parts it fixes.
    """

    paper: ClassVar[str] = ""
    """arXiv id, or another source."""

    def __init_subclass__(cls, name: str | None = None, paper: str = "") -> None:
        cls.paper = paper
        if name is not None:
            assert name not in LOSSES, name
            LOSSES[name] = cls

    def __init__(self, *, options: LossOptions, **parts: Any) -> None:
        known = LossOptions.__annotations__
        for name in options:
            if name not in known:
                hint = _PEER_NAMES.get(name, f"it takes clip_range, {', '.join(known)}")
                raise TypeError(f"{type(self).__name__}() got an unexpected keyword argument {name!r}; {hint}")
            if name in parts:
                raise TypeError(
                    f"{type(self).__name__}() got an unexpected keyword argument {name!r}; its own {name} is what "
                    "makes it this loss. PolicyLoss takes any composition"
                )
        given: dict[str, Any] = {name: value for name, value in options.items() if name != "kl_estimator"}
        super().__init__(kl=resolve_kl(options.get("kl_estimator", 2)), **given, **parts)


_PEER_NAMES = {
    "epsilon": "it is called clip_range here",
    "epsilon_high": "give both sides as clip_range=(low, high)",
    "tau_pos": "give both as tau=(positive, negative)",
    "tau_neg": "give both as tau=(positive, negative)",
}


def read_clip_range(clip_range: ClipRange, *, low_acts: bool = True) -> tuple[float, float]:
    """(low, high) from a number or a pair; an error if it cannot be a trust region.

    With `low_acts=False` the lower side does nothing and may be anything.
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


def _clip(clip_range: ClipRange) -> Clip:
    return Clip(*read_clip_range(clip_range))


def _divergence_ppo(region: TVRegion | KLRegion, cap: float) -> dict[str, Any]:
    """Parts of DPPO: a region in place of a clip, with ratios over the policy at its centre."""
    level = sampler_level if region.base == "sampler" else token_level
    return {"level": level, "surrogate": ClippedWeight(cap - 1), "select": region, "aggregate": token_mean}


# --- the ratio and what bounds it -----------------------------------------------------------------------------------


class GRPOLoss(NamedLoss, name="grpo", paper="arXiv:2402.03300"):
    """Group Relative Policy Optimization, arXiv:2402.03300: token ratios, PPO clip, mean over sequences."""

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        super().__init__(surrogate=_clip(clip_range), aggregate=sequence_mean, options=options)


class GSPOLoss(NamedLoss, name="gspo", paper="arXiv:2507.18071"):
    """Group Sequence Policy Optimization, arXiv:2507.18071: one ratio per sequence. (The paper clips at 3e-4, 4e-4.)"""

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        super().__init__(level=sequence_level, surrogate=_clip(clip_range), aggregate=sequence_mean, options=options)


class SAPOLoss(NamedLoss, name="sapo", paper="arXiv:2511.20347"):
    """Soft Adaptive Policy Optimization, arXiv:2511.20347: a soft gate on the ratio in place of the clip.

    `clip_range` does not enter the loss; it is the band that metrics count. `tau` is one number or
    (positive, negative); the paper uses (1.0, 1.05).
    """

    def __init__(
        self, *, clip_range: ClipRange = 0.2, tau: float | tuple[float, float] = 1.0, **options: Unpack[LossOptions]
    ) -> None:
        pair = tau if isinstance(tau, tuple | list) else (tau, tau)
        if len(pair) != 2:
            raise InputError(f"tau must be a number or (positive, negative), got {tau!r}")
        band = read_clip_range(clip_range)
        super().__init__(surrogate=SoftGate(*pair), aggregate=sequence_mean, clip_range=band, options=options)


class CISPOLoss(NamedLoss, name="cispo", paper="arXiv:2506.13585"):
    """Clipped IS-weight Policy Optimization, arXiv:2506.13585: the capped ratio weighs log p; mean over tokens.

    The cap is 1 + high; there is no lower bound (`low` is only what metrics count).
    """

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        band = read_clip_range(clip_range, low_acts=False)
        super().__init__(surrogate=ClippedWeight(band[1]), aggregate=token_mean, clip_range=band, options=options)


class BNPOLoss(NamedLoss, name="bnpo", paper="none"):
    """Clip with the mean over the tokens of the local batch, as `bnpo` of other trainers.

    There it is a micro-batch. In a run here it is the whole update, over all micro-batches and ranks; totals of your
    own may name a smaller one.
    """

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        super().__init__(surrogate=_clip(clip_range), aggregate=local_token_mean, options=options)


class DRGRPOLoss(NamedLoss, name="drgrpo", paper="arXiv:2503.20783"):
    """GRPO Done Right, arXiv:2503.20783: a constant length in the mean, so that length earns nothing."""

    def __init__(
        self, *, clip_range: ClipRange = 0.2, max_completion_length: int = 1024, **options: Unpack[LossOptions]
    ) -> None:
        constant = ConstantLength(max_completion_length)
        super().__init__(surrogate=_clip(clip_range), aggregate=constant, options=options)


class DAPOLoss(NamedLoss, name="dapo", paper="arXiv:2503.14476"):
    """Decoupled Clip and Dynamic sAmpling Policy Optimization, arXiv:2503.14476: clip-higher, mean over tokens."""

    def __init__(self, *, clip_range: ClipRange = (0.2, 0.28), **options: Unpack[LossOptions]) -> None:
        super().__init__(surrogate=_clip(clip_range), aggregate=token_mean, options=options)


class DualClipLoss(NamedLoss, name="dual_clip", paper="arXiv:1912.09729"):
    """GRPO with a cap on the ratio where A < 0, arXiv:1912.09729: bounds the loss of a token that becomes likely."""

    def __init__(self, *, clip_range: ClipRange = 0.2, cap: float = 3.0, **options: Unpack[LossOptions]) -> None:
        surrogate = DualClip(*read_clip_range(clip_range), cap)
        super().__init__(surrogate=surrogate, aggregate=token_mean, options=options)


class TwoSidedLoss(NamedLoss, name="two_sided", paper="arXiv:2505.07291"):
    """The two-sided clip of INTELLECT-2, arXiv:2505.07291: -min(min(r, delta)*A, clip(r)*A)."""

    def __init__(self, *, clip_range: ClipRange = 0.2, delta: float = 4.0, **options: Unpack[LossOptions]) -> None:
        surrogate = DualClip(*read_clip_range(clip_range), delta)
        super().__init__(surrogate=surrogate, aggregate=token_mean, options=options)


# --- one ratio per sequence -----------------------------------------------------------------------------------------


class GSPOTokenLoss(NamedLoss, name="gspo_token", paper="arXiv:2507.18071"):
    """GSPO-token, arXiv:2507.18071: the sequence's ratio with the token's gradient; admits one advantage per token."""

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        clip = _clip(clip_range)
        super().__init__(level=sequence_token_level, surrogate=clip, aggregate=sequence_mean, options=options)


class GMPOLoss(NamedLoss, name="gmpo", paper="arXiv:2507.20673"):
    """Geometric-Mean Policy Optimization, arXiv:2507.20673: token ratios clipped in log space, then their mean.

    `log_clip` is the distance in log space, one number or (low, high).
    """

    def __init__(self, *, log_clip: ClipRange = 0.4, **options: Unpack[LossOptions]) -> None:
        low, high = read_clip_range(log_clip)
        parts = {"level": ClippedMean(low, high), "surrogate": PolicyGradient(), "aggregate": sequence_mean}
        super().__init__(**parts, clip_range=(-math.expm1(-low), math.expm1(high)), options=options)


class LUSPOLoss(NamedLoss, name="luspo", paper="arXiv:2602.05261"):
    """Length-Unbiased Sequence Policy Optimization, arXiv:2602.05261: GSPO times the sequence's length."""

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        clip = _clip(clip_range)
        super().__init__(level=sequence_level, surrogate=clip, aggregate=sequence_mean_token_sum, options=options)


class VESPOLoss(NamedLoss, name="vespo", paper="arXiv:2602.10693"):
    """VESPO, arXiv:2602.10693: a soft weight on the product of a sequence's ratios.

    `positive` and `negative` are (k, lambda) of the weight for each sign of the advantage. A `correction` goes into the
    product, not in front of the loss.
    """

    def __init__(
        self,
        *,
        positive: tuple[float, float] = (2.0, 3.0),
        negative: tuple[float, float] = (3.0, 2.0),
        **options: Unpack[LossOptions],
    ) -> None:
        correction = options.pop("correction", None)
        level = sequence_sum_level if correction is None else CorrectedSum(correction)
        super().__init__(level=level, surrogate=GammaWeight(positive, negative), aggregate=token_mean, options=options)


# --- other trust regions: on the probability, on the second moment, against two policies ----------------------------


class DPPOTVLoss(NamedLoss, name="dppo_tv", paper="arXiv:2602.04879"):
    """Divergence PPO by total variation, arXiv:2602.04879: probabilities may move by `region`, ratios by any.

    `anchor="sampler"` takes ratio and region over the sampler's own log-probs, "old" both over the trainer's.
    """

    def __init__(
        self, *, region: ClipRange = 0.2, cap: float = 20.0, anchor: Anchor = "old", **options: Unpack[LossOptions]
    ) -> None:
        around = TVRegion(*read_clip_range(region), anchor)
        super().__init__(**_divergence_ppo(around, cap), options=options)


class DPPOKLLoss(NamedLoss, name="dppo_kl", paper="arXiv:2602.04879"):
    """Divergence PPO by the KL of "this token or any other", arXiv:2602.04879. `anchor` as for `DPPOTVLoss`."""

    def __init__(
        self, *, region: ClipRange = 0.05, cap: float = 20.0, anchor: Anchor = "old", **options: Unpack[LossOptions]
    ) -> None:
        around = KLRegion(*read_clip_range(region), anchor)
        super().__init__(**_divergence_ppo(around, cap), options=options)


class PrimeRLLoss(NamedLoss, name="prime", paper="arXiv:2602.02276"):
    """The default loss of prime-rl, arXiv:2602.02276: ratio over the sampler, DPPO's region, a pull of (log r)^2."""

    def __init__(self, *, region: ClipRange = 0.2, pull: float = 1e-3, **options: Unpack[LossOptions]) -> None:
        parts = {"level": sampler_level, "surrogate": PolicyGradient(), "aggregate": token_mean}
        super().__init__(**parts, select=TVRegion(*read_clip_range(region), "sampler"), pull=pull, options=options)


class IPOLoss(NamedLoss, name="ipo", paper="prime-rl"):
    """prime-rl's IPO: as `PrimeRLLoss`, with a region that bounds moves both ways. Unrelated to IPO of preferences."""

    def __init__(self, *, threshold: float = 0.1, pull: float = 1e-3, **options: Unpack[LossOptions]) -> None:
        parts = {"level": sampler_level, "surrogate": PolicyGradient(), "aggregate": token_mean}
        super().__init__(**parts, select=ProbabilityBand(threshold, "sampler"), pull=pull, options=options)


class M2POLoss(NamedLoss, name="m2po", paper="arXiv:2510.01161"):
    """Second-Moment Trust PO, arXiv:2510.01161: no clip; tokens that make the mean of (log r)^2 too large go."""

    def __init__(self, *, threshold: float = 0.04, **options: Unpack[LossOptions]) -> None:
        moment = SecondMoment(threshold)
        super().__init__(surrogate=PolicyGradient(), select=moment, aggregate=token_mean, options=options)


class DecoupledPPOLoss(NamedLoss, name="decoupled_ppo", paper="arXiv:2505.24298"):
    """Decoupled PPO (AReaL), arXiv:2505.24298: clip around the trainer's old policy, weight over the sampler.

    `correction` defaults to rho itself, without a bound.
    """

    def __init__(self, *, clip_range: ClipRange = 0.2, **options: Unpack[LossOptions]) -> None:
        options.setdefault("correction", TruncatedWeight(high=math.inf))
        super().__init__(surrogate=_clip(clip_range), aggregate=token_mean, options=options)


# --- some tokens of the step only -----------------------------------------------------------------------------------


class TopEntropyLoss(NamedLoss, name="top_entropy", paper="arXiv:2506.01939"):
    """Beyond the 80/20 rule, arXiv:2506.01939: DAPO's loss on the fifth of all tokens with the highest entropy."""

    def __init__(
        self, *, clip_range: ClipRange = (0.2, 0.28), share: float = 0.2, **options: Unpack[LossOptions]
    ) -> None:
        select = TopEntropy(share)
        super().__init__(surrogate=_clip(clip_range), select=select, aggregate=token_mean, options=options)


class ClipCovLoss(NamedLoss, name="clip_cov", paper="arXiv:2505.22617"):
    """Clip-Cov, arXiv:2505.22617: a few random tokens of high covariance are left out, to keep the entropy up."""

    def __init__(
        self,
        *,
        clip_range: ClipRange = 0.2,
        share: float = 2e-4,
        bounds: tuple[float, float] = (1.0, 5.0),
        seed: int = 0,
        **options: Unpack[LossOptions],
    ) -> None:
        clip = read_clip_range(clip_range)
        select = ClipCovariance(share, *bounds, clip=clip, seed=seed)
        super().__init__(surrogate=Clip(*clip), select=select, aggregate=token_mean, options=options)


class KLCovLoss(NamedLoss, name="kl_cov", paper="arXiv:2505.22617"):
    """KL-Cov, arXiv:2505.22617: the few tokens of highest covariance pay for every move of their ratio."""

    def __init__(self, *, share: float = 2e-4, coef: float = 1.0, **options: Unpack[LossOptions]) -> None:
        # select=None refuses a selection: the paper's penalty acts beside all tokens
        parts = {"surrogate": PolicyGradient(), "select": None, "aggregate": token_mean}
        super().__init__(**parts, terms=(CovariancePenalty(share, coef),), options=options)


# --- no ratio; and the likelihood of positive tokens ----------------------------------------------------------------


class REINFORCELoss(NamedLoss, name="reinforce", paper="Williams 1992"):
    """REINFORCE (Williams 1992): the gradient of the expected reward; sum over a sequence, mean over sequences."""

    def __init__(self, **options: Unpack[LossOptions]) -> None:
        super().__init__(surrogate=LogProb(), aggregate=sequence_mean_token_sum, options=options)


class GPGLoss(NamedLoss, name="gpg", paper="arXiv:2504.02546"):
    """Group Policy Gradient, arXiv:2504.02546: -A*logp, mean over tokens. Its factor alpha belongs to the advantage."""

    def __init__(self, **options: Unpack[LossOptions]) -> None:
        super().__init__(surrogate=LogProb(), aggregate=token_mean, options=options)


class DROLoss(NamedLoss, name="dro", paper="arXiv:2405.19107"):
    """Direct Reward Optimization, arXiv:2405.19107: -(A*logp - strength/2 * (log r)^2); off-policy by design."""

    def __init__(self, *, strength: float = 0.1, **options: Unpack[LossOptions]) -> None:
        super().__init__(surrogate=LogProb(), aggregate=token_mean, pull=strength / 2, options=options)


class VAPOLoss(NamedLoss, name="vapo", paper="arXiv:2504.05118"):
    """The policy loss of VAPO, arXiv:2504.05118: DAPO's, plus the mean of -logp over the tokens with A > 0."""

    def __init__(
        self, *, clip_range: ClipRange = (0.2, 0.28), nll_coef: float = 0.1, **options: Unpack[LossOptions]
    ) -> None:
        super().__init__(surrogate=_clip(clip_range), aggregate=token_mean, nll_coef=nll_coef, options=options)
