"""A GGUF file is a model like any other, with the numbers that it holds; one that is not is refused before anything is
written."""

import fcntl
import hashlib
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from gruppo.cli.main import run as gruppo
from gruppo.errors import InputError
from gruppo.weights import gguf as ours
from gruppo.weights.source import end_tokens, load_model, load_tokenizer, resolve

gguf: Any = pytest.importorskip("gguf", reason="needs the package gguf")

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *(chr(code) for code in range(33, 127)), "Ġ", "Ċ", "Ġa"]
TEMPLATE = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HEADS, KEY_HEADS = 4, 2
SIZES = ("--steps", "1", "--prompts-per-step", "2", "--group-size", "2", "--max-new-tokens", "3", "--eval-prompts", "2")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    ours._folder_of.cache_clear()
    return tmp_path / "cache" / "gruppo" / "gguf"


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def as_llama_cpp(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries and keys in llama.cpp's order: it turns neighbours where transformers turns halves."""
    rows, columns = weight.shape
    return weight.view(heads, 2, rows // heads // 2, columns).transpose(1, 2).reshape(rows, columns)


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tensors(model: LlamaForCausalLM) -> dict[str, Tensor]:
    """The tensors of a model by llama.cpp's names."""
    made = {}
    for name, weight in model.state_dict().items():
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            part = rest.removesuffix(".weight")
            heads = {"attn_q": HEADS, "attn_k": KEY_HEADS}.get(NAMES[part])
            made[f"blk.{layer}.{NAMES[part]}.weight"] = weight if heads is None else as_llama_cpp(weight, heads)
        else:
            ends = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm"}
            made[f"{ends.get(name, 'output')}.weight"] = weight
    return made


def write(
    path: Path,
    weights: dict[str, Tensor],
    *,
    kind: str = "F32",
    architecture: str = "llama",
    tokens: list[str] | None = TOKENS,
) -> Path:
    """A GGUF file as llama.cpp's converter writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in {"block_count": 2, "context_length": 128, "embedding_length": 64}.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(TOKENS))
    if tokens is not None:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(tokens)
        writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
        writer.add_token_merges(["Ġ a"])
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_chat_template(TEMPLATE)
    for name, weight in weights.items():
        chosen = gguf.GGMLQuantizationType[kind if weight.dim() == 2 and weight.shape[1] % 32 == 0 else "F32"]
        writer.add_tensor(name, gguf.quantize(weight.numpy(), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_the_weights_of_a_float_file_are_those_of_the_model(tmp_path: Path) -> None:
    model = small_llama()
    file = write(tmp_path / "small.gguf", tensors(model))
    loaded = load_model(str(file), dtype=torch.float32)
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert all(torch.equal(weight, expected[name]) for name, weight in loaded.state_dict().items())
    ids = torch.tensor([[1, 9, 30, 77, 40, 12]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_eight_bits_are_made_whole_by_their_formula(tmp_path: Path) -> None:
    """Q8_0: 32 numbers share d = max |x| / 127, kept as float16, and are round(x / d) times it."""
    model = small_llama()
    file = write(tmp_path / "small.gguf", tensors(model), kind="Q8_0")
    loaded = load_model(str(file), dtype=torch.float32).state_dict()
    blocks = model.model.layers[1].mlp.up_proj.weight.detach().numpy().reshape(-1, 32)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    expected = np.round(blocks / scale) * scale.astype(np.float16).astype(np.float32)
    np.testing.assert_allclose(loaded["model.layers.1.mlp.up_proj.weight"].numpy().reshape(-1, 32), expected, atol=1e-7)
    norm = "model.layers.1.input_layernorm.weight"
    assert torch.equal(loaded[norm], model.state_dict()[norm])


def test_tokenizer_template_and_end_token_are_those_of_the_file(tmp_path: Path) -> None:
    file = str(write(tmp_path / "small.gguf", tensors(small_llama())))
    tokenizer = load_tokenizer(file)
    ids = tokenizer("ab a<|im_end|>", add_special_tokens=False)["input_ids"]
    assert ids == [TOKENS.index("a"), TOKENS.index("b"), TOKENS.index("Ġa"), 2]
    assert tokenizer.decode(ids) == "ab a<|im_end|>"
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert said == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert end_tokens(file, tokenizer) == {2}


def test_a_file_is_made_whole_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "small.gguf", tensors(small_llama()))
    folder = Path(resolve(str(file)))
    assert folder == cache / hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setattr(ours, "_convert", lambda *_: pytest.fail("made again"))
    ours._folder_of.cache_clear()
    assert Path(resolve(str(file))) == folder


def test_another_file_under_the_same_name_is_another_model(tmp_path: Path) -> None:
    model = small_llama()
    file = write(tmp_path / "small.gguf", tensors(model))
    first = resolve(str(file))
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    write(file, tensors(model))
    assert resolve(str(file)) != first
    assert load_model(str(file), dtype=torch.float32).model.norm.weight[0].item() == 2.0


def test_damaged_weights_in_the_cache_are_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path / "small.gguf", tensors(small_llama()))
    weights = Path(resolve(str(file))) / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    ours._folder_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        resolve(str(file))
    assert weights.read_bytes() == whole
    assert "its size or hash is not the manifest's; it is made again" in caplog.text


def test_processes_that_ask_at_the_same_time_get_one_folder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "small.gguf", tensors(small_llama()))
    both, waits, writes = threading.Barrier(2), threading.Event(), []
    commit, make = ours.commit_folder, ours._folder_of.__wrapped__
    model_of, alone = ours._model_of, threading.Lock()

    def model_alone(path: Path) -> Any:
        with alone:  # transformers patches itself while it loads, and two threads would leave the patch
            return model_of(path)

    def slow_commit(folder: Path, *others: Any) -> None:
        writes.append(folder)
        assert waits.wait(60)  # the other one stands before the lock
        commit(folder, *others)

    def ask() -> Path:
        both.wait(60)
        return make(file, 0, 0)

    monkeypatch.setattr(ours, "_model_of", model_alone)
    monkeypatch.setattr(ours, "commit_folder", slow_commit)
    monkeypatch.setattr("gruppo.weights.files.time.sleep", lambda seconds: waits.set())
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(ask), pool.submit(ask)
        assert first.result() == second.result()
    assert len(writes) == 1
    assert sorted(path.name for path in cache.iterdir()) == [".lock", first.result().name]


def test_a_lock_that_is_not_given_back_is_named(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "small.gguf", tensors(small_llama()))
    cache.mkdir(parents=True)
    monkeypatch.setattr(ours, "DEADLINE_S", 0.0)
    with (cache / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=r"\.lock has been locked for 0 seconds by another process"):
            resolve(str(file))
    assert resolve(str(file))


def cut_off(path: Path) -> Path:
    file = write(path, tensors(small_llama()))
    file.write_bytes(file.read_bytes()[:-5000])
    return file


def cut_in_the_header(path: Path) -> Path:
    file = write(path, tensors(small_llama()))
    file.write_bytes(file.read_bytes()[:700])
    return file


def not_a_gguf(path: Path) -> Path:
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    return path


def unknown_architecture(path: Path) -> Path:
    return write(path, tensors(small_llama()), architecture="quuxnet")


def unknown_quantisation(path: Path) -> Path:
    """A kind of tensor that nobody has written yet: 99."""
    file = write(path, tensors(small_llama()))
    name = b"blk.1.ffn_up.weight"
    content = bytearray(file.read_bytes())
    at = content.index(name) + len(name) + 4 + 2 * 8
    content[at : at + 4] = (99).to_bytes(4, "little")
    file.write_bytes(content)
    return file


def lacks_a_tensor(path: Path) -> Path:
    return write(path, {name: weight for name, weight in tensors(small_llama()).items() if "0.ffn_up" not in name})


def scaled_positions(path: Path) -> Path:
    return write(path, tensors(small_llama()) | {"rope_freqs.weight": torch.ones(8)})


def a_tensor_too_many(path: Path) -> Path:
    return write(path, tensors(small_llama()) | {"blk.0.attn_q.bias": torch.ones(64)})


TROUBLE = {
    cut_off: "is cut off or damaged: cannot reshape array of size",
    cut_in_the_header: "is cut off or damaged: ",
    not_a_gguf: "is not a GGUF file: it does not begin with the letters GGUF",
    unknown_architecture: "architecture 'quuxnet', which transformers does not take from a GGUF file",
    unknown_quantisation: "holds tensors in quantisation 99, which the installed package gguf does not know",
    lacks_a_tensor: "it lacks 1 tensors, the first model.layers.0.mlp.up_proj.weight",
    scaled_positions: "scales its positions by rope_freqs.weight",
    a_tensor_too_many: "it would be another model",
}


@pytest.mark.parametrize("trouble", TROUBLE, ids=lambda trouble: trouble.__name__)
def test_a_file_with_trouble_is_refused_by_name_and_nothing_is_written(
    trouble: Any, tmp_path: Path, cache: Path
) -> None:
    file = trouble(tmp_path / "bad.gguf")
    with pytest.raises(InputError) as refused:
        gruppo(["train", "--model", str(file), "--output", str(tmp_path / "run"), "--steps", "1"])
    assert str(refused.value).startswith(f"{file} ") and TROUBLE[trouble] in str(refused.value)
    assert not (tmp_path / "run").exists() and not cache.exists()


def test_a_file_without_a_tokenizer_takes_another(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", tensors(small_llama()))
    bare = write(tmp_path / "bare.gguf", tensors(small_llama()), tokens=None)
    load_tokenizer(str(whole)).save_pretrained(tmp_path / "tokenizer")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in range(20)))
    words = ["train", "--model", str(bare), "--data", str(data), "--output", str(tmp_path / "run"), *SIZES]
    with pytest.raises(InputError, match="holds no tokenizer; name the folder or hub id of one: --tokenizer FOLDER"):
        gruppo(words)
    assert gruppo([*words, "--tokenizer", str(tmp_path / "tokenizer")]) == 0
    saved = load_tokenizer(str(tmp_path / "run" / "model"))
    assert saved("ab a")["input_ids"] == load_tokenizer(str(whole))("ab a")["input_ids"]


def test_a_run_and_its_adapter_go_on_from_a_file(tmp_path: Path) -> None:
    file = write(tmp_path / "small.gguf", tensors(small_llama()), kind="Q8_0")
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{a}+1=", "answer": str(a + 1)}) + "\n" for a in range(20)))
    words = (
        f"--prompts-per-step 2 --group-size 2 --max-new-tokens 3 --eval-prompts 2 --threads 1 --output {tmp_path}/run"
    )
    words += f" --model {file} --data {data} --lora --lr 1e-2 --loss gspo"
    assert gruppo(["train", "--steps", "1", *words.split()]) == 0
    assert gruppo(["resume", str(tmp_path / "run"), "--steps", "2"]) == 0
    noted = json.loads((tmp_path / "run" / "model" / "adapter_config.json").read_text())
    assert noted["base_model_name_or_path"] == str(file)
    assert gruppo(["sample", "1+1=", "--run", str(tmp_path / "run"), "--max-new-tokens", "2"]) == 0


def test_the_package_that_reads_them_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "small.gguf", tensors(small_llama()))
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(Exception, match=r"pip install 'gruppo\[gguf\]'"):
        resolve(str(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*none\.gguf"):
        resolve(str(tmp_path / "none.gguf"))
