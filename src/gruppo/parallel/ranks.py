"""Ranks: processes that share a step, and reductions over the groups of a mesh, or over none in a run of one process.

Every rank holds the whole step and plans it alike; the micro-batches are dealt out. All ranks run the same number of
forwards and backwards, idle ones included, because the collectives of a sharded model wait for all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a process group; one process alone without a group."""

    group: "ProcessGroup | None" = None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def world(self) -> int:
        return 1 if self.group is None else dist.get_world_size(self.group)

    def deal(self, items: Sequence[T], idle: T) -> list[T]:
        """This rank's share of the items, as many on every rank; `idle` where there are too few.

        >>> Ranks().deal(["a", "b", "c"], "idle")
        ['a', 'b', 'c']
        """
        share = list(items[self.rank :: self.world])
        return share + [idle] * (-(-len(items) // self.world) - len(share))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        return values if self.group is None else sum_over([self.group], values)


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
