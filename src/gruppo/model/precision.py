"""Precision: the numbers in which a model computes, and layers that would score the same tokens differently."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gruppo.model.optim import MasterWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HALF = (torch.bfloat16, torch.float16)


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


def can_widen(model: nn.Module) -> bool:
    """Whether all of it can compute in float32: 4-bit layers and shards have a precision of their own."""
    return all(p.is_floating_point() and not isinstance(p.data, DTensor) for p in model.parameters())


@contextmanager
def in_float32(model: nn.Module) -> Iterator[None]:
    """The model computes in float32 meanwhile, without TF32: each layer is widened for its own call."""
    kept: dict[nn.Parameter, Tensor] = {}

    def widen(parameter: nn.Parameter) -> None:
        if parameter.element_size() == 2:
            kept[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        for parameter in module.parameters(recurse=False):
            widen(parameter)
        # Some families cast to the precision of a layer's weight before they call it.
        return tuple(x.float() if isinstance(x, Tensor) and x.dtype in HALF else x for x in inputs)

    def after(module: nn.Module, *_: Any) -> None:
        for parameter in module.parameters(recurse=False):
            if parameter in kept and parameter not in adapter:
                parameter.data = kept.pop(parameter)

    adapter = {parameter for name, parameter in model.named_parameters() if ".lora_" in name}
    hooks: list[Any] = []
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for parameter in adapter:  # PEFT casts to their precision, and they are small
            widen(parameter)
        for module in model.modules():
            hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after, always_call=True)]
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for hook in hooks:
            hook.remove()
        for parameter, data in kept.items():
            parameter.data = data


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
