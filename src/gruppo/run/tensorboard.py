"""The process that writes TensorBoard's files: metrics arrive from the trainer, as `trackers.py` sends them."""

import os

from gruppo.child import begin, wait_for_parent


def work() -> None:
    """Main function of the process: write the metrics that arrive until None does."""
    connection, facts = begin()
    try:
        # Generated modules, whose names no type checker sees
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        writer = EventFileWriter(facts["folder"])
        connection.send_bytes(b"")
        while True:
            wait_for_parent(connection, facts["parent"])
            record = connection.recv()
            if record is None:
                break
            seconds, step, metrics = record
            values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
            writer.add_event(Event(wall_time=seconds, step=step, summary=Summary(value=values)))
        writer.close()
        answer = ""
    except (EOFError, ConnectionError):  # the trainer is gone
        os._exit(0)
    except BaseException as error:  # `sys.exit()` in a library included
        answer = f"raised {type(error).__name__}: {error}"
    connection.send_bytes(answer.encode("utf-8", "replace"))
    os._exit(0)
