"""One worker process as seen from the trainer: its start, its pipe and its end.

Messages to a worker use multiprocessing's transport; messages from a worker are JSON, so that what ran there cannot
make the trainer build any object.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import struct
import sys
import time
import types
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

from gruppo.reward.worker import STACK_SIGNAL, Job, Load, work

_SPAWN = multiprocessing.get_context("spawn")  # fork would copy the trainer's threads and CUDA context

_MAX_REPLY_BYTES = 256 * 2**20
_PIPE_STALL_S = 10
_KILL_S = 5.0


class Child:
    """One worker process, the pipe to it, and the job it is at."""

    def __init__(self, loads: Sequence[Load], start_limit_s: float) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=work, args=(theirs, os.getpid()), name="gruppo-reward")
        with contextlib.nullcontext() if _any_in_main(loads) else _main_hidden():
            self._process.start()
        assert self._process.pid is not None  # signals to pid 0 would go to the trainer itself
        self.pid = self._process.pid
        theirs.close()
        _bound_waits(self.connection)
        self.job: Job | None = None
        self.is_ready = False
        self.expires = time.monotonic() + start_limit_s
        with contextlib.suppress(OSError):  # it died at once: seen at the first receive
            self.connection.send(list(loads))

    def send(self, job: Job) -> None:
        self.connection.send(job)
        self.job, self.expires = job, time.monotonic() + job.limit_s

    def receive(self) -> dict | None:
        """A message, or None when the worker is lost or talks nonsense."""
        try:
            message = json.loads(self.connection.recv_bytes(_MAX_REPLY_BYTES))
        except (EOFError, OSError, ValueError, RecursionError):
            return None
        return message if isinstance(message, dict) else None

    @property
    def waits(self) -> bool:
        """It has until `expires` to say something."""
        return self.job is not None or not self.is_ready

    def dump_stack(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self.pid, STACK_SIGNAL)
            time.sleep(0.05)  # it is about to be killed; writing takes a moment

    def kill(self, *, ends_by_itself_s: float = 0.0) -> str:
        """End it and what it started, and say how it ended. A lost one gets a moment, to learn its exit code."""
        self._process.join(ends_by_itself_s)
        code = self._process.exitcode
        with contextlib.suppress(OSError):  # before its setsid() it has no group of its own
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(_KILL_S)
        self.connection.close()
        if self._process.exitcode is not None:
            self._process.close()
        return _exit_text(code)


@contextlib.contextmanager
def _main_hidden() -> Iterator[None]:
    """Let a child start without importing the trainer's script again, which may take seconds or start a second run.

    multiprocessing does that so that functions of the script can be found; here they are found by module.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _any_in_main(loads: Sequence[Load]) -> bool:
    functions = [load.function for load in loads if not isinstance(load.function, str)]
    return any("__main__" in (getattr(f, "__module__", ""), type(f).__module__) for f in functions)


def _bound_waits(connection: Connection) -> None:
    """A worker whose stray thread holds the interpreter lock never reads: bound the time a write to it may take."""
    limit = struct.pack("ll", _PIPE_STALL_S, 0)
    with socket.fromfd(connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as view:
        view.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        view.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


def _exit_text(code: int | None) -> str:
    if code is None:
        return "stopped answering"
    if code < 0:
        name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
        return f"was killed by {name}"
    return f"ended with exit code {code}"
