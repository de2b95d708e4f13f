"""The shipped base model: what it is, what it can do, and that its recipe repeats to the bit."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3ForCausalLM

from gruppo.task.builtin import builtin_config, builtin_model_path, builtin_tokenizer, greedy_accuracy, rebuild_base
from gruppo.task.carries import MAX_NEW_TOKENS, carries_rows


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


def test_the_base_is_a_small_qwen3(base: Any) -> None:
    assert type(base) is Qwen3ForCausalLM
    assert base.config.head_dim == 32
    # Per layer: q, k, v, o 64x128 each, feed-forward 3 x 64x256, norms 2x64 + 2x32. Then embedding, head, last norm.
    layer = 4 * 64 * 128 + 3 * 64 * 256 + 2 * 64 + 2 * 32
    assert sum(parameter.numel() for parameter in base.parameters()) == 2 * layer + 2 * 16 * 64 + 64 == 166_336


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


def test_the_shipped_tokenizer_and_config_are_those_of_the_code(base: Any, tokenizer: Any) -> None:
    assert tokenizer.get_vocab() == builtin_tokenizer().get_vocab()
    assert tokenizer("47+85=132")["input_ids"] == builtin_tokenizer()("47+85=132")["input_ids"]
    assert tokenizer.padding_side == "left"
    ours, shipped = builtin_config().to_dict(), base.config.to_dict()
    volatile = ("dtype", "architectures", "transformers_version", "_name_or_path")
    assert {k: v for k, v in ours.items() if k not in volatile} == {
        k: v for k, v in shipped.items() if k not in volatile
    }


def test_the_shipped_files_are_few_small_and_without_paths() -> None:
    files = sorted(path.name for path in builtin_model_path().iterdir())
    assert files == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert sum((builtin_model_path() / name).stat().st_size for name in files) < 400_000
    for name in files:
        if name.endswith(".json"):
            text = (builtin_model_path() / name).read_text(encoding="utf-8")
            assert not re.search(r"/(home|root|tmp|work|Users|mnt)\b|@", text), name
    with safe_open(builtin_model_path() / "model.safetensors", framework="pt") as weights:
        assert weights.metadata() == {"format": "pt"}
        assert {weights.get_tensor(name).dtype for name in weights.keys()} == {torch.bfloat16}  # noqa: SIM118


def test_the_warm_up_repeats_to_the_bit_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    lines: list[str] = []
    first = rebuild_base(tmp_path / "a", seed=3, steps=12, log=lines.append)
    assert torch.equal(torch.rand(1), expected)
    second = rebuild_base(tmp_path / "b", seed=3, steps=12)
    other = rebuild_base(tmp_path / "c", seed=4, steps=12)
    contents = [(folder / "model.safetensors").read_bytes() for folder in (first, second, other)]
    assert contents[0] == contents[1] != contents[2]
    assert lines[0].startswith("warm-up step 12/12: loss ") and lines[1].startswith("greedy accuracy on held-out")
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()
