"""GRPO's advantage, and the two papers that change its divisor."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from gruppo.advantage.group import Groups, Rewards, Scale
from gruppo.advantage.inputs import GroupIds, check_deviation, check_scale
from gruppo.errors import InputError


@dataclass(frozen=True)
class GRPOAdvantage:
    """Reward minus the mean of its group; with `normalization="standard"` over a standard deviation.

        centered:  A_i = r_i - mean_g          (Dr. GRPO, arXiv:2503.20783)
        standard:  A_i = (r_i - mean_g) / (std + eps)   (GRPO, arXiv:2402.03300)

    `scale` names the standard deviation: of the group, of the batch (arXiv:2508.08221), or none.

    >>> GRPOAdvantage()([0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([-0.5000,  0.5000, -0.5000,  0.5000,  0.7500, -0.2500, -0.2500, -0.2500])
    >>> GRPOAdvantage(normalization="standard")([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 1.5000, -0.5000, -0.5000, -0.5000])
    """

    normalization: Literal["centered", "standard"] = "centered"
    ddof: int = 1
    """1: sample standard deviation (n - 1); 0: population."""
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
        """One advantage per reward, `[N]`.

        Args:
            rewards: N numbers (None abstains), or N rows with one number per reward function, which are summed.
            num_generations: sequences per group, neighbours in `rewards`. With 1 the batch is the group.
            scale: which standard deviation divides: "group", "batch" or "none".
            group_ids: the group of each reward, for groups of unequal size or any order.
        """
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        advantages = groups.rewards - groups.mean()[groups.group]
        if self.normalization == "standard" and scale != "none":
            advantages = advantages / (groups.std(scale, self.ddof) + self.eps)
        return groups.result(advantages)


@dataclass(frozen=True)
class DRGRPOAdvantage:
    """Reward minus the mean of its group, and nothing else: Dr. GRPO, arXiv:2503.20783.

        A_i = r_i - mean_g

    A division by the group's deviation would give very easy and very hard prompts more weight.

    >>> DRGRPOAdvantage()([1.0, 0.0, 0.0, 0.0], num_generations=4)
    tensor([ 0.7500, -0.2500, -0.2500, -0.2500])
    """

    def __call__(
        self, rewards: Rewards, num_generations: int = 1, scale: Scale = "none", group_ids: GroupIds = None
    ) -> Tensor:
        """One advantage per reward, `[N]`; arguments as for `GRPOAdvantage`."""
        check_scale(self, scale, "none")
        return GRPOAdvantage()(rewards, num_generations, scale, group_ids)


@dataclass(frozen=True)
class LitePPOAdvantage:
    """Mean of the group, standard deviation of the batch: Lite PPO, arXiv:2508.08221.

        A_i = (r_i - mean_g) / (std_batch + eps)

    One divisor for all groups, so that a group in which rewards hardly differ is not blown up.

    >>> LitePPOAdvantage()([1.0, 1.0, 0.0, 2.0], num_generations=2)
    tensor([ 0.0000,  0.0000, -1.2247,  1.2247])
    """

    ddof: int = 1
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_deviation(self.ddof, self.eps)

    def __call__(
        self, rewards: Rewards, num_generations: int = 1, scale: Scale = "batch", group_ids: GroupIds = None
    ) -> Tensor:
        """One advantage per reward, `[N]`; arguments as for `GRPOAdvantage`."""
        check_scale(self, scale, "batch")
        return GRPOAdvantage("standard", self.ddof, self.eps)(rewards, num_generations, scale, group_ids)


def check_options(normalization: str, ddof: int, eps: float) -> None:
    if normalization not in ("centered", "standard"):
        raise InputError(f"normalization must be 'centered' or 'standard', got {normalization!r}")
    check_deviation(ddof, eps)
