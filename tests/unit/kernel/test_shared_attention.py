"""Attention over shared prompts against each sequence on its own, in float64."""

import random
from itertools import pairwise

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from gruppo.batch import pack, pack_shared
from gruppo.kernel.index import take_repeated
from gruppo.kernel.shared_prompt_attention import BLOCK, block_mask, shared_attention, visible
from gruppo.types import InputFeature

WINDOWS = [None, 1, 3, 40]


def features(prompt=(1, 20), completion=(1, 15), groups=3, size=4, seed=0):
    rng = random.Random(seed)
    tokens = lambda bounds: tuple(rng.randrange(50) for _ in range(rng.randint(*bounds)))  # noqa: E731
    return [
        InputFeature(prompt_ids=ids, completion_ids=tokens(completion))
        for ids in (tokens(prompt) for _ in range(groups))
        for _ in range(size)
    ]


def alone(query, key, value, batch, window):
    """Causal attention of each sequence by itself: rows are gathered per sequence, looped over, in float64."""
    rows, offsets = batch.shared, batch.cu_seqlens.tolist()
    heads, kv_heads = query.shape[1], key.shape[1]
    flat = [x.transpose(1, 2).flatten(0, 1)[rows.slot_of].double() for x in (query, key, value)]
    out = []
    for a, b in pairwise(offsets):
        q, k, v = (x[a:b] for x in flat)
        n = b - a
        for t in range(n):
            first = 0 if window is None else max(0, t - window + 1)
            head = [
                (q[t, h] @ k[first : t + 1, h * kv_heads // heads].T * 0.3).softmax(0)
                @ v[first : t + 1, h * kv_heads // heads]
                for h in range(heads)
            ]
            out.append(torch.stack(head))
    return torch.stack(out)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("row_slots", [None, 40], ids=["one row", "several rows"])
def test_every_slot_attends_as_in_its_sequence_alone(window, row_slots):
    batch = pack_shared(features(), row_slots=row_slots, multiple_of=8)
    shape = (batch.shared.num_rows, 4, batch.shared.row_length, 8)
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(shape, generator=draw, dtype=torch.float64) for _ in range(3))
    key, value = key[:, :2], value[:, :2]  # two query heads share a key head
    out = shared_attention(query, key, value, batch.shared, scale=0.3, window=window)
    ours = out.transpose(1, 2).flatten(0, 1)[batch.shared.slot_of]
    torch.testing.assert_close(ours, alone(query, key, value, batch, window), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_are_those_that_hold_something_visible(window):
    rows = pack_shared(features((100, 300), (1, 200)), multiple_of=BLOCK).shared
    num = rows.row_length // BLOCK
    seen = visible(rows, window)[0].view(num, BLOCK, num, BLOCK)
    mask = block_mask(rows, window)
    assert torch.equal(mask.to_dense()[0, 0].bool(), seen.any(3).any(1))
    full = torch.zeros(num, num, dtype=torch.bool)
    for q, (count, which) in enumerate(zip(mask.full_kv_num_blocks[0, 0], mask.full_kv_indices[0, 0], strict=True)):
        full[q, which[:count].long()] = True
    assert torch.equal(full, seen.all(3).all(1))
    assert block_mask(rows, window) is mask  # made once for all layers


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_with_these_blocks_gives_the_masked_attention(window):
    rows = pack_shared(features((100, 200), (1, 90), groups=2), multiple_of=BLOCK).shared
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, rows.row_length, 16, generator=draw) for _ in range(3))
    flex = flex_attention(query, key, value, block_mask=block_mask(rows, window))
    torch.testing.assert_close(flex, shared_attention(query, key, value, rows, window=window), rtol=1e-5, atol=1e-5)


def test_rows_without_sharing_see_what_packed_rows_see():
    batch = pack_shared(features(size=1))
    plain = pack(features(size=1))
    lengths = visible(batch.shared)[0].sum(-1)[batch.shared.slot_of]
    assert torch.equal(lengths, plain.position_ids + 1)


def test_a_row_that_is_gathered_twice_gets_both_gradients_unrounded():
    """1 + 2^-9 is lost in bf16 (8 bits of mantissa); two of them beside a 1 are not, when added in float32."""
    values = torch.ones(3, 1, dtype=torch.bfloat16).requires_grad_()
    gathered = take_repeated(values, torch.tensor([2, 0, 2, 2, 2]))
    gathered.backward(torch.tensor([[1.0], [5.0], [2**-9], [2**-9], [2**-8]], dtype=torch.bfloat16))
    assert values.grad.squeeze(1).tolist() == [5.0, 0.0, 1 + 2**-7]
