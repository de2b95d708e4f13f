"""Optimizer, float32 master weights, learning-rate schedule, gradient clipping, and the guard against non-finite
gradients."""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gruppo.errors import InputError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What an optimizer step did."""

    grad_norm: float | None
    """Norm before clipping; None when there was no gradient at all."""
    lr: float
    skipped: bool = False
    """True when a gradient was not finite: the weights are untouched."""
    culprit: str | None = None
    """The first parameter with a non-finite gradient; all together where each is finite and their norm is not."""


class MasterWeights:
    """Float32 copies of parameters that compute in half precision.

    A bf16 weight has 8 bits: a step of less than 1/256 of it is rounded away, so at usual learning rates nothing would
    be learned. The model computes in half precision; gradients are added up, and the optimizer steps, in float32.
    Where the model computes in float32 a parameter stands for itself.

    Args:
        halved: names of float32 parameters that become masters, while the model computes with copies in `compute`.
    """

    def __init__(self, model: nn.Module, halved: Collection[str] = (), compute: torch.dtype = torch.bfloat16) -> None:
        self.by_rows = False
        """Whether the norm of the gradient is a sum over rows, which is the same however they are sharded."""
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        """What the optimizer updates, one per parameter that trains."""
        self._halves: list[tuple[nn.Parameter, nn.Parameter]] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            master = parameter
            if parameter.element_size() < 4 or name in halved:
                master = nn.Parameter(parameter.detach().float())
                if name in halved:
                    parameter.data = parameter.data.to(compute)
                self._halves.append((parameter, master))
            self.names.append(name)
            self.parameters.append(master)

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Add the gradients of half-precision parameters to their masters', and clear them."""
        sums, parts = [], []
        for half, master in self._halves:
            if half.grad is None:
                continue
            if master.grad is None:
                master.grad = half.grad.float()
            else:
                sums.append(master.grad)
                parts.append(half.grad)
            half.grad = None
        if sums:
            torch._foreach_add_(sums, parts)  # pyright: ignore[reportPrivateImportUsage]

    def put_gradients(self) -> None:
        """The gradient of the step, where the optimizer reads it. Here it is there already."""

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the model's own parameters."""
        if self._halves:
            halves, masters = zip(*self._halves, strict=True)
            torch._foreach_copy_(halves, masters)  # pyright: ignore[reportPrivateImportUsage]

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """The model with float32 weights, for reading and writing files."""
        rounded = [half.data for half, _ in self._halves]
        for half, master in self._halves:
            half.data = master.data
        try:
            yield
        finally:
            for (half, _), data in zip(self._halves, rounded, strict=True):
                half.data = data
            self.write_back()

    def zero_grad(self) -> None:
        for parameter in (*self.parameters, *(half for half, _ in self._halves)):
            parameter.grad = None

    def first_non_finite(self) -> str | None:
        """Name of the first parameter with a non-finite gradient."""
        return next((n for n, p in self.named().items() if p.grad is not None and not p.grad.isfinite().all()), None)

    def named(self) -> dict[str, nn.Parameter]:
        """What training changes, by name, in the precision it is kept in."""
        return dict(zip(self.names, self.parameters, strict=True))


def local(tensor: Tensor) -> Tensor:
    """This rank's rows of a sharded tensor; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # type: ignore[operator]  # a DTensor's


def norm_by_rows(gradients: list[Tensor]) -> Tensor:
    """Norm of a gradient from float64 sums over the rows of each tensor, added in one order. Shards have whole rows."""
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for gradient in gradients:
        own = local(gradient)
        rows = own.double().square().reshape(len(own), -1).sum(1) if own.numel() else own.new_zeros(len(own)).double()
        if own is not gradient:
            assert isinstance(gradient, DTensor)
            shape = torch.Size([gradient.shape[0]])
            mesh, placements = gradient.device_mesh, gradient.placements
            rows = DTensor.from_local(rows, mesh, placements, shape=shape, stride=(1,)).full_tensor()
        total = total + rows.sum()
    return total.sqrt().float()


def make_optimizer(name: str, trainable: list[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """An optimizer of torch.optim by name, over the parameters that train."""
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise InputError(f"optimizer {name!r} is not in torch.optim; AdamW is usual")
    if not trainable:
        raise InputError("the model has no parameter that trains; everything is frozen")
    if name in ("Adam", "AdamW") and not options.keys() & {"fused", "foreach", "capturable", "differentiable"}:
        options["fused"] = True  # one kernel over all parameters; on a CPU the default is a Python loop
    return cls(trainable, **options)


def schedule_factor(schedule: Schedule, step: int, warmup_steps: int, total_steps: int | None) -> float:
    """The factor on the learning rate at `step` (0 is the first): linear warm-up, then the schedule.

    >>> [schedule_factor("linear", s, 2, 6) for s in range(6)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant" or total_steps is None:
        return 1.0
    progress = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return 1.0 - progress if schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))


def clip_and_step(
    weights: MasterWeights, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None
) -> StepReport:
    """Clip, step and clear the gradients, unless one of them is not finite: then only clear them.

    Clipping cannot save such a step: one NaN makes the norm NaN, and the norm scales every gradient. So the norm is
    taken, and the culprit looked for, before anything is scaled.
    """
    lr = optimizer.param_groups[0]["lr"]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        weights.zero_grad()
        return StepReport(grad_norm=None, lr=lr)
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = norm_by_rows(gradients) if weights.by_rows else torch.nn.utils.get_total_norm(gradients)
    grad_norm = norm.item()
    if not math.isfinite(grad_norm):
        culprit = weights.first_non_finite() or "all parameters together"
        weights.zero_grad()
        return StepReport(grad_norm=grad_norm, lr=lr, skipped=True, culprit=culprit)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    optimizer.step()
    weights.write_back()
    weights.zero_grad()  # not the optimizer's: it may hold only some of the parameters
    return StepReport(grad_norm=grad_norm, lr=lr)
