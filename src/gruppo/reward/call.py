"""Calls of reward functions: the arguments a function gets, one call of it, and the check of its return value.

A function has TRL's signature, `f(prompts, completions, **columns) -> list[float | None]`, and gets only the parameters
that it names; docs/rewards.md lists them. A `CallResult` holds only what JSON can hold, so that no object made by a
reward function (a tensor, a lazy proxy) reaches the trainer.
"""

import ctypes
import inspect
import itertools
import math
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Literal

from gruppo.errors import GruppoError, InputError, RewardError, Terminated
from gruppo.types import Message

if TYPE_CHECKING:
    from gruppo.reward.load import Reward

HOOKS = ("log_extra", "log_metric")
"""Parameters that are functions. They do not cross a process: the arguments of a call hold None under their names."""

PER_STEP = frozenset({"step", "rng_seed", "trainer_state", *HOOKS})
"""Parameters with one value for all completions."""

STANDARD = PER_STEP | {"prompts", "completions", "completion_ids", "prompt_texts"}
"""Names that mean the same for every data set; a column of such a name is not passed."""

VERL = frozenset({"solution_str", "ground_truth"})
"""Parameters by which a function is known that has verl's signature and is called once per completion."""

ResultKind = Literal["scored", "raised", "invalid", "timeout", "died"]
"""`scored`: the function returned values. `raised`: it raised. `invalid`: its return value cannot be used, in any step.
`timeout`, `died`: the worker was killed at the deadline, or ended by itself."""

FLOAT32_MAX = 3.4028234663852886e38
"""Rewards end as float32 tensors; what is larger would be infinite there."""

_MAX_TRACEBACK = 4000
_MAX_EXTRA_TEXT = 10_000
_MAX_SHOWN = 200
_POLL_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """Position in the run, under TRL's names, for a reward that changes with it. A step is one batch of rollouts.

    Outside of a run it is step 0 of 1, so that `global_step / max_steps` exists.
    """

    global_step: int = 0
    """Steps that are complete: 0 in the first one."""
    max_steps: int = 1
    """Steps of the whole run."""
    epoch: float = 0.0
    """Passes over the prompts that are complete."""
    num_train_epochs: float = 1.0
    """Passes over the prompts in the whole run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Arguments that a reward function takes."""

    names: frozenset[str]
    takes_all: bool
    """It has `**kwargs`."""
    is_of_verl: bool = False
    """It has verl's signature, `compute_score(data_source, solution_str, ground_truth, extra_info)`: it scores one
    completion a call, and is given verl's arguments."""
    required: tuple[str, ...]
    """Names without a default, and those in the function's attribute `needs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call of a reward function."""

    function: str
    """Name of the reward."""
    indices: Sequence[int]
    """Completions of this call."""
    arguments: dict[str, Any]
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


class StepCompletions:
    """Completions of one step as arguments for reward functions: checked once, cut into calls."""

    def __init__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        step: int = 0,
        rng_seed: int = 0,
        group_ids: Sequence[int] | None = None,
        trainer_state: TrainerState | None = None,
        prompt_texts: Sequence[str] | None = None,
        messages: Sequence[Sequence[Message] | None] | None = None,
    ) -> None:
        columns = columns or {}
        self.num = len(completions)
        self.step = step
        self.rng_seed = rng_seed
        given = {"completion_ids": completion_ids, "prompt_texts": prompt_texts}
        lists = [("prompts", prompts), ("group_ids", group_ids), *given.items(), *columns.items()]
        for name, values in lists:
            if values is not None and len(values) != self.num:
                raise InputError(f"{name} has {len(values)} entries for {self.num} completions; give one for each")
        marks = prompts if group_ids is None else group_ids
        groups = [(mark, len(list(run))) for mark, run in itertools.groupby(marks)]
        torn = [mark for mark, times in Counter(mark for mark, _ in groups).items() if times > 1] if group_ids else []
        if torn:
            raise InputError(f"group_ids must keep the completions of a group together, got {torn[0]} in two places")
        ends = list(itertools.accumulate(size for _, size in groups))
        self.groups = [range(end - size, end) for end, (_, size) in zip(ends, groups, strict=True)]
        """Completions of each group."""
        self._texts = completions
        self.available: dict[str, Any] = {
            **{name: values for name, values in columns.items() if name not in STANDARD},
            "prompts": prompts,
            "completions": [
                text if isinstance(prompt, str) else list(said or [{"role": "assistant", "content": text}])
                for prompt, text, said in zip(prompts, completions, messages or [None] * self.num, strict=True)
            ],
            "step": step,
            "rng_seed": rng_seed,
            "trainer_state": trainer_state or TrainerState(),
            **dict.fromkeys(HOOKS),
        }
        self.available |= {name: values for name, values in given.items() if values is not None}

    def arguments(self, reward: "Reward", indices: Sequence[int]) -> dict[str, Any]:
        """Arguments of a reward function, for some of the completions."""
        parameters = reward.parameters
        available = self._of_verl() if parameters.is_of_verl else self.available
        for name in parameters.required:
            if name in available:
                continue
            if name in STANDARD:
                raise InputError(f"reward {reward.name!r} takes {name!r}, which this call does not provide")
            columns = ", ".join(sorted(self.available.keys() - STANDARD)) or "none"
            raise InputError(
                f"reward {reward.name!r} needs {name!r}, which is neither a standard parameter nor a column of the "
                f"data set; columns are: {columns}. Give the parameter a default or rename the column"
            )
        return {
            name: value if name in PER_STEP else [value[index] for index in indices]
            for name, value in available.items()
            if parameters.takes_all or name in parameters.names
        }

    def _of_verl(self) -> dict[str, Any]:
        """Arguments for a function with verl's signature, one list each."""
        columns = self.available
        answers = columns.get("ground_truth", columns.get("answer"))
        if "reward_model" in columns:  # verl's own place, whatever column the built-in rewards read
            held = [row.get("ground_truth") if isinstance(row, Mapping) else None for row in columns["reward_model"]]
            answers = held if any(value is not None for value in held) or answers is None else answers
        extra = [dict(row) if isinstance(row, Mapping) else {} for row in columns.get("extra_info", [None] * self.num)]
        found = {**columns, "solution_str": self._texts, "extra_info": extra}
        return found if answers is None else found | {"ground_truth": answers}

    def chunks(self, parts: int) -> list[range]:
        """About `parts` runs of equal size, never cut within a group: a function may compare its members."""
        aim = -(-self.num // parts)
        cuts = [0]
        for group in self.groups:
            if group.stop - cuts[-1] >= aim or group.stop == self.num:
                cuts.append(group.stop)
        return [range(start, end) for start, end in itertools.pairwise(cuts)]

    def spread(self, indices: Sequence[int]) -> list[int]:
        """The same completions in an order that visits every group early: one bad group should not look like all."""
        places = [place for group in self.groups for place in range(len(group))]
        return sorted(indices, key=lambda index: (places[index], index))

    def describe(self, index: int) -> str:
        """A completion for an error text, short and without control characters."""
        prompt, text = repr(self.available["prompts"][index]), repr(self._texts[index])
        return f"completion {index} {_shorten(text)} of prompt {_shorten(prompt)}"


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """The signature of a function, with the columns of its attribute `needs`, if it has one."""
    needs = getattr(function, "needs", ())
    if not isinstance(needs, tuple | list | set | frozenset) or not all(isinstance(name, str) for name in needs):
        raise InputError(f"needs={needs!r} of reward {name_of(function)!r} must be a sequence of column names")
    needs = tuple(needs)
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some compiled callables have none
        return Parameters(names=frozenset(needs), takes_all=True, required=needs)
    taken: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            taken.append(parameter)
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise InputError(
                f"reward function {name_of(function)!r} takes {parameter.name!r} by position only; rewards are called "
                "with keywords, so remove the '/' from its signature"
            )
    without_default = [parameter.name for parameter in taken if parameter.default is parameter.empty]
    names = frozenset([*(parameter.name for parameter in taken), *needs])
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    is_of_verl = names >= VERL and "completions" not in names
    if is_of_verl and takes_all:  # verl gives these four, and no other column
        names, takes_all = names | {"data_source", "extra_info"}, False
    return Parameters(
        names=names,
        takes_all=takes_all,
        is_of_verl=is_of_verl,
        required=tuple(dict.fromkeys([*without_default, *needs])),
    )


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, also in a `partial`, or of an instance's class: `ExactMatch` -> `exact_match`."""
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", "")
    return name or re.sub(r"(?<!^)(?=[A-Z])", "_", type(function).__name__).lower()


def call_reward(name: str, function: Callable[..., Any], arguments: Mapping[str, Any], num: int) -> CallResult:
    """Call the function on `num` completions. Whatever it raises becomes a result, `sys.exit()` included.

    MemoryError and KeyboardInterrupt pass: they are about the process, not about the function. So does RewardError, by
    which a client of a server says that there is no use in asking again.
    """
    extras: dict[str, list[Any]] = {}
    metrics: dict[str, float] = {}

    def log_extra(column: str, values: Sequence[Any]) -> None:
        if len(values) != num:
            raise InputError(f"log_extra({column!r}) got {len(values)} values for {num} completions")
        extras[str(column)] = [_plain(value) for value in values]

    def log_metric(metric: str, value: float) -> None:
        if math.isfinite(number := float(value)):
            metrics[str(metric)] = number

    hooks = {"log_extra": log_extra, "log_metric": log_metric}
    try:
        given = {key: hooks.get(key, value) for key, value in arguments.items()}
        if arguments.keys() >= VERL and "completions" not in arguments:
            returned = _score_each(name, function, given, num, log_extra, log_metric)
        else:
            returned = function(**given)
            if inspect.isawaitable(returned):
                returned = _await(returned)
        result = check_returned(name, returned, num)
    except (MemoryError, KeyboardInterrupt, Terminated, RewardError):
        raise
    except GruppoError as error:  # wrong return value, wrong use of a hook, absent extra: the same in every step
        return CallResult(kind="invalid", text=str(error))
    except BaseException as error:  # some libraries derive their timeout from BaseException
        return CallResult(kind="raised", text=short_traceback(error))
    return replace(result, extras=extras, metrics=metrics)


def _score_each(
    name: str,
    function: Callable[..., Any],
    given: Mapping[str, Any],
    num: int,
    log_extra: Callable[[str, Sequence[Any]], None],
    log_metric: Callable[[str, float], None],
) -> list[Any]:
    """What a function with verl's signature returns for each completion; the rest of a dict with "score" is logged."""

    def arguments(index: int) -> dict[str, Any]:
        return {key: value if key in PER_STEP else value[index] for key, value in given.items()}

    returned = [function(**arguments(index)) for index in range(num)]
    if any(map(inspect.isawaitable, returned)):
        returned = _await(_all_of(returned))
    logged: dict[str, list[Any]] = {}
    for index, value in enumerate(returned):
        if not isinstance(value, Mapping):
            continue
        if "score" not in value:
            raise InputError(f"reward {name!r} returned a dict without 'score', which has {', '.join(map(str, value))}")
        for key in value.keys() - {"score"}:
            is_scalar = hasattr(value[key], "item") and getattr(value[key], "shape", None) == ()  # of NumPy, of torch
            logged.setdefault(str(key), [None] * num)[index] = value[key].item() if is_scalar else value[key]
        returned[index] = value["score"]
    log_parts(logged, log_extra, log_metric)
    return returned


def log_parts(
    parts: Mapping[str, list[Any]],
    log_extra: Callable[[str, Sequence[Any]], None],
    log_metric: Callable[[str, float], None],
) -> None:
    """Log what a reward gives beside its score: each as a column, and the mean of one that has numbers only."""
    for key, values in sorted(parts.items()):
        numbers = [value for value in values if isinstance(value, int | float)]
        if len(numbers) == len(values):
            log_metric(key, math.fsum(numbers) / len(values))
        log_extra(key, values)


async def _all_of(awaitables: Sequence[Any]) -> list[Any]:
    import asyncio

    tasks = [asyncio.ensure_future(each) for each in awaitables]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def call_within(
    seconds: float, poll: Callable[[], None] | None, name: str, function: Callable[..., Any], *arguments: Any
) -> CallResult:
    """`call_reward` in a thread that is given up after so many seconds: a loop in Python ends then, and a call inside a
    C function goes on."""
    result: Future[CallResult] = Future()

    def run() -> None:
        try:
            result.set_result(call_reward(name, function, *arguments))
        except BaseException as error:  # MemoryError and KeyboardInterrupt, for the thread that waits
            result.set_exception(error)

    thread = threading.Thread(target=run, name=f"reward {name}", daemon=True)
    thread.start()
    expires = time.monotonic() + seconds
    while (left := expires - time.monotonic()) > 0:
        try:
            return result.result(timeout=min(left, _POLL_S))
        except TimeoutError:
            if poll is not None:
                poll()
    # Left alone, a loop would take half of the interpreter's time from training for the rest of the run.
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
    return CallResult(kind="timeout", text=f"no answer within {seconds:g} s; the call was given up (reward_deadline)")


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
        value = item if item is None or type(item) is float else _as_float(name, index, item)
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
    """A hint for nothing at all, and for a dict, which is what reward functions of verl return."""
    if value is None:
        return "; is a `return` missing?"
    return '. Of a dict return its number, as in result["score"]' if isinstance(value, Mapping) else ""


def _describe(value: Any) -> str:
    text = repr(value)
    if value is None:
        return text
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def _await(awaitable: Awaitable[Any]) -> Any:
    import asyncio  # half of a worker's start, for the few functions that are asynchronous

    async def finish() -> tuple[Any, BaseException | None]:
        try:
            return await awaitable, None
        except BaseException as error:  # SystemExit would end the loop
            return None, error

    value, error = asyncio.run_coroutine_threadsafe(finish(), _event_loop()).result()
    if error is not None:
        raise error
    return value


@cache
def _event_loop() -> Any:
    """One event loop for all calls, since HTTP clients that a module keeps are bound to the loop of their first use.

    It has a thread of its own: the one that calls may run a loop already, as in a notebook.
    """
    import asyncio

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward event loop", daemon=True).start()
    return loop


def _plain(value: Any) -> Any:
    if value is None or (isinstance(value, bool | int) and abs(value) < 2**63):  # what a table column can hold
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return str(value)[:_MAX_EXTRA_TEXT]
