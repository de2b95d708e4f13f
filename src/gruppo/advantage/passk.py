"""Estimators that pay for one good completion among several, not for each."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gruppo.advantage.group import Groups, Rewards, Scale
from gruppo.advantage.grpo import check_options
from gruppo.advantage.inputs import GroupIds, PerSequence, check_scale, read_correct
from gruppo.errors import InputError


@dataclass(frozen=True)
class PassAtKAdvantage:
    """The advantage of pass@k as the reward, without drawing subsets: arXiv:2508.10751, section 2.4.

        mean  = 1 - C(wrong, k) / C(n, k),   std = sqrt(mean (1 - mean))
        right: A = (1 - mean) / std
        wrong: A = (1 - mean - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / std

    Every subset of k of the n completions is rewarded if one of them is right, and normalised over all subsets; a
    completion gets the mean over the subsets that it is in. A group in which every subset passes, or none does, gets
    exactly 0: with k above 1 prompts that are solved often enough stop counting. k = 1 is GRPO with ddof = 0.

    >>> PassAtKAdvantage(k=2)([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 1.0000, -0.3333, -0.3333, -0.3333])
    """

    k: int = 4
    correct_at: float = 1.0
    """A reward of at least this is right, where a call is not told what is."""
    uses: ClassVar[tuple[str, ...]] = ("correct",)
    judges_answers: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise InputError(f"k must be a whole number of at least 1, got {self.k!r}")

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Scale = "group",
        group_ids: GroupIds = None,
        *,
        correct: PerSequence | None = None,
    ) -> Tensor:
        """One advantage per reward, `[N]`.

        Args:
            correct: whether each answer is right; None: those with a reward of at least `correct_at`.
            rewards, num_generations, scale, group_ids: as for `GRPOAdvantage`.
        """
        check_scale(self, scale, "group")
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        groups, right = read_correct(correct, groups, self.correct_at)
        n, wrong = groups.count(), groups.count() - groups.sum(right)
        if len(n) and n.max() < self.k:
            raise InputError(f"k={self.k} is more than the {int(n.max())} rewards of the largest group; lower k")
        fails = _share_of_subsets(wrong, n, self.k)  # of all subsets of k
        fails_with_me = _share_of_subsets(wrong - 1, n - 1, self.k - 1)  # of those with a given wrong completion
        std = (fails * (1 - fails)).sqrt()
        mean_fails = torch.where(right, 0, fails_with_me[groups.group])
        live = (std > 0) & (n >= self.k)
        advantages = (fails[groups.group] - mean_fails) / std[groups.group]
        return groups.result(advantages, where=live[groups.group])


@dataclass(frozen=True)
class BestOfGroupAdvantage:
    """Only the best completion of a group is paid, by its lead over the second: arXiv:2503.19595 (max@k).

        A_best = r_best - r_second,   all others 0;   "standard": over std_g + eps

    The leave-one-out baseline of the group's maximum. Two that share the first place lead by 0.

    >>> BestOfGroupAdvantage()([0.25, 1.0, 0.5], num_generations=3)
    tensor([0.0000, 0.5000, 0.0000])
    """

    normalization: Literal["centered", "standard"] = "centered"
    ddof: int = 1
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_options(self.normalization, self.ddof, self.eps)

    def __call__(
        self, rewards: Rewards, num_generations: int = 1, scale: Scale = "group", group_ids: GroupIds = None
    ) -> Tensor:
        """One advantage per reward, `[N]`; arguments as for `GRPOAdvantage`."""
        check_scale(self, scale, "group")
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        best = groups.highest()[groups.group]
        is_best = groups.valid & (groups.rewards == best)
        second = groups.highest(~is_best)[groups.group]
        alone = is_best & (groups.sum(is_best)[groups.group] == 1)
        lead = torch.where(alone, best - second, 0)
        if self.normalization == "standard":
            lead = lead / (groups.std("group", self.ddof) + self.eps)
        return groups.result(lead)


def _share_of_subsets(wrong: Tensor, n: Tensor, k: int) -> Tensor:
    """C(wrong, k) / C(n, k) as a product of quotients, 0 where wrong < k."""
    share = torch.ones_like(n)
    for i in range(k):
        share = share * ((wrong - i) / (n - i).clamp(min=1)).clamp(min=0)
    return share
