"""Optimizer, learning-rate schedule, gradient clipping, and the guard against non-finite gradients."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from gruppo.errors import InputError

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What an optimizer step did."""

    grad_norm: float
    """Norm before clipping."""
    lr: float
    skipped: bool = False
    """True when a gradient was not finite: the weights are untouched."""
    culprit: str | None = None
    """The first parameter with a non-finite gradient."""


def make_optimizer(name: str, parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """An optimizer of torch.optim by name, over the parameters that train."""
    cls = getattr(torch.optim, name, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise InputError(f"optimizer {name!r} is not in torch.optim; AdamW is usual")
    trainable = [p for p in parameters if p.requires_grad]
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


def clip_and_step(model: nn.Module, optimizer: torch.optim.Optimizer, *, max_grad_norm: float | None) -> StepReport:
    """Clip, step and clear the gradients, unless one of them is not finite: then only clear them.

    Clipping cannot save such a step: one NaN makes the norm NaN, and the norm scales every gradient. So the norm is
    taken, and the culprit looked for, before anything is scaled.
    """
    lr = optimizer.param_groups[0]["lr"]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    grad_norm = norm.item()
    if not math.isfinite(grad_norm):
        named = ((n, p.grad) for n, p in model.named_parameters() if p.grad is not None)
        culprit = next((n for n, g in named if not g.isfinite().all()), None)
        model.zero_grad(set_to_none=True)
        return StepReport(grad_norm=grad_norm, lr=lr, skipped=True, culprit=culprit)
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    optimizer.step()
    model.zero_grad(set_to_none=True)  # not the optimizer's: it may hold only some of the parameters
    return StepReport(grad_norm=grad_norm, lr=lr)
