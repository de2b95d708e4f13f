"""The file of a step's completions, written by real steps."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from gruppo.errors import InputError
from gruppo.trainer import GRPOTrainer, TrainConfig

Make = Callable[..., GRPOTrainer]


def per_rollout(trainer: GRPOTrainer) -> list[tuple[Any, Any]]:
    """The rows of the last step's file, each with its rollout."""
    found = trainer.run.completions(trainer.step_number).to_pylist()
    return list(zip(found, [r for g in trainer.batch.groups for r in g.rollouts], strict=True))


def test_numbers_in_the_file_are_those_of_the_rollouts(make_trainer: Make) -> None:
    trainer = make_trainer(completions_every=1, kl_in_reward=0.1, overlong_cache=2)
    for _ in range(2):
        trainer.step()
        for row, rollout in per_rollout(trainer):
            trajectory = rollout.trajectory
            assert (row["tokens"], row["prompt_ids"]) == (list(trajectory.tokens), list(trajectory.prompt_ids))
            assert (row["logps"], row["entropies"]) == (list(trajectory.logps), list(trajectory.entropies))
            assert (row["old_logps"], row["ref_logps"]) == (list(rollout.old_logps), list(rollout.ref_logps))
            names = ("reward", "shaped", "advantage", "correct")
            assert [row[n] for n in names] == [getattr(rollout, n) for n in names]
            assert row["versions"] == [trainer.step_number - 1] * 2
            assert json.loads(row["columns"]) == dict(trajectory.prompt.columns)
            assert row["policy_logps"] is None and row["sampled"] is None


def test_a_run_marks_what_it_does_not_train_on(make_trainer: Make) -> None:
    trainer = make_trainer(
        completions_every=1,
        mask_truncated=True,
        temperature=5.0,  # hot enough that some answers have not ended after the four tokens that they take
        dynamic_sampling=2,
        rewards=("step_rewards:later_half",),
    )
    trainer.step()
    seen = set()
    for row, rollout in per_rollout(trainer):
        if row["status"] != "kept":
            expected = "left_out"
        elif rollout.trajectory.stop_reason == "length":
            expected = "masked"
        else:
            expected = "" if rollout.advantage else "no_advantage"
        assert row["untrained"] == [expected] * len(rollout.trajectory.tokens)
        seen.add(expected)
    assert seen >= {"", "masked", "left_out"}


def test_a_group_without_signal_has_no_advantage_in_the_file(make_trainer: Make) -> None:
    trainer = make_trainer(completions_every=1, rewards=("step_rewards:constant",))
    trainer.step()
    assert {reason for row, _ in per_rollout(trainer) for reason in row["untrained"]} == {"no_advantage"}


def test_a_limit_below_the_size_of_a_group_is_refused() -> None:
    with pytest.raises(InputError, match=r"completions_limit=4 is less than group_size=8.*or set completions_every=0"):
        TrainConfig.read({"completions_limit": 4})
    assert TrainConfig.read({"completions_limit": 4, "completions_every": 0}).completions_limit == 4
