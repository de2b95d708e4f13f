"""The walk over windows gives the numbers and gradients of plain autograd over all logits, for every loss.

The oracle is `linear_logps_and_entropy` with autograd in float64. Scratch sizes: a few rows (many windows, sequences
cut or longer than a window), and everything at once. Lengths 3, 7, 1, 20, 5:
with windows of 12 rows the fourth sequence is longer than a window.
"""

import pytest
import torch

from gruppo.kernel import Head, LogitShape, linear_logps_and_entropy, memory_estimate
from gruppo.kernel.index import take_repeated, take_unique
from gruppo.loss import (
    BNPOLoss,
    CISPOLoss,
    DAPOLoss,
    DRGRPOLoss,
    GRPOLoss,
    GSPOLoss,
    MaskedWeight,
    SAPOLoss,
    TruncatedWeight,
)
from gruppo.loss.inputs import align
from gruppo.model.logp_model import LossWalk

LENGTHS = [3, 7, 1, 20, 5]
N, D, V = sum(LENGTHS), 6, 31
TEMPERATURE = 0.8
LOSSES = [GRPOLoss, GSPOLoss, SAPOLoss, CISPOLoss, BNPOLoss, DRGRPOLoss, DAPOLoss]
OPTIONS = {
    "plain": {},
    "kl": {"beta": 0.1},
    "kl and entropy": {"beta": 0.1, "entropy_coef": 0.05},
    "token correction": {"correction": TruncatedWeight(1.1)},
    "sequence correction": {"correction": MaskedWeight(0.9, 1.1, "sequence")},
}
SCRATCH = {"few rows": 16 * V * 8, "windows of 12": 12 * V * 8 + 4 * V * 8, "all": 1 << 24}


@pytest.fixture(scope="module")
def case():
    draw = torch.Generator().manual_seed(3)
    randn = lambda *size: torch.randn(*size, generator=draw, dtype=torch.float64)  # noqa: E731
    hidden, weight = randn(N, D).requires_grad_(), randn(V, D).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=draw)
    with torch.no_grad():
        logps, _ = linear_logps_and_entropy(hidden, weight, labels, TEMPERATURE)
    old = logps + 0.2 * randn(N)
    arguments = {"old_logps": old, "ref_logps": logps + 0.3 * randn(N), "sampler_logps": old + 0.1 * randn(N)}
    inputs = {"labels": labels, "cu_seqlens": torch.tensor([0, *LENGTHS]).cumsum(0)}
    return hidden, weight, labels, inputs, arguments | {"advantages": randn(len(LENGTHS))}


@pytest.mark.parametrize("scratch", SCRATCH)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cls", LOSSES, ids=lambda c: c.__name__)
def test_loss_and_gradients_through_the_head_are_those_of_autograd(case, cls, options, scratch):
    hidden, weight, labels, inputs, arguments = case
    loss = cls(**OPTIONS[options])
    logps, entropies = linear_logps_and_entropy(hidden, weight, labels, TEMPERATURE)
    expected = loss(inputs, {"logps": logps, "entropies": entropies}, **arguments)
    grad_hidden, grad_weight = torch.autograd.grad(expected.loss, (hidden, weight))
    head = Head(weight.detach(), shape=LogitShape(temperature=TEMPERATURE), scratch_bytes=SCRATCH[scratch])
    walk = LossWalk(loss, lambda dtype: align(inputs, {"logps": torch.zeros(N, dtype=dtype)}, **arguments), LENGTHS)
    result, value = walk(head, hidden.detach(), labels, trains=True)
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(value, expected.loss.detach(), **tolerance)
    torch.testing.assert_close(walk.terms, expected.terms, **tolerance)
    torch.testing.assert_close(result.d_hidden, grad_hidden, **tolerance)
    torch.testing.assert_close(result.d_weight, grad_weight, **tolerance)
    torch.testing.assert_close(result.logps, logps.detach(), **tolerance)


def test_on_policy_ratios_are_one_through_the_head(case):
    hidden, weight, labels, inputs, arguments = case
    blank = torch.zeros(N, dtype=torch.float64)
    walk = LossWalk(GRPOLoss(), lambda _: align(inputs, {"logps": blank}, advantages=arguments["advantages"]), LENGTHS)
    _, value = walk(Head(weight.detach()), hidden.detach(), labels, trains=False)
    assert walk.inputs.on_policy
    assert value.item() == pytest.approx(-arguments["advantages"].mean().item(), rel=1e-12)


@pytest.mark.parametrize(
    "shape",
    [
        LogitShape(scale=0.25),
        LogitShape(soft_cap=2.0),
        LogitShape(soft_cap=2.0, scale=3.0, temperature=0.5),
    ],
    ids=["scale", "soft cap", "all three"],
)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_scaled_and_capped_logits_have_the_gradients_of_autograd(shape, entropy_gradient):
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(9, D, generator=draw, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, D, generator=draw, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, V, (9,), generator=draw)
    z = hidden @ weight.T * shape.scale
    z = z if shape.soft_cap is None else shape.soft_cap * torch.tanh(z / shape.soft_cap)
    log_p = (z / shape.temperature).log_softmax(-1)
    logps, entropies = log_p.gather(1, labels[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    a, b = torch.randn(9, generator=draw, dtype=torch.float64), torch.randn(9, generator=draw, dtype=torch.float64)
    total = (a * logps).sum() + (b * entropies).sum() * entropy_gradient
    grad_hidden, grad_weight = torch.autograd.grad(total, (hidden, weight))
    head = Head(weight.detach(), shape=shape, scratch_bytes=4 * V * 16)
    result = head.train(
        hidden.detach(),
        labels,
        lambda rows, _logps, _entropies: (a[rows], b[rows] if entropy_gradient else None),
        entropy_gradient=entropy_gradient,
    )
    torch.testing.assert_close(
        [result.logps, result.entropies, result.d_hidden, result.d_weight],
        [logps.detach(), entropies.detach(), grad_hidden, grad_weight],
        rtol=1e-10,
        atol=1e-12,
    )


def test_score_gives_the_log_probs_of_train_bit_for_bit():
    draw = torch.Generator().manual_seed(6)
    hidden, weight = torch.randn(50, 16, generator=draw), torch.randn(97, 16, generator=draw)
    labels = torch.randint(0, 97, (50,), generator=draw)
    head = Head(weight, scratch_bytes=8 * 97 * 8)
    result = head.train(hidden, labels, lambda rows, logps, _: (torch.ones_like(logps), None))
    logps, entropies = head.score(hidden, labels)
    assert torch.equal(result.logps, logps) and torch.equal(result.entropies, entropies)


def test_a_frozen_weight_gets_no_gradient_and_the_hidden_states_the_same():
    hidden, weight, labels = torch.randn(5, 4), torch.randn(7, 4), torch.tensor([0, 1, 2, 3, 6])
    ask = lambda rows, logps, _: (torch.ones_like(logps), None)  # noqa: E731
    frozen = Head(weight).train(hidden, labels, ask, needs_weight=False)
    assert frozen.d_weight is None
    assert torch.equal(frozen.d_hidden, Head(weight).train(hidden, labels, ask).d_hidden)


def test_no_tokens_give_zero_gradients():
    ask = lambda rows, logps, _: (logps, None)  # noqa: E731
    result = Head(torch.randn(7, 4)).train(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), ask)
    assert torch.equal(result.d_weight, torch.zeros(7, 4)) and result.d_hidden.shape == (0, 4)


def test_extreme_logits_give_the_log_probs_of_float64():
    weight = torch.tensor([[1e4], [-1e4], [0.0]])
    labels = torch.tensor([0, 1, 2])
    logps, entropies = Head(weight).score(torch.ones(3, 1), labels)
    assert logps.tolist() == [0.0, -2e4, -1e4] and entropies.tolist() == [0.0, 0.0, 0.0]


def test_windows_end_at_sequence_boundaries_and_refuse_a_longer_sequence():
    head = Head(torch.zeros(10, 2), scratch_bytes=10 * 4 * 8)
    size = head.sizes.window
    assert head.windows(7, [2, 3, 2], size=5) == [slice(0, 5), slice(5, 7)]
    assert head.windows(7, [2, 3, 2], size=4) == [slice(0, 2), slice(2, 5), slice(5, 7)]
    assert head.windows(7, [2, 3, 2], size=2) is None
    assert head.windows(2 * size + 1)[-1] == slice(2 * size, 2 * size + 1)


def test_memory_estimate_is_flat_in_the_number_of_tokens_but_for_the_results():
    small, large = (memory_estimate(n, 2560, 151936, trained=True) for n in (16_384, 262_144))
    assert small["scratch"] == large["scratch"] == 4096 * 151936 * 2
    assert small["scratch"] / 2**30 < 1.25
    assert small["d_weight"] == large["d_weight"] == 151936 * 2560 * 4 + 4096 * 2560 * 2


def test_taking_rows_gives_the_gradient_of_indexing():
    values = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([4, 0, 5])
    assert torch.equal(take_unique(values, index), values[index])
    assert torch.autograd.gradcheck(take_unique, (values, index))
    index = torch.tensor([4, 0, 4])
    assert torch.equal(take_repeated(values, index), values[index])
    assert torch.autograd.gradcheck(take_repeated, (values, index))
