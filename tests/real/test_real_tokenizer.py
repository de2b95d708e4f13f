"""The tokenizer of a GGUF file: 49 thousand tokens, a chat template, an end token; text comes back as it was."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.task import load_prompts
from gruppo.turns.chat import ChatCodec
from gruppo.weights.source import end_tokens, load_tokenizer

TEXTS = (
    "76 + 25 = 101",
    "  two  spaces,\ttab\nand\n\nlines \n",
    "def f(x):\n    return {'a': x ** 2}  # ok?",
    "naïve café — “quotes” … ½ ≤ √2",
    "数学の問題 и ответ ، الجواب",
    "👩‍👩‍👧 🙂 \u200b\ufeff",
)


def test_the_template_is_the_one_in_the_file(smollm2_folder: str) -> None:
    rows = [{"prompt": [{"role": "user", "content": "What is 76 + 25?"}], "answer": "101"}]
    prompt = load_prompts(rows, load_tokenizer(smollm2_folder)).prompts[0]
    assert prompt.text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 76 + 25?<|im_end|>\n<|im_start|>assistant\n"
    )
    # Each mark is one token of its own: 1 begins and 2 ends a turn.
    assert [i for i in prompt.token_ids if i < 3] == [1, 2, 1, 2, 1]


def test_a_turn_ends_with_the_end_token_and_not_with_the_token_of_documents(smollm2_folder: str) -> None:
    tokenizer = load_tokenizer(smollm2_folder)
    assert (end_tokens(smollm2_folder, tokenizer), tokenizer.convert_tokens_to_ids("<|im_end|>")) == ({2}, 2)
    assert len(tokenizer) == 49152


@pytest.mark.parametrize("text", TEXTS)
def test_text_comes_back_as_it_was(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert min(ids) > 2


def test_a_completion_stops_at_its_end_token_and_its_text_is_without_it(smollm2_folder: str) -> None:
    model = TransformersModel(smollm2_folder, dtype="float32", device="cpu")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = model.tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=False)
    drawn = TorchSampler(model).sample([chat], 1, SamplingParams(temperature=0.0, max_new_tokens=40))[0].sequences[0]
    assert (drawn.stop_reason, drawn.text) == ("stop", "The capital of France is Paris.")
    assert drawn.tokens[-1] == 2 and 2 not in drawn.tokens[:-1]


@pytest.mark.parametrize("role", ["user", "tool"])
def test_the_piece_between_two_turns_is_the_slice_of_a_whole_render(
    role: Any, tokenizer: PreTrainedTokenizerBase
) -> None:
    codec = ChatCodec(tokenizer, [2, 0])
    codec.check(role)
    assert codec.keeps(role, thinks=False)
    for said in TEXTS:
        for answered in TEXTS:
            tail: Any = [{"role": role, "content": answered}]
            messages = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": said}, *tail]
            whole = codec.first(messages)[0]
            end = [place for place, token in enumerate(whole) if token == 2][
                2
            ]  # of the system, the user, the assistant
            assert codec.between(2, tail) == whole[end + 1 :]
            assert codec.between(0, tail) == whole[end + 1 :]
            assert codec.between(None, tail) == whole[end:]
