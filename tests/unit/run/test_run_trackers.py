"""Trackers: the file of TensorBoard, as TensorBoard reads it."""

from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from gruppo.run.trackers import Trackers


def test_every_step_is_in_the_file_of_tensorboard(tmp_path: Path) -> None:
    trackers = Trackers(["tensorboard"], tmp_path, {}, deadline_s=60.0)
    for step in range(1, 31):
        trackers.log(step, {"reward/mean": step / 4, "optim/lr": 0.5})
    trackers.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    events = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert [event.step for event in events] == list(range(1, 31))
    values = [{value.tag: value.tensor.float_val[0] for value in event.summary.value} for event in events]
    assert values == [{"reward/mean": step / 4, "optim/lr": 0.5} for step in range(1, 31)]
