"""`gruppo losses` and `gruppo recipes`: the losses with their formulas, and configurations that papers trained with."""

import difflib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

from gruppo.cli.arguments import Arguments, Word, parse
from gruppo.errors import InputError
from gruppo.process.by_name import import_object


class LossesArguments(Arguments):
    """List the losses that `gruppo train --loss NAME` accepts.

    gruppo losses
    gruppo losses gspo
    """

    name: Annotated[str | None, Word("NAME", is_positional=True)] = None
    """A loss of the table, or your.module:YourLoss. Unset: the whole table."""


def losses(arguments: Sequence[str]) -> int:
    given = parse(LossesArguments, arguments, "losses")
    print(table() if given.name is None else formula(given.name))
    return 0


def table() -> str:
    """Name, parts and paper of every named loss."""
    from gruppo.loss import LOSSES

    rows = [("name", "level", "surrogate", "mean", "weights and terms", "paper")]
    classes: dict[str, Any] = dict(LOSSES)
    for name, cls in classes.items():
        loss = cls()
        extra = [_name(weight) for weight in loss.weights]
        extra += [f"{term.name}={term.coef:g}" for term in loss.terms if term.coef]
        rows.append(
            (name, _name(loss.level), _name(loss.surrogate), _name(loss.aggregate), ", ".join(extra) or "-", cls.paper)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def formula(name: str) -> str:
    """A loss in words: its docstring's first line, then what `repr` prints."""
    from gruppo.loss import LOSSES, PolicyLoss

    cls: Any = LOSSES.get(name)
    if cls is None and ":" in name:
        cls = import_object(name, "loss")
    if cls is None:
        near = difflib.get_close_matches(name, LOSSES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "`gruppo losses` lists them"
        raise InputError(f"there is no loss {name!r}; {hint}")
    loss = cls()
    if not isinstance(loss, PolicyLoss):
        raise InputError(f"{name} gives a {type(loss).__name__}, not a loss of gruppo.loss")
    return f"{(cls.__doc__ or name).strip().splitlines()[0]}\n\n{loss!r}"


def _name(part: Any) -> str:
    return getattr(part, "__name__", type(part).__name__)


class RecipeArguments(Arguments):
    """Configurations of published runs. `gruppo recipes` lists them, `gruppo recipes NAME` prints one as a config file.

    gruppo recipes dapo > run.yaml
    gruppo train --recipe dapo --data problems.jsonl
    """

    name: Annotated[str, Word("NAME", is_positional=True)] = ""
    """Recipe to print as a config file. Unset: list all of them."""


def recipes(arguments: Sequence[str]) -> int:
    given = parse(RecipeArguments, arguments, "recipes")
    from gruppo.recipes import RECIPES, recipe

    if given.name:
        chosen = recipe(given.name)
        print(chosen.to_yaml(), end="")
        if chosen.reminder():
            print(chosen.reminder(), file=sys.stderr)
        return 0
    longest = max(map(len, RECIPES))
    for name, entry in RECIPES.items():
        print(f"{name:{longest}}  {entry.reference:16}  {entry.title}")
    print("\ngruppo recipes NAME prints the options; gruppo train --recipe NAME uses them")
    return 0
