"""Groups of rewards and their statistics; and filters by them.

Rewards come as numbers, one per sequence, or as one row per sequence with one column per reward function (the row
is summed, except by `Groups.read_columns`). `None` abstains: the sequence takes no part in any statistic and gets
advantage 0. NaN and infinity are refused: an abstention is said, not computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.types import StopReason

__all__ = ["Groups", "groups_with_signal", "not_truncated"]

Rewards = Tensor | Sequence[float | None] | Sequence[Sequence[float | None]]
GroupIds = Sequence[Any] | Tensor | None
Scale = Literal["group", "batch", "none"]

ROUNDING = 2.0**-46
"""A spread of at most this share of the largest reward comes from adding the same numbers in another order (0.1 + 0.2
is not 0.3 in float64). Divided by its own deviation it would become an advantage of 1."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rewards in float64 with the group of each."""

    rewards: Tensor  # [N] float64, 0 where abstained
    valid: Tensor  # [N] bool, False where abstained
    group: Tensor  # [N] int64, 0 to P - 1
    num_groups: int
    dtype: torch.dtype  # of the result
    device: torch.device

    @classmethod
    def read(cls, rewards: Rewards, num_generations: int, group_ids: GroupIds, scale: str) -> "Groups":
        """Check the arguments of an advantage call and bring them to one form."""
        table, valid, dtype, device = _read_table(rewards)
        group, num_groups = _read_groups(len(table), num_generations, group_ids, scale)
        return cls(table.sum(1), valid.any(1), group, num_groups, dtype, device)

    @classmethod
    def read_columns(cls, rewards: Rewards, num_generations: int, group_ids: GroupIds, scale: str) -> "list[Groups]":
        """The same for each reward function by itself."""
        table, valid, dtype, device = _read_table(rewards)
        group, num_groups = _read_groups(len(table), num_generations, group_ids, scale)
        columns = zip(table.unbind(1), valid.unbind(1), strict=True)
        return [cls(*column, group, num_groups, dtype, device) for column in columns]

    def count(self) -> Tensor:
        """Sequences with a reward, per group `[P]` float64."""
        return self.sum(torch.ones_like(self.rewards))

    def mean(self) -> Tensor:
        """Mean reward of each group `[P]`; 0 for a group without rewards."""
        return self.sum(self.rewards) / self.count().clamp(min=1)

    def centered(self) -> Tensor:
        """Reward minus the mean of its group `[N]`; exactly 0 where all rewards of the group are equal."""
        return torch.where(self.has_spread()[self.group], self.rewards - self.mean()[self.group], 0)

    def std(self, scale: Scale, ddof: int) -> Tensor:
        """Standard deviation that `scale` names, one per sequence `[N]`; 0 where there are too few rewards."""
        if scale == "batch":
            return self.whole().std("group", ddof)
        squares = self.sum((self.rewards - self.mean()[self.group]).square())
        return (squares / (self.count() - ddof).clamp(min=1)).sqrt()[self.group]

    def has_spread(self, tolerance: float = 0.0) -> Tensor:
        """Does the group hold different rewards? `[P]` bool, by max - min: a float std of equal values may not be 0.

        Differences that rounding explains, or of at most `tolerance`, are none.
        """
        highest, lowest = self.highest(), -self.shaped(-self.rewards).highest()
        rounding = ROUNDING * torch.maximum(highest.abs(), lowest.abs()).nan_to_num(posinf=0.0)
        return (highest - lowest) > rounding.clamp(min=tolerance)

    def highest(self, among: Tensor | None = None) -> Tensor:
        """Largest reward of each group `[P]`, of the sequences `among` if given; -inf for a group without any."""
        counted = self.valid if among is None else self.valid & among
        empty = torch.full((self.num_groups,), -torch.inf, dtype=torch.float64)
        return empty.scatter_reduce(0, self.group, torch.where(counted, self.rewards, -torch.inf), "amax")

    def result(self, advantages: Tensor, where: Tensor | None = None) -> Tensor:
        """Advantages in the dtype and on the device of the rewards; exactly 0 without a reward, and not `where`.

        `where` is `[N]` bool; None: the sequences of groups with spread.
        """
        keep = self.has_spread()[self.group] if where is None else where
        return torch.where(keep & self.valid, advantages, 0).to(self.device, self.dtype)

    def sum(self, values: Tensor) -> Tensor:
        """Sum of `[N]` values over the sequences with a reward, per group `[P]`."""
        values = torch.where(self.valid, values.to(torch.float64), 0)
        return torch.zeros(self.num_groups, dtype=torch.float64).index_add(0, self.group, values)

    def whole(self) -> "Groups":
        """All sequences as one group."""
        return replace(self, group=torch.zeros_like(self.group), num_groups=1)

    def shaped(self, rewards: Tensor) -> "Groups":
        """The same groups with other rewards `[N]`."""
        return replace(self, rewards=torch.where(self.valid, rewards, 0))


def _read_table(rewards: Rewards) -> tuple[Tensor, Tensor, torch.dtype, torch.device]:
    """Rewards `[N, functions]` in float64 with 0 where one abstained, where none did, dtype and device."""
    dtype, device = torch.float32, torch.device("cpu")
    if isinstance(rewards, Tensor):
        dtype = torch.float64 if rewards.dtype == torch.float64 else torch.float32
        device = rewards.device
        table = rewards.detach().to("cpu", torch.float64)
        if table.dim() not in (1, 2):
            raise InputError(f"rewards must be [N] or [N, functions], got shape {tuple(table.shape)}")
        valid = torch.ones_like(table, dtype=torch.bool)
    else:
        rows: list[Any] = [row.tolist() if isinstance(row, Tensor) else row for row in rewards]
        rows = [list(row) if isinstance(row, Sequence) else row for row in rows]
        widths = {len(row) if isinstance(row, list) else None for row in rows}
        if len(widths) > 1:
            raise InputError(f"rewards mixes rows of different length: {sorted(map(str, widths))}")
        nested = bool(widths) and None not in widths
        filled = [[_number_or_nan(x) for x in row] if nested else _number_or_nan(row) for row in rows]
        abstains = [[x is None for x in row] if nested else row is None for row in rows]
        table = torch.tensor(filled, dtype=torch.float64)
        valid = ~torch.tensor(abstains, dtype=torch.bool)
    broken = valid & ~table.isfinite()
    if broken.any():
        where = broken.nonzero()[0].tolist()
        raise InputError(
            f"rewards[{', '.join(map(str, where))}] is {table[tuple(where)].item()}; rewards must be finite. "
            "Use None for a sequence that has no reward"
        )
    if table.dim() == 1:
        table, valid = table[:, None], valid[:, None]
    return torch.where(valid, table, 0), valid, dtype, device


def _number_or_nan(value: Any) -> float:
    if value is None:
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise InputError(f"rewards must be numbers or None, got {value!r}") from None


def _read_groups(num: int, num_generations: int, group_ids: GroupIds, scale: str) -> tuple[Tensor, int]:
    """The group of each reward, 0 .. P - 1, and P. Ids are numbered in the order of their first appearance."""
    if scale not in ("group", "batch", "none"):
        raise InputError(f"scale must be 'group', 'batch' or 'none', got {scale!r}")
    if group_ids is not None:
        ids = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
        if len(ids) != num:
            raise InputError(f"group_ids has {len(ids)} entries for {num} rewards; give one per reward")
        numbers: dict[Any, int] = {}
        group = [numbers.setdefault(i, len(numbers)) for i in ids]
        return torch.tensor(group, dtype=torch.int64), len(numbers)
    if isinstance(num_generations, bool) or not isinstance(num_generations, int) or num_generations < 1:
        raise InputError(f"num_generations must be a whole number of at least 1, got {num_generations!r}")
    if num % num_generations:
        raise InputError(
            f"rewards has {num} values, which num_generations={num_generations} does not divide; "
            "pass whole groups, or group_ids for groups of unequal size"
        )
    if num_generations == 1 and scale == "group":
        raise InputError(
            "num_generations=1 leaves no group to compare with: every advantage would be 0. Sample at least 2 "
            'per prompt, or use scale="batch" to compare over the whole batch'
        )
    if num_generations == 1:  # no groups: the batch is the baseline
        return torch.zeros(num, dtype=torch.int64), 1
    return torch.arange(num) // num_generations, num // num_generations


# --- which sequences to train on ------------------------------------------------------------------------------------
# A filter answers with one bool per sequence, so the groups stay recognisable. Whether a dropped sequence still counts
# in its group's mean is decided by the order of the calls: advantages first and filter after (it counts), or filter
# first and advantages over `group_ids[keep]` (it does not).


def groups_with_signal(
    rewards: Rewards,
    num_generations: int = 1,
    group_ids: GroupIds = None,
    tolerance: float = 0.0,
) -> Tensor:
    """True for every sequence of a group whose rewards differ by more than `tolerance`, `[N]` bool.

    Groups are kept or dropped whole.

    >>> groups_with_signal([1.0, 1.0, 0.0, 1.0], num_generations=2)
    tensor([False, False,  True,  True])
    """
    groups = Groups.read(rewards, num_generations, group_ids, "group")
    return groups.has_spread(tolerance)[groups.group].to(groups.device)


def not_truncated(stop_reasons: Sequence[StopReason]) -> Tensor:
    """True for sequences that ended by themselves, `[N]` bool.

    >>> not_truncated(["stop", "length"])
    tensor([ True, False])
    """
    for i, reason in enumerate(stop_reasons):
        if reason not in ("stop", "length"):
            raise InputError(f"stop_reasons[{i}] must be 'stop' or 'length', got {reason!r}")
    return torch.tensor([reason == "stop" for reason in stop_reasons], dtype=torch.bool)
