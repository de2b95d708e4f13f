"""The chunked head gives the numbers and gradients of the reference without ever holding a [T, V] tensor.

Chunk sizes: one row at a time; a few rows, so that the last chunk is shorter; everything at once. Vocabularies: 1 (a
certain token), 2, one below and above a power of two. Zero tokens and all tokens masked leave no chunk at all.
"""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from walked_head import walked_logps_and_entropy

from gruppo.kernel import head, linear_logps_and_entropy

D = 8


def hold_rows(monkeypatch, rows, vocabulary, dtype=torch.float64):
    """Give the head memory for the logits and the gradients of so many rows."""
    per_row = 2 * vocabulary * torch.empty(0, dtype=dtype).element_size()
    monkeypatch.setattr(head, "CPU_SCRATCH", max(rows * per_row, 1))


def random_case(num_tokens, vocabulary, dtype=torch.float64, seed=0, masked=0.3):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, D, generator=draw, dtype=torch.float64)
    weight = torch.randn(vocabulary, D, generator=draw, dtype=torch.float64)
    labels = torch.randint(0, vocabulary, (num_tokens,), generator=draw)
    labels = torch.where(torch.rand(num_tokens, generator=draw) < masked, -100, labels)
    return hidden.to(dtype), weight.to(dtype), labels


def run(function, hidden, weight, labels, temperature=1.0):
    """[log-probs, entropies, gradient of hidden, gradient of weight] for a loss that uses both in unequal parts."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logps, entropy = function(hidden, weight, labels, temperature)
    coefficients = torch.linspace(-1, 2, labels.numel(), dtype=logps.dtype).view(labels.shape)
    (coefficients * logps + coefficients.flip(0) ** 2 * entropy).sum().backward()
    return [logps.detach(), entropy.detach(), hidden.grad, weight.grad]


def assert_agrees(case, temperature=1.0, tolerance=1e-12):
    got, expected = (run(f, *case, temperature) for f in (walked_logps_and_entropy, linear_logps_and_entropy))
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows_per_chunk", [0, 1, 3, 1000])
@pytest.mark.parametrize("vocabulary", [1, 2, 31, 257])
def test_agrees_with_the_reference_for_any_chunk_size(monkeypatch, vocabulary, rows_per_chunk):
    hold_rows(monkeypatch, rows_per_chunk, vocabulary)
    assert_agrees(random_case(17, vocabulary), temperature=0.7)


@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_agrees_for_few_tokens(monkeypatch, num_tokens):
    hold_rows(monkeypatch, 2, 5)
    assert_agrees(random_case(num_tokens, 5, masked=0.0))


def test_all_masked_gives_zeros_and_no_gradient():
    hidden, weight, _ = random_case(6, 5)
    logps, entropy, grad_hidden, grad_weight = run(walked_logps_and_entropy, hidden, weight, torch.full((6,), -100))
    for x in (logps, entropy, grad_hidden, grad_weight):
        assert torch.equal(x, torch.zeros_like(x))


def test_rows_of_a_padded_batch_keep_their_shape(monkeypatch):
    hold_rows(monkeypatch, 4, 11)
    hidden, weight, labels = random_case(15, 11)
    got = run(walked_logps_and_entropy, hidden.view(3, 5, D), weight, labels.view(3, 5))
    assert got[0].shape == (3, 5)
    expected = run(linear_logps_and_entropy, hidden.view(3, 5, D), weight, labels.view(3, 5))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_gradient_agrees_with_finite_differences(monkeypatch):
    hold_rows(monkeypatch, 2, 7)
    hidden, weight, labels = random_case(5, 7)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: walked_logps_and_entropy(h, w, labels, 0.7), leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_agrees_for_extreme_logits(monkeypatch, scale, dtype):
    # Hidden one-hot, so the logits are the rows of the weight: +-scale, equal maxima, and all equal.
    hold_rows(monkeypatch, 2, 3)
    weight = scale * torch.tensor([[1.0, -1.0, 1.0, 1.0], [-1.0, 1.0, 1.0, 1.0], [-1.0, -1.0, -1.0, 1.0]])
    case = torch.eye(4, dtype=dtype), weight.to(dtype), torch.tensor([0, 0, 1, 2])
    got = run(walked_logps_and_entropy, *case)
    tolerance = {torch.float32: 1e-6, torch.float64: 1e-12}[dtype]
    assert got[0].tolist() == pytest.approx([0.0, -2 * scale, -math.log(2), -math.log(3)], rel=tolerance)
    assert got[1].tolist() == pytest.approx([0.0, 0.0, math.log(2), math.log(3)], rel=tolerance)
    torch.testing.assert_close(got, run(linear_logps_and_entropy, *case), rtol=tolerance, atol=tolerance * scale)


def test_agrees_in_float32(monkeypatch):
    hold_rows(monkeypatch, 5, 257)
    assert_agrees(random_case(33, 257, torch.float32), temperature=0.7, tolerance=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_computed_in_float32(monkeypatch, dtype):
    hold_rows(monkeypatch, 5, 257)
    hidden, weight, labels = random_case(33, 257, dtype)
    logps, entropy, grad_hidden, grad_weight = run(walked_logps_and_entropy, hidden, weight, labels)
    wide = run(linear_logps_and_entropy, hidden.float(), weight.float(), labels)
    assert (logps.dtype, entropy.dtype, grad_hidden.dtype, grad_weight.dtype) == (torch.float32,) * 2 + (dtype,) * 2
    torch.testing.assert_close([logps, entropy], wide[:2], rtol=1e-5, atol=1e-5)
    # Accumulated over all chunks in float32 and rounded once: half a unit in the last place of the narrow type.
    rounding = torch.finfo(dtype).eps
    torch.testing.assert_close([grad_hidden.float(), grad_weight.float()], wide[2:], rtol=rounding, atol=1e-4)


def test_log_probs_alone_have_the_gradient_of_the_reference(monkeypatch):
    hold_rows(monkeypatch, 4, 11)
    hidden, weight, labels = random_case(9, 11)
    grads = []
    for function in (walked_logps_and_entropy, linear_logps_and_entropy):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        grads.append(torch.autograd.grad(function(*leaves, labels)[0].sum(), leaves))
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, labels = random_case(9, 11)
    hidden.requires_grad_()
    walked_logps_and_entropy(hidden, weight, labels)[0].sum().backward()
    reference = hidden.detach().clone().requires_grad_()
    linear_logps_and_entropy(reference, weight, labels)[0].sum().backward()
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, reference.grad, rtol=1e-12, atol=1e-12)


def test_frozen_hidden_states_get_no_gradient():
    hidden, weight, labels = random_case(9, 11)
    weight.requires_grad_()
    walked_logps_and_entropy(hidden, weight, labels)[0].sum().backward()
    reference = weight.detach().clone().requires_grad_()
    linear_logps_and_entropy(hidden, reference, labels)[0].sum().backward()
    assert hidden.grad is None
    torch.testing.assert_close(weight.grad, reference.grad, rtol=1e-12, atol=1e-12)


# --- memory ---------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """Counts the numbers in the largest tensor that any operation, forward or backward, allocates."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given:  # a view allocates nothing
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


def largest_tensor(function, num_tokens, vocabulary, frozen_weight=False):
    hidden, weight, labels = random_case(num_tokens, vocabulary, torch.float32, masked=0.0)
    hidden.requires_grad_()
    weight.requires_grad_(not frozen_weight)
    with LargestTensor() as seen:
        logps, entropy = function(hidden, weight, labels)
        (logps + entropy).sum().backward()
    return seen.numbers


@pytest.mark.parametrize("num_tokens", [64, 256, 1024])
def test_no_tensor_is_larger_than_one_chunk_of_logits(monkeypatch, num_tokens):
    vocabulary, chunk = 2048, 16 * 2048
    hold_rows(monkeypatch, 16, vocabulary, torch.float32)
    assert largest_tensor(walked_logps_and_entropy, num_tokens, vocabulary) == chunk


def test_a_frozen_weight_costs_no_memory_for_its_gradient(monkeypatch):
    vocabulary = 2048
    hold_rows(monkeypatch, 1, vocabulary, torch.float32)  # one row, smaller than the weight
    assert largest_tensor(walked_logps_and_entropy, 64, vocabulary, frozen_weight=True) == vocabulary
    assert largest_tensor(walked_logps_and_entropy, 64, vocabulary) == vocabulary * D


def test_the_count_sees_the_full_logits_of_the_reference():
    assert largest_tensor(linear_logps_and_entropy, 64, 2048) == 64 * 2048
