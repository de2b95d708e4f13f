"""From a name to a `Reward`: built-ins by name, the user's own as `module:function`, callables as they are.

Every way to get a name wrong has its own text, because this is the first thing a new user does.
"""

import difflib
import importlib
import importlib.util
import inspect
import itertools
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

from gruppo.errors import InputError, require
from gruppo.reward.base import Reward, name_of, parameters_of
from gruppo.reward.format import TagFormat, ThinkFormat
from gruppo.reward.length import LengthPenalty, SoftOverlong
from gruppo.reward.match import ExactMatch, NormalizedMatch
from gruppo.reward.math import MathMatch
from gruppo.reward.number import NumberMatch
from gruppo.reward.pattern import PatternMatch

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


def load_reward(
    spec: str | Callable[..., Any] | Reward,
    *,
    name: str | None = None,
    weight: float | None = None,
    isolated: bool | None = None,
    **parameters: Any,
) -> Reward:
    """A `Reward` from a built-in's name, from `module:function`, or from a callable.

    `parameters` configure a built-in or a class named by `module:Class`. A function runs in a worker process unless
    `isolated=False`, or unless it has an attribute `isolated` that says otherwise, as most built-ins do. Without a
    `name` it is called as the built-in or the function, which a `RewardPool` numbers when several share it.

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
            f"no built-in reward is called {spec!r}{_near(spec, BUILTIN)}; built-ins are {', '.join(BUILTIN)}, and "
            "your own is written module:function"
        )
    if inspect.isclass(target):
        target, source = (
            _build(spec, target, parameters),
            "",
        )  # a worker needs the parameters too: send the object
    elif parameters:
        raise InputError(
            f"{spec!r} is a function and takes no parameters, got {', '.join(parameters)}; make it a class with a "
            "__call__ method, or pass the values as columns"
        )
    if isinstance(target, MathMatch) and importlib.util.find_spec("math_verify") is None:
        raise require("math", "math-verify", "math_match")
    if not callable(target):
        raise InputError(f"{spec!r} is {type(target).__name__} {target!r}, not a function")
    parameters_of(target)  # refuses a signature that cannot be called with keywords
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

    Names that were given stay as they are. Two of these that are equal are an error, and so is a function that is there
    twice under its own name.
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


def import_object(spec: str, what: str) -> Any:
    """The object that `module:name` stands for; the current directory is searched after the installed packages.

    `what` is the word for it in error texts, such as "reward" or "loss".
    """
    module_name, _, path = spec.partition(":")
    if not module_name or not path or ":" in path:
        raise InputError(f"{what} {spec!r} is not of the form module:name")
    if module_name.endswith(".py") or "/" in module_name:
        guess = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise InputError(f"{what} {spec!r} names a file; name the module: '{guess}:{path}'")
    if os.getcwd() not in sys.path:  # the `gruppo` script has its own directory there instead
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise InputError(f"{module_name!r} of {what} {spec!r} needs a module that is absent: {error}") from error
        beside = [module.name for module in pkgutil.iter_modules([os.getcwd()])]
        raise InputError(
            f"no module {error.name!r} for {what} {spec!r}{_near(module_name, beside)}; looked in the installed "
            "packages and the current directory"
        ) from error
    except Exception as error:
        raise InputError(f"importing {module_name!r} for {what} {spec!r} failed:\n{_last_lines(error)}") from error
    for part in path.split("."):
        if not hasattr(found, part):
            names = [key for key, value in vars(found).items() if callable(value)] if hasattr(found, "__dict__") else []
            where = getattr(found, "__file__", None) or getattr(found, "__name__", module_name)
            raise InputError(f"{where} has no {part!r} for {what} {spec!r}{_near(part, names)}")
        found = getattr(found, part)
    return found


def source_of(function: Callable[..., Any]) -> str:
    """`module:name` under which a function can be imported again, or "" when there is none."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "<none>")
    if module not in sys.modules or module == "__main__" or "<" in path:
        return ""
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}:{path}" if found is function else ""


def sendable(reward: Reward) -> str | Callable[..., Any]:
    """What a worker needs to have the function: its `module:name`, or the object if its class can be imported there.

    Raises when a new process could not find it.
    """
    if source := reward.source or source_of(reward.function):
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
    in_main = "__main__" in (getattr(function, "__module__", ""), type(function).__module__)
    if in_main and not hasattr(sys.modules["__main__"], "__file__"):
        raise InputError(
            f"reward {reward.name!r} is defined in an interactive session, where a worker process cannot import it; "
            "move it to a module, or pass isolated=False to run it in this process without a time limit"
        )
    return function


def _build(spec: Any, target: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    try:
        return target(**parameters)
    except TypeError as error:
        raise InputError(f"reward {spec!r} cannot be made with parameters {parameters!r}: {error}") from error


def _near(name: str, names: Any) -> str:
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def _last_lines(error: BaseException) -> str:
    return "".join(traceback.format_exception(error, limit=-2)).strip()
