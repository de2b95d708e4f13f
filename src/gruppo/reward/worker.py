"""Worker process that calls reward functions: calls arrive through a pipe, results go back as JSON.

A reward function may leave anything behind, so working directory and random state are set before each call. A worker
ends with its parent, or where the kernel cannot see to that soon after: an idle one when the pipe closes, a busy one by
a watchdog that does not need the interpreter lock.

Nothing heavy may be imported here: a worker starts again whenever one had to be killed.
"""

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import resource
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from gruppo.errors import GruppoError
from gruppo.imports import import_object
from gruppo.output import Output, printable
from gruppo.reward.call import Call, CallResult, call_reward, short_traceback

STACK_SIGNAL = signal.SIGUSR2
"""Makes a worker write its Python stack to stderr, even in the middle of a C call."""

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 2.0
_IDLE_DEADLINE_S = 5.0
_RECEIVE_DEADLINE_S = 60.0
_GRACE_S = 1.0


def work(connection: Connection, parent: int, is_bound: bool) -> None:
    """Main function of the process: load the functions, then answer calls until the pipe closes.

    `is_bound`: the kernel kills the process when the thread that started it ends.
    """
    if is_bound:
        _end_with_parent(parent)
    _isolate()
    home = os.getcwd()
    try:
        given: dict[str, str | Callable[..., Any]] = connection.recv()
        functions = {name: import_object(f, "reward") if isinstance(f, str) else f for name, f in given.items()}
        for function in functions.values():
            if callable(prepare := getattr(function, "prepare", None)):
                prepare()
        _send(connection, {"ready": True})
        while (call := _next_call(connection, parent)) is not None:
            os.chdir(home)
            random.seed(call.seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(call.seed % 2**32)
            # The parent kills a worker that is late. If the parent is gone, this does, whatever holds the lock.
            _arm_watchdog(call.deadline_s + _GRACE_S)
            try:
                result = call_reward(call.function, functions[call.function], call.arguments, len(call.indices))
            except MemoryError:
                # As with a crash: the model's text brought it about, and the process is no longer reliable.
                result = CallResult(kind="died", text="the worker ran out of memory")
            except KeyboardInterrupt:  # raised by the function itself: SIGINT has no effect here
                os._exit(1)
            fields = {slot: getattr(result, slot) for slot in CallResult.__slots__}
            _send(connection, {"id": call.id, "result": fields})
    except (EOFError, OSError):  # the parent is gone
        return
    except BaseException as error:
        _send(connection, {"failed": str(error) if isinstance(error, GruppoError) else short_traceback(error)})


class _Prints(Output):
    """What reward functions print, which may quote a model: without control characters."""

    def write(self, text: str, /) -> int:
        super().write(printable(text))
        return len(text)


def _isolate() -> None:
    """Own session, no terminal, stdout to stderr: prints and signals of a reward stay away from the trainer."""
    os.setsid()
    try:
        os.fstat(2)
    except OSError:  # a daemon without stderr
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    if sys.stderr is not None:
        sys.stderr = _Prints(sys.stderr)  # a print that nobody reads must not cost a reward its deadline
    sys.stdout = sys.stderr
    # The trainer decides what a signal to the whole job means. A handler rather than SIG_IGN, because an ignored
    # signal stays ignored in programs that a reward function starts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    faulthandler.register(STACK_SIGNAL, file=2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected here and needs no core file


def _end_with_parent(parent: int) -> None:
    """Have the kernel kill this process with its parent, in the middle of whatever call. Linux alone can."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def _next_call(connection: Connection, parent: int) -> Call | None:
    # A fork of the parent may hold the other end open, so a closed pipe is not the only sign of its death. And a
    # thread that a function left behind may hold the lock, so the watchdog also guards the wait.
    _arm_watchdog(_IDLE_DEADLINE_S)
    while not connection.poll(_PARENT_CHECK_S):
        if os.getppid() != parent:
            return None
        _arm_watchdog(_IDLE_DEADLINE_S)
    _arm_watchdog(_RECEIVE_DEADLINE_S)
    return connection.recv()


def _arm_watchdog(seconds: float) -> None:
    """End the process after this time unless armed again. It runs outside the interpreter and its lock."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def _send(connection: Connection, message: dict[str, Any]) -> None:
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError:
        os._exit(1)  # the parent is gone
