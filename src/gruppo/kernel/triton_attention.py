"""Attention over shared prompts in Triton, as a torch operator: forward and backward.

Works tile by tile of a segment (a prompt, or the completion of one sequence), so that segments need not begin at whole
blocks: nothing but the diagonal is masked. The tiles are made with the batch (`gruppo.batch.shared.tiles_of`). Scores
are in units of log 2.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.batch.shared import TILE

LOG2_E = 1.4426950408889634

FORWARD = {"STEP": 64, "num_warps": 8, "num_stages": 3}
D_QUERY = {"STEP": 64, "num_warps": 8, "num_stages": 3}
D_KEY = {"STEP": 64, "num_warps": 8, "num_stages": 2}


@triton.jit
def _rows(base, at, stride, stop, D: tl.constexpr, WIDTH: tl.constexpr):
    """Vectors of the slots `at`, 0 from `stop` on, `[len(at), WIDTH]`."""
    columns = tl.arange(0, WIDTH)
    inside = (at < stop)[:, None] & (columns < D)[None, :]
    return tl.load(base + at[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def seen(q, k_base, v_base, k_stride, v_stride, first, stop, at_q, acc, total, top, scale,
          CAUSAL: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """One block of keys and values, added to the sums of a tile of queries."""
    at_k = first + tl.arange(0, STEP)
    k = _rows(k_base, at_k, k_stride, stop, D, WIDTH)
    s = tl.dot(q, tl.trans(k)) * scale
    visible = (at_k < stop)[None, :]
    if CAUSAL:
        visible = visible & (at_k[None, :] <= at_q[:, None])
    s = tl.where(visible, s, float("-inf"))
    higher = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - higher[:, None])
    factor = tl.exp2(top - higher)
    v = _rows(v_base, at_k, v_stride, stop, D, WIDTH)
    acc = acc * factor[:, None] + tl.dot(p.to(v.dtype), v)
    return acc, total * factor + tl.sum(p, 1), higher


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, tiles_ptr, q_head, q_slot, k_head, k_slot, v_head, v_slot, num_slots, scale,
    HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tiles_ptr + tl.program_id(1) * 7
    first, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    prompt_start, prompt_stop = tl.load(tile + 3), tl.load(tile + 4)
    k_base, v_base = k_ptr + (head // SHARE) * k_head, v_ptr + (head // SHARE) * v_head
    at = first + tl.arange(0, TILE)
    q = _rows(q_ptr + head * q_head, at, q_slot, stop, D, WIDTH)
    acc = tl.zeros((TILE, WIDTH), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    top = tl.full((TILE,), float("-inf"), tl.float32)
    for n in tl.range(prompt_start, prompt_stop, STEP):
        acc, total, top = seen(q, k_base, v_base, k_slot, v_slot, n, prompt_stop, at, acc, total, top, scale,
                                False, STEP, D, WIDTH)  # fmt: skip
    for n in tl.range(start, first, STEP):  # a tile begins at whole steps of its segment
        acc, total, top = seen(q, k_base, v_base, k_slot, v_slot, n, first, at, acc, total, top, scale,
                                False, STEP, D, WIDTH)  # fmt: skip
    for n in tl.range(first, tl.minimum(first + TILE, stop), STEP):
        acc, total, top = seen(q, k_base, v_base, k_slot, v_slot, n, stop, at, acc, total, top, scale,
                                True, STEP, D, WIDTH)  # fmt: skip
    columns, inside = tl.arange(0, WIDTH), at < stop
    out = out_ptr + (at[:, None] * HEADS + head) * D + columns[None, :]
    mask = inside[:, None] & (columns < D)[None, :]
    tl.store(out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + head * num_slots + at, top + tl.log2(total), mask=inside)


@triton.jit
def _toward_query(q, k_base, v_base, k_stride, v_stride, first, stop, at_q, do, lse, delta, dq, scale,
                  CAUSAL: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    at_k = first + tl.arange(0, STEP)
    k = _rows(k_base, at_k, k_stride, stop, D, WIDTH)
    v = _rows(v_base, at_k, v_stride, stop, D, WIDTH)
    p = tl.exp2(tl.dot(q, tl.trans(k)) * scale - lse[:, None])
    visible = (at_k < stop)[None, :]
    if CAUSAL:
        visible = visible & (at_k[None, :] <= at_q[:, None])
    p = tl.where(visible, p, 0.0)
    ds = p * (tl.dot(do, tl.trans(v)) - delta[:, None])
    return dq + tl.dot(ds.to(k.dtype), k)


@triton.jit
def _d_query_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, do_ptr, delta_ptr, dq_ptr, tiles_ptr,
    q_head, q_slot, k_head, k_slot, v_head, v_slot, num_slots, scale, slope,
    HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of queries; also stores `delta`, the product of each output and its gradient."""
    head, tile = tl.program_id(0), tiles_ptr + tl.program_id(1) * 7
    first, start, stop = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    prompt_start, prompt_stop = tl.load(tile + 3), tl.load(tile + 4)
    k_base, v_base = k_ptr + (head // SHARE) * k_head, v_ptr + (head // SHARE) * v_head
    at = first + tl.arange(0, TILE)
    inside = at < stop
    q = _rows(q_ptr + head * q_head, at, q_slot, stop, D, WIDTH)
    do = _rows(do_ptr + head * D, at, HEADS * D, stop, D, WIDTH)
    out = _rows(out_ptr + head * D, at, HEADS * D, stop, D, WIDTH)
    delta = tl.sum(do.to(tl.float32) * out.to(tl.float32), 1)
    tl.store(delta_ptr + head * num_slots + at, delta, mask=inside)
    lse = tl.load(lse_ptr + head * num_slots + at, mask=inside, other=0.0)
    dq = tl.zeros((TILE, WIDTH), tl.float32)
    for n in tl.range(prompt_start, prompt_stop, STEP):
        dq = _toward_query(q, k_base, v_base, k_slot, v_slot, n, prompt_stop, at, do, lse, delta, dq, scale,
                           False, STEP, D, WIDTH)  # fmt: skip
    for n in tl.range(start, first, STEP):
        dq = _toward_query(q, k_base, v_base, k_slot, v_slot, n, first, at, do, lse, delta, dq, scale,
                           False, STEP, D, WIDTH)  # fmt: skip
    for n in tl.range(first, tl.minimum(first + TILE, stop), STEP):
        dq = _toward_query(q, k_base, v_base, k_slot, v_slot, n, stop, at, do, lse, delta, dq, scale,
                           True, STEP, D, WIDTH)  # fmt: skip
    columns = tl.arange(0, WIDTH)
    mask = inside[:, None] & (columns < D)[None, :]
    tl.store(dq_ptr + (at[:, None] * HEADS + head) * D + columns[None, :],
             (dq * slope).to(dq_ptr.dtype.element_ty), mask=mask)  # fmt: skip


@triton.jit
def _toward_key(k, v, q_base, do_base, lse_base, delta_base, q_stride, do_stride, first, stop, at_k, dk, dv,
                scale, CAUSAL: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    at_q = first + tl.arange(0, STEP)
    inside = at_q < stop
    q = _rows(q_base, at_q, q_stride, stop, D, WIDTH)
    do = _rows(do_base, at_q, do_stride, stop, D, WIDTH)
    lse = tl.load(lse_base + at_q, mask=inside, other=0.0)
    delta = tl.load(delta_base + at_q, mask=inside, other=0.0)
    p = tl.exp2(tl.dot(k, tl.trans(q)) * scale - lse[None, :])
    visible = inside[None, :]
    if CAUSAL:
        visible = visible & (at_k[:, None] <= at_q[None, :])
    p = tl.where(visible, p, 0.0)
    dv += tl.dot(p.to(do.dtype), do)
    ds = p * (tl.dot(v, tl.trans(do)) - delta[None, :])
    dk += tl.dot(ds.to(q.dtype), q)
    return dk, dv


@triton.jit
def _d_key_kernel(
    q_ptr, k_ptr, v_ptr, lse_ptr, do_ptr, delta_ptr, dk_ptr, dv_ptr, tiles_ptr,
    q_head, q_slot, k_head, k_slot, v_head, v_slot, num_slots, scale, slope,
    HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Gradient of a tile of keys and values, from all heads and all slots that see it."""
    kv_head, tile = tl.program_id(0), tiles_ptr + tl.program_id(1) * 7
    first, stop = tl.load(tile), tl.load(tile + 2)
    reader_start, reader_stop = tl.load(tile + 5), tl.load(tile + 6)
    at = first + tl.arange(0, TILE)
    k = _rows(k_ptr + kv_head * k_head, at, k_slot, stop, D, WIDTH)
    v = _rows(v_ptr + kv_head * v_head, at, v_slot, stop, D, WIDTH)
    dk = tl.zeros((TILE, WIDTH), tl.float32)
    dv = tl.zeros((TILE, WIDTH), tl.float32)
    for head in tl.range(kv_head * SHARE, kv_head * SHARE + SHARE):
        q_base, do_base = q_ptr + head * q_head, do_ptr + head * D
        lse_base, delta_base = lse_ptr + head * num_slots, delta_ptr + head * num_slots
        for m in tl.range(first, tl.minimum(first + TILE, stop), STEP):
            dk, dv = _toward_key(k, v, q_base, do_base, lse_base, delta_base, q_slot, HEADS * D, m, stop, at,
                                 dk, dv, scale, True, STEP, D, WIDTH)  # fmt: skip
        for m in tl.range(first + TILE, stop, STEP):
            dk, dv = _toward_key(k, v, q_base, do_base, lse_base, delta_base, q_slot, HEADS * D, m, stop, at,
                                 dk, dv, scale, False, STEP, D, WIDTH)  # fmt: skip
        for m in tl.range(reader_start, reader_stop, STEP):
            dk, dv = _toward_key(k, v, q_base, do_base, lse_base, delta_base, q_slot, HEADS * D, m, reader_stop, at,
                                 dk, dv, scale, False, STEP, D, WIDTH)  # fmt: skip
    columns = tl.arange(0, WIDTH)
    at_out = (at[:, None] * (HEADS // SHARE) + kv_head) * D + columns[None, :]
    mask = (at < stop)[:, None] & (columns < D)[None, :]
    tl.store(dk_ptr + at_out, (dk * slope).to(dk_ptr.dtype.element_ty), mask=mask)
    tl.store(dv_ptr + at_out, dv.to(dv_ptr.dtype.element_ty), mask=mask)


# --- torch operators ------------------------------------------------------------------------------------------------


def segment_attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float) -> Tensor:
    """Attention of each slot over its prompt and its own segment, `[W, H, D]`; slots in no tile are 0.

    Args:
        q: `[H, W, D]` with any strides whose last is 1; k and v `[H_kv, W, D]` likewise.
        tiles: `[N, 7]` int32, made by `gruppo.batch.shared.tiles_of`.
    """
    return _attention(q, k, v, tiles, scale)[0]


@torch.library.custom_op("gruppo::segment_attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    heads, slots, width = q.shape
    out = torch.zeros(slots, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.zeros(heads, slots, dtype=torch.float32, device=q.device)
    _forward_kernel[(heads, len(tiles))](
        q, k, v, out, lse, tiles, *_strides(q, k, v), slots, scale * LOG2_E, **_sizes(q, k), **FORWARD
    )
    return out, lse


@torch.library.custom_op("gruppo::segment_attention_backward", mutates_args=())
def _attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, tiles: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    heads, slots, width = q.shape
    do = do.contiguous()
    dq = torch.zeros(slots, heads, width, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(slots, len(k), width, dtype=k.dtype, device=k.device) for _ in range(2))
    delta = torch.empty_like(lse)
    numbers = (*_strides(q, k, v), slots, scale * LOG2_E, scale)
    grid = (heads, len(tiles))
    _d_query_kernel[grid](q, k, v, out, lse, do, delta, dq, tiles, *numbers, **_sizes(q, k), **D_QUERY)
    grid = (len(k), len(tiles))
    _d_key_kernel[grid](q, k, v, lse, do, delta, dk, dv, tiles, *numbers, **_sizes(q, k), **D_KEY)
    return dq.transpose(0, 1), dk.transpose(0, 1), dv.transpose(0, 1)


@_attention.register_fake
def _(q, k, v, tiles, scale):
    heads, slots, width = q.shape
    return q.new_empty(slots, heads, width), q.new_empty(heads, slots, dtype=torch.float32)


@_attention_backward.register_fake
def _(do, q, k, v, out, lse, tiles, scale):
    def like(x: Tensor) -> Tensor:
        return x.new_empty(x.shape[1], x.shape[0], x.shape[2]).transpose(0, 1)

    return like(q), like(k), like(v)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, tiles, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, tiles)


def _backward(ctx: Any, do: Tensor, _d_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, tiles = ctx.saved_tensors
    return (*_attention_backward(do, q, k, v, out, lse, tiles, ctx.scale), None, None)


_attention.register_autograd(_backward, setup_context=_save)


def _strides(*tensors: Tensor) -> list[int]:
    assert all(x.stride(2) == 1 for x in tensors), "vectors must be contiguous"
    return [stride for x in tensors for stride in x.stride()[:2]]


def _sizes(q: Tensor, k: Tensor) -> dict[str, int]:
    heads, _, width = q.shape
    # A product has at least 16 columns.
    padded = max(triton.next_power_of_2(width), 16)
    return {"HEADS": heads, "SHARE": heads // len(k), "D": width, "WIDTH": padded, "TILE": TILE}
