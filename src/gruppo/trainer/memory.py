"""What a run remembers besides weights and optimizer, and what its checkpoints therefore hold."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gruppo.errors import CheckpointError
from gruppo.trainer.entropy_bonus import EntropyBonus
from gruppo.trainer.reward_kl import RewardKL
from gruppo.trainer.solved import SolvedPrompts

if TYPE_CHECKING:
    from gruppo.model.reference import Reference

FILE = "memory.json"
REFERENCE = "reference.safetensors"


@dataclass(slots=True)
class Memory:
    """Solved prompts, coefficients that follow what is measured, and a reference that moves."""

    solved: SolvedPrompts = field(default_factory=SolvedPrompts)
    kl: RewardKL = field(default_factory=RewardKL)
    entropy: EntropyBonus = field(default_factory=EntropyBonus)
    reference: "Reference | None" = None
    """Only one that the run moves; else it is the model at the start and needs no saving."""

    def save(self, folder: Path) -> None:
        state = {
            "solved": self.solved.state(),
            "kl_coefficient": self.kl.coefficient,
            "entropy": [self.entropy.remembered, self.entropy.applied],
        }
        (folder / FILE).write_text(json.dumps(state), encoding="utf-8")
        if self.reference is not None:
            from safetensors.torch import save_file

            save_file(self.reference.state(), folder / REFERENCE)

    def load(self, folder: Path) -> None:
        try:
            state = json.loads((folder / FILE).read_text(encoding="utf-8"))
            self.solved.load(state["solved"])
            self.kl.coefficient = float(state["kl_coefficient"])
            self.entropy.remembered, self.entropy.applied = map(float, state["entropy"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder / FILE} cannot be read: {error}") from error
        if self.reference is not None:
            from safetensors.torch import load_file

            self.reference.load(load_file(folder / REFERENCE))
