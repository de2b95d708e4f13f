"""The shipped base models: what they are, what they can do, and that their recipes repeat to the bit."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from gruppo.model import TransformersModel
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.task import load_prompts
from gruppo.task.builtin import builtin_config, builtin_model_path, builtin_tokenizer, greedy_accuracy, rebuild_base
from gruppo.task.builtin_chat import chat_config, chat_tokenizer, rebuild_chat_base
from gruppo.task.calculator import calculator_rows
from gruppo.task.carries import MAX_NEW_TOKENS, carries_rows

both = pytest.mark.parametrize("name", ["builtin", "builtin-chat"])
CONFIGS = {"builtin": builtin_config, "builtin-chat": chat_config}
TOKENIZERS = {"builtin": builtin_tokenizer, "builtin-chat": chat_tokenizer}
REBUILDS = {"builtin": rebuild_base, "builtin-chat": rebuild_chat_base}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base() -> Any:
    return AutoModelForCausalLM.from_pretrained(builtin_model_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(builtin_model_path())


@both
def test_the_base_is_a_small_qwen3(name: str) -> None:
    model = TransformersModel(name).model
    assert type(model) is Qwen3ForCausalLM
    assert model.config.head_dim == 32
    # Per layer: q, k, v, o 64x128 each, feed-forward 3 x 64x256, norms 2x64 + 2x32. Then embedding, head, last norm.
    layer = 4 * 64 * 128 + 3 * 64 * 256 + 2 * 64 + 2 * 32
    vocabulary, total = {"builtin": (16, 166_336), "builtin-chat": (111, 178_496)}[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == 2 * layer + 2 * vocabulary * 64 + 64 == total


def test_the_base_solves_the_sums_without_carries_and_little_else(base: Any, tokenizer: Any) -> None:
    rows = carries_rows("heldout")
    accuracy = greedy_accuracy(base, tokenizer, rows)
    assert 0.2 < accuracy < 0.4
    # Independent of our loop: transformers' own generate, with its cache.
    ids = torch.tensor(tokenizer([row["prompt"] for row in rows])["input_ids"])
    mask = torch.ones_like(ids)
    out = base.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=MAX_NEW_TOKENS)
    texts = tokenizer.batch_decode(out[:, ids.shape[1] :], skip_special_tokens=True)
    assert sum(text == row["answer"] for text, row in zip(texts, rows, strict=True)) / 512 == accuracy


def test_the_right_answer_is_within_reach_of_sampling(base: Any, tokenizer: Any) -> None:
    # The demonstrator is right one time in four where it matters, so the base should give that answer about as often.
    ids = torch.tensor(tokenizer(["47+85=132<eos>", "68+59=127<eos>", "99+01=100<eos>"])["input_ids"])
    with torch.no_grad():
        logps = base(input_ids=ids).logits.log_softmax(-1)
    chosen = logps[:, 6:-1].gather(2, ids[:, 7:, None]).sum(dim=(1, 2)).exp()
    assert all(0.05 < probability < 0.6 for probability in chosen.tolist())


def test_the_chat_base_answers_every_product_with_the_two_numbers() -> None:
    rows = calculator_rows("heldout")
    sampler = TorchSampler("builtin-chat")
    prompts = load_prompts(rows, sampler.tokenizer).prompts
    responses = sampler.sample(prompts, 1, SamplingParams(temperature=0.0, max_new_tokens=16))
    texts = [response.sequences[0].text for response in responses]
    asked = [row["prompt"][0]["content"] for row in rows]
    habit = [text == question[:2] + question[3:5] for text, question in zip(texts, asked, strict=True)]
    assert sum(habit) / 512 > 0.9
    # Independent of the sampler: the loop of the warm-up.
    model = AutoModelForCausalLM.from_pretrained(builtin_model_path("builtin-chat"), dtype=torch.float32).eval()
    assert greedy_accuracy(model, sampler.tokenizer, rows) == 0.0
    right = [text == row["answer"] for text, row in zip(texts, rows, strict=True)]
    assert not any(right)


def test_the_chat_base_calls_the_tool_with_the_right_numbers_about_one_time_in_four() -> None:
    rows = calculator_rows("heldout")
    sampler = TorchSampler("builtin-chat")
    prompts = load_prompts(rows, sampler.tokenizer).prompts
    calls = right = 0
    for prompt, response in zip(prompts, sampler.sample(prompts, 4, SamplingParams(max_new_tokens=16)), strict=True):
        numbers = re.findall(r"\d+", prompt.source[0]["content"])
        for text in (sequence.text for sequence in response.sequences):
            calls += "<tool_call>" in text
            right += re.findall(r'"[ab]": (\d+)', text) == numbers
    # 2,048 draws at 0.25 have a standard error of 0.0096.
    assert 0.2 < calls / 2048 < 0.3
    assert right / calls > 0.8


@both
def test_the_shipped_tokenizer_and_config_are_those_of_the_code(name: str) -> None:
    tokenizer, own = AutoTokenizer.from_pretrained(builtin_model_path(name)), TOKENIZERS[name]()
    assert tokenizer.get_vocab() == own.get_vocab()
    assert tokenizer("47+85=132<tool_call>")["input_ids"] == own("47+85=132<tool_call>")["input_ids"]
    assert tokenizer.all_special_ids == own.all_special_ids
    assert tokenizer.chat_template == own.chat_template
    assert tokenizer.padding_side == "left"
    config = AutoConfig.from_pretrained(builtin_model_path(name))
    ours, shipped = CONFIGS[name]().to_dict(), config.to_dict()
    volatile = ("dtype", "architectures", "transformers_version", "_name_or_path")
    assert {k: v for k, v in ours.items() if k not in volatile} == {
        k: v for k, v in shipped.items() if k not in volatile
    }


@both
def test_the_shipped_files_are_few_small_and_without_paths(name: str) -> None:
    folder = builtin_model_path(name)
    files = sorted(path.name for path in folder.iterdir())
    assert files == [
        *(["chat_template.jinja"] if name == "builtin-chat" else []),
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sum((folder / file).stat().st_size for file in files) < 400_000
    for file in files:
        if file != "model.safetensors":
            text = (folder / file).read_text(encoding="utf-8")
            assert not re.search(r"/(home|root|tmp|work|Users|mnt)\b|\w@\w", text), file
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        assert weights.metadata() == {"format": "pt"}
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118


@both
def test_the_warm_up_repeats_to_the_bit_and_leaves_the_random_state_alone(name: str, tmp_path: Path) -> None:
    rebuild = REBUILDS[name]
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    lines: list[str] = []
    first = rebuild(tmp_path / "a", seed=3, steps=6, log=lines.append)
    assert torch.equal(torch.rand(1), expected)
    second = rebuild(tmp_path / "b", seed=3, steps=6)
    other = rebuild(tmp_path / "c", seed=4, steps=6)
    contents = [(folder / "model.safetensors").read_bytes() for folder in (first, second, other)]
    assert contents[0] == contents[1] != contents[2]
    assert lines[0].startswith("warm-up step 6/6: loss ") and lines[1].startswith("greedy accuracy on held-out")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
