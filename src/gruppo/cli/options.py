"""Options of a verb: words on the command line as checked values, with tyro."""

import inspect
import sys
import textwrap
from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from gruppo.errors import InputError
from gruppo.run.reader import read_yaml
from gruppo.trainer.config import TrainConfig, called_here
from gruppo.trainer.elsewhere import ELSEWHERE, REFUSED

T = TypeVar("T")


def parse(kind: type[T], arguments: Sequence[str], verb: str, **options: Any) -> T:
    """An instance of `kind` from flags; a wrong flag prints what it should be and exits with 2.

    Args:
        options: further ones of `tyro.cli`. Without a `description`, the docstring of `kind` is the help: a paragraph,
            then examples.
    """
    summary, _, examples = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")
    text = " ".join(summary.split()) + "\n\n" + textwrap.indent(examples, "  ")  # tyro would join the lines of both
    options = {"description": text.rstrip(), "config": (tyro.conf.AvoidSubcommands,)} | options
    return tyro.cli(kind, args=list(arguments), prog=f"gruppo {verb}", **options)


def parse_run(arguments: Sequence[str], *, verb: str, description: str, preset: dict[str, Any]) -> TrainConfig:
    """A TrainConfig: flags over the config file over the recipe over the verb's preset over the defaults.

    Options that the recipe leaves to the user and that are still unset are listed on stderr.
    """
    words, path = take_value(list(arguments), "--config")
    words, name = take_value(words, "--recipe", "a name")
    flags = {w.partition("=")[0].removeprefix("--").replace("-", "_") for w in words if w.startswith("--")}
    for flag in sorted(flags & REFUSED.keys()):
        raise InputError(f"--{flag.replace('_', '-')} is refused: {REFUSED[flag]}")
    for flag in sorted(flags & ELSEWHERE.keys()):
        answer = called_here(flag).replace("called ", "called --").replace("_", "-")
        raise InputError(f"unknown option --{flag.replace('_', '-')}; {answer}")
    chosen = None
    if name is not None:
        from gruppo.recipes import recipe

        chosen = recipe(name)
    file = read_yaml(path) if path else {}
    values = preset | (chosen.values if chosen else {}) | file
    default = TrainConfig.read(values, where=path or verb)
    config = parse(TrainConfig, words, verb, description=description, default=default)
    if chosen and (reminder := chosen.reminder(preset.keys() | file.keys() | flags)):
        print(reminder, file=sys.stderr)
    return config


def take_value(words: list[str], flag: str, what: str = "a file name") -> tuple[list[str], str | None]:
    """Remove `flag VALUE` or `flag=VALUE` from the words and return the value."""
    for i, word in enumerate(words):
        if word == flag:
            if i + 1 == len(words):
                raise InputError(f"{flag} needs {what} after it")
            return words[:i] + words[i + 2 :], words[i + 1]
        if word.startswith(f"{flag}="):
            return words[:i] + words[i + 1 :], word.removeprefix(f"{flag}=")
    return words, None
