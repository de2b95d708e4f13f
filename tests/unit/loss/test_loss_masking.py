"""Slots that are not scored: whatever they hold changes no bit; and batches in which nothing is scored."""

from dataclasses import replace

import pytest
import torch
from loss_batch import PER_TOKEN, SEVEN, Batch, every_term, seven_losses, value_and_grad

from gruppo.batch import Totals
from gruppo.loss import MaskedWeight, PolicyLoss, SoftGate, TruncatedWeight, sequence_sum_level

GARBAGE = [float("nan"), float("inf"), float("-inf"), 1e4, -1e4]
garbage_values = pytest.mark.parametrize("garbage", GARBAGE)
layouts = pytest.mark.parametrize("layout", ["padded", "cu_seqlens [T]"])

BATCH = Batch.random([4, 1, 6, 2], seed=7, per_token_advantages=True)


def spoilt(batch, garbage):
    """The batch with `garbage` in every per-token input of every slot that is not scored."""
    spoil = lambda x: torch.where(batch.mask, x, garbage)  # noqa: E731
    values = {name: spoil(batch.values[name]) for name in PER_TOKEN}
    advantages = spoil(batch.advantages) if batch.advantages.dim() == 2 else batch.advantages
    return replace(batch, values=values, advantages=advantages)


def assert_bitwise(got, expected):
    assert [torch.equal(a, b) for a, b in zip(got, expected, strict=True)] == [True] * len(expected)


@garbage_values
@layouts
@seven_losses
@pytest.mark.row("R-28", "NaN, inf and ±200 in masked slots")
def test_masked_slots_change_no_bit(name, layout, garbage):
    loss = every_term(name)
    assert_bitwise(value_and_grad(loss, spoilt(BATCH, garbage), layout), value_and_grad(loss, BATCH, layout))


@garbage_values
@seven_losses
@pytest.mark.row("R-28", "gradients of masked slots")
def test_masked_slots_get_gradient_exactly_zero(name, garbage):
    _, *grads = value_and_grad(every_term(name), spoilt(BATCH, garbage))
    assert [(g[~BATCH.mask] == 0).all().item() for g in grads] == [True, True]


@garbage_values
@seven_losses
def test_masked_slots_change_no_bit_on_policy(name, garbage):
    loss = every_term(name)
    got = value_and_grad(loss, spoilt(BATCH, garbage), old_logps=None)
    assert_bitwise(got, value_and_grad(loss, BATCH, old_logps=None))


@garbage_values
@seven_losses
def test_masked_slots_change_no_bit_in_float32(name, garbage):
    def narrow(batch):
        return replace(batch, values={k: v.float() for k, v in batch.values.items()})

    loss = every_term(name)
    assert_bitwise(value_and_grad(loss, narrow(spoilt(BATCH, garbage))), value_and_grad(loss, narrow(BATCH)))


@garbage_values
@pytest.mark.parametrize(
    "loss",
    [
        PolicyLoss(correction=MaskedWeight(level="sequence")),
        PolicyLoss(level=sequence_sum_level, surrogate=SoftGate(), correction=TruncatedWeight()),
    ],
    ids=["masked by sequence", "sequence sum"],
)
def test_masked_slots_change_no_bit_in_sums_over_a_sequence(loss, garbage):
    assert_bitwise(value_and_grad(loss, spoilt(BATCH, garbage)), value_and_grad(loss, BATCH))


@garbage_values
@seven_losses
def test_masked_logits_change_no_bit(name, garbage):
    draw = torch.Generator().manual_seed(0)
    clean = torch.randn(*BATCH.labels.shape, 50, generator=draw, dtype=torch.float64)
    inputs, _, keywords = BATCH.arguments()

    def run(logits):
        logits = logits.clone().requires_grad_()
        value = every_term(name)(inputs, {"logits": logits}, **keywords).loss
        return value.detach(), torch.autograd.grad(value, logits)[0]

    dirty = torch.where(BATCH.mask[..., None], clean, garbage)
    assert_bitwise(run(dirty), run(clean))
    assert (run(dirty)[1][~BATCH.mask] == 0).all()


def test_a_batch_with_nothing_scored_in_one_row_gives_that_row_no_gradient():
    batch = Batch.random([3, 3], mask=[[False, True, True], [False, False, False]], seed=8)
    _, grad, _ = value_and_grad(every_term("GSPO"), spoilt(batch, float("nan")))
    assert grad[1].tolist() == [0.0, 0.0, 0.0]
    assert (grad[0, 1:] != 0).all()


# --- nothing scored at all ------------------------------------------------------------------------------------------

EMPTY = {
    "[0, L]": ((0, 3), {}, 0),
    "[B, 0]": ((2, 0), {}, 2),
    "[B, L], all masked": ((2, 3), {}, 2),
    "[0], position_ids": ((0,), {"position_ids": []}, 0),
    "[0], cu_seqlens": ((0,), {"cu_seqlens": [0]}, 0),
    "[1, 0], cu_seqlens": ((1, 0), {"cu_seqlens": [0]}, 0),
    "[0], two sequences without slots": ((0,), {"cu_seqlens": [0, 0, 0]}, 2),
    "[T], all masked": ((4,), {"cu_seqlens": [0, 1, 4]}, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("case", EMPTY)
@seven_losses
@pytest.mark.row("R-23", "a batch with nothing scored")
def test_an_empty_batch_gives_zero_with_a_graph(name, case, dtype):
    shape, extra, num_sequences = EMPTY[case]
    inputs = {"labels": torch.full(shape, -100), **{k: torch.tensor(v, dtype=torch.int64) for k, v in extra.items()}}
    logps, entropies = (torch.full(shape, -1.0, dtype=dtype, requires_grad=True) for _ in range(2))
    other = torch.full(shape, -2.0, dtype=dtype)
    value = every_term(name)(
        inputs,
        {"logps": logps, "entropies": entropies},
        advantages=[1.0] * num_sequences,
        old_logps=other,
        ref_logps=other,
        sampler_logps=other,
    ).loss
    value.backward()
    assert value.item() == 0.0
    assert torch.equal(logps.grad, torch.zeros_like(logps))
    assert torch.equal(entropies.grad, torch.zeros_like(entropies))


@pytest.mark.parametrize("name", SEVEN)
def test_an_empty_micro_batch_of_a_full_step_gives_zero(name):
    inputs = {"labels": torch.full((2, 3), -100)}
    logps = torch.zeros(2, 3, requires_grad=True)
    value = SEVEN[name]()(inputs, {"logps": logps}, advantages=[1.0, 2.0], totals=Totals(sequences=8, tokens=80)).loss
    assert value.item() == 0.0
