"""Reward: a function with its weight, loaded from a name with options (docs/rewards.md), or from a callable."""

import ast
import importlib.util
import inspect
import itertools
import math
import sys
import tokenize
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, get_origin

from gruppo.errors import GruppoError, InputError, Terminated, require
from gruppo.process.by_name import did_you_mean, import_name, import_object, is_address, read_spec
from gruppo.process.streams import printable
from gruppo.reward.call import Parameters, name_of, parameters_of, short_traceback
from gruppo.reward.length import LengthPenalty, SoftOverlong
from gruppo.reward.math_equal import MathMatch
from gruppo.reward.number import NumberMatch
from gruppo.reward.remote import RemoteReward
from gruppo.reward.verifiers import EnvironmentReward, ExactMatch, NormalizedMatch, PatternMatch, TagFormat, ThinkFormat

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
    "environment": EnvironmentReward,
}

REWARD_MODEL = "gruppo.model.reward_model:RewardModel"
"""By name, since the package of models comes after this one."""


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
    is_timed: bool = False
    """In this process, give a call up at the deadline: for a function that should be isolated and cannot be."""
    source: str = ""
    """`module:function` that a worker imports it from; empty when only the object is known."""
    is_unnamed: bool = False
    """True if the name is the function's own and not a given one, so that a scorer may number it: `name_2`."""

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
    """A `Reward` from a built-in's name, `module:function`, the folder or hub id of a reward model, the address of a
    server, or a callable.

    Options of a built-in or a class may follow its name: `number_match:column=solution,inside=answer`.

    A function runs in a worker process unless `isolated=False`, or unless it has an attribute `isolated` that is False,
    as most built-ins do. Without a `name` it has that of the built-in or the function, which a `RewardScorer` numbers
    when several share it.

    Args:
        parameters: arguments of a built-in, or of a class named by `module:Class`.

    >>> load_reward("exact_match:column=target", weight=0.5).function
    ExactMatch(column='target', inside='')
    >>> load_reward("exact_match", column="target").function
    ExactMatch(column='target', inside='')
    """
    if isinstance(spec, Reward):
        changes = {"name": name, "weight": weight, "isolated": isolated, "is_unnamed": None if name is None else False}
        return replace(spec, **{key: value for key, value in changes.items() if value is not None})
    source, options = "", {}
    if isinstance(spec, str):
        target, default_name, source, options = _find(spec)
    else:
        target, default_name = spec, name_of(spec)
    if inspect.isclass(target):
        source = ""  # a worker needs the parameters too: send the object
        parameters = _typed(target, default_name, options) | parameters
        try:
            target = target(**parameters)
        except (KeyboardInterrupt, MemoryError, GruppoError, Terminated):
            raise
        except BaseException as error:  # also `sys.exit()`
            reason = printable(str(error) if isinstance(error, TypeError) else short_traceback(error))
            raise InputError(f"reward {spec!r} cannot be made with parameters {parameters!r}: {reason}") from error
    elif parameters or options:
        raise InputError(
            f"{spec!r} is a function and takes no parameters, got {', '.join([*options, *parameters])}; make it a "
            "class with a __call__ method, or pass the values as columns"
        )
    if isinstance(target, MathMatch) and importlib.util.find_spec("math_verify") is None:
        raise require("math", "math-verify", "math_match")
    if not callable(target):
        value = f" {target!r}" if isinstance(target, int | float | str) else ""  # others may be long, or hold secrets
        raise InputError(f"{spec!r} is {type(target).__name__}{value}, not a function; name a function or a class")
    return Reward(
        name=name or default_name,
        function=target,
        weight=1.0 if weight is None else weight,
        isolated=bool(getattr(target, "isolated", True)) if isolated is None else isolated,
        source=source,
        is_unnamed=name is None and (bool(source or options) or not isinstance(spec, str)),
    )


def _find(spec: str) -> tuple[Any, str, str, dict[str, str]]:
    """The object that a spec names, its name, its `module:name` if it has one, and the options of the spec."""
    has_server = is_address(spec)
    found, options = read_spec(spec)
    if has_server:
        path = "/".join(found.split("/")[3:]).partition("?")[0]
        return RemoteReward, path.rstrip("/").rpartition("/")[2] or "remote", "", {**options, "url": found}
    is_hub = found.startswith(("hf://", "ms://"))
    if ":" in found and not is_hub:
        builtin = found.partition(":")[0]
        try:
            target = import_object(found, "reward")
        except InputError as error:
            hint = f"; options of the built-in are written {builtin}:key=value" if builtin in BUILTIN else ""
            raise InputError(f"{error}{hint}") from error
        return target, found.rpartition(":")[2].rpartition(".")[2], found, options
    if found in BUILTIN:
        return BUILTIN[found], found, "", options
    if found and ("/" in found or Path(found).is_dir()):
        model = import_object(REWARD_MODEL, "reward")
        return model, Path(found).name or "reward_model", "", {**options, "model": found}
    raise InputError(
        f"no built-in reward is called {found!r}{did_you_mean(found, BUILTIN)}; built-ins are {', '.join(BUILTIN)}, "
        "your own is written module:function, a reward model is a folder or a hub id like org/name, and a server "
        "http://host:port/path"
    )


def _typed(cls: type, name: str, options: Mapping[str, str]) -> dict[str, Any]:
    """Options of a spec as the types that the constructor declares: by annotation, else by default value."""
    if not options:
        return {}
    from pydantic import PydanticUserError, TypeAdapter, ValidationError

    try:
        parameters = inspect.signature(cls, eval_str=True).parameters
    except NameError:  # an annotation that exists for type checkers only
        parameters = inspect.signature(cls).parameters
    known = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    values: dict[str, Any] = {}
    for key, text in options.items():
        if key not in known and not takes_all:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise InputError(f"reward {name!r} has no option {key!r}{did_you_mean(key, known)}; {has}")
        parameter = parameters.get(key)
        kind = str if parameter is None else parameter.annotation
        if kind is inspect.Parameter.empty and parameter is not None:
            kind = type(parameter.default) if isinstance(parameter.default, bool | int | float) else str
        given = text.split(",") if (get_origin(kind) or kind) in (tuple, list, set, frozenset, Sequence) else text
        try:
            values[key] = TypeAdapter(kind).validate_python(given)
        except (ValidationError, PydanticUserError) as error:
            reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "text cannot give it"
            raise InputError(f"option {key}={text!r} of reward {name!r} cannot be used: {reason}") from None
    return values


def number_names(rewards: Sequence[Reward]) -> tuple[Reward, ...]:
    """The rewards under different names: where functions share their own name, `name`, `name_2`, `name_3`.

    Names that were given stay as they are. Two equal ones are an error, as is one function twice under its own name.
    """
    given = [reward.name for reward in rewards if not reward.is_unnamed]
    functions = {(reward.name, id(reward.function)) for reward in rewards}
    if len(set(given)) < len(given) or len(functions) < len(rewards):
        names = [reward.name for reward in rewards]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(
            f"rewards must have different names, got {twice[:80]!r} {names.count(twice)} times; leave one out, or name "
            "it: load_reward(..., name=...)"
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
    function = reward.function
    if source := reward.source or import_name(function):
        return source
    if reason := _why_not_sendable(function):
        raise InputError(
            f"reward {reward.name!r} {reason}, or run it in this process without a time limit: load_reward(function, "
            "isolated=False)"
        )
    return function


def _why_not_sendable(function: Callable[..., Any]) -> str:
    """Why a worker process cannot have this object, and a remedy; "" when it can."""
    try:
        ForkingPickler.dumps(function)
    except Exception as error:  # pickling runs foreign code and fails in many ways
        return (
            "cannot run in a worker process, because a lambda or a function inside a function has no name to import "
            f"it by ({error}); move it to a module"
        )
    if not is_in_main(function):
        return ""
    if not hasattr(sys.modules["__main__"], "__file__"):
        return "is defined in an interactive session, where a worker process cannot import it; move it to a module"
    if not _guards():
        return (
            "is defined in the script that runs, and a worker process would run all of it once more to import the "
            "reward; put the rest of the script under `if __name__ == '__main__':`, move the reward to a module"
        )
    if is_under_guard(function):
        return "is defined under `if __name__ == '__main__':`, which a worker process does not run; move it above"
    return ""


def is_in_main(function: Any) -> bool:
    """True when the function, or its class, is defined in the script that runs."""
    return "__main__" in (getattr(function, "__module__", ""), type(function).__module__)


def is_under_guard(function: Any) -> bool:
    """True when the function, or its class, is defined where the script tests `__name__`: only running it does that."""
    named = function if hasattr(function, "__qualname__") else type(function)
    first = named.__qualname__.partition(".")[0]
    parts = [part for guard in _guards() for part in ast.walk(guard)] if is_in_main(function) else []
    return any(isinstance(p, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and p.name == first for p in parts)


def _guards() -> list[ast.stmt]:
    """The tests of `__name__` in the script that runs. A compiled program has no source to read: it counts as one."""
    try:
        with tokenize.open(str(sys.modules["__main__"].__file__)) as file:
            script = ast.parse(file.read())
    except (OSError, SyntaxError, AttributeError):
        return [ast.Pass()]
    return [line for line in script.body if isinstance(line, ast.If) and "__name__" in ast.dump(line.test)]
