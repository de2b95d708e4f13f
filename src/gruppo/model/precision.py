"""Precision: the numbers in which a model computes, and layers that would score the same tokens differently."""

from collections.abc import Callable

import torch
from torch import nn

from gruppo.model.optim import MasterWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def half_or_float(dtype: str) -> torch.dtype:
    """In which a model on ranks computes, by the option: bfloat16 on a GPU that has it, unless another is named."""
    has_bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return torch.bfloat16 if dtype == "bfloat16" or (dtype == "auto" and has_bf16) else torch.float32


def in_precision(
    model: nn.Module, compute: torch.dtype, make: Callable[..., MasterWeights] = MasterWeights
) -> MasterWeights | None:
    """Bring parameters to the precision in which the model computes; masters of those that train and had more.

    Parameters that a model keeps in float32 beside half-precision ones stay as they are; an adapter's do not.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]  # PEFT's
    kept = tuple(getattr(inner, "_keep_in_fp32_modules", None) or ())
    base = frozen_first(model).dtype
    halved = set()
    for name, parameter in model.named_parameters():
        is_chosen = parameter.dtype == base or ".lora_" in name or ".modules_to_save." in name
        if parameter.dtype == compute or not is_chosen or any(part in name for part in kept):
            continue
        if parameter.requires_grad and compute.itemsize < 4:
            halved.add(name)
        else:
            parameter.data = parameter.data.to(compute)
    return make(model, halved, compute) if halved else None


def frozen_first(model: nn.Module) -> nn.Parameter:
    """A parameter of the base model: one that does not train if there is any, as beside an adapter. Not a 4-bit one."""
    return min(model.parameters(), key=lambda p: (not p.is_floating_point(), p.requires_grad))


def switch_off_dropout(model: nn.Module) -> None:
    """Dropout, and kernels for scoring only, make the same weights score the same tokens differently: the ratio would
    not be 1 on-policy."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment]
        if hasattr(module, "support_avx512bf16_for_cpu"):  # 4-bit layers score in bf16 by it, and train in float32
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
