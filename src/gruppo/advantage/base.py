"""Estimator: what the estimators share, from the call to the tensors that a formula works with."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from gruppo.advantage.group import GroupIds, Groups, Rewards, Scale
from gruppo.errors import InputError

__all__ = ["ADVANTAGES", "Advantage", "Estimator"]

PerSequence = Sequence[Any] | Tensor


class Advantage(Protocol):
    """The call of every estimator, of ours and of yours. It may have these attributes:

    needs, uses: keywords that a run passes to the call, see `Estimator`; it can do without those in `uses`.
    per_reward: True when it takes the rewards of several functions apart instead of their sum.
    judges_answers: True when it looks at which answers are right and at nothing else of a reward. Penalties have no
        place in its formula; a run adds them after it.
    """

    def __call__(self, rewards: Rewards, num_generations: int = 1, *, group_ids: GroupIds = None) -> Tensor: ...


ADVANTAGES: dict[str, type[Advantage]] = {}
"""Estimators by the name they have in a config."""


class Estimator:
    """An estimator is a frozen dataclass with the numbers of its formula, which is its method `estimate`:

        @dataclass(frozen=True)
        class OPOAdvantage(Estimator, name="opo", scale="none", needs=("lengths",)):
            def estimate(self, groups: Groups, lengths: Tensor) -> Tensor: ...

    `name` enters it in ADVANTAGES; the attributes below can be set in the same way. `estimate` gets the rewards as
    `Groups` (with `per_reward` one per function) and by name what `needs` and `uses` list.
    """

    scale: ClassVar[Scale] = "group"
    """The standard deviation in its formula, which a call may name and not change."""
    takes_scale: ClassVar[bool] = False
    """A call may choose the scale; `estimate` gets it, too."""
    needs: ClassVar[tuple[str, ...]] = ()
    uses: ClassVar[tuple[str, ...]] = ()
    per_reward: ClassVar[bool] = False
    judges_answers: ClassVar[bool] = False

    estimate: Callable[..., Tensor]

    def __init_subclass__(cls, name: str | None = None, **attributes: Any) -> None:
        for attribute, value in attributes.items():
            assert attribute in Estimator.__annotations__, attribute
            setattr(cls, attribute, value)
        if name is not None:
            assert name not in ADVANTAGES, name
            ADVANTAGES[name] = cls

    def __post_init__(self) -> None:
        """Check the options that several estimators have; one with others adds to it."""
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
            rewards: N numbers (None abstains), or N rows with one number per reward function, which are summed unless
                the estimator is `per_reward`.
            num_generations: sequences per group, neighbours in `rewards`. With 1 the batch is the group.
            scale: which standard deviation divides: "group", "batch" or "none". None: the estimator's own.
            group_ids: the group of each reward, for groups of unequal size or any order.
            lengths: sampled tokens of each completion.
            greedy_rewards: reward of the greedy completion of each sequence's prompt; None: it has none.
            correct: whether each answer is right, whatever its reward was made of; None: nobody knows.

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
        read = Groups.read_columns if self.per_reward else Groups.read
        groups = read(rewards, num_generations, group_ids, scale)
        num = len(groups[0].rewards) if isinstance(groups, list) else len(groups.rewards)
        inputs: dict[str, Any] = {"scale": scale} if self.takes_scale else {}
        for keyword in (*self.needs, *self.uses):
            if given[keyword] is None and keyword in self.needs:
                raise InputError(f"{name} needs {keyword}, {_MEANING[keyword]}, got None")
            inputs[keyword] = None if given[keyword] is None else _READERS[keyword](given[keyword], num)
        return self.estimate(groups, **inputs)


_MEANING = {
    "lengths": "the number of sampled tokens of each completion",
    "greedy_rewards": "the reward of the greedy completion of each sequence's prompt",
    "correct": "whether each answer is right",
}


def _read_lengths(lengths: PerSequence, num: int) -> Tensor:
    """Token counts as `[N]` float64."""
    values = torch.as_tensor(lengths).detach().to("cpu", torch.float64)
    if values.shape != (num,):
        raise InputError(f"lengths has shape {tuple(values.shape)} for {num} rewards; give one number per reward")
    wrong = (~((values >= 0) & values.isfinite())).nonzero().flatten().tolist()
    if wrong:
        raise InputError(f"lengths[{wrong[0]}] is {values[wrong[0]].item()}; a length is 0 or more")
    return values


def _read_greedy(greedy: PerSequence, num: int) -> Tensor:
    """Rewards of the greedy completions as `[N]` float64, NaN where there is none."""
    values = _one_per_reward("greedy_rewards", greedy, num)
    for i, value in enumerate(values):
        if value is not None and not math.isfinite(value):
            raise InputError(f"greedy_rewards[{i}] is {float(value)}; rewards must be finite, None for no reward")
    return torch.tensor([torch.nan if value is None else float(value) for value in values], dtype=torch.float64)


def _read_correct(correct: PerSequence, num: int) -> Tensor:
    """1 where an answer is right, 0 where it is wrong, NaN where nobody knows, `[N]` float64."""
    values = _one_per_reward("correct", correct, num)
    for i, value in enumerate(values):
        if value is not None and not isinstance(value, bool):
            raise InputError(f"correct[{i}] must be True, False or None, got {value!r}")
    return torch.tensor([torch.nan if value is None else float(value) for value in values], dtype=torch.float64)


def _one_per_reward(name: str, given: PerSequence, num: int) -> list[Any]:
    values = given.tolist() if isinstance(given, Tensor) else list(given)
    if len(values) != num:
        raise InputError(f"{name} has {len(values)} entries for {num} rewards; give one per reward")
    return values


_READERS = {"lengths": _read_lengths, "greedy_rewards": _read_greedy, "correct": _read_correct}


def judged(groups: Groups, correct: Tensor | None, correct_at: float) -> tuple[Groups, Tensor]:
    """Groups of the sequences that can be judged, and which of them are right, `[N]` bool.

    Without `correct` a reward of at least `correct_at` is right.
    """
    if correct is None:
        return groups, groups.valid & (groups.rewards >= correct_at)
    groups = replace(groups, valid=groups.valid & ~correct.isnan())
    return groups, (correct == 1) & groups.valid


def success_rate(groups: Groups, right: Tensor) -> Tensor:
    """Share of right completions of each group `[P]`; 0 for a group without any that can be judged."""
    return groups.sum(right) / groups.count().clamp(min=1)
