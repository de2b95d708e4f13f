"""The child process that calls reward functions: it reads tasks from a pipe and answers in JSON.

It trusts nothing to be left in order by the function it called, and it never outlives its parent for long: an idle
worker sees the pipe close, a busy one is ended by a watchdog that does not need the interpreter lock.

Nothing heavy may be imported here: a worker starts again whenever one had to be killed.
"""

import faulthandler
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from gruppo.errors import GruppoError
from gruppo.imports import import_object
from gruppo.reward.call import Reply, call_reward, short_traceback

STACK_SIGNAL = signal.SIGUSR2
"""Makes a worker write its Python stack to stderr, even in the middle of a C call."""

_PARENT_CHECK_S = 2.0
_IDLE_LIMIT_S = 5.0
_RECEIVE_LIMIT_S = 60.0
_WATCHDOG_GRACE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How a worker gets hold of a function: a `module:function` to import, or an object that was sent."""

    name: str
    function: str | Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call: which function, with what."""

    id: int
    load: int
    """Which of the loaded functions."""
    arguments: dict[str, Any]
    num: int
    """Completions in this call."""
    seed: int
    """State of the global random generators before the call; without it, results would depend on what this worker
    happened to do before."""
    limit_s: float


def work(connection: Connection, parent: int) -> None:
    """Main function of the process: load the functions, then answer jobs until the pipe closes."""
    _settle()
    home = os.getcwd()
    try:
        loads: list[Load] = connection.recv()
        functions = [_load(load) for load in loads]
        _send(connection, {"ready": True})
        while (job := _next_job(connection, parent)) is not None:
            _reset(home, job.seed)
            # The parent kills a worker that is late. If the parent is gone, this does, whatever holds the lock.
            _arm_watchdog(job.limit_s + _WATCHDOG_GRACE_S)
            reply = _answer(loads[job.load].name, functions[job.load], job)
            _send(connection, {"id": job.id, "reply": {slot: getattr(reply, slot) for slot in Reply.__slots__}})
    except (EOFError, OSError):  # the parent is gone
        return
    except BaseException as error:
        _send(connection, {"failed": str(error) if isinstance(error, GruppoError) else short_traceback(error)})


def _answer(name: str, function: Callable[..., Any], job: Job) -> Reply:
    try:
        return call_reward(name, function, job.arguments, job.num)
    except MemoryError:
        # As with a crash: the model's text brought it about, and this process is no longer to be relied on.
        return Reply(kind="died", text="the worker ran out of memory")
    except KeyboardInterrupt:  # raised by the function itself: SIGINT has no effect here
        os._exit(1)


def _settle() -> None:
    """Own session, no terminal, stdout to stderr: what a reward prints or signals stays away from the trainer."""
    os.setsid()
    try:
        os.fstat(2)
    except OSError:  # a daemon without stderr
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    # The trainer decides what a signal to the whole job means. A handler rather than SIG_IGN, because an ignored
    # signal stays ignored in programs that a reward function starts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    faulthandler.register(STACK_SIGNAL, file=2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected here and needs no core file


def _load(load: Load) -> Callable[..., Any]:
    function = import_object(load.function, "reward") if isinstance(load.function, str) else load.function
    prepare = getattr(function, "prepare", None)
    if callable(prepare):
        prepare()
    return function


def _next_job(connection: Connection, parent: int) -> Job | None:
    # A fork of the parent may hold the other end open, so a closed pipe is not the only sign of its death. And a
    # thread that a function left behind may hold the lock, so the watchdog also guards the wait.
    _arm_watchdog(_IDLE_LIMIT_S)
    while not connection.poll(_PARENT_CHECK_S):
        if os.getppid() != parent:
            return None
        _arm_watchdog(_IDLE_LIMIT_S)
    _arm_watchdog(_RECEIVE_LIMIT_S)
    return connection.recv()


def _arm_watchdog(seconds: float) -> None:
    """End this process after so many seconds unless armed again. It runs outside the interpreter and its lock."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def _reset(home: str, seed: int) -> None:
    os.chdir(home)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _send(connection: Connection, message: dict[str, Any]) -> None:
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError:
        os._exit(1)  # nobody is left to report to
