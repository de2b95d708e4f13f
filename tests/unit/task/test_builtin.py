"""The built-in tokenizer and architecture, without weights."""

import math

import pytest
import torch
from transformers import Qwen3ForCausalLM

from gruppo.errors import InputError
from gruppo.model.optim import schedule_factor
from gruppo.task.builtin import LR_WARMUP_STEPS, _completion_loss, builtin_config, builtin_tokenizer, rebuild_base


def test_the_tokenizer_has_sixteen_ids() -> None:
    tokenizer = builtin_tokenizer()
    tokens = ["<pad>", "<bos>", "<eos>", "<unk>", *"0123456789+="]
    assert tokenizer.convert_ids_to_tokens(list(range(16))) == tokens
    assert len(tokenizer) == 16


def test_a_sum_survives_the_round_trip() -> None:
    tokenizer = builtin_tokenizer()
    ids = tokenizer("47+85=132")["input_ids"]
    assert ids == [1, 8, 11, 14, 12, 9, 15, 5, 7, 6]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "47+85=132"


def test_short_prompts_are_padded_on_the_left() -> None:
    batch = builtin_tokenizer()(["1+1=", "1="], padding=True)
    assert batch["input_ids"] == [[1, 5, 14, 5, 15], [0, 0, 1, 5, 15]]
    assert batch["attention_mask"] == [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]]


def test_other_characters_are_unknown_one_by_one() -> None:
    assert builtin_tokenizer()("a 1\n")["input_ids"] == [1, 3, 3, 5, 3]


def test_the_heads_are_wide_enough_for_vllm() -> None:
    config = builtin_config()
    assert (config.head_dim, config.num_attention_heads, config.num_hidden_layers) == (32, 4, 2)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (16, 64, 256)


def test_the_learning_rate_rises_for_twenty_steps_then_follows_a_cosine() -> None:
    def factor(step: int) -> float:
        return schedule_factor("cosine", step, LR_WARMUP_STEPS, 1000)

    assert [factor(step) for step in (0, 9, 19, 20)] == [0.05, 0.5, 1.0, 1.0]
    assert factor(510) == pytest.approx(0.5)
    assert factor(999) == pytest.approx((1 + math.cos(math.pi * 979 / 980)) / 2)


def test_the_warm_up_loss_is_the_cross_entropy_of_the_completion_alone() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(builtin_config())
    ids = torch.tensor(builtin_tokenizer()(["47+85=132<eos>", "03+04=007<eos>"])["input_ids"])
    labels = ids.clone()
    labels[:, :7] = -100  # transformers shifts these by itself
    expected = model(input_ids=ids, labels=labels).loss
    torch.testing.assert_close(_completion_loss(model, ids[:, :7], ids[:, 7:]), expected)


def test_a_warm_up_of_no_steps_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="at least one step, got steps=0"):
        rebuild_base(tmp_path / "base", steps=0)
    assert not (tmp_path / "base").exists()
