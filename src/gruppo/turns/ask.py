"""ask: calls of a user's code from the event loop: async ones are awaited, others run in a thread."""

import asyncio
import contextlib
import inspect
import os
import queue
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from gruppo.errors import Terminated


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call gives a coroutine. `functools.partial` and objects with an async `__call__` count."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class CallThread:
    """A thread that makes calls one after the other: a browser or a database wants the thread that opened it.

    It starts at the first call, and ends when this object is gone and the last call is done. A call that hangs keeps
    its thread; the process can end all the same.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._has_begun = False
        weakref.finalize(self, self._calls.put, None)

    async def ask(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What the function returns, or raises. A caller that is cancelled leaves the call to itself."""
        if is_async(function):
            return await _awaited(function(*args, **kwargs))
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self.leave(partial(_call, loop, answer, partial(function, *args, **kwargs)))
        returned = await answer
        return await _awaited(returned) if inspect.isawaitable(returned) else returned

    def leave(self, call: Callable[[], object]) -> None:
        """Make a call after those before it, for nobody who waits."""
        if not self._has_begun:
            self._has_begun = True
            threading.Thread(target=_run, args=(self._calls,), name="gruppo-environment", daemon=True).start()
        self._calls.put(call)


class CallExecutor(ThreadPoolExecutor):
    """Executor for an event loop, with a thread for each call.

    The process can end while one of `asyncio.to_thread` hangs, which it cannot with asyncio's own executor.
    """

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        CallThread().leave(partial(_fill, future, partial(fn, *args, **kwargs)))
        return future


async def ask(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """What a function of the user's returns: awaited if it is async, else called in a thread of its own."""
    return await CallThread().ask(function, *args, **kwargs)


def _run(calls: "queue.SimpleQueue[Callable[[], object] | None]") -> None:
    process = os.getpid()
    while (call := calls.get()) is not None:
        with contextlib.suppress(BaseException):  # of a call that nobody waits for; others tell their future
            call()
        _end_of_fork(process)
        del call  # it would keep the environment alive until the next one


def _fill(future: "Future[Any]", call: Callable[[], Any]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(_as_error(error))


def _call(loop: asyncio.AbstractEventLoop, answer: "asyncio.Future[Any]", call: Callable[[], Any]) -> None:
    returned, error = None, None
    try:
        returned = call()
    except BaseException as caught:
        error = _as_error(caught)
    with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(_settle, answer, returned, error)


def _settle(answer: "asyncio.Future[Any]", returned: Any, error: Exception | None) -> None:
    if answer.done():  # cancelled
        return
    if error is None:
        answer.set_result(returned)
    else:
        answer.set_exception(error)


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    process = os.getpid()
    try:
        return await awaitable
    except SystemExit as error:
        if isinstance(error, Terminated):
            raise
        raise _as_error(error) from error
    finally:
        _end_of_fork(process)


def _end_of_fork(process: int) -> None:
    """End the copy of the run that the user's code has forked and let return: it would answer beside its parent."""
    if os.getpid() != process:
        os._exit(0)


def _as_error(error: BaseException) -> Exception:
    """The error as one that a future can hold and that does not end the event loop: `sys.exit()` becomes one."""
    if isinstance(error, Exception) and not isinstance(error, StopIteration):
        return error
    told = RuntimeError(f"{type(error).__name__}: {error}")
    told.__cause__ = error
    return told
