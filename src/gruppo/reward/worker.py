"""Worker process that calls reward functions: calls arrive through a pipe, results go back as JSON.

A reward function may leave anything behind, so working directory and random state are set before each call.

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

from gruppo.errors import GruppoError, RewardError
from gruppo.process.by_name import import_object
from gruppo.process.child import end_with_parent, isolate
from gruppo.reward.call import Call, CallResult, call_reward, short_traceback

_GRACE_S = 1.0


def work(connection: Connection, parent: int) -> None:
    """Main function of the process: load the functions, then answer calls until the pipe closes."""
    end_with_parent(parent)
    isolate()
    home = os.getcwd()
    try:
        try:
            functions = {name: _loaded(given) for name, given in connection.recv().items()}
        except EOFError:
            raise
        except BaseException as error:
            _refuse(connection, error)
            return
        _send(connection, {"ready": True})
        while (call := _next_call(connection)) is not None:
            os.chdir(home)
            random.seed(call.seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed(call.seed % 2**32)
            # The parent kills a worker that is late. If the parent is gone and the kernel did not tell, this does.
            faulthandler.dump_traceback_later(call.deadline_s + _GRACE_S, exit=True, file=2)
            result = _answer(call, functions[call.function])
            faulthandler.cancel_dump_traceback_later()
            _send(connection, {"result": {slot: getattr(result, slot) for slot in CallResult.__slots__}})
    except (EOFError, OSError):  # the parent is gone
        return
    # Any other exception is one that a function left behind, in a thread of its own: it ends the process, as a crash.


def _loaded(given: str | Callable[..., Any]) -> Callable[..., Any]:
    function = import_object(given, "reward") if isinstance(given, str) else given
    if callable(prepare := getattr(function, "prepare", None)):
        prepare()
    return function


def _next_call(connection: Connection) -> Call | None:
    """The next call, or None when it cannot be rebuilt here."""
    signal.setitimer(signal.ITIMER_REAL, 0)  # a timer that a function left on
    while True:
        try:
            connection.poll(None)
            break
        except OSError:
            raise
        except BaseException:  # left behind by a function that was called before, as the next call is not to blame for
            continue
    try:
        return connection.recv()
    except EOFError:
        raise
    except Exception as error:
        _refuse(connection, error)
        return None


def _answer(call: Call, function: Callable[..., Any]) -> CallResult:
    try:
        return call_reward(call.function, function, call.arguments, len(call.indices))
    except RewardError as error:  # of a function of the user's own: an error of this call
        return CallResult(kind="raised", text=short_traceback(error))
    except MemoryError:
        # As with a crash: the model's text brought it about, and the process is no longer reliable.
        return CallResult(kind="died", text="the worker ran out of memory")
    except KeyboardInterrupt:  # raised by the function itself: SIGINT has no effect here
        os._exit(1)


def _refuse(connection: Connection, error: BaseException) -> None:
    """Answer that what was sent cannot be used."""
    _send(connection, {"failed": str(error) if isinstance(error, GruppoError) else short_traceback(error)})


def _send(connection: Connection, message: dict[str, Any]) -> None:
    connection.send_bytes(json.dumps(message).encode())
