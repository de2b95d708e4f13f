"""With a cache, one length at a time, or without a cache: the log-probs are the trainer's, and the log says which."""

import logging
from importlib.metadata import version
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    actor,
    largest_gap,
    logps_one_by_one,
    perturb_adapter,
    perturb_vectors,
    tiny_model,
)

from gruppo.model import LoraSpec, TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.types import SampleResponse, Trajectory

TRANSFORMERS = tuple(int(part) for part in version("transformers").split(".")[:2])

# Unequal lengths; two prompts are equal, so that rows repeat.
PROMPTS = [(5, 9, 4), (17, 30, 6, 8, 21, 3, 11), (12,), (5, 9, 4), (7, 7, 25, 14, 9)]
PARAMS = SamplingParams(max_new_tokens=8, seed=3, step=0)


def sequences(responses: list[SampleResponse]) -> list[Trajectory]:
    return [s for r in responses for s in r.sequences]


def gap_to_one_by_one(model: TransformersModel, sampled: list[Trajectory]) -> float:
    expected, _ = logps_one_by_one(model.model, [s.new_input_feature for s in sampled])
    return largest_gap([torch.tensor(s.logps, dtype=torch.float64) for s in sampled], expected)


def lively(family: str, **changes: Any) -> Any:
    model = tiny_model(family, **changes)
    perturb_vectors(model)
    return model


def watch_inputs(model: TransformersModel) -> list[torch.Tensor]:
    """The input_ids of every forward of the body."""
    seen: list[torch.Tensor] = []
    model.model.register_forward_pre_hook(lambda _m, _a, given: seen.append(given["input_ids"]), with_kwargs=True)
    return seen


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name.startswith("gruppo") and r.levelno >= logging.WARNING]


@pytest.mark.parametrize("family", FAMILIES)
def test_without_a_cache_the_same_tokens_get_the_same_logps(family: str) -> None:
    """Heads with a scale, a cap or a bias too: without a cache the logits come from the trainer's body and head."""
    perturbed = TransformersModel(lively(family), device="cpu")
    cached, recomputed = TorchSampler(perturbed), TorchSampler(perturbed)
    recomputed.way = "recomputed"
    ours, theirs = (sequences(s.sample(PROMPTS, 3, PARAMS)) for s in (recomputed, cached))
    assert [s.tokens for s in ours] == [s.tokens for s in theirs]
    assert largest_gap([torch.tensor(s.logps) for s in ours], [torch.tensor(s.logps) for s in theirs]) < 1e-5
    assert gap_to_one_by_one(perturbed, ours) < 1e-5


def test_plain_attention_is_not_compared() -> None:
    """One forward of the prompts and one per further token, in the first call as in the second."""
    for family in ("llama", "gemma3"):
        model = actor(family)
        seen = watch_inputs(model)
        sampler = TorchSampler(model)
        for _ in range(2):
            seen.clear()
            longest = max(len(s.tokens) for s in sequences(sampler.sample(PROMPTS, 2, PARAMS)))
            assert [ids.shape[1] for ids in seen] == [7] + [1] * (longest - 1)


def test_other_layers_are_compared_once(caplog: pytest.LogCaptureFixture) -> None:
    model = TransformersModel(lively("qwen3_5"), device="cpu")
    seen = watch_inputs(model)
    sampler = TorchSampler(model)
    sampler.sample(PROMPTS, 2, PARAMS)
    assert sampler.way == "together"
    first = len(seen)
    seen.clear()
    longest = max(len(s.tokens) for s in sequences(sampler.sample(PROMPTS, 2, PARAMS)))
    assert len(seen) == longest < first
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next", "nemotron_h", "falcon_h1", "lfm2", "mamba", "mamba2"])
def test_rounding_in_bfloat16_is_no_disagreement(family: str, caplog: pytest.LogCaptureFixture) -> None:
    if family in ("qwen3_next", "nemotron_h") and TRANSFORMERS < (5, 18):
        pytest.skip("transformers below 5.18 is off by up to 0.4 with their caches in bfloat16, and is not trusted")
    model = TransformersModel(lively(family).bfloat16(), device="cpu")
    sampler = TorchSampler(model)
    sampled = sequences(sampler.sample(PROMPTS, 3, PARAMS))
    assert sampler.way == "together" and warnings_of(caplog) == []
    expected = model.forward_only([s.new_input_feature for s in sampled])["logps"]
    assert largest_gap([torch.tensor(s.logps) for s in sampled], expected) < 0.1


def test_a_hybrid_with_an_adapter_samples_the_trainers_logps() -> None:
    model = TransformersModel(lively("qwen3_5"), device="cpu", lora=LoraSpec(rank=2))
    perturb_adapter(model.model)
    sampled = sequences(TorchSampler(model).sample(PROMPTS, 4, PARAMS))
    assert gap_to_one_by_one(model, sampled) < 1e-5
    with model.model.disable_adapter():  # type: ignore[operator]
        assert gap_to_one_by_one(model, sampled) > 0.1


def test_where_padding_shows_prompts_go_one_length_at_a_time(caplog: pytest.LogCaptureFixture) -> None:
    """A bias in the convolution of LFM2 is added to padding as well."""
    model = TransformersModel(lively("lfm2", conv_bias=True), device="cpu")
    sampler = TorchSampler(model)
    sampler.way = "together"
    assert gap_to_one_by_one(model, sequences(sampler.sample(PROMPTS, 3, PARAMS))) > 1e-3
    sampler = TorchSampler(model)
    together = [sampler.sample(PROMPTS, 3, PARAMS) for _ in range(2)]
    assert gap_to_one_by_one(model, sequences(together[0])) < 1e-5
    assert together[0] == together[1]
    assert [r.sequences[0].prompt_ids for r in together[0]] == PROMPTS
    (line,) = warnings_of(caplog)
    assert line.startswith("Lfm2ForCausalLM: prompts are sampled one length at a time, since padded to one")


def without_a_cache(**options: Any) -> TransformersModel:
    """Nemotron-H whose time step has a lower bound that bites. transformers 5.19 keeps it in whole forwards only."""
    model = lively("nemotron_h")
    for module in model.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = (0.1, float("inf"))
    return TransformersModel(model, device="cpu", **options)


@pytest.mark.skipif(TRANSFORMERS < (5, 15), reason="transformers below 5.15 has no such fault in this model")
def test_a_cache_that_gives_other_logps_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    model = without_a_cache()
    sampler = TorchSampler(model)
    sampler.way = "together"
    assert gap_to_one_by_one(model, sequences(sampler.sample(PROMPTS, 3, PARAMS))) > 1e-3
    sampler = TorchSampler(model)
    for _ in range(2):
        sampled = sequences(sampler.sample(PROMPTS, 3, PARAMS))
        assert gap_to_one_by_one(model, sampled) < 1e-5
    (line,) = warnings_of(caplog)
    assert line.startswith("NemotronHForCausalLM: sampling runs without a cache, a whole forward per token, since with")
    assert "its log-probs differ by" in line


def test_without_a_cache_each_distinct_row_runs_once() -> None:
    model = without_a_cache()
    sampler = TorchSampler(model)
    sampler.sample(PROMPTS, 4, PARAMS)
    seen = watch_inputs(model)
    sampled = sequences(sampler.sample(PROMPTS, 4, PARAMS))
    assert len(seen[0]) == 4  # five prompts, two of them equal
    # Step j runs the rows that have drawn j tokens and go on, each kind once.
    for j, ids in enumerate(seen):
        going_on = {s.prompt_ids + s.tokens[:j] for s in sampled if len(s.tokens) > j}
        assert len(ids) == len(going_on)
    assert len(seen) == max(len(s.tokens) for s in sampled)


def test_without_a_cache_a_token_budget_changes_nothing() -> None:
    whole, split = (TorchSampler(without_a_cache(tokens_per_microbatch=n)) for n in (None, 25))
    ours, theirs = (sequences(s.sample(PROMPTS, 3, PARAMS)) for s in (split, whole))
    assert [s.tokens for s in ours] == [s.tokens for s in theirs]
    assert largest_gap([torch.tensor(s.logps) for s in ours], [torch.tensor(s.logps) for s in theirs]) < 1e-5


def test_a_model_that_takes_no_such_cache_decodes_without_one(caplog: pytest.LogCaptureFixture) -> None:
    class Refuses(type(tiny_model("mamba2"))):  # type: ignore[misc]
        def forward(self, *args: Any, cache_params: Any = None, **options: Any) -> Any:
            if cache_params is not None:
                raise ValueError("no cache, please")
            return super().forward(*args, **options)

    inner = lively("mamba2")
    inner.__class__ = Refuses
    model = TransformersModel(inner, device="cpu")
    assert gap_to_one_by_one(model, sequences(TorchSampler(model).sample(PROMPTS, 2, PARAMS))) < 1e-5
    (line,) = warnings_of(caplog)
    assert line.endswith("since with one it fails with ValueError: no cache, please")
