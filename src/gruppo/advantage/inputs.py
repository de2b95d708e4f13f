"""Inputs of an estimator besides rewards, and the checks that several estimators share.

An estimator that takes more than rewards lists the keywords in `needs`, or in `uses` if it can do without; the trainer
passes what is listed there:

    lengths          sampled tokens of each completion
    greedy_rewards   reward of the greedy completion of the sequence's prompt (None: it has none)
    correct          whether each answer is right (None: nobody knows), whatever its reward was made of
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from gruppo.advantage.group import Groups, Rewards
from gruppo.errors import InputError

GroupIds = Sequence[Any] | Tensor | None
PerSequence = Sequence[Any] | Tensor


class Advantage(Protocol):
    """The call of every estimator. It may have these attributes:

    needs, uses: further keywords, see above.
    per_reward: True when it takes the rewards of several functions apart instead of their sum.
    judges_answers: True when it looks at which answers are right and at nothing else of a reward. Penalties have no
        place in its formula; a run adds them after it.
    """

    def __call__(self, rewards: Rewards, num_generations: int = 1, *, group_ids: GroupIds = None) -> Tensor: ...


def read_lengths(estimator: object, lengths: PerSequence | None, num: int) -> Tensor:
    """Token counts as `[N]` float64; an error names the estimator that needs them."""
    if lengths is None:
        raise InputError(
            f"{type(estimator).__name__} needs lengths, the number of sampled tokens of each completion, got None"
        )
    values = torch.as_tensor(lengths).detach().to("cpu", torch.float64)
    if values.shape != (num,):
        raise InputError(f"lengths has shape {tuple(values.shape)} for {num} rewards; give one number per reward")
    wrong = (~((values >= 0) & values.isfinite())).nonzero().flatten().tolist()
    if wrong:
        raise InputError(f"lengths[{wrong[0]}] is {values[wrong[0]].item()}; a length is 0 or more")
    return values


def read_greedy(estimator: object, greedy: PerSequence | None, num: int) -> tuple[Tensor, Tensor]:
    """Rewards of the greedy completions as `[N]` float64, and where there is one."""
    if greedy is None:
        raise InputError(
            f"{type(estimator).__name__} needs greedy_rewards, the reward of the greedy completion of each sequence's "
            "prompt, got None"
        )
    values = greedy.tolist() if isinstance(greedy, Tensor) else list(greedy)
    if len(values) != num:
        raise InputError(f"greedy_rewards has {len(values)} entries for {num} rewards; give one per reward")
    there = torch.tensor([v is not None for v in values], dtype=torch.bool)
    filled = torch.tensor([0.0 if v is None else float(v) for v in values], dtype=torch.float64)
    if not filled.isfinite().all():
        i = int((~filled.isfinite()).nonzero()[0])
        raise InputError(f"greedy_rewards[{i}] is {filled[i].item()}; rewards must be finite, None for no reward")
    return filled, there


def read_correct(correct: PerSequence | None, groups: Groups, correct_at: float) -> tuple[Groups, Tensor]:
    """Groups of the sequences that can be judged, and which of them are right, `[N]` bool.

    Without `correct` a reward of at least `correct_at` is right.
    """
    if correct is None:
        return groups, groups.valid & (groups.rewards >= correct_at)
    values = correct.tolist() if isinstance(correct, Tensor) else list(correct)
    if len(values) != len(groups.rewards):
        raise InputError(f"correct has {len(values)} entries for {len(groups.rewards)} rewards; give one per reward")
    for i, value in enumerate(values):
        if value is not None and not isinstance(value, bool):
            raise InputError(f"correct[{i}] must be True, False or None, got {value!r}")
    known = torch.tensor([value is not None for value in values], dtype=torch.bool)
    right = torch.tensor([value is True for value in values], dtype=torch.bool)
    judged = replace(groups, valid=groups.valid & known)
    return judged, right & judged.valid


def success_rate(groups: Groups, right: Tensor) -> Tensor:
    """Share of right completions of each group `[P]`; 0 for a group without any that can be judged."""
    return groups.sum(right) / groups.count().clamp(min=1)


def check_scale(estimator: object, scale: str, own: str) -> None:
    """Refuse a `scale` that the estimator's formula has no place for."""
    if scale != own:
        raise InputError(
            f"{type(estimator).__name__} has scale={own!r} in its formula, got {scale!r}; leave scale out, or use "
            "GRPOAdvantage, which takes any"
        )


def check_deviation(ddof: int, eps: float) -> None:
    if ddof not in (0, 1):
        raise InputError(f"ddof must be 0 (population) or 1 (sample), got {ddof!r}")
    if not eps >= 0:
        raise InputError(f"eps must be 0 or more, got {eps!r}")
