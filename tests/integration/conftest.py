"""Trainers of the embedded model for whole runs."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gruppo.cli.demo import PRESET
from gruppo.trainer import GRPOTrainer, TrainConfig


@pytest.fixture
def demo_trainer(tmp_path: Path) -> Iterator[Callable[..., GRPOTrainer]]:
    """A trainer with the options of a demo, except for those given."""
    made: list[GRPOTrainer] = []

    def make(preset: dict[str, Any] = PRESET, **changes: Any) -> GRPOTrainer:
        base = preset | {"lr": 1e-4, "tensorboard": False, "completions_every": 0, "eval_every": 0}
        output = str(tmp_path / f"run-{len(made)}")
        made.append(GRPOTrainer(TrainConfig(**(base | {"output": output} | changes)), quiet=True))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
