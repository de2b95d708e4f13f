"""Models whose weights are read from their files after they were made: as transformers loads them, or refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, OTHER_FAMILIES, tiny_model
from transformers import AutoModelForCausalLM

from gruppo.model import LoraSpec
from gruppo.model.lora import add_lora
from gruppo.model.shards import read_weights
from gruppo.weights.meta_load import NotByRows, load_on_meta

RENAMED = {
    "gpt_neox": "nothing for lm_head.weight",
    "qwen3_moe": "nothing for model.layers.0.mlp.experts.gate_up_proj",
    "qwen3_next": "nothing for model.layers.0.mlp.experts.gate_up_proj",
    "nemotron_h": "nothing for model.embeddings.weight",
}
"""Families that transformers saves under other names, or in other pieces, than it has in memory."""


def in_folder(folder: Path, family: str) -> Path:
    tiny_model(family).save_pretrained(folder)
    return folder


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    for kind in ("named_parameters", "named_buffers"):
        first, second = dict(getattr(one, kind)()), dict(getattr(other, kind)())
        assert first.keys() == second.keys()
        assert not [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]


@pytest.mark.parametrize("family", [*FAMILIES, *OTHER_FAMILIES])
def test_every_family_is_as_transformers_loads_it_or_is_refused(family: str, tmp_path: Path) -> None:
    folder = in_folder(tmp_path, family)
    if family in RENAMED:
        with pytest.raises(NotByRows, match=RENAMED[family]):
            load_on_meta(str(folder), dtype=torch.float32)
        return
    model, files = load_on_meta(str(folder), dtype=torch.float32)
    assert all(parameter.is_meta for parameter in model.parameters())
    read_weights(model, files, torch.device("cpu"))
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert_same(model, expected)
    tokens = torch.arange(1, 12)[None]
    with torch.no_grad():
        logits, own = (m(input_ids=tokens, use_cache=False).logits for m in (expected, model))
    assert torch.equal(logits, own)
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()


def test_weights_in_half_precision_become_float32(tmp_path: Path) -> None:
    tiny_model("llama").bfloat16().save_pretrained(tmp_path)
    model, files = load_on_meta(str(tmp_path), dtype=torch.float32)
    read_weights(model, files, torch.device("cpu"))
    assert_same(model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32))


def test_a_tied_weight_that_is_there_twice_is_left_to_transformers(tmp_path: Path) -> None:
    file = in_folder(tmp_path, "qwen3") / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file, {"format": "pt"})
    with pytest.raises(NotByRows, match=r"lm_head.weight, which is tied to another weight"):
        load_on_meta(str(tmp_path), dtype=torch.float32)


def test_a_weight_that_is_missing_is_left_to_transformers(tmp_path: Path) -> None:
    file = in_folder(tmp_path, "llama") / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(NotByRows, match=r"nothing for model\.norm\.weight"):
        load_on_meta(str(tmp_path), dtype=torch.float32)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_adapter_on_weights_to_come_is_the_one_of_its_seed(family: str, tmp_path: Path) -> None:
    folder = in_folder(tmp_path, family)
    spec = LoraSpec(rank=3, seed=5)
    base, files = load_on_meta(str(folder), dtype=torch.float32)
    model = add_lora(base, spec)
    assert {p.is_meta for n, p in model.named_parameters() if "lora_" in n} == {False}
    read_weights(model, files, torch.device("cpu"))
    expected = add_lora(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), spec)
    assert_same(model, expected)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in expected.parameters()]
