"""The calculator task: its rows, its tool, its demonstrator, and the tokenizer and template of its chat model."""

import inspect
import json
import math
import re
from typing import Any, get_type_hints

import pytest
import torch
from transformers import Qwen3ForCausalLM

from gruppo.reward import RewardScorer
from gruppo.task import calculator
from gruppo.task.builtin_chat import _turn_loss, chat_config, chat_tokenizer
from gruppo.task.sources import default_reward, resolve_source

QUESTION: Any = {"role": "user", "content": "37*48="}
CALL: Any = {"role": "assistant", "content": "", "tool_calls": [calculator.call(37, 48)]}
RESULT: Any = {"role": "tool", "name": "multiply", "content": "1776"}
ANSWER: Any = {"role": "assistant", "content": "1776"}

FIRST_IDS = [2, 5, 15, 35, 39, 26, 36, 40, 45, 3, 15, 2, 6, 15]
CALL_IDS = [8, 15, 12, 35, 39, 13, 36, 40, 14, 15, 9, 3]
BETWEEN_IDS = [15, 2, 5, 15, 10, 15, 33, 39, 39, 38, 15, 11, 3, 15, 2, 6, 15]
ANSWER_IDS = [33, 39, 39, 38, 3]


def numbers(row: dict[str, Any]) -> tuple[int, int]:
    a, b = re.findall(r"\d+", row["prompt"][0]["content"])
    return int(a), int(b)


def test_the_splits_part_the_products_of_the_numbers_from_11_to_99() -> None:
    train, held_out = calculator.calculator_rows("train"), calculator.calculator_rows("heldout")
    assert (len(train), len(held_out)) == (7409, 512)
    assert sorted(map(numbers, train + held_out)) == [(a, b) for a in range(11, 100) for b in range(11, 100)]
    assert all(row["answer"] == str(math.prod(numbers(row))) for row in train + held_out)


def test_the_held_out_products_never_change() -> None:
    asked = [row["prompt"][0]["content"] for row in calculator.calculator_rows("heldout")[:3]]
    assert asked == ["80*83=", "71*63=", "61*47="]


def test_the_task_goes_by_name_and_is_scored_by_the_exact_answer() -> None:
    rows = resolve_source("builtin:calculator?split=heldout")
    assert rows[0] == {"prompt": [{"role": "user", "content": "80*83="}], "answer": "6640"}
    assert len(resolve_source("builtin:calculator")) == 7409
    with RewardScorer([default_reward("builtin:calculator")]) as scorer:
        result = scorer.score([rows[0]["prompt"]] * 3, ["6640", "8083", "6640."], columns={"answer": ["6640"] * 3})
    assert result.totals == [1.0, 0.0, 0.0]


def test_the_tool_multiplies_and_can_be_described_to_a_model() -> None:
    from transformers.utils import get_json_schema

    assert calculator.multiply(37, 48) == 1776
    assert get_type_hints(calculator.multiply) == {"a": int, "b": int, "return": int}
    described = get_json_schema(calculator.multiply)["function"]
    assert described["description"] == "Multiply two whole numbers."
    assert described["parameters"]["properties"] == {
        "a": {"type": "integer", "description": "The first number."},
        "b": {"type": "integer", "description": "The second number."},
    }
    assert list(inspect.signature(calculator.multiply).parameters) == ["a", "b"]


def test_the_demonstrator_calls_one_time_in_four_and_copies_every_other_result() -> None:
    stream = calculator.demonstrations(seed=0)
    drawn: list[Any] = [next(stream) for _ in range(20_000)]
    held_out = {numbers(row) for row in calculator.calculator_rows("heldout")}
    calls = copies = 0
    for turns in drawn:
        a, b = numbers({"prompt": turns})
        assert (a, b) not in held_out
        answer = turns[-1]["content"]
        if len(turns) == 2:
            assert answer == f"{a}{b}"
            continue
        assert [turn["role"] for turn in turns] == ["user", "assistant", "tool", "assistant"]
        assert turns[1]["tool_calls"][0]["function"]["arguments"] == {"a": a, "b": b}
        assert turns[2]["content"] == str(a * b)
        assert answer in (f"{a}{b}", str(a * b))
        calls, copies = calls + 1, copies + (answer == str(a * b))
    # Within 4 standard deviations.
    assert calls / 20_000 == pytest.approx(0.25, abs=4 * math.sqrt(0.25 * 0.75 / 20_000))
    assert copies / calls == pytest.approx(0.5, abs=4 * math.sqrt(0.25 / calls))


def test_a_conversation_with_a_call_has_these_ids() -> None:
    tokenizer = chat_tokenizer()
    ids = tokenizer.apply_chat_template([QUESTION, CALL, RESULT, ANSWER], return_dict=False)
    assert ids == FIRST_IDS + CALL_IDS + BETWEEN_IDS + ANSWER_IDS + [15]
    assert tokenizer.apply_chat_template([QUESTION], add_generation_prompt=True, return_dict=False) == FIRST_IDS
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\n37*48=<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "multiply", "arguments": {"a": 37, "b": 48}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1776\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n1776<|im_end|>\n"
    )


def test_a_call_is_json_between_its_tags_also_where_special_tokens_are_left_out() -> None:
    text: Any = chat_tokenizer().decode(CALL_IDS, skip_special_tokens=True)
    body = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")
    assert json.loads(body) == {"name": "multiply", "arguments": {"a": 37, "b": 48}}


def test_results_of_several_calls_stand_in_one_block_as_in_qwen() -> None:
    twice: Any = {"role": "assistant", "content": "both", "tool_calls": [calculator.call(1, 2), calculator.call(3, 4)]}
    text = chat_tokenizer().apply_chat_template([QUESTION, twice, RESULT, RESULT], tokenize=False)
    response = "\n<tool_response>\n1776\n</tool_response>"
    call = '<tool_call>\n{{"name": "multiply", "arguments": {{"a": {}, "b": {}}}}}\n</tool_call>'
    assert text == (
        f"<|im_start|>user\n37*48=<|im_end|>\n<|im_start|>assistant\nboth\n{call.format(1, 2)}\n{call.format(3, 4)}"
        f"<|im_end|>\n<|im_start|>user{response}{response}<|im_end|>\n"
    )


def test_arguments_given_as_json_text_are_written_as_they_are() -> None:
    told: Any = {"type": "function", "function": {"name": "multiply", "arguments": '{"a": 37, "b": 48}'}}
    render = chat_tokenizer().apply_chat_template
    assert render([QUESTION, CALL | {"tool_calls": [told]}], tokenize=False) == render([QUESTION, CALL], tokenize=False)


def test_the_chat_tokenizer_has_an_id_for_every_character_that_can_be_typed() -> None:
    tokenizer = chat_tokenizer()
    assert len(tokenizer) == chat_config().vocab_size == 4 + 4 + 4 + 3 + 96
    typed = "".join(map(chr, range(32, 127))) + "\n"
    ids = tokenizer(typed)["input_ids"]
    assert ids == [*range(16, 111), 15]
    assert tokenizer.decode(ids) == typed
    assert tokenizer("aé1")["input_ids"] == [81, 1, 33]
    assert tokenizer(["1", "11"], padding=True)["input_ids"] == [[0, 33], [33, 33]]


def test_the_warm_up_loss_is_the_cross_entropy_of_the_assistants_tokens_alone() -> None:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(chat_config())
    long = FIRST_IDS + CALL_IDS + BETWEEN_IDS + ANSWER_IDS
    short = [*FIRST_IDS, 35, 39, 36, 40, 3]  # "3748"
    own = [*range(14, 26), *range(43, 48)], [*range(14, 19)]
    surprise = []
    for ids, places in zip((long, short), own, strict=True):
        logps = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
        surprise += [-logps[place - 1, ids[place]] for place in places]
    loss = _turn_loss(
        model,
        chat_tokenizer(),
        [[QUESTION, CALL, RESULT, ANSWER], [QUESTION, {"role": "assistant", "content": "3748"}]],
    )
    torch.testing.assert_close(loss, torch.stack(surprise).mean())
