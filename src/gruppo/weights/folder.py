"""Checks of a model folder: that it holds a model, runs no code, and has no pickles. docs/security.md lists them."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open

from gruppo.errors import CheckpointError, GruppoError, InputError
from gruppo.process.streams import printable
from gruppo.weights.files import MANIFEST, read_manifest

ADAPTER = "adapter_config.json"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.ckpt")


def read_object(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{file} is not JSON: {cut(str(error))}; copy the file from where it came") from None
    if not isinstance(values, dict):
        raise InputError(f"{file} must hold a JSON object, got a {type(values).__name__}; copy it from where it came")
    return values


def cut(text: str, length: int = 400) -> str:
    """Text for a message, which a hostile file would make as long as it likes."""
    return text if len(text) <= length else f"{text[:length]}... ({len(text):,} characters)"


@contextmanager
def refusing(what: str, remedy: str = "copy its files again, or use another model") -> Iterator[None]:
    """Turn what transformers, PEFT, tokenizers and others raise on a model's files, of any class, into an InputError.
    What transformers logs meanwhile is escaped and cut.

    Args:
        what: the model's id and what is wrong, with which the error begins.
    """
    log = _SafeLog()
    handlers = logging.getLogger("transformers").handlers
    for handler in handlers:
        handler.addFilter(log)
    try:
        yield
    except GruppoError:
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        reason += f" {log.report}" if "above report" in reason else ""
        raise InputError(f"{what}: {cut(reason, 1000)}; {remedy}") from error
    finally:
        for handler in handlers:
            handler.removeFilter(log)


class _SafeLog(logging.Filter):
    """Escapes and cuts messages with what a file says, and keeps back the report on each tensor."""

    report = ""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "LOAD REPORT" in text:
            self.report = text
            return False
        record.msg, record.args = printable(cut(text, 1000)), ()
        return True


def check_whole(folder: Path) -> None:
    """Refuse weights that are not those of the folder's manifest, if it has one."""
    if (folder / MANIFEST).is_file():
        try:
            read_manifest(folder, files="*.safetensors")
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}. Copy the folder again; if you have changed the weights yourself, delete {MANIFEST}"
            ) from error


def check_folder(folder: Path, *, name: str = "", needs_weights: bool = True) -> None:
    """Refuse a folder that lacks a model, would run code, or holds its weights as pickles.

    Args:
        name: of a hub's model. Code that it brings besides a model that transformers has is not run, and no reason to
            refuse it.
    """
    if (folder / ADAPTER).is_file():
        read_object(folder / ADAPTER)
        if needs_weights and not (folder / "adapter_model.safetensors").is_file():
            raise InputError(f"adapter folder {folder} has no adapter_model.safetensors; gruppo reads no pickles")
        return
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(
            f"model folder {name or folder} has no config.json; is it the folder that save() wrote? Give one that has"
        )
    values = read_object(config)
    if "auto_map" in values and not name:
        raise InputError(
            f"{config} asks to run code from the model folder (auto_map); gruppo never does. Use a model that "
            "transformers supports, or convert it"
        )
    for key, kernel in _kernels(values):
        raise InputError(
            f"{config} has {key}={kernel!r}, a kernel that transformers would fetch from a hub and run; gruppo never "
            "does. Delete the line: an implementation is chosen without it"
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        _check_index(index, needs_weights)
    explicit = values.get("transformers_weights")
    if explicit is not None and not _is_shard(explicit):
        raise InputError(
            f"{config} has transformers_weights={explicit!r}; gruppo reads *.safetensors in the folder only"
        )
    if needs_weights and not any(folder.glob("*.safetensors")):
        pickles = ", ".join(sorted(p.name for pattern in _PICKLES for p in folder.glob(pattern)))
        found = f"only pickled weights ({pickles}), which can run code when loaded" if pickles else "no weights"
        raise InputError(f"model folder {name or folder} holds {found}; gruppo reads *.safetensors only")


def _kernels(config: Any) -> Iterator[tuple[str, str]]:
    """Kernels of a hub that a config names, `org/name`, in any of its parts."""
    stack = [config]
    while stack:
        part = stack.pop()
        if isinstance(part, list):
            stack += part
        if not isinstance(part, dict):
            continue
        for key, value in part.items():
            named = value.values() if isinstance(value, dict) else [value]
            if "_implementation" in f"_{key}":
                yield from ((key, text) for text in named if isinstance(text, str) and "/" in text)
            stack.append(value)


def _check_index(index: Path, needs_weights: bool) -> None:
    """Refuse an index of shards that names anything but safetensors files beside it."""
    shards = read_object(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise InputError(f"{index} has no weight_map with the file of each tensor; copy it from where it came")
    for tensor, shard in shards.items():
        if not _is_shard(shard):
            raise InputError(
                f"{index} names {cut(str(shard))!r} for tensor {cut(tensor, 80)!r}; gruppo reads *.safetensors in "
                "the folder only"
            )
        if needs_weights and not (index.parent / shard).is_file():
            raise InputError(f"model folder {index.parent} lacks {shard}, which {index.name} names; copy it too")


def _is_shard(name: Any) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name


def check_floating(folder: Path, parameters: set[str]) -> None:
    """Refuse parameters stored as whole numbers: transformers would take the numbers themselves for weights."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in parameters.intersection(file.keys()):
                kind = file.get_slice(name).get_dtype()
                if "F" not in kind:
                    raise InputError(
                        f"{path} holds {kind} in {name}, and config.json has no quantization_config that gives the "
                        "numbers a meaning. Use the model in floating point, or copy its config.json again"
                    )
