"""Folders of weights that are complete or do not exist, in safetensors and JSON.

A folder is written aside under a temporary name, flushed to disk, given its manifest (every file with size and sha256)
last, and renamed. A folder without a valid manifest is not a checkpoint, whatever it is called.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.errors import CheckpointError, InputError
from gruppo.model.optim import MasterWeights

MANIFEST = "manifest.json"


def commit_folder(folder: Path, write: Callable[[Path], None], facts: dict[str, Any]) -> None:
    """Let `write` fill a new folder, then make it appear under its name at once, with a manifest."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; nothing was written")
    aside = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        aside.mkdir(parents=True)
        write(aside)
        files = {}
        for path in sorted(p for p in aside.rglob("*") if p.is_file()):
            files[path.relative_to(aside).as_posix()] = {"size": path.stat().st_size, "sha256": _sha256(path)}
            _flush(path)
        manifest = aside / MANIFEST
        manifest.write_text(json.dumps(facts | {"files": files}, indent=1, sort_keys=True))
        _flush(manifest)
        os.rename(aside, folder)
        _flush(folder.parent)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        shutil.rmtree(aside, ignore_errors=True)
        space = f" ({shutil.disk_usage(folder.parent).free / 2**20:.0f} MiB free)" if folder.parent.exists() else ""
        raise CheckpointError(f"could not write {folder}: {error}{space}; nothing was lost") from error
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete folder; raises CheckpointError with the reason when it is not one."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was never finished, or is not a checkpoint")
    try:
        manifest = json.loads(path.read_text())
        files = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    for name, (size, sha256) in files.items():
        file = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or file.is_symlink():
            raise CheckpointError(f"{path} names {name!r}, which lies outside the folder")
        if not file.is_file():
            raise CheckpointError(f"{folder} lacks {name}")
        if file.stat().st_size != size or _sha256(file) != sha256:
            raise CheckpointError(f"{file} is damaged: its size or hash is not the manifest's")
    return manifest


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
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, SafetensorError) as error:
        raise CheckpointError(f"{folder} is not a checkpoint of this version: {error}") from error
    _copy_weights(weights.named(), saved, folder)
    weights.write_back()
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def save_pretrained(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """The model (with LoRA the adapter) as transformers, PEFT and vLLM load it."""

    def write(aside: Path) -> None:
        model.save_pretrained(aside, safe_serialization=True)  # type: ignore[operator]  # transformers' and PEFT's
        (aside / "README.md").unlink(missing_ok=True)  # PEFT's empty model card
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)

    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()
    if folder.exists():
        raise InputError(f"{folder} exists and is not empty; save to a new folder")
    commit_folder(folder, write, {"kind": "model"})


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
        if not weights[name].isfinite().all():
            raise CheckpointError(f"{folder}: {name} holds non-finite numbers")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
