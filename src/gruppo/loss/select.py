"""Selection: which tokens the policy term acts on, judged over the whole step.

A selection takes the policy loss `[T]`, the log-ratio `[T]` and LossInputs, and gives the policy loss `[T]` as it shall
be: 0 where a token is left out, or with something added. What it must know of all tokens of the step (a threshold, a
mean) its `survey` counts before the first backward; the numbers travel with `Totals`, so that no micro-batch decides
for itself. The KL penalty and the entropy bonus act on every token.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.loss.base import AgainstBase, Base, check_base
from gruppo.loss.inputs import LossInputs
from gruppo.random import token_uniforms

TIE = 1e-5
"""Values closer than this, relative to their size or to 1, count as equal when a share of the tokens is cut off."""


class TokenMask:
    """A selection that keeps some tokens as they are and leaves the others out. Subclasses say which in `keep`."""

    is_per_token: ClassVar[bool] = True
    is_zero_without_advantage: ClassVar[bool] = True

    def keep(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        """True where the token stays, `[T]`."""
        raise NotImplementedError

    def __call__(self, policy_T: Tensor, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        return policy_T * self.keep(log_ratio_T, inputs)


@dataclass(frozen=True)
class TopEntropy(TokenMask):
    """arXiv:2506.01939: only the tokens with the highest entropy, a share of all tokens of the step."""

    needs: ClassVar[frozenset[str]] = frozenset({"entropies"})

    share: float = 0.2

    def __post_init__(self) -> None:
        _check_share(self.share)

    def __str__(self) -> str:
        return f"keeps the {self.share:g} of all tokens of the step with the highest entropy"

    def survey(self, log_ratio_T: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        assert inputs.entropies is not None
        values = inputs.entropies.detach()[inputs.segments.mask]
        # As many as lie at or above the quantile 1 - share of the step
        return {"entropy_cut": _cut_below_top(values, len(values) - _ceil((len(values) - 1) * (1 - self.share)))}

    def keep(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        assert inputs.entropies is not None
        return inputs.entropies.detach().double() > inputs.totals.number("entropy_cut")


@dataclass(frozen=True)
class ClipCovariance(TokenMask):
    """Clip-Cov, arXiv:2505.22617: leaves out a few random tokens whose log-prob and advantage vary together.

    A token qualifies when its covariance lies between `low` and `high` and the clip (`clip`: low and high of the
    surrogate) has not cut it off already. `share` of all tokens of the step are drawn, at least one; the draw is a
    function of the seed, the step and the token's place in it.
    """

    draws_tokens: ClassVar[bool] = True

    share: float = 2e-4
    low: float = 1.0
    high: float = 5.0
    clip: tuple[float, float] | None = (0.2, 0.2)
    seed: int = 0

    def __post_init__(self) -> None:
        _check_share(self.share)
        if not self.low < self.high:
            raise InputError(f"low must be below high, got {self.low!r} and {self.high!r}")

    def __str__(self) -> str:
        return (
            f"leaves out {self.share:g} of all tokens, drawn from those with "
            f"{self.low:g} < (A - mean A)*(logp - mean logp) < {self.high:g} that are not clipped"
        )

    def survey(self, log_ratio_T: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        means = _means(inputs)
        qualifies_T = self._qualifies(log_ratio_T, inputs, means) & inputs.segments.mask
        drawn = self._draw(inputs)[qualifies_T]
        count = max(int(self.share * int(inputs.segments.length.sum())), 1)
        return means | {"draw_cut": -_cut_below_top(-drawn, count, tie=0.0)}

    def keep(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        totals = inputs.totals
        means = {name: totals.number(name) for name in ("mean_advantage", "mean_logp")}
        drawn_T = self._draw(inputs) < totals.number("draw_cut")
        return ~(self._qualifies(log_ratio_T, inputs, means) & drawn_T)

    def _qualifies(self, log_ratio_T: Tensor, inputs: LossInputs, means: dict[str, Tensor]) -> Tensor:
        covariance_T = _covariance(inputs, means)
        inside_T = (covariance_T > self.low) & (covariance_T < self.high)
        if self.clip is None:
            return inside_T
        ratio_T, advantages_T = log_ratio_T.detach().exp(), inputs.advantages
        too_high_T = (advantages_T > 0) & (ratio_T > 1 + self.clip[1])
        too_low_T = (advantages_T < 0) & (ratio_T < 1 - self.clip[0])
        return inside_T & ~too_high_T & ~too_low_T

    def _draw(self, inputs: LossInputs) -> Tensor:
        assert inputs.places is not None, "PolicyLoss.align gives the places to parts that draw"
        return token_uniforms(inputs.places, inputs.labels, self.seed, inputs.totals.step)


@dataclass(frozen=True)
class CovariancePenalty:
    """KL-Cov, arXiv:2505.22617: adds coef*|log r| to the tokens with the highest covariance of log-prob and advantage.

    `share` of all tokens of the step, at least one; tokens that are equal are taken together.
    """

    is_per_token: ClassVar[bool] = True

    share: float = 2e-4
    coef: float = 1.0

    def __post_init__(self) -> None:
        _check_share(self.share)

    def __str__(self) -> str:
        return (
            f"adds {self.coef:g}*|log r| to the {self.share:g} of all tokens with the highest "
            "(A - mean A)*(logp - mean logp)"
        )

    def survey(self, log_ratio_T: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        means = _means(inputs)
        values = _covariance(inputs, means)[inputs.segments.mask]
        return means | {"covariance_cut": _cut_below_top(values, max(int(self.share * len(values)), 1))}

    def __call__(self, policy_T: Tensor, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        totals = inputs.totals
        means = {name: totals.number(name) for name in ("mean_advantage", "mean_logp")}
        chosen_T = _covariance(inputs, means) > totals.number("covariance_cut")
        return policy_T + self.coef * (log_ratio_T.abs() * chosen_T)


@dataclass(frozen=True)
class SecondMoment(TokenMask):
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

    def survey(self, log_ratio_T: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        judged_T = self._judged(log_ratio_T, inputs) & inputs.segments.mask
        ordered = log_ratio_T.detach().double()[judged_T].square().sort().values
        means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
        num_kept = int((means <= self.threshold).sum())
        if num_kept == len(ordered):
            return {"moment_cut": ordered.new_tensor(math.inf)}
        return {"moment_cut": _cut_below_top(ordered, len(ordered) - num_kept)}

    def keep(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        moment_T = log_ratio_T.detach().double().square()
        return ~self._judged(log_ratio_T, inputs) | (moment_T < inputs.totals.number("moment_cut"))

    def _judged(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        return _outward(log_ratio_T, inputs) if self.outward_only else torch.ones_like(log_ratio_T, dtype=torch.bool)


@dataclass(frozen=True)
class VariationBudget(AgainstBase, TokenMask):
    """VACO, arXiv:2603.01365: once the step's mean |ratio - 1| exceeds the budget, outward tokens are left out.

    The ratio is the policy over the sampler, or over the trainer's old policy.
    """

    budget: float = 0.1
    base: Base = "old"

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise InputError(f"budget must be positive, got {self.budget!r}")
        check_base(self.base)

    def __str__(self) -> str:
        return f"keeps all while the step's mean |p/{self.base} - 1| <= {self.budget:g}, else what moves back"

    def survey(self, log_ratio_T: Tensor, inputs: LossInputs) -> dict[str, Tensor]:
        moved_T = self._log_ratio(inputs).double().expm1().abs()
        return {"variation": inputs.segments.sum(moved_T).sum() / inputs.segments.length.sum().clamp(min=1)}

    def keep(self, log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
        return ~_outward(self._log_ratio(inputs), inputs) | (inputs.totals.number("variation") <= self.budget)

    def _log_ratio(self, inputs: LossInputs) -> Tensor:
        return (inputs.logps.detach() - self.base_logps(inputs)).clamp(-20, 20)


def _outward(log_ratio_T: Tensor, inputs: LossInputs) -> Tensor:
    """Does the advantage push the token further the way its ratio has gone?"""
    return (log_ratio_T.detach() * inputs.advantages) > 0


def _means(inputs: LossInputs) -> dict[str, Tensor]:
    count = inputs.segments.length.sum().clamp(min=1)
    sums = {"mean_advantage": inputs.advantages, "mean_logp": inputs.logps.detach()}
    return {name: inputs.segments.sum(values_T.double()).sum() / count for name, values_T in sums.items()}


def _covariance(inputs: LossInputs, means: dict[str, Tensor]) -> Tensor:
    """(A - mean A) * (logp - mean logp) of each token, `[T]` float64."""
    return (inputs.advantages - means["mean_advantage"]) * (inputs.logps.detach().double() - means["mean_logp"])


def _cut_below_top(values: Tensor, count: int, tie: float = TIE) -> Tensor:
    """A number between the count-th largest value and the next smaller one, `[]` float64.

    The last digits of a log-prob depend on what shared its forward, and tokens of one prefix have equal entropies up to
    those digits. So the cut lies in the middle of the widest gap within `tie` below the count-th value: values that
    rounding alone tells apart stay on one side.
    """
    if count >= len(values) or not len(values):
        return torch.tensor(-math.inf, dtype=torch.float64, device=values.device)
    ordered = values.double().sort(descending=True).values
    last_in = ordered[max(count, 1) - 1]
    floor = last_in - tie * last_in.abs().clamp(min=1.0)
    below = torch.cat([ordered[1:], ordered.new_full((1,), -math.inf)])
    gap = torch.where((ordered <= last_in) & (ordered >= floor), ordered - below, -1.0)
    widest = gap.argmax()
    return (ordered[widest] + below[widest]) / 2


def _ceil(value: float) -> int:
    return math.ceil(value - 1e-9)  # 4.000000000001 counts as 4


def _check_share(share: float) -> None:
    if not 0 < share <= 1:
        raise InputError(f"share must be in (0, 1], got {share!r}; 0.2 means a fifth of the tokens")
