"""Metric: numbers of a step, from sums and maxima that merge exactly over micro-batches and ranks.

Each value is rounded to a multiple of 2^-30 before it is added, so the order of additions does not matter.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from gruppo.batch.segments import IGNORE_INDEX
from gruppo.errors import InputError
from gruppo.keys import Key
from gruppo.loss.inputs import LossInputs, align
from gruppo.parallel.ranks import groups_of, max_over, reduction_device, sum_over

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

GRID = 2.0**30


def exact_sum_(values: Tensor) -> Tensor:
    """Sum in float64 of values on the grid of 2^-30, `[]`. The values are overwritten."""
    # A float32 times a power of two loses nothing, and rounding it is exact: what is no integer is below 2^23.
    return values.mul_(GRID).round_().sum(dtype=torch.float64) / GRID


def total(inputs: LossInputs, values_T: Tensor) -> Tensor:
    """Sum of a value per token over the scored tokens, `[]`; for `Metric.measure`."""
    return exact_sum_(inputs.segments.keep(values_T.to(torch.float64, copy=True)))


def largest(inputs: LossInputs, values_T: Tensor) -> Tensor:
    """Largest value over the scored tokens, `[]`; -inf without any."""
    if not len(values_T):
        return torch.tensor(-torch.inf, dtype=torch.float64, device=values_T.device)
    return values_T.to(torch.float64).masked_fill(~inputs.segments.mask, -torch.inf).amax()


class Metric:
    """Base class of metrics: `measure` a micro-batch, `report` a step.

    A subclass names its sums in `sums` and its maxima in `maxima`, gives their values in `measure` and turns their
    totals into numbers in `report`. Given tensors, padded or with `cu_seqlens`, nothing makes the host wait for a GPU
    but `calculate`, once. `calculate` does not reset; call `reset` before the next step.

    Args:
        device_mesh: reduce over all its ranks.
        process_group: reduce over this group instead.
        ignore_index: the label of slots that are not scored.
    """

    keys: ClassVar[tuple[Key, ...]] = ()
    """Keys it reports that are not in `gruppo.keys`."""
    sums: ClassVar[tuple[str, ...]] = ()
    maxima: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        device_mesh: "DeviceMesh | None" = None,
        process_group: "ProcessGroup | None" = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        self.groups = groups_of(device_mesh, process_group)
        self.ignore_index = ignore_index
        self.reset()

    def measure(self, inputs: LossInputs) -> Mapping[str, Tensor]:
        """Values of one micro-batch by name, each `[]`, made with `total` and `largest`. A name may be left out."""
        raise NotImplementedError

    def report(self, totals: Mapping[str, float]) -> dict[str, Any]:
        """Numbers of a step from the totals over its micro-batches and ranks."""
        raise NotImplementedError

    def accumulate(self, inputs: Mapping[str, Any], outputs: Mapping[str, Any], **given: Any) -> None:
        """Add one micro-batch; arguments as for a loss."""
        if not isinstance(outputs, Mapping):
            raise InputError(f"outputs must be a mapping with 'logps' or 'logits', got {type(outputs).__name__}")
        given.setdefault("advantages", None)
        with torch.no_grad():
            aligned = align(inputs, outputs, **given, ignore_index=self.ignore_index)
        self.add(aligned, live_only=False)

    @torch.no_grad()
    def add(self, inputs: LossInputs, live_only: bool = True) -> None:
        """Add the micro-batch that a loss was computed on, or only its sequences with an advantage other than 0."""
        values = self.measure(inputs.of_live() if live_only else inputs)
        device = inputs.segments.bits.device
        zero = torch.zeros((), dtype=torch.float64, device=device)
        if self.sums:
            seen = torch.stack([values.get(name, zero).to(torch.float64) for name in self.sums])
            self._sums = self._sums.to(device, non_blocking=True) + seen
        if self.maxima:
            seen = torch.stack([values.get(name, zero - torch.inf).to(torch.float64) for name in self.maxima])
            self._maxima = torch.maximum(self._maxima.to(device, non_blocking=True), seen)
        self._num_sequences += inputs.segments.num_sequences

    def calculate(self) -> dict[str, Any]:
        """Metrics since the last `reset`, over all ranks; {} if nothing was scored."""
        sums, maxima = self._sums, self._maxima
        if not self._num_sequences:
            if not self.groups:
                return {}
            sums, maxima = (values.to(reduction_device(self.groups)) for values in (sums, maxima))
        totals = dict(zip(self.sums, sum_over(self.groups, sums).tolist(), strict=True))
        totals |= dict(zip(self.maxima, max_over(self.groups, maxima).tolist(), strict=True))
        return self.report(totals)

    def reset(self) -> None:
        """Forget everything."""
        self._sums = torch.zeros(len(self.sums), dtype=torch.float64)
        self._maxima = torch.full((len(self.maxima),), -torch.inf, dtype=torch.float64)
        self._num_sequences = 0
        self._top: Tensor | None = None  # rows of single tokens, for a metric that reports some
