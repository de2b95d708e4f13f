"""TensorBoard, W&B and trackio: views of the run directory. One that is absent when asked for is an error at the start;
one that fails later is dropped with a warning, and the run goes on."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from gruppo.errors import require
from gruppo.trainer.config import TrainConfig

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class Trackers:
    """All boards of a run."""

    def __init__(self, config: TrainConfig, folder: Path) -> None:
        makers = {"tensorboard": _TensorBoard, "wandb": _Module, "trackio": _Module}
        self.trackers: dict[str, Tracker] = {}
        for name, maker in makers.items():
            if getattr(config, name):
                self.trackers[name] = maker(name, config, folder)

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
    def __init__(self, name: str, config: TrainConfig, folder: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self.writer = EventFileWriter(str(folder / "tensorboard"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        import time

        # Generated modules, whose names no type checker sees
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self.writer.add_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def close(self) -> None:
        self.writer.close()


class _Module:
    """W&B and trackio share their calls."""

    def __init__(self, name: str, config: TrainConfig, folder: Path) -> None:
        try:
            self.module: Any = __import__(name)
        except ImportError:
            raise require(name, name, f"{name}=true") from None
        self.module.init(project="gruppo", name=folder.name, config=config.model_dump(mode="json"))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.module.log(dict(metrics), step=step)

    def close(self) -> None:
        self.module.finish()
