"""TensorBoard, W&B and trackio: views of the run directory. One that is absent when asked for is an error at the start;
one that fails later is dropped with a warning, and the run goes on."""

import logging
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gruppo.errors import require

logger = logging.getLogger(__name__)


def check_installed(names: Sequence[str]) -> None:
    """Raise for a tracker that cannot be used, before anything of the run exists."""
    for name in names:
        if find_spec(name) is None:
            raise require(name, name, f"{name}=true")


class Trackers:
    """All boards of a run: `names` of tensorboard, wandb, trackio."""

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> None:
        self.trackers: dict[str, Any] = {
            name: _TensorBoard(folder) if name == "tensorboard" else _Module(name, folder.name, config)
            for name in names
        }

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, tracker in list(self.trackers.items()):
            try:
                tracker.log(step, metrics)
            except Exception as error:  # a board must never stop a run, whatever it raises
                logger.warning("%s failed and is switched off: %s", name, error)
                del self.trackers[name]

    def close(self) -> None:
        for name, tracker in self.trackers.items():
            try:
                tracker.close()
            except Exception as error:  # as above
                logger.warning("%s failed to close: %s", name, error)


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder / "tensorboard"))
        self.close = self.writer.close

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        # Generated modules, whose names no type checker sees
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))


class _Module:
    """W&B and trackio, which share their calls."""

    def __init__(self, name: str, run: str, config: Mapping[str, Any]) -> None:
        self.module: Any = import_module(name)
        self.module.init(project="gruppo", name=run, config=dict(config))
        self.close = self.module.finish

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.module.log(dict(metrics), step=step)
