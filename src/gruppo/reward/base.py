"""Contract of a reward function: its arguments by name, its return value, and the `Reward` that holds it.

A reward function has TRL's signature, so that a file of rewards moves over without an edit:

    def f(prompts, completions, **columns) -> list[float | None]

It is called with keyword arguments only, and only with the parameters it names (with all of them, if it has
`**kwargs`):

    prompts         the rows' prompts: strings, or lists of messages
    completions     strings; for a prompt of messages, `[{"role": "assistant", "content": text}]`
    completion_ids  the sampled token ids of each completion
    step, rng_seed  the optimizer step, and a seed that is a function of run and step
    log_extra       `log_extra(column, values)`: a column for the table of completions
    log_metric      `log_metric(name, value)`: a number for the step, shown as `reward/<function>/<name>`
    <column>        any other column of the data set, one value per completion

It may be an `async def`. It returns one value per completion; `None` abstains. A function with an attribute
`decides_correctness = True` decides which answers are right, unless another is named; the verifiers have it.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gruppo.errors import InputError
from gruppo.types import Message

HOOKS = frozenset({"log_extra", "log_metric"})
"""Parameters that are functions: made where the reward runs, since they do not cross a process."""

PER_STEP = frozenset({"step", "rng_seed"})
"""Parameters with one value for all completions."""

STANDARD = HOOKS | PER_STEP | {"prompts", "completions", "completion_ids"}
"""Names that mean the same for every data set; a column of such a name is not passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A reward function, with its weight in the total and the place where it runs."""

    name: str
    """Key of its values and metrics (`reward/<name>/mean`)."""
    function: Callable[..., Any]
    weight: float = 1.0
    """Factor in the total; 0 means "log only"."""
    isolated: bool = True
    """Run in a worker process that can be killed. False runs it in this process, where a hang hangs the trainer."""
    source: str = ""
    """`module:function` that a worker imports it from; empty when only the object is known."""
    is_unnamed: bool = False
    """The name is the function's own, not one that was given, so a scorer may number it: `name_2`."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or not self.name.isprintable():
            raise InputError(f"reward name must be printable text without '/', got {self.name!r}")
        if not callable(self.function) or inspect.isclass(self.function):
            raise InputError(f"reward {self.name!r} must be a function or an instance, got {self.function!r}")
        if not math.isfinite(self.weight):
            raise InputError(f"weight of reward {self.name!r} must be a finite number, got {self.weight!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Arguments that a reward function takes."""

    names: frozenset[str]
    takes_all: bool
    """It has `**kwargs`."""
    required: tuple[str, ...]
    """Names without a default, and those in the function's attribute `needs`."""

    def takes(self, name: str) -> bool:
        return self.takes_all or name in self.names


def parameters_of(function: Callable[..., Any]) -> Parameters:
    """The signature of a function, with the columns of its attribute `needs`, if it has one."""
    needs = tuple(getattr(function, "needs", ()))
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some compiled callables have none
        return Parameters(names=frozenset(needs), takes_all=True, required=needs)
    names: list[str] = []
    required: list[str] = []
    takes_all = False
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            takes_all = True
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
            raise InputError(
                f"reward function {name_of(function)!r} takes {parameter.name!r} by position only; rewards are called "
                "with keywords, so remove the '/' from its signature"
            )
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            names.append(parameter.name)
            if parameter.default is parameter.empty:
                required.append(parameter.name)
    required += [name for name in needs if name not in required]
    return Parameters(names=frozenset([*names, *needs]), takes_all=takes_all, required=tuple(required))


def check_columns(reward: Reward, parameters: Parameters, available: Iterable[str]) -> None:
    """Raise when the function needs an argument that is neither a standard one nor a column."""
    have = set(available) | HOOKS
    for name in parameters.required:
        if name in have:
            continue
        columns = ", ".join(sorted(have - STANDARD)) or "none"
        if name in STANDARD:
            raise InputError(f"reward {reward.name!r} takes {name!r}, which this call does not provide")
        raise InputError(
            f"reward {reward.name!r} needs {name!r}, which is neither a standard parameter nor a column of the data "
            f"set; columns are: {columns}. Give the parameter a default or rename the column"
        )


def as_completions(prompts: Sequence[Any], texts: Sequence[str]) -> list[str | list[Message]]:
    """Completions in the form of their prompts: text for text, a message for messages."""
    return [
        text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
        for prompt, text in zip(prompts, texts, strict=True)
    ]


def name_of(function: Callable[..., Any]) -> str:
    """The name of a function, or the class name of an instance in the style of one: `ExactMatch` -> `exact_match`.

    A `functools.partial` has the name of what it wraps.
    """
    while isinstance(function, partial):
        function = function.func
    name = getattr(function, "__name__", "")
    return name or re.sub(r"(?<!^)(?=[A-Z])", "_", type(function).__name__).lower()
