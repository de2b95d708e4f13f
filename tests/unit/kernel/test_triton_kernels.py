"""Triton kernels against `chunk_ops.py`, through Triton's interpreter where there is no GPU.

Vocabularies: 5 and 300 (one partial block), 5000 (several blocks, several stretches). The shapes cover plain
logits, temperature, and scale with soft cap. The interpreter holds bf16 as integers and cannot multiply it, so the
product's kernel runs in float32 here and in bf16 in tests/gpu.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from gruppo.kernel import chunk_ops, triton_chunk_ops, triton_logits
from gruppo.kernel.chunk_ops import LogitShape
from gruppo.kernel.head import RowStats

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the compiled kernels"),
    pytest.mark.filterwarnings(
        "ignore::RuntimeWarning:triton"
    ),  # the interpreter computes lanes that a mask then drops
]


def logits_pass(hidden, weight, labels, shape, stats, out):
    numbers = (stats.logps, stats.entropies, stats.factor, stats.residual, stats.overflowed)
    triton_logits.logits_pass(hidden, weight, labels, shape.temperature, shape.scale, shape.soft_cap, *numbers, out)


VOCABULARIES = [5, 300, 5000]
SHAPES = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "capped": {"scale": 0.5, "soft_cap": 3.0, "temperature": 1.3},
}


def case(columns, shape, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = 4 * torch.randn(9, columns, generator=draw)
    labels = torch.randint(0, columns, (9,), generator=draw)
    return x, labels, LogitShape(**SHAPES[shape]), draw


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", VOCABULARIES)
def test_row_statistics_and_directions_are_those_of_torch(columns, shape):
    x, labels, logit_shape, _ = case(columns, shape)
    mine, theirs = torch.empty_like(x), torch.empty_like(x)
    got = triton_chunk_ops.stats(x, labels, logit_shape, mine)
    expected = chunk_ops.stats(x.clone(), labels, logit_shape, theirs)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=2e-6)
    assert all(torch.equal(a, b) for a, b in zip(triton_chunk_ops.stats(x, labels, logit_shape), got, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("columns", VOCABULARIES)
def test_gradients_with_entropy_are_those_of_torch(columns, shape):
    x, labels, logit_shape, draw = case(columns, shape, seed=1)
    grads = tuple(torch.randn(2, 9, generator=draw))
    numbers = chunk_ops.stats(x.clone(), labels, logit_shape)
    mine, theirs = torch.empty_like(x), torch.empty_like(x)
    triton_chunk_ops.gradient(x, labels, numbers, grads, logit_shape, mine)
    chunk_ops.gradient(x.clone(), labels, numbers, grads, logit_shape, theirs)
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("num_rows", "columns", "width"), [(37, 70, 32), (16, 64, 48)])
def test_the_product_with_softmax_gives_log_probs_and_directions_of_float64(
    monkeypatch, num_rows, columns, width, shape
):
    for name, size in (("BLOCK_M", 16), ("BLOCK_N", 32), ("BLOCK_K", 16)):
        monkeypatch.setattr(triton_logits, name, size)
    draw = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(num_rows, width, generator=draw), 0.5 * torch.randn(columns, width, generator=draw)
    labels = torch.randint(0, columns, (num_rows,), generator=draw)
    logit_shape = LogitShape(**SHAPES[shape])
    out = torch.empty(num_rows, columns)
    result = RowStats.empty(num_rows, torch.float32, hidden.device)
    logits_pass(hidden, weight, labels, logit_shape, result, out)
    expected = torch.empty(num_rows, columns, dtype=torch.float64)
    logps, entropies = chunk_ops.stats(hidden.double() @ weight.double().T, labels, logit_shape, expected)
    torch.testing.assert_close(result.logps.double(), logps, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.entropies.double(), entropies, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(-out.double() * result.factor[:, None], expected, rtol=1e-4, atol=1e-5)
    assert not result.overflowed


def test_a_log_prob_out_of_range_is_noticed(monkeypatch):
    for name, size in (("BLOCK_M", 16), ("BLOCK_N", 32), ("BLOCK_K", 16)):
        monkeypatch.setattr(triton_logits, name, size)
    hidden, weight = torch.ones(2, 16), torch.zeros(40, 16)
    weight[3] = 10.0  # a logit of 160 against 0: log p = -160 for every other label
    fine, beyond = (RowStats.empty(2, torch.float32, hidden.device) for _ in range(2))
    logits_pass(hidden, weight, torch.tensor([3, 3]), LogitShape(), fine, None)
    logits_pass(hidden, weight, torch.tensor([3, 5]), LogitShape(), beyond, None)
    assert not fine.overflowed and beyond.overflowed
    assert fine.logps.tolist() == [0.0, 0.0]


def test_rows_are_scaled_by_their_factor():
    x, factor, out = torch.randn(5, 70), torch.randn(5), torch.empty(5, 70)
    triton_chunk_ops.scale_rows(x, factor, out)
    assert torch.equal(out, x * factor[:, None])
    label_part = torch.randn(5), torch.randn(9, 70), torch.tensor([0, 8, 3, 3, 1])
    mine, theirs = torch.empty(5, 70), torch.empty(5, 70)
    triton_chunk_ops.scale_rows(x, factor, mine, label_part)
    chunk_ops.scale_rows(x, factor, theirs, label_part)
    torch.testing.assert_close(mine, theirs)


# --- as torch operators -----------------------------------------------------------------------------------------------


def operators():
    """Every operator with arguments that it takes."""
    x, labels, _, draw = case(37, "plain")
    numbers = (0.7, 1.0, 3.0)
    logps, entropies = chunk_ops.stats(x.clone(), labels, LogitShape())
    ops = torch.ops.gruppo
    yield ops.chunk_stats, (x, labels, *numbers, None)
    yield ops.chunk_stats, (x, labels, *numbers, torch.empty_like(x))
    grads = torch.randn(2, 9, generator=draw)
    yield ops.chunk_gradient, (x, labels, *grads, logps, entropies, *numbers, torch.empty_like(x))
    yield ops.scale_rows, (x, logps, torch.empty_like(x), None, None, None)


@pytest.mark.parametrize("index", range(4))
def test_operators_tell_torch_the_truth(index):
    """Schema, mutated arguments and fake tensors, as torch checks them."""
    operator, arguments = list(operators())[index]
    torch.library.opcheck(
        operator.default, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static")
    )


def test_operators_survive_compilation():
    x, labels, shape, _ = case(37, "temperature")

    def both(x, labels):
        out = torch.empty_like(x)
        logps, entropies = triton_chunk_ops.stats(x * 2, labels, shape, out)
        return out.sum(-1) + logps + entropies

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, labels), both(x, labels))


def test_a_log_prob_close_to_zero_keeps_its_digits(monkeypatch):
    for name, size in (("BLOCK_M", 16), ("BLOCK_N", 32), ("BLOCK_K", 16)):
        monkeypatch.setattr(triton_logits, name, size)
    hidden, weight = torch.ones(1, 16), torch.zeros(2, 16)
    weight[0] = 1.25  # logits 20 and 0: log p = -log(1 + e^-20) = -2.0611536e-9, which 1 + R would round to 0
    stats = RowStats.empty(1, torch.float32, hidden.device)
    logits_pass(hidden, weight, torch.tensor([0]), LogitShape(), stats, None)
    assert stats.logps.item() == pytest.approx(-2.0611536e-9, rel=1e-6)
