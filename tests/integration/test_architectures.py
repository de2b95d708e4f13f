"""Models of other families go through the whole loop: saved, loaded by name, sampled, rewarded, trained."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.task.builtin import builtin_tokenizer
from gruppo.trainer import GRPOTrainer, TrainConfig

sys.path.append(str(Path(__file__).parents[1] / "unit" / "model"))
from tiny_models import FAMILIES, tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    # Prompts of several lengths, so that groups are padded.
    path.write_text(
        "".join(json.dumps({"prompt": "1+" * n + f"{n}=", "answer": str(2 * n)}) + "\n" for n in range(1, 9))
    )
    return path


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # PEFT, about GPT-2's Conv1D
def test_one_step_of_the_trainer(family: str, lora: bool, rows: Path, tmp_path: Path) -> None:
    model = tiny_model(family, vocab_size=16)
    model.save_pretrained(tmp_path / "model")
    builtin_tokenizer().save_pretrained(tmp_path / "model")
    config: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "data": str(rows),
        "rewards": ("length_penalty",),
        "prompts_per_step": 4,
        "group_size": 4,
        "max_new_tokens": 8,
        "tokens_per_microbatch": 60,
        "eval_prompts": 0,
        "lora": lora,
        "lr": 1e-3,
        "steps": 1,
        "tensorboard": False,
        "completions_every": 0,
        "threads": 1,
        "output": str(tmp_path / "run"),
    }
    trainer = GRPOTrainer(TrainConfig(**config), quiet=True)
    before = {n: p.detach().clone() for n, p in trainer.model.model.named_parameters() if p.requires_grad}
    trainer.train()
    (metrics,) = trainer.run.metrics()
    assert metrics["sampler/logp_gap_max"] < 1e-5
    assert (metrics["train/token_ratio_max"], metrics["train/clip_ratio"]) == (1.0, 0.0)
    same = {n for n, p in trainer.model.model.named_parameters() if n in before and torch.equal(p, before[n])}
    # The random half of an adapter has no gradient while the other is zero.
    assert same == ({n for n in before if "lora_A" in n} if lora else set())
