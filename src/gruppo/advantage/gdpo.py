"""Several rewards, each normalised by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gruppo.advantage.group import Groups, Rewards, Scale
from gruppo.advantage.inputs import GroupIds, check_deviation, check_scale
from gruppo.errors import InputError


@dataclass(frozen=True)
class GDPOAdvantage:
    """Each reward function normalised in its own groups, then weighted and summed, then scaled by the batch.

        A_ik = (r_ik - mean_gk) / (std_gk + eps),   s_i = sum_k w_k A_ik,   A_i = s_i / (std_batch(s) + eps)

    GDPO, arXiv:2601.05242. Summed first, as GRPO does, (1, 0) and (0, 1) are the same reward, and a function of a large
    scale drowns the others. The mean of s over the batch is 0, so it is not subtracted: a group in which no function
    tells the completions apart gets exactly 0.

    >>> GDPOAdvantage()([[1.0, 30.0], [0.0, 10.0], [0.0, 10.0]], num_generations=3)
    tensor([ 1.1547, -0.5774, -0.5774])
    """

    weights: Sequence[float] | None = None
    """One per reward function; None: all 1."""
    ddof: int = 1
    eps: float = 1e-8
    per_reward: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_deviation(self.ddof, self.eps)
        if self.weights is not None:
            object.__setattr__(self, "weights", tuple(float(w) for w in self.weights))

    def __call__(
        self, rewards: Rewards, num_generations: int = 1, scale: Scale = "group", group_ids: GroupIds = None
    ) -> Tensor:
        """One advantage per row of rewards, `[N]`.

        Args:
            rewards: `[N, functions]`, a row per sequence; None leaves a function out of that row.
            num_generations, scale, group_ids: as for `GRPOAdvantage`.
        """
        check_scale(self, scale, "group")
        columns = Groups.read_columns(rewards, num_generations, group_ids, scale)
        weights = (1.0,) * len(columns) if self.weights is None else self.weights
        if len(weights) != len(columns):
            raise InputError(f"weights has {len(weights)} entries for {len(columns)} reward functions; give one each")
        total = torch.zeros_like(columns[0].rewards)
        valid = torch.zeros_like(columns[0].valid)
        for weight, column in zip(weights, columns, strict=True):
            part = column.centered() / (column.std("group", self.ddof) + self.eps)
            total = total + weight * torch.where(column.valid, part, 0)
            # A function of weight 0 is there to be looked at: it makes no completion count in the deviation.
            valid = valid | (column.valid if weight != 0 else False)
        summed = Groups(total, valid, columns[0].group, columns[0].num_groups, columns[0].dtype, columns[0].device)
        return summed.result(total / (summed.std("batch", self.ddof) + self.eps), where=total != 0)
