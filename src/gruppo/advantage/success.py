"""Estimators for rewards that mean right or wrong: they look at how often a prompt is solved."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gruppo.advantage.group import Groups, Rewards, Scale
from gruppo.advantage.inputs import GroupIds, PerSequence, check_scale, read_correct, success_rate
from gruppo.errors import InputError


@dataclass(frozen=True)
class MaxRLAdvantage:
    """Centred reward over the group's success rate: MaxRL, arXiv:2602.02710.

        A_i = (r_i - mean_g) / p_g,   0 where p_g <= 0

    The gradient of log p(right) instead of that of p(right): a prompt that is solved once in eight counts more than one
    that is solved every other time. p_g is the share of `correct` completions, or the mean reward where a call is not
    told what is right; rewards should then not be negative. A group without success gets 0 rather than the -1 each that
    the paper's control variate gives it, so the expectation is short by p(1 - p)^G.

    >>> MaxRLAdvantage()([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 3., -1., -1., -1.])
    """

    uses: ClassVar[tuple[str, ...]] = ("correct",)

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Scale = "none",
        group_ids: GroupIds = None,
        *,
        correct: PerSequence | None = None,
    ) -> Tensor:
        """One advantage per reward, `[N]`; `correct` says whether each answer is right, the rest is as for
        `GRPOAdvantage`."""
        check_scale(self, scale, "none")
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        rate = _success_rate(groups, correct)[groups.group]
        return groups.result(groups.centered() / torch.where(rate > 0, rate, torch.inf))


@dataclass(frozen=True)
class GPGAdvantage:
    """Centred reward times alpha, which makes up for groups without signal: GPG, arXiv:2504.02546.

        A_i = alpha (r_i - mean_g),   alpha = sequences / sequences of groups with spread

    A step with half of its groups dead would otherwise have half the gradient. `counted="nonzero"` is verl's alpha:
    sequences / sequences whose reward is not 0.

    >>> GPGAdvantage()([1.0, 0.0, 1.0, 1.0], num_generations=2)
    tensor([ 1., -1.,  0.,  0.])
    """

    counted: Literal["signal", "nonzero"] = "signal"

    def __post_init__(self) -> None:
        if self.counted not in ("signal", "nonzero"):
            raise InputError(f"counted must be 'signal' or 'nonzero', got {self.counted!r}")

    def __call__(
        self, rewards: Rewards, num_generations: int = 1, scale: Scale = "none", group_ids: GroupIds = None
    ) -> Tensor:
        """One advantage per reward, `[N]`; arguments as for `GRPOAdvantage`."""
        check_scale(self, scale, "none")
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        counts = groups.has_spread()[groups.group] if self.counted == "signal" else groups.rewards != 0
        alpha = groups.count().sum() / groups.sum(counts).sum().clamp(min=1)
        return groups.result(alpha * groups.centered())


@dataclass(frozen=True)
class BetaNormAdvantage:
    """Centred reward over a Beta density at the group's success rate: BNPO, arXiv:2506.02864.

        A_i = (r_i - mean_g) / Beta(p_g; 1 + a/3, 1 + b/3)

    p_g is the share of `correct` completions, or the mean reward where a call is not told what is right. a and b are
    those of the Beta distribution with the mean and variance that the p_g of this batch have, so the weight of a
    success rate follows the policy. Flat (a = b = 0) it is Dr. GRPO; at 1 + a/3 = 1.5 it is GRPO up to a constant.
    The name BNPO belongs to this paper; `BNPOLoss` is a token mean that other libraries call so.

    With one group, or with all p_g equal, there is no distribution to fit: the density is taken as flat.

    >>> BetaNormAdvantage()([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """

    low: float = 0.0
    high: float = 1.0
    """The reward of a wrong and of a right completion; the formula sees (r - low) / (high - low)."""
    max_weight: float = 1e6
    """Largest factor on a centred reward: a density may be almost 0."""
    uses: ClassVar[tuple[str, ...]] = ("correct",)

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise InputError(f"low must be below high, got {self.low!r} and {self.high!r}")
        if not self.max_weight > 0:
            raise InputError(f"max_weight must be positive, got {self.max_weight!r}")

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Scale = "none",
        group_ids: GroupIds = None,
        *,
        correct: PerSequence | None = None,
    ) -> Tensor:
        """One advantage per reward, `[N]`; arguments as for `MaxRLAdvantage`."""
        check_scale(self, scale, "none")
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        groups = groups.shaped((groups.rewards - self.low) / (self.high - self.low))
        outside = (groups.rewards < 0) | (groups.rewards > 1)
        if correct is None and outside.any():
            i = int(outside.nonzero()[0])
            value = groups.rewards[i].item() * (self.high - self.low) + self.low
            raise InputError(
                f"rewards[{i}] is {value:g}, outside of low={self.low:g} to high={self.high:g}; set low and high to "
                "the rewards of a wrong and of a right completion"
            )
        p = _success_rate(groups, correct)
        alpha, beta = self._fit(p[groups.count() > 0])
        log_density = (alpha - 1) * p.log() + (beta - 1) * (1 - p).log()
        log_density += torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
        weight = (-log_density).exp().clamp(max=self.max_weight)
        # At p = 0 and p = 1 the density may be 0 and the centred reward is: the group has no spread.
        return groups.result(groups.centered() * weight[groups.group])

    def _fit(self, p: Tensor) -> tuple[Tensor, Tensor]:
        """alpha and beta of the normalising density, from the success rates of the groups by their two moments."""
        flat = torch.ones((), dtype=torch.float64)
        if len(p) < 2 or p.max() == p.min():
            return flat, flat
        mean, variance = p.mean(), p.var()
        total = mean * (1 - mean) / variance - 1
        # A variance beyond that of any Beta density would make them less than flat, and the density infinite at 0 or 1.
        return (1 + total * mean / 3).clamp(min=1), (1 + total * (1 - mean) / 3).clamp(min=1)


def _success_rate(groups: Groups, correct: PerSequence | None) -> Tensor:
    """Share of right completions of each group `[P]`; the mean reward where nobody says which are right."""
    return groups.mean() if correct is None else success_rate(*read_correct(correct, groups, correct_at=1.0))
