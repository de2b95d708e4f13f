"""The process that writes completions, in real runs: it dies, its trainer dies, a script has no main guard."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from processes import children_in, is_running, wait_until
from test_resume import product
from warm_process import WarmProcess

from gruppo.run import recorder
from gruppo.run.writer import CompletionsWriter
from gruppo.trainer import GRPOTrainer, TrainConfig

pytestmark = pytest.mark.slow

Options = Callable[..., dict[str, Any]]
Start = Callable[..., WarmProcess]
EACH = {"completions_every": 1, "steps": 8, "save_every": 4, "eval_prompts": 0}


@pytest.fixture
def from_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "WRITER_AFTER_S", -1.0)


def writers(parent: int) -> list[int]:
    """Processes that write completions for another."""
    return children_in("gruppo.run.writer", parent)


@pytest.mark.usefixtures("from_the_first_step")
def test_a_writer_that_is_killed_during_a_run_costs_no_file(short_run: Options, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if step in (2, 5):
            (writer,) = writers(os.getpid())
            os.kill(writer, signal.SIGKILL)
            wait_until(lambda: not is_running(writer), seconds=30.0)  # else the next record may still reach it
            killed.append(writer)

    GRPOTrainer(TrainConfig(**short_run(tmp_path / "whole", **EACH)), quiet=True).train()
    trainer = GRPOTrainer(TrainConfig(**short_run(tmp_path / "killed", **EACH)), quiet=True, callbacks=[kill])
    trainer.train()
    assert len(set(killed)) == 2 and writers(os.getpid()) == []
    assert product(tmp_path / "killed") == product(tmp_path / "whole")
    assert trainer.run.completion_steps() == list(range(1, 9)) and trainer.run.dropped == 0
    (event,) = [event for event in trainer.run.events() if event["event"] == "writer_lost"]
    assert event["step"] == 3 and "was killed by SIGKILL" in event["text"]


@pytest.mark.row("R-39", "kill -9 of the trainer while completions are written")
def test_no_writer_outlives_a_trainer_that_is_killed(
    start: Start, flags: Callable[..., list[str]], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = start(["train", *flags(run, **EACH | {"steps": 10000, "save_every": 10000})])
    process.wait_until(lambda: run.exists() and writers(process.process.pid or 0) != [])
    (writer,) = writers(process.process.pid or 0)
    process.kill()
    process.wait()
    wait_until(lambda: not is_running(writer), seconds=1.0)


SCRIPT = """
import sys
from gruppo.run import recorder
from gruppo.trainer import GRPOTrainer, TrainConfig

recorder.WRITER_AFTER_S = -1.0
with open(sys.argv[1] + ".ran", "a") as file:
    file.write("once\\n")
print(GRPOTrainer(TrainConfig(**{options}), quiet=True).train().status)
"""


@pytest.mark.commands
def test_a_script_without_a_main_guard_runs_once(short_run: Options, tmp_path: Path) -> None:
    options = short_run(tmp_path / "run", **EACH | {"steps": 3, "save_every": 3})
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(options=options))
    done = subprocess.run([sys.executable, script, script], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.split() == ["done"], done.stderr
    assert (tmp_path / "script.py.ran").read_text() == "once\n"
    assert [path.name for path in sorted((tmp_path / "run" / "completions").iterdir())] == [
        f"step-{step:06d}.parquet" for step in (1, 2, 3)
    ]
    assert "writer_lost" not in (tmp_path / "run" / "events.jsonl").read_text()


@pytest.mark.usefixtures("from_the_first_step")
def test_a_run_without_completions_starts_no_process_and_several_leave_none(short_run: Options, tmp_path: Path) -> None:
    seen: list[int] = []

    def look(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        seen.append(len(writers(os.getpid())))
        if step == 2 and str(trainer.run.path).endswith("raises"):
            raise RuntimeError("a callback that fails")

    few = EACH | {"steps": 2}
    GRPOTrainer(
        TrainConfig(**short_run(tmp_path / "none", **few | {"completions_every": 0})), quiet=True, callbacks=[look]
    ).train()
    assert seen == [0, 0]
    open_before = len(os.listdir("/proc/self/fd"))
    for name in ("one", "two", "raises"):
        trainer = GRPOTrainer(TrainConfig(**short_run(tmp_path / name, **few)), quiet=True, callbacks=[look])
        if name == "raises":
            with pytest.raises(RuntimeError, match="a callback that fails"):
                trainer.train()
        else:
            trainer.train()
        assert writers(os.getpid()) == [] and trainer.run.completion_steps() == [1, 2]
    assert seen == [0, 0] + [1] * 6 and len(os.listdir("/proc/self/fd")) == open_before


def test_a_short_run_starts_no_process_and_a_longer_one_does(
    short_run: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, seen, by_process = 1000.0, [], []
    monkeypatch.setattr(recorder.time, "monotonic", lambda: now)
    write = CompletionsWriter.write
    monkeypatch.setattr(
        CompletionsWriter, "write", lambda self, record: (by_process.append(record.step), write(self, record))
    )

    def look(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        nonlocal now
        now += 2.0
        for _ in range(1000 if step >= 4 else 1):  # a process that was just started does not have its name yet
            if found := writers(os.getpid()):
                break
            time.sleep(0.01)
        seen.append(len(found))

    trainer = GRPOTrainer(TrainConfig(**short_run(tmp_path / "run", **EACH)), quiet=True, callbacks=[look])
    trainer.train()
    # Step 4 is 6 s after the beginning, and step 7 6 s after that.
    assert seen == [0, 0, 0, 1, 1, 1, 1, 1] and by_process == [7, 8]
    assert trainer.run.completion_steps() == list(range(1, 9)) and writers(os.getpid()) == []
    assert "writer_lost" not in [event["event"] for event in trainer.run.events()]
    here, there = (trainer.run.completions(step) for step in (6, 7))  # written by the trainer, and by the process
    assert here.schema.equals(there.schema, check_metadata=True) and len(here) == len(there) > 0
