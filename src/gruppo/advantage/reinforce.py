"""REINFORCE with a baseline of the batch, or of the greedy completion."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gruppo.advantage.group import Groups, Rewards, Scale
from gruppo.advantage.inputs import GroupIds, PerSequence, check_deviation, check_scale, read_greedy, read_lengths


@dataclass(frozen=True)
class ReinforcePlusPlusAdvantage:
    """Rewards whitened over the tokens of the batch: REINFORCE++, arXiv:2501.03262.

        A_i = (r_i - mean) / (std + eps),  mean and std over all tokens of the batch

    With one reward at the end of a completion every token of it has that return, so token statistics are those of the
    rewards weighted by `lengths`; without lengths every completion counts once. Groups play no part: a group whose
    rewards are all equal has an advantage unless the whole batch is equal. `ddof=1` is verl's deviation, 0 OpenRLHF's.

    >>> ReinforcePlusPlusAdvantage()([1.0, 0.0, 0.0], lengths=[2, 1, 1])
    tensor([ 0.8660, -0.8660, -0.8660])
    """

    ddof: int = 1
    eps: float = 1e-8
    needs: ClassVar[tuple[str, ...]] = ("lengths",)

    def __post_init__(self) -> None:
        check_deviation(self.ddof, self.eps)

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Scale = "batch",
        group_ids: GroupIds = None,
        *,
        lengths: PerSequence | None = None,
    ) -> Tensor:
        """One advantage per reward, `[N]`.

        Args:
            lengths: sampled tokens of each completion; None: every completion counts once.
            rewards, num_generations, scale, group_ids: as for `GRPOAdvantage`.
        """
        check_scale(self, scale, "batch")
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        weight = _token_weight(self, groups, lengths)
        everywhere = groups.whole().has_spread()[groups.whole().group]
        return groups.result(_whiten(groups.rewards, weight, self.ddof, self.eps), where=everywhere)


@dataclass(frozen=True)
class ReinforcePlusPlusBaselineAdvantage:
    """Reward minus the mean of its group, then whitened over the batch: REINFORCE++-baseline, arXiv:2501.03262.

        c_i = r_i - mean_g,   A_i = (c_i - mean(c)) / (std(c) + eps),  mean and std over all tokens of the batch

    Without `lengths` every completion counts once; then mean(c) is 0, and a group without spread gets exactly 0. With
    lengths it gets -mean(c) / std(c), as in verl (`ddof=1`) and OpenRLHF (`ddof=0`).

    >>> ReinforcePlusPlusBaselineAdvantage()([1.0, 0.0, 1.0, 1.0], num_generations=2)
    tensor([ 1.2247, -1.2247,  0.0000,  0.0000])
    """

    ddof: int = 1
    eps: float = 1e-8
    needs: ClassVar[tuple[str, ...]] = ("lengths",)

    def __post_init__(self) -> None:
        check_deviation(self.ddof, self.eps)

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Scale = "batch",
        group_ids: GroupIds = None,
        *,
        lengths: PerSequence | None = None,
    ) -> Tensor:
        """One advantage per reward, `[N]`; arguments as for `ReinforcePlusPlusAdvantage`."""
        check_scale(self, scale, "batch")
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        weight = _token_weight(self, groups, lengths)
        # Over completions that count once the mean is 0, and rounding must not make it something else.
        shift = lengths is not None
        anywhere = groups.has_spread().any().expand(len(groups.rewards))
        return groups.result(_whiten(groups.centered(), weight, self.ddof, self.eps, shift), where=anywhere)


@dataclass(frozen=True)
class ReMaxAdvantage:
    """Reward minus the reward of the greedy completion of the same prompt: ReMax, arXiv:2310.10505.

        A_i = r_i - r(greedy)

    A group whose rewards are all equal has an advantage when the greedy completion did better or worse.

    >>> ReMaxAdvantage()([1.0, 0.0], num_generations=2, greedy_rewards=[1.0, 1.0])
    tensor([ 0., -1.])
    """

    needs: ClassVar[tuple[str, ...]] = ("greedy_rewards",)

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Scale = "none",
        group_ids: GroupIds = None,
        *,
        greedy_rewards: PerSequence | None = None,
    ) -> Tensor:
        """One advantage per reward, `[N]`.

        Args:
            greedy_rewards: reward of the greedy completion of each sequence's prompt; None abstains.
            rewards, num_generations, scale, group_ids: as for `GRPOAdvantage`.
        """
        check_scale(self, scale, "none")
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        greedy, there = read_greedy(self, greedy_rewards, len(groups.rewards))
        return groups.result(groups.rewards - greedy, where=there)


def _token_weight(estimator: object, groups: Groups, lengths: PerSequence | None) -> Tensor:
    if lengths is None:
        return groups.valid.to(torch.float64)
    return torch.where(groups.valid, read_lengths(estimator, lengths, len(groups.rewards)), 0)


def _whiten(values: Tensor, weight: Tensor, ddof: int, eps: float, shift: bool = True) -> Tensor:
    """Values minus their weighted mean over their weighted deviation, over the whole batch."""
    total = weight.sum()
    mean = (weight * values).sum() / total.clamp(min=1)
    variance = (weight * (values - mean).square()).sum() / (total - ddof).clamp(min=1)
    return (values - mean if shift else values) / (variance.sqrt() + eps)
