"""`gruppo recipes`: what papers trained with, as options of a run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from gruppo.cli.options import parse


@dataclass
class RecipeArguments:
    name: tyro.conf.Positional[str] = ""
    """Recipe to print as a config file. Unset: list all of them."""


def recipes(arguments: Sequence[str]) -> int:
    given = parse(
        RecipeArguments,
        arguments,
        verb="recipes",
        description="Configurations of published runs. `gruppo recipes` lists them, `gruppo recipes NAME` prints one "
        "as a config file.\n\n  gruppo recipes dapo > run.yaml\n  gruppo train --recipe dapo --data problems.jsonl",
    )
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
