"""Rollouts ahead: the schedule, the background against one step after the other, checkpoints, the gain in time."""

import time
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from gruppo import faults
from gruppo.errors import InputError, RewardError
from gruppo.faults import Fault
from gruppo.rollout.schedule import Ahead
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.types import Group, Rollout

pytestmark = pytest.mark.slow


def config(output: Path, **options: Any) -> TrainConfig:
    """A short run of the embedded task with what meets the schedule: refills, retired prompts, a KL reference."""
    common = {"steps": 6, "prompts_per_step": 8, "group_size": 4, "max_new_tokens": 4, "lr": 3e-4, "eval_prompts": 8}
    common |= {"dynamic_sampling": 2, "retire_solved": 1, "beta": 0.01, "threads": 1, "tensorboard": False}
    return TrainConfig(output=str(output), **(common | options))


def trained(config: TrainConfig, **options: Any) -> GRPOTrainer:
    trainer = GRPOTrainer(config, quiet=True, **options)
    trainer.train()
    return trainer


def weights(trainer: GRPOTrainer) -> list[torch.Tensor]:
    return [p.detach() for p in trainer.model.model.parameters()]


class AtOnce:
    """A worker that is done when it is asked."""

    def submit(self, job, *args) -> Future:
        future: Future = Future()
        future.set_result(job(*args))
        return future

    def shutdown(self, **_: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("staleness", "more"),
    [
        (1, {"epochs_per_batch": 2, "minibatches": 2}),
        (2, {}),
        *(
            pytest.param(staleness, more, marks=pytest.mark.long)
            for staleness, more in (
                *((1, {}), (1, {"lora": True}), (1, {"advantage": "remax"}), (2, {"lora": True})),
                *((2, {"epochs_per_batch": 2, "minibatches": 2}), (2, {"advantage": "remax"})),
            )
        ),
    ],
)
def test_the_background_gives_what_one_step_after_the_other_gives(
    staleness: int, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    behind = trained(config(tmp_path / "background", max_staleness=staleness, **more))
    per_step = 4 if "minibatches" in more else 1  # updates
    ages = [row["rollout/staleness"] for row in behind.run.metrics() if "rollout/staleness" in row]
    assert ages == [per_step * min(step, staleness) for step in range(6)]
    monkeypatch.setattr("gruppo.rollout.schedule.ThreadPoolExecutor", lambda *_, **__: AtOnce())
    in_turn = trained(config(tmp_path / "in_turn", max_staleness=staleness, **more))
    assert all(map(torch.equal, weights(behind), weights(in_turn)))
    assert behind.run.metrics() == in_turn.run.metrics()


def test_a_step_is_sampled_from_the_weights_of_its_turn(tmp_path: Path) -> None:
    """Step m of k = 1 has the completions of the model after step m - 2: sampled anew here from those weights."""
    kept: dict[int, tuple[list[torch.Tensor], list[Group]]] = {}

    def keep(trainer: GRPOTrainer, step: int, _metrics: Any) -> None:
        kept[step] = [p.clone() for p in weights(trainer)], trainer.groups

    options = {"dynamic_sampling": 0, "retire_solved": 0, "beta": 0.0}
    trained(config(tmp_path / "run", max_staleness=1, **options), callbacks=[keep])
    other = GRPOTrainer(config(tmp_path / "other", **options), quiet=True)
    for step in (3, 6):
        with torch.no_grad():
            for own, then in zip(other.model.model.parameters(), kept[step - 2][0], strict=True):
                own.copy_(then)
        groups, _ = other.source.next(step)
        drawn = [[r.trajectory.tokens for r in g.rollouts] for g in groups]
        assert drawn == [[r.trajectory.tokens for r in g.rollouts] for g in kept[step][1]]
    other.close()


def test_what_waits_is_read_back_as_it_was(tmp_path: Path) -> None:
    trainer = GRPOTrainer(config(tmp_path / "run", max_staleness=2, advantage="remax"), quiet=True)
    trainer.step()
    ahead = trainer.schedule
    assert isinstance(ahead, Ahead)
    ahead.save(tmp_path, 1)
    again = Ahead(trainer.source, ahead.weights, staleness=2, last=6, poll=lambda: None)
    again.load(tmp_path)
    assert [number for number, _, _ in again._pending] == [2, 3]
    for (_, mine, _), (_, theirs, _) in zip(again._pending, ahead._pending, strict=True):
        assert mine.result().groups == theirs.result().groups
        assert mine.result().metrics == theirs.result().metrics
        assert all(isinstance(g.greedy, Rollout) for g in mine.result().groups)
    again.close()
    trainer.close()


@pytest.mark.clock
@pytest.mark.parametrize(("sample", "train"), [(0.3, 0.15), (0.15, 0.3)])
def test_a_step_takes_as_long_as_the_slower_of_the_two(
    sample: float, train: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages of known length, in one run after the other: their sum without staleness, their maximum with it."""
    options = {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 1, "eval_prompts": 0, "completions_every": 0}
    options |= {"dynamic_sampling": 0, "retire_solved": 0, "beta": 0.0}
    slow = {"sample": sample, "train": train}
    for staleness, expected in ((0, sample + train), (1, max(sample, train)), (2, max(sample, train))):
        plan = [Fault(site, step, "sleep", slow[site]) for site in slow for step in range(6)]
        monkeypatch.setattr(faults, "PLAN", plan)
        trainer = GRPOTrainer(config(tmp_path / str(staleness), max_staleness=staleness, **options), quiet=True)
        trainer.step()
        ends = [time.monotonic()]
        for _ in range(5):
            trainer.step()
            ends.append(time.monotonic())
        measured = median(end - begin for begin, end in pairwise(ends))
        trainer.close()
        assert measured == pytest.approx(expected, rel=0.1), (staleness, measured)


def test_an_error_of_the_background_ends_the_run_with_its_own_text(tmp_path: Path) -> None:
    calls = []

    def breaks(completions: list[str], **_: Any) -> list[float]:
        calls.append(len(completions))
        if len(calls) > 3:
            raise ValueError("the grader is gone")
        return [float(len(text)) for text in completions]

    trainer = GRPOTrainer(
        config(tmp_path / "run", max_staleness=1, eval_prompts=0, correct_by="breaks"), rewards=[breaks], quiet=True
    )
    with pytest.raises(RewardError, match="the grader is gone"):
        trainer.train()


@pytest.mark.parametrize(("options", "message"), [
    ({"max_staleness": 1, "sampler": "vllm"}, "the engine of sampler='vllm' rests meanwhile"),
    ({"max_staleness": -1}, "greater than or equal to 0"),
])  # fmt: skip
def test_what_cannot_run_ahead_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        TrainConfig.read(options)


def test_the_correction_is_on_by_default(tmp_path: Path) -> None:
    trainer = GRPOTrainer(config(tmp_path / "run", max_staleness=1), quiet=True)
    assert trainer.model.loss.correction is not None
    trainer.close()
    plain = GRPOTrainer(config(tmp_path / "plain"), quiet=True)
    assert plain.model.loss.correction is None
    plain.close()
