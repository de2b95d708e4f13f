"""Estimators for rewards that mean right or wrong: how often a prompt is solved, how briefly, and by one of several."""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gruppo.advantage.estimator import Estimator, Groups
from gruppo.errors import InputError

__all__ = [
    "BestOfGroupAdvantage", "BetaNormAdvantage", "GPGAdvantage", "LEADAdvantage", "LengthShapedAdvantage",
    "MaxRLAdvantage", "PassAtKAdvantage",
]  # fmt: skip


@dataclass(frozen=True)
class GPGAdvantage(Estimator, name="gpg", scale="none"):
    """Centred reward times alpha, which makes up for groups without signal: GPG, arXiv:2504.02546.

        A_i = alpha (r_i - mean_g),   alpha = sequences / sequences of groups with spread

    `counted="nonzero"` is verl's alpha: sequences / sequences whose reward is not 0.

    >>> GPGAdvantage()([1.0, 0.0, 1.0, 1.0], num_generations=2)
    tensor([ 1., -1.,  0.,  0.])
    """

    counted: Literal["signal", "nonzero"] = "signal"

    def __post_init__(self) -> None:
        if self.counted not in ("signal", "nonzero"):
            raise InputError(f"counted must be 'signal' or 'nonzero', got {self.counted!r}")

    def estimate(self, groups: Groups) -> Tensor:
        counts = groups.has_spread()[groups.group] if self.counted == "signal" else groups.rewards != 0
        alpha = groups.count().sum() / groups.sum(counts).sum().clamp(min=1)
        return groups.result(alpha * groups.centered())


@dataclass(frozen=True)
class MaxRLAdvantage(Estimator, name="maxrl", scale="none", uses=("correct",)):
    """Centred reward over the group's success rate: MaxRL, arXiv:2602.02710.

        A_i = (r_i - mean_g) / p_g,   0 where p_g <= 0

    p_g is the share of `correct` completions, or the mean reward of a call without `correct`; rewards should then not
    be negative.

    >>> MaxRLAdvantage()([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 3., -1., -1., -1.])
    """

    def estimate(self, groups: Groups, correct: Tensor | None) -> Tensor:
        rate = _rate_or_mean(groups, correct)[groups.group]
        return groups.result(groups.centered() / torch.where(rate > 0, rate, torch.inf))


@dataclass(frozen=True)
class BetaNormAdvantage(Estimator, name="beta_norm", scale="none", uses=("correct",)):
    """Centred reward over a Beta density at the group's success rate: BNPO, arXiv:2506.02864.

        A_i = (r_i - mean_g) / Beta(p_g; 1 + a/3, 1 + b/3)

    p_g is the share of `correct` completions, or the mean reward of a call without `correct`. a and b are those of the
    Beta distribution with the mean and variance that the p_g of this batch have; with one group, or with all p_g equal,
    the density is flat. A group in which all or none are right gets exactly 0, whatever else its rewards are made of.

    >>> BetaNormAdvantage()([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """

    low: float = 0.0
    high: float = 1.0
    """The reward of a wrong and of a right completion; the formula sees (r - low) / (high - low)."""
    max_weight: float = 1e6
    """Largest factor on a centred reward: a density may be almost 0."""

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise InputError(f"low must be below high, got {self.low!r} and {self.high!r}")
        if not self.max_weight > 0:
            raise InputError(f"max_weight must be positive, got {self.max_weight!r}")

    def estimate(self, groups: Groups, correct: Tensor | None) -> Tensor:
        groups = groups.shaped((groups.rewards - self.low) / (self.high - self.low))
        outside = (groups.rewards < 0) | (groups.rewards > 1)
        if correct is None and outside.any():
            i = int(outside.nonzero()[0])
            value = groups.rewards[i].item() * (self.high - self.low) + self.low
            raise InputError(
                f"rewards[{i}] is {value:g}, outside of low={self.low:g} to high={self.high:g}; set low and high to "
                "the rewards of a wrong and of a right completion"
            )
        p = _rate_or_mean(groups, correct)
        alpha, beta = self._fit(p[groups.count() > 0])
        log_density = (alpha - 1) * p.log() + (beta - 1) * (1 - p).log()
        log_density += torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
        weight = (-log_density).exp().clamp(max=self.max_weight)
        # At p = 0 and p = 1 the density may be 0, and there is nothing to compare, even if rewards differ.
        return groups.result(groups.centered() * weight[groups.group], where=((p > 0) & (p < 1))[groups.group])

    def _fit(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and beta of the normalising density, from the success rates of the groups by their two moments."""
        flat = torch.ones((), dtype=torch.float64)
        if len(p) < 2 or p.max() == p.min():
            return flat, flat
        mean, variance = p.mean(), p.var()
        total = mean * (1 - mean) / variance - 1
        # A variance beyond that of any Beta density would make them less than flat, and the density infinite at 0 or 1.
        return (1 + total * mean / 3).clamp(min=1), (1 + total * (1 - mean) / 3).clamp(min=1)


@dataclass(frozen=True)
class PassAtKAdvantage(Estimator, name="pass_at_k", uses=("correct",), judges_answers=True):
    """The advantage of pass@k as the reward, without drawing subsets: arXiv:2508.10751, section 2.4.

        mean  = 1 - C(wrong, k) / C(n, k),   std = sqrt(mean (1 - mean))
        right: A = (1 - mean) / std
        wrong: A = (1 - mean - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / std

    A group in which every subset of k passes, or none does, gets exactly 0. k = 1 is GRPO with ddof = 0.

    >>> PassAtKAdvantage(k=2)([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """

    k: int = 4
    correct_at: float = 1.0
    """A reward of at least this is right, for a call without `correct`."""

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise InputError(f"k must be a whole number of at least 1, got {self.k!r}")

    def estimate(self, groups: Groups, correct: Tensor | None) -> Tensor:
        groups, right = groups.judged(correct, self.correct_at)
        n, wrong = groups.count(), groups.count() - groups.sum(right)
        largest = int(groups.group.bincount().max()) if len(n) else self.k  # also those without a reward
        if largest < self.k:
            raise InputError(f"k={self.k} is more than the {largest} rewards of the largest group; lower k")
        fails = _share_of_subsets(wrong, n, self.k)  # of all subsets of k
        fails_with_me = _share_of_subsets(wrong - 1, n - 1, self.k - 1)  # of those with a given wrong completion
        std = (fails * (1 - fails)).sqrt()
        mean_fails = torch.where(right, 0, fails_with_me[groups.group])
        live = (std > 0) & (n >= self.k)
        advantages = (fails[groups.group] - mean_fails) / std[groups.group]
        return groups.result(advantages, where=live[groups.group])


@dataclass(frozen=True)
class BestOfGroupAdvantage(Estimator, name="best_of_group"):
    """Only the best completion of a group is paid, by its lead over the second: arXiv:2503.19595 (max@k).

        A_best = r_best - r_second,   all others 0;   "standard": over std_g + eps

    Two that share the first place lead by 0.

    >>> BestOfGroupAdvantage()([0.25, 1.0, 0.5], num_generations=3)
    tensor([0.0000, 0.5000, 0.0000])
    """

    normalization: Literal["centered", "standard"] = "centered"
    ddof: int = 1
    eps: float = 1e-8

    def estimate(self, groups: Groups) -> Tensor:
        best = groups.highest()[groups.group]
        is_best = groups.valid & (groups.rewards == best)
        second = groups.highest(~is_best)[groups.group]
        alone = is_best & (groups.sum(is_best)[groups.group] == 1)
        lead = torch.where(alone, best - second, 0)
        if self.normalization == "standard":
            lead = lead / (groups.std("group", self.ddof) + self.eps)
        return groups.result(lead)


@dataclass(frozen=True)
class LengthShapedAdvantage(Estimator, name="length_shaped", scale="none", needs=("lengths",), uses=("correct",)):
    """Reward less a price for length that rises with how well the prompt is solved, then centred.

        s_i = r_i - weight * p_g * l_i / max_g l,   A_i = s_i - mean_g(s)

    p_g is the share of right completions. The shape is that of prime-rl's length cost.

    >>> LengthShapedAdvantage(weight=0.5)([1.0, 1.0], num_generations=2, lengths=[10, 20])
    tensor([ 0.1250, -0.1250])
    """

    weight: float = 0.1
    correct_at: float = 1.0
    """A reward of at least this is right, for a call without `correct`."""

    def __post_init__(self) -> None:
        if not self.weight >= 0:
            raise InputError(f"weight must be 0 or more, got {self.weight!r}")

    def estimate(self, groups: Groups, lengths: Tensor, correct: Tensor | None) -> Tensor:
        solved, right = groups.judged(correct, self.correct_at)
        rate = solved.mean(right)
        longest = groups.shaped(lengths).highest().clamp(min=1)
        shaped = groups.shaped(groups.rewards - self.weight * (rate / longest)[groups.group] * lengths)
        return shaped.result(shaped.centered())


@dataclass(frozen=True)
class LEADAdvantage(Estimator, name="lead", needs=("lengths",), uses=("correct",), judges_answers=True):
    """Short right answers over long ones, and hard prompts over easy ones: GRPO-LEAD, arXiv:2504.09696.

        s_i = exp(-length_weight * z_i) if right, with z_i = (l_i - mean) / (std + eps) over the right ones of the group
        s_i = -1                        if wrong
        B_i = (s_i - mean_g(s)) / (std_g(s) + eps)
        A_i = B_i * w(p) if B_i > 0 else B_i * w(1 - p),   w(p) = low + (high - low) / (1 + exp(slope (p - middle)))

    p is the share of right completions.

    >>> LEADAdvantage()([1.0, 0.0], num_generations=2, lengths=[10, 20])
    tensor([ 1.0017, -1.0017])
    """

    length_weight: float = 0.05
    low: float = 0.4
    high: float = 1.5
    middle: float = 0.75
    slope: float = 10.0
    """Smallest and largest weight of a prompt, and where and how steeply it falls between them: the paper's."""
    correct_at: float = 1.0
    """A reward of at least this is right, for a call without `correct`."""
    ddof: int = 1
    eps: float = 1e-8

    def estimate(self, groups: Groups, lengths: Tensor, correct: Tensor | None) -> Tensor:
        groups, right = groups.judged(correct, self.correct_at)
        among_right = replace(groups, rewards=torch.where(right, lengths, 0), valid=right)
        z = among_right.centered() / (among_right.std("group", self.ddof) + self.eps)
        shaped = groups.shaped(torch.where(right, (-self.length_weight * z).exp(), -1.0))
        base = shaped.centered() / (shaped.std("group", self.ddof) + self.eps)
        rate = groups.mean(right)[groups.group]
        return shaped.result(base * torch.where(base > 0, self._prompt_weight(rate), self._prompt_weight(1 - rate)))

    def _prompt_weight(self, rate: Tensor) -> Tensor:
        return self.low + (self.high - self.low) * torch.sigmoid(-self.slope * (rate - self.middle))


def _rate_or_mean(groups: Groups, correct: Tensor | None) -> Tensor:
    """Share of right completions of each group `[P]`; the mean reward where it is not known which are right."""
    if correct is None:
        return groups.mean()
    groups, right = groups.judged(correct, correct_at=1.0)
    return groups.mean(right)


def _share_of_subsets(wrong: Tensor, n: Tensor, k: int) -> Tensor:
    """C(wrong, k) / C(n, k) as a product of quotients, 0 where wrong < k."""
    share = torch.ones_like(n)
    for i in range(k):
        share = share * ((wrong - i) / (n - i).clamp(min=1)).clamp(min=0)
    return share
