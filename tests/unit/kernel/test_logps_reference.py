"""The reference log-probs and entropies against float64 `log_softmax`, written out here."""

import math

import pytest
import torch
from walked_head import walked_logps_and_entropy

from gruppo.errors import InputError
from gruppo.kernel import linear_logps_and_entropy, logps_and_entropy

NAN, INF = float("nan"), float("inf")


def truth(logits, labels, temperature=1.0):
    """(log-probs, entropies) in float64, 0 where not scored."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    scored = labels != -100
    logps = log_p.gather(-1, torch.where(scored, labels, 0)[..., None]).squeeze(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    return torch.where(scored, logps, 0.0), torch.where(scored, entropy, 0.0)


def random_case(shape, vocabulary, seed=0, scale=3.0):
    draw = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(*shape, vocabulary, generator=draw)
    labels = torch.randint(0, vocabulary, shape, generator=draw)
    return logits, torch.where(torch.rand(shape, generator=draw) < 0.3, -100, labels)


def test_uniform_logits_by_hand():
    logps, entropy = logps_and_entropy(torch.zeros(2, 4), torch.tensor([1, -100]))
    assert logps.tolist() == pytest.approx([-math.log(4), 0.0])
    assert entropy.tolist() == pytest.approx([math.log(4), 0.0])


def test_two_tokens_by_hand():
    # logits ln 3, 0: probabilities 3/4 and 1/4
    logps, entropy = logps_and_entropy(torch.tensor([[math.log(3), 0.0]]), torch.tensor([1]))
    assert logps.item() == pytest.approx(math.log(1 / 4))
    assert entropy.item() == pytest.approx(-(3 / 4 * math.log(3 / 4) + 1 / 4 * math.log(1 / 4)))


def test_temperature_by_hand():
    # logits 2 ln 3, 0 at temperature 2: probabilities 3/4 and 1/4
    logps, _ = logps_and_entropy(torch.tensor([[2 * math.log(3), 0.0]]), torch.tensor([0]), temperature=2.0)
    assert logps.item() == pytest.approx(math.log(3 / 4))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("shape", "vocabulary"), [((7,), 1), ((2, 5), 3), ((1, 9), 257), ((0,), 5), ((3, 0), 5)])
def test_agrees_with_log_softmax(shape, vocabulary, temperature):
    logits, labels = random_case(shape, vocabulary)
    torch.testing.assert_close(
        logps_and_entropy(logits.double(), labels, temperature),
        truth(logits, labels, temperature),
        rtol=1e-12,
        atol=1e-12,
    )


def test_gradient_agrees_with_log_softmax():
    logits, labels = random_case((2, 5), 11)
    a, b = logits.double().requires_grad_(), logits.double().requires_grad_()
    for x, (logps, entropy) in ((a, logps_and_entropy(a, labels, 0.7)), (b, truth(b, labels, 0.7))):
        (logps.sum() + 0.3 * entropy.square().sum()).backward()
        assert x.grad is not None
    torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_in_float32(dtype):
    logits, labels = random_case((64,), 257)
    logits = logits.to(dtype)
    results = logps_and_entropy(logits, labels)
    assert [r.dtype for r in results] == [torch.float32, torch.float32]
    expected = [x.float() for x in truth(logits, labels)]
    torch.testing.assert_close(list(results), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30])
def test_what_is_not_scored_may_hold_anything(garbage):
    logits, labels = random_case((6,), 5)
    dirty = torch.where((labels != -100)[:, None], logits, garbage).requires_grad_()
    clean = logits.clone().requires_grad_()
    for x in (dirty, clean):
        logps, entropy = logps_and_entropy(x, labels)
        (logps + entropy).sum().backward()
    assert torch.equal(dirty.grad, clean.grad)
    assert (dirty.grad[labels == -100] == 0).all()


def test_extreme_logits_by_hand():
    logits = torch.tensor([[1e4, -1e4, -1e4], [-1e4, 1e4, -1e4], [1e4, 1e4, -1e4]])
    logps, entropy = logps_and_entropy(logits.double(), torch.tensor([0, 0, 1]))
    assert logps.tolist() == pytest.approx([0.0, -2e4, -math.log(2)])
    assert entropy.tolist() == pytest.approx([0.0, 0.0, math.log(2)], abs=1e-9)


@pytest.mark.parametrize("head", ["reference", "walked"])
@pytest.mark.parametrize("offset", [0.0, 30.0, -1e3, 1e4])
def test_a_common_offset_of_the_logits_costs_no_digits(head, offset):
    draw = torch.Generator().manual_seed(5)
    logits, labels = 3 * torch.randn(16, 100, generator=draw) + offset, torch.arange(16)
    if head == "reference":
        got = logps_and_entropy(logits, labels)
    else:
        got = walked_logps_and_entropy(torch.eye(16), logits.T.contiguous(), labels)
    expected = [x.float() for x in truth(logits, labels)]
    torch.testing.assert_close(list(got), expected, rtol=1e-6, atol=2e-6)


def test_hidden_states_and_weight_give_the_logits():
    draw = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(2, 4, 8, generator=draw), torch.randn(11, 8, generator=draw)
    labels = torch.tensor([[1, -100, 3, 10], [-100, -100, 0, 5]])
    expected = truth(hidden.double() @ weight.double().T, labels, 0.7)
    got = linear_logps_and_entropy(hidden.double(), weight.double(), labels, 0.7)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_narrow_hidden_states_are_multiplied_in_float32():
    draw = torch.Generator().manual_seed(4)
    hidden, weight = (torch.randn(n, 64, generator=draw).bfloat16() for n in (16, 33))
    labels = torch.arange(16)
    expected = [x.float() for x in truth(hidden.double() @ weight.double().T, labels)]
    got = linear_logps_and_entropy(hidden, weight, labels)
    torch.testing.assert_close(list(got), expected, rtol=1e-5, atol=1e-4)


heads = pytest.mark.parametrize("head", [linear_logps_and_entropy, walked_logps_and_entropy])


@heads
def test_hidden_states_that_are_not_scored_may_hold_anything(head):
    hidden = torch.tensor([[1.0, 2.0], [NAN, INF]], requires_grad=True)
    weight = torch.ones(3, 2, requires_grad=True)
    logps, entropy = head(hidden, weight, torch.tensor([1, -100]))
    (logps + entropy).sum().backward()
    # d logp / d z = onehot - 1/3 (the entropy of a uniform distribution has no slope), times hidden
    assert weight.grad.tolist() == [
        pytest.approx(row, abs=1e-6) for row in [[-1 / 3, -2 / 3], [2 / 3, 4 / 3], [-1 / 3, -2 / 3]]
    ]
    assert hidden.grad[1].tolist() == [0.0, 0.0]


@heads
def test_one_vector_per_label(head):
    with pytest.raises(InputError, match=r"hidden has shape \(2, 3, 8\) and labels \(2, 4\); expected one vector per"):
        head(torch.zeros(2, 3, 8), torch.zeros(5, 8), torch.zeros(2, 4, dtype=torch.int64))


@heads
def test_weight_must_fit_the_hidden_size(head):
    with pytest.raises(InputError, match=r"weight must be \[V, 8\], got \(8, 5\)"):
        head(torch.zeros(2, 8), torch.zeros(8, 5), torch.zeros(2, dtype=torch.int64))


@pytest.mark.parametrize("temperature", [0.0, -1.0, NAN])
@heads
def test_temperature_must_be_positive(head, temperature):
    with pytest.raises(InputError, match=f"temperature must be positive, got {temperature!r}"):
        head(torch.zeros(2, 8), torch.zeros(5, 8), torch.zeros(2, dtype=torch.int64), temperature)


@pytest.mark.parametrize("label", [-1, 5])
@heads
def test_a_label_outside_the_vocabulary_is_not_scored_as_another_token(head, label):
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds"):
        head(torch.zeros(1, 8), torch.zeros(5, 8), torch.tensor([label]))
