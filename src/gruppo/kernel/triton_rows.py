"""Row operations on a chunk of float32 logits in Triton. Semantics: `rows.py`.

A row is read once by a few programs that each sum up a stretch of it, and a second time to write its direction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.kernel.rows import LogitShape

BLOCK = 1024
NUM_WARPS = 4
STRETCHES = 8  # programs that share a row
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # stands for -inf: differences of it are numbers


@triton.jit
def _logit(x, scale, cap, HAS_CAP: tl.constexpr):
    """The logit in units of log 2; `scale` holds scale and temperature, or only scale under a cap."""
    if HAS_CAP:
        e = tl.exp(-2.0 * tl.abs(x * scale))
        t = (1.0 - e) / (1.0 + e)
        z = tl.where(x * scale < 0, -t, t) * cap
    else:
        z = x * scale
    return z * LOG2_E


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
    x_ptr, partial_ptr, x_stride, vocabulary, scale, cap,
    HAS_CAP: tl.constexpr, STRETCHES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Maximum, sum of e and sum of e * (z - maximum) of one stretch of one row."""
    row, stretch = tl.program_id(0), tl.program_id(1)
    offsets = stretch * BLOCKS * BLOCK + tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    weighted = tl.zeros((BLOCK,), tl.float32)
    for _ in tl.range(0, BLOCKS, num_stages=3):
        inside = offsets < vocabulary
        x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0)
        z = tl.where(inside, _logit(x, scale, cap, HAS_CAP), LOWEST)
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
def _finish_kernel(
    x_ptr, labels_ptr, partial_ptr, logps_ptr, entropy_ptr, x_stride, scale, cap,
    HAS_CAP: tl.constexpr, STRETCHES: tl.constexpr,
):  # fmt: skip
    """Log-prob of the label and entropy of one row."""
    row = tl.program_id(0)
    log_sum, entropy = _combine(partial_ptr, row, STRETCHES)
    z = _logit(tl.load(x_ptr + row * x_stride + tl.load(labels_ptr + row)), scale, cap, HAS_CAP)
    tl.store(logps_ptr + row, (z - log_sum) * LN_2)
    tl.store(entropy_ptr + row, entropy * LN_2)


@triton.jit
def _direction_kernel(
    x_ptr, labels_ptr, partial_ptr, logps_ptr, entropy_ptr, out_ptr,
    x_stride, out_stride, vocabulary, columns, scale, cap, slope,
    HAS_CAP: tl.constexpr, STRETCHES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of a row's direction; the first block also stores log-prob and entropy."""
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < vocabulary
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0)
    label = tl.load(labels_ptr + row)
    log_sum, entropy = _combine(partial_ptr, row, STRETCHES)
    z = _logit(x, scale, cap, HAS_CAP)
    d = tl.where(inside, tl.exp2(z - log_sum), 0.0) - (offsets == label).to(tl.float32)
    if HAS_CAP:
        t = z * LN_2 / cap
        d = d * (1.0 - t * t)
    tl.store(out_ptr + row * out_stride + offsets, (d * slope).to(out_ptr.dtype.element_ty), mask=offsets < columns)
    if tl.program_id(1) == 0:
        z_label = _logit(tl.load(x_ptr + row * x_stride + label), scale, cap, HAS_CAP)
        tl.store(logps_ptr + row, (z_label - log_sum) * LN_2)
        tl.store(entropy_ptr + row, entropy * LN_2)


@triton.jit
def _gradient_kernel(
    x_ptr, labels_ptr, logps_ptr, entropy_ptr, grad_logps_ptr, grad_entropy_ptr, out_ptr,
    x_stride, out_stride, vocabulary, columns, scale, cap, slope,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of d loss / d x for a loss of log-probs and entropies."""
    row = tl.program_id(0)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < vocabulary
    x = tl.load(x_ptr + row * x_stride + offsets, mask=inside, other=0.0)
    label = tl.load(labels_ptr + row)
    z_label = _logit(tl.load(x_ptr + row * x_stride + label), scale, cap, HAS_CAP)
    log_sum = z_label - tl.load(logps_ptr + row) * LOG2_E
    z = _logit(x, scale, cap, HAS_CAP)
    p = tl.where(inside, tl.exp2(z - log_sum), 0.0)
    d = tl.load(grad_logps_ptr + row) * ((offsets == label).to(tl.float32) - p)
    d -= tl.load(grad_entropy_ptr + row) * p * ((z - log_sum) * LN_2 + tl.load(entropy_ptr + row))
    if HAS_CAP:
        t = z * LN_2 / cap
        d = d * (1.0 - t * t)
    tl.store(out_ptr + row * out_stride + offsets, (d * slope).to(out_ptr.dtype.element_ty), mask=offsets < columns)


class _Numbers:
    """What the kernels need to know of a shape: under a cap, `cap` carries the temperature."""

    def __init__(self, x_NV: Tensor, shape: LogitShape) -> None:
        columns = x_NV.shape[1]
        assert x_NV.numel() < 2**31, "offsets are 32 bits wide"
        self.columns = columns
        self.vocabulary = columns if shape.vocabulary is None else shape.vocabulary
        self.has_cap = shape.soft_cap is not None
        self.scale = shape.scale / (shape.soft_cap or shape.temperature)
        self.cap = 1.0 if shape.soft_cap is None else shape.soft_cap / shape.temperature
        self.slope = shape.scale / shape.temperature
        self.block = min(BLOCK, triton.next_power_of_2(columns))
        self.blocks = triton.cdiv(triton.cdiv(self.vocabulary, self.block), STRETCHES)
        self.warps = NUM_WARPS if self.block == BLOCK else 4


def stats(x_NV: Tensor, labels_N: Tensor, shape: LogitShape) -> tuple[Tensor, Tensor]:
    return _run(x_NV, labels_N, shape, None)


def stats_and_direction(x_NV: Tensor, labels_N: Tensor, shape: LogitShape, out_NV: Tensor) -> tuple[Tensor, Tensor]:
    return _run(x_NV, labels_N, shape, out_NV)


def _run(x_NV: Tensor, labels_N: Tensor, shape: LogitShape, out_NV: Tensor | None) -> tuple[Tensor, Tensor]:
    n = _Numbers(x_NV, shape)
    num_rows = len(x_NV)
    logps_N = torch.empty(num_rows, dtype=torch.float32, device=x_NV.device)
    entropy_N = torch.empty_like(logps_N)
    partial = torch.empty(num_rows, 3, STRETCHES, dtype=torch.float32, device=x_NV.device)
    if num_rows == 0:
        return logps_N, entropy_N
    common = {"HAS_CAP": n.has_cap, "STRETCHES": STRETCHES, "num_warps": n.warps}
    _stretch_kernel[(num_rows, STRETCHES)](
        x_NV, partial, x_NV.stride(0), n.vocabulary, n.scale, n.cap, BLOCKS=n.blocks, BLOCK=n.block, **common
    )
    if out_NV is None:
        _finish_kernel[(num_rows,)](
            x_NV, labels_N, partial, logps_N, entropy_N, x_NV.stride(0), n.scale, n.cap,
            HAS_CAP=n.has_cap, STRETCHES=STRETCHES, num_warps=1,
        )  # fmt: skip
    else:
        _direction_kernel[(num_rows, triton.cdiv(n.columns, n.block))](
            x_NV, labels_N, partial, logps_N, entropy_N, out_NV,
            x_NV.stride(0), out_NV.stride(0), n.vocabulary, n.columns, n.scale, n.cap, n.slope, BLOCK=n.block, **common,
        )  # fmt: skip
    return logps_N, entropy_N


def gradient(
    x_NV: Tensor,
    labels_N: Tensor,
    grad_logps_N: Tensor,
    grad_entropy_N: Tensor,
    logps_N: Tensor,
    entropy_N: Tensor,
    shape: LogitShape,
    out_NV: Tensor,
) -> None:
    n = _Numbers(x_NV, shape)
    if len(x_NV):
        _gradient_kernel[(len(x_NV), triton.cdiv(n.columns, n.block))](
            x_NV, labels_N, logps_N, entropy_N, grad_logps_N, grad_entropy_N, out_NV,
            x_NV.stride(0), out_NV.stride(0), n.vocabulary, n.columns, n.scale, n.cap, n.slope,
            HAS_CAP=n.has_cap, BLOCK=n.block, num_warps=n.warps,
        )  # fmt: skip
