"""Statistics and gradients of a chunk of float32 logits in Triton, as torch operators. Semantics: `chunk_ops.py`.

A row is read once by a few programs that each sum up a stretch of it, and a second time to write its direction. Logits
z are in units of log 2, for exp2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.kernel.chunk_ops import LogitShape, Pair
from gruppo.kernel.triton_logits import logit

BLOCK = 1024
NUM_WARPS = 4
STRETCHES = 8  # programs that share a row
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # stands for -inf: differences of it are numbers


@triton.jit
def _combine(partial_ptr, row, STRETCHES: tl.constexpr):
    """(log2 of the sum, entropy in units of log 2) of a row from its stretches."""
    at = partial_ptr + row * 3 * STRETCHES + tl.arange(0, STRETCHES)
    highest = tl.load(at)
    total = tl.load(at + STRETCHES)
    weighted = tl.load(at + 2 * STRETCHES)
    top = tl.max(highest, 0)
    shift = highest - top
    factor = tl.exp2(shift)
    all_total = tl.sum(total * factor, 0)
    all_weighted = tl.sum(factor * (weighted + total * shift), 0)
    log_total = tl.log2(all_total)
    return top + log_total, log_total - all_weighted / all_total


@triton.jit
def _stretch_kernel(
    x_ptr, partial_ptr, x_stride, columns, scale, cap,
    HAS_CAP: tl.constexpr, STRETCHES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of e and sum of e * (z - maximum) of one stretch of one row."""
    row, stretch = tl.program_id(0), tl.program_id(1)
    offsets = stretch * BLOCKS * BLOCK + tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.range(0, BLOCKS, num_stages=3):
        inside = offsets < columns
        x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0)
        z = tl.where(inside, logit(x, scale, cap, HAS_CAP) * LOG2_E, LOWEST)
        higher = tl.maximum(highest, z)
        shift = highest - higher
        factor = tl.exp2(shift)
        e = tl.where(inside, tl.exp2(z - higher), 0.0)
        weighted = factor * (weighted + shift * total) + e * (z - higher)
        total = factor * total + e
        highest = higher
        offsets += BLOCK
    top = tl.max(highest, 0)
    shift = highest - top
    factor = tl.exp2(shift)
    at = partial_ptr + row * 3 * STRETCHES + stretch
    tl.store(at, top)
    tl.store(at + STRETCHES, tl.sum(total * factor, 0))
    tl.store(at + 2 * STRETCHES, tl.sum(factor * (weighted + total * shift), 0))


@triton.jit
def _direction_kernel(
    x_ptr, labels_ptr, partial_ptr, logps_ptr, entropy_ptr, out_ptr,
    x_stride, out_stride, columns, scale, cap, slope,
    HAS_CAP: tl.constexpr, HAS_OUT: tl.constexpr, STRETCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a row's direction, where wanted; the first block also stores log-prob and entropy."""
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    log_sum, entropy = _combine(partial_ptr, row, STRETCHES)
    if HAS_OUT:
        offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = offsets < columns
        x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0)
        z = logit(x, scale, cap, HAS_CAP) * LOG2_E
        d = tl.where(inside, tl.exp2(z - log_sum), 0.0) - (offsets == label).to(tl.float32)
        if HAS_CAP:
            t = z * LN_2 / cap
            d = d * (1.0 - t * t)
        tl.store(out_ptr + row * out_stride + offsets, (d * slope).to(out_ptr.dtype.element_ty), mask=inside)
    if tl.program_id(1) == 0:
        z_label = logit(tl.load(x_ptr + row * x_stride + label), scale, cap, HAS_CAP) * LOG2_E
        tl.store(logps_ptr + row, (z_label - log_sum) * LN_2)
        tl.store(entropy_ptr + row, entropy * LN_2)


@triton.jit
def _gradient_kernel(
    x_ptr, labels_ptr, logps_ptr, entropy_ptr, grad_logps_ptr, grad_entropy_ptr, out_ptr,
    x_stride, out_stride, columns, scale, cap, slope,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of d loss / d x for a loss of log-probs and entropies."""
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0)
    label = tl.load(labels_ptr + row)
    z_label = logit(tl.load(x_ptr + row * x_stride + label), scale, cap, HAS_CAP) * LOG2_E
    log_sum = z_label - tl.load(logps_ptr + row) * LOG2_E
    z = logit(x, scale, cap, HAS_CAP) * LOG2_E
    p = tl.where(inside, tl.exp2(z - log_sum), 0.0)
    d = tl.load(grad_logps_ptr + row) * ((offsets == label).to(tl.float32) - p)
    d -= tl.load(grad_entropy_ptr + row) * p * ((z - log_sum) * LN_2 + tl.load(entropy_ptr + row))
    if HAS_CAP:
        t = z * LN_2 / cap
        d = d * (1.0 - t * t)
    tl.store(out_ptr + row * out_stride + offsets, (d * slope).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_kernel(
    x_ptr, factor_ptr, out_ptr, residual_ptr, weight_ptr, labels_ptr, width, x_stride, out_stride, weight_stride,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = (x + residual * weight of the label) * factor of its row, in the dtype of out."""
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < width
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = weight_ptr + tl.load(labels_ptr + row) * weight_stride + offsets
        x += tl.load(residual_ptr + row) * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    y = x * tl.load(factor_ptr + row)
    tl.store(out_ptr + row * out_stride + offsets, y.to(out_ptr.dtype.element_ty), mask=inside)


# --- torch operators ------------------------------------------------------------------------------------------------


class _Numbers:
    """Arguments of the kernels that follow from a shape: under a cap, `cap` carries the temperature."""

    def __init__(self, x_NV: Tensor, temperature: float, scale: float, soft_cap: float | None) -> None:
        assert x_NV.numel() < 2**31, "offsets are 32 bits wide"
        self.columns = x_NV.shape[1]
        self.has_cap = soft_cap is not None
        self.scale = scale / (soft_cap or temperature)
        self.cap = 1.0 if soft_cap is None else soft_cap / temperature
        self.slope = scale / temperature
        self.block = min(BLOCK, triton.next_power_of_2(self.columns))
        self.blocks = triton.cdiv(triton.cdiv(self.columns, self.block), STRETCHES)


@torch.library.custom_op("gruppo::chunk_stats", mutates_args=("out",))
def _stats(
    x: Tensor, labels: Tensor, temperature: float, scale: float, soft_cap: float | None, out: Tensor | None
) -> tuple[Tensor, Tensor]:
    n = _Numbers(x, temperature, scale, soft_cap)
    logps, entropy = (torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(2))
    # Maximum and sums of each stretch of each row
    partial = torch.empty(len(x), 3, STRETCHES, dtype=torch.float32, device=x.device)
    if len(x):
        common = {"HAS_CAP": n.has_cap, "STRETCHES": STRETCHES, "BLOCK": n.block, "num_warps": NUM_WARPS}
        _stretch_kernel[(len(x), STRETCHES)](
            x, partial, x.stride(0), n.columns, n.scale, n.cap, BLOCKS=n.blocks, **common
        )
        e, num_blocks = (x, 1) if out is None else (out, triton.cdiv(n.columns, n.block))
        _direction_kernel[(len(x), num_blocks)](
            x, labels, partial, logps, entropy, e, x.stride(0), e.stride(0), n.columns, n.scale, n.cap, n.slope,
            HAS_OUT=out is not None, **common,
        )  # fmt: skip
    return logps, entropy


@_stats.register_fake
def _(x, labels, temperature, scale, soft_cap, out):
    return x.new_empty(len(x), dtype=torch.float32), x.new_empty(len(x), dtype=torch.float32)


@torch.library.custom_op("gruppo::chunk_gradient", mutates_args=("out",))
def _gradient(
    x: Tensor, labels: Tensor, grad_logps: Tensor, grad_entropy: Tensor, logps: Tensor, entropy: Tensor,
    temperature: float, scale: float, soft_cap: float | None, out: Tensor,
) -> None:  # fmt: skip
    n = _Numbers(x, temperature, scale, soft_cap)
    if len(x):
        _gradient_kernel[(len(x), triton.cdiv(n.columns, n.block))](
            x, labels, logps, entropy, grad_logps, grad_entropy, out,
            x.stride(0), out.stride(0), n.columns, n.scale, n.cap, n.slope,
            HAS_CAP=n.has_cap, BLOCK=n.block, num_warps=NUM_WARPS,
        )  # fmt: skip


@torch.library.custom_op("gruppo::scale_rows", mutates_args=("out",))
def _scale_rows(
    x: Tensor, factor: Tensor, out: Tensor, residual: Tensor | None, weight: Tensor | None, labels: Tensor | None
) -> None:
    block = 1024
    has_residual = residual is not None
    weight = factor[:, None] if weight is None else weight
    _scale_kernel[(len(x), triton.cdiv(x.shape[1], block))](
        x, factor, out, residual if has_residual else factor, weight, factor if labels is None else labels,
        x.shape[1], x.stride(0), out.stride(0), weight.stride(0),
        HAS_RESIDUAL=has_residual, BLOCK=block, num_warps=4,
    )  # fmt: skip


def stats(x_NV: Tensor, labels_N: Tensor, shape: LogitShape, out_NV: Tensor | None = None) -> Pair:
    return _stats(x_NV, labels_N, shape.temperature, shape.scale, shape.soft_cap, out_NV)


def gradient(x_NV: Tensor, labels_N: Tensor, numbers: Pair, grads: Pair, shape: LogitShape, out_NV: Tensor) -> None:
    _gradient(x_NV, labels_N, *grads, *numbers, shape.temperature, shape.scale, shape.soft_cap, out_NV)


def scale_rows(
    x_ND: Tensor, factor_N: Tensor, out_ND: Tensor, label_part: tuple[Tensor, Tensor, Tensor] | None = None
) -> None:
    if len(x_ND):
        _scale_rows(x_ND, factor_N, out_ND, *(label_part or (None, None, None)))
