"""Options of a peer from its files: YAML, a shell script, or the words of a command line. Nothing is executed."""

import re
import shlex
from collections.abc import Sequence
from typing import Any

from gruppo.errors import InputError
from gruppo.run.reader import at_home, read_yaml

_WORDS = {"true": True, "True": True, "false": False, "False": False, "None": None, "null": None}
"""Words that stand for a value; `none` is the name of a choice, e.g. of scale_rewards."""

NESTED = 3
"""How deep a variable may stand in the default of another."""

_ENTRY = re.compile(r"[\w./-]+\.py|grpo")
"""What the flags of a script come after: its file, or the verb of `trl grpo`."""


def read_options(words: Sequence[str]) -> dict[str, Any]:
    """Options from `FILE.yaml` or `FILE.sh` and further flags, which win; or from flags alone."""
    if not words:
        raise InputError("convert needs a configuration: a .yaml or .sh file, or the arguments of the script")
    first = words[0]
    if first.endswith((".yaml", ".yml")):
        file = {str(name): _read(value) for name, value in read_yaml(first).items()}
        return file | read_flags(words[1:])
    if first.endswith(".py") and not any(word.startswith("--") for word in words):
        raise InputError(f"{first} is not a configuration; give a .yaml or .sh file, or the arguments of the script")
    if first.endswith(".sh"):
        return read_flags(script_words(read_text(first))) | read_flags(words[1:])
    return read_flags(words)


def read_text(path: str) -> str:
    try:
        return at_home(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error


def read_flags(words: Sequence[str]) -> dict[str, Any]:
    """`--name value ...` and `--name=value` as options; a flag alone is true.

    >>> read_flags(["accelerate", "launch", "--num_processes", "2", "x.py", "--beta=0.1", "--use_vllm", "--lr", "1e-6"])
    {'num_processes': 2, 'beta': 0.1, 'use_vllm': True, 'lr': 1e-06}
    """
    options: dict[str, Any] = {}
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            found[name] = [value] if equals else []
        elif name and not (_ENTRY.fullmatch(word) and found[name]):
            found[name].append(word)
        else:
            name = ""
    for name, values in found.items():
        if name == "config" and values and values[0].endswith((".yaml", ".yml")):
            options = {str(key): _read(value) for key, value in read_yaml(values[0]).items()} | options
        else:
            options[name] = True if not values else _read(values[0] if len(values) == 1 else values)
    return options


def script_words(text: str) -> list[str]:
    """The arguments of the training script in a shell script, its plain variables filled in."""
    variables: dict[str, str] = {}
    for line in text.replace("\\\n", " ").splitlines():
        for _ in range(NESTED):
            line = re.sub(r"\$(?:(\w+)|\{(\w+)(?::-([^${}]*))?\})", lambda m: _filled(m, variables), line)
        assignment = re.fullmatch(r"\s*(?:export\s+)?(\w+)=(\S.*)", line)
        try:
            words = shlex.split(assignment[2] if assignment else line, comments=True)
        except ValueError as error:
            raise InputError(f"a line of the script cannot be read ({error}): {line.strip()[:80]}") from error
        if assignment and len(words) == 1:
            variables[assignment[1]] = words[0]
            continue
        entry = _entry(words)
        if entry is not None and any(word.startswith("--") for word in words[entry:]):
            launcher = [i for i, word in enumerate(words[:entry]) if word == "--num_processes"]
            after = words[entry + 1 :]
            ends = [i for i, word in enumerate(after) if word in ("&&", ";", "|")]
            kept = [word for word in after[: ends[0] if ends else None] if word != "$@"]
            return [word for i in launcher for word in words[i : i + 2]] + kept
    raise InputError("the script has no line that calls a GRPO trainer with flags")


def _entry(words: Sequence[str]) -> int | None:
    """The place of the training script: `trl grpo`, a file with grpo in its name, or else the last Python file."""
    verb = [i for i, word in enumerate(words) if word == "grpo" and words[i - 1] == "trl"]
    files = [i for i, word in enumerate(words) if word.endswith(".py")]
    named = [i for i in files if "grpo" in words[i].rpartition("/")[2]]
    return next(iter(verb or named or files[-1:]), None)


def _filled(match: re.Match[str], variables: dict[str, str]) -> str:
    name, default = match[1] or match[2], match[3]
    return variables.get(name, match[0] if default is None else default)


def _read(value: Any) -> Any:
    """A value of a flag or of YAML, which takes 1e-5 for a text."""
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, str):
        return value
    if value in _WORDS:
        return _WORDS[value]
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    return value
