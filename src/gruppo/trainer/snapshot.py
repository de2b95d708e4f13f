"""Snapshots: the state of a run after a step, as its checkpoints hold it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gruppo.model.checkpoint import load_training_state, save_training_state
from gruppo.run.checkpoints import Checkpoints
from gruppo.trainer.state import RunState

if TYPE_CHECKING:
    from gruppo.model import TransformersModel

FILE = "trainer.json"


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Saves and loads everything that later steps depend on."""

    checkpoints: Checkpoints
    model: "TransformersModel"
    state: RunState

    def save(self, step: int, unfinished: Mapping[str, float] | None = None) -> None:
        """Write the state after `step`. `unfinished`: its metrics, if it was interrupted before their record."""

        def write(folder: Path) -> None:
            save_training_state(self.model.weights, self.model.optimizer, folder)
            self.state.save(folder)
            facts = {"step": step, "version": self.model.version, "unfinished": unfinished}
            (folder / FILE).write_text(json.dumps(facts))

        self.checkpoints.save(step, write)

    def load_newest(self) -> tuple[int, dict[str, float] | None]:
        """Put model and state back as the newest whole checkpoint has them; its step and `unfinished` metrics."""
        folder = self.checkpoints.newest()
        load_training_state(self.model.weights, self.model.optimizer, folder)
        self.state.load(folder)
        facts = json.loads((folder / FILE).read_text())
        self.model.version = facts["version"]
        return facts["step"], facts.get("unfinished")
