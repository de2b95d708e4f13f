"""Objects by name: `module:name` as the command line and configs write it, options after it, and back to the name."""

import difflib
import importlib
import os
import pkgutil
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from gruppo.errors import InputError, Terminated
from gruppo.process.streams import printable

_WITH_OPTIONS = re.compile(r"(?P<name>.+?):(?P<options>[A-Za-z_]\w*=.*)", re.S)
_NEXT_OPTION = re.compile(r",\s*(?=[A-Za-z_]\w*=)")


def read_spec(spec: str) -> tuple[str, dict[str, str]]:
    """Name and options of `name:key=value,key=value`. A comma ends a value only where another `key=` follows.

    >>> read_spec("tag_format:tags=plan,answer,prefix=<plan>")
    ('tag_format', {'tags': 'plan,answer', 'prefix': '<plan>'})
    >>> read_spec("my.module:function")
    ('my.module:function', {})
    """
    match = _WITH_OPTIONS.fullmatch(spec)
    if match is None:
        return spec, {}
    options: dict[str, str] = {}
    for option in _NEXT_OPTION.split(match["options"]):
        key, _, value = option.partition("=")
        if key in options:
            raise InputError(f"{spec!r} gives the option {key!r} twice")
        options[key] = value
    return match["name"], options


def write_spec(name: str, options: Mapping[str, Any]) -> str:
    """The text that `read_spec` reads as this name with these options.

    >>> write_spec("tag_format", {"tags": ["plan", "answer"]})
    'tag_format:tags=plan,answer'
    """
    texts = {k: ",".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for k, v in options.items()}
    spec = ":".join([name, *filter(None, [",".join(f"{key}={text}" for key, text in texts.items())])])
    if read_spec(spec) != (name, texts):
        raise InputError(
            f"{name!r} with {dict(options)!r} cannot be written as name:key=value, because a key is not a name or a "
            "value holds ',word='; make the reward in a module of your own and name it module:object"
        )
    return spec


def is_address(spec: str) -> bool:
    """Whether this names a server: `http://host:port/path`. One with a user or a password is refused, and not shown."""
    if not spec.startswith(("http://", "https://")):
        return False
    if "@" in spec.split("/")[2]:
        raise InputError(
            "the address of a reward holds a user or a password, which every record of the run would show; take it "
            "out, and send it from a reward function of your own, module:function"
        )
    return True


def import_object(spec: str, what: str) -> Any:
    """The object named `module:name`. The current directory is searched after the installed packages.

    Args:
        what: the word for it in error texts, such as "reward" or "loss".
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
            f"no module {error.name!r} for {what} {spec!r}{did_you_mean(module_name, beside)}; looked in the installed "
            "packages and the current directory"
        ) from error
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:  # also `sys.exit()`, which would end the command with the exit code of success
        last_lines = printable("".join(traceback.format_exception(error, limit=-2)).strip())
        raise InputError(f"importing {module_name!r} for {what} {spec!r} failed:\n{last_lines}") from error
    for part in path.split("."):
        if not _has(found, part, what, spec):
            names = [key for key, value in vars(found).items() if callable(value)] if hasattr(found, "__dict__") else []
            where = getattr(found, "__file__", None) or getattr(found, "__name__", module_name)
            raise InputError(f"{where} has no {part!r} for {what} {spec!r}{did_you_mean(part, names)}")
        found = getattr(found, part)
    return found


def _has(found: Any, part: str, what: str, spec: str) -> bool:
    """Whether an object has the attribute. Code of the user's own may answer by raising anything."""
    try:
        return hasattr(found, part)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise InputError(f"{part!r} of {what} {spec!r} raised {type(error).__name__}: {error}") from error


def import_name(function: Callable[..., Any]) -> str:
    """`module:name` under which another process can import the function, or "" when there is none."""
    module, path = getattr(function, "__module__", None), getattr(function, "__qualname__", "<none>")
    if module not in sys.modules or module == "__main__" or "<" in path:
        return ""
    found: Any = sys.modules[module]
    for part in path.split("."):
        found = getattr(found, part, None)
    return f"{module}:{path}" if found is function else ""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A hint with the nearest of the names, or "" when none is near.

    >>> did_you_mean("exact_mach", ["exact_match", "number_match"])
    " (did you mean 'exact_match'?)"
    """
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
