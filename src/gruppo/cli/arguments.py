"""Flags of a verb: an argparse parser made from the fields of pydantic models, which check the values."""

import argparse
import difflib
import inspect
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, ValidationError
from pydantic.fields import FieldInfo

from gruppo.errors import InputError
from gruppo.options import AdvancedOptions, Options, kinds_of, members, merged
from gruppo.peer_names import REFUSED, answer
from gruppo.run.reader import at_home, read_yaml
from gruppo.trainer.config import OPTIONS, TrainConfig, explain

COMMON = (
    *("model", "data", "rewards", "output", "lora", "loss", "advantage", "lr", "steps", "prompts_per_step"),
    *("group_size", "max_new_tokens", "tokens_per_microbatch", "sampler", "eval_every", "seed"),
)
"""Options that help shows first."""

HomePath = Annotated[Path, BeforeValidator(lambda path: _named(path)), AfterValidator(at_home)]
"""A path; ~ is the home folder."""


@dataclass(frozen=True, slots=True)
class Word:
    """Command-line form of a field, if its name and type do not determine it.

    Args:
        name: placeholder of the value in help.
        flag: its flag, if the field cannot have that name.
        is_positional: there is no flag before it.
        is_repeated: its flag may occur several times.
    """

    name: str = ""
    flag: str = ""
    is_positional: bool = False
    is_repeated: bool = False


class Arguments(Options):
    """Flags of a verb. The docstring of a subclass is its help: paragraphs, of which one may be commands."""

    refusal: ClassVar[str] = "`gruppo train` has it"
    """The rest of an error about options of a run that the verb does not take."""


class RunArguments(Arguments):
    """Flags of a verb that trains, besides the options of the run."""

    config: Annotated[HomePath | None, Word("FILE")] = None
    """Options from a YAML file; flags win over it."""
    recipe: Annotated[str | None, Word("NAME")] = None
    """Options that a paper trained with (`gruppo recipes`); file and flags win over it."""
    overwrite: bool = False
    """Start over in the place of a run that the output holds."""
    view: bool = False
    """Print a link to a page that shows the run live; `gruppo view RUN` serves it later."""


A = TypeVar("A", bound=Arguments)


def parse(kind: type[A], arguments: Sequence[str], verb: str) -> A:
    """The flags of a verb; InputError for a wrong one, with what it should be."""
    return parse_options(kind, arguments, verb, ())[0]


def parse_options(
    kind: type[A],
    arguments: Sequence[str],
    verb: str,
    options: Collection[str] = tuple(TrainConfig.model_fields),
    preset: Mapping[str, Any] | None = None,
) -> tuple[A, dict[str, Any]]:
    """The flags of a verb and, of the options of a run that it takes, those that were written.

    Args:
        preset: shown in help instead of an option's default.
    """
    fields = {**OPTIONS, **kind.model_fields}
    given = parse_words(make_parser(kind, verb, options, preset or {}), arguments, kind)
    values = {name: _value(name, fields[name], words) for name, words in given.items()}
    try:
        own = kind(**{name: value for name, value in values.items() if name in kind.model_fields})
    except ValidationError as error:
        raise InputError(explain(error, verb, list(kind.model_fields))) from None
    return own, {name: value for name, value in values.items() if name not in kind.model_fields}


def run_config(
    given: RunArguments, flags: dict[str, Any], verb: str, preset: dict[str, Any] | None = None
) -> TrainConfig:
    """The options of a run: flags over the config file over the recipe over the verb's preset over the defaults.

    Options that the recipe leaves to the user and that are still unset are listed on stderr.
    """
    from gruppo.recipes import recipe

    preset = preset or {}
    chosen = None if given.recipe is None else recipe(given.recipe)
    file = {} if given.config is None else read_yaml(given.config)
    values = merged(preset, chosen.values if chosen else {}, file)
    if given.config is not None:
        TrainConfig.read(values, where=str(given.config))  # an error in the file names the file
    for length, other in (("steps", "epochs"), ("epochs", "steps")):  # the flag wins, whichever of the two the file has
        if length in flags:
            values.pop(other, None)
    config = TrainConfig.read(merged(values, flags), where=verb)
    if chosen and (reminder := chosen.reminder(preset.keys() | file.keys() | flags.keys())):
        print(reminder, file=sys.stderr)
    return config


def make_parser(
    kind: type[Arguments], verb: str, options: Collection[str] = (), preset: Mapping[str, Any] | None = None
) -> argparse.ArgumentParser:
    """The parser of a verb: its own flags, then options of a run, the common ones first and the others by theme."""
    places = [(_word(field), field) for field in kind.model_fields.values() if _word(field).is_positional]
    usage = [word.name if field.is_required() else f"[{word.name}]" for word, field in places]
    parser = _Parser(
        prog=f"gruppo {verb}",
        usage=" ".join([f"gruppo {verb}", *usage, "[options]"]),
        description=_wrapped(kind.__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    for name, field in kind.model_fields.items():
        _add(parser, name, field, field.default)
    if "advanced" in options:
        for name, field in AdvancedOptions.model_fields.items():  # flags of their own as well, which help need not show
            _add(parser, name, field, None, is_of_a_run=True, is_shown=False)
        lines = [f"  {name}: {field.description}" for name, field in AdvancedOptions.model_fields.items()]
        parser.epilog = _wrapped("\n\n".join(["names of --advanced:", *lines])).replace("\n\n", "\n")
    for title, names in _themes(options):
        group = parser.add_argument_group(title)
        for name in names:
            field = TrainConfig.model_fields[name]
            default = (preset or {}).get(name, field.default) if len(options) == len(TrainConfig.model_fields) else None
            _add(group, name, field, default, is_of_a_run=True)
    return parser


def _themes(options: Collection[str]) -> Iterator[tuple[str, Sequence[str]]]:
    if len(options) < len(TrainConfig.model_fields):
        yield "as for `gruppo train`", list(options)
        return
    yield "common options", COMMON
    for group in reversed(TrainConfig.__bases__):
        yield (inspect.getdoc(group) or "").rstrip("."), [name for name in group.model_fields if name not in COMMON]


class _Parser(argparse.ArgumentParser):
    """Raises InputError where argparse would print and exit, and OSError where help cannot be written."""

    def print_help(self, file: Any = None) -> None:
        print(self.format_help(), end="", file=file)

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')}; see `{self.prog} --help`")


class _Once(argparse.Action):
    """Store a value and refuse a second one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if hasattr(namespace, self.dest):
            raise InputError(f"{self.option_strings[0]} is given twice; leave one out")
        is_switch = self.nargs == 0
        setattr(namespace, self.dest, not str(option_string).startswith("--no-") if is_switch else values)


def _add(
    group: Any, name: str, field: FieldInfo, default: Any, *, is_of_a_run: bool = False, is_shown: bool = True
) -> None:
    """Add the flag of a field to a parser or one of its groups."""
    word, kinds, parts = _word(field), kinds_of(field.annotation), members(field.annotation)
    is_mapping, is_several = dict in _shapes(field), tuple in _shapes(field)
    text = " ".join((field.description or "").split()).replace("%", "%%")
    if isinstance(default, str | int | float) and default not in ("", False):
        text += f" (default: {'on' if default is True else default})"
    text = text if is_shown else argparse.SUPPRESS
    choices = [str(choice) for part in parts if get_origin(part) is Literal for choice in get_args(part)]
    shown = "NAME VALUE" if is_mapping else f"{{{','.join(choices)}}}" if choices else ""
    shown = word.name or shown or next(kind.__name__.upper() for kind in get_args(parts[0]) or parts)
    flag = word.flag or f"--{name.replace('_', '-')}"
    if word.is_positional:
        nargs = "*" if is_several else None if field.is_required() else "?"
        group.add_argument(name, nargs=nargs, metavar=shown, help=text)
    elif kinds <= {bool, NoneType}:
        flags = [flag, f"--no-{flag[2:]}"] if is_of_a_run else [flag]
        group.add_argument(*flags, dest=name, action=_Once, nargs=0, help=text)
    else:
        nargs = "+" if (is_several or is_mapping) and not word.is_repeated else None
        action = "append" if word.is_repeated else _Once
        required = field.is_required()
        group.add_argument(flag, dest=name, action=action, nargs=nargs, metavar=shown, required=required, help=text)


def _named(path: Any) -> Any:
    if path == "":  # Path takes it for the working directory
        raise ValueError("it is empty; name a file or folder")
    return path


def _word(field: FieldInfo) -> Word:
    return next((mark for mark in field.metadata if isinstance(mark, Word)), Word())


def parse_words(parser: argparse.ArgumentParser, arguments: Sequence[str], kind: type[Arguments]) -> dict[str, Any]:
    """Name and words of each flag that was given."""
    found, left = parser.parse_known_args(_dashed(arguments))
    flags = [word.partition("=")[0] for word in left if word.startswith("-")]
    of_a_run = [flag for flag in flags if _name(flag) in OPTIONS]
    if of_a_run:
        raise InputError(f"{', '.join(sorted(of_a_run))} cannot be given to `{parser.prog}`: {kind.refusal}")
    if left:
        raise InputError(_unknown((flags or left)[0], parser))
    return vars(found)


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    """Error text for a word that the parser does not know."""
    word = word.partition("=")[0].lstrip("+")  # verl's have no dashes
    if _name(word) in REFUSED:
        return f"{word} is refused: {REFUSED[_name(word)]}"
    if answer(_name(word)):
        return f"unknown option {word}; {answer(_name(word), '--')}"
    if not word.startswith("-"):
        return f"{word!r} belongs to no flag; leave it out, or see `{parser.prog} --help`"
    known = [flag.lstrip("-") for action in parser._actions for flag in action.option_strings]
    near = difflib.get_close_matches(word.lstrip("-"), known, n=1)
    return f"unknown option {word}; " + (f"did you mean --{near[0]}?" if near else f"see `{parser.prog} --help`")


def _name(flag: str) -> str:
    return flag.removeprefix("--no-").lstrip("-+").replace("-", "_")


def _dashed(arguments: Sequence[str]) -> list[str]:
    """Words with dashes in the names of flags: --group_size is --group-size. After `--` there are no flags."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    parts = (word.partition("=") for word in arguments[:end])
    flags = [f"{n.replace('_', '-') if n.startswith('--') else n}{equals}{value}" for n, equals, value in parts]
    return [*flags, *arguments[end:]]


def _value(name: str, field: FieldInfo, words: Any) -> Any:
    """The value of a flag as pydantic reads it: texts become numbers there, but not where a text is a value too."""
    kinds, shapes = kinds_of(field.annotation), _shapes(field)
    read = plain if kinds & {int, float} else str
    if dict in shapes:
        if len(words) % 2:
            raise InputError(f"--{name.replace('_', '-')} {' '.join(words)}: a value must follow each name")
        return dict(zip(words[::2], map(read, words[1::2]), strict=True))
    if isinstance(words, list):
        return words[0] if len(words) == 1 and shapes != {tuple} else tuple(words)
    return words if isinstance(words, bool) else read(words)


def _shapes(field: FieldInfo) -> set[Any]:
    """dict, tuple, Literal, or None for a single value."""
    return {dict if part is AdvancedOptions else get_origin(part) for part in members(field.annotation)}


def plain(word: str) -> bool | int | float | str:
    """A word as a truth value or a number, if it is one.

    >>> [plain(word) for word in ("True", "3", "1e-5", "1,5")]
    [True, 3, 1e-05, '1,5']
    """
    if word in ("True", "False"):
        return word == "True"
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word


def _wrapped(text: str) -> str:
    """Help of a verb, as wide as the terminal; commands stay lines of their own."""
    width = max(40, shutil.get_terminal_size().columns - 2)
    parts = []
    for paragraph in inspect.cleandoc(text).split("\n\n"):
        if paragraph.lstrip().startswith("gruppo "):
            parts.append("examples:\n" + textwrap.indent(textwrap.dedent(paragraph), "  "))
        else:
            parts.append(textwrap.fill(" ".join(paragraph.split()), width))
    return "\n\n".join(parts)
