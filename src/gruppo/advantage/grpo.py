"""GRPO's advantage."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from gruppo.advantage.group import Groups, Rewards, Scale
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


def check_options(normalization: str, ddof: int, eps: float) -> None:
    if normalization not in ("centered", "standard"):
        raise InputError(f"normalization must be 'centered' or 'standard', got {normalization!r}")
    if ddof not in (0, 1):
        raise InputError(f"ddof must be 0 (population) or 1 (sample), got {ddof!r}")
    if not eps >= 0:
        raise InputError(f"eps must be 0 or more, got {eps!r}")
