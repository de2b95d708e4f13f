"""CompletionsWriter: a process of its own that writes the completions of a run, so that training does not wait.

In a thread of the trainer the same work would hold the interpreter's lock, for which every call into torch waits.
Records go to the process as `multiprocessing` sends objects; its answers are JSON. What a process that was lost had not
written goes to another, and in the end the trainer writes by the same functions: no step is lost.

Nothing heavy may be imported here: the process needs numpy and pyarrow alone.
"""

import json
import os
import subprocess
import threading
import time
from collections import deque
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection
from queue import Queue
from typing import Any

from gruppo.child import begin, ending, start, wait_for_parent
from gruppo.run.completions import StepRecord
from gruppo.run.directory import RunDirectory

MOST_STARTS = 5
"""Processes that are started for one run before the trainer writes by itself."""

_NAME = "the process that writes completions"
_ANSWER_S = 120
"""Seconds without a sign of life from the process after which it is given up."""
_KILL_S = 5.0
_MAX_ANSWER_BYTES = 2**20


class CompletionsWriter:
    """The process, seen from the trainer. Records are written in their order, each to a file of its own."""

    def __init__(self, run: RunDirectory) -> None:
        self.run = run
        self.problem = ""
        """How a process was lost, or why the trainer wrote itself, the last time."""
        self.first_start = inf
        """When a process was started first, by `time.monotonic`."""
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._starts = 0
        self._unwritten: deque[StepRecord] = deque()
        """What was sent and not answered, the oldest first."""

    def start(self) -> None:
        """Start the process, if there is none, without waiting until it has imported what it needs."""
        if self._process is not None or self._starts >= MOST_STARTS:
            return
        self._starts += 1
        self.first_start = min(self.first_start, time.monotonic())
        is_bound = threading.current_thread() is threading.main_thread()  # another may end before the run does
        folder = str(self.run.path.absolute())
        try:
            self._process, self._connection = start(__name__, is_bound=is_bound, answer_s=_ANSWER_S, folder=folder)
        except (OSError, TypeError, ValueError) as error:
            self.problem = f"{_NAME} cannot be started: {error}"

    def write(self, record: StepRecord) -> None:
        """Have a record written. The process takes it before it has written the two before."""
        if self._process is None and self._unwritten:
            self._lose(EOFError())
        self.start()
        if self._connection is None:
            self.problem = self.problem or f"{_NAME} was lost {self._starts} times"
            self.run.write_record(record)
            return
        self._unwritten.append(record)
        try:
            self._connection.send(record)
        except OSError as error:
            self._lose(error)
        except BaseException as error:
            if not isinstance(error, Exception):  # a signal, maybe in the middle of a record
                self.close()
                raise
            self._unwritten.pop()
            self.problem = f"completions cannot be sent to {_NAME}: {error!r}"
            self.run.write_record(record)

    def finish(self, unwritten: int = 0) -> None:
        """Wait until all records but so many are written, or counted as dropped."""
        while len(self._unwritten) > unwritten:
            try:
                if self._connection is None:
                    raise EOFError
                answer = json.loads(self._connection.recv_bytes(_MAX_ANSWER_BYTES))
            except (OSError, EOFError, ValueError) as error:  # the last: a signal came in the middle of an answer
                self._lose(error)
                continue
            record = self._unwritten.popleft()
            if "os_error" in answer:
                self.run.drop(self.run.completions_file(record.step).name, OSError(*answer["os_error"]))
            elif "failed" in answer:
                self.problem = f"{_NAME} failed: {answer['failed']}"
                self.run.write_record(record)

    def close(self) -> None:
        """End the process. What it has not written by now, `finish` has written."""
        if self._process is not None and self._connection is not None:
            self._connection.close()
            self._process.kill()
            with suppress(subprocess.TimeoutExpired):  # in a call to a disk that does not answer
                self._process.wait(_KILL_S)
        self._process = self._connection = None

    def _lose(self, error: Exception) -> None:
        """End the process, and have another write what it was sent. It may have written some of that already."""
        if self._process is not None:
            self.problem = f"{_NAME} did not answer within {_ANSWER_S} s"
            if not isinstance(error, BlockingIOError):
                with suppress(subprocess.TimeoutExpired):  # it runs: the answer could not be read
                    self.problem = f"{_NAME} {ending(self._process.wait(_KILL_S))}"
        self.close()
        sent, self._unwritten = self._unwritten, deque()
        for record in sent:
            self.write(record)


def work() -> None:
    """Main function of the process: write the records that arrive until the connection is closed."""
    connection, facts = begin()
    run = RunDirectory(facts["folder"])
    # Of the records that may wait, one is being written, one is here, and one is in the hands of the other thread.
    waiting: Queue[StepRecord | Exception] = Queue(1)
    threading.Thread(target=_receive, args=(connection, facts["parent"], waiting), daemon=True).start()
    with suppress(OSError):  # the trainer is gone
        while True:
            connection.send_bytes(json.dumps(_write(run, waiting.get())).encode())
    os._exit(0)


def _receive(connection: Connection, parent: int, waiting: "Queue[StepRecord | Exception]") -> None:
    """Take records from the trainer, which does not wait for the disk."""
    try:
        while True:
            wait_for_parent(connection, parent)
            try:
                waiting.put(connection.recv())
            except (EOFError, OSError):
                raise
            except Exception as error:
                waiting.put(error)
    except (EOFError, OSError):  # the trainer has closed its end, or is gone
        os._exit(0)


def _write(run: RunDirectory, record: StepRecord | Exception) -> dict[str, Any]:
    """Write a record; the answer to it."""
    if isinstance(record, Exception):
        return {"failed": f"a record cannot be read: {record!r}"}
    try:
        run.put_record(record)
    except OSError as error:
        known = (error.errno, error.strerror, error.filename and str(error.filename))
        return {"os_error": [part for part in known if part is not None] or [str(error)]}
    except Exception as error:
        return {"failed": repr(error)}
    return {}
