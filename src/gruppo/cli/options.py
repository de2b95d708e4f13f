"""Options of a verb: words on the command line as checked values, with tyro."""

import inspect
import io
import re
import shutil
import sys
import textwrap
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import field, make_dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import tyro

from gruppo.errors import InputError
from gruppo.peer_names import REFUSED, answer
from gruppo.run.reader import at_home, read_yaml
from gruppo.trainer.config import TrainConfig

T = TypeVar("T")

OF_THE_VERB = {
    "config": (str | None, None, "FILE", "Options from a YAML file; flags win over it."),
    "recipe": (str | None, None, "NAME", "What a paper trained with (`gruppo recipes`); file and flags win over it."),
    "overwrite": (bool, False, None, "Start over in the place of a run that the output holds."),
    "view": (bool, False, None, "Print a link to a page that shows the run live; `gruppo view RUN` serves it later."),
}
"""Flags of `gruppo train` and `gruppo demo` besides the options of a run: type, default, word, help."""


def parse(kind: type[T], arguments: Sequence[str], verb: str, **options: Any) -> T:
    """An instance of the dataclass `kind` from flags; raises InputError for a wrong one, with what it should be.

    Args:
        options: further ones of `tyro.cli`. Without a `description`, the docstring of `kind` is the help: paragraphs,
            of which one may be commands.
    """
    options = {"description": kind.__doc__ or "", "config": (tyro.conf.AvoidSubcommands,)} | options
    options["description"] = _wrapped(options["description"])
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            found = tyro.cli(kind, args=list(arguments), prog=f"gruppo {verb}", **options)
    except SystemExit as ended:
        if ended.code != 2:
            raise
        raise InputError(_plain_text(said.getvalue())) from None
    return replace(found, **{name: _expanded(value) for name, value in vars(found).items()})


def _expanded(value: Any) -> Any:
    """The value of a flag; of paths, ~ is written out."""
    if isinstance(value, tuple):
        return tuple(map(_expanded, value))
    return at_home(value) if isinstance(value, Path) else value


def _wrapped(text: str) -> str:
    """Help of a verb, as wide as the terminal.

    tyro prints it as it is, except that it joins lines that begin with a letter; so the further lines of a paragraph
    begin with spaces.
    """
    width = max(40, shutil.get_terminal_size().columns)
    parts = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.lstrip().startswith("gruppo "):
            parts.append("Examples:\n" + textwrap.indent(textwrap.dedent(paragraph), "  "))
        else:
            parts.append(textwrap.fill(" ".join(paragraph.split()), width, subsequent_indent="  "))
    return "\n\n".join(parts)


def unset(word: str) -> Any:
    """Mark of an option that may be left out: help shows the word for its value, and no default."""
    return tyro.conf.arg(metavar=word, help_behavior_hint="")


def _plain_text(box: str) -> str:
    """The text of tyro's error without its box: a line for each part."""
    inner = [line.strip("│ ") for line in box.splitlines()[1:-1]]
    parts = "\n".join(line for line in inner if line).replace("-" * 20, "─" * 20).split("─" * 20)
    texts = [" ".join(re.sub("─|--{3,}", "", part).split()) for part in parts]
    # Of a value that fits none of several types tyro lists every failure; the help of the flag says what fits.
    texts[0] = re.sub(
        r"invalid literal for int\(\) with base 10: |could not convert string to float: ", "got ", texts[0]
    )
    texts[0] = re.sub(r"no type matching .+? could be instantiated from (.*?)\. Got errors:.*", r"got \1", texts[0])
    return "\n  ".join(
        text.removeprefix("Error parsing ").removeprefix("Argument helptext: ") for text in texts if text
    )


def parse_run(
    arguments: Sequence[str], *, verb: str, description: str, preset: dict[str, Any], others: tuple[type, ...] = ()
) -> TrainConfig:
    """A TrainConfig: flags over the config file over the recipe over the verb's preset over the defaults.

    Options that the recipe leaves to the user and that are still unset are listed on stderr. Help shows the fields of
    the dataclasses `others` too.
    """
    words, path = take_value(list(arguments), "--config")
    words, name = take_value(words, "--recipe", "a name")
    flags = {w.partition("=")[0].removeprefix("--").replace("-", "_") for w in words if w.startswith("--")}
    for flag in sorted(flags & REFUSED.keys()):
        raise InputError(f"--{flag.replace('_', '-')} is refused: {REFUSED[flag]}")
    for flag in sorted(flags - TrainConfig.model_fields.keys() - OF_THE_VERB.keys()):
        if answer(flag):
            raise InputError(f"unknown option --{flag.replace('_', '-')}; {answer(flag, '--')}")
    for word in (w.partition("=")[0].lstrip("+") for w in words if "=" in w):
        if "." in word and answer(word):  # of verl, which has no dashes
            raise InputError(f"unknown option {word}; {answer(word, '--')}")
    chosen = None
    if name is not None:
        from gruppo.recipes import recipe

        chosen = recipe(name)
    file = read_yaml(path) if path is not None else {}
    values = preset | (chosen.values if chosen else {}) | file
    default = TrainConfig.read(values, where=path or verb)
    given = vars(parse(_flags(default, others), words, verb, description=description))
    # Only what was written: an option that nobody set may depend on others.
    chosen_here = {name: given[name] for name in TrainConfig.model_fields if flags & {name, f"no_{name}"}}
    for length, other in (("steps", "epochs"), ("epochs", "steps")):  # the flag wins, whichever of the two the file has
        if length in chosen_here:
            values.pop(other, None)
    config = TrainConfig.read(values | chosen_here, where=verb)
    if chosen and (reminder := chosen.reminder(preset.keys() | file.keys() | flags)):
        print(reminder, file=sys.stderr)
    return config


def _flags(start: TrainConfig, others: tuple[type, ...]) -> type:
    """A dataclass of the flags of a run, for tyro to read words with. TrainConfig checks the values."""
    flags: list[Any] = [
        (name, Annotated[kind, tyro.conf.FlagCreatePairsOff, _flag(text, None, word)], field(default=default))
        for name, (kind, default, word, text) in OF_THE_VERB.items()
    ]
    for name, option in TrainConfig.model_fields.items():
        value = getattr(start, name)
        kind = _bare(option.annotation)
        word = _word(kind) if NoneType in get_args(kind) else None
        made = field(default_factory=lambda value=value: value)
        flags.append((name, Annotated[kind, _flag(option.description or "", value, word)], made))
    return make_dataclass("Flags", [], bases=(*others, make_dataclass("Own", flags, frozen=True)), frozen=True)


def _flag(text: str, value: Any, word: str | None) -> Any:
    return tyro.conf.arg(help=" ".join(text.split()), metavar=word, help_behavior_hint="" if value is None else None)


def _bare(kind: Any) -> Any:
    """A type without its checks.

    >>> _bare(Annotated[int, "at least 1"] | None)
    int | None
    """
    if get_origin(kind) is Annotated:
        return _bare(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return Union[tuple(map(_bare, get_args(kind)))]  # noqa: UP007  # of a tuple of types
    return kind


def _word(kind: Any) -> str:
    """How help shows the value of an option that may be unset.

    >>> _word(float | None), _word(tuple[str, ...] | None), _word(float | tuple[float, float] | None)
    ('FLOAT', 'STR [STR ...]', 'FLOAT [FLOAT]')
    >>> from typing import Literal
    >>> _word(Literal["group", "batch"] | None), _word(bool | None)
    ('{group,batch}', '{True,False}')
    """
    first, *others = (each for each in get_args(kind) if each is not NoneType)
    if get_origin(first) is tuple:
        name = get_args(first)[0].__name__.upper()
        return f"{name} [{name} ...]"
    choices = (True, False) if first is bool else get_args(first)
    name = f"{{{','.join(map(str, choices))}}}" if choices else first.__name__.upper()
    return f"{name} [{name}]" if others else name


def take_flag(words: list[str], flag: str) -> tuple[list[str], bool]:
    """Remove `flag` from the words and return whether it was there."""
    return [word for word in words if word != flag], flag in words


def take_value(words: list[str], flag: str, what: str = "a file name") -> tuple[list[str], str | None]:
    """Remove `flag VALUE` or `flag=VALUE` from the words and return the value; it may be given once."""
    for i, word in enumerate(words):
        name, is_joined, value = word.partition("=")
        if name != flag:
            continue
        rest = words[i + (1 if is_joined else 2) :]
        if not is_joined and i + 1 == len(words):
            raise InputError(f"{flag} needs {what} after it")
        if any(other.partition("=")[0] == flag for other in rest):
            raise InputError(f"{flag} is given twice; leave one out")
        value = value if is_joined else words[i + 1]
        if not value:
            raise InputError(f"{flag} is empty; give {what}")
        return words[:i] + rest, value
    return words, None
