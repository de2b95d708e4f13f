"""Trackers: TensorBoard, W&B and trackio as views of the run directory. A missing one is an error at the start; one
that fails or blocks later is dropped with a warning."""

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gruppo.errors import require
from gruppo.process.streams import printable

logger = logging.getLogger(__name__)

HELD = 1000
"""Most records that wait for a board."""


def check_installed(names: Sequence[str]) -> None:
    """Raise for a tracker that cannot be used, before anything of the run exists."""
    for name in names:
        if find_spec(name) is None:
            raise require(name, name, f"{name}=true")


class Trackers:
    """All boards of a run: `names` of tensorboard, wandb, trackio.

    Args:
        deadline_s: time limit for one call of a board; a slower one is switched off.
    """

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any], *, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._boards: dict[str, _Board] = {}
        for name in names:
            make = partial(_TensorBoard, folder) if name == "tensorboard" else partial(_Module, name, folder, config)
            self._boards[name] = _Board(name, make, deadline_s)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, board in list(self._boards.items()):
            if trouble := board.log(step, dict(metrics)):
                self._switch_off(name, trouble)

    def close(self) -> None:
        """End the boards, all within the time of one call."""
        ends = time.monotonic() + self._deadline_s
        for board in self._boards.values():
            board.finish()
        for name, board in list(self._boards.items()):
            if trouble := board.wait(ends):
                self._switch_off(name, trouble)
        self._boards.clear()

    def _switch_off(self, name: str, trouble: str) -> None:
        self._boards.pop(name).finish()  # one that was only late ends, too
        logger.warning("%s failed and is switched off: %s", name, printable(trouble))


class _Board:
    """A tracker in its own thread, because its calls may block or raise anything."""

    def __init__(self, name: str, make: Callable[[], Any], deadline_s: float) -> None:
        self._make = make
        self._deadline_s = deadline_s
        self._records: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(HELD)
        self._call: tuple[str, float] | None = ("init", time.monotonic())
        """The call that runs now, and when it began."""
        self._error = ""
        self._thread = threading.Thread(target=self._run, name=f"gruppo-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> str:
        """Pass on a record; returns the reason if the tracker must be dropped."""
        call = self._call
        if self._error:
            return self._error
        if call is not None and time.monotonic() - call[1] > self._deadline_s:
            return f"{call[0]} took longer than tracker_deadline={self._deadline_s:g} s"
        try:
            self._records.put_nowait((step, metrics))
        except queue.Full:
            return f"it is {HELD} records behind"
        return ""

    def finish(self) -> None:
        with suppress(queue.Full):  # `wait` reports it
            self._records.put_nowait(None)

    def wait(self, ends: float) -> str:
        """Wait for the thread to end; the reason if it does not, or failed."""
        self._thread.join(max(ends - time.monotonic(), 0.0))
        if self._error or not self._thread.is_alive():
            return self._error
        doing = self._call[0] if self._call else "log"
        return f"{doing} did not end within tracker_deadline={self._deadline_s:g} s"

    def _run(self) -> None:
        try:
            tracker = self._make()
            while True:
                self._call = None
                record = self._records.get()
                self._call = ("finish" if record is None else "log", time.monotonic())
                if record is None:
                    return tracker.close()
                tracker.log(*record)
        except BaseException as error:  # a board must never stop a run, `sys.exit()` included
            doing = self._call[0] if self._call else "log"
            self._error = f"{doing} raised {type(error).__name__}: {error}"


class _TensorBoard:
    """An event file with one event per step. TensorBoard's own writer uses a thread that loses errors."""

    def __init__(self, folder: Path) -> None:
        # Generated modules, whose names no type checker sees
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary = Event, Summary
        boards = folder / "tensorboard"
        boards.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._records = RecordWriter((boards / name).open("xb", buffering=0))
        self.close = self._records.close
        self._write(file_version="brain.Event:2")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._write(step=step, summary=self._summary(value=values))

    def _write(self, **fields: Any) -> None:
        self._records.write(self._event(wall_time=time.time(), **fields).SerializeToString())


class _Module:
    """W&B and trackio, which share their calls."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any]) -> None:
        self.module: Any = import_module(name)
        self.module.init(project="gruppo", name=folder.name, config=dict(config))
        self.close = self.module.finish

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.module.log(dict(metrics), step=step)
