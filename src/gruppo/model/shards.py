"""Checkpoints of a sharded model: a safetensors file per rank, read back on any number of ranks.

torch's distributed checkpoint writes and reads the files, in the format of Hugging Face: no pickle reaches the disk.
Weights and the optimizer's tensors are in one flat table; what is no tensor is JSON, as in a checkpoint of one process.
"""

import json
import math
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gruppo.errors import CheckpointError
from gruppo.model.checkpoint import check_numbers, not_finite
from gruppo.model.optim import MasterWeights, local
from gruppo.model.sharding import like
from gruppo.parallel.ranks import Ranks
from gruppo.weights.files import Entries, flushed, read_header

SHARDS, SCALARS = "shards", "optimizer.json"
FILE_BYTES = 5 * 10**9
"""Of one file of a model."""


def is_sharded(folder: Path) -> bool:
    """Whether a checkpoint was written by several ranks."""
    return (folder / SHARDS).is_dir()


def save_shards(weights: MasterWeights, optimizer: torch.optim.Optimizer, folder: Path, ranks: Ranks) -> Entries:
    """Each rank's rows of the weights and of the optimizer's state, and the entries of all files: each rank hashes its
    own. Called by all ranks."""
    tensors = _tensors(weights, optimizer)
    bad = [i for i, x in enumerate(tensors.values()) if not bool(local(x).isfinite().all())]
    first = -ranks.highest(-min(bad, default=len(tensors)))
    if first < len(tensors):
        raise not_finite(list(tensors)[first])
    _write(tensors, HuggingFaceStorageWriter(path=str(folder / SHARDS), save_distributed=True))
    entries, fault = {}, ""
    try:
        if ranks.rank == 0:
            groups = optimizer.state_dict()["param_groups"]
            (folder / SCALARS).write_text(json.dumps({"scalars": {}, "param_groups": groups}))
        own = (folder / SHARDS).glob(f"shard-{ranks.rank + 1:05d}-*")  # as torch names them
        entries = {file.relative_to(folder).as_posix(): flushed(file) for file in own}
    except OSError as error:
        fault = f"rank {ranks.rank}: {error}"
    messages = [message for message, _ in ranks.gather({"entries": entries, "fault": fault}, {})]
    for message in messages:
        if message["fault"]:
            raise OSError(message["fault"])
    return {name: entry for message in messages for name, entry in message["entries"].items()}


def _write(tensors: dict[str, Tensor], writer: HuggingFaceStorageWriter) -> None:
    """Write tensors with torch. What fails on one rank is raised on all of them, as an OSError that names it."""
    try:
        save(tensors, storage_writer=writer)
    except CheckpointException as error:  # no Exception
        rank, (first, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {first}") from error


def write_whole(model: nn.Module, folder: Path, dtype: torch.dtype) -> None:
    """The weights of a sharded model as transformers writes them, joined file by file. Called by all ranks."""
    kept = dict(model.named_parameters()) | dict(_saved_buffers(model))
    tensors = {name: x.detach().to(dtype) if x.is_floating_point() else x.detach() for name, x in kept.items()}
    files, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.numel() * tensor.element_size()
        files[name] = 1 + size // FILE_BYTES
    writer = HuggingFaceStorageWriter(
        path=str(folder), fqn_to_index_mapping=files, save_distributed=True, enable_consolidation=True
    )
    _write(tensors, writer)
    shutil.rmtree(folder / "sharded", ignore_errors=True)


@torch.no_grad()
def read_weights(model: nn.Module, files: Mapping[str, Path], device: torch.device) -> None:
    """Make the weights of a model that are on the meta device, and read them from the files that hold them; of a
    sharded weight this rank's rows.

    Args:
        files: of each tensor, by its name without an adapter.
    """
    made: dict[int, Tensor] = {}
    wanted: dict[Path, dict[str, Tensor]] = {}
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for key, tensor in table.items():
                if tensor is None or not tensor.is_meta:
                    continue
                if id(tensor) not in made:  # a tied one is there twice
                    empty = torch.empty_like(tensor, device=device)
                    is_weight = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_weight else empty
                    name = f"{path}.{key}".removeprefix("base_model.model.").replace(".base_layer.", ".")
                    wanted.setdefault(files[name], {})[name] = made[id(tensor)]
                table[key] = made[id(tensor)]  # type: ignore[assignment]
    for file, tensors in wanted.items():
        with safe_open(file, framework="pt") as opened:
            for name, tensor in tensors.items():
                own = local(tensor)
                first = 0
                if own is not tensor:  # torch cuts the rows into equal parts, of which the last may be shorter
                    mesh = tensor.device_mesh  # type: ignore[attr-defined]  # a DTensor's
                    first = min(mesh.get_local_rank() * -(-len(tensor) // mesh.size()), len(tensor))
                own.copy_(opened.get_slice(name)[first : first + len(own)])


def _saved_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that belong into a file."""
    saved = model.state_dict()
    return ((name, buffer) for name, buffer in model.named_buffers() if name in saved)


def load_shards(weights: MasterWeights, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    """Read a checkpoint of any number of ranks, also of one process, into this rank's rows. The optimizer's options
    stay its own."""
    try:
        groups = json.loads((folder / SCALARS).read_text())["param_groups"]
        own = optimizer.state_dict()["param_groups"]
        if [group.keys() for group in groups] != [group.keys() for group in own]:
            raise CheckpointError(f"{folder / SCALARS} does not describe this optimizer: other param_groups")
        _make_state(optimizer, _names(folder))
        tensors = _tensors(weights, optimizer)
        if is_sharded(folder):
            _check_covered(folder / SHARDS, tensors)
            load(tensors, storage_reader=HuggingFaceStorageReader(path=str(folder / SHARDS)))
        else:
            _load_whole(tensors, folder)
    except (OSError, ValueError, KeyError, TypeError, CheckpointException) as error:
        raise CheckpointError(f"{folder} is not a checkpoint of this model: {error}") from error
    for name, tensor in tensors.items():
        check_numbers(f"{folder}: {name}", local(tensor))
    weights.write_back()


def _load_whole(tensors: dict[str, Tensor], folder: Path) -> None:
    """The rows of a checkpoint that one process wrote."""
    saved = {f"weights.{n}": x for n, x in load_file(folder / "weights.safetensors").items()}
    saved |= {f"optimizer.{n}": x for n, x in load_file(folder / "optimizer.safetensors").items()}
    if saved.keys() != tensors.keys():
        raise CheckpointError(f"{folder} does not fit the model: other names")
    with torch.no_grad():
        for name, own in tensors.items():
            own.copy_(like(saved[name], own))


def _check_covered(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Refuse shards that do not cover every tensor: torch's own reader leaves what is missing as it was."""
    found = dict.fromkeys(tensors, 0)
    for file in sorted(folder.glob("*.safetensors")):
        header, _ = read_header(file)
        for name, entry in header.items():
            if name not in found:
                raise CheckpointError(f"{file} holds {name}, which the model does not have")
            found[name] += math.prod(entry["shape"])
    for name, tensor in tensors.items():
        if found[name] != tensor.numel():
            raise CheckpointError(
                f"{folder}: {name} has {found[name]} of {tensor.numel()} numbers; a shard is missing, or the model has "
                "other sizes"
            )


def _names(folder: Path) -> set[str]:
    """Names of the tensors in a checkpoint."""
    if is_sharded(folder):
        return {name for file in (folder / SHARDS).glob("*.safetensors") for name in read_header(file)[0]}
    parts = ("weights", "optimizer")
    return {f"{part}.{name}" for part in parts for name in read_header(folder / f"{part}.safetensors")[0]}


def _make_state(optimizer: torch.optim.Optimizer, saved: Collection[str]) -> None:
    """State of Adam for each weight of which some was `saved`: none before its first gradient, in which torch makes
    it."""
    optimizer.state.clear()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, p in enumerate(parameters):
        if f"optimizer.{number}.step" in saved:
            moments = {name: torch.zeros_like(p.detach()) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32), **moments}


def _tensors(weights: MasterWeights, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What training changes, by name."""
    tensors: dict[str, Any] = {f"weights.{name}": p.detach() for name, p in weights.named().items()}
    number = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            for key, value in optimizer.state.get(p, {}).items():
                tensors[f"optimizer.{number}.{key}"] = value
            number += 1
    return tensors
