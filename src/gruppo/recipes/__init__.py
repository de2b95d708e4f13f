"""Recipes: configurations from papers, stored in `book.yaml`.

To add one, add it to `book.yaml`, as its header explains, and to the table of `docs/training.md`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from types import MappingProxyType
from typing import Any

import yaml

from gruppo.errors import InputError
from gruppo.options import merged
from gruppo.process.by_name import did_you_mean
from gruppo.trainer.config import TrainConfig

__all__ = ["RECIPES", "Recipe", "recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Options of a run, as a paper used them.

    Model, data, rewards and the number of steps are up to the user: a recipe says how to train, not what.
    """

    name: str
    title: str
    paper: str
    """arXiv id, or "blog"."""
    source: str
    """Section or page that states the values."""
    stated: Mapping[str, Any]
    """Options stated by the source."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Options the source leaves open, chosen here."""
    yours: tuple[str, ...] = ()
    """Options the source leaves open and that must fit the data, so the user should set them."""
    differs: tuple[str, ...] = ()
    """Differences to the paper, one sentence each."""

    def __post_init__(self) -> None:
        twice = self.stated.keys() & self.chosen.keys()
        assert not twice, f"{self.name}: {sorted(twice)} both stated and chosen"
        set_and_open = self.values.keys() & set(self.yours)
        assert not set_and_open, f"{self.name}: {sorted(set_and_open)} both set and left to the user"
        for part in ("stated", "chosen"):
            object.__setattr__(self, part, MappingProxyType(dict(getattr(self, part))))

    @property
    def reference(self) -> str:
        return "blog" if self.paper == "blog" else f"arXiv:{self.paper}"

    @property
    def values(self) -> dict[str, Any]:
        """Options the recipe sets."""
        return dict(self.stated) | dict(self.chosen)

    def config(self, **own: Any) -> TrainConfig:
        """Complete configuration; `own` options win."""
        return TrainConfig.read(merged(self.values, own), where=f"recipe {self.name}")

    def reminder(self, given: Collection[str] = ()) -> str:
        """Sentence on the options of `yours` that are not `given`; empty if none is left.

        >>> recipe("gspo").reminder()
        'recipe gspo leaves max_new_tokens (256 here) to you'
        """
        left = [f"{name} ({TrainConfig.model_fields[name].default} here)" for name in self.yours if name not in given]
        return f"recipe {self.name} leaves {', '.join(left)} to you" if left else ""

    def to_yaml(self) -> str:
        """Config file with these options, and comments for those left to the user."""
        lines = [f"# {self.title}", f"# {self.reference}; {self.source}"]
        lines += [f"# here: {sentence}" for sentence in self.differs]
        for heading, values in (("stated there", self.stated), ("left open there, chosen here", self.chosen)):
            if values:
                plain = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
                lines += ["", f"# {heading}", yaml.safe_dump(plain, sort_keys=False).rstrip()]
        if self.yours:
            lines += ["", "# left to you"]
            lines += [f"# {name}: {TrainConfig.model_fields[name].default}" for name in self.yours]
        return "\n".join(lines) + "\n"


def recipe(name: str) -> Recipe:
    """A recipe by name.

    >>> recipe("gspo").config(steps=10).clip_range
    (0.0003, 0.0004)
    """
    if name not in RECIPES:
        raise InputError(f"there is no recipe {name!r}{did_you_mean(name, RECIPES)}; there are {', '.join(RECIPES)}")
    return RECIPES[name]


def _read(name: str, entry: dict[str, Any]) -> Recipe:
    made: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()}
    for part in ("stated", "chosen"):  # ranges are lists in YAML and tuples among options
        made[part] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.get(part, {}).items()}
    return Recipe(name=name, **made)


_BOOK = yaml.safe_load(files("gruppo.recipes").joinpath("book.yaml").read_text(encoding="utf-8"))
RECIPES: dict[str, Recipe] = {name: _read(name, entry) for name, entry in _BOOK.items()}
"""All recipes by name."""
