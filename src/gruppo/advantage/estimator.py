"""Estimator and Groups: rewards in groups, with the exact statistics that estimators compute with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor

from gruppo.errors import InputError
from gruppo.types import StopReason

__all__ = ["ADVANTAGES", "Advantage", "Estimator", "Groups", "groups_with_signal", "not_truncated"]

Rewards = Tensor | Sequence[float | None] | Sequence[Sequence[float | None]]
GroupIds = Sequence[Any] | Tensor | None
Scale = Literal["group", "batch", "none"]
PerSequence = Sequence[Any] | Tensor

ROUNDING = 2.0**-22
"""A spread of at most this share of the largest reward is rounding: two to four steps of float32, in which reward
models compute and scores are added up. Divided by its own deviation it would become an advantage of 1."""
LARGEST = {torch.float32: torch.finfo(torch.float32).max / 2, torch.float64: 1e150}
"""Largest reward by the dtype of the advantages: a difference of two must be finite, in float64 also its square."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Rewards in float64 with the group of each."""

    rewards: Tensor  # [N] float64, 0 where abstained
    valid: Tensor  # [N] bool, False where abstained
    group: Tensor  # [N] int64, 0 to P - 1
    num_groups: int
    dtype: torch.dtype  # of the result
    device: torch.device
    table: Tensor  # [N, functions] float64, NaN where a function abstained

    @classmethod
    def read(cls, rewards: Rewards, num_generations: int, group_ids: GroupIds, scale: str) -> "Groups":
        """Check the arguments of an advantage call and convert them to one form."""
        dtype, device = torch.float32, torch.device("cpu")
        if isinstance(rewards, Tensor):
            if rewards.dim() not in (1, 2):
                raise InputError(f"rewards must be [N] or [N, functions], got shape {tuple(rewards.shape)}")
            dtype, device = torch.float64 if rewards.dtype == torch.float64 else dtype, rewards.device
            rewards = rewards.tolist()
        rows: list[Any] = [row.tolist() if isinstance(row, Tensor) else row for row in rewards]
        widths = {len(row) if isinstance(row, Sequence) else None for row in rows}
        if len(widths) > 1:
            raise InputError(f"rewards mixes rows of different length: {sorted(map(str, widths))}")
        numbers: list[float] = []
        for i, row in enumerate(rows):
            for j, value in enumerate(row if isinstance(row, Sequence) else [row]):
                try:
                    numbers.append(math.nan if value is None else float(value))
                except (TypeError, ValueError):
                    raise InputError(f"rewards must be numbers or None, got {value!r}") from None
                if value is not None and not math.isfinite(numbers[-1]):
                    place = f"{i}, {j}" if isinstance(row, Sequence) else i
                    raise InputError(
                        f"rewards[{place}] is {numbers[-1]}; rewards must be finite. Use None for a sequence that has "
                        "no reward"
                    )
        num, width = len(rows), next(iter(widths), None)
        table = torch.tensor(numbers, dtype=torch.float64).reshape(num, 1 if width is None else width)
        sizes = table.nan_to_num(0).abs().sum(1).tolist()
        limit = LARGEST[dtype]
        for i, size in enumerate(sizes):
            if size > limit:
                raise InputError(
                    f"rewards[{i}] is {rows[i]!r}, and the largest reward that {str(dtype).removeprefix('torch.')} "
                    f"advantages can be made of is {limit:.3g}; scale the rewards"
                )
        if scale not in ("group", "batch", "none"):
            raise InputError(f"scale must be 'group', 'batch' or 'none', got {scale!r}")
        if group_ids is not None:
            ids = group_ids.tolist() if isinstance(group_ids, Tensor) else list(group_ids)
            if len(ids) != num:
                raise InputError(f"group_ids has {len(ids)} entries for {num} rewards; give one per reward")
        elif isinstance(num_generations, bool) or not isinstance(num_generations, int) or num_generations < 1:
            raise InputError(f"num_generations must be a whole number of at least 1, got {num_generations!r}")
        elif num % num_generations:
            raise InputError(
                f"rewards has {num} values, which num_generations={num_generations} does not divide; "
                "pass whole groups, or group_ids for groups of unequal size"
            )
        elif num_generations == 1 and scale == "group":
            raise InputError(
                "num_generations=1 leaves no group to compare with: every advantage would be 0. Sample at least 2 "
                'per prompt, or use scale="batch" to compare over the whole batch'
            )
        else:  # with 1 there are no groups: the batch is the baseline
            ids = [0 if num_generations == 1 else i // num_generations for i in range(num)]
        numbered: dict[Any, int] = {}
        group = torch.tensor([numbered.setdefault(i, len(numbered)) for i in ids], dtype=torch.int64)
        summed, valid = torch.where(table.isnan(), 0, table).sum(1), ~table.isnan().all(1)
        return cls(summed, valid, group, len(numbered), dtype, device, table)

    def columns(self) -> "list[Groups]":
        """The same groups, once per reward function."""
        return [replace(self, rewards=column.nan_to_num(0), valid=~column.isnan()) for column in self.table.unbind(1)]

    def count(self) -> Tensor:
        """Sequences with a reward, per group `[P]` float64."""
        return self.sum(self.valid)

    def mean(self, values: Tensor | None = None) -> Tensor:
        """Mean of `[N]` values, None: of the rewards, over each group `[P]`; 0 for a group without rewards."""
        return self.sum(self.rewards if values is None else values) / self.sum(self.valid).clamp(min=1)

    def centered(self) -> Tensor:
        """Reward minus the mean of its group `[N]`; exactly 0 where all rewards of the group are equal."""
        return torch.where(self.has_spread()[self.group], self.rewards - self.mean()[self.group], 0)

    def std(self, scale: Scale, ddof: int) -> Tensor:
        """Standard deviation that `scale` names, one per sequence `[N]`; 0 where there are too few rewards."""
        if scale == "batch":
            return self.whole().std("group", ddof)
        squares = self.sum((self.rewards - self.mean()[self.group]).square())
        return (squares / (self.sum(self.valid) - ddof).clamp(min=1)).sqrt()[self.group]

    def has_spread(self, tolerance: float = 0.0) -> Tensor:
        """True for groups with different rewards, `[P]` bool, by max - min: the float std of equal values may not be 0.

        Differences within rounding or `tolerance` do not count.
        """
        both = torch.stack([self.rewards, -self.rewards]).masked_fill(~self.valid, -torch.inf)
        empty = torch.full((2, self.num_groups), -torch.inf, dtype=torch.float64)
        highest, minus_lowest = empty.scatter_reduce(1, self.group.expand(2, -1), both, "amax")
        rounding = ROUNDING * torch.maximum(highest.abs(), minus_lowest.abs()).nan_to_num(posinf=0.0)
        return (highest + minus_lowest) > rounding.clamp(min=tolerance)

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

    def judged(self, correct: Tensor | None, correct_at: float) -> "tuple[Groups, Tensor]":
        """Groups of the sequences that can be judged, and True for the right ones, `[N]` bool.

        Without `correct` a reward of at least `correct_at` is right.
        """
        if correct is None:
            return self, self.valid & (self.rewards >= correct_at)
        valid = self.valid & ~correct.isnan()
        return replace(self, valid=valid), (correct == 1) & valid


# --- estimators ------------------------------------------------------------------------------------------------------


class Advantage(Protocol):
    """The call of every estimator. It may have `needs`, `uses`, `per_reward` and `judges_answers` of `Estimator`."""

    def __call__(self, rewards: Rewards, num_generations: int = 1, *, group_ids: GroupIds = None) -> Tensor: ...


ADVANTAGES: dict[str, type[Advantage]] = {}
"""Estimators by the name they have in a config."""


class Estimator:
    """An estimator is a frozen dataclass with the numbers of its formula, which is its method `estimate`.

    Keywords of the class, as in `class OPOAdvantage(Estimator, name="opo", needs=("lengths",))`: `name` enters it in
    ADVANTAGES, the others set the attributes below. `estimate` gets the rewards as `Groups` (with `per_reward` one per
    function) and by name what `needs` and `uses` list.
    """

    scale: ClassVar[Scale] = "group"
    """Standard deviation in its formula; a call may name it but not change it."""
    takes_scale: ClassVar[bool] = False
    """True if a call may choose the scale, which `estimate` then gets."""
    needs: ClassVar[tuple[str, ...]] = ()
    uses: ClassVar[tuple[str, ...]] = ()
    """Keywords that a run passes to the call; those in `uses` are optional."""
    per_reward: ClassVar[bool] = False
    """True if it takes the rewards of several functions separately instead of their sum."""
    judges_answers: ClassVar[bool] = False
    """True if it only looks at which answers are right. A run then adds penalties after its formula."""

    estimate: Callable[..., Tensor]

    def __init_subclass__(cls, name: str | None = None, **attributes: Any) -> None:
        for attribute, value in attributes.items():
            assert attribute in Estimator.__annotations__, attribute
            setattr(cls, attribute, value)
        if name is not None:
            assert name not in ADVANTAGES, name
            ADVANTAGES[name] = cls

    def __post_init__(self) -> None:
        """Check options that several estimators share; subclasses add their own checks."""
        normalization, ddof, eps = (getattr(self, name, None) for name in ("normalization", "ddof", "eps"))
        if normalization not in ("centered", "standard", None):
            raise InputError(f"normalization must be 'centered' or 'standard', got {normalization!r}")
        if ddof not in (0, 1, None):
            raise InputError(f"ddof must be 0 (population) or 1 (sample), got {ddof!r}")
        if eps is not None and not eps >= 0:
            raise InputError(f"eps must be 0 or more, got {eps!r}")

    def __call__(
        self,
        rewards: Rewards,
        num_generations: int = 1,
        scale: Scale | None = None,
        group_ids: GroupIds = None,
        *,
        lengths: PerSequence | None = None,
        greedy_rewards: PerSequence | None = None,
        correct: PerSequence | None = None,
    ) -> Tensor:
        """One advantage per reward, `[N]`.

        Args:
            rewards: N numbers, or N rows with one number per reward function, which are summed unless the estimator is
                `per_reward`. None abstains (no part in any statistic, advantage 0); NaN and infinity are refused.
            num_generations: sequences per group, neighbours in `rewards`. With 1 the batch is the group.
            scale: which standard deviation divides: "group", "batch" or "none". None: the estimator's own.
            group_ids: the group of each reward, for groups of unequal size or any order.
            lengths: sampled tokens of each completion.
            greedy_rewards: reward of the greedy completion of each sequence's prompt; None: it has none.
            correct: whether each answer is right, whatever its reward was made of; None: it is not known.

        The last three are for estimators that list them in `needs` or `uses`.
        """
        given = {"lengths": lengths, "greedy_rewards": greedy_rewards, "correct": correct}
        name = type(self).__name__
        for keyword, value in given.items():
            if value is not None and keyword not in (*self.needs, *self.uses):
                raise TypeError(f"{name}.__call__() got an unexpected keyword argument {keyword!r}")
        scale = self.scale if scale is None else scale
        if scale != self.scale and not self.takes_scale:
            raise InputError(
                f"{name} has scale={self.scale!r} in its formula, got {scale!r}; leave scale out, or use "
                "GRPOAdvantage, which takes any"
            )
        groups = Groups.read(rewards, num_generations, group_ids, scale)
        inputs: dict[str, Any] = {"scale": scale} if self.takes_scale else {}
        for keyword in (*self.needs, *self.uses):
            value = given[keyword]
            if value is None and keyword in self.needs:
                raise InputError(f"{name} needs {keyword}, {_MEANING[keyword]}, got None")
            read = _read_lengths if keyword == "lengths" else _read_optional
            inputs[keyword] = None if value is None else read(keyword, value, len(groups.rewards))
        return self.estimate(groups.columns() if self.per_reward else groups, **inputs)


_MEANING = {
    "lengths": "the number of sampled tokens of each completion",
    "greedy_rewards": "the reward of the greedy completion of each sequence's prompt",
    "correct": "whether each answer is right",
}


def _read_lengths(name: str, lengths: PerSequence, num: int) -> Tensor:
    """Token counts as `[N]` float64."""
    values = torch.as_tensor(lengths, dtype=torch.float64).detach().cpu()
    if values.shape != (num,):
        raise InputError(f"{name} has shape {tuple(values.shape)} for {num} rewards; give one number per reward")
    wrong = (~((values >= 0) & values.isfinite())).nonzero().flatten().tolist()
    if wrong:
        raise InputError(f"{name}[{wrong[0]}] is {values[wrong[0]].item()}; a length is 0 or more")
    return values


def _read_optional(name: str, given: PerSequence, num: int) -> Tensor:
    """Greedy rewards or 1 and 0 for right and wrong answers as `[N]` float64, NaN where there is None."""
    values = given.tolist() if isinstance(given, Tensor) else list(given)
    if len(values) != num:
        raise InputError(f"{name} has {len(values)} entries for {num} rewards; give one per reward")
    for i, value in enumerate(values):
        if name == "correct" and not isinstance(value, bool | None):
            raise InputError(f"correct[{i}] must be True, False or None, got {value!r}")
        if value is not None and not math.isfinite(value):
            raise InputError(f"{name}[{i}] is {float(value)}; rewards must be finite, None for no reward")
    return torch.tensor([torch.nan if value is None else float(value) for value in values], dtype=torch.float64)


# --- which sequences to train on ------------------------------------------------------------------------------------


def groups_with_signal(
    rewards: Rewards, num_generations: int = 1, group_ids: GroupIds = None, tolerance: float = 0.0
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
