"""Reductions over the groups of a mesh, or over none when a run has one process."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


def groups_of(device_mesh: "DeviceMesh | None", process_group: "ProcessGroup | None") -> list["ProcessGroup"]:
    """The groups to reduce over, innermost first. An explicit group wins; without either nothing is reduced."""
    if process_group is not None:
        return [process_group]
    if device_mesh is not None:
        return list(reversed(device_mesh.get_all_groups()))
    return []


def reduction_device(groups: list["ProcessGroup"]) -> torch.device:
    """Where a rank that has seen no data must put its zeros: NCCL reduces tensors on a GPU only."""
    if any(dist.get_backend(group) == "nccl" for group in groups):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def sum_over(groups: list["ProcessGroup"], values: Tensor) -> Tensor:
    return _reduced(groups, values, dist.ReduceOp.SUM)


def max_over(groups: list["ProcessGroup"], values: Tensor) -> Tensor:
    return _reduced(groups, values, dist.ReduceOp.MAX)


def gather_over(groups: list["ProcessGroup"], values: Tensor) -> Tensor:
    """The tensors of all ranks, stacked along a new first axis in rank order (`[1, ...]` without groups)."""
    stacked = values[None]
    for group in groups:
        parts = [torch.empty_like(stacked) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, stacked.contiguous(), group=group)
        stacked = torch.cat(parts)
    return stacked


def _reduced(groups: list["ProcessGroup"], values: Tensor, operation: "dist.ReduceOp.RedOpType") -> Tensor:
    reduced = values.clone()
    for group in groups:
        dist.all_reduce(reduced, operation, group=group)
    return reduced
