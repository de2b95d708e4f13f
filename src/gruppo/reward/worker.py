"""Worker process that calls reward functions: calls arrive through a pipe, results go back as JSON.

A reward function may leave anything behind, so working directory and random state are set before each call. A worker
ends with its parent, or where the kernel cannot see to that soon after: an idle one when the pipe closes, a busy one by
a watchdog that does not need the interpreter lock.

Nothing heavy may be imported here: a worker starts again whenever one had to be killed.
"""

import faulthandler
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from gruppo.child import end_with_parent, isolate
from gruppo.errors import GruppoError, RewardError
from gruppo.imports import import_object
from gruppo.reward.call import Call, CallResult, call_reward, short_traceback

_PARENT_CHECK_S = 2.0
_IDLE_DEADLINE_S = 5.0
_RECEIVE_DEADLINE_S = 60.0
_GRACE_S = 1.0


def work(connection: Connection, parent: int, is_bound: bool) -> None:
    """Main function of the process: load the functions, then answer calls until the pipe closes.

    `is_bound`: the kernel kills the process when the thread that started it ends.
    """
    if is_bound:
        end_with_parent(parent)
    isolate()
    home = os.getcwd()
    try:
        given: dict[str, str | Callable[..., Any]] = connection.recv()
        functions = {
            name: import_object(given_as, "reward") if isinstance(given_as, str) else given_as
            for name, given_as in given.items()
        }
        for function in functions.values():
            if callable(prepare := getattr(function, "prepare", None)):
                prepare()
    except (EOFError, OSError):  # the parent is gone
        return
    except BaseException as error:
        _refuse(connection, error)
        return
    _send(connection, {"ready": True})
    try:
        while (call := _next_call(connection, parent)) is not None:
            os.chdir(home)
            random.seed(call.seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(call.seed % 2**32)
            # The parent kills a worker that is late. If the parent is gone, this does, whatever holds the lock.
            _arm_watchdog(call.deadline_s + _GRACE_S)
            try:
                result = call_reward(call.function, functions[call.function], call.arguments, len(call.indices))
            except RewardError as error:  # of a function of the user's own: an error of this call
                result = CallResult(kind="raised", text=short_traceback(error))
            except MemoryError:
                # As with a crash: the model's text brought it about, and the process is no longer reliable.
                result = CallResult(kind="died", text="the worker ran out of memory")
            except KeyboardInterrupt:  # raised by the function itself: SIGINT has no effect here
                os._exit(1)
            fields = {slot: getattr(result, slot) for slot in CallResult.__slots__}
            _send(connection, {"id": call.id, "result": fields})
    except (EOFError, OSError):  # the parent is gone
        return
    # Any other exception is one that a function left behind, in a thread of its own: it ends the process, as a crash.


def _next_call(connection: Connection, parent: int) -> Call | None:
    """The next call; None where the parent is gone, or the call cannot be rebuilt here."""
    signal.setitimer(signal.ITIMER_REAL, 0)  # a timer that a function left on
    # A fork of the parent may hold the other end open, so a closed pipe is not the only sign of its death. And a
    # thread that a function left behind may hold the lock, so the watchdog also guards the wait.
    has_call = False
    while not has_call:
        if os.getppid() != parent:
            return None
        _arm_watchdog(_IDLE_DEADLINE_S)
        try:
            has_call = connection.poll(_PARENT_CHECK_S)
        except OSError:
            raise
        except BaseException:  # left behind by a function that was called before, as the next call is not to blame for
            continue
    _arm_watchdog(_RECEIVE_DEADLINE_S)
    try:
        return connection.recv()
    except (EOFError, OSError):
        raise
    except Exception as error:
        _refuse(connection, error)
        return None


def _refuse(connection: Connection, error: BaseException) -> None:
    """Answer that what was sent cannot be used."""
    _send(connection, {"failed": str(error) if isinstance(error, GruppoError) else short_traceback(error)})


def _arm_watchdog(seconds: float) -> None:
    """End the process after this time unless armed again. It runs outside the interpreter and its lock."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)


def _send(connection: Connection, message: dict[str, Any]) -> None:
    try:
        connection.send_bytes(json.dumps(message).encode())
    except OSError:
        os._exit(1)  # the parent is gone
