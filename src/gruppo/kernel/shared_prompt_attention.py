"""Attention over rows in which completions attend to their prompt and to themselves (`batch/shared.py`).

Three routes with the same numbers:

    tiles   a Triton kernel over tiles of segments, for half precision on a GPU, in one row, without a sliding window
    flex    torch's flex attention: computes only the blocks of 128 x 128 slots in which something is visible
    mask    torch's SDPA with an explicit [R, 1, W, W] mask: any device and dtype, for rows that are not long

What a slot sees is two ranges of slots, and stays two ranges under a sliding window; no route needs more than that.
Torch's flash kernel, once over each segment and once from the completions to their prompts, joined by log-sum-exp, was
tried and took 9 to 12 % more of a whole step on an H200 than flex attention.
"""

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gruppo.batch import SharedPrompts
from gruppo.kernel.head import has_triton

HAS_TRITON = has_triton()
if HAS_TRITON:
    from gruppo.kernel.triton_attention import segment_attention

Route = Literal["mask", "flex", "tiles"]

BLOCK = 128
"""Slots of a block of flex attention; rows are padded to whole blocks."""


def shared_attention(
    query: Tensor,  # [R, H, W, D]
    key: Tensor,  # [R, H_kv, W, D]
    value: Tensor,  # [R, H_kv, W, D]
    rows: SharedPrompts,
    *,
    scale: float | None = None,
    window: int | None = None,
    route: Route | None = None,
) -> Tensor:
    """Attention of each slot over its prompt and its own segment, `[R, H, W, D]`.

    Args:
        window: number of positions to look back at most, including the slot itself.
        route: None: the fastest that the device, the dtype and the rows allow.
    """
    route = route or best_route(query, rows, window)
    if route == "tiles":
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        return segment_attention(query[0], key[0], value[0], rows.tiles, scale).transpose(0, 1)[None]  # pyright: ignore[reportPossiblyUnboundVariable, reportArgumentType]
    return _outside_of_graphs(query, key, value, rows, scale, window, route)  # pyright: ignore[reportCallIssue]


def best_route(query: Tensor, rows: SharedPrompts, window: int | None) -> Route:
    """The fastest route that exists for these tensors."""
    if HAS_TRITON and query.is_cuda and query.element_size() == 2 and window is None and rows.tiles is not None:
        return "tiles"
    return "flex" if query.is_cuda and rows.row_length % BLOCK == 0 else "mask"


@torch.compiler.disable  # their masks are made once for all layers, which a graph could not do
def _outside_of_graphs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: SharedPrompts,
    scale: float | None,
    window: int | None,
    route: Route,
) -> Tensor:
    if route == "flex":
        return _compiled_flex()(
            query,
            key,
            value,
            scale=scale,
            block_mask=block_mask(rows, window),
            enable_gqa=query.shape[1] > key.shape[1],
            # The compiler cannot know that lengths it has not seen are whole blocks. (Not ROWS_GUARANTEED_SAFE, though
            # every slot sees itself: the kernel takes it to hold for the first block that it visits, and gives NaN.)
            kernel_options={"IS_DIVISIBLE": True},
        )
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:  # SDPA's own grouping of heads leaves its fast kernels when there is a mask
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    return scaled_dot_product_attention(
        query, key, value, attn_mask=additive_mask(rows, window, query.dtype), scale=scale
    )


# --- what a slot sees ---------------------------------------------------------------------------------------------


def visible_ranges(rows: SharedPrompts, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Start of the own range, and start and stop of the range in the prompt, `[R, W]` each.

    Positions count from the prompt's first slot, so a window only moves the starts to the right.
    """
    own, start, stop = rows.own_start, rows.prompt_start, rows.prompt_stop
    if window is None:
        return own, start, stop
    slot_W = torch.arange(rows.row_length, device=own.device, dtype=own.dtype)
    first_RW = (rows.position_ids - (window - 1)).clamp(min=0).to(own.dtype)  # first position that may be seen
    return own.maximum(slot_W - (window - 1)), start + first_RW, stop


def visible(rows: SharedPrompts, window: int | None = None) -> Tensor:
    """True where slot q (second axis) may attend to slot k (third axis), `[R, W, W]`."""
    own, start, stop = (x[:, :, None] for x in visible_ranges(rows, window))
    q = torch.arange(rows.row_length, device=own.device)[:, None]
    k = q.T
    return ((own <= k) & (k <= q)) | ((start <= k) & (k < stop))


def additive_mask(rows: SharedPrompts, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where visible, -inf elsewhere, `[R, 1, W, W]`; made once per window and dtype."""
    name = ("mask", window, dtype)
    if name not in rows.masks:
        seen = visible(rows, window)
        rows.masks[name] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)[
            :, None
        ]
    return rows.masks[name]


# --- flex attention -----------------------------------------------------------------------------------------------


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    # One kernel for all lengths: a static one per length soon meets the compiler's limit, after which flex attention
    # falls back to forming all scores.
    return torch.compile(flex_attention, dynamic=True)


def block_mask(rows: SharedPrompts, window: int | None) -> Any:
    """Blocks that are partly visible, and blocks that are fully visible; made once per window.

    Counted from the ranges: nothing of size W x W is formed.
    """
    from torch.nn.attention.flex_attention import BlockMask

    name = ("flex", window)
    if name in rows.masks:
        return rows.masks[name]
    own, start, stop = visible_ranges(rows, window)
    num_blocks = rows.row_length // BLOCK
    slot_W = torch.arange(rows.row_length, device=own.device, dtype=own.dtype)
    first_K = torch.arange(num_blocks, device=own.device, dtype=own.dtype) * BLOCK

    def overlap(low_RW: Tensor, high_RW: Tensor) -> Tensor:
        """Slots of the range [low, high) in each block, [R, W, K]."""
        return (high_RW[..., None].minimum(first_K + BLOCK) - low_RW[..., None].maximum(first_K)).clamp(min=0)

    count_RWK = overlap(own, (slot_W + 1).expand_as(own)) + overlap(start, stop)
    count_RQBK = count_RWK.view(len(own), num_blocks, BLOCK, num_blocks)
    full_RQK = (count_RQBK == BLOCK).all(2)
    partial_RQK = (count_RQBK > 0).any(2) & ~full_RQK

    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return ((own[b, q] <= k) & (k <= q)) | ((start[b, q] <= k) & (k < stop[b, q]))

    rows.masks[name] = BlockMask.from_kv_blocks(
        *_listed(partial_RQK),
        *_listed(full_RQK),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(rows.row_length, rows.row_length),
    )
    return rows.masks[name]


def _listed(chosen_RQK: Tensor) -> tuple[Tensor, Tensor]:
    """Number of chosen blocks per row, and their indices, chosen ones first."""
    order = chosen_RQK.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return chosen_RQK.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
