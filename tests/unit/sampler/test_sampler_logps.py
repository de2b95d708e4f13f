"""The log-probs that the sampler returns are those that the trainer computes for the same tokens."""

import pytest
import torch
from tiny_models import EOS, FAMILIES, actor, logps_one_by_one, perturb_adapter

from gruppo.model import LoraSpec, TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.types import Prompt

# Unequal lengths on both sides of the tiny models' window of 4.
PROMPTS = [(5, 9, 4), (17, 30, 6, 8, 21, 3, 11), (12,), (7, 7, 25, 14, 9)]


def gap(model: TransformersModel, temperature: float, **params: float) -> float:
    """Largest difference between sampled log-probs, forward_only, and one sequence at a time; all tokens counted."""
    options = SamplingParams(temperature=temperature, max_new_tokens=8, seed=3, **params)  # type: ignore[arg-type]
    responses = TorchSampler(model).sample(PROMPTS, 3, options)
    sequences = [s for r in responses for s in r.sequences]
    features = [s.new_input_feature for s in sequences]
    scored = model.forward_only(features)["logps"]
    alone, _ = logps_one_by_one(model.model, features, temperature)
    gaps = []
    for sequence, trained, single in zip(sequences, scored, alone, strict=True):
        sampled = torch.tensor(sequence.logps, dtype=torch.float64)
        assert len(sampled) == len(trained) == len(sequence.tokens)
        gaps += [(sampled - trained.double()).abs().max().item(), (sampled - single).abs().max().item()]
    return max(gaps)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.row("R-34", "sampler against trainer")
def test_sampled_logps_are_forward_onlys(family: str, temperature: float) -> None:
    assert gap(actor(family, temperature=temperature), temperature) < 1e-5


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("lora", [None, LoraSpec(rank=2)], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_sampled_logps_are_forward_onlys_after_updates(family: str, lora: LoraSpec | None, temperature: float) -> None:
    model = actor(family, lora=lora, temperature=temperature)
    if lora:
        perturb_adapter(model.model)
    model.set_optimizer("AdamW", lr=0.01)
    before = TorchSampler(model).sample(PROMPTS, 2, SamplingParams(max_new_tokens=6, temperature=temperature))
    sequences = [s for r in before for s in r.sequences]
    for _ in range(3):
        model.forward_backward([s.new_input_feature for s in sequences], advantages=[1.0, -1.0] * len(PROMPTS))
        model.clip_grad_and_step()
    after = TorchSampler(model).sample(PROMPTS, 2, SamplingParams(max_new_tokens=6, temperature=temperature))
    assert after != before  # the new weights sample something else
    assert {s.policy_version for r in after for s in r.sequences} == {3}
    assert gap(model, temperature) < 1e-5


def test_filters_change_what_is_drawn_and_not_the_reported_logps() -> None:
    assert gap(actor("llama"), 1.0, top_k=3, top_p=0.9, min_p=0.05) < 1e-5


def test_greedy_logps_are_at_temperature_one() -> None:
    model = actor("llama")
    (response,) = TorchSampler(model).sample([PROMPTS[0]], 1, SamplingParams(temperature=0.0, max_new_tokens=6))
    (sequence,) = response.sequences
    (expected,), _ = logps_one_by_one(model.model, [sequence.new_input_feature])
    assert torch.tensor(sequence.logps).double() == pytest.approx(expected, abs=1e-5)


@pytest.mark.row("R-33", "train mode while sampling")
def test_sampling_in_train_mode_with_recomputation_gives_the_same_tokens() -> None:
    params = SamplingParams(max_new_tokens=6, seed=4)
    plain, recomputing = actor("llama"), actor("llama", gradient_checkpointing=True)
    assert recomputing.model.training
    assert TorchSampler(plain).sample(PROMPTS, 2, params) == TorchSampler(recomputing).sample(PROMPTS, 2, params)
    assert recomputing.model.training  # the mode is given back


def test_the_mode_is_given_back_when_sampling_is_interrupted() -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    model = actor("llama", gradient_checkpointing=True)
    with pytest.raises(Stop):
        TorchSampler(model, poll=stop).sample(PROMPTS, 1, SamplingParams(max_new_tokens=4))
    assert model.model.training


@pytest.mark.row("R-35", "ids of the sampler in the batch")
def test_the_input_feature_is_the_prompt_the_tokens_and_their_logps() -> None:
    model = actor("llama")
    prompt = Prompt(token_ids=(5, 9, 4), index=7)
    (response,) = TorchSampler(model).sample([prompt], 2, SamplingParams(max_new_tokens=5))
    for sequence in response.sequences:
        feature = sequence.new_input_feature
        assert feature.prompt_ids == (5, 9, 4)
        assert feature.completion_ids == sequence.tokens
        assert feature.old_logps == sequence.logps
        assert feature.input_ids == (5, 9, 4, *sequence.tokens)
    assert any(s.tokens[-1] != EOS for s in response.sequences)


def test_features_of_the_sampler_train_at_ratio_one_within_rounding() -> None:
    model = actor("llama")
    responses = TorchSampler(model).sample(PROMPTS, 2, SamplingParams(max_new_tokens=5))
    features = [s.new_input_feature for r in responses for s in r.sequences]
    result = model.forward_backward(features, advantages=[2.0] * len(features))
    assert not result.on_policy
    assert result.loss.item() == pytest.approx(-2.0, abs=1e-5)
