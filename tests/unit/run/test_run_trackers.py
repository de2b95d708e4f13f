"""Trackers: what a board gets of steps that are shorter than the time between two calls."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import children_in, is_running, wait_until
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from gruppo.run.trackers import Trackers

PROCESS = "gruppo.run.tensorboard"


def test_steps_of_one_call_are_in_the_file_of_tensorboard_one_by_one(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, {}, deadline_s=60.0)
    for step in range(1, 31):
        trackers.log(step, {"reward/mean": step / 4, "optim/lr": 0.5})
    trackers.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert [event.step for event in events] == list(range(1, 31))
    values = [{value.tag: value.tensor.float_val[0] for value in event.summary.value} for event in events]
    assert values == [{"reward/mean": step / 4, "optim/lr": 0.5} for step in range(1, 31)]


def test_a_board_is_called_once_for_the_steps_in_between(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[float, int]] = []
    now = 100.0
    monkeypatch.setattr("gruppo.run.trackers._Board.log", lambda board, step, _: calls.append((now, step)) or "")
    monkeypatch.setattr(time, "monotonic", lambda: now)
    trackers = Trackers(["tensorboard"], tmp_path, {}, deadline_s=60.0)
    for step, now in enumerate((100.0, 100.5, 101.9, 102.0, 103.0), 1):  # noqa: B007  # read by the clock
        trackers.log(step, {})
    monkeypatch.undo()
    assert calls == [(100.0, 1), (102.0, 2), (102.0, 3), (102.0, 4)]
    wait_until(lambda: children_in(PROCESS, os.getpid()), 30)
    trackers.close()  # it is switched off: the call of its init seems older than the deadline
    wait_until(lambda: not children_in(PROCESS, os.getpid()), 30)


def test_the_process_of_tensorboard_is_gone_after_close(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, {}, deadline_s=60.0)
    wait_until(lambda: children_in(PROCESS, os.getpid()), 30)
    trackers.close()
    assert children_in(PROCESS, os.getpid()) == []


@pytest.mark.row("R-43", "SIGKILL of the process that writes for TensorBoard")
def test_tensorboard_without_its_process_is_switched_off_with_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, {}, deadline_s=60.0)
    wait_until(lambda: (tmp_path / "tensorboard").exists() and list((tmp_path / "tensorboard").iterdir()), 30)
    (number,) = children_in(PROCESS, os.getpid())
    os.kill(number, signal.SIGKILL)
    for step in range(1, 4):
        trackers.log(step, {"reward/mean": 0.5})
    trackers.close()
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("tensorboard failed and is switched off: ")
    assert line.endswith("found that its process was killed by SIGKILL")


KILLED = """
import sys, time
from pathlib import Path
from gruppo.run.trackers import Trackers
trackers = Trackers(["tensorboard"], Path(sys.argv[1]), {}, deadline_s=60.0)
trackers.log(1, {"reward/mean": 0.5})
while not list(Path(sys.argv[1]).glob("tensorboard/*")):
    time.sleep(0.01)
print("tensorboard" in sys.modules, flush=True)
time.sleep(60)
"""


@pytest.mark.row("R-39", "SIGKILL of a trainer with a process that writes for TensorBoard")
def test_the_trainer_loads_no_tensorboard_and_a_killed_one_leaves_no_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None and trainer.stdout.readline() == "False\n"
        (number,) = children_in(PROCESS, trainer.pid)
        trainer.kill()
    wait_until(lambda: not is_running(number), 30)
