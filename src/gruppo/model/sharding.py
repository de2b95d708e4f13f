"""Weights that FSDP2 shards over ranks: a block is gathered when it runs, and each rank keeps its rows of the rest.

Gradients are added up over ranks, not averaged: a loss divides by the totals of the whole step. With `exact` they are
added in the order of the micro-batches, and the norm is a sum over rows, which no shard cuts. Then any number of ranks
gives the bits of one process.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import DTensor, distribute_tensor

from gruppo.model.compiled_blocks import find_blocks
from gruppo.model.optim import MasterWeights, local
from gruppo.parallel.ranks import Ranks, gather_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NONE = 1 << 62
"""Index of a parameter when there is none."""


def shard(
    model: nn.Module, base: nn.Module, ranks: Ranks, device: torch.device, *, compute: torch.dtype, exact: bool
) -> "list[OrderedSum]":
    """Shard a model over ranks: each block, and what is outside of the blocks. Returns the sums of `exact`."""
    assert ranks.group is not None
    mesh = DeviceMesh.from_group(ranks.group, device.type)
    policy = MixedPrecisionPolicy()
    if compute.itemsize < 4:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    for module in (*find_blocks(base), model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    sums = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if exact:
                sums.append(OrderedSum())
                module.set_custom_reduce_scatter(sums[-1])
    return sums


class OrderedSum(ReduceScatter):
    """Reduce-scatter that adds the ranks' gradients in their order to those of earlier micro-batches."""

    def __init__(self) -> None:
        self.total: Tensor | None = None

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: "ProcessGroup", op: Any, async_op: bool = False
    ) -> None:
        parts = torch.empty_like(input_tensor)
        dist.all_to_all_single(parts, input_tensor, group=group)
        for part in parts.view(group.size(), -1):
            self.total = part.clone() if self.total is None else self.total.add_(part)
        assert self.total is not None
        output_tensor.copy_(self.total)


class RankWeights(MasterWeights):
    """Weights of a model on several ranks, with the gradient of the step so far where it is kept beside them.

    Args:
        halved: as in `MasterWeights`, with the precision.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *halved: Any) -> None:
        super().__init__(model, *halved)
        self.ranks = ranks
        self._gradients: dict[str, Tensor] = {}

    def put_gradients(self) -> None:
        for name, parameter in self.named().items():
            parameter.grad = self._gradients.pop(name, parameter.grad)

    def zero_grad(self) -> None:
        super().zero_grad()
        self._gradients.clear()


class ShardedWeights(RankWeights):
    """Parameters of a sharded model, each rank with its rows. They are kept in float32, and FSDP casts them."""

    def __init__(self, model: nn.Module, ranks: Ranks, sums: list[OrderedSum]) -> None:
        super().__init__(model, ranks)
        self.sums, self.by_rows = sums, bool(sums)

    def collect_gradients(self) -> None:
        """With ordered sums: keep the gradient so far, to which the next micro-batch adds its own."""
        if not self.sums:
            return
        for name, parameter in self.named().items():
            if parameter.grad is not None:
                self._gradients[name], parameter.grad = parameter.grad, None

    def zero_grad(self) -> None:
        super().zero_grad()
        for each in self.sums:
            each.total = None

    def first_non_finite(self) -> str | None:
        """Name of the first parameter with a non-finite gradient on any rank."""
        bad = [
            i for i, p in enumerate(self.parameters) if p.grad is not None and not bool(local(p.grad).isfinite().all())
        ]
        first = -self.ranks.highest(-min(bad, default=NONE))
        return None if first == NONE else self.names[first]


class ReplicatedWeights(RankWeights):
    """Parameters that every rank has whole; their gradients are added up over the ranks.

    Args:
        exact: add in the order of the micro-batches, after each of them; else once per update.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, *halved: Any, exact: bool) -> None:
        super().__init__(model, ranks, *halved)
        self.exact = exact

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """With `exact`: add the gradients of all ranks, in their order, to those of earlier micro-batches."""
        super().collect_gradients()
        if not self.exact:
            return
        for name, parameter in self.named().items():
            if parameter.grad is None:
                continue
            assert self.ranks.group is not None
            for part in gather_over([self.ranks.group], parameter.grad):
                total = self._gradients.get(name)
                self._gradients[name] = part.clone() if total is None else total.add_(part)
            parameter.grad = None

    def put_gradients(self) -> None:
        super().put_gradients()
        for parameter in self.parameters:
            if not self.exact and parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=self.ranks.group)


def like(tensor: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor, sharded as a parameter is."""
    if not isinstance(parameter, DTensor):
        return tensor
    return distribute_tensor(tensor.to(parameter.device), parameter.device_mesh, parameter.placements)


def whole(tensor: "Tensor | DTensor") -> Tensor:
    """A sharded tensor gathered on every rank."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[operator]  # a DTensor's
