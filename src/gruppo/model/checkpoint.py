"""Folders of weights that are complete or do not exist, in safetensors and JSON.

A folder is written aside under a temporary name, flushed to disk, given its manifest (every file with size and sha256)
last, and renamed. A folder without a valid manifest is not a checkpoint, whatever it is called.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from gruppo.errors import CheckpointError, InputError

MANIFEST = "manifest.json"


def commit_folder(folder: Path, write: Callable[[Path], None], facts: dict[str, Any]) -> None:
    """Let `write` fill a new folder, then make it appear under its name at once, with a manifest."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; nothing was written")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}"
    aside.mkdir()
    try:
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
    except OSError as error:
        shutil.rmtree(aside, ignore_errors=True)
        free = shutil.disk_usage(folder.parent).free
        raise CheckpointError(f"could not write {folder}: {error} ({free / 2**20:.0f} MiB free); nothing was lost") from error
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
        files = manifest["files"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    for name, entry in files.items():
        file = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or file.is_symlink():
            raise CheckpointError(f"{path} names {name!r}, which lies outside the folder")
        if not file.is_file():
            raise CheckpointError(f"{folder} lacks {name}")
        if file.stat().st_size != entry["size"] or _sha256(file) != entry["sha256"]:
            raise CheckpointError(f"{file} is damaged: its size or hash is not the manifest's")
    return manifest


def trainable_state(model: nn.Module) -> dict[str, Tensor]:
    """What training changes, by name."""
    return {n: p.detach().to("cpu").contiguous() for n, p in model.named_parameters() if p.requires_grad}


def save_training_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Weights that train and the optimizer's state, without pickle."""
    save_file(trainable_state(model), folder / "weights.safetensors")
    state = optimizer.state_dict()
    tensors, scalars = {}, {}
    for index, entries in state["state"].items():
        for name, value in entries.items():
            target = tensors if isinstance(value, Tensor) else scalars
            target[f"{index}.{name}"] = value.to("cpu").contiguous() if isinstance(value, Tensor) else value
    save_file(tensors, folder / "optimizer.safetensors")
    (folder / "optimizer.json").write_text(json.dumps({"scalars": scalars, "param_groups": state["param_groups"]}))


def load_training_state(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read back what `save_training_state` wrote, strictly: the same names, shapes and dtypes."""
    _copy_weights(model, load_file(folder / "weights.safetensors"), folder)
    description = json.loads((folder / "optimizer.json").read_text())
    state: dict[int, dict[str, Any]] = {}
    entries = load_file(folder / "optimizer.safetensors") | description["scalars"]
    for key, value in entries.items():
        index, name = key.split(".", 1)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": description["param_groups"]})


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
        from peft import set_peft_model_state_dict

        result = set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))  # type: ignore[arg-type]
        if result.unexpected_keys:
            raise CheckpointError(f"{folder} has adapter weights this model lacks: {result.unexpected_keys[:3]}")
        return
    weights: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        weights |= load_file(shard)
    names = {n for n, _ in model.named_parameters()}
    _copy_weights(model, {n: t for n, t in weights.items() if n in names}, folder)


def _copy_weights(model: nn.Module, weights: dict[str, Tensor], folder: Path) -> None:
    own = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if own.keys() != weights.keys():
        missing, extra = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
        raise CheckpointError(f"{folder} does not fit the model: missing {missing[:3]}, unknown {extra[:3]}")
    with torch.no_grad():
        for name, parameter in own.items():
            if weights[name].shape != parameter.shape:
                raise CheckpointError(
                    f"{folder}: {name} has shape {tuple(weights[name].shape)}, the model's is {tuple(parameter.shape)}"
                )
            if not weights[name].isfinite().all():
                raise CheckpointError(f"{folder}: {name} holds non-finite numbers")
            parameter.copy_(weights[name])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
