"""Disk that a run needs: the estimate before its first step, and what it has written at the end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gruppo.trainer import GRPOTrainer
from gruppo.trainer.disk import disk_needs

pytestmark = pytest.mark.slow

Make = Callable[..., GRPOTrainer]
OPTIONS: dict[str, dict[str, Any]] = {
    "full weights": {},
    "bfloat16": {"dtype": "bfloat16"},
    "an adapter": {"lora": True, "lora_rank": 64},
    "a reference that moves": {"beta": 0.1, "ref_every": 1},
    "a moving adapter": {"lora": True, "lora_rank": 64, "beta": 0.1, "ref_every": 1},
}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_estimate_is_what_is_written(name: str, make_trainer: Make) -> None:
    trainer = make_trainer(
        rewards=("step_rewards:by_place",), steps=4, save_every=1, keep_checkpoints=2, **OPTIONS[name]
    )
    needs = disk_needs(trainer.config, trainer.model)
    trainer.train()
    for folder in (trainer.run.path / "checkpoints").iterdir():
        assert needs.checkpoint == pytest.approx(size(folder), rel=0.04)  # names and shapes of tensors are not counted
    assert needs.num_checkpoints == 3  # two, and a new one
    assert needs.models == pytest.approx(size(trainer.run.model), rel=0.04)
    assert needs.completions == 0  # completions_every=0


@pytest.mark.parametrize(
    ("changes", "step", "num_saved", "num_checkpoints", "num_models", "num_files"),
    [
        ({}, 0, 0, 3, 1, 20),  # 4 are written, 2 stay
        ({"keep_checkpoints": 9}, 0, 0, 4, 1, 20),
        ({"save_every": 500}, 0, 0, 1, 1, 20),  # the last step
        ({}, 12, 2, 1, 1, 8),
        ({}, 20, 2, 0, 0, 0),  # nothing is left to do
        ({"completions_every": 7}, 12, 2, 1, 1, 1),  # step 14
        ({"completions_every": 0}, 0, 0, 3, 1, 0),
        (
            {"keep_best": True, "eval_prompts": 4, "eval_every": 1},
            0,
            0,
            3,
            3,
            20,
        ),  # the best one twice while it is replaced
    ],
)
def test_what_is_still_to_write(
    changes: dict[str, Any],
    step: int,
    num_saved: int,
    num_checkpoints: int,
    num_models: int,
    num_files: int,
    make_trainer: Make,
) -> None:
    trainer = make_trainer(**{"steps": 20, "save_every": 5, "completions_every": 1} | changes)
    needs = disk_needs(trainer.config, trainer.model, step=step, num_saved=num_saved)
    assert needs.num_checkpoints == num_checkpoints
    assert needs.models == num_models * 4 * 166_336
    assert needs.completions == num_files * (2**14 + 4 * 4 * 4 * 20)  # prompts x group x tokens x bytes
    assert needs.total == num_checkpoints * 3 * 4 * 166_336 + needs.models + needs.completions


def test_weights_on_their_way_to_vllm_count(make_trainer: Make) -> None:
    trainer = make_trainer()
    config = trainer.config.model_copy(update={"sampler": "vllm:start", "max_staleness": 1})
    # The model at the end; in sync/ the version in use, the next one, and one more that waits
    assert disk_needs(config, trainer.model).models == (1 + 3) * 4 * 166_336
