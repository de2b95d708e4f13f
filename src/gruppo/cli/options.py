"""From words on the command line to checked values, with tyro.

`--recipe NAME` and `--config FILE` give the defaults of a run, the file over the recipe.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import tyro

from gruppo.errors import InputError
from gruppo.trainer.config import REFUSED, TrainConfig, read_yaml

T = TypeVar("T")


def parse(kind: type[T], arguments: Sequence[str], *, verb: str, description: str, default: Any = None) -> T:
    """An instance of `kind` from flags; a wrong flag prints what it should be and exits with 2."""
    options: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(
        kind,
        args=list(arguments),
        prog=f"gruppo {verb}",
        description=description,
        config=(tyro.conf.AvoidSubcommands,),
        **options,
    )


def parse_run(arguments: Sequence[str], *, verb: str, description: str, preset: dict[str, Any]) -> TrainConfig:
    """A TrainConfig: flags over the config file over the recipe over the verb's preset over the defaults."""
    words, path = take_value(list(arguments), "--config")
    words, name = take_value(words, "--recipe", "a name")
    for word in words:
        flag = word.partition("=")[0].removeprefix("--").replace("-", "_")
        if word.startswith("--") and flag in REFUSED:
            raise InputError(f"{word.partition('=')[0]} is refused: {REFUSED[flag]}")
    values = preset | _recipe_values(name) | (read_yaml(path) if path else {})
    default = TrainConfig.read(values, where=path or verb)
    return parse(TrainConfig, words, verb=verb, description=description, default=default)


def _recipe_values(name: str | None) -> dict[str, Any]:
    if name is None:
        return {}
    from gruppo.recipes import recipe

    return recipe(name).values


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
