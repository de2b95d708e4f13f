"""Attention over shared prompts in Triton against the masked attention, through the interpreter where there is no GPU.

Prompts and completions from a part of a tile to several tiles, groups that interleave, two query heads per key head, a
head size that is no power of 2.
"""

import random
from itertools import cycle

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from gruppo.batch import pack_shared
from gruppo.kernel.shared_prompt_attention import shared_attention
from gruppo.kernel.triton_attention import segment_attention
from gruppo.types import InputFeature

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),
]


def rows_of(prompt, completion, groups=2, size=3, seed=0):
    rng = random.Random(seed)
    tokens = lambda bounds: tuple(rng.randrange(50) for _ in range(rng.randint(*bounds)))  # noqa: E731
    prompts = [tokens(prompt) for _ in range(groups)]
    features = [InputFeature(prompt_ids=ids, completion_ids=tokens(completion)) for _ in range(size) for ids in prompts]
    return pack_shared(features, multiple_of=16).shared


CASES = {
    "short": rows_of((1, 20), (1, 15)),
    "several tiles": rows_of((130, 300), (100, 200), size=2),
    "long prompt": rows_of((260, 270), (1, 5)),
    "no completion": rows_of((40, 50), (1, 1)),
}


@pytest.mark.parametrize(("case", "width"), list(zip(CASES, cycle((16, 24)), strict=False)))
def test_attention_and_its_gradients_are_those_of_the_mask(case, width):
    rows = CASES[case]
    draw = torch.Generator().manual_seed(0)
    # as transformers hands them over: [R, W, H, D] seen as [R, H, W, D]
    inputs = [torch.randn(1, rows.row_length, heads, width, generator=draw).transpose(1, 2) for heads in (4, 2, 2)]
    query, key, value = (x.clone().requires_grad_() for x in inputs)
    weight = torch.randn(1, 4, rows.row_length, width, generator=draw)
    weight[:, :, rows.num_slots :] = 0  # nobody reads the padding
    expected = shared_attention(query, key, value, rows, scale=0.3, route="mask")
    wanted = torch.autograd.grad((expected * weight).sum(), (query, key, value))
    query, key, value = (x.detach().requires_grad_() for x in inputs)
    out = segment_attention(query[0], key[0], value[0], rows.tiles, 0.3)
    got = torch.autograd.grad((out.transpose(0, 1) * weight[0]).sum(), (query, key, value))
    torch.testing.assert_close(
        out[: rows.num_slots], expected[0].transpose(0, 1)[: rows.num_slots], rtol=2e-5, atol=2e-6
    )
    assert not out[rows.num_slots :].any()
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=5e-5, atol=5e-6)


def test_the_operator_tells_torch_the_truth():
    rows = CASES["short"]
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, rows.row_length, 16, generator=draw).requires_grad_() for heads in (4, 2, 2))
    torch.library.opcheck(
        torch.ops.gruppo.segment_attention, (q, k, v, rows.tiles, 0.3), test_utils=("test_schema", "test_faketensor")
    )
