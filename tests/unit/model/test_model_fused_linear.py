"""Layers of one input as one product: the same numbers, the same parameters, no second copy."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gruppo.model.fused_linear import joined_products, side_by_side

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 24}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=16)),
    "qwen2, with a bias": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=4)),
    "adapter": lambda: get_peft_model(
        MODELS["qwen3"](), LoraConfig(target_modules="all-linear", init_lora_weights=False)
    ),
}
IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for parameter in model.parameters():  # a bias begins at 0, which would hide it
        nn.init.normal_(parameter, std=0.2)
    return model


def base(model: nn.Module) -> nn.Module:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def num_products(model: nn.Module) -> list[int]:
    """Products in each graph that the compiler makes of the blocks."""
    found = []

    def count(graph, inputs):
        found.append(sum("mm" in str(node.target) for node in graph.graph.nodes))
        return graph

    blocks = base(model).model.layers
    forward = torch.compile(type(blocks[0]).forward, backend=aot_autograd(fw_compiler=count), dynamic=True)
    x = torch.randn(4, 1, 32)
    places = base(model).model.rotary_emb(x, torch.arange(4)[:, None])
    with torch.inference_mode():
        for _ in range(2):
            for block in blocks:
                forward(block, x, position_embeddings=places)
    torch._dynamo.reset()
    return found


@pytest.mark.parametrize("name", MODELS)
def test_joined_products_give_the_same_numbers(name: str) -> None:
    model = made(name)
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode():
        expected = model(input_ids=IDS).logits
        with joined_products(base(model)):
            found = model(input_ids=IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[key], before[key]) for key in before)
    assert not any(hasattr(module, "product") for module in model.modules())


@pytest.mark.parametrize(
    ("name", "expected"), [("qwen3", ([7], [4])), pytest.param("adapter", ([21], [18]), marks=pytest.mark.long)]
)
def test_all_blocks_compile_to_one_graph_of_fewer_products(name: str, expected: tuple[list[int], list[int]]) -> None:
    """q, k, v, o, gate, up, down: three less; an adapter adds two products to each."""
    model = made(name)
    plain = num_products(model)
    with torch.inference_mode(), joined_products(base(model)):
        joined = num_products(model)
    assert (plain, joined) == expected


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_parameters_are_parts_of_one_memory_and_train_as_before(kind: str) -> None:
    model, other = made("qwen2, with a bias"), made("qwen2, with a bias")
    with torch.inference_mode(), joined_products(model):
        model(input_ids=IDS)
    attention = model.model.layers[0].self_attn
    layers = [attention.q_proj, attention.k_proj, attention.v_proj]
    whole = side_by_side([getattr(layer, kind) for layer in layers])
    key = getattr(attention.k_proj, kind)
    assert whole.data_ptr() == getattr(attention.q_proj, kind).data_ptr()  # made once
    assert torch.equal(whole[32:48], key) and len(whole) == 64
    for each in (model, other):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(input_ids=IDS, labels=IDS).loss.backward()
        optimizer.step()
    assert torch.equal(whole[32:48], key)  # a graph that reads the whole reads the new weights
    for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two) and torch.equal(one.grad, two.grad), name


def test_saved_weights_are_those_of_the_layers(tmp_path) -> None:
    model = made("qwen3")
    with torch.inference_mode(), joined_products(model):
        model(input_ids=IDS)
    model.save_pretrained(tmp_path)
    again = Qwen3ForCausalLM.from_pretrained(tmp_path)
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert size < 1.1 * sum(p.nbytes for p in model.parameters()) + 4096


def test_a_layer_that_reads_something_else_computes_its_own() -> None:
    model = made("llama")
    mlp = model.model.layers[0].mlp
    one, two = torch.randn(2, 5, 32)
    with torch.inference_mode():
        expected = mlp.gate_proj(one), mlp.up_proj(two)
        with joined_products(model):
            found = mlp.gate_proj(one), mlp.up_proj(two)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
