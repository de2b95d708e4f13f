"""A run that ended early stays ended: killed before its end, resumed, and resumed again."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_resume import product, tensor_hash
from warm_process import WarmProcess

from gruppo.run.reader import RunReader
from gruppo.trainer import GRPOTrainer, TrainConfig

pytestmark = pytest.mark.slow

Start = Callable[..., WarmProcess]
Options = Callable[..., dict[str, Any]]

# No reward is as high as 2: the score stays 0, while the weights move.
SMALL: dict[str, Any] = {"steps": 6, "save_every": 3, "eval_every": 2, "correct_at": 2.0, "completions_every": 1}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "patience": ({"patience": 2}, 4),
    "score": ({"stop_at_score": 0.0}, 2),
    "callback": ({}, 3),
}


def end_after_3(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> bool:
    return step == 3


def train(options: dict[str, Any], by: str, *plan: tuple[str, int, str]) -> None:
    from gruppo import faults

    faults.PLAN = [faults.Fault(*fault) for fault in plan]
    callbacks = [end_after_3] if by == "callback" else []
    GRPOTrainer(TrainConfig(**options), quiet=True, callbacks=callbacks).train()


def identity(folder: Path) -> dict[str, tuple[int, int]]:
    """Which files a folder has: inode and time of change, which any writing changes."""
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.iterdir()}


@pytest.mark.parametrize("by", CASES)
@pytest.mark.row("R-03", "SIGKILL between the last checkpoint and the end of a run that ended early")
def test_a_run_that_ended_early_and_is_killed_before_its_end_ends_there_when_resumed(
    by: str, start: Start, short_run: Options, tmp_path: Path
) -> None:
    more, last = CASES[by]
    whole = tmp_path / "whole"
    callbacks = [end_after_3] if by == "callback" else []
    trainer = GRPOTrainer(TrainConfig(**short_run(whole, **SMALL, **more)), quiet=True, callbacks=callbacks)
    assert (trainer.train().step, trainer.ended and trainer.ended.by) == (last, by)
    run = tmp_path / "run"
    process = WarmProcess(tmp_path / "log", train, short_run(run, **SMALL, **more), by, ("committed", last, "kill"))
    assert process.wait() == -signal.SIGKILL, process.output
    process.close()
    assert not (run / "model").exists()

    resumed = start(["resume", str(run)])
    assert resumed.wait() == 0, resumed.output
    assert product(run) == product(whole)
    assert RunReader(run).status() == RunReader(whole).status()
    assert "eval/accuracy" in RunReader(run).metrics()[-1]

    before = identity(run / "model")
    again = start(["resume", str(run)])
    assert again.wait() == 0, again.output
    words = {"score": "stop_at_score", "callback": "a callback"}.get(by, by)
    assert f"the run is done: it ended by {words} after step {last} of 6. To train on: gruppo" in again.output
    assert "--steps N, with N above 6" in " ".join(again.output.split())
    assert identity(run / "model") == before
    assert product(run) == product(whole)


def test_a_run_that_ended_early_goes_on_with_more_steps_than_it_ended_under(
    start: Start, short_run: Options, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    GRPOTrainer(TrainConfig(**short_run(run, **SMALL, patience=2)), quiet=True).train()
    fewer = start(["resume", str(run), "--steps", "5"])
    assert fewer.wait() == 0 and RunReader(run).status()["step"] == 4, fewer.output
    # It is killed before a checkpoint of its own, so that the next one finds that of the end once more.
    assert start(["resume", str(run), "--steps", "7"], ("recorded", 5, "kill")).wait() == -signal.SIGKILL
    on = start(["resume", str(run)])
    assert on.wait() == 0, on.output
    # The option still applies: the next evaluation is no better either.
    assert RunReader(run).status() == {
        "status": "done",
        "step": 6,
        "ended": {"by": "patience", "steps": 7, "limit": 2},
    }
    GRPOTrainer(TrainConfig(**short_run(tmp_path / "six", **SMALL)), quiet=True).train()
    assert tensor_hash(run / "model") == tensor_hash(tmp_path / "six" / "model")


def test_a_run_that_ended_early_goes_on_without_the_option_that_ended_it(
    start: Start, short_run: Options, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    GRPOTrainer(TrainConfig(**short_run(run, **SMALL, patience=2)), quiet=True).train()
    text = (run / "config.yaml").read_text()
    assert "patience: 2\n" in text
    (run / "config.yaml").write_text(text.replace("patience: 2\n", "patience: 0\n"))
    on = start(["resume", str(run), "--accept-changes"])
    assert on.wait() == 0, on.output
    assert RunReader(run).status() == {"status": "done", "step": 6}
    GRPOTrainer(TrainConfig(**short_run(tmp_path / "six", **SMALL)), quiet=True).train()
    assert tensor_hash(run / "model") == tensor_hash(tmp_path / "six" / "model")


def test_a_run_that_went_on_and_is_killed_before_its_end_has_the_model_of_its_last_step(
    start: Start, short_run: Options, tmp_path: Path
) -> None:
    """The folder is there from the first end, and is that of another step."""
    run = tmp_path / "run"
    GRPOTrainer(TrainConfig(**short_run(run, **SMALL | {"steps": 3})), quiet=True).train()
    assert start(["resume", str(run), "--steps", "6"], ("committed", 6, "kill")).wait() == -signal.SIGKILL
    assert start(["resume", str(run)]).wait() == 0
    GRPOTrainer(TrainConfig(**short_run(tmp_path / "six", **SMALL)), quiet=True).train()
    assert tensor_hash(run / "model") == tensor_hash(tmp_path / "six" / "model")


def test_a_stop_between_a_callbacks_word_and_its_evaluation_keeps_both(
    start: Start, short_run: Options, tmp_path: Path
) -> None:
    whole, run = tmp_path / "whole", tmp_path / "run"
    GRPOTrainer(TrainConfig(**short_run(whole, **SMALL)), quiet=True, callbacks=[end_after_3]).train()
    # Step 3 has no evaluation of its own: the one that the signal comes in is that of the end.
    process = WarmProcess(tmp_path / "log", train, short_run(run, **SMALL), "callback", ("eval", 3, "term"))
    assert process.wait() == 0, process.output
    process.close()
    assert RunReader(run).status() == {"status": "stopped", "step": 3}
    on = start(["resume", str(run)])
    assert on.wait() == 0, on.output
    assert product(run) == product(whole)
    assert RunReader(run).status() == RunReader(whole).status()


def test_a_callback_that_ended_a_run_after_a_stop_in_its_evaluation_has_ended_it_for_good(
    start: Start, short_run: Options, tmp_path: Path
) -> None:
    """The checkpoint of the step is that of the stop, when the callback had not been asked."""
    run, options = tmp_path / "run", SMALL | {"eval_every": 3}
    process = WarmProcess(tmp_path / "log", train, short_run(run, **options), "callback", ("eval", 3, "term"))
    assert process.wait() == 0, process.output
    process.close()
    config = TrainConfig(**short_run(run, **options))
    assert GRPOTrainer(config, resume=True, quiet=True, callbacks=[end_after_3]).train().step == 3
    before = identity(run / "model")
    assert start(["resume", str(run)]).wait() == 0
    assert RunReader(run).status()["step"] == 3
    assert identity(run / "model") == before
