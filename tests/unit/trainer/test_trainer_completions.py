"""The file of a step's completions, written by real steps."""

import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.errors import InputError
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.trainer.trainer import TrainResult
from gruppo.types import Rollout

Make = Callable[..., GRPOTrainer]


def per_rollout(trainer: GRPOTrainer) -> list[tuple[Any, Any]]:
    """The rows of the last step's file, each with its rollout."""
    trainer.recorder.flush()
    found = trainer.run.completions(trainer.step_number).to_pylist()
    return list(zip(found, [r for g in trainer.groups for r in g.rollouts], strict=True))


def test_numbers_in_the_file_are_those_of_the_rollouts(make_trainer: Make) -> None:
    trainer = make_trainer(completions_every=1, kl_in_reward=0.1, overlong_cache=2)
    for _ in range(2):
        trainer._take_step(TrainResult(0))
        for row, rollout in per_rollout(trainer):
            trajectory = rollout.trajectory
            assert (row["tokens"], row["prompt_ids"]) == (list(trajectory.tokens), list(trajectory.prompt_ids))
            assert row["logps"] == list(trajectory.logps)
            assert (row["old_logps"], row["ref_logps"]) == (list(rollout.old_logps), list(rollout.ref_logps))
            names = ("reward", "shaped", "advantage", "correct")
            assert [row[n] for n in names] == [getattr(rollout, n) for n in names]
            assert row["versions"] == [trainer.step_number - 1] * 2
            assert json.loads(row["columns"]) == dict(trajectory.prompt.columns)
            assert row["sampled"] is None


def plainly_scored(module: Any, rollout: Rollout) -> tuple[list[float], list[float]]:
    """Log-probs and entropies of a rollout's tokens by a forward of transformers on it alone, in float64."""
    ids = [*rollout.trajectory.prompt_ids, *rollout.trajectory.tokens]
    with torch.no_grad():
        logits = module(torch.tensor([ids])).logits[0, len(rollout.trajectory.prompt_ids) - 1 : -1].double()
    logps = logits.log_softmax(-1)
    picked = logps.gather(1, torch.tensor(rollout.trajectory.tokens)[:, None])[:, 0]
    return picked.tolist(), (-(logps.exp() * logps).sum(-1)).tolist()


def test_the_file_holds_what_the_last_update_saw_of_each_token(make_trainer: Make, tmp_path: Path) -> None:
    region = 1e-3
    options = {"loss": "dppo_tv", "loss_options": {"region": region}, "beta": 0.01, "lr": 1e-2}
    one = make_trainer(**options, output=str(tmp_path / "one"))
    before = copy.deepcopy(one.model.model)
    one._take_step(TrainResult(0))  # its weights are those that the second update of the other run begins with
    two = make_trainer(**options, epochs_per_batch=2, completions_every=1, output=str(tmp_path / "two"))
    two._take_step(TrainResult(0))
    rejected = kept = 0
    for row, rollout in per_rollout(two):
        old, _ = plainly_scored(before, rollout)
        assert row["ref_logps"] == pytest.approx(old, abs=1e-5)  # the reference is the model of the start
        if not rollout.advantage:
            assert set(row["untrained"]) == {"no_advantage"}
            continue
        policy, entropies = plainly_scored(one.model.model, rollout)
        assert row["old_logps"] == pytest.approx(old, abs=1e-5)
        assert row["policy_logps"] == pytest.approx(policy, abs=1e-5)
        assert row["entropies"] == pytest.approx(entropies, abs=1e-5)
        for logp, old_logp, reason in zip(policy, old, row["untrained"], strict=True):
            moved = math.copysign(1, rollout.advantage) * (math.exp(logp) - math.exp(old_logp))
            assert reason == ("rejected" if moved > region else "")
            rejected, kept = rejected + (moved > region), kept + (moved <= region)
    assert rejected >= 5 and kept >= 5


@pytest.mark.parametrize(
    ("loss", "is_clipped"),
    [
        ("grpo", lambda r, mean, a: (r > 1.002 and a > 0) - (r < 0.999 and a < 0)),
        ("cispo", lambda r, mean, a: (r > 1.002) - (r < 0.998)),
        ("gspo", lambda r, mean, a: (mean > 1.002 and a > 0) - (mean < 0.999 and a < 0)),
    ],
)
def test_clipped_tokens_are_those_that_the_metric_counts(make_trainer: Make, loss: str, is_clipped: Any) -> None:
    clip = 2e-3 if loss == "cispo" else (1e-3, 2e-3)
    trainer = make_trainer(loss=loss, clip_range=clip, lr=1e-2, epochs_per_batch=2, completions_every=1)
    trainer._take_step(TrainResult(0))
    marks, sequences = [], []
    for row, rollout in per_rollout(trainer):
        if rollout.advantage:
            moved = [new - old for new, old in zip(row["policy_logps"], row["old_logps"], strict=True)]
            mean = math.exp(sum(moved) / len(moved))
            assert row["clipped"] == [is_clipped(math.exp(d), mean, rollout.advantage) for d in moved]
            marks += row["clipped"]
            sequences.append(row["clipped"][0])
    counted = sequences if loss == "gspo" else marks
    metrics = trainer.run.metrics()[-1]  # over both updates; in the first the ratio is 1
    assert metrics["live/clip_ratio_high"] == counted.count(1) / (2 * len(counted))
    assert metrics["live/clip_ratio_low"] == counted.count(-1) / (2 * len(counted)) > 0


def test_a_loss_that_clips_nothing_marks_no_token(make_trainer: Make) -> None:
    trainer = make_trainer(loss="reinforce", completions_every=1)
    trainer._take_step(TrainResult(0))
    assert all(row["clipped"] is None for row, _ in per_rollout(trainer))


def test_a_run_marks_what_it_does_not_train_on(make_trainer: Make) -> None:
    trainer = make_trainer(
        completions_every=1,
        mask_truncated=True,
        temperature=5.0,  # hot enough that some answers have not ended after the four tokens that they take
        dynamic_sampling=2,
        rewards=("step_rewards:later_half",),
    )
    trainer._take_step(TrainResult(0))
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
    trainer._take_step(TrainResult(0))
    assert {reason for row, _ in per_rollout(trainer) for reason in row["untrained"]} == {"no_advantage"}


def test_a_limit_below_the_size_of_a_group_is_refused() -> None:
    with pytest.raises(InputError, match=r"completions_limit=4 is less than group_size=8.*or set completions_every=0"):
        TrainConfig.read({"completions_limit": 4})
    assert TrainConfig.read({"completions_limit": 4, "completions_every": 0}).advanced.completions_limit == 4
