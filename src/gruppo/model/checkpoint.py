"""Checkpoints: weights and optimizer state of a training run, and models as transformers loads them.

Everything is safetensors and JSON, in folders that are complete or do not exist (`gruppo.weights.files`).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.errors import CheckpointError, InputError, NumericError
from gruppo.model.optim import MasterWeights
from gruppo.weights.files import commit_folder, read_manifest


def save_training_state(weights: MasterWeights, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Weights that train and the optimizer's state, without pickle. Numbers that are not finite are refused with a
    NumericError."""
    kept = {name: p.detach().to("cpu").contiguous() for name, p in weights.named().items()}
    state = optimizer.state_dict()
    tensors, scalars = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            target = tensors if isinstance(value, Tensor) else scalars
            target[f"{index}.{name}"] = value.to("cpu").contiguous() if isinstance(value, Tensor) else value
    for name, tensor in (*kept.items(), *((f"{name} of the optimizer", value) for name, value in tensors.items())):
        if not tensor.isfinite().all():
            raise not_finite(name)
    save_file(kept, folder / "weights.safetensors")
    save_file(tensors, folder / "optimizer.safetensors")
    described = {"scalars": scalars, "param_groups": state["param_groups"], "tensors": sorted(tensors)}
    (folder / "optimizer.json").write_text(json.dumps(described))


def not_finite(name: str) -> NumericError:
    """The error for a tensor of a run that an update made useless."""
    return NumericError(
        f"{name} holds non-finite numbers after the last update; nothing was written, older checkpoints are as they "
        "were. Lower lr, or weight_decay"
    )


def load_training_state(weights: MasterWeights, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read back what `save_training_state` wrote, strictly: the same names, shapes and dtypes, and finite numbers.

    Otherwise CheckpointError gives the reason, and no weight is changed. The optimizer's options stay its own: those of
    a config that was edited.
    """
    try:
        trained = load_file(folder / "weights.safetensors")
        description = json.loads((folder / "optimizer.json").read_text())
        tensors = load_file(folder / "optimizer.safetensors")
        lost = sorted(set(description.get("tensors", tensors)) ^ tensors.keys())
        if lost:
            raise CheckpointError(
                f"{folder / 'optimizer.safetensors'} does not hold what optimizer.json names: {', '.join(lost[:3])}"
            )
        entries = tensors | description["scalars"]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for key, value in entries.items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = value
            if isinstance(value, Tensor):
                _check_entry(f"{folder}: parameter {index}'s {name}", value, parameters[int(index)])
        groups = description["param_groups"]
        own = optimizer.state_dict()["param_groups"]
        if [group.keys() for group in groups] != [group.keys() for group in own]:
            raise CheckpointError(f"{folder / 'optimizer.json'} does not describe this optimizer: other param_groups")
        _check_fit(weights.named(), trained, folder, has_dtypes=True)
        kept = [group | {"params": saved["params"]} for group, saved in zip(own, groups, strict=True)]
        optimizer.load_state_dict({"state": state, "param_groups": kept})
    except (
        OSError,
        ValueError,
        KeyError,
        IndexError,
        TypeError,
        AttributeError,
        SafetensorError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{folder} is not a checkpoint of this version: {error}") from error
    _copy(weights.named(), trained)
    weights.write_back()


def _check_entry(name: str, value: Tensor, parameter: Tensor) -> None:
    """Refuse a tensor of the optimizer's state that cannot be the parameter's; a count of steps has no shape."""
    if value.dim() and value.shape != parameter.shape:
        raise CheckpointError(f"{name} has shape {tuple(value.shape)}, the parameter's is {tuple(parameter.shape)}")
    if value.dim() and value.dtype != parameter.dtype:
        raise CheckpointError(f"{name} holds {value.dtype}, the parameter {parameter.dtype}")
    check_numbers(name, value)


def check_numbers(name: str, value: Tensor) -> None:
    """Refuse numbers that training does not make: a step with them would end in NaN."""
    if not value.isfinite().all():
        raise CheckpointError(f"{name} holds non-finite numbers")
    if name.endswith("exp_avg_sq") and bool((value < 0).any()):
        raise CheckpointError(f"{name} holds negative numbers")


def save_pretrained(
    write_weights: Callable[[Path], object], tokenizer: Any, folder: Path, facts: Mapping[str, Any]
) -> None:
    """A folder with what `write_weights` writes (a model, or with LoRA the adapter) and the tokenizer, as transformers,
    PEFT and vLLM load it; `facts` go into the manifest."""

    def write(aside: Path) -> None:
        write_weights(aside)
        (aside / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)

    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists():
        raise InputError(f"{folder} exists and is not empty; save to a new folder")
    commit_folder(folder, write, {"kind": "model", **facts})


def write_model(model: Any, folder: Path, **options: Any) -> None:
    """Write all weights and configs, or of a PEFT model the adapter, as `save_pretrained` of transformers and PEFT."""
    is_adapter = hasattr(model, "disable_adapter")
    generation = None if is_adapter else getattr(model, "generation_config", None)
    if is_adapter:  # PEFT would ask a hub whether the base has other embeddings
        options["save_embedding_layers"] = False
    if generation is None:
        model.save_pretrained(folder, **options)
        return
    model.generation_config = type(generation)()
    try:
        model.save_pretrained(folder, **options)
    finally:
        model.generation_config = generation
    write_generation_config(generation, folder)


def write_generation_config(generation: Any, folder: Path) -> None:
    """Write a generation config with the values that it has. transformers loads one with values that have no effect (a
    temperature without do_sample), which many hub models have, and its `save_pretrained` refuses to write it."""
    generation.to_json_file(folder / "generation_config.json", use_diff=True, keys_to_pop=["compile_config"])


def load_pretrained(model: nn.Module, folder: Path, *, base: str | None = None) -> None:
    """Read a folder of `save_pretrained` into a model of the same kind.

    Args:
        base: digest of the weights below an adapter; a folder that notes another is refused.
    """
    trained_on = read_manifest(folder).get("base")
    if hasattr(model, "disable_adapter") and None not in (base, trained_on) and base != trained_on:
        raise CheckpointError(
            f"{folder} holds an adapter that was trained on other weights than the model's (digest {trained_on}, "
            f"found {base}), and on these it is another policy; make the model from the weights it was trained on"
        )
    read_weights(model, folder)


def read_weights(model: nn.Module, folder: Path) -> None:
    """Read all weights, or with LoRA the adapter, from the safetensors files of a folder."""
    if hasattr(model, "disable_adapter"):
        from peft import get_peft_model_state_dict, set_peft_model_state_dict

        file = folder / "adapter_model.safetensors"
        if not file.is_file():
            raise CheckpointError(f"{folder} holds no adapter: it has no {file.name}")
        weights = load_file(file)
        _check_fit(get_peft_model_state_dict(model, save_embedding_layers=False), weights, folder)  # type: ignore[arg-type]
        set_peft_model_state_dict(model, weights)  # type: ignore[arg-type]
        return
    weights: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights |= load_file(shard)
    names = {n for n, _ in model.named_parameters()}
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    chosen = {n: t for n, t in weights.items() if n in names}
    _check_fit(own, chosen, folder)
    _copy(own, chosen)


def _copy(own: Mapping[str, nn.Parameter], weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def _check_fit(
    own: Mapping[str, Tensor], weights: Mapping[str, Tensor], folder: Path, *, has_dtypes: bool = False
) -> None:
    """Refuse weights that are not the model's, before the first of them is copied. `has_dtypes`: nor of its dtypes."""
    if own.keys() != weights.keys():
        missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise CheckpointError(f"{folder} does not fit the model: missing {missing[:3]}, unknown {extra[:3]}")
    for name, parameter in own.items():
        found = weights[name]
        if found.shape != parameter.shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(found.shape)}, the model's is {tuple(parameter.shape)}"
            )
        if not found.is_floating_point() or (has_dtypes and found.dtype != parameter.dtype):
            raise CheckpointError(f"{folder}: {name} holds {found.dtype}, the model {parameter.dtype}")
        if not found.isfinite().all():
            raise CheckpointError(f"{folder}: {name} holds non-finite numbers")
