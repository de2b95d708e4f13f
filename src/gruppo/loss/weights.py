"""Weights of single tokens in the policy term: corrections of the sampler's gap, selections of tokens, trust regions.

A weight is called as `weight(inputs, log_ratio_T)` and gives `[T]` without gradient, numbers or bools. It multiplies
the policy term and no other. Exactly 0 rejects a token; PolicyLoss's `rejected` decides whether it still counts in the
means. Several weights multiply, and a token that one of them rejects is rejected.

A *correction* looks at the inputs alone and can be called as `weight(inputs)`. A *selection* keeps or rejects tokens by
their log-ratio, entropy or probability. One that depends on all tokens of the step has a method
`survey(inputs, log_ratio_T)`, which is called with the whole step before its first backward and gives numbers by name.
They travel with `Totals`.
"""

import functools
import inspect
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.inputs import LossInputs
from gruppo.loss.parts import MAX_LOG_RATIO, MIN_LOG_SUM, describe, part, token_level, trait
from gruppo.random import token_uniforms

__all__ = [
    "CORRECTIONS", "ClipCovariance", "CorrectedSum", "KLRegion", "KeepWithin", "MaskedWeight", "Normalized",
    "OffPolicySequenceMask", "ProbabilityBand", "SecondMoment", "TVRegion", "TopEntropy", "TruncatedWeight",
    "VariationBudget",
]  # fmt: skip

TokenWeight = Callable[..., Tensor]
"""`weight(inputs, log_ratio_T)`, or `weight(inputs)`."""

Anchor = Literal["old", "sampler"]
"""The policy that a weight compares the current one with: the trainer's at sampling time, or the sampler itself."""

RhoLevel = Literal["token", "sequence", "sequence_sum"]
"""A token's own rho, its sequence's geometric mean, or its sequence's product."""

MAX_LOG_RHO = 10.0
TIE = 1e-5
"""Largest distance of the cut below the last token of a share, relative to its size or to 1."""
SAME = 0.4
"""Values closer than this part of a tie count as equal: ten times what float32 leaves between equal tokens."""


def as_tuple(weights: TokenWeight | tuple[TokenWeight, ...] | None) -> tuple[TokenWeight, ...]:
    """One weight, several or none, as a tuple."""
    return weights if isinstance(weights, tuple) else () if weights is None else (weights,)


def takes_log_ratio(weight: TokenWeight, name: str) -> bool:
    """True if a weight has a parameter `log_ratio_T`; an error if it can be called neither with nor without."""
    if not callable(weight):
        raise InputError(f"{name} must be a function or a part of gruppo.loss, got {weight!r}")
    signature = inspect.signature(weight)
    takes = "log_ratio_T" in signature.parameters
    try:
        signature.bind(None, **({"log_ratio_T": None} if takes else {}))
    except TypeError:
        raise InputError(f"{name} must take (inputs) or (inputs, log_ratio_T), got {weight!r} of {signature}") from None
    return takes


def is_correction(weight: TokenWeight) -> bool:
    """True if a weight can be called with only the inputs."""
    try:
        inspect.signature(weight).bind(None)
    except TypeError:
        return False
    return True


def covariance_means(inputs: LossInputs) -> dict[str, Tensor]:
    """The step's means of advantage and log-prob, which `covariance` takes."""
    count = inputs.segments.length.sum().clamp(min=1)
    sums = {"mean_advantage": inputs.advantages, "mean_logp": inputs.logps.detach()}
    return {name: inputs.segments.sum(values_T.double()).sum() / count for name, values_T in sums.items()}


def covariance(inputs: LossInputs, means: dict[str, Tensor] | None = None) -> Tensor:
    """(A - mean A) * (logp - mean logp) of each token, `[T]` float64; without `means` by those of the totals."""
    if means is None:
        means = {name: inputs.totals.number(name) for name in ("mean_advantage", "mean_logp")}
    return (inputs.advantages - means["mean_advantage"]) * (inputs.logps.detach().double() - means["mean_logp"])


def cut_below_top(values: Tensor, count: int, tie: float = TIE) -> Tensor:
    """Cut between the count-th largest value and the next smaller one that differs, `[]` float64.

    Values count as equal if only rounding tells them apart. If all within `tie` are equal, the cut is in their widest
    gap.
    """
    if count >= len(values) or not len(values):
        return torch.tensor(-math.inf, dtype=torch.float64, device=values.device)
    ordered = values.double().sort(descending=True).values
    last_in = ordered[max(count, 1) - 1]
    far = tie * last_in.abs().clamp(min=1.0)
    below = torch.cat([ordered[1:], ordered.new_full((1,), -math.inf)])
    gap = torch.where((ordered <= last_in) & (ordered >= last_in - far), ordered - below, -1.0)
    is_apart = gap > SAME * far
    last = torch.where(is_apart.any(), is_apart.int().argmax(), gap.argmax())  # argmax: the first of them
    return (ordered[last] + below[last]) / 2


class Share:
    """A part that takes a share of the tokens of the step."""

    share: float

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise InputError(f"share must be in (0, 1], got {self.share!r}; 0.2 means a fifth of the tokens")


def _outward(log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
    """Tokens that their advantage pushes further in the direction their ratio has moved, `[T]` bool."""
    return (log_ratio_T.detach() * inputs.advantages) > 0


@part(needs=lambda weight: ("sampler_logps",) if weight.base == "sampler" else ())
class _Compared:
    """A weight that compares the policy with an earlier one."""

    base: Anchor

    def __post_init__(self) -> None:
        if self.base not in ("old", "sampler"):
            raise InputError(f"base must be 'old' or 'sampler', got {self.base!r}")
        low, high = (getattr(self, name, 0.0) for name in ("low", "high"))
        if not (low >= 0 and high >= 0):
            raise InputError(f"bounds must be 0 or more, got {low!r} and {high!r}")

    def base_logps(self, inputs: LossInputs) -> Tensor:
        base_T = inputs.sampler_logps if self.base == "sampler" else inputs.old_logps
        assert base_T is not None, "PolicyLoss checks `needs` before it calls a weight"
        return base_T

    def moved(self, inputs: LossInputs) -> Tensor:
        """Change of the probability of each token, `[T]`."""
        return inputs.logps.detach().exp() - self.base_logps(inputs).exp()


# --- corrections ----------------------------------------------------------------------------------------------------


def log_rho(inputs: LossInputs) -> Tensor:
    """old - sampler per token, bounded to +-10, without gradient."""
    assert inputs.sampler_logps is not None, "PolicyLoss checks `needs` before it calls a weight"
    return (inputs.old_logps - inputs.sampler_logps).detach().clamp(-MAX_LOG_RHO, MAX_LOG_RHO)


@part(per_token=lambda weight: weight.level == "token", needs={"sampler_logps"})
class _Rho:
    """Bounds on rho at a level: what three corrections share."""

    low: float
    high: float
    level: RhoLevel

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise InputError(f"bounds must satisfy 0 <= low < high, got low={self.low:g}, high={self.high:g}")
        if self.level not in ("token", "sequence", "sequence_sum"):
            raise InputError(f"level must be 'token' or 'sequence' (or 'sequence_sum'), got {self.level!r}")

    def rho(self, inputs: LossInputs) -> Tensor:
        """rho of each token at the level, `[T]`. A product over a sequence is bounded like a token's: e^+-10."""
        log_rho_T, segments = log_rho(inputs), inputs.segments
        if self.level == "sequence":
            log_rho_T = segments.spread(segments.mean(log_rho_T))
        elif self.level == "sequence_sum":
            log_rho_T = segments.spread(segments.sum(log_rho_T).clamp(-MAX_LOG_RHO, MAX_LOG_RHO))
        return log_rho_T.exp()

    def within(self, rho_T: Tensor) -> Tensor:
        return (rho_T >= self.low) & (rho_T <= self.high)

    @property
    def definition(self) -> str:
        gap = {"token": "old - sampler", "sequence": "mean_t(old - sampler)", "sequence_sum": "sum_t(old - sampler)"}
        return f"rho = exp({gap[self.level]})"


@part(holds_rho=True)
@dataclass(frozen=True)
class TruncatedWeight(_Rho):
    """Truncated importance sampling: rho, kept within bounds."""

    high: float = 2.0
    low: float = 0.0
    level: RhoLevel = "token"

    def __str__(self) -> str:
        return f"clip(rho, {self.low:g}, {self.high:g}), {self.definition}"

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor | None = None) -> Tensor:
        return self.rho(inputs).clamp(self.low, self.high)


@part(holds_rho=True)
@dataclass(frozen=True)
class MaskedWeight(_Rho):
    """IcePop, arXiv:2510.18855: rho where it lies within bounds, else 0."""

    low: float = 0.5
    high: float = 5.0
    level: RhoLevel = "token"

    def __str__(self) -> str:
        return f"rho where it is in [{self.low:g}, {self.high:g}], else 0; {self.definition}"

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor | None = None) -> Tensor:
        rho_T = self.rho(inputs)
        return torch.where(self.within(rho_T), rho_T, 0)


@dataclass(frozen=True)
class KeepWithin(_Rho):
    """1 where rho lies within bounds, else 0: a mask alone, to be used with another weight or none."""

    low: float = 0.5
    high: float = 2.0
    level: RhoLevel = "token"

    def __str__(self) -> str:
        return f"1 where rho is in [{self.low:g}, {self.high:g}], else 0; {self.definition}"

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor | None = None) -> Tensor:
        rho_T = self.rho(inputs)
        return self.within(rho_T).to(rho_T.dtype)


@dataclass(frozen=True)
class OffPolicySequenceMask(_Compared):
    """OPSM, arXiv:2512.02556: drop a sequence with A < 0 once the policy has moved away from it.

    It has when mean_t(base - logp) exceeds the threshold; `base` is the sampler, or the trainer's old policy.
    """

    threshold: float = 0.1
    base: Anchor = "sampler"

    def __str__(self) -> str:
        return f"0 where A < 0 and mean_t({self.base} - logp) > {self.threshold:g}, else 1"

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor | None = None) -> Tensor:
        segments = inputs.segments
        moved_T = segments.spread(segments.mean(self.base_logps(inputs) - inputs.logps.detach()))
        return 1 - ((inputs.advantages < 0) & (moved_T > self.threshold)).to(moved_T.dtype)


@part(
    needs=lambda part: frozenset().union(*(trait(each, "needs") for each in as_tuple(part.correction))),
    holds_rho=lambda part: any(trait(each, "holds_rho") for each in as_tuple(part.correction)),
)
@dataclass(frozen=True)
class _Corrected:
    """A part made of one or more corrections."""

    correction: TokenWeight | tuple[TokenWeight, ...]

    def corrected(self, inputs: LossInputs) -> Tensor:
        """The product of the corrections, `[T]`."""
        return functools.reduce(operator.mul, (correction(inputs) for correction in as_tuple(self.correction)))


@part(per_token=lambda weight: all(trait(each, "per_token") for each in as_tuple(weight.correction)))
@dataclass(frozen=True)
class Normalized(_Corrected):
    """A correction divided by its mean over the whole step: over tokens, or over sequences if it weighs those."""

    def __post_init__(self) -> None:
        if not all(is_correction(each) for each in as_tuple(self.correction)):
            raise InputError(f"Normalized takes weights of the inputs alone, such as TruncatedWeight(), got {self!r}")

    def __str__(self) -> str:
        return f"({describe(as_tuple(self.correction))}) / its mean over the step"

    def survey(self, inputs: LossInputs, log_ratio_T: Tensor) -> dict[str, Tensor]:
        weight_T, segments = self.corrected(inputs), inputs.segments
        if trait(self, "per_token"):
            total, count = segments.sum(weight_T).sum(), segments.length.sum()
        else:
            total, count = segments.mean(weight_T).sum(), (segments.length > 0).sum()
        mean = total.double() / count.clamp(min=1)
        return {"correction_mean": torch.where(mean > 0, mean, 1.0)}

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor | None = None) -> Tensor:
        weight_T = self.corrected(inputs)
        return weight_T / inputs.totals.number("correction_mean").to(weight_T.dtype)


@dataclass(frozen=True)
class CorrectedSum(_Corrected):
    """The level `sequence_sum_level` with a correction's weights inside the product instead of in front of the loss.

    VESPO, arXiv:2602.10693: what bends w must see all of w, the sampler's gap included.
    """

    def __post_init__(self) -> None:
        for weight in as_tuple(self.correction):
            if not trait(weight, "per_token"):
                raise InputError(
                    f"the product over a sequence takes one weight per token, and {weight!r} gives one per sequence; "
                    "use TruncatedWeight() or MaskedWeight() at token level"
                )

    def __str__(self) -> str:
        return f"w = exp(sum_t(logp_t - old_t + log(c_t))), c = {describe(as_tuple(self.correction))}"

    def __call__(self, inputs: LossInputs) -> Tensor:
        segments = inputs.segments
        log_weight_T = self.corrected(inputs).clamp(1e-8, math.exp(MAX_LOG_RATIO)).log()
        log_w_S = segments.sum(token_level(inputs)) + segments.sum(log_weight_T)
        return segments.spread(log_w_S.clamp(MIN_LOG_SUM, MAX_LOG_RATIO))


CORRECTIONS: dict[str, TokenWeight | tuple[TokenWeight, ...]] = {
    "truncate": TruncatedWeight(),
    "truncate_sequence": TruncatedWeight(level="sequence"),
    "truncate_product": TruncatedWeight(level="sequence_sum"),
    "mask": MaskedWeight(),
    "mask_sequence": MaskedWeight(level="sequence"),
    "truncate_mask_sequence": (TruncatedWeight(), KeepWithin(0.999, 1.002, "sequence")),
    "off_policy_mask": OffPolicySequenceMask(),
}
"""Corrections by the name that `TrainConfig.correction` takes."""


# --- selections by numbers of the whole step --------------------------------------------------------------------------


@part(per_token=True, needs={"entropies"})
@dataclass(frozen=True)
class TopEntropy(Share):
    """arXiv:2506.01939: only the tokens with the highest entropy, a share of all tokens of the step."""

    share: float = 0.2

    def __str__(self) -> str:
        return f"keeps the {self.share:g} of all tokens of the step with the highest entropy"

    def survey(self, inputs: LossInputs, log_ratio_T: Tensor) -> dict[str, Tensor]:
        assert inputs.entropies is not None
        values = inputs.entropies.detach()[inputs.segments.mask]
        # As many as lie at or above the quantile 1 - share of the step; 4.000000000001 counts as 4
        below = math.ceil((len(values) - 1) * (1 - self.share) - 1e-9)
        return {"entropy_cut": cut_below_top(values, len(values) - below)}

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        assert inputs.entropies is not None
        return inputs.entropies.detach().double() > inputs.totals.number("entropy_cut")


@part(per_token=True, draws_tokens=True)
@dataclass(frozen=True)
class ClipCovariance(Share):
    """Clip-Cov, arXiv:2505.22617: leaves out a few random tokens whose log-prob and advantage vary together.

    A token qualifies when its covariance lies between `low` and `high` and the clip (`clip`: low and high of the
    surrogate) has not cut it off already. `share` of all tokens of the step are drawn, at least one; the draw is a
    function of the seed, the step and the token's place in it.
    """

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    clip: tuple[float, float] | None = (0.2, 0.2)
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            raise InputError(f"low must be below high, got {self.low!r} and {self.high!r}")

    def __str__(self) -> str:
        return (
            f"leaves out {self.share:g} of all tokens, drawn from those with "
            f"{self.low:g} < (A - mean A)*(logp - mean logp) < {self.high:g} that are not clipped"
        )

    def survey(self, inputs: LossInputs, log_ratio_T: Tensor) -> dict[str, Tensor]:
        means = covariance_means(inputs)
        qualifies_T = self._qualifies(log_ratio_T, inputs, covariance(inputs, means)) & inputs.segments.mask
        drawn = self._draw(inputs)[qualifies_T]
        count = max(int(self.share * int(inputs.segments.length.sum())), 1)
        return means | {"draw_cut": -cut_below_top(-drawn, count, tie=0.0)}

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        drawn_T = self._draw(inputs) < inputs.totals.number("draw_cut")
        return ~(self._qualifies(log_ratio_T, inputs, covariance(inputs)) & drawn_T)

    def _qualifies(self, log_ratio_T: Tensor, inputs: LossInputs, covariance_T: Tensor) -> Tensor:
        inside_T = (covariance_T > self.low) & (covariance_T < self.high)
        if self.clip is None:
            return inside_T
        ratio_T, advantages_T = log_ratio_T.detach().exp(), inputs.advantages
        too_high_T = (advantages_T > 0) & (ratio_T > 1 + self.clip[1])
        too_low_T = (advantages_T < 0) & (ratio_T < 1 - self.clip[0])
        return inside_T & ~too_high_T & ~too_low_T

    def _draw(self, inputs: LossInputs) -> Tensor:
        assert inputs.places is not None, "PolicyLoss.align gives the places to weights that draw"
        return token_uniforms(inputs.places, inputs.labels, self.seed, inputs.totals.step)


@part(per_token=True)
@dataclass(frozen=True)
class SecondMoment:
    """M2PO, arXiv:2510.01161: leaves out the largest (log r)^2 until the mean of the others is at most the threshold.

    By default only tokens that move further out are judged and left out: r > 1 with A > 0, or r < 1 with A < 0, where
    PPO would clip. `outward_only=False` judges all tokens.
    """

    threshold: float = 0.04
    outward_only: bool = True

    def __post_init__(self) -> None:
        if not self.threshold >= 0:
            raise InputError(f"threshold must be 0 or more, got {self.threshold!r}")

    def __str__(self) -> str:
        tokens = "tokens that move outward" if self.outward_only else "tokens"
        return f"leaves out the {tokens} of largest (log r)^2, until the mean of the others is <= {self.threshold:g}"

    def survey(self, inputs: LossInputs, log_ratio_T: Tensor) -> dict[str, Tensor]:
        judged_T = self._judged(inputs, log_ratio_T) & inputs.segments.mask
        ordered = log_ratio_T.detach().double()[judged_T].square().sort().values
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
        num_kept = int((means <= self.threshold).sum())
        if num_kept == len(ordered):
            return {"moment_cut": ordered.new_tensor(math.inf)}
        return {"moment_cut": cut_below_top(ordered, len(ordered) - num_kept)}

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        moment_T = log_ratio_T.detach().double().square()
        return ~self._judged(inputs, log_ratio_T) | (moment_T < inputs.totals.number("moment_cut"))

    def _judged(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        return _outward(log_ratio_T, inputs) if self.outward_only else torch.ones_like(log_ratio_T, dtype=torch.bool)


@part(per_token=True)
@dataclass(frozen=True)
class VariationBudget(_Compared):
    """VACO, arXiv:2603.01365: once the step's mean |ratio - 1| exceeds the budget, outward tokens are left out.

    The ratio is the policy over `base`.
    """

    budget: float = 0.1
    base: Anchor = "old"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.budget > 0:
            raise InputError(f"budget must be positive, got {self.budget!r}")

    def __str__(self) -> str:
        return f"keeps all while the step's mean |p/{self.base} - 1| <= {self.budget:g}, else what moves back"

    def survey(self, inputs: LossInputs, log_ratio_T: Tensor) -> dict[str, Tensor]:
        moved_T = self._log_ratio(inputs).double().expm1().abs()
        return {"variation": inputs.segments.sum(moved_T).sum() / inputs.segments.length.sum().clamp(min=1)}

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        return ~_outward(self._log_ratio(inputs), inputs) | (inputs.totals.number("variation") <= self.budget)

    def _log_ratio(self, inputs: LossInputs) -> Tensor:
        return (inputs.logps.detach() - self.base_logps(inputs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


# --- trust regions on the token's probability: they need nothing of the rest of the step ----------------------------


@part(per_token=True)
@dataclass(frozen=True)
class TVRegion(_Compared):
    """DPPO-TV, arXiv:2602.04879: leaves out a token that has moved too far the way its advantage pushes."""

    low: float = 0.2
    high: float = 0.2
    base: Anchor = "old"

    def __str__(self) -> str:
        return f"keeps p - {self.base} <= {self.high:g} where A > 0, >= -{self.low:g} elsewhere; p = exp(logp)"

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        moved_T = self.moved(inputs)
        return torch.where(inputs.advantages > 0, moved_T <= self.high, moved_T >= -self.low)


@part(per_token=True)
@dataclass(frozen=True)
class KLRegion(_Compared):
    """DPPO-KL, arXiv:2602.04879: as `TVRegion`, by the KL of "this token or any other" between base and policy."""

    low: float = 0.05
    high: float = 0.05
    base: Anchor = "old"

    def __str__(self) -> str:
        return (
            f"keeps KL2({self.base} || p) <= {self.high:g} or p <= {self.base} where A > 0, "
            f"<= {self.low:g} or p >= {self.base} elsewhere"
        )

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        logps_T, base_T = inputs.logps.detach(), self.base_logps(inputs)
        # -expm1(logp) is 1 - p without cancellation; 1e-8 keeps the logarithm of a certain token finite
        rest_T, base_rest_T = -logps_T.expm1() + 1e-8, -base_T.expm1() + 1e-8
        kl_T = base_T.exp() * (base_T - logps_T) + (base_rest_T - 1e-8) * (base_rest_T / rest_T).log()
        up_T, down_T = (kl_T <= self.high) | ~(logps_T > base_T), (kl_T <= self.low) | (logps_T >= base_T)
        return torch.where(inputs.advantages > 0, up_T, down_T)


@part(per_token=True)
@dataclass(frozen=True)
class ProbabilityBand(_Compared):
    """Leaves out a token whose probability has moved by more than the threshold, whichever way (prime-rl's IPO)."""

    threshold: float = 0.1
    base: Anchor = "old"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.threshold >= 0:
            raise InputError(f"bounds must be 0 or more, got {self.threshold!r} and {self.threshold!r}")

    def __str__(self) -> str:
        return f"keeps |p - {self.base}| <= {self.threshold:g}, p = exp(logp)"

    def __call__(self, inputs: LossInputs, log_ratio_T: Tensor) -> Tensor:
        return self.moved(inputs).abs() <= self.threshold
