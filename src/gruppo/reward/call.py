"""Calls of reward functions: a `Call` goes in, a `CallResult` of plain values comes out, in whatever process.

A `CallResult` holds only what JSON can hold, so that nothing a reward function made (an object, a tensor, a lazy proxy)
reaches the trainer. The return value is checked strictly, because every lenient check has cost somebody a run: a single
value that was broadcast to all completions, a None that turned all advantages into NaN.
"""

import atexit
import inspect
import math
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal

from gruppo.errors import GruppoError, InputError
from gruppo.reward.base import parameters_of

ResultKind = Literal["scored", "raised", "invalid", "timeout", "died"]
"""`scored`: the function returned values. `raised`: it raised. `invalid`: its return value cannot be used, in any step.
`timeout`, `died`: the worker was killed at the deadline, or ended by itself."""

FLOAT32_MAX = 3.4028234663852886e38
"""Rewards end as float32 tensors; what is larger would be infinite there."""

_MAX_TRACEBACK = 4000
_MAX_EXTRA_TEXT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSpec:
    """A reward function for a worker process: its `module:function`, or the object itself."""

    name: str
    function: str | Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call in a worker process."""

    id: int
    function: int
    """Index of the function among those the worker has loaded."""
    arguments: dict[str, Any]
    num: int
    """Completions in this call."""
    seed: int
    """Seed of the global random generators before the call; without it, results would depend on earlier calls."""
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CallResult:
    """Values of one call, or the reason why there are none."""

    kind: ResultKind
    text: str = ""
    """Traceback or reason, when there are no values."""
    values: list[float | None] = field(default_factory=list)
    non_finite: list[int] = field(default_factory=list)
    """Places of NaN and infinities; the value there is None."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


class CallLog:
    """Columns and metrics logged during one call: `log_extra` and `log_metric` are its methods."""

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


def call_reward(name: str, function: Callable[..., Any], arguments: Mapping[str, Any], num: int) -> CallResult:
    """Call the function on `num` completions. Whatever it raises becomes a result, `sys.exit()` included.

    MemoryError and KeyboardInterrupt pass: they are about the process, not about the function.
    """
    log = CallLog(num)
    parameters = parameters_of(function)
    hooks = {"log_extra": log.extra, "log_metric": log.metric}
    hooks = {hook: method for hook, method in hooks.items() if parameters.takes(hook)}
    try:
        result = check_returned(name, _await(function(**arguments, **hooks)), num)
    except (MemoryError, KeyboardInterrupt):
        raise
    except GruppoError as error:  # wrong return value, wrong use of a hook, absent extra: the same in every step
        return CallResult(kind="invalid", text=str(error))
    except BaseException as error:  # some libraries derive their timeout from BaseException
        return CallResult(kind="raised", text=short_traceback(error))
    return replace(result, extras=log.extras, metrics=log.metrics)


def check_returned(name: str, returned: Any, num: int) -> CallResult:
    """The return value of reward `name` for `num` completions as floats and None, or an `InputError`.

    >>> result = check_returned("f", [True, 2, None, float("nan")], 4)
    >>> result.values, result.non_finite
    ([1.0, 2.0, None, None], [3])
    """
    # Arrays and tensors, on whatever device, become plain lists; a 0-d one becomes a scalar and is refused below.
    plain = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(plain, list | tuple):
        raise InputError(
            f"reward {name!r} returned {_describe(returned)} for {num} completions; return a list with one float or "
            f"None per completion{_remedy(returned)}"
        )
    if len(plain) != num:
        raise InputError(
            f"reward {name!r} returned {len(plain)} values for {num} completions; return one float or None per "
            "completion (nothing is broadcast)"
        )
    values: list[float | None] = []
    non_finite: list[int] = []
    for index, item in enumerate(plain):
        value = None if item is None else _as_float(name, index, item)
        if value is not None and not abs(value) <= FLOAT32_MAX:  # also true for NaN
            non_finite.append(index)
            value = None
        values.append(value)
    return CallResult(kind="scored", values=values, non_finite=non_finite)


def short_traceback(error: BaseException) -> str:
    """The traceback without the frame that caught it, its middle cut out when it is very long."""
    frames = error.__traceback__.tb_next if error.__traceback__ is not None else None
    text = "".join(traceback.format_exception(type(error), error, frames)).strip()
    if len(text) > _MAX_TRACEBACK:
        text = f"{text[: _MAX_TRACEBACK // 2]}\n...\n{text[-_MAX_TRACEBACK // 2 :]}"
    return text


def _as_float(name: str, index: int, item: Any) -> float:
    # 0-d arrays and tensors have an empty shape; one of shape [1] is a nested value although float() takes it.
    is_scalar = hasattr(item, "__float__") and tuple(getattr(item, "shape", ())) == ()
    if isinstance(item, str | bytes) or not is_scalar:
        raise InputError(
            f"reward {name!r} returned {_describe(item)} as value {index}; each value must be a float, an int, a bool "
            f"or None{_remedy(item)}"
        )
    try:
        return float(item)
    except OverflowError:  # an int beyond the range of a float
        return math.inf


def _remedy(value: Any) -> str:
    """A hint for a dict, which is what reward functions of verl return."""
    return '. Of a dict return its number, as in result["score"]' if isinstance(value, Mapping) else ""


def _describe(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


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
