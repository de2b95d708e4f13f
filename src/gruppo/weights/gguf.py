"""GGUF: a model in one file, as llama.cpp has it. It is converted once to a model folder, which is used from then on.

Weights in 4 or 8 bits become float32: a run trains the numbers that they encode.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from gruppo.errors import CheckpointError, InputError, require
from gruppo.weights.files import commit_folder, read_manifest, remove, remove_temporary, take_flock
from gruppo.weights.folder import cut, refusing

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_UNKNOWN_KIND = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
_REMEDY = "copy it again, or use the model's safetensors"
DEADLINE_S = 600.0
"""Seconds to wait for another process that writes weights."""
_POSITIONS = "rope_freqs.weight"
"""Factors of the frequencies of positions (Llama 3.1 and later). transformers leaves them out of the model."""


def is_gguf(model_id: str) -> bool:
    """True for the name of a GGUF file."""
    return model_id.lower().endswith(SUFFIX)


def folder_of(file: Path) -> Path:
    """The model folder of a GGUF file, in the user's cache. It is made where it is absent or damaged."""
    if not file.is_file():
        raise InputError(f"there is no file {file}; give a GGUF file, a model folder or a hub id like org/name")
    state = file.stat()
    return _folder_of(file.absolute(), state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=16)
def _folder_of(file: Path, _size: int, _time: int) -> Path:
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise InputError(f"{file} is not a GGUF file: it does not begin with the letters GGUF")
        opened.seek(0)
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = cache() / digest
    if (damage := _damage(folder)) is not None:
        if folder.exists():
            logger.warning("%s; it is made again from %s", damage, file)
        logger.info("making whole weights of %s, once, in %s", file, folder)
        _convert(file, folder, digest)
    return folder


def _damage(folder: Path) -> CheckpointError | None:
    """Damage of a folder in the cache; None if it is complete."""
    try:
        read_manifest(folder)
    except CheckpointError as error:
        return error
    return None


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait for other processes that write weights here: ranks and samplers ask for the same at the same time."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("a")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error}; name another folder in XDG_CACHE_HOME") from error
    with lock:
        try:
            take_flock(lock.fileno(), DEADLINE_S)
        except BlockingIOError:
            raise InputError(
                f"{lock.name} has been locked for {DEADLINE_S:g} seconds by another process, which should be writing "
                "weights there; end it, or name another folder in XDG_CACHE_HOME"
            ) from None
        yield


def cache() -> Path:
    """Cache folder of the user for GGUF files and the folders made from them."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(home).expanduser() / "gruppo" / "gguf"
    except RuntimeError:
        raise InputError("the home folder is not known; set XDG_CACHE_HOME to a folder for the weights") from None


def _convert(file: Path, folder: Path, digest: str) -> None:
    """Write the model folder of a GGUF file. The whole file is read first, so a damaged one leaves nothing behind."""
    try:
        import gguf  # pyright: ignore[reportMissingImports]  # optional
    except ImportError:
        raise require("gguf", "gguf", f"model {str(file)!r}") from None

    with refusing(f"{file} is cut off or damaged", _REMEDY):
        try:
            reader = gguf.GGUFReader(file)
        except ValueError as error:
            if (number := _UNKNOWN_KIND.search(str(error))) is None:
                raise
            raise InputError(
                f"{file} holds tensors in quantisation {number[1]}, which the installed package gguf does not know; "
                "upgrade it (pip install --upgrade gguf), or use a file in another quantisation (Q4_K_M, Q8_0, F16)"
            ) from error
    _check(file, reader)
    with refusing(f"{file} cannot be made whole", _REMEDY):
        model = _model_of(file)
    elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    own = sum(parameter.numel() for parameter in model.parameters())
    if elements != own:
        raise InputError(
            f"{file} holds {elements:,} numbers, and the {model.config.model_type} that transformers makes of it "
            f"{own:,}: it would be another model. Use the model's safetensors instead"
        )
    tokenizer = None
    if "tokenizer.ggml.tokens" in reader.fields:
        with refusing(f"{file} has no usable tokenizer", _REMEDY):
            tokenizer = _tokenizer_of(file)

    def write(aside: Path) -> None:
        model.save_pretrained(aside)
        if tokenizer is not None:
            tokenizer.save_pretrained(aside)

    with _alone(folder.parent):
        remove_temporary(folder.parent)
        if _damage(folder) is not None:  # no other process was quicker
            if folder.exists():
                remove(folder)
            commit_folder(folder, write, {"kind": "gguf", "file": file.name, "sha256": digest})


def _check(file: Path, reader: Any) -> None:
    """Refuse what cannot be made whole, by its name."""
    from gguf import dequantize  # pyright: ignore[reportMissingImports]
    from transformers import AutoConfig

    parts = reader.get_field("split.count")
    if parts is not None and parts.contents() > 1:
        raise InputError(
            f"{file} is one of {parts.contents()} parts of a model; join them with llama.cpp's "
            "`llama-gguf-split --merge`"
        )
    field = reader.get_field("general.architecture")
    architecture = None if field is None else str(field.contents())
    try:
        AutoConfig.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except Exception as error:  # of the reader of each architecture
        raise InputError(
            f"{file} holds a model of architecture {cut(repr(architecture), 80)}, which transformers does not take "
            f"from a GGUF file: {cut(str(error).rstrip('.'), 300)}. Use the model's safetensors instead"
        ) from error
    for kind, tensor in {tensor.tensor_type: tensor for tensor in reader.tensors}.items():
        try:
            dequantize(tensor.data[:1], kind)
        except NotImplementedError:
            raise InputError(
                f"{file} holds {cut(tensor.name, 80)} as {kind.name}, which cannot be made whole; use a file in "
                "another quantisation (Q4_K_M, Q8_0, F16), or the model's safetensors"
            ) from None
    if any(tensor.name == _POSITIONS for tensor in reader.tensors):
        raise InputError(
            f"{file} scales its positions by {_POSITIONS}, which transformers leaves out: it would be another model. "
            "Use the model's safetensors instead"
        )


def _model_of(file: Path) -> Any:
    """The language model of a file, without the note that it was quantised: transformers would not save it."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as bars

    bars.disable_progress_bar()
    options: dict[str, Any] = {"gguf_file": file.name, "dtype": torch.float32, "trust_remote_code": False}
    loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, output_loading_info=True, **options)
    made, report = loaded
    if report["missing_keys"]:
        raise ValueError(f"it lacks {len(report['missing_keys'])} tensors, the first {min(report['missing_keys'])}")
    values = made.config.to_dict()
    values.pop("quantization_config", None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(type(made.config).from_dict(values))
    model.load_state_dict(made.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = made.generation_config
    return model


def _tokenizer_of(file: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
