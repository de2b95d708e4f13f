"""REINFORCE leave-one-out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from gruppo.advantage.group import Groups, Rewards, Scale
from gruppo.advantage.grpo import check_options


@dataclass(frozen=True)
class RLOOAdvantage:
    """Reward minus the mean of the *other* rewards of its group, arXiv:2402.14740. Unbiased.

        A_i = r_i - mean_{j != i} r_j = G / (G - 1) * (r_i - mean_g)

    With `normalization="standard"` it is divided by the standard deviation that `scale` names, of all rewards of the
    group: the deviation of the others alone would be 0, and the quotient huge, whenever they agree.

    >>> RLOOAdvantage()([0.0, 1.0], num_generations=2)
    tensor([-1.,  1.])
    """

    normalization: Literal["centered", "standard"] = "centered"
    ddof: int = 1
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_options(self.normalization, self.ddof, self.eps)

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Scale = "group",
        group_ids: Sequence[Any] | Tensor | None = None,
    ) -> Tensor:
        """One advantage per reward, `[N]`; arguments as for `GRPOAdvantage`."""
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        count = groups.count()
        advantages = (groups.rewards - groups.mean()[groups.group]) * (count / (count - 1).clamp(min=1))[groups.group]
        if self.normalization == "standard" and scale != "none":
            advantages = advantages / (groups.std(scale, self.ddof) + self.eps)
        return groups.result(advantages)
