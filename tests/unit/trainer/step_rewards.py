"""Rewards for the trainer's tests, which run in this process, so that a step takes milliseconds; and a short cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gruppo.reward import TrainerState

if TYPE_CHECKING:  # reward workers import this module, and need no torch
    from gruppo.trainer import GRPOTrainer
    from gruppo.types import Rollout


def rollouts_of(trainer: GRPOTrainer) -> list[Rollout]:
    """Rollouts of the last step that were trained on."""
    return [rollout for group in trainer.kept for rollout in group.rollouts]


def constant(completions: Sequence[str]) -> list[float]:
    return [0.7] * len(completions)


def by_place(completions: Sequence[str]) -> list[float]:
    """0, 1/3, 2/3, 1 in every group of four: there is always a signal, whatever the model does."""
    return [i % 4 / 3 for i in range(len(completions))]


def later_half(completions: Sequence[str]) -> list[float]:
    """The first half of the groups is dead."""
    return [0.5 if i < len(completions) / 2 else i % 4 / 3 for i in range(len(completions))]


def abstains_on_odd_steps(completions: Sequence[str], step: int) -> list[float | None]:
    return [None if step % 2 else float(len(text)) for text in completions]


def progress(completions: Sequence[str], trainer_state: TrainerState) -> list[float]:
    """The share of the run that is done, plus the epoch in hundreds. It runs in a worker."""
    done = trainer_state.global_step / trainer_state.max_steps
    epochs = 100 * trainer_state.epoch + 10_000 * trainer_state.num_train_epochs
    return [done + epochs] * len(completions)


def right(completions: Sequence[str]) -> list[float]:
    """Everybody is right."""
    return [1.0] * len(completions)


def logs_and_sometimes_fails(completions: Sequence[str], log_extra: Callable[..., None]) -> list[float]:
    if any(text.endswith("2") for text in completions):
        raise ValueError("I do not like 2")
    log_extra("first_letter", [text[:1] for text in completions])
    return [0.0] * len(completions)


def fails_on_odd_answers(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    for text in answer:
        if text[-1] in "13579":
            raise ValueError(f"cannot read {text} \x1b[2J")
    return [float(len(text)) for text in completions]


def unsure(completions: Sequence[str]) -> list[None]:
    return [None] * len(completions)


def logs_a_metric(completions: Sequence[str], log_metric: Callable[..., None]) -> list[float]:
    log_metric("own", len(completions))
    return [0.0] * len(completions)


for function in (logs_a_metric, constant, by_place, later_half, abstains_on_odd_steps, right, logs_and_sometimes_fails,
                 fails_on_odd_answers, unsure):  # fmt: skip
    function.isolated = False  # type: ignore[attr-defined]


def verl_score(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> dict[str, object]:
    """With verl's signature."""
    assert data_source == "sums" and extra_info == {"split": "train"}
    return {"score": float(solution_str == ground_truth), "length": len(solution_str), "gold": ground_truth}
