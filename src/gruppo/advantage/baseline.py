"""Baselines: a mean of the group, of the others of the group, of the batch, or the greedy completion."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from gruppo.advantage.estimator import ROUNDING, Estimator, Groups, Scale
from gruppo.errors import InputError

__all__ = [
    "DRGRPOAdvantage", "GDPOAdvantage", "GRPOAdvantage", "LitePPOAdvantage", "OPOAdvantage", "RLOOAdvantage",
    "ReMaxAdvantage", "ReinforcePlusPlusAdvantage", "ReinforcePlusPlusBaselineAdvantage",
]  # fmt: skip


@dataclass(frozen=True)
class GRPOAdvantage(Estimator, name="grpo", takes_scale=True):
    """Reward minus the mean of its group; with `normalization="standard"` over a standard deviation.

        centered:  A_i = r_i - mean_g          (Dr. GRPO, arXiv:2503.20783)
        standard:  A_i = (r_i - mean_g) / (std + eps)   (GRPO, arXiv:2402.03300)

    `scale` names the standard deviation: of the group, of the batch (arXiv:2508.08221), or none.

    >>> GRPOAdvantage(normalization="standard")([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """

    normalization: Literal["centered", "standard"] = "centered"
    ddof: int = 1
    """1: sample standard deviation (n - 1); 0: population."""
    eps: float = 1e-8

    def estimate(self, groups: Groups, scale: Scale) -> Tensor:
        advantages = groups.centered()
        if self.normalization == "standard" and scale != "none":
            advantages = advantages / (groups.std(scale, self.ddof) + self.eps)
        return groups.result(advantages)


@dataclass(frozen=True)
class RLOOAdvantage(Estimator, name="rloo", takes_scale=True):
    """Reward minus the mean of the *other* rewards of its group, arXiv:2402.14740. Unbiased.

        A_i = r_i - mean_{j != i} r_j = G / (G - 1) * (r_i - mean_g)

    `normalization` and `scale` as for `GRPOAdvantage`; the standard deviation is that of all rewards of the group.

    >>> RLOOAdvantage()([0.0, 1.0], num_generations=2)
    tensor([-1.,  1.])
    """

    normalization: Literal["centered", "standard"] = "centered"
    ddof: int = 1
    eps: float = 1e-8

    def estimate(self, groups: Groups, scale: Scale) -> Tensor:
        count = groups.count()
        advantages = groups.centered() * (count / (count - 1).clamp(min=1))[groups.group]
        if self.normalization == "standard" and scale != "none":
            advantages = advantages / (groups.std(scale, self.ddof) + self.eps)
        return groups.result(advantages)


@dataclass(frozen=True)
class DRGRPOAdvantage(Estimator, name="drgrpo", scale="none"):
    """Reward minus the mean of its group, and nothing else: Dr. GRPO, arXiv:2503.20783.

        A_i = r_i - mean_g

    >>> DRGRPOAdvantage()([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """

    def estimate(self, groups: Groups) -> Tensor:
        return groups.result(groups.centered())


@dataclass(frozen=True)
class LitePPOAdvantage(Estimator, name="lite_ppo", scale="batch"):
    """Mean of the group, standard deviation of the batch: Lite PPO, arXiv:2508.08221.

        A_i = (r_i - mean_g) / (std_batch + eps)

    >>> LitePPOAdvantage()([1.0, 1.0, 0.0, 2.0], num_generations=2)
    tensor([ 0.0000,  0.0000, -1.2247,  1.2247])
    """

    ddof: int = 1
    eps: float = 1e-8

    def estimate(self, groups: Groups) -> Tensor:
        return groups.result(groups.centered() / (groups.std("batch", self.ddof) + self.eps))


@dataclass(frozen=True)
class GDPOAdvantage(Estimator, name="gdpo", per_reward=True):
    """Each reward function normalised in its own groups, then weighted and summed, then scaled by the batch.

        A_ik = (r_ik - mean_gk) / (std_gk + eps),   s_i = sum_k w_k A_ik,   A_i = s_i / (std_batch(s) + eps)

    GDPO, arXiv:2601.05242. A group in which no function tells the completions apart gets exactly 0.

    >>> GDPOAdvantage()([[1.0, 30.0], [0.0, 10.0], [0.0, 10.0]], num_generations=3)
    tensor([ 1.1547, -0.5774, -0.5774])
    """

    weights: Sequence[float] | None = None
    """One per reward function; None: all 1. A function of weight 0 is only logged."""
    ddof: int = 1
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(float(w) for w in self.weights))

    def estimate(self, columns: list[Groups]) -> Tensor:
        weights = (1.0,) * len(columns) if self.weights is None else self.weights
        if len(weights) != len(columns):
            raise InputError(f"weights has {len(weights)} entries for {len(columns)} reward functions; give one each")
        total, valid = torch.zeros_like(columns[0].rewards), torch.zeros_like(columns[0].valid)
        for weight, column in zip(weights, columns, strict=True):
            part = column.centered() / (column.std("group", self.ddof) + self.eps)
            total = total + weight * torch.where(column.valid, part, 0)
            # A weight of 0 means "log only": the function makes no completion count in the deviation.
            valid = valid | (column.valid if weight != 0 else False)
        summed = replace(columns[0], rewards=total, valid=valid)
        return summed.result(total / (summed.std("batch", self.ddof) + self.eps), where=total != 0)


@dataclass(frozen=True)
class OPOAdvantage(Estimator, name="opo", scale="none", needs=("lengths",)):
    """Reward minus the length-weighted mean of its group: OPO, arXiv:2505.23585.

        A_i = r_i - sum_j l_j r_j / sum_j l_j

    >>> OPOAdvantage()([1.0, 0.0], num_generations=2, lengths=[1, 3])
    tensor([ 0.7500, -0.2500])
    """

    def estimate(self, groups: Groups, lengths: Tensor) -> Tensor:
        baseline = groups.sum(lengths * groups.rewards) / groups.sum(lengths).clamp(min=1)
        return groups.result(groups.rewards - baseline[groups.group])


@dataclass(frozen=True)
class ReinforcePlusPlusAdvantage(Estimator, name="reinforce_pp", scale="batch", uses=("lengths",)):
    """Rewards whitened over the tokens of the batch: REINFORCE++, arXiv:2501.03262.

        A_i = (r_i - mean) / (std + eps),  mean and std over all tokens of the batch

    Without `lengths` every completion counts once. Groups play no part: a group whose rewards are all equal has an
    advantage unless the whole batch is equal. `ddof=1` is verl's deviation, 0 OpenRLHF's.

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

    Without `lengths` every completion counts once, and a group without spread gets exactly 0; with them it does not.

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

    >>> ReMaxAdvantage()([1.0, 0.0], num_generations=2, greedy_rewards=[1.0, 1.0])
    tensor([ 0., -1.])
    """

    def estimate(self, groups: Groups, greedy_rewards: Tensor) -> Tensor:
        difference = groups.rewards - greedy_rewards  # NaN without a greedy reward, and then not larger
        rounding = ROUNDING * torch.maximum(groups.rewards.abs(), greedy_rewards.abs())
        return groups.result(difference, where=difference.abs() > rounding)


def _whiten(
    groups: Groups, values: Tensor, lengths: Tensor | None, ddof: int, eps: float, shift: bool = True
) -> Tensor:
    """Values minus their mean over their deviation, over the tokens of the batch; without lengths over completions."""
    weight = groups.valid.to(torch.float64) if lengths is None else torch.where(groups.valid, lengths, 0)
    total = weight.sum()
    mean = (weight * values).sum() / total.clamp(min=1)
    variance = (weight * (values - mean).square()).sum() / (total - ddof).clamp(min=1)
    return (values - mean if shift else values) / (variance.sqrt() + eps)
