"""Triton kernels against `rows.py`, through Triton's interpreter where there is no GPU.

Vocabularies: 5 and 37 (one partial block), 300 with padding columns, 5000 (several blocks, several stretches). The
shapes cover plain logits, temperature, and scale with soft cap. The interpreter holds bf16 as integers and
cannot multiply it, so the product's kernel runs in float32 here and in bf16 in tests/gpu.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from gruppo.kernel import rows, triton_logits, triton_rows
from gruppo.kernel.rows import LogitShape

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning:triton"
    ),  # the interpreter computes lanes that a mask then drops
]

VOCABULARIES = [(5, None), (37, None), (300, 290), (5000, 4990)]
SHAPES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "capped": {"scale": 0.5, "soft_cap": 3.0, "temperature": 1.3},
}


def case(columns, vocabulary, shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(9, columns, generator=draw)
    labels = torch.randint(0, vocabulary or columns, (9,), generator=draw)
    return x, labels, LogitShape(vocabulary=vocabulary, **SHAPES[shape]), draw


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("columns", "vocabulary"), VOCABULARIES)
def test_row_statistics_and_directions_are_those_of_torch(columns, vocabulary, shape):
    x, labels, logit_shape, _ = case(columns, vocabulary, shape)
    mine, theirs = torch.empty_like(x), torch.empty_like(x)
    got = triton_rows.stats_and_direction(x, labels, logit_shape, mine)
    expected = rows.stats_and_direction(x.clone(), labels, logit_shape, theirs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)
    assert all(torch.equal(a, b) for a, b in zip(triton_rows.stats(x, labels, logit_shape), got, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("columns", "vocabulary"), VOCABULARIES)
def test_gradients_with_entropy_are_those_of_torch(columns, vocabulary, shape):
    x, labels, logit_shape, draw = case(columns, vocabulary, shape, seed=1)
    grads = torch.randn(2, 9, generator=draw)
    logps, entropies = rows.stats(x.clone(), labels, logit_shape)
    mine, theirs = torch.empty_like(x), torch.empty_like(x)
    triton_rows.gradient(x, labels, *grads, logps, entropies, logit_shape, mine)
    rows.gradient(x.clone(), labels, *grads, logps, entropies, logit_shape, theirs)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_rows", "columns", "vocabulary", "width"), [(37, 70, None, 32), (16, 64, 60, 48)])
def test_the_product_with_softmax_gives_log_probs_and_directions_of_float64(
    monkeypatch, num_rows, columns, vocabulary, width, shape
):
    for name, size in (("BLOCK_M", 16), ("BLOCK_N", 32), ("BLOCK_K", 16)):
        monkeypatch.setattr(triton_logits, name, size)
    draw = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(num_rows, width, generator=draw), 0.5 * torch.randn(columns, width, generator=draw)
    labels = torch.randint(0, vocabulary or columns, (num_rows,), generator=draw)
    logit_shape = LogitShape(vocabulary=vocabulary, **SHAPES[shape])
    out = torch.empty(num_rows, columns)
    result = triton_logits.RowStats.empty(num_rows, hidden.device)
    triton_logits.logits_pass(hidden, weight, labels, logit_shape, result, out)
    expected = torch.empty(num_rows, columns, dtype=torch.float64)
    logps, entropies = rows.stats_and_direction(hidden.double() @ weight.double().T, labels, logit_shape, expected)
    torch.testing.assert_close(result.logps.double(), logps, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropies.double(), entropies, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(-out.double() * result.factor[:, None], expected, rtol=1e-4, atol=1e-5)
    assert not result.overflowed


def test_a_log_prob_out_of_range_is_noticed(monkeypatch):
    for name, size in (("BLOCK_M", 16), ("BLOCK_N", 32), ("BLOCK_K", 16)):
        monkeypatch.setattr(triton_logits, name, size)
    hidden, weight = torch.ones(2, 16), torch.zeros(40, 16)
    weight[3] = 10.0  # a logit of 160 against 0: log p = -160 for every other label
    fine, beyond = (triton_logits.RowStats.empty(2, hidden.device) for _ in range(2))
    triton_logits.logits_pass(hidden, weight, torch.tensor([3, 3]), LogitShape(), fine, None)
    triton_logits.logits_pass(hidden, weight, torch.tensor([3, 5]), LogitShape(), beyond, None)
    assert not fine.overflowed and beyond.overflowed
    assert fine.logps.tolist() == [0.0, 0.0]


def test_rows_are_scaled_by_their_factor():
    x, factor = torch.randn(5, 70), torch.randn(5)
    assert torch.equal(triton_logits.scale_rows(x, factor, torch.empty_like(x)), x * factor[:, None])


def test_a_log_prob_close_to_zero_keeps_its_digits(monkeypatch):
    for name, size in (("BLOCK_M", 16), ("BLOCK_N", 32), ("BLOCK_K", 16)):
        monkeypatch.setattr(triton_logits, name, size)
    hidden, weight = torch.ones(1, 16), torch.zeros(2, 16)
    weight[0] = 1.25  # logits 20 and 0: log p = -log(1 + e^-20) = -2.0611536e-9, which 1 + R would round to 0
    stats = triton_logits.RowStats.empty(1, hidden.device)
    triton_logits.logits_pass(hidden, weight, torch.tensor([0]), LogitShape(), stats, None)
    assert stats.logps.item() == pytest.approx(-2.0611536e-9, rel=1e-6)
