"""Adapters with modules that train whole, on bases in full precision and in 4 bits; names that no layer has."""

import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import (
    actor,
    gradients,
    largest_gap,
    logps_one_by_one,
    perturb_adapter,
    random_features,
    tiny_model,
)
from transformers import AutoModelForCausalLM

from gruppo.cli.main import run as gruppo
from gruppo.errors import InputError, MissingExtraError
from gruppo.loss import GRPOLoss
from gruppo.model import LoraSpec, TransformersModel
from gruppo.model.checkpoint import load_training_state, save_training_state
from gruppo.sampler import SamplingParams, TorchSampler
from gruppo.sampler.vllm.engine import engine_arguments
from gruppo.task.builtin import builtin_model_path
from gruppo.trainer import TrainConfig
from gruppo.weights import WeightStore
from gruppo.weights.canary import canary_rows
from gruppo.weights.source import load_tokenizer

FEATURES = random_features(seed=2)
ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 2.0, -2.0]
IDS = torch.tensor([[5, 9, 4, 17, 30, 6]])
HEAD = LoraSpec(rank=2, modules_to_save=("lm_head",))
WHOLE = "base_model.model.lm_head.modules_to_save.default.weight"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def step(model: TransformersModel, lr: float = 1e-2) -> None:
    model.set_optimizer("AdamW", lr=lr)
    model.forward_backward(FEATURES, advantages=ADVANTAGES)
    model.clip_grad_and_step()


# --- modules that train whole -----------------------------------------------------------------------------------------


def test_a_whole_module_gets_the_gradient_that_it_has_without_an_adapter() -> None:
    spec = LoraSpec(rank=2, targets=("q_proj",), modules_to_save=("lm_head", "down_proj"))
    adapted, full = actor(lora=spec), actor()
    for model in (adapted, full):
        model.forward_backward(FEATURES, advantages=ADVANTAGES)
    got, expected = gradients(adapted.model), gradients(full.model)
    for name in ("lm_head", "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"):
        torch.testing.assert_close(
            got[f"base_model.model.{name}.modules_to_save.default.weight"], expected[f"{name}.weight"]
        )
    assert {n for n in got if "lora_" not in n} == {
        WHOLE,
        *(f"base_model.model.model.layers.{i}.mlp.down_proj.modules_to_save.default.weight" for i in range(2)),
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_base_and_costs_no_copy(dtype: Any) -> None:
    model = actor(lora=HEAD, dtype=dtype)
    start = model.forward_only(FEATURES)["logps"]
    model.set_loss(GRPOLoss(beta=0.1))
    assert model.reference().state() == {}
    step(model)
    assert largest_gap(model.reference_logps(FEATURES), start) == 0
    assert largest_gap(model.forward_only(FEATURES)["logps"], start) > 0.1
    assert model.model.get_parameter(WHOLE).requires_grad


def test_the_reference_of_a_trained_whole_module_is_its_start(tmp_path: Path) -> None:
    model = actor(lora=HEAD)
    with torch.no_grad():  # as of an adapter that goes on: factors at zero, the head is not the base's
        model.model.get_parameter(WHOLE).mul_(1.5)
    start = model.forward_only(FEATURES)["logps"]
    assert model.reference().state().keys() == {*model.weights.names}
    step(model)
    assert largest_gap(model.reference_logps(FEATURES), start) == 0


def test_whole_modules_have_masters_and_resume_to_the_bit(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    options: dict[str, Any] = {"tokenizer": load_tokenizer("builtin"), "dtype": "bfloat16", "device": "cpu"}
    model, other = (TransformersModel(str(tmp_path / "base"), lora=HEAD, **options) for _ in range(2))
    assert {p.dtype for p in model.model.parameters()} == {torch.bfloat16}
    assert model.weights.named()[WHOLE].dtype == torch.float32
    step(model, lr=1e-5)  # far below what bf16 can hold
    save_training_state(model.weights, model.optimizer, tmp_path)
    assert {n for n in load_file(tmp_path / "weights.safetensors") if "lora_" not in n} == {WHOLE}
    load_training_state(other.weights, other.optimizer, tmp_path)
    for each in (model, other):
        each.forward_backward(FEATURES, advantages=ADVANTAGES)
        each.clip_grad_and_step()
    assert all(torch.equal(a, b) for a, b in zip(model.weights.parameters, other.weights.parameters, strict=True))


def test_a_saved_whole_module_opens_in_peft_in_gruppo_and_merged(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    spec = LoraSpec(rank=2, modules_to_save=("lm_head", "embed_tokens"))
    model = TransformersModel(base, tokenizer=load_tokenizer("builtin"), lora=spec, device="cpu")
    step(model)
    expected = logits(model.model)
    model.save(tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert (logits(plain) - expected).abs().max() > 0.1
    assert torch.equal(logits(PeftModel.from_pretrained(plain, tmp_path / "adapter")), expected)
    again = TransformersModel(str(tmp_path / "adapter"), device="cpu")
    assert again.lora is not None and set(again.lora.modules_to_save) == {"lm_head", "embed_tokens"}
    assert torch.equal(logits(again.model), expected) and set(again.weights.names) == set(model.weights.names)
    assert gruppo(["export", str(tmp_path / "adapter"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (logits(merged) - expected).abs().max() < 1e-5
    trained = dict(model.weights.named())[WHOLE]
    assert torch.equal(load_file(tmp_path / "merged" / "model.safetensors")["lm_head.weight"], trained)


def test_vllm_takes_no_whole_modules() -> None:
    options: dict[str, Any] = {"model": str(builtin_model_path()), "dtype": "float32", "max_model_len": 8}
    with pytest.raises(InputError, match=r"modules_to_save=\['lm_head'\]: vLLM takes adapters without whole modules"):
        engine_arguments(**options, lora=HEAD)
    with pytest.raises(InputError, match=r"lora_modules_to_save=\['lm_head'\] cannot go with sampler='vllm'"):
        TrainConfig.read({"lora": True, "lora_modules_to_save": ["lm_head"], "sampler": "vllm"})


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family, spec, told", [
    ("llama", LoraSpec(targets=("q_projj",)), r"'q_projj': .* \(did you mean 'q_proj'\?\); it has down_proj"),
    ("llama", LoraSpec(targets=("q_proj", "v_projj")), r"lora targets 'v_projj': .* \(did you mean 'v_proj'\?\)"),
    ("llama", LoraSpec(modules_to_save=("lm_haed",)), r"modules_to_save 'lm_haed': .* \(did you mean 'lm_head'\?\)"),
    ("qwen3", HEAD, r"lora modules_to_save names 'lm_head', and the model has one matrix .*Leave it out"),
    ("qwen3", LoraSpec(modules_to_save=("embed_tokens",)), "names 'embed_tokens', and the model has one matrix"),
    ("qwen3", LoraSpec(targets=("q_proj", "lm_head")), "lora targets names 'lm_head', and the model has one matrix"),
    ("mamba", LoraSpec(), r"lora targets all-linear cannot be adapted: .*'out_proj'.*Name others; .* dt_proj, in_proj"),
])  # fmt: skip
def test_layers_that_cannot_be_adapted_are_named(family: str, spec: LoraSpec, told: str) -> None:
    with pytest.raises(InputError, match=told):
        actor(family, lora=spec)


def test_mamba_trains_on_the_layers_that_the_error_leaves() -> None:
    model = actor("mamba", lora=LoraSpec(rank=2, targets=("in_proj", "x_proj")))
    step(model)
    assert {name.split(".")[-4] for name in model.weights.names} == {"in_proj", "x_proj"}


# --- a base in 4 bits -------------------------------------------------------------------------------------------------

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="needs bitsandbytes: pip install 'gruppo[qlora]', or make test-install"
)


@pytest.fixture
def base(tmp_path: Path) -> str:
    """A model of 64 hidden states: NF4 has a scale per 64 weights."""
    tiny_model("llama", hidden_size=64, intermediate_size=96).save_pretrained(tmp_path / "base")
    return str(tmp_path / "base")


def quantized(base: str, **options: Any) -> TransformersModel:
    options = {"lora": LoraSpec(rank=2), "dtype": "float32"} | options
    model = TransformersModel(base, tokenizer=load_tokenizer("builtin"), quantize="nf4", device="cpu", **options)
    with model.weights.in_full():
        perturb_adapter(model.model)
    return model


def dequantized(base: str, model: TransformersModel) -> TransformersModel:
    """The same adapter on plain float32 weights: what bitsandbytes gives for each 4-bit weight, read one by one."""
    from bitsandbytes.functional import dequantize_4bit

    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    for name, module in model.logp_model.base.named_modules():
        weight = getattr(module, "weight", None)
        if hasattr(weight, "quant_state"):
            own = plain.get_submodule(name.removesuffix(".base_layer"))
            assert own.weight.shape != weight.shape  # packed: two numbers in a byte
            own.weight.data = dequantize_4bit(weight.data, weight.quant_state).float()
    made = TransformersModel(plain, lora=model.lora, device="cpu")
    for name, parameter in made.weights.named().items():
        parameter.data.copy_(model.weights.named()[name])
    return made


@needs_bitsandbytes
def test_a_4_bit_base_has_the_log_probs_and_gradients_of_its_dequantized_weights(base: str) -> None:
    model = quantized(base)
    plain = dequantized(base, model)
    full = AutoModelForCausalLM.from_pretrained(base)
    layers = [m for m in model.model.modules() if type(m).__name__ == "Linear4bit" and hasattr(m, "quant_state")]
    assert len(layers) == 2 * 7
    expected, _ = logps_one_by_one(plain.model, FEATURES)
    assert largest_gap(model.forward_only(FEATURES)["logps"], expected) < 1e-5
    assert largest_gap(model.forward_only(FEATURES)["logps"], logps_one_by_one(full, FEATURES)[0]) > 0.1
    losses = [m.forward_backward(FEATURES, advantages=ADVANTAGES).loss for m in (model, plain)]
    torch.testing.assert_close(*losses)
    got, expected = gradients(model.model), gradients(plain.model)
    assert got.keys() == expected.keys() and len(got) == 2 * 7 * 2
    for name, gradient in expected.items():
        torch.testing.assert_close(got[name], gradient)


@needs_bitsandbytes
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the compiler's own
@pytest.mark.parametrize("options", [
    {"dtype": "bfloat16"},
    {"gradient_checkpointing": True},
    {"compile": True},
    {"layout": "packed"},
    {"layout": "shared"},
    {"tokens_per_microbatch": 8},
    {"head": "walk"},
    {"lora": LoraSpec(rank=2, modules_to_save=("lm_head",))},
], ids=str)  # fmt: skip
def test_a_4_bit_base_meets_the_other_options(base: str, options: dict[str, Any]) -> None:
    model = quantized(base, **options)
    plain = dequantized(base, model)
    start = model.forward_only(FEATURES)["logps"]
    bound = 0.3 if options.get("dtype") == "bfloat16" else 1e-4  # log-probs of -7 in 8 bits
    assert largest_gap(start, plain.forward_only(FEATURES)["logps"]) < bound
    step(model)
    step(plain)
    moved = model.forward_only(FEATURES)["logps"]
    assert largest_gap(moved, start) > 0.1
    if "dtype" not in options:
        assert largest_gap(moved, plain.forward_only(FEATURES)["logps"]) < 1e-2  # AdamW's first step is a sign
    frozen = {n for n, p in model.model.named_parameters() if p.dtype == torch.uint8}
    assert len(frozen) == 14 and not frozen & set(model.weights.names)
    assert {p.dtype for p in model.weights.parameters} == {torch.float32}


@needs_bitsandbytes
def test_the_sampler_scores_a_4_bit_base_as_the_trainer_does(base: str) -> None:
    model = quantized(base)
    params = SamplingParams(temperature=1.0, max_new_tokens=6)
    for samples in TorchSampler(model).sample(["1+1=", "47+8="], 3, params):
        for sequence in samples.sequences:
            feature = sequence.new_input_feature
            logps = model.forward_only([feature])["logps"][0]
            assert (logps - torch.tensor(sequence.logps)).abs().max() < 1e-4


@needs_bitsandbytes
def test_the_reference_of_a_4_bit_base_is_that_base(base: str) -> None:
    model = TransformersModel(
        base, tokenizer=load_tokenizer("builtin"), quantize="nf4", lora=LoraSpec(), dtype="float32", device="cpu"
    )
    start = model.forward_only(FEATURES)["logps"]
    model.set_loss(GRPOLoss(beta=0.1))
    assert model.reference().state() == {}
    step(model)
    assert largest_gap(model.reference_logps(FEATURES), start) == 0


@needs_bitsandbytes
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_4_bit_base_is_in_no_file_and_a_merged_export_is_its_dequantized_weights(
    base: str, dtype: Any, tmp_path: Path
) -> None:
    model = quantized(base, dtype=dtype)
    save_training_state(model.weights, model.optimizer, tmp_path)
    assert all("lora_" in name for name in load_file(tmp_path / "weights.safetensors"))
    model.save(tmp_path / "adapter")
    assert all("lora_" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    again = TransformersModel(str(tmp_path / "adapter"), dtype=dtype, device="cpu")
    assert again.quantized == {"quantize": "nf4", "dtype": dtype}  # without being told
    assert largest_gap(again.forward_only(FEATURES)["logps"], model.forward_only(FEATURES)["logps"]) == 0
    in_float32 = TransformersModel(str(tmp_path / "adapter"), device="cpu")
    plain = dequantized(base, model)
    for one, two in zip(plain.model.parameters(), dequantized(base, in_float32).model.parameters(), strict=True):
        assert torch.equal(one, two)
    assert gruppo(["export", str(tmp_path / "adapter"), str(tmp_path / "copy")]) == 0
    shutil.rmtree(tmp_path / "adapter")
    assert gruppo(["export", str(tmp_path / "copy"), str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert {p.dtype for p in merged.parameters()} == {torch.float32}
    weights = dict(merged.named_parameters())
    for name, module in plain.logp_model.base.named_modules():
        if hasattr(module, "lora_A"):
            factors = (module.lora_B.default.weight @ module.lora_A.default.weight).double()
            expected = module.base_layer.weight.double() + 16 / 2 * factors
            assert (weights[f"{name}.weight"].double() - expected).abs().max() < 1e-6


@needs_bitsandbytes
def test_a_4_bit_base_is_not_handed_to_another_process(base: str, tmp_path: Path) -> None:
    store = WeightStore(tmp_path / "sync", canary_rows(32))
    with pytest.raises(InputError, match="quantize='nf4': another process would put the adapter on the base in full"):
        store.publish(quantized(base))


@needs_bitsandbytes
def test_a_model_object_in_4_bits_trains_an_adapter_and_nothing_else(base: str) -> None:
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    objects = [AutoModelForCausalLM.from_pretrained(base, quantization_config=config) for _ in range(2)]
    step(TransformersModel(objects[0], lora=LoraSpec(rank=2), device="cpu"))
    with pytest.raises(InputError, match="quantised, and such weights do not train"):
        TransformersModel(objects[1], device="cpu")
    objects[1].save_pretrained(Path(base).parent / "small")
    with pytest.raises(InputError, match="are quantised already; leave it out"):
        quantized(str(Path(base).parent / "small"))


def test_what_cannot_go_with_4_bits_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="quantize='nf4' needs an adapter, since 4-bit weights do not train"):
        TransformersModel("builtin", quantize="nf4")
    with pytest.raises(InputError, match="quantize must be 'nf4' or None, got 'int8'"):
        TransformersModel("builtin", quantize="int8", lora=LoraSpec())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="is for a model that is loaded by its name"):
        actor(quantize="nf4", lora=LoraSpec())
    with pytest.raises(InputError, match="is for one process"):
        TransformersModel("builtin", quantize="nf4", lora=LoraSpec(), process_group=object())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="quantize='nf4' cannot go with sampler='vllm:start'"):
        TrainConfig.read({"quantize": "nf4", "lora": True, "sampler": "vllm:start"})


@pytest.mark.skipif(find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_4_bits_without_bitsandbytes_name_the_extra() -> None:
    with pytest.raises(MissingExtraError, match=r"quantize='nf4' needs 'bitsandbytes'.*pip install 'gruppo\[qlora\]'"):
        TransformersModel("builtin", quantize="nf4", lora=LoraSpec())
