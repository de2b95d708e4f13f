"""Hidden states x weight with the softmax in its epilogue: the logits never reach memory.

For a row with label l, let e_v = exp(z_v - z_l) and R = sum of e_v over v != l. Then

    log p_l = -log(1 + R),      d log p_l / d z_v = -e_v / (1 + R) for v != l,   R / (1 + R) for v = l

so with E = (e_v for v != l, -R at l), in bf16, the gradient of any loss with G = dL/dlogp is a row factor away:

    d_hidden = -G / (1 + R) * (E @ weight),      d_weight = E.T @ (-G / (1 + R) * hidden)

z_l is a dot product per row, known before the big product starts; that is what makes one pass enough. E is relative
to z_l and not to the largest logit, which bf16 and float32 can hold as long as log p_l > -80; `Logits.overflowed`
says when a row is beyond that, and the head then takes the route of `triton_rows`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.kernel.rows import LogitShape

MAX_EXPONENT = tl.constexpr(80.0)
BLOCK_M, BLOCK_N, BLOCK_K = 128, 256, 64
STAGES, WARPS = 3, 8


@triton.jit
def _logit(x, scale, cap, HAS_CAP: tl.constexpr):
    """`scale` holds scale and temperature; under a cap only what goes into the tanh."""
    if HAS_CAP:
        e = tl.exp(-2.0 * tl.abs(x * scale))
        t = (1.0 - e) / (1.0 + e)
        return tl.where(x * scale < 0, -t, t) * cap
    else:
        return x * scale


@triton.jit
def _finish_tile(
    x, rows, columns, labels, reference, e_ptr, e_stride, num_rows, num_columns, vocabulary, scale, cap,
    HAS_CAP: tl.constexpr, STORE: tl.constexpr,
):  # fmt: skip
    """Turn a piece of the product into e, store it, and return its row sums of e and e * (z - z_l)."""
    z = _logit(x, scale, cap, HAS_CAP)
    u = tl.minimum(z - reference[:, None], MAX_EXPONENT)
    counts = (columns[None, :] < vocabulary) & (columns[None, :] != labels[:, None])
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
    num_rows, num_columns, vocabulary, width, e_stride, scale, cap,
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
            left, rows, columns, labels, reference, e_ptr, e_stride, num_rows, num_columns, vocabulary, scale, cap,
            HAS_CAP, STORE,
        )  # fmt: skip
        more, more_weighted = _finish_tile(
            right, rows, columns + BLOCK_N // 2, labels, reference, e_ptr, e_stride, num_rows, num_columns, vocabulary,
            scale, cap, HAS_CAP, STORE,
        )  # fmt: skip
        sums += more
        weighted += more_weighted
        tl.store(sums_ptr + n * num_rows + rows, sums, mask=rows < num_rows)
        tl.store(weighted_ptr + n * num_rows + rows, weighted, mask=rows < num_rows)


@triton.jit
def _label_kernel(
    hidden_ptr, weight_ptr, labels_ptr, out_ptr, hidden_stride, weight_stride, width, BLOCK: tl.constexpr
):
    """The product of a row with its label's weight: one logit per row."""
    row = tl.program_id(0)
    label = tl.load(labels_ptr + row)
    offsets = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + offsets < width
        a = tl.load(hidden_ptr + row * hidden_stride + start + offsets, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(weight_ptr + label * weight_stride + start + offsets, mask=inside, other=0.0).to(tl.float32)
        total += a * b
    tl.store(out_ptr + row, tl.sum(total, 0))


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


def scale_rows(
    x: Tensor, factor: Tensor, out: Tensor, label_part: tuple[Tensor, Tensor, Tensor] | None = None
) -> Tensor:
    """`out = x * factor[:, None]` in one pass, with the cast.

    With `label_part` (residual, weight, labels), x first gains what rounding took from the label's column: one number
    that weighs as much as all others of its row together.
    """
    residual, weight, labels = label_part or (factor, factor[:, None], factor)
    block = 1024
    _scale_kernel[(len(x), triton.cdiv(x.shape[1], block))](
        x, factor, out, residual, weight, labels, x.shape[1], x.stride(0), out.stride(0), weight.stride(0),
        HAS_RESIDUAL=label_part is not None, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


class Logits:
    """What one pass over a window of rows gives."""

    def __init__(
        self, logps: Tensor, entropies: Tensor, rest: Tensor, residual: Tensor | None, overflowed: Tensor
    ) -> None:
        self.logps = logps  # [N] float32
        self.entropies = entropies  # [N] float32
        self.rest = rest  # [N] float32: R
        self.residual = residual  # [N] float32: what rounding took from the label's column of E; None without E
        self.overflowed = overflowed  # [] bool, on the device


def is_supported(weight: Tensor) -> bool:
    """bf16 on a GPU with tensor memory access (Hopper and later), rows of whole 16-byte pieces."""
    if not (weight.is_cuda and weight.dtype == torch.bfloat16 and weight.is_contiguous()):
        return False
    return torch.cuda.get_device_capability(weight.device)[0] >= 9 and weight.shape[1] % 8 == 0


def logits_pass(
    hidden: Tensor,  # [N, D] bf16
    weight: Tensor,  # [V, D] bf16
    labels: Tensor,  # [N] int64
    shape: LogitShape,
    out: Tensor | None,  # [N, V] bf16: E, or None when no gradient is wanted
) -> Logits:
    """Log-probs, entropies and, into `out`, E with the label's column filled in."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    num_rows, width = hidden.shape
    num_columns = len(weight)
    cap = shape.soft_cap
    scale = shape.scale / (cap or shape.temperature)
    x_label = torch.empty(num_rows, dtype=torch.float32, device=hidden.device)
    _label_kernel[(num_rows,)](
        hidden, weight, labels, x_label, hidden.stride(0), weight.stride(0), width, BLOCK=1024, num_warps=4
    )
    tanh = None if cap is None else (x_label * scale).tanh()
    reference = x_label * scale if cap is None or tanh is None else tanh * (cap / shape.temperature)
    tiles = triton.cdiv(num_columns, BLOCK_N)
    sums = torch.empty(tiles, num_rows, dtype=torch.float32, device=hidden.device)
    weighted = torch.empty_like(sums)
    programs = _num_programs(hidden)
    hidden_desc = TensorDescriptor.from_tensor(hidden, [BLOCK_M, BLOCK_K])
    weight_desc = TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K])
    _logits_kernel[(programs,)](
        hidden_desc, weight_desc, labels, reference, hidden if out is None else out, sums, weighted,
        num_rows, num_columns, num_columns if shape.vocabulary is None else shape.vocabulary, width,
        0 if out is None else out.stride(0), scale, 1.0 if cap is None else cap / shape.temperature,
        HAS_CAP=cap is not None, STORE=out is not None,
        BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, PROGRAMS=programs,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    rest = sums.sum(0)
    log_total = rest.log1p()
    residual = None
    if out is not None:
        at_label = -rest if tanh is None else -rest * (1 - tanh.square())
        rounded = at_label.to(out.dtype)
        out.scatter_(1, labels[:, None], rounded[:, None])
        residual = at_label - rounded.float()
    entropies = log_total - weighted.sum(0) / (1 + rest)
    # e^80 is clipped there, and its neighbours in bf16 are not far from overflow
    return Logits(-log_total, entropies, rest, residual, (rest > 1e34).any())


def _num_programs(like: Tensor) -> int:
    return torch.cuda.get_device_properties(like.device).multi_processor_count if like.is_cuda else 4
