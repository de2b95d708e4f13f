"""Recipes: from a paper to the configuration of a run.

    recipe.py  Recipe: the options, which of them the source states, and what differs here
    book.py    RECIPES: all of them by name

    gruppo recipes                             the list
    gruppo recipes dapo                        one as a config file
    gruppo train --recipe dapo --data ...      its options below those of --config and below flags

To add one, enter a `Recipe` in `book.py` and a row in `docs/recipes.md`. An option stands under `stated` only if the
source says it, under `chosen` only if the source leaves it open. What must fit the data, such as the token limit, is
`yours` unless the source has it.
"""

import difflib

from gruppo.errors import InputError
from gruppo.recipes.book import RECIPES
from gruppo.recipes.recipe import Recipe

__all__ = ["RECIPES", "Recipe", "recipe"]


def recipe(name: str) -> Recipe:
    """A recipe by name.

    >>> recipe("gspo").config(steps=10).clip_range
    (0.0003, 0.0004)
    """
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise InputError(f"there is no recipe {name!r}{hint}; there are {', '.join(RECIPES)}")
    return RECIPES[name]
