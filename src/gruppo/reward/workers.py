"""Worker processes of a `RewardScorer`, seen from the trainer: start, assign, wait, and who is killed.

Every call that goes in comes out once, with a result, within its deadline, and afterwards there are as many workers as
before. Which calls are made, and which are made again, is decided in `scorer.py`.

Messages from a worker are JSON, so that what ran there cannot make the trainer build any object.

Each worker has a pipe of its own. In a `pebble.ProcessPool` all share one, so the death of an idle worker, or a reward
that writes into the pipe, ends the pool; and a busy worker outlives a trainer that is killed. `loky` has no deadlines.
"""

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from multiprocessing.connection import wait
from typing import Any

from gruppo.errors import InputError, RewardError
from gruppo.process.child import STACK_SIGNAL, ending, limit_waits
from gruppo.process.streams import printable
from gruppo.reward.call import Call, CallResult
from gruppo.reward.load import is_in_main
from gruppo.reward.worker import work

_log = logging.getLogger(__name__)

Functions = Mapping[str, str | Callable[..., Any]]
"""Reward functions by name: the `module:function` that a worker imports, or the object itself."""

_SPAWN = multiprocessing.get_context("spawn")  # fork would copy the trainer's threads and CUDA context

_START_DEADLINE_S = 120.0
"""Least time for a worker to import its functions."""
_MAX_FAILED_STARTS = 3
_POLL_S = 0.5
_EXIT_S = 1.0
_KILL_S = 5.0
_PIPE_STALL_S = 10
_MAX_RESULT_BYTES = 256 * 2**20


class WorkerPool:
    """A fixed number of workers that make calls."""

    def __init__(
        self, functions: Functions, *, size: int, deadline_s: float = 0.0, poll: Callable[[], None] | None = None
    ) -> None:
        self._functions = functions
        self._start_s = max(_START_DEADLINE_S, deadline_s)
        self.size = size
        self._poll = poll
        self.workers: list[WorkerHandle] = []
        self._failed_starts = 0
        self._shown: set[str] = set()

    def start(self) -> None:
        """Start the missing workers without waiting until they are ready."""
        try:
            while len(self.workers) < self.size:
                self.workers.append(WorkerHandle(self._functions, self._start_s))
        except OSError as error:
            raise InputError(
                f"a reward worker cannot be started, {len(self.workers)} of {self.size} run: {error}. Raise the limit "
                "of open files (ulimit -n) or of processes (ulimit -u), or lower reward_workers"
            ) from error

    def close(self) -> None:
        while self.workers:
            self.workers.pop().kill()

    def run(self, calls: Iterable[Call]) -> Generator[tuple[Call, CallResult], None, None]:
        """Make all calls; results come as they are ready."""
        self.start()
        queue = deque(calls)
        try:
            while queue or any(worker.call for worker in self.workers):
                self._assign(queue)
                for worker in self._wait():
                    done = self._receive(worker)
                    if done is not None:
                        yield done
        finally:
            # Left early, by an error or Ctrl-C: a busy worker would answer into the next step.
            for worker in [worker for worker in self.workers if worker.call]:
                self._replace(worker)

    def _assign(self, queue: deque[Call]) -> None:
        for worker in list(self.workers):
            if not queue or worker.is_awaited:
                continue
            try:
                worker.send(queue[0])
            except OSError:  # it died while idle, or no longer reads: not the fault of this call
                self._replace(worker)
            except Exception as error:
                raise InputError(
                    f"the arguments of reward {queue[0].function!r} cannot be sent to its "
                    f"worker: {error}; use plain values in the columns, or run it in "
                    "this process: load_reward(function, isolated=False)"
                ) from error
            else:
                queue.popleft()

    def _wait(self) -> list["WorkerHandle"]:
        """Workers with a message, after at most `_POLL_S`, and those that are late with one."""
        if self._poll is not None:
            self._poll()
        until = min((worker.expires for worker in self.workers if worker.is_awaited), default=0.0)
        timeout = min(max(until - time.monotonic(), 0.0), _POLL_S)
        ready = wait([worker.connection for worker in self.workers], timeout)
        now = time.monotonic()
        return [w for w in self.workers if w.connection in ready or (w.is_awaited and now >= w.expires)]

    def _receive(self, worker: "WorkerHandle") -> tuple[Call, CallResult] | None:
        """The result of a worker's call; None when it was ready to take one, or ended without one."""
        is_late = not worker.connection.poll()
        message = None if is_late else worker.receive()
        if message is None:
            return self._lose(worker, is_late=is_late)
        if "failed" in message:
            raise InputError(f"a reward worker cannot use what it was sent:\n{printable(str(message['failed']))}")
        if "ready" in message:
            worker.is_ready, self._failed_starts = True, 0
            return None
        call, result = worker.call, CallResult(**message["result"])
        assert call is not None, "a worker answers calls"
        worker.call = None
        if result.kind == "died":  # out of memory: the process still runs, but is not reliable
            self._replace(worker)
        return call, result

    def _lose(self, worker: "WorkerHandle", *, is_late: bool) -> tuple[Call, CallResult] | None:
        """Replace a worker that ended or does not answer; the result of its call, if it was busy with one."""
        call, kind = worker.call, "timeout" if time.monotonic() >= worker.expires else "died"
        if is_late and call is not None and call.function not in self._shown:  # once is enough to see where
            self._shown.add(call.function)
            _log.warning("reward %r is late; its stack follows on stderr", call.function)
            with contextlib.suppress(OSError):
                os.kill(worker.pid, STACK_SIGNAL)
                time.sleep(0.05)  # it is about to be killed; writing takes a moment
        self.workers.remove(worker)
        ended = worker.kill(exit_s=0.0 if is_late else _EXIT_S)
        if not worker.is_ready:
            self._see_failed_start(ended, is_late=is_late)
        self.start()
        if call is None:
            return None
        late = f"no answer within {call.deadline_s:g} s; the worker was killed (reward_deadline)"
        return call, CallResult(kind=kind, text=late if is_late else f"the worker {ended}")

    def _see_failed_start(self, ended: str, *, is_late: bool) -> None:
        """Wait before the next start, or raise after several in a row that failed."""
        self._failed_starts += 1
        if self._failed_starts < _MAX_FAILED_STARTS:
            time.sleep(0.1 * 2**self._failed_starts)
            return
        if is_late:
            names = ", ".join(map(repr, self._functions))
            ended = (
                f"had not imported {names} within {self._start_s:g} s (the greater of reward_deadline and "
                f"{_START_DEADLINE_S:g} s)"
            )
        raise RewardError(
            f"a reward worker {ended} before it was ready, {self._failed_starts} times in a row; its own output is on "
            "stderr. If the reward is defined in the script you run, put the rest of that script under "
            "`if __name__ == '__main__':`"
        )

    def _replace(self, worker: "WorkerHandle") -> None:
        self.workers.remove(worker)
        worker.kill()
        self.start()


class WorkerHandle:
    """One worker process, the pipe to it, and the call it is busy with."""

    def __init__(self, functions: Functions, start_s: float) -> None:
        self.connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=work, args=(theirs, os.getpid()), name="gruppo-reward")
        # A new process imports the trainer's script, which may take seconds or start a second run, so that functions of
        # the script can be found. Where all are found by module, the script is hidden from it.
        main = sys.modules["__main__"]
        if not any(map(is_in_main, functions.values())):
            sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            self._process.start()
        finally:
            sys.modules["__main__"] = main
        assert self._process.pid is not None  # signals to pid 0 would go to the trainer itself
        self.pid = self._process.pid
        theirs.close()
        # A worker whose stray thread holds the interpreter lock never reads; a write must not wait for it.
        with socket.fromfd(self.connection.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as view:
            limit_waits(view, _PIPE_STALL_S)
        self.call: Call | None = None
        self.is_ready = False
        self.expires = time.monotonic() + start_s
        with contextlib.suppress(OSError):  # it died at once: seen at the first receive
            self.connection.send(dict(functions))

    def send(self, call: Call) -> None:
        self.connection.send(call)
        self.call, self.expires = call, time.monotonic() + call.deadline_s

    def receive(self) -> dict[str, Any] | None:
        """A message, or None when the worker is lost or a reward wrote into its pipe."""
        try:
            return json.loads(self.connection.recv_bytes(_MAX_RESULT_BYTES))
        except (EOFError, OSError, ValueError):
            return None

    @property
    def is_awaited(self) -> bool:
        """A message from it is due before `expires`."""
        return self.call is not None or not self.is_ready

    def kill(self, *, exit_s: float = 0.0) -> str:
        """End the process and what it started, and describe how it ended. A lost one gets `exit_s` to end by itself."""
        # Not join(exit_s): it waits for ever once a reward function has written into the pipe that it watches.
        ends = time.monotonic() + exit_s
        while (code := self._process.exitcode) is None and time.monotonic() < ends:
            time.sleep(0.01)
        with contextlib.suppress(OSError):  # before its setsid() it has no group of its own
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(_KILL_S)
        self.connection.close()
        if self._process.exitcode is not None:
            self._process.close()
        return "stopped answering" if code is None else ending(code)
