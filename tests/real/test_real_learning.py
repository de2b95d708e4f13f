"""A real model learns within some steps; the run resumes to the bit, its doctor is silent, its adapter is PEFT's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from gruppo.cli.main import run as gruppo
from gruppo.doctor import summary
from gruppo.run.reader import RunReader
from gruppo.trainer import GRPOTrainer, TrainConfig


@pytest.fixture(scope="module")
def options(smollm2_folder: str) -> dict[str, Any]:
    """The sizes of `gruppo demo --llm`, halved; bfloat16 where a CPU has it only for speed, so not here."""
    return {
        "model": smollm2_folder,
        "data": "builtin:sums",
        "eval_data": "builtin:sums?split=heldout",
        "eval_prompts": 48,
        "prompts_per_step": 4,
        "group_size": 8,
        "max_new_tokens": 12,
        "lr": 3e-5,
        "dtype": "float32",
        "tensorboard": False,
        "threads": 1,
    }


@pytest.fixture(scope="module")
def learnt(options: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("runs") / "learnt"
    config = TrainConfig(**options, steps=14, eval_every=14, output=str(path))
    return path, GRPOTrainer(config, quiet=True).train()


def test_held_out_accuracy_rises(learnt: tuple[Path, Any]) -> None:
    _, result = learnt
    print(f"held-out accuracy {result.before.score:.3f} -> {result.after.score:.3f}")
    # Of 48 prompts: 4 standard errors of a difference of two shares near a quarter.
    assert result.after.score > result.before.score + 0.2


def test_the_doctor_has_nothing_against_it(learnt: tuple[Path, Any]) -> None:
    state, found = summary(RunReader(learnt[0]))
    assert found == []
    print(state)


def test_a_stopped_run_goes_on_to_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    short = options | {"eval_prompts": 0, "prompts_per_step": 2, "max_new_tokens": 6, "lr": 1e-4}
    short["rewards"] = [r"pattern_match:pattern=\d"]  # of six tokens some have a digit, and hardly any a sum
    for name, steps in (("whole", 3), ("parts", 1)):
        GRPOTrainer(TrainConfig(**short, steps=steps, output=str(tmp_path / name)), quiet=True).train()
    assert gruppo(["resume", str(tmp_path / "parts"), "--steps", "3"]) == 0
    whole, parts = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    moved = [row["step"] for row in RunReader(tmp_path / "parts").metrics() if row.get("optim/grad_norm")]
    assert {1, 2} <= set(moved)  # before the resume and after it


def test_an_adapter_is_loaded_by_peft_and_merged_to_the_same_logits(
    options: dict[str, Any],
    tmp_path: Path,
    plain: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    smollm2_folder: str,
) -> None:
    short = options | {"eval_prompts": 0, "prompts_per_step": 4, "max_new_tokens": 6, "lr": 1e-2}
    short["rewards"] = [r"pattern_match:pattern=\d"]
    config = TrainConfig(**short, lora=True, lora_rank=4, steps=2, output=str(tmp_path / "run"))
    trainer = GRPOTrainer(config, quiet=True)
    trainer.train()
    ids = tokenizer("What is 76 + 25?", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        trained = trainer.model.model(input_ids=ids).logits
        before = plain(input_ids=ids).logits
        base: Any = AutoModelForCausalLM.from_pretrained(smollm2_folder, dtype=torch.float32)
        by_peft = PeftModel.from_pretrained(base, tmp_path / "run" / "model").eval()(input_ids=ids).logits
        assert gruppo(["export", str(tmp_path / "run"), str(tmp_path / "merged"), "--merge"]) == 0
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)(input_ids=ids).logits
    assert float((trained - before).abs().max()) > 0.01  # it was trained
    assert float((by_peft - trained).abs().max()) < 1e-3
    assert float((merged - trained).abs().max()) < 1e-3
