"""Splitting a step into micro-batches, and the order of sequences, are not visible in any result."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batch import SEVEN, Batch, assert_same, every_term, seven_losses, value_and_grad

from gruppo.batch import Totals
from gruppo.loss import BNPOLoss, DAPOLoss

STEP = Batch.random([4, 1, 6, 2, 3, 5, 1], seed=5)


def step_totals(batch):
    return Totals(sequences=len(batch.slots), tokens=int(batch.mask.sum()))


@st.composite
def splits(draw):
    """The seven sequences in any order, cut anywhere; a micro-batch may be empty."""
    order = draw(st.permutations(range(len(STEP.slots))))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=5)))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]


@seven_losses
@given(parts=splits(), layout=st.sampled_from(["padded", "cu_seqlens [T]", "positions [1, T]"]))
@settings(max_examples=12)
def test_any_split_and_order_gives_the_loss_and_gradient_of_the_step(name, parts, layout):
    loss, totals = every_term(name), step_totals(STEP)
    value = torch.zeros((), dtype=torch.float64)
    grads = [torch.zeros_like(STEP.values["logps"]) for _ in range(2)]
    for part in parts:
        # an empty packed row cannot be told from no row at all: lay it out as [0, L]
        part_value, *part_grads = value_and_grad(loss, STEP.take(part), layout if part else "padded", totals=totals)
        value += part_value
        for grad, part_grad in zip(grads, part_grads, strict=True):
            grad[part] += part_grad
    assert_same((value, *grads), value_and_grad(loss, STEP))


@seven_losses
@given(order=st.permutations(range(len(STEP.slots))))
@settings(max_examples=10)
def test_order_of_sequences_does_not_matter(name, order):
    loss = every_term(name)
    value, *grads = value_and_grad(loss, STEP)
    assert_same(value_and_grad(loss, STEP.take(list(order))), (value, *[g[list(order)] for g in grads]))


@pytest.mark.parametrize("name", [n for n in SEVEN if n != "BNPO"])
def test_the_local_batch_matters_to_bnpo_alone(name):
    local = Totals(sequences=7, tokens=15, local_tokens=2, local_share=0.1)
    plain = Totals(sequences=7, tokens=15)
    assert_same(
        value_and_grad(every_term(name), STEP, totals=local), value_and_grad(every_term(name), STEP, totals=plain)
    )


# BNPO by hand, ratio 1: the loss of a token is -A. Row 0 has 2 tokens with A = 1, row 1 has 1 token with A = -4.
TWO_ROWS = Batch.random([3, 2], seed=6)
TWO_ADVANTAGES = torch.tensor([1.0, -4.0], dtype=torch.float64)


def bnpo_on_policy(rows, totals):
    loss, batch = BNPOLoss(), TWO_ROWS.take(rows)
    return value_and_grad(loss, batch, totals=totals, old_logps=None, advantages=TWO_ADVANTAGES[rows])[0].item()


def test_bnpo_of_one_call_is_the_token_mean():
    assert bnpo_on_policy([0, 1], None) == pytest.approx((-1 - 1 + 4) / 3)


def test_bnpo_of_two_micro_batches_of_one_call_is_the_token_mean_of_the_call():
    call = Totals(sequences=2, tokens=3, local_tokens=3)
    assert bnpo_on_policy([0], call) + bnpo_on_policy([1], call) == pytest.approx((-1 - 1 + 4) / 3)


def test_bnpo_of_two_calls_is_the_mean_of_their_token_means():
    first = Totals(sequences=2, tokens=3, local_tokens=2, local_share=0.5)
    second = Totals(sequences=2, tokens=3, local_tokens=1, local_share=0.5)
    assert bnpo_on_policy([0], first) + bnpo_on_policy([1], second) == pytest.approx((-1 + 4) / 2)


def test_dapo_of_two_calls_is_the_token_mean_of_the_step():
    step = Totals(sequences=2, tokens=3, local_tokens=1, local_share=0.5)
    values = [
        value_and_grad(DAPOLoss(), TWO_ROWS.take([i]), totals=step, old_logps=None, advantages=TWO_ADVANTAGES[[i]])[0]
        for i in (0, 1)
    ]
    assert sum(values).item() == pytest.approx((-1 - 1 + 4) / 3)


def test_totals_may_be_tensors():
    totals = Totals(sequences=torch.tensor(7), tokens=STEP.mask.sum())
    assert_same(value_and_grad(every_term("DAPO"), STEP, totals=totals), value_and_grad(every_term("DAPO"), STEP))
