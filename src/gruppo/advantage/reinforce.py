"""A baseline from outside the group: of the batch, or of the greedy completion."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gruppo.advantage.estimator import Estimator, Groups

__all__ = ["ReMaxAdvantage", "ReinforcePlusPlusAdvantage", "ReinforcePlusPlusBaselineAdvantage"]


@dataclass(frozen=True)
class ReinforcePlusPlusAdvantage(Estimator, name="reinforce_pp", scale="batch", uses=("lengths",)):
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

    def estimate(self, groups: Groups, lengths: Tensor | None) -> Tensor:
        whole = groups.whole()
        whitened = _whiten(groups, groups.rewards, lengths, self.ddof, self.eps)
        return groups.result(whitened, where=whole.has_spread()[whole.group])


@dataclass(frozen=True)
class ReinforcePlusPlusBaselineAdvantage(Estimator, name="reinforce_pp_baseline", scale="batch", uses=("lengths",)):
    """Reward minus the mean of its group, then whitened over the batch: REINFORCE++-baseline, arXiv:2501.03262.

        c_i = r_i - mean_g,   A_i = (c_i - mean(c)) / (std(c) + eps),  mean and std over all tokens of the batch

    Without `lengths` every completion counts once; then mean(c) is 0, and a group without spread gets exactly 0. With
    lengths it gets -mean(c) / std(c), as in verl (`ddof=1`) and OpenRLHF (`ddof=0`).

    >>> ReinforcePlusPlusBaselineAdvantage()([1.0, 0.0, 1.0, 1.0], num_generations=2)
    tensor([ 1.2247, -1.2247,  0.0000,  0.0000])
    """

    ddof: int = 1
    eps: float = 1e-8

    def estimate(self, groups: Groups, lengths: Tensor | None) -> Tensor:
        # Over completions that count once the mean is 0, and rounding must not make it something else.
        whitened = _whiten(groups, groups.centered(), lengths, self.ddof, self.eps, shift=lengths is not None)
        return groups.result(whitened, where=groups.has_spread().any().expand(len(whitened)))


@dataclass(frozen=True)
class ReMaxAdvantage(Estimator, name="remax", scale="none", needs=("greedy_rewards",)):
    """Reward minus the reward of the greedy completion of the same prompt: ReMax, arXiv:2310.10505.

        A_i = r_i - r(greedy)

    A group whose rewards are all equal has an advantage when the greedy completion did better or worse.

    >>> ReMaxAdvantage()([1.0, 0.0], num_generations=2, greedy_rewards=[1.0, 1.0])
    tensor([ 0., -1.])
    """

    def estimate(self, groups: Groups, greedy_rewards: Tensor) -> Tensor:
        return groups.result(groups.rewards - greedy_rewards, where=~greedy_rewards.isnan())


def _whiten(
    groups: Groups, values: Tensor, lengths: Tensor | None, ddof: int, eps: float, shift: bool = True
) -> Tensor:
    """Values minus their mean over their deviation, over the tokens of the batch; without lengths over completions."""
    weight = groups.valid.to(torch.float64) if lengths is None else torch.where(groups.valid, lengths, 0)
    total = weight.sum()
    mean = (weight * values).sum() / total.clamp(min=1)
    variance = (weight * (values - mean).square()).sum() / (total - ddof).clamp(min=1)
    return (values - mean if shift else values) / (variance.sqrt() + eps)
