"""One call of a reward function, in whatever process: arguments in, a `Reply` of plain values out.

A `Reply` holds only what JSON can hold, so that nothing a reward function made (an object, a tensor, a lazy proxy)
reaches the trainer.
"""

import atexit
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from gruppo.errors import GruppoError, InputError
from gruppo.reward.base import parameters_of
from gruppo.reward.returned import check_returned

ReplyKind = Literal["scored", "raised", "invalid", "timeout", "died"]
"""`scored`: values came. `raised`: the function raised. `invalid`: what it returned cannot be used, in any step.
`timeout`, `died`: the worker was killed at the deadline, or ended by itself."""

_MAX_TRACEBACK = 4000
_MAX_EXTRA_TEXT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came of one call."""

    kind: ReplyKind
    text: str = ""
    """Traceback or reason, when there are no values."""
    values: list[float | None] = field(default_factory=list)
    non_finite: list[int] = field(default_factory=list)
    """Places of NaN and infinities among `values`."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class CallLog:
    """What a function logged during one call: `log_extra` and `log_metric` are its methods."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.extras: dict[str, list[Any]] = {}
        self.metrics: dict[str, float] = {}

    def extra(self, column: str, values: Sequence[Any]) -> None:
        """A column for the table of completions, one value per completion."""
        if len(values) != self.num:
            raise InputError(f"log_extra({column!r}) got {len(values)} values for {self.num} completions")
        self.extras[str(column)] = [_plain(value) for value in values]

    def metric(self, name: str, value: float) -> None:
        """A number for this step; one that is not finite is left out."""
        if math.isfinite(number := float(value)):
            self.metrics[str(name)] = number


def call_reward(name: str, function: Callable[..., Any], arguments: Mapping[str, Any], num: int) -> Reply:
    """Call the function on `num` completions. Whatever it raises becomes a reply, `sys.exit()` included.

    MemoryError and KeyboardInterrupt pass: they are about the process, not about the function.
    """
    log = CallLog(num)
    parameters = parameters_of(function)
    hooks = {"log_extra": log.extra, "log_metric": log.metric}
    hooks = {hook: method for hook, method in hooks.items() if parameters.takes(hook)}
    try:
        checked = check_returned(name, _await(function(**arguments, **hooks)), num)
    except (MemoryError, KeyboardInterrupt):
        raise
    except GruppoError as error:  # wrong return value, wrong use of a hook, absent extra: the same in every step
        return Reply(kind="invalid", text=str(error))
    except BaseException as error:  # some libraries derive their timeout from BaseException
        return Reply(kind="raised", text=short_traceback(error))
    return Reply(
        kind="scored",
        values=checked.values,
        non_finite=checked.non_finite,
        extras=log.extras,
        metrics=log.metrics,
    )


def short_traceback(error: BaseException) -> str:
    """The traceback without this module's own frame, its middle cut out when it is very long."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames)).strip()
    if len(text) > _MAX_TRACEBACK:
        text = f"{text[: _MAX_TRACEBACK // 2]}\n...\n{text[-_MAX_TRACEBACK // 2 :]}"
    return text


def _await(result: Any) -> Any:
    if not inspect.isawaitable(result):
        return result
    import asyncio  # half of a worker's start, for the few functions that are asynchronous
    from concurrent.futures import ThreadPoolExecutor

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _runner().run(_finish(result))
    # A notebook runs its own loop in this thread, and a loop cannot be entered twice.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(_runner().run, _finish(result)).result()


@cache
def _runner() -> Any:
    """One event loop for all calls: HTTP clients that a module keeps are bound to the loop of their first use."""
    import asyncio

    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner


async def _finish(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


def _plain(value: Any) -> Any:
    if value is None or (isinstance(value, bool | int) and abs(value) < 2**63):  # what a table column can hold
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)[:_MAX_EXTRA_TEXT]
