"""Engines with other models and options: a tied head, raw log-probs, options that vLLM does not know."""

import os
from pathlib import Path

import pytest
import torch
from small_runs import largest_gap, update
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from gruppo.errors import InputError, SamplerError
from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, vLLMSampler
from gruppo.weights.source import resolve


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """A random model whose head is its embedding, in a folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=16, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, initializer_range=0.1, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "tied")
    AutoTokenizer.from_pretrained(resolve("builtin")).save_pretrained(tmp_path / "tied")
    return tmp_path / "tied"


def test_a_tied_head_is_handed_over(tied: Path) -> None:
    """The file holds it once; vLLM's own reload would leave the head without values."""
    model = TransformersModel(str(tied), device="cpu")
    prompts = [(4, 5, 6), (7, 8), (9, 10, 11, 12)]
    sampler = vLLMSampler(str(tied), max_model_len=24)
    for _ in range(2):
        reported = sampler.sync(model)
        assert reported["sync/bytes"] == 4 * sum(p.numel() for p in model.model.parameters())
        for temperature in (0.7, 1.0):
            params = SamplingParams(temperature=temperature, max_new_tokens=4)
            assert largest_gap(model.model, sampler.sample(prompts, 8, params), temperature) < 1e-4
        update(model, 10)
    sampler.close()


def test_no_cached_prefix_outlives_its_weights() -> None:
    """Prompts longer than a block of the cache: what was computed for them under old weights must not be used again."""
    model = TransformersModel("builtin", device="cpu")
    prompts = [tuple(3 + (7 * i + 5 * j) % 13 for j in range(42)) for i in range(4)]
    sampler = vLLMSampler("builtin", max_model_len=64, options={"block_size": 32})
    for _ in range(2):
        sampler.sync(model)
        responses = sampler.sample(prompts, 4, SamplingParams(temperature=0.7, max_new_tokens=4))
        assert largest_gap(model.model, responses, 0.7) < 1e-4
        update(model, 3)
    sampler.close()


def test_raw_logprobs_are_refused_at_the_start() -> None:
    with pytest.raises(SamplerError, match="reports log-probs at temperature 1, whatever the temperature"):
        vLLMSampler("builtin", max_model_len=24, options={"logprobs_mode": "raw_logprobs"})


def test_an_option_that_vllm_does_not_know_is_an_input_error() -> None:
    with pytest.raises(InputError, match=r"vLLM does not take this model or these options: .*no_such_option"):
        vLLMSampler("builtin", max_model_len=24, options={"no_such_option": 1})


def test_what_was_handed_over_is_gone_after_the_end() -> None:
    sampler = vLLMSampler("builtin", max_model_len=24)
    sampler.sync(TransformersModel("builtin", device="cpu"))
    assert os.listdir(sampler.store.folder) == ["version-0"]
    sampler.close()
    assert not sampler.store.folder.exists()
