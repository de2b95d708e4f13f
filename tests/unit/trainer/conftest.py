"""A trainer of the embedded model, small enough for a step in a few milliseconds."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gruppo.task.carries import carries_rows
from gruppo.trainer import GRPOTrainer, TrainConfig

SMALL: dict[str, Any] = {
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 4,
    "steps": 3,
    "lr": 1e-4,
    "eval_prompts": 0,
    "completions_every": 0,
    "tensorboard": False,
    "threads": 1,
}


@pytest.fixture(scope="session")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some of the embedded task's prompts: all of them would take most of the time of a test."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in carries_rows("train")[::80]))
    return path


@pytest.fixture(scope="session")
def small_config_in(sums: Path) -> Callable[..., TrainConfig]:
    def make(folder: Path, **changes: Any) -> TrainConfig:
        return TrainConfig(**(SMALL | {"output": str(folder / "run"), "data": str(sums)} | changes))

    return make


@pytest.fixture
def small_config(tmp_path: Path, small_config_in: Callable[..., TrainConfig]) -> Callable[..., TrainConfig]:
    return partial(small_config_in, tmp_path)


@pytest.fixture
def make_trainer(small_config: Callable[..., TrainConfig]) -> Iterator[Callable[..., GRPOTrainer]]:
    """Trainers that are closed after the test, so that no worker and no lock is left."""
    made: list[GRPOTrainer] = []

    def make(*, callbacks: Any = (), resume: bool = False, **changes: Any) -> GRPOTrainer:
        made.append(GRPOTrainer(small_config(**changes), callbacks=callbacks, resume=resume, quiet=True))
        return made[-1]

    yield make
    for trainer in made:
        trainer.close()
