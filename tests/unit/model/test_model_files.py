"""What `save` writes loads elsewhere with the same logits; what is not ours or not safe is refused."""

import contextlib
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tiny_models import FAMILIES, actor, perturb_adapter, random_features, tiny_model, weights
from transformers import AutoModelForCausalLM

from gruppo.cli.main import run as gruppo
from gruppo.errors import CheckpointError, InputError
from gruppo.model import LoraSpec, TransformersModel
from gruppo.model.checkpoint import save_training_state
from gruppo.task.builtin import builtin_model_path
from gruppo.weights import WeightStore
from gruppo.weights.canary import canary_rows
from gruppo.weights.files import commit_folder
from gruppo.weights.source import load_tokenizer, resolve

IDS = torch.tensor([[5, 9, 4, 17, 30, 6]])
BUILTIN_IDS = torch.tensor([[1, 8, 11, 14, 12, 9, 15]])


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.row("R-52", "read by transformers")
def test_saved_weights_load_in_transformers_with_the_same_logits(family: str, tmp_path: Path) -> None:
    model = actor(family, seed=3)
    model.save(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(model.model))


@pytest.fixture
def base_folder(tmp_path: Path) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def adapted(base_folder: Path) -> TransformersModel:
    model = TransformersModel(AutoModelForCausalLM.from_pretrained(base_folder), lora=LoraSpec(rank=2), device="cpu")
    perturb_adapter(model.model)
    return model


@pytest.mark.row("R-52", "read by PEFT")
def test_a_saved_adapter_loads_in_peft_with_the_same_logits(adapted: Any, base_folder: Path, tmp_path: Path) -> None:
    adapted.save(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    plain = logits(base)
    loaded = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert torch.equal(logits(loaded), logits(adapted.model))
    assert not torch.equal(logits(loaded), plain)


@pytest.mark.row("R-52", "names of tensors")
def test_the_keys_of_a_saved_adapter_are_the_standard_ones(adapted: Any, tmp_path: Path) -> None:
    adapted.save(tmp_path / "adapter")
    keys = load_file(tmp_path / "adapter" / "adapter_model.safetensors").keys()
    layers = [f"self_attn.{n}_proj" for n in "qkvo"] + [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    expected = {
        f"base_model.model.model.layers.{i}.{layer}.lora_{m}.weight" for i in range(2) for layer in layers for m in "AB"
    }
    assert set(keys) == expected


def test_an_adapter_folder_names_its_base(adapted: Any, base_folder: Path, tmp_path: Path) -> None:
    adapted.save(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(base_folder)
    assert (config["r"], config["lora_dropout"], config["bias"]) == (2, 0.0, "none")


def test_a_folder_that_save_wrote_opens_as_a_model_again(adapted: Any, tmp_path: Path) -> None:
    model = actor("qwen3", seed=5)
    model.save(tmp_path / "full")
    adapted.save(tmp_path / "adapter")
    # There is no tokenizer in these folders; one from elsewhere does.
    tokenizer = load_tokenizer("builtin")
    again = TransformersModel(str(tmp_path / "full"), tokenizer=tokenizer, device="cpu")
    assert torch.equal(logits(again.model), logits(model.model))
    again = TransformersModel(str(tmp_path / "adapter"), tokenizer=tokenizer, device="cpu")
    assert torch.equal(logits(again.model), logits(adapted.model))
    trains = {n for n, p in again.model.named_parameters() if p.requires_grad}
    assert trains and all("lora_" in n for n in trains)


def test_load_brings_back_what_save_wrote(adapted: Any, base_folder: Path, tmp_path: Path) -> None:
    for model, other in (
        (actor("gpt2", seed=1), actor("gpt2", seed=2)),
        (
            adapted,
            TransformersModel(AutoModelForCausalLM.from_pretrained(base_folder), lora=LoraSpec(rank=2), device="cpu"),
        ),
    ):
        folder = tmp_path / type(model.model).__name__
        model.save(folder)
        assert not torch.equal(logits(other.model), logits(model.model))
        other.load(folder)
        assert torch.equal(logits(other.model), logits(model.model))


def test_the_builtin_model_trained_and_saved_keeps_its_tokenizer(tmp_path: Path) -> None:
    model = TransformersModel("builtin", device="cpu")
    model.save(tmp_path / "out")
    assert load_tokenizer(str(tmp_path / "out"))("47+85=")["input_ids"] == BUILTIN_IDS[0].tolist()


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_can_be_read_by_whom_the_umask_lets_read(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        model, adapter = actor(), actor(lora=LoraSpec(rank=2))
        model.save(tmp_path / "full")
        adapter.save(tmp_path / "adapter")
        commit_folder(
            tmp_path / "checkpoint", lambda aside: save_training_state(model.weights, model.optimizer, aside), {}
        )
        WeightStore(tmp_path / "sync", canary_rows(32)).publish(model)  # type: ignore[arg-type]
    finally:
        os.umask(before)
    files = {path: path.stat().st_mode & 0o777 for path in tmp_path.rglob("*") if path.is_file()}
    assert len([path for path in files if path.suffix == ".safetensors"]) == 5
    assert set(files.values()) == {mode}


def test_save_never_overwrites(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "precious.txt").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty; save to a new folder"):
        actor().save(folder)
    assert [p.name for p in folder.iterdir()] == ["precious.txt"]


def test_save_fills_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    actor().save(tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("what", ["shape", "missing", "nan", "adapter"])
def test_load_refuses_what_does_not_fit(what: str, tmp_path: Path) -> None:
    """Re-signed folders: the manifest is right, the content is not."""

    good, bad = tmp_path / "good", tmp_path / "bad"
    actor().save(good)
    tensors = load_file(good / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    if what == "shape":
        tensors[name] = tensors[name][:-1].contiguous()
    elif what == "missing":
        del tensors[name]
    elif what == "nan":
        tensors[name][0, 0] = float("nan")
    commit_folder(bad, lambda aside: save_file(tensors, aside / "model.safetensors"), {"kind": "model"})
    model = actor(seed=9, lora=LoraSpec(rank=2) if what == "adapter" else None)
    before = weights(model.model)
    with pytest.raises(CheckpointError) as error:
        model.load(bad)
    expected = {"shape": "has shape", "missing": name, "nan": "non-finite", "adapter": "adapter_model.safetensors"}
    assert expected[what] in str(error.value)
    assert all(torch.equal(p, before[n]) for n, p in weights(model.model).items())


def test_load_refuses_a_damaged_file(tmp_path: Path) -> None:
    model = actor()
    model.save(tmp_path / "out")
    flip_last_byte(tmp_path / "out" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        model.load(tmp_path / "out")


def flip_last_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_load_refuses_a_folder_without_a_manifest(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"has no manifest\.json"):
        actor().load(tmp_path / "out")


# --- export -------------------------------------------------------------------------------------------------------


@pytest.fixture
def builtin_adapter(tmp_path: Path) -> tuple[Path, torch.Tensor]:
    model = TransformersModel("builtin", lora=LoraSpec(rank=2), device="cpu")
    perturb_adapter(model.model, size=0.02)
    model.save(tmp_path / "run" / "model")
    return tmp_path / "run", logits(model.model, BUILTIN_IDS)


@pytest.mark.row("R-52", "merged")
def test_a_merged_export_has_the_adapters_logits(builtin_adapter: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, expected = builtin_adapter
    assert gruppo(["export", str(folder), str(tmp_path / "merged"), "--merge"]) == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(builtin_model_path(), dtype=torch.float32)
    assert (logits(merged, BUILTIN_IDS) - expected).abs().max() < 1e-5
    assert (logits(plain, BUILTIN_IDS) - expected).abs().max() > 0.1
    assert not list((tmp_path / "merged").glob("adapter*"))


def test_an_export_without_merge_is_the_adapter(builtin_adapter: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, _ = builtin_adapter
    assert gruppo(["export", str(folder), str(tmp_path / "copy")]) == 0
    mine, copy = (load_file(f / "adapter_model.safetensors") for f in (folder / "model", tmp_path / "copy"))
    assert mine.keys() == copy.keys()
    assert all(torch.equal(mine[n], copy[n]) for n in mine)


def test_merge_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no adapter to merge; leave out --merge"):
        gruppo(["export", str(builtin_model_path()), str(tmp_path / "out"), "--merge"])


def test_export_of_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no model"):
        gruppo(["export", str(tmp_path), str(tmp_path / "out")])


# --- folders that are refused -------------------------------------------------------------------------------------


class Payload:
    """Unpickling this writes a file: the canary of every test below."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.system, (f"touch {self.canary}",))


def test_the_canary_works(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "canary")))
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "state.pkl", "last.ckpt"])
@pytest.mark.row("R-44", "weights in a pickle")
def test_a_folder_with_pickles_only_is_refused_unread(name: str, tmp_path: Path, base_folder: Path) -> None:
    folder, canary = tmp_path / "evil", tmp_path / "canary"
    folder.mkdir()
    shutil.copy(base_folder / "config.json", folder)
    (folder / name).write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(InputError, match=rf"only pickled weights \({name}\).*reads \*\.safetensors only"):
        TransformersModel(str(folder), tokenizer=load_tokenizer("builtin"))
    assert not canary.exists()


@pytest.mark.row("R-44", "a pickle beside safetensors")
def test_a_pickle_beside_safetensors_is_not_read(tmp_path: Path, base_folder: Path) -> None:
    canary = tmp_path / "canary"
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "rng_state.pth"):
        (base_folder / name).write_bytes(pickle.dumps(Payload(canary)))
    model = TransformersModel(str(base_folder), tokenizer=load_tokenizer("builtin"), device="cpu")
    assert torch.equal(logits(model.model), logits(tiny_model("llama")))
    assert not canary.exists()


@pytest.mark.row("R-44", "an adapter in a pickle")
def test_an_adapter_in_a_pickle_is_refused_unread(tmp_path: Path, base_folder: Path) -> None:
    folder, canary = tmp_path / "evil", tmp_path / "canary"
    folder.mkdir()
    config = {"base_model_name_or_path": str(base_folder), "peft_type": "LORA", "r": 2, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Payload(canary)))
    with pytest.raises(InputError, match=r"has no adapter_model\.safetensors; gruppo reads no pickles"):
        TransformersModel(str(folder), tokenizer=load_tokenizer("builtin"))
    assert not canary.exists()


def test_an_adapter_without_a_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match="does not name its base model"):
        TransformersModel(str(tmp_path), tokenizer=load_tokenizer("builtin"))


@pytest.mark.parametrize("spelling", ["{}", "hf://{}"])
@pytest.mark.row("R-46", "auto_map in config.json")
def test_a_model_that_brings_its_own_code_is_refused_and_not_run(
    spelling: str, tmp_path: Path, base_folder: Path
) -> None:
    canary = tmp_path / "canary"
    config = json.loads((base_folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "evil.Evil", "AutoConfig": "evil.Config"}, "model_type": "evil"}
    (base_folder / "config.json").write_text(json.dumps(config))
    (base_folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    with pytest.raises(InputError):
        TransformersModel(spelling.format(base_folder), tokenizer=load_tokenizer("builtin"))
    assert not canary.exists()


def test_a_folder_that_is_missing_is_said_to_be_and_a_name_of_the_hub_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*_: Any, **__: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(InputError) as error:
        resolve("models/nope")
    assert str(error.value) == (
        "there is no folder 'models/nope'; taken as a hub name: model 'hf://models/nope' cannot be fetched from the "
        "hub: no route to host; check name and network"
    )
    with pytest.raises(InputError, match=r"^model 'hf://models/nope' cannot be fetched from the hub: no route to host"):
        resolve("hf://models/nope")


def test_the_refusal_of_own_code_names_the_entry(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": {"AutoConfig": "evil.Config"}}))
    with pytest.raises(InputError, match=r"config\.json asks to run code from the model folder \(auto_map\)"):
        resolve(str(tmp_path))


@pytest.mark.row("R-46", "auto_map in the tokenizer")
def test_a_tokenizer_that_brings_its_own_code_is_not_run(tmp_path: Path) -> None:
    folder, canary = tmp_path / "model", tmp_path / "canary"
    shutil.copytree(builtin_model_path(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
    with contextlib.suppress(InputError):
        load_tokenizer(str(folder))
    assert not canary.exists()


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        TransformersModel(str(tmp_path))


def test_a_folder_without_weights_is_refused(tmp_path: Path, base_folder: Path) -> None:
    (base_folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"holds no weights; gruppo reads \*\.safetensors only"):
        TransformersModel(str(base_folder))


def test_a_config_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(InputError, match=r"config\.json is not JSON"):
        TransformersModel(str(tmp_path))


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-at-all", "nowhere", "a/b/c"])
def test_what_is_neither_a_folder_nor_a_hub_id_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="is neither a folder nor a hub id"):
        resolve(name)


def test_a_file_is_not_a_model_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(InputError, match="is neither a folder nor a hub id"):
        resolve(str(tmp_path / "model.safetensors"))


def test_the_builtin_model_resolves() -> None:
    assert resolve("builtin") == resolve("builtin:carries") == str(builtin_model_path())


def test_a_hub_id_that_cannot_be_had_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for load in (load_tokenizer, TransformersModel):
        with pytest.raises(InputError, match="no-such-org/no-such-model"):
            load("no-such-org/no-such-model")


def test_a_truncated_weight_file_is_an_input_error(base_folder: Path) -> None:
    path = base_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(InputError, match="base"):
        TransformersModel(str(base_folder), tokenizer=load_tokenizer("builtin"))


@pytest.mark.row("R-45", "a header of gigabytes")
def test_a_header_that_claims_gigabytes_is_an_input_error(base_folder: Path) -> None:
    (base_folder / "model.safetensors").write_bytes((2**40).to_bytes(8, "little") + b"{}")
    with pytest.raises(InputError, match="base"):
        TransformersModel(str(base_folder), tokenizer=load_tokenizer("builtin"))


@pytest.mark.row("R-45", "missing keys")
def test_weights_with_missing_keys_are_not_filled_with_random_numbers(base_folder: Path) -> None:
    path = base_folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        TransformersModel(str(base_folder), tokenizer=load_tokenizer("builtin"))


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # PEFT's own, before ours
def test_an_adapter_with_other_keys_is_not_loaded_as_a_zero_adapter(adapted: Any, tmp_path: Path) -> None:
    # A file whose keys nobody knows would leave a fresh adapter: the trained one would be lost without a word.
    adapted.save(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = {n.replace("lora_", "laura_"): t for n, t in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    (tmp_path / "adapter" / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"lacks 28 of its tensors"):  # 2 layers x 7 linear maps x A and B
        TransformersModel(str(tmp_path / "adapter"), tokenizer=load_tokenizer("builtin"))


@pytest.mark.row("R-52", "another base")
def test_an_adapter_of_another_base_is_refused(adapted: Any, tmp_path: Path) -> None:
    adapted.save(tmp_path / "adapter")
    tiny_model("llama", hidden_size=64).save_pretrained(tmp_path / "wider")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = str(tmp_path / "wider")
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="size mismatch"):
        TransformersModel(str(tmp_path / "adapter"), tokenizer=load_tokenizer("builtin"))


@pytest.mark.row("R-52", "an adapter read into a model of another base of the same shape")
def test_an_adapter_is_not_read_into_a_model_of_another_base(base_folder: Path, tmp_path: Path) -> None:
    tokenizer, lora = load_tokenizer("builtin"), LoraSpec(rank=2)
    TransformersModel(str(base_folder), lora=lora, tokenizer=tokenizer, device="cpu").save(tmp_path / "adapter")
    file = base_folder / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "q_proj" in name)
    save_file({**tensors, name: tensors[name] * 1.01}, file, metadata={"format": "pt"})
    other = TransformersModel(str(base_folder), lora=lora, tokenizer=tokenizer, device="cpu")
    with pytest.raises(CheckpointError, match="was trained on other weights than the model's"):
        other.load(tmp_path / "adapter")


def test_the_dropout_of_an_adapter_from_elsewhere_is_switched_off(adapted: Any, tmp_path: Path) -> None:
    adapted.save(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) | {"lora_dropout": 0.5}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    model = TransformersModel(str(tmp_path / "adapter"), tokenizer=load_tokenizer("builtin"), device="cpu")
    model.model.train()
    features = random_features(seed=3)
    first, second, plain = (torch.cat(m.forward_only(features)["logps"]) for m in (model, model, adapted))
    assert torch.equal(first, second) and torch.equal(first, plain)


def test_an_unknown_dtype_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="dtype must be one of auto, float32, bfloat16, got 'float16'"):
        TransformersModel("builtin", dtype="float16")  # type: ignore[arg-type]


def test_weights_of_whole_numbers_without_a_scale_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(builtin_model_path(), folder)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].char()}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        InputError, match=rf"model\.safetensors holds I8 in {name}, and config\.json has no quantization"
    ):
        TransformersModel(str(folder), device="cpu")
