"""Trackers: what a board gets of steps that are shorter than the time between two calls."""

import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from gruppo.run.trackers import Trackers


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
    trackers.close()
