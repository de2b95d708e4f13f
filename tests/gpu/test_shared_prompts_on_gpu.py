"""Attention over shared prompts on a GPU, by flex attention and by tiles: against the explicit mask in float32.

CI has no GPU; there these tests are skipped. On a machine with one: `pytest tests/gpu`, or without pytest
`PYTHONPATH=src python tests/gpu/test_shared_prompts_on_gpu.py`, which runs every test and prints its name.
"""

import random
import sys

import torch

try:
    import pytest

    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ]
except ImportError:  # run as a script on a machine without pytest
    pytest = None

from gruppo.batch import pack_shared
from gruppo.kernel.shared_prompt_attention import BLOCK, shared_attention
from gruppo.types import InputFeature


def ragged_rows(seed, groups=3):
    rng = random.Random(seed)
    tokens = lambda low, high: tuple(rng.randrange(50) for _ in range(rng.randint(low, high)))  # noqa: E731
    features = [
        InputFeature(prompt_ids=prompt, completion_ids=tokens(1, 200))
        for prompt in (tokens(1, 400) for _ in range(groups))
        for _ in range(5)
    ]
    return pack_shared(features, multiple_of=BLOCK).to("cuda").shared


def attention_and_gradients(rows, route, dtype, window):
    draw = torch.Generator(device="cuda").manual_seed(0)
    make = lambda heads: torch.randn(1, heads, rows.row_length, 64, device="cuda", generator=draw)  # noqa: E731
    inputs = [make(heads).to(torch.bfloat16).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    out = shared_attention(*inputs, rows, window=window, route=route)
    gradient = torch.randn(out.shape, device="cuda", generator=draw).to(torch.bfloat16).to(dtype)
    gradient[:, :, rows.num_slots :] = 0  # padding is read by nothing
    return [out.detach(), *torch.autograd.grad(out, inputs, gradient)]


def check_window(window, route="flex"):
    for seed in range(4):
        rows = ragged_rows(seed)
        exact = attention_and_gradients(rows, "mask", torch.float32, window)
        found = attention_and_gradients(rows, route, torch.bfloat16, window)
        for ours, theirs in zip(found, exact, strict=True):
            ours, theirs = (x[:, :, : rows.num_slots] for x in (ours.float(), theirs))
            assert float((ours - theirs).norm() / theirs.norm()) < 1e-2, (route, seed, window)


def test_attention_by_tiles_gives_the_masked_attention_and_its_gradients():
    check_window(None, "tiles")


def test_flex_attention_gives_the_masked_attention_and_its_gradients():
    check_window(None)


def test_flex_attention_gives_the_masked_attention_under_a_window():
    check_window(70)


def test_random_lengths_compile_a_handful_of_graphs():
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    for seed in range(20):
        attention_and_gradients(ragged_rows(seed, groups=1 + seed % 5), "flex", torch.bfloat16, None)
    assert counters["stats"]["unique_graphs"] - before <= 4


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_") and name in (sys.argv[1:] or [name]):
            test()
            print("passed", name, flush=True)
