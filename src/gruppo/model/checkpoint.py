"""Checkpoints: weights and optimizer state of a training run, and models as transformers loads them.

Everything is safetensors and JSON, in folders that are complete or do not exist (`gruppo.weights.files`).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.errors import CheckpointError, InputError
from gruppo.model.optim import MasterWeights
from gruppo.weights.files import commit_folder, read_manifest


def save_training_state(weights: MasterWeights, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Weights that train and the optimizer's state, without pickle. Weights that are not finite are refused."""
    kept = {name: p.detach().to("cpu").contiguous() for name, p in weights.named().items()}
    for name, tensor in kept.items():
        if not tensor.isfinite().all():
            raise CheckpointError(
                f"{name} holds non-finite numbers; nothing was written, older checkpoints are as they were"
            )
    save_file(kept, folder / "weights.safetensors")
    state = optimizer.state_dict()
    tensors, scalars = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            target = tensors if isinstance(value, Tensor) else scalars
            target[f"{index}.{name}"] = value.to("cpu").contiguous() if isinstance(value, Tensor) else value
    save_file(tensors, folder / "optimizer.safetensors")
    (folder / "optimizer.json").write_text(json.dumps({"scalars": scalars, "param_groups": state["param_groups"]}))


def load_training_state(weights: MasterWeights, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read back what `save_training_state` wrote, strictly: the same names and shapes, or nothing is changed."""
    try:
        saved = load_file(folder / "weights.safetensors")
        description = json.loads((folder / "optimizer.json").read_text())
        entries = load_file(folder / "optimizer.safetensors") | description["scalars"]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        state: dict[int, dict[str, Any]] = {}
        for key, value in entries.items():
            index, name = key.split(".", 1)
            state.setdefault(int(index), {})[name] = value
            if isinstance(value, Tensor) and value.dim() and value.shape != parameters[int(index)].shape:
                raise CheckpointError(f"{folder}: {name} of parameter {index} has shape {tuple(value.shape)}")
        groups = description["param_groups"]
        own = optimizer.state_dict()["param_groups"]
        if [group.keys() for group in groups] != [group.keys() for group in own]:
            raise CheckpointError(f"{folder / 'optimizer.json'} does not describe this optimizer: other param_groups")
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
    _copy_weights(weights.named(), saved, folder)
    weights.write_back()
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def save_pretrained(model: nn.Module, tokenizer: Any, folder: Path, **facts: Any) -> None:
    """The model (with LoRA the adapter) as transformers, PEFT and vLLM load it; `facts` go into the manifest."""

    def write(aside: Path) -> None:
        model.save_pretrained(aside, safe_serialization=True)  # type: ignore[operator]  # transformers' and PEFT's
        (aside / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)

    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists():
        raise InputError(f"{folder} exists and is not empty; save to a new folder")
    commit_folder(folder, write, {"kind": "model", **facts})


def load_pretrained(model: nn.Module, folder: Path) -> None:
    """Read a folder of `save_pretrained` into a model of the same kind."""
    read_manifest(folder)
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
    _copy_weights(own, {n: t for n, t in weights.items() if n in names}, folder)


def _copy_weights(own: Mapping[str, nn.Parameter], weights: dict[str, Tensor], folder: Path) -> None:
    _check_fit(own, weights, folder)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def _check_fit(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], folder: Path) -> None:
    """Refuse weights that are not the model's, before the first of them is copied."""
    if own.keys() != weights.keys():
        missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise CheckpointError(f"{folder} does not fit the model: missing {missing[:3]}, unknown {extra[:3]}")
    for name, parameter in own.items():
        if weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{folder}: {name} has shape {tuple(weights[name].shape)}, the model's is {tuple(parameter.shape)}"
            )
        if not weights[name].is_floating_point():
            raise CheckpointError(f"{folder}: {name} holds {weights[name].dtype}, the model's are {parameter.dtype}")
        if not weights[name].isfinite().all():
            raise CheckpointError(f"{folder}: {name} holds non-finite numbers")
