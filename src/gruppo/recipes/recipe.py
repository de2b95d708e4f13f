"""Recipe: the configuration of a published run, with where each value comes from."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from gruppo.trainer.config import TrainConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What a paper trained with, as options of a run.

    Model, data, rewards and the number of steps are the user's: a recipe says how to train, not what.
    """

    name: str
    title: str
    paper: str
    """arXiv id, or "blog"."""
    source: str
    """Where the stated values were read."""
    stated: Mapping[str, Any]
    """Options that the source states."""
    chosen: Mapping[str, Any] = field(default_factory=dict)
    """Options that it leaves open, and that are chosen here."""
    differs: tuple[str, ...] = ()
    """What the paper did otherwise, one sentence each."""

    def __post_init__(self) -> None:
        twice = self.stated.keys() & self.chosen.keys()
        assert not twice, f"{self.name}: {sorted(twice)} both stated and chosen"
        object.__setattr__(self, "stated", MappingProxyType(dict(self.stated)))
        object.__setattr__(self, "chosen", MappingProxyType(dict(self.chosen)))

    @property
    def reference(self) -> str:
        return "blog" if self.paper == "blog" else f"arXiv:{self.paper}"

    @property
    def values(self) -> dict[str, Any]:
        """The options that it sets."""
        return dict(self.stated) | dict(self.chosen)

    def config(self, **own: Any) -> TrainConfig:
        """The complete configuration; `own` options win."""
        return TrainConfig.read(self.values | own, where=f"recipe {self.name}")

    def to_yaml(self) -> str:
        """A config file with these options; the reader's own lines may follow."""
        import yaml

        lines = [f"# {self.title}", f"# {self.reference}; {self.source}"]
        lines += [f"# here: {sentence}" for sentence in self.differs]
        for heading, values in (("stated there", self.stated), ("left open there, chosen here", self.chosen)):
            if values:
                plain = {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}
                lines += ["", f"# {heading}", yaml.safe_dump(plain, sort_keys=False).rstrip()]
        return "\n".join(lines) + "\n"
