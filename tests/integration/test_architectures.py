"""Models of other families: sampled log-probs are the trainer's, every layout scores alike, a whole step runs."""

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.task.builtin import builtin_tokenizer
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.types import InputFeature, Trajectory

sys.path.append(str(Path(__file__).parents[1] / "unit" / "model"))
from tiny_models import FAMILIES, OTHER_FAMILIES, largest_gap, logps_one_by_one, perturb_vectors, tiny_model

pytestmark = pytest.mark.slow

ALL = [*FAMILIES, *OTHER_FAMILIES]
# Unequal lengths, shorter and longer than windows and convolutions.
PROMPTS = [(5, 9, 4), (17, 30, 6, 8, 21, 3, 11), (12,), (7, 7, 25, 14, 9)]

# Why a family does not share prompts. None of these can be packed into one row either: their log-probs differ.
NOT_SHARED = {
    "gpt_oss": "it runs 'eager' attention",
    "falcon": "its attention does not go through transformers' attention interface",
    "bloom": "its attention does not go through transformers' attention interface",
    "qwen3_5": "it has layers of linear_attention",
    "qwen3_next": "it has layers of linear_attention",
    "nemotron_h": "it has layers of linear_attention and mlp",
    "falcon_h1": "it has layers of hybrid",
    "lfm2": "it has layers of conv",
    "mamba": "it has layers of linear_attention",
    "mamba2": "it has layers of linear_attention",
    "recurrent_gemma": "its log-probs differ by",
}


def lively(family: str, **changes: Any) -> Any:
    model = tiny_model(family, **changes)
    perturb_vectors(model)
    return model


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("gruppo") and r.levelno >= logging.WARNING]


def groups(model: TransformersModel, temperature: float = 1.0) -> list[Trajectory]:
    """Three samples of each prompt; those of a group differ."""
    sampler = TorchSampler(model)
    responses = sampler.sample(PROMPTS, 3, SamplingParams(temperature=temperature, max_new_tokens=10, seed=3))
    assert [r.sequences[0].prompt_ids for r in responses] == PROMPTS
    assert all(len({s.tokens for s in r.sequences}) > 1 for r in responses)
    return [s for r in responses for s in r.sequences]


def gap(sequences: list[Trajectory], expected: list[torch.Tensor]) -> float:
    return largest_gap([torch.tensor(s.logps, dtype=torch.float64) for s in sequences], expected)


@pytest.mark.parametrize("family", ALL)
def test_sampled_logps_are_the_trainers(family: str, caplog: pytest.LogCaptureFixture) -> None:
    model = TransformersModel(lively(family), device="cpu", temperature=0.7)
    sequences = groups(model, temperature=0.7)
    features = [s.new_input_feature for s in sequences]
    assert gap(sequences, model.forward_only(features)["logps"]) < 1e-5
    assert gap(sequences, logps_one_by_one(model.model, features, 0.7)[0]) < 1e-5
    # RecurrentGemma keeps its state outside the cache, where rows cannot be selected.
    assert [line.split(",")[0] for line in warnings_of(caplog)] == (
        ["RecurrentGemmaForCausalLM: sampling runs without a cache"] if family == "recurrent_gemma" else []
    )


@pytest.mark.parametrize("layout", ["padded", "packed", "shared"])
@pytest.mark.parametrize("family", ALL)
def test_every_layout_scores_as_each_sequence_alone(family: str, layout: Any, caplog: pytest.LogCaptureFixture) -> None:
    features = [
        InputFeature(prompt_ids=prompt, completion_ids=tuple((5 * i + 3 * j + n) % 29 + 3 for j in range(n)))
        for i, prompt in enumerate(PROMPTS)
        for n in (8, 1, 5)
    ]
    expected, _ = logps_one_by_one(lively(family), features)
    model = TransformersModel(lively(family), device="cpu", layout=layout)
    for _ in range(2):
        assert largest_gap(model.forward_only(features)["logps"], expected) < 1e-5
    assert largest_gap(model.reference_logps(features), expected) < 1e-5
    if layout == "padded" or family not in NOT_SHARED:
        assert warnings_of(caplog) == []
        (batch,) = model.planner.split([f.rollout() for f in features])
        assert (batch.in_one_row, batch.shared is not None) == (layout == "packed", layout == "shared")
        return
    (line,) = warnings_of(caplog)
    assert line.endswith("; the layout is padded")
    if layout == "packed":
        assert "sequences are not packed into one row, since its log-probs differ by" in line
    else:
        assert f"prompts are not shared, since {NOT_SHARED[family]}" in line


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("family", ALL)
def test_half_precision_hides_no_leak(family: str, layout: Any, caplog: pytest.LogCaptureFixture) -> None:
    """What is refused in float32 is refused in bfloat16, whose rounding is larger than what some of them leak."""
    model = TransformersModel(lively(family).bfloat16(), device="cpu", layout=layout)
    weights = {name: p.data.clone() for name, p in model.model.named_parameters()}
    model.planner.decide()
    refused = [line for line in warnings_of(caplog) if line.endswith("; the layout is padded")]
    assert len(refused) == (family in NOT_SHARED)
    assert all(p.dtype == weights[n].dtype and p.equal(weights[n]) for n, p in model.model.named_parameters())


# PEFT refuses `out_proj` of a Mamba layer, whose fused kernels would pass the adapter by.
LORA_TARGETS = dict.fromkeys(["nemotron_h", "falcon_h1", "mamba", "mamba2"], ("in_proj",))


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    # Prompts of several lengths, so that groups are padded.
    path.write_text(
        "".join(json.dumps({"prompt": "1+" * n + f"{n}=", "answer": str(2 * n)}) + "\n" for n in range(1, 9))
    )
    return path


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ALL)
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False")  # PEFT, about GPT-2's Conv1D
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not match")  # PEFT, about experts
def test_one_step_of_the_trainer(family: str, lora: bool, rows: Path, tmp_path: Path) -> None:
    model = tiny_model(family, seed=2, vocab_size=16)  # a seed at which every family ends some completions early
    model.save_pretrained(tmp_path / "model")
    builtin_tokenizer().save_pretrained(tmp_path / "model")
    config: dict[str, Any] = {
        "model": str(tmp_path / "model"),
        "data": str(rows),
        "rewards": ("length_penalty",),
        "prompts_per_step": 4,
        "group_size": 8,
        "max_new_tokens": 8,
        "tokens_per_microbatch": 60,
        "eval_prompts": 0,
        "lora": lora,
        "lora_targets": LORA_TARGETS.get(family, ("all-linear",)) if lora else None,
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
    assert (metrics["live/token_ratio_max"], metrics["live/clip_ratio"]) == (1.0, 0.0)
    same = {n for n, p in trainer.model.model.named_parameters() if n in before and torch.equal(p, before[n])}
    # The random half of an adapter has no gradient while the other is zero.
    assert same == ({n for n in before if "lora_A" in n} if lora else set())
