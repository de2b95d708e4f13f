"""The same batch in every layout that a loss takes gives the same loss and gradient."""

from dataclasses import replace

import pytest
import torch
from loss_batch import LAYOUTS, SEVEN, Batch, assert_same, every_term, seven_losses, value_and_grad

from gruppo.batch import Totals, pack
from gruppo.kernel import logps_and_entropy
from gruppo.loss import DAPOLoss, GRPOLoss, GSPOLoss
from gruppo.loss.inputs import LossInputs
from gruppo.types import InputFeature

# Rows of 4, 1, 6, 1 and 2 slots: one-slot sequences in the middle, each with its one token scored.
RAGGED = Batch.random([4, 1, 6, 1, 2], seed=1)
packed_layouts = pytest.mark.parametrize("layout", LAYOUTS[1:])


@packed_layouts
@seven_losses
def test_packed_equals_padded(name, layout):
    loss = every_term(name)
    assert_same(value_and_grad(loss, RAGGED, layout), value_and_grad(loss, RAGGED))


@packed_layouts
@seven_losses
def test_trailing_padding_changes_nothing(name, layout):
    loss = every_term(name)
    assert_same(value_and_grad(loss, RAGGED, layout, trailing=3), value_and_grad(loss, RAGGED, layout))


@packed_layouts
@seven_losses
def test_one_slot_sequences_alone_are_packed_too(name, layout):
    batch = Batch.random([1, 1, 1], seed=2)
    loss = every_term(name)
    assert_same(value_and_grad(loss, batch, layout), value_and_grad(loss, batch))


@packed_layouts
@seven_losses
def test_per_token_advantages_are_packed_too(name, layout):
    batch = Batch.random([3, 1, 4], seed=3, per_token_advantages=True)
    loss = every_term(name)
    assert_same(value_and_grad(loss, batch, layout), value_and_grad(loss, batch))


@seven_losses
def test_wider_padding_changes_nothing(name):
    narrow, loss = RAGGED, every_term(name)
    pad = lambda x, fill: torch.nn.functional.pad(x, (0, 5), value=fill)  # noqa: E731
    values = {k: pad(v, 0.0) for k, v in narrow.values.items()}
    wide = Batch(narrow.slots, pad(narrow.labels, -100), values, narrow.advantages)
    value, *grads = value_and_grad(loss, wide)
    assert_same((value, *[g[:, :6] for g in grads]), value_and_grad(loss, narrow))


@seven_losses
def test_left_padding_equals_right_padding(name):
    right, loss = RAGGED, every_term(name)
    roll = lambda x: torch.stack([row.roll(6 - n) for row, n in zip(x, right.slots, strict=True)])  # noqa: E731
    left = Batch([6] * 5, roll(right.labels), {k: roll(v) for k, v in right.values.items()}, right.advantages)
    value, *grads = value_and_grad(loss, right)
    assert_same(value_and_grad(loss, left), (value, *[roll(g) for g in grads]))


@seven_losses
def test_lists_of_scored_values_equal_tensors(name):
    loss, mask = every_term(name), RAGGED.mask
    ragged = lambda x: [row[keep].tolist() for row, keep in zip(x, mask, strict=True)]  # noqa: E731
    lists = {k: ragged(RAGGED.values[k]) for k in ("old_logps", "ref_logps", "sampler_logps")}
    lists["advantages"] = RAGGED.advantages.tolist()
    assert_same(value_and_grad(loss, RAGGED, **lists), value_and_grad(loss, RAGGED))


def test_lists_of_tensors_equal_lists_of_numbers():
    mask = RAGGED.mask
    rows = [row[keep] for row, keep in zip(RAGGED.values["old_logps"], mask, strict=True)]
    as_lists = value_and_grad(GRPOLoss(), RAGGED, old_logps=[r.tolist() for r in rows])
    assert_same(value_and_grad(GRPOLoss(), RAGGED, old_logps=rows), as_lists)


def test_advantage_lists_per_token_equal_the_tensor():
    batch = Batch.random([3, 1, 4], seed=3, per_token_advantages=True)
    rows = [row[keep].tolist() for row, keep in zip(batch.advantages, batch.mask, strict=True)]
    assert_same(value_and_grad(GRPOLoss(), batch, advantages=rows), value_and_grad(GRPOLoss(), batch))


def test_one_advantage_per_sequence_is_spread_over_its_tokens():
    spread = RAGGED.advantages[:, None].expand(RAGGED.labels.shape)
    assert_same(value_and_grad(GRPOLoss(), RAGGED, advantages=spread), value_and_grad(GRPOLoss(), RAGGED))


def test_int32_cu_seqlens_are_taken_as_attention_kernels_give_them():
    inputs, outputs, keywords = RAGGED.arguments("cu_seqlens [T]")
    wide = GRPOLoss()(inputs, outputs, **keywords).loss
    inputs["cu_seqlens"] = inputs["cu_seqlens"].int()
    assert GRPOLoss()(inputs, outputs, **keywords).loss == wide


def test_an_unscored_one_slot_sequence_counts_with_cu_seqlens():
    # Two rows, the second without a scored token: the mean over sequences divides by 2 in both layouts.
    batch = Batch.random([3, 1], mask=[[False, True, True], [False, False, False]], seed=4)
    packed = value_and_grad(GRPOLoss(), batch, "cu_seqlens [T]")
    assert_same(packed, value_and_grad(GRPOLoss(), batch))
    alone = value_and_grad(GRPOLoss(), batch.take([0]))[0]
    assert_same(packed[0], alone / 2)


def test_an_attention_mask_tells_padding_from_a_scored_first_token():
    # Positions 0 1 | 0 1 2 with the second pair padding: without the mask it would be a second sequence.
    labels = torch.tensor([-100, 5, -100, -100, -100])
    inputs = {"labels": labels, "position_ids": torch.tensor([0, 1, 0, 1, 2])}
    logps = torch.full((5,), -1.0, dtype=torch.float64)
    inputs["attention_mask"] = torch.tensor([1, 1, 0, 0, 0])
    out = GRPOLoss()(inputs, {"logps": logps}, advantages=[3.0])
    assert out.loss.item() == -3.0


def test_left_padding_of_a_single_row_with_positions_joins_the_sequence():
    # One row, left-padded; padding has position 0 (or 1, as transformers writes it).
    labels = torch.tensor([[-100, -100, -100, 5, 6]])
    logps = torch.tensor([[0.0, 0.0, 0.0, -1.0, -3.0]], dtype=torch.float64)
    for padding in (0, 1):
        inputs = {"labels": labels, "position_ids": torch.tensor([[padding, padding, 0, 1, 2]])}
        assert GRPOLoss()(inputs, {"logps": logps}, advantages=[2.0]).loss.item() == -2.0


def test_rows_of_a_padded_batch_are_one_sequence_each_whatever_their_positions():
    inputs, outputs, keywords = RAGGED.arguments()
    plain = every_term("GRPO")(inputs, outputs, **keywords).loss
    inputs["position_ids"] = torch.zeros_like(inputs["labels"])
    assert every_term("GRPO")(inputs, outputs, **keywords).loss == plain


@seven_losses
def test_logits_equal_the_log_probs_they_give(name):
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(*RAGGED.labels.shape, 50, generator=draw, dtype=torch.float64).requires_grad_()
    inputs, _, keywords = RAGGED.arguments()
    from_logits = every_term(name)(inputs, {"logits": logits}, **keywords).loss
    (grad,) = torch.autograd.grad(from_logits, logits)
    log_p = logits.log_softmax(-1)  # written out, without the package's own log-probs
    logps = log_p.gather(-1, inputs["labels"].clamp(min=0)[..., None]).squeeze(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    from_logps = every_term(name)(inputs, {"logps": logps, "entropies": entropies}, **keywords).loss
    assert_same((from_logits, grad), (from_logps, torch.autograd.grad(from_logps, logits)[0]))


def test_logps_win_over_logits():
    inputs, outputs, keywords = RAGGED.arguments()
    both = outputs | {"logits": torch.zeros(*RAGGED.labels.shape, 50)}
    assert GRPOLoss()(inputs, both, **keywords).loss == GRPOLoss()(inputs, outputs, **keywords).loss


def test_a_packed_batch_hands_the_loss_its_inputs():
    # Scored tokens 7, 8 | 9, 2 at old log-probs -1, -1, -1, -1; a uniform model over 10 tokens: ratio = e / 10.
    batch = pack(
        [
            InputFeature(prompt_ids=(5, 6), completion_ids=(7, 8), old_logps=(-1.0, -1.0)),
            InputFeature(prompt_ids=(5,), completion_ids=(9, 2), old_logps=(-1.0, -1.0)),
        ]
    )
    logps, _ = logps_and_entropy(torch.zeros(batch.num_slots, 10, dtype=torch.float64), batch.labels)
    out = GRPOLoss()(batch.loss_inputs(), {"logps": logps}, advantages=[1.0, 2.0], old_logps=batch.old_logps)
    assert out.loss.item() == pytest.approx(-1.5 * torch.e / 10)


def test_inputs_made_of_a_packed_batch_are_those_that_a_call_aligns():
    rollouts = [
        replace(InputFeature(prompt_ids=p, completion_ids=c, old_logps=o, ref_logps=r).rollout(), advantage=a)
        for p, c, o, r, a in (
            ((5, 6), (7, 8), (-1.0, -1.2), (-1.1, -0.9), 1.0), ((5,), (9, 2), (-0.8, -1.0), (-1.0, -1.3), -2.0)
        )
    ]  # fmt: skip
    batch = pack(rollouts)
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(batch.num_slots, 10, dtype=torch.float64, generator=draw)
    logps, entropies = logps_and_entropy(logits, batch.labels)
    made = LossInputs.of(batch, logps[batch.scored], entropies[batch.scored], Totals.of_step(rollouts))
    for loss in (GRPOLoss(beta=0.1, entropy_coef=0.2), GSPOLoss(), DAPOLoss(clip_range=0.05)):
        called = loss(
            batch.loss_inputs(),
            {"logps": logps, "entropies": entropies},
            advantages=[1.0, -2.0],
            old_logps=batch.old_logps,
            ref_logps=batch.ref_logps,
        )
        computed = loss.compute(made)
        torch.testing.assert_close(computed.loss, called.loss)
        torch.testing.assert_close(computed.terms, called.terms)


@pytest.mark.parametrize("layout", LAYOUTS)
@seven_losses
def test_no_advantages_give_exactly_zero(name, layout):
    value, grad, _ = value_and_grad(SEVEN[name](), RAGGED, layout, advantages=None)
    assert value.item() == 0.0
    assert torch.equal(grad, torch.zeros_like(grad))
