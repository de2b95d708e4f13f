"""What `gruppo export` writes is one model to vLLM, transformers and PEFT."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from gruppo.cli.models import export
from gruppo.trainer import GRPOTrainer
from gruppo.weights.source import linear_layers, resolve

ROWS = [(4, 7, 5, 9, 6), (8, 8, 11, 3, 12, 7), (5, 4), (10, 9, 8, 7, 6, 5, 4)]


def by_torch(model: Any) -> list[float]:
    found = []
    for row in ROWS:
        with torch.no_grad():
            logps = model(input_ids=torch.tensor([row])).logits[0].double().log_softmax(-1)
        found += [logps[j, token].item() for j, token in enumerate(row[1:])]
    return found


def by_vllm(model: str, adapter: Path | None = None, **options: Any) -> list[float]:
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    llm = LLM(model, dtype="float32", max_model_len=24, enforce_eager=True, kv_cache_memory_bytes=64 << 20, **options)
    request = None if adapter is None else LoRARequest("exported", 1, str(adapter))
    outputs = llm.generate(
        [{"prompt_token_ids": list(row)} for row in ROWS],
        SamplingParams(max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
        lora_request=request,
    )
    return [
        entry[token].logprob
        for row, output in zip(ROWS, outputs, strict=True)
        for token, entry in zip(row[1:], output.prompt_logprobs[1:], strict=True)
    ]


@pytest.mark.row("R-52", "read by vLLM")
def test_adapter_and_merged_model_give_the_same_logps_everywhere(
    trainers: Callable[..., GRPOTrainer], tmp_path: Path
) -> None:
    trainer = trainers(lora=True, lora_rank=4, lr=1e-2, steps=3)
    trainer.train()
    adapter, merged, base = tmp_path / "adapter", tmp_path / "merged", resolve("builtin")
    assert export([str(trainer.run.path), str(adapter)]) == 0
    assert export([str(trainer.run.path), str(merged), "--merge"]) == 0

    def load(folder: str | Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    expected = by_torch(trainer.model.model)
    assert (
        max(abs(a - b) for a, b in zip(expected, by_torch(load(base)), strict=True)) > 0.1
    )  # it has learned something
    lora = {"enable_lora": True, "max_lora_rank": 8, "lora_target_modules": list(linear_layers("builtin"))}
    found = {
        "PEFT": by_torch(PeftModel.from_pretrained(load(base), adapter)),
        "transformers": by_torch(load(merged)),
        "vLLM, adapter": by_vllm(base, adapter, **lora),
        "vLLM, merged": by_vllm(str(merged)),
    }
    for name, logps in found.items():
        assert logps == pytest.approx(expected, abs=1e-4), name
