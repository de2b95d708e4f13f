"""One step of decoding in Triton, as torch operators: attention of new tokens over a cache, and drawing from logits.

The cache has a prompt's keys and values once, whatever the number of its samples, and each row's own behind them. How
many a row has is read on the device, so that one CUDA graph serves all steps.
"""

from collections import defaultdict

import torch
import triton
import triton.language as tl
from torch import Tensor

from gruppo.kernel.triton_attention import LOG2_E, seen

BLOCK = 1024
"""Logits that one program sums up."""


PROMPTS = {"STEP": 128, "num_warps": 4, "num_stages": 3}
OWN = {"STEP": 32, "num_warps": 1, "num_stages": 2}

QUERIES = 16
"""Query heads of one program: as few as a tensor core multiplies."""


@triton.jit
def _prompts_kernel(
    q_ptr, k_ptr, v_ptr, tiles_ptr, first_ptr, acc_ptr, sums_ptr, width_of_prompts, scale,
    HEADS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Sums over a prompt, for the query heads of some of its rows that share a key head."""
    kv_head, tile = tl.program_id(0), tiles_ptr + tl.program_id(1) * (ROWS + 1)
    kv_heads = HEADS // SHARE
    prompt = tl.load(tile).to(tl.int64)
    if prompt >= 0:
        queries, columns = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
        row = tl.load(tile + 1 + queries // SHARE, mask=queries < ROWS * SHARE, other=-1).to(tl.int64)
        head = row * HEADS + kv_head * SHARE + queries % SHARE
        mask = (row >= 0)[:, None] & (columns < D)[None, :]
        at = head[:, None] * D + columns[None, :]
        q = tl.load(q_ptr + at, mask=mask, other=0.0)
        acc = tl.zeros((QUERIES, WIDTH), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        top = tl.full((QUERIES,), float("-inf"), tl.float32)
        base = (prompt * kv_heads + kv_head) * width_of_prompts * D
        for n in tl.range(tl.load(first_ptr + prompt), width_of_prompts, STEP):
            acc, total, top = seen(q, k_ptr + base, v_ptr + base, D, D, n, width_of_prompts, queries, acc,
                                   total, top, scale, False, STEP, D, WIDTH)  # fmt: skip
        tl.store(acc_ptr + at, acc, mask=mask)
        tl.store(sums_ptr + head * 2, top, mask=row >= 0)
        tl.store(sums_ptr + head * 2 + 1, total, mask=row >= 0)


@triton.jit
def _own_kernel(
    q_ptr, k_ptr, v_ptr, own_k_ptr, own_v_ptr, count_ptr, acc_ptr, sums_ptr, out_ptr, room, scale,
    HEADS: tl.constexpr, SHARE: tl.constexpr, QUERIES: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The query heads of one row that share a key head, from the sums over its prompt on; also stores the row's new
    key and value."""
    kv_head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv_heads = HEADS // SHARE
    count = tl.load(count_ptr + row)
    heads, columns = tl.arange(0, QUERIES), tl.arange(0, WIDTH)
    mask = (heads < SHARE)[:, None] & (columns < D)[None, :]
    head = row * HEADS + kv_head * SHARE + heads
    at = head[:, None] * D + columns[None, :]
    q = tl.load(q_ptr + at, mask=mask, other=0.0)
    new = (row * kv_heads + kv_head) * D + columns
    k = tl.load(k_ptr + new, mask=columns < D, other=0.0)
    v = tl.load(v_ptr + new, mask=columns < D, other=0.0)
    own = (row * kv_heads + kv_head) * room * D
    tl.store(own_k_ptr + own + count * D + columns, k, mask=columns < D)
    tl.store(own_v_ptr + own + count * D + columns, v, mask=columns < D)
    acc = tl.load(acc_ptr + at, mask=mask, other=0.0)
    top = tl.load(sums_ptr + head * 2, mask=heads < SHARE, other=0.0)
    total = tl.load(sums_ptr + head * 2 + 1, mask=heads < SHARE, other=0.0)
    for n in tl.range(0, count, STEP):
        acc, total, top = seen(q, own_k_ptr + own, own_v_ptr + own, D, D, n, count, heads, acc,
                               total, top, scale, False, STEP, D, WIDTH)  # fmt: skip
    # The new token is not read back.
    score = tl.sum(q.to(tl.float32) * k.to(tl.float32)[None, :], 1) * scale
    higher = tl.maximum(top, score)
    factor, p = tl.exp2(top - higher), tl.exp2(score - higher)
    acc = acc * factor[:, None] + p[:, None] * v.to(tl.float32)[None, :]
    total = total * factor + p
    tl.store(out_ptr + at, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask)


def row_tiles(prompt_of: list[int], share: int) -> Tensor:
    """Rows of the same prompt in tiles, which read its keys once: int32 `[N, 1 + R]`, the prompt and up to R rows.

    Unused tiles and places are -1.

    >>> row_tiles([0, 1, 0, 0], share=8).tolist()
    [[0, 0, 2], [0, 3, -1], [1, 1, -1], [-1, -1, -1]]
    """
    num = QUERIES // share
    rows_of: dict[int, list[int]] = defaultdict(list)
    for row, prompt in enumerate(prompt_of):
        rows_of[prompt].append(row)
    found = [
        [prompt, *rows[start : start + num]] for prompt, rows in rows_of.items() for start in range(0, len(rows), num)
    ]
    tiles = torch.full((len(prompt_of), 1 + num), -1, dtype=torch.int32)
    for i, tile in enumerate(found):
        tiles[i, : len(tile)] = torch.tensor(tile, dtype=torch.int32)
    return tiles


@torch.library.custom_op("gruppo::decode_attention", mutates_args=("own_k", "own_v"))
def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, prompt_k: Tensor, prompt_v: Tensor,
    tiles: Tensor, first: Tensor, count: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of one new token per row over its prompt and its own tokens, itself included, `[N, H, D]`.

    Args:
        q: `[N, H, D]`; k and v `[N, H_kv, D]`, which are appended to the row's own.
        own_k: `[N, H_kv, M, D]`, of which `count` are filled; own_v likewise.
        prompt_k: `[P, H_kv, L, D]`, filled from `first` on; prompt_v likewise.
        tiles: the rows of each prompt, from `row_tiles`; first `[P]`; count `[N]`; all int32.
    """
    rows, heads, width = q.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = torch.empty_like(q)
    share = heads // k.shape[1]
    assert share <= QUERIES, f"at most {QUERIES} query heads share a key head"
    acc = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    sums = torch.empty(rows, heads, 2, dtype=torch.float32, device=q.device)
    sizes = {"HEADS": heads, "SHARE": share, "QUERIES": QUERIES, "D": width}
    sizes["WIDTH"] = max(triton.next_power_of_2(width), 16)
    _prompts_kernel[(k.shape[1], rows)](
        q, prompt_k, prompt_v, tiles, first, acc, sums, prompt_k.shape[2], scale * LOG2_E,
        ROWS=tiles.shape[1] - 1, **sizes, **PROMPTS,
    )  # fmt: skip
    _own_kernel[(k.shape[1], rows)](
        q, k, v, own_k, own_v, count, acc, sums, out, own_k.shape[2], scale * LOG2_E, **sizes, **OWN
    )
    return out


@decode_attention.register_fake
def _(q, k, v, own_k, own_v, prompt_k, prompt_v, tiles, first, count, scale):
    return q.new_empty(q.shape)


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
