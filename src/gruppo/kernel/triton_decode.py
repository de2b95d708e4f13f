"""One step of decoding in Triton, as torch operators: attention of new tokens over a cache, and drawing from logits.

The cache has a prompt's keys and values once, whatever the number of its samples, and each row's own behind them. How
many a row has is read on the device, so that one CUDA graph serves all steps.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.kernel.triton_attention import LOG2_E, seen

BLOCK = 1024
"""Logits that one program sums up."""


SETTINGS = {"STEP": 32, "num_warps": 2, "num_stages": 2}

QUERIES = 16
"""Query heads of one program: as few as a tensor core multiplies."""
MOST_PARTS = 8
"""Programs among which a prompt, or the tokens of a row, are divided at most."""
LEAST_PROMPT, LEAST_OWN = 128, 256
"""Tokens of one program at least."""


@triton.jit
def _decode_kernel(
    q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, prompt_k_ptr, prompt_v_ptr, tiles_ptr, tile_of_ptr, length_ptr,
    count_ptr, acc_ptr, sums_ptr, arrived_ptr, out_ptr, q_row, k_row, v_row, room, width_of_prompts, rows, num_tiles,
    scale, prompt_size, own_size, PROMPT_PARTS: tl.constexpr, OWN_PARTS: tl.constexpr,
    HEADS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sums of the query heads that share a key head: over a part of a prompt, for the rows of a tile, or over a part of
    one row's own tokens. The program of a tile that ends last adds them up."""
    kv_head, number = tl.program_id(0), tl.program_id(1)
    kv_heads = HEADS // SHARE
    queries, columns = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    if number < num_tiles * PROMPT_PARTS:
        tile, part = number // PROMPT_PARTS, number % PROMPT_PARTS
        prompt = tl.load(tiles_ptr + tile * (ROWS + 1)).to(tl.int64)
        if prompt >= 0:
            length = tl.load(length_ptr + prompt)
            start = part * prompt_size
            row = _rows_of(tiles_ptr, tile, queries, SHARE, ROWS)
            if start < length:
                head = kv_head * SHARE + queries % SHARE
                mask = (row >= 0)[:, None] & (columns < D)[None, :]
                q = tl.load(q_ptr + (row * q_row + head * D)[:, None] + columns[None, :], mask=mask, other=0.0)
                acc = tl.zeros((QUERIES, WIDTH), tl.float32)
                total = tl.zeros((QUERIES,), tl.float32)
                top = tl.full((QUERIES,), float("-inf"), tl.float32)
                base = (prompt * kv_heads + kv_head) * width_of_prompts * D
                stop = tl.minimum(start + prompt_size, length)
                for n in tl.range(start, stop, STEP):
                    acc, total, top = seen(q, prompt_k_ptr + base, prompt_v_ptr + base, D, D, n, stop, queries,
                                           acc, total, top, scale, False, STEP, D, WIDTH)  # fmt: skip
                at = (part * rows + row) * HEADS + head
                tl.store(acc_ptr + at[:, None] * D + columns[None, :], acc, mask=mask)
                tl.store(sums_ptr + at * 2, top, mask=row >= 0)
                tl.store(sums_ptr + at * 2 + 1, total, mask=row >= 0)
            _finish(tiles_ptr, length_ptr, count_ptr, acc_ptr, sums_ptr, arrived_ptr, out_ptr, rows, tile, row, kv_head,
                    prompt_size, own_size, PROMPT_PARTS, OWN_PARTS, HEADS, SHARE, ROWS, QUERIES, D, WIDTH)  # fmt: skip
    else:
        number -= num_tiles * PROMPT_PARTS
        row, part = (number // OWN_PARTS).to(tl.int64), number % OWN_PARTS
        count, tile = tl.load(count_ptr + row), tl.load(tile_of_ptr + row)
        members = _rows_of(tiles_ptr, tile, queries, SHARE, ROWS)
        start = part * own_size
        if (start < count) | (part == 0):
            head = kv_head * SHARE + queries
            is_head = queries < SHARE
            mask = is_head[:, None] & (columns < D)[None, :]
            q = tl.load(q_ptr + row * q_row + head[:, None] * D + columns[None, :], mask=mask, other=0.0)
            own = (row * kv_heads + kv_head) * room * D
            acc = tl.zeros((QUERIES, WIDTH), tl.float32)
            total = tl.zeros((QUERIES,), tl.float32)
            top = tl.full((QUERIES,), float("-inf"), tl.float32)
            if part == 0:  # the new token, which is not read back
                k = tl.load(k_ptr + row * k_row + kv_head * D + columns, mask=columns < D, other=0.0)
                v = tl.load(v_ptr + row * v_row + kv_head * D + columns, mask=columns < D, other=0.0)
                tl.store(own_k_ptr + own + count * D + columns, k, mask=columns < D)
                tl.store(own_v_ptr + own + count * D + columns, v, mask=columns < D)
                top = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
                total += 1.0
                acc += v.to(tl.float32)[None, :]
            stop = tl.minimum(start + own_size, count)
            for n in tl.range(start, stop, STEP):
                acc, total, top = seen(q, own_k_ptr + own, own_v_ptr + own, D, D, n, stop, queries,
                                       acc, total, top, scale, False, STEP, D, WIDTH)  # fmt: skip
            at = ((PROMPT_PARTS + part) * rows + row) * HEADS + head
            tl.store(acc_ptr + at[:, None] * D + columns[None, :], acc, mask=mask)
            tl.store(sums_ptr + at * 2, top, mask=is_head)
            tl.store(sums_ptr + at * 2 + 1, total, mask=is_head)
        _finish(tiles_ptr, length_ptr, count_ptr, acc_ptr, sums_ptr, arrived_ptr, out_ptr, rows, tile, members, kv_head,
                prompt_size, own_size, PROMPT_PARTS, OWN_PARTS, HEADS, SHARE, ROWS, QUERIES, D, WIDTH)  # fmt: skip


@triton.jit
def _rows_of(tiles_ptr, tile, queries, SHARE: tl.constexpr, ROWS: tl.constexpr):
    """The row of each query of a tile; -1: none."""
    at = tiles_ptr + tile * (ROWS + 1) + 1 + queries // SHARE
    return tl.load(at, mask=queries < ROWS * SHARE, other=-1).to(tl.int64)


@triton.jit
def _finish(
    tiles_ptr, length_ptr, count_ptr, acc_ptr, sums_ptr, arrived_ptr, out_ptr, rows, tile, row, kv_head,
    prompt_size, own_size, PROMPT_PARTS: tl.constexpr, OWN_PARTS: tl.constexpr,
    HEADS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Count the programs of a tile that have stored their sums; the last one writes the output of the tile's rows."""
    queries, columns = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    there = row >= 0
    num_rows = tl.sum(there.to(tl.int32), 0) // SHARE
    arrived_ptr += tile * (HEADS // SHARE) + kv_head
    tl.debug_barrier()
    before = tl.atomic_add(arrived_ptr, 1, sem="acq_rel")
    tl.debug_barrier()
    if before == PROMPT_PARTS + num_rows * OWN_PARTS - 1:
        tl.store(arrived_ptr, 0)  # for the next launch
        length = tl.where(there, tl.load(length_ptr + tl.load(tiles_ptr + tile * (ROWS + 1))), 0)
        count = tl.load(count_ptr + row, mask=there, other=0)
        at = row * HEADS + kv_head * SHARE + queries % SHARE
        mask = there[:, None] & (columns < D)[None, :]
        acc = tl.zeros((QUERIES, WIDTH), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        top = tl.full((QUERIES,), -1e30, tl.float32)
        for part in tl.static_range(PROMPT_PARTS + OWN_PARTS):
            known = there  # the row's new token
            if part < PROMPT_PARTS:
                known = length > part * prompt_size
            elif part > PROMPT_PARTS:
                known = count > (part - PROMPT_PARTS) * own_size
            more_top = tl.load(sums_ptr + at * 2, mask=known, other=-1e30)
            more_total = tl.load(sums_ptr + at * 2 + 1, mask=known, other=0.0)
            more = tl.load(acc_ptr + at[:, None] * D + columns[None, :], mask=mask & known[:, None], other=0.0)
            higher = tl.maximum(top, more_top)
            factor, more_factor = tl.exp2(top - higher), tl.exp2(more_top - higher)
            acc = acc * factor[:, None] + more * more_factor[:, None]
            total = total * factor + more_total * more_factor
            top = higher
            at += rows * HEADS
        at -= (PROMPT_PARTS + OWN_PARTS) * rows * HEADS
        total = tl.where(there, total, 1.0)
        out = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at[:, None] * D + columns[None, :], out, mask=mask)


def row_tiles(prompt_of: Sequence[int], share: int) -> list[list[int]]:
    """Rows of the same prompt in tiles, which read its keys once: the prompt and up to R rows, -1 for none.

    >>> row_tiles([0, 1, 0, 0], share=8)
    [[0, 0, 2], [0, 3, -1], [1, 1, -1]]
    """
    num = QUERIES // share
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompt_of):
        rows_of[prompt].append(row)
    cuts = ((p, rows[start : start + num]) for p, rows in rows_of.items() for start in range(0, len(rows), num))
    return [[prompt, *rows, *[-1] * (num - len(rows))] for prompt, rows in cuts]


@torch.library.custom_op("gruppo::decode_attention", mutates_args=("own_k", "own_v", "arrived"))
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, prompt_k: Tensor, prompt_v: Tensor,
    tiles: Tensor, tile_of: Tensor, length: Tensor, count: Tensor, arrived: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of one new token per row over its prompt and its own tokens, itself included, `[N, H, D]`.

    Args:
        q: `[N, H, D]`; k and v `[N, H_kv, D]`, which are appended to the row's own.
        own_k: `[N, H_kv, M, D]`, of which `count` are filled; own_v likewise.
        prompt_k: `[P, H_kv, L, D]`, of which `length` are filled; prompt_v likewise.
        tiles: the rows of each prompt, from `row_tiles`; tile_of `[N]`; length `[P]`; count `[N]`; all int32.
        arrived: zeros for each tile and key head, int32; left as zeros.
    """
    rows, heads, width = q.shape
    q, k, v = (x if x.stride()[1:] == (width, 1) else x.contiguous() for x in (q, k, v))
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    share = heads // k.shape[1]
    assert share <= QUERIES, f"at most {QUERIES} query heads share a key head"
    (prompt_parts, prompt_size), (own_parts, own_size) = _parts(prompt_k, LEAST_PROMPT), _parts(own_k, LEAST_OWN)
    acc = torch.empty(prompt_parts + own_parts, rows, heads, width, dtype=torch.float32, device=q.device)
    sums = torch.empty(prompt_parts + own_parts, rows, heads, 2, dtype=torch.float32, device=q.device)
    _decode_kernel[(k.shape[1], len(tiles) * prompt_parts + rows * own_parts)](
        q, k, v, own_k, own_v, prompt_k, prompt_v, tiles, tile_of, length, count, acc, sums, arrived, out,
        q.stride(0), k.stride(0), v.stride(0), own_k.shape[2], prompt_k.shape[2], rows, len(tiles), scale * LOG2_E,
        prompt_size, own_size, PROMPT_PARTS=prompt_parts, OWN_PARTS=own_parts, HEADS=heads, SHARE=share,
        ROWS=tiles.shape[1] - 1, QUERIES=QUERIES, D=width, WIDTH=max(triton.next_power_of_2(width), 16), **SETTINGS,
    )  # fmt: skip
    return out


def _parts(kept: Tensor, least: int) -> tuple[int, int]:
    """Programs among which the tokens of a cache are divided, and the tokens of each."""
    size = max(least, triton.next_power_of_2(triton.cdiv(kept.shape[2], MOST_PARTS)))
    return triton.cdiv(kept.shape[2], size), size


@decode_attention.register_fake
def _(q, k, v, own_k, own_v, prompt_k, prompt_v, tiles, tile_of, length, count, arrived, scale):
    return torch.empty(q.shape, dtype=q.dtype, device=q.device)


@triton.jit
def _sums_kernel(x_ptr, sums_ptr, columns, factor, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """Maximum, sum of e and sum of e * z of one block of one row of logits, z in units of log 2."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x_ptr + row * columns + at, mask=at < columns, other=float("-inf")) * factor
    top = tl.maximum(tl.max(z, 0), -1e30)  # a block may be excluded whole
    e = tl.exp2(z - top)
    out = sums_ptr + row * 3 * BLOCKS + block
    tl.store(out, top)
    tl.store(out + BLOCKS, tl.sum(e, 0))
    tl.store(out + 2 * BLOCKS, tl.sum(tl.where(e > 0, e * (z - top), 0.0), 0))


@triton.jit
def _draw_kernel(
    x_ptr, sums_ptr, u_ptr, token_ptr, logp_ptr, entropy_ptr, columns, num_blocks, factor,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The token at which the cumulative probability of a row passes u; its log-prob; the entropy of the row."""
    row, blocks = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    at = sums_ptr + row * 3 * BLOCKS + blocks
    there = blocks < num_blocks
    highest = tl.load(at, mask=there, other=-1e30)
    total = tl.load(at + BLOCKS, mask=there, other=0.0)
    weighted = tl.load(at + 2 * BLOCKS, mask=there, other=0.0)
    top = tl.max(highest, 0)
    scale = tl.where(there, tl.exp2(highest - top), 0.0)
    mass = total * scale
    all_mass = tl.sum(mass, 0)
    shift = tl.where(there, highest - top, 0.0)
    mean = tl.sum(tl.where(there, scale * (weighted + total * shift), 0.0), 0) / all_mass
    log_sum = top + tl.log2(all_mass)
    tl.store(entropy_ptr + row, (tl.log2(all_mass) - mean) * 0.6931471805599453)
    target = tl.load(u_ptr + row) * all_mass
    passed = tl.cumsum(mass, 0)
    # The last block that has any mass, should rounding leave the target unreached.
    last = tl.max(tl.where(mass > 0, blocks, 0), 0)
    block = tl.minimum(tl.sum((passed <= target).to(tl.int32), 0), last)
    before = tl.sum(tl.where(blocks < block, mass, 0.0), 0)
    columns_at = block * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(x_ptr + row * columns + columns_at, mask=columns_at < columns, other=float("-inf")) * factor
    e = tl.exp2(z - top)
    inside = tl.cumsum(e, 0) + before
    final = tl.max(tl.where(e > 0, columns_at, 0), 0)
    token = tl.minimum(block * BLOCK + tl.sum((inside <= target).to(tl.int32), 0), final)
    chosen = tl.sum(tl.where(columns_at == token, z, 0.0), 0)
    tl.store(token_ptr + row, token.to(tl.int64))
    tl.store(logp_ptr + row, (chosen - log_sum) * 0.6931471805599453)


@torch.library.custom_op("gruppo::draw_tokens", mutates_args=())
def draw_tokens(logits: Tensor, u: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens drawn at a temperature, their log-probs, and the entropies of the rows, `[N]` each.

    A token is where the cumulative probability of its row passes u, as `gruppo.sampler.torch_sampler.draw` has it, in
    float32.

    Args:
        logits: `[N, V]` float32, contiguous.
        u: `[N]` float32 in [0, 1).
    """
    rows, columns = logits.shape
    num_blocks = triton.cdiv(columns, BLOCK)
    size = triton.next_power_of_2(num_blocks)
    sums = torch.empty(rows, 3, size, dtype=torch.float32, device=logits.device)
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logp, entropy = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    factor = LOG2_E / temperature
    _sums_kernel[(rows, num_blocks)](logits, sums, columns, factor, BLOCKS=size, BLOCK=BLOCK, num_warps=4)
    _draw_kernel[(rows,)](
        logits, sums, u, token, logp, entropy, columns, num_blocks, factor, BLOCKS=size, BLOCK=BLOCK, num_warps=4
    )
    return token, logp, entropy


@draw_tokens.register_fake
def _(logits, u, temperature):
    token = logits.new_empty(len(logits), dtype=torch.int64)
    return token, logits.new_empty(len(logits)), logits.new_empty(len(logits))


@triton.jit
def _note_kernel(
    place_ptr, token_ptr, logp_ptr, entropy_ptr, uniforms_ptr, stop_ptr, tokens_ptr, logps_ptr, entropies_ptr, last_ptr,
    drawn_ptr, count_ptr, slot_ptr, u_ptr, stopped_ptr, ended_ptr, num, room, num_stop, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num
    place = tl.load(place_ptr + at, mask=inside, other=0)
    token = tl.load(token_ptr + at, mask=inside, other=0)
    drawn = tl.load(drawn_ptr + place, mask=inside, other=0)
    ended = tl.load(ended_ptr + place, mask=inside, other=0) != 0
    column = place * (room + 1) + tl.where(ended, room, drawn)
    tl.store(tokens_ptr + column, token, mask=inside)
    tl.store(logps_ptr + column, tl.load(logp_ptr + at, mask=inside, other=0.0), mask=inside)
    tl.store(entropies_ptr + column, tl.load(entropy_ptr + at, mask=inside, other=0.0), mask=inside)
    stops = ended & False
    for i in range(num_stop):
        stops = stops | (token == tl.load(stop_ptr + i))
    stops = stops & (ended == 0)
    drawn = tl.where(ended, drawn, drawn + 1)
    tl.store(last_ptr + place, token, mask=inside)
    tl.store(drawn_ptr + place, drawn, mask=inside)
    tl.store(count_ptr + place, (drawn - 1).to(tl.int32), mask=inside)
    slot = tl.load(slot_ptr + place, mask=inside, other=0)
    tl.store(slot_ptr + place, tl.where(ended, slot, slot + 1), mask=inside)
    following = tl.minimum(drawn, room - 1)
    tl.store(u_ptr + place, tl.load(uniforms_ptr + place * room + following, mask=inside, other=0.0), mask=inside)
    tl.store(stopped_ptr + place, stops | (tl.load(stopped_ptr + place, mask=inside, other=0) != 0), mask=inside)
    tl.store(ended_ptr + place, ended | stops | (drawn >= room), mask=inside)


@torch.library.custom_op(
    "gruppo::note_tokens",
    mutates_args=(
        "tokens", "logps", "entropies", "last", "drawn", "count", "slot", "u", "stopped", "ended",
    ),
)  # fmt: skip
def note_tokens(
    places: Tensor, token: Tensor, logp: Tensor, entropy: Tensor, uniforms: Tensor, stop_ids: Tensor, tokens: Tensor,
    logps: Tensor, entropies: Tensor, last: Tensor, drawn: Tensor, count: Tensor, slot: Tensor, u: Tensor,
    stopped: Tensor, ended: Tensor,
) -> None:  # fmt: skip
    """Note the tokens that were drawn for these places, and move the places on. What has ended stays.

    Args:
        places: `[A]` int64; token `[A]` int64, logp and entropy `[A]` float32.
        uniforms: `[N, M]`, the numbers of all draws.
        tokens: `[N, M + 1]` int64, logps and entropies likewise; the last column takes what comes after the end.
        last: `[N]` int64, the newest token; drawn: how many; slot: its position.
        count: `[N]` int32, tokens in the cache; u: the number of the next draw.
        stopped: `[N]` bool, by one of `stop_ids`; ended: or for lack of room.
    """
    num, block = len(places), 128
    _note_kernel[(triton.cdiv(num, block),)](
        places, token, logp, entropy, uniforms, stop_ids, tokens, logps, entropies, last, drawn, count, slot, u,
        stopped, ended, num, uniforms.shape[1], len(stop_ids), BLOCK=block, num_warps=4,
    )  # fmt: skip
