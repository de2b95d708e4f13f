"""The process that writes TensorBoard's files: metrics arrive from the trainer, as `trackers.py` sends them."""

import os
from collections.abc import Iterator
from multiprocessing.connection import Connection

from gruppo.child import begin, wait_for_parent


def work() -> None:
    """Main function of the process: write the metrics that arrive; say that it is ready, then how it ended."""
    connection, facts = begin()
    answer = ""
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
