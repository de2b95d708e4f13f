"""Hidden states x weight with the softmax in its epilogue: the logits never reach memory.

For a row with label l, let e_v = exp(z_v - z_l) and R = sum of e_v over v != l. Then

    log p_l = -log(1 + R),      d log p_l / d z_v = -e_v / (1 + R) for v != l,   R / (1 + R) for v = l

so with E = (e_v for v != l, -R at l), in bf16, the gradient of any loss with G = dL/dlogp is a row factor away:

    d_hidden = -G / (1 + R) * (E @ weight),      d_weight = E.T @ (-G / (1 + R) * hidden)

z_l is a dot product per row, known before the big product starts; that is what makes one pass enough. E is relative
to z_l and not to the largest logit, which bf16 and float32 can hold as long as log p_l > -80; `overflowed` says when a
row is beyond that, and the head then computes it by `triton_chunk_ops`.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_EXPONENT = tl.constexpr(80.0)
BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64
STAGES, WARPS = 3, 8


@triton.jit
def logit(x, scale, cap, HAS_CAP: tl.constexpr):
    """`scale` holds scale and temperature; under a cap only what goes into the tanh."""
    if HAS_CAP:
        e = tl.exp(-2.0 * tl.abs(x * scale))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x * scale < 0, -t, t) * cap
    else:
        return x * scale


@triton.jit
def _finish_tile(
    x, rows, columns, labels, reference, e_ptr, e_stride, num_rows, num_columns, scale, cap,
    HAS_CAP: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Turn a piece of the product into e, store it, and return its row sums of e and e * (z - z_l)."""
    z = logit(x, scale, cap, HAS_CAP)
    u = tl.minimum(z - reference[:, None], MAX_EXPONENT)
    counts = (columns[None, :] < num_columns) & (columns[None, :] != labels[:, None])
    e = tl.where(counts, tl.exp(u), 0.0)
    sums = tl.sum(e, 1)
    weighted = tl.sum(e * u, 1)
    if STORE:
        if HAS_CAP:
            t = z / cap
            e = e * (1.0 - t * t)
        at = e_ptr + rows[:, None].to(tl.int64) * e_stride + columns[None, :]
        inside = (rows[:, None] < num_rows) & (columns[None, :] < num_columns)
        tl.store(at, e.to(e_ptr.dtype.element_ty), mask=inside)
    return sums, weighted


@triton.jit
def _logits_kernel(
    hidden_desc, weight_desc, labels_ptr, reference_ptr, e_ptr, sums_ptr, weighted_ptr,
    num_rows, num_columns, width, e_stride, scale, cap,
    HAS_CAP: tl.constexpr, STORE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(num_columns, BLOCK_N)
    steps_k = tl.cdiv(width, BLOCK_K)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
        # Neighbouring programs take the same columns: a piece of the weight is read once for all rows.
        m = tile % tiles_m
        n = tile // tiles_m
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(steps_k):
            a = hidden_desc.load([m * BLOCK_M, k * BLOCK_K])
            b = weight_desc.load([n * BLOCK_N, k * BLOCK_K])
            total = tl.dot(a, b.T, total)
        rows = m * BLOCK_M + tl.arange(0, BLOCK_M)
        labels = tl.load(labels_ptr + rows, mask=rows < num_rows, other=-1)
        reference = tl.load(reference_ptr + rows, mask=rows < num_rows, other=0.0)
        # In halves, because e and its product need registers beside the half that waits.
        left, right = tl.split(tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))
        columns = n * BLOCK_N + tl.arange(0, BLOCK_N // 2)
        sums, weighted = _finish_tile(
            left, rows, columns, labels, reference, e_ptr, e_stride, num_rows, num_columns, scale, cap, HAS_CAP, STORE,
        )  # fmt: skip
        more, more_weighted = _finish_tile(
            right, rows, columns + BLOCK_N // 2, labels, reference, e_ptr, e_stride, num_rows, num_columns, scale, cap,
            HAS_CAP, STORE,
        )  # fmt: skip
        sums += more
        weighted += more_weighted
        tl.store(sums_ptr + n * num_rows + rows, sums, mask=rows < num_rows)
        tl.store(weighted_ptr + n * num_rows + rows, weighted, mask=rows < num_rows)


@triton.jit
def _label_kernel(
    hidden_ptr, weight_ptr, labels_ptr, out_ptr, hidden_stride, weight_stride, width, scale, cap,
    HAS_CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """z_l: the logit of each row's label."""
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + offsets < width
        a = tl.load(hidden_ptr + row * hidden_stride + start + offsets, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(weight_ptr + label * weight_stride + start + offsets, mask=inside, other=0.0).to(tl.float32)
        total += a * b
    tl.store(out_ptr + row, logit(tl.sum(total, 0), scale, cap, HAS_CAP))


@triton.jit
def _rows_kernel(
    sums_ptr, weighted_ptr, labels_ptr, reference_ptr, e_ptr,
    logps_ptr, entropies_ptr, factor_ptr, residual_ptr, overflowed_ptr,
    num_rows, num_tiles, e_stride, slope, cap,
    HAS_CAP: tl.constexpr, STORE: tl.constexpr, ROWS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Numbers of each row from the sums of its tiles, and the label's column of E."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < num_rows
    rest = tl.zeros((ROWS,), tl.float32)
    weighted = tl.zeros((ROWS,), tl.float32)
    for start in range(0, num_tiles, TILES):
        tiles = start + tl.arange(0, TILES)
        at = tiles[:, None] * num_rows + rows[None, :]
        there = (tiles[:, None] < num_tiles) & inside[None, :]
        rest += tl.sum(tl.load(sums_ptr + at, mask=there, other=0.0), 0)
        weighted += tl.sum(tl.load(weighted_ptr + at, mask=there, other=0.0), 0)
    total = 1.0 + rest
    # log(1 + R) for any R: the rounding of 1 + R is divided out again
    log_total = tl.where(total == 1.0, rest, tl.log(total) * (rest / tl.where(total == 1.0, 1.0, total - 1.0)))
    tl.store(logps_ptr + rows, -log_total, mask=inside)
    tl.store(entropies_ptr + rows, log_total - weighted / total, mask=inside)
    # e^80 is clipped there, and its neighbours in bf16 are not far from overflow
    tl.atomic_max(overflowed_ptr, tl.max((inside & (rest > 1e34)).to(tl.int32), 0))
    if STORE:
        at_label = -rest
        if HAS_CAP:
            t = tl.load(reference_ptr + rows, mask=inside, other=0.0) / cap
            at_label = at_label * (1.0 - t * t)
        rounded = at_label.to(e_ptr.dtype.element_ty)
        labels = tl.load(labels_ptr + rows, mask=inside, other=0)
        tl.store(e_ptr + rows.to(tl.int64) * e_stride + labels, rounded, mask=inside)
        tl.store(residual_ptr + rows, at_label - rounded.to(tl.float32), mask=inside)
        tl.store(factor_ptr + rows, -slope / total, mask=inside)


def is_supported(weight: Tensor) -> bool:
    """bf16 on a GPU with tensor memory access (Hopper and later), rows of whole 16-byte pieces."""
    if not (weight.is_cuda and weight.dtype == torch.bfloat16 and weight.is_contiguous()):
        return False
    return torch.cuda.get_device_capability(weight.device)[0] >= 9 and weight.shape[1] % 8 == 0


@torch.library.custom_op(
    "gruppo::logits_pass", mutates_args=("logps", "entropies", "factor", "residual", "overflowed", "out")
)
def logits_pass(
    hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, scale: float, soft_cap: float | None,
    logps: Tensor, entropies: Tensor, factor: Tensor, residual: Tensor, overflowed: Tensor, out: Tensor | None,
) -> None:  # fmt: skip
    """Log-probs, entropies and, into `out`, E with the label's column filled in.

    Args:
        hidden: `[N, D]` bf16.
        weight: `[V, D]` bf16.
        labels: `[N]` int64.
        logps, entropies: `[N]` float32, written.
        factor: `[N]` float32, written: -slope / (1 + R), the gradient of log p over E.
        residual: `[N]` float32, written: what rounding took from the label's column of E.
        overflowed: `[1]` int32, set to 1 once a row was out of range.
        out: `[N, V]` bf16, written: E; None when no gradient is wanted.
    """
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_rows, width = hidden.shape
    num_columns = len(weight)
    has_cap = soft_cap is not None
    factor_in = scale / (soft_cap or temperature)
    cap = (soft_cap or 1.0) / temperature
    reference = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    _label_kernel[(num_rows,)](
        hidden, weight, labels, reference, hidden.stride(0), weight.stride(0), width, factor_in, cap,
        HAS_CAP=has_cap, BLOCK=1024, num_warps=4,
    )  # fmt: skip
    tiles = triton.cdiv(num_columns, BLOCK_N)
    sums, weighted = torch.empty(2, tiles, num_rows, dtype=torch.float32, device=hidden.device)
    programs = _num_programs(hidden.device)
    e, e_stride = (hidden, 0) if out is None else (out, out.stride(0))
    _logits_kernel[(programs,)](
        TensorDescriptor.from_tensor(hidden, [BLOCK_M, BLOCK_K]),
        TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K]),
        labels, reference, e, sums, weighted,
        num_rows, num_columns, width, e_stride, factor_in, cap, HAS_CAP=has_cap, STORE=out is not None,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, PROGRAMS=programs,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    _rows_kernel[(triton.cdiv(num_rows, 32),)](
        sums, weighted, labels, reference, e, logps, entropies, factor, residual, overflowed,
        num_rows, tiles, e_stride, scale / temperature, cap,
        HAS_CAP=has_cap, STORE=out is not None, ROWS=32, TILES=64, num_warps=4,
    )  # fmt: skip


@cache
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
