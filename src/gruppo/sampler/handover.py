"""Weights from the trainer to a folder that an engine reads, and what is in it."""

import json
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor

from gruppo.errors import SamplerError
from gruppo.model.transformers_model import TransformersModel


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of a folder: name -> (shape, bytes), from the headers of its files."""

    tensors: Mapping[str, tuple[tuple[int, ...], int]]

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.tensors.values())

    @property
    def elements(self) -> int:
        return sum(prod(shape) for shape, _ in self.tensors.values())


def write(model: TransformersModel, folder: Path) -> None:
    """All weights, or with LoRA the adapter, under the names that transformers and PEFT give them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    model.model.save_pretrained(folder, safe_serialization=True)  # type: ignore[operator]  # transformers' and PEFT's


def stored(folder: Path) -> Stored:
    """Read the headers of a folder's safetensors files."""
    tensors: dict[str, tuple[tuple[int, ...], int]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header: dict[str, Any] = json.loads(opened.read(length))
            header.pop("__metadata__", None)
            found = {n: (tuple(e["shape"]), e["data_offsets"][1] - e["data_offsets"][0]) for n, e in header.items()}
            if file.stat().st_size != 8 + length + sum(size for _, size in found.values()):
                raise ValueError("it is cut short")
        except (OSError, struct.error, ValueError) as error:
            raise SamplerError(f"{file} is not a safetensors file: {error}") from error
        tensors |= found
    return Stored(tensors)


def compare(model: TransformersModel, folder: Path) -> str | None:
    """What is wrong with the names and shapes in a folder; None when they are the model's."""
    wanted, found = _weights(model), stored(folder)
    missing = sorted(wanted.keys() - found.tensors.keys())
    unknown = sorted(found.tensors.keys() - wanted.keys())
    elements = sum(t.numel() for t in wanted.values())
    # Some families are saved under other names than they have in memory; then the numbers must agree.
    if (missing or unknown) and (model.lora is not None or found.elements != elements):
        return f"the file lacks {few(missing)} and has unknown {few(unknown)}"
    shapes = [n for n in wanted.keys() & found.tensors.keys() if tuple(wanted[n].shape) != tuple(found.tensors[n][0])]
    return f"the file has other shapes for {few(sorted(shapes))}" if shapes else None


def differing(model: TransformersModel, folder: Path) -> list[str]:
    """Names of the tensors whose values in the folder are not the model's. Reads everything: for a diagnosis."""
    from safetensors import safe_open

    wanted, differ = _weights(model), []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is not a dict
                own, tensor = wanted.get(name), opened.get_tensor(name)
                if own is not None and not (own.shape == tensor.shape and bool((own.cpu() == tensor).all())):
                    differ.append(name)
    return differ


def _weights(model: TransformersModel) -> dict[str, Tensor]:
    """What a folder should hold: of tensors that are one in memory, the first."""
    if model.lora is not None or hasattr(model.model, "disable_adapter"):
        from peft import get_peft_model_state_dict

        return dict(get_peft_model_state_dict(model.model, save_embedding_layers=False))  # type: ignore[arg-type]
    seen: set[int] = set()
    kept = {}
    for name, tensor in model.model.state_dict().items():
        if tensor.data_ptr() not in seen:
            seen.add(tensor.data_ptr())
            kept[name] = tensor
    return kept


def few(names: list[str]) -> str:
    return f"{names[:3]}" + (f" and {len(names) - 3} more" if len(names) > 3 else "")
