"""TensorBoard: its files, written by a process of their own. Each event takes checksums in Python, for which training
would wait.

The process gets time, step and metrics as `multiprocessing` sends objects. It answers when it is ready and when it
ends: with nothing, or with what failed.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from gruppo.child import begin, ending, start, wait_for_parent


class FailedElsewhere(Exception):
    """What happened in the process, with the name of its exception."""


class TensorBoard:
    """The process, seen from the trainer."""

    def __init__(self, folder: Path) -> None:
        place = str((folder / "tensorboard").absolute())
        self._process, self._connection = start(__name__, is_bound=True, folder=place)
        self._read_answer()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        try:
            self._connection.send((time.time(), step, dict(metrics)))
        except OSError:  # it has failed, and left the reason
            self._read_answer()
            raise

    def close(self) -> None:
        with suppress(OSError):
            self._connection.send(None)
        self._read_answer()
        self._connection.close()
        self._process.wait()

    def _read_answer(self) -> None:
        try:
            text = self._connection.recv_bytes().decode()
        except (EOFError, OSError):
            text = f"found that its process {ending(self._process.wait())}"
        if text:
            raise FailedElsewhere(text)


def work() -> None:
    """Main function of the process: write the metrics that arrive."""
    connection, facts = begin()
    answer = ""
    # TensorBoard writes in a thread, whose exception would be printed, and is lost where the thread fails last.
    failures: list[BaseException | None] = []
    threading.excepthook = lambda failed: failures.append(failed.exc_value)
    try:
        # Generated modules, whose names no type checker sees
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(facts["folder"])
        connection.send_bytes(b"")
        for seconds, step, metrics in _received(connection, facts["parent"]):
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            writer.add_event(Event(wall_time=seconds, step=step, summary=Summary(value=values)))
        writer.close()
        for failure in failures:
            raise failure or OSError("the thread that writes has ended")
    except BaseException as error:  # `sys.exit()` in a library included
        answer = f"raised {type(error).__name__}: {error}"
    connection.send_bytes(answer.encode("utf-8", "replace"))
    os._exit(0)


def _received(connection: Connection, parent: int) -> Iterator[tuple[float, int, dict[str, float]]]:
    """Time, step and metrics, until None comes."""
    while True:
        wait_for_parent(connection, parent)
        try:
            record = connection.recv()
        except (EOFError, OSError):  # the trainer is gone
            os._exit(0)
        if record is None:
            return
        yield record
