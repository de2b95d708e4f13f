"""Reward: a function with its weight, loaded from a built-in's name, from `module:function`, or from a callable."""

import ast
import importlib.util
import inspect
import itertools
import math
import sys
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

from gruppo.errors import InputError, require
from gruppo.imports import did_you_mean, import_name, import_object
from gruppo.reward.call import Parameters, name_of, parameters_of
from gruppo.reward.length import LengthPenalty, SoftOverlong
from gruppo.reward.math_equal import MathMatch
from gruppo.reward.number import NumberMatch
from gruppo.reward.verifiers import ExactMatch, NormalizedMatch, PatternMatch, TagFormat, ThinkFormat

BUILTIN: dict[str, Callable[..., Any]] = {
    "exact_match": ExactMatch,
    "normalized_match": NormalizedMatch,
    "number_match": NumberMatch,
    "math_match": MathMatch,
    "tag_format": TagFormat,
    "think_format": ThinkFormat,
    "length_penalty": LengthPenalty,
    "soft_overlong": SoftOverlong,
    "pattern_match": PatternMatch,
}


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

    parameters: Parameters = field(init=False, repr=False, compare=False)
    """Arguments that the function takes."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or not self.name.isprintable():
            raise InputError(f"reward name must be printable text without '/', got {self.name!r}")
        if not callable(self.function) or inspect.isclass(self.function):
            raise InputError(f"reward {self.name!r} must be a function or an instance, got {self.function!r}")
        if not math.isfinite(self.weight):
            raise InputError(f"weight of reward {self.name!r} must be a finite number, got {self.weight!r}")
        object.__setattr__(self, "parameters", parameters_of(self.function))


def load_reward(
    spec: str | Callable[..., Any] | Reward,
    *,
    name: str | None = None,
    weight: float | None = None,
    isolated: bool | None = None,
    **parameters: Any,
) -> Reward:
    """A `Reward` from a built-in's name, from `module:function`, or from a callable.

    A function runs in a worker process unless `isolated=False`, or unless it has an attribute `isolated` that is False,
    as most built-ins do. Without a `name` it has that of the built-in or the function, which a `RewardScorer` numbers
    when several share it.

    Args:
        parameters: arguments of a built-in, or of a class named by `module:Class`.

    >>> load_reward("exact_match", weight=0.5, column="target").function
    ExactMatch(column='target', inside='')
    """
    if isinstance(spec, Reward):
        changes = {"name": name, "weight": weight, "isolated": isolated, "is_unnamed": None if name is None else False}
        return replace(spec, **{key: value for key, value in changes.items() if value is not None})
    source = ""
    if not isinstance(spec, str):
        target, default_name = spec, name_of(spec)
    elif ":" in spec:
        target, default_name, source = import_object(spec, "reward"), spec.rpartition(":")[2].rpartition(".")[2], spec
    elif spec in BUILTIN:
        target, default_name = BUILTIN[spec], spec
    else:
        raise InputError(
            f"no built-in reward is called {spec!r}{did_you_mean(spec, BUILTIN)}; built-ins are "
            f"{', '.join(BUILTIN)}, and your own is written module:function"
        )
    if inspect.isclass(target):
        source = ""  # a worker needs the parameters too: send the object
        try:
            target = target(**parameters)
        except TypeError as error:
            raise InputError(f"reward {spec!r} cannot be made with parameters {parameters!r}: {error}") from error
    elif parameters:
        raise InputError(
            f"{spec!r} is a function and takes no parameters, got {', '.join(parameters)}; make it a class with a "
            "__call__ method, or pass the values as columns"
        )
    if isinstance(target, MathMatch) and importlib.util.find_spec("math_verify") is None:
        raise require("math", "math-verify", "math_match")
    if not callable(target):
        raise InputError(f"{spec!r} is {type(target).__name__} {target!r}, not a function")
    return Reward(
        name=name or default_name,
        function=target,
        weight=1.0 if weight is None else weight,
        isolated=bool(getattr(target, "isolated", True)) if isolated is None else isolated,
        source=source,
        is_unnamed=name is None and (bool(source) or not isinstance(spec, str)),
    )


def number_names(rewards: Sequence[Reward]) -> tuple[Reward, ...]:
    """The rewards under different names: where functions share their own name, `name`, `name_2`, `name_3`.

    Names that were given stay as they are. Two equal ones are an error, as is one function twice under its own name.
    """
    given = [reward.name for reward in rewards if not reward.is_unnamed]
    functions = {(reward.name, id(reward.function)) for reward in rewards}
    if len(set(given)) < len(given) or len(functions) < len(rewards):
        raise InputError(
            f"rewards must have different names, got {[reward.name for reward in rewards]}; leave one out, or name it: "
            "load_reward(..., name=...)"
        )
    taken = set(given)
    numbered: list[Reward] = []
    for reward in rewards:
        if reward.is_unnamed:
            names = itertools.chain([reward.name], (f"{reward.name}_{number}" for number in itertools.count(2)))
            reward = replace(reward, name=next(name for name in names if name not in taken))
            taken.add(reward.name)
        numbered.append(reward)
    return tuple(numbered)


def sendable(reward: Reward) -> str | Callable[..., Any]:
    """The function for another process: its `module:name`, or the object; an error where neither can be found there."""
    if source := reward.source or import_name(reward.function):
        return source
    function = reward.function
    try:
        ForkingPickler.dumps(function)
    except Exception as error:  # pickling runs foreign code and fails in many ways
        raise InputError(
            f"reward {reward.name!r} cannot run in a worker process, because a lambda or a function inside a function "
            f"has no name to import it by ({error}); move it to a module, or pass isolated=False to run it in this "
            "process without a time limit"
        ) from error
    if is_in_main(function) and not hasattr(sys.modules["__main__"], "__file__"):
        raise InputError(
            f"reward {reward.name!r} is defined in an interactive session, where a worker process cannot import it; "
            "move it to a module, or pass isolated=False to run it in this process without a time limit"
        )
    if is_in_main(function) and not _has_main_guard():
        raise InputError(
            f"reward {reward.name!r} is defined in the script that runs, and a worker process would run all of it once "
            "more to import the reward; put the rest of the script under `if __name__ == '__main__':`, move the reward "
            "to a module, or pass isolated=False to run it in this process without a time limit"
        )
    return function


def is_in_main(function: Any) -> bool:
    """True when the function, or its class, is defined in the script that runs."""
    return "__main__" in (getattr(function, "__module__", ""), type(function).__module__)


def _has_main_guard() -> bool:
    """True when the script that runs tests `__name__`, so that importing it does not run it again."""
    try:
        with tokenize.open(str(sys.modules["__main__"].__file__)) as file:
            script = ast.parse(file.read())
    except (OSError, SyntaxError):  # no source to read: a compiled program
        return True
    return any(isinstance(line, ast.If) and "__name__" in ast.dump(line.test) for line in script.body)
