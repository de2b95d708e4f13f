"""`pack`: where each token goes, and the one shift by one, guarded by a model whose next token is known."""

from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gruppo.batch import pack, pad_tokens
from gruppo.errors import InputError
from gruppo.kernel import Head, logps_and_entropy
from gruppo.loss import GRPOLoss
from gruppo.types import InputFeature, Prompt, Rollout, Trajectory

VOCABULARY = 12

# Prompt 5 6 with completion 7 8, and prompt 5 with completion 9 2: the example of the docs.
WORKED = [
    InputFeature(prompt_ids=(5, 6), completion_ids=(7, 8), old_logps=(-0.7, -0.8), ref_logps=(-1.7, -1.8)),
    InputFeature(prompt_ids=(5,), completion_ids=(9, 2), old_logps=(-0.9, -0.2), ref_logps=(-1.9, -1.2)),
]


def test_worked_example():
    batch = pack(WORKED)
    assert batch.input_ids.tolist() == [5, 6, 7, 5, 9]
    assert batch.labels.tolist() == [-100, 7, 8, 9, 2]
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 3, 5]
    assert (batch.lengths, batch.num_slots, batch.num_sequences) == ((2, 2), 5, 2)
    assert (batch.scored.tolist(), batch.offsets.tolist()) == ([1, 2, 3, 4], [0, 2, 4])


def test_log_probs_stand_at_the_slot_that_scores_their_token():
    batch = pack(WORKED)
    assert batch.old_logps.tolist() == torch.tensor([0.0, -0.7, -0.8, -0.9, -0.2]).tolist()
    assert batch.ref_logps.tolist() == torch.tensor([0.0, -1.7, -1.8, -1.9, -1.2]).tolist()


def test_log_probs_are_absent_when_no_feature_has_them():
    batch = pack([InputFeature(prompt_ids=(5,), completion_ids=(6,))])
    assert (batch.old_logps, batch.ref_logps) == (None, None)


def test_masked_completion_tokens_are_not_scored_and_take_no_log_prob():
    # 7 and 9 were sampled, 8 is a tool's answer.
    feature = InputFeature(prompt_ids=(5,), completion_ids=(7, 8, 9), completion_mask=(1, 0, 1), old_logps=(-0.7, -0.9))
    batch = pack([feature])
    assert batch.input_ids.tolist() == [5, 7, 8]
    assert batch.labels.tolist() == [7, -100, 9]
    assert batch.scored.tolist() == [0, 2]
    assert batch.old_logps.tolist() == torch.tensor([-0.7, 0.0, -0.9]).tolist()


def test_a_one_token_sequence_keeps_its_slot_unscored():
    two = [InputFeature(prompt_ids=(5,), completion_ids=()), InputFeature(prompt_ids=(5,), completion_ids=(9, 2))]
    batch = pack(two)
    assert batch.input_ids.tolist() == [5, 5, 9]
    assert batch.labels.tolist() == [-100, 9, 2]
    assert batch.cu_seqlens.tolist() == [0, 1, 3]


def test_an_empty_completion_scores_nothing():
    batch = pack([InputFeature(prompt_ids=(5, 6, 7), completion_ids=())])
    assert (batch.input_ids.tolist(), batch.labels.tolist()) == ([5, 6], [-100, -100])


def test_no_features_make_an_empty_batch():
    batch = pack([])
    assert (batch.input_ids.tolist(), batch.cu_seqlens.tolist(), batch.offsets.tolist()) == ([], [0], [0])


def test_segments_count_the_scored_tokens():
    assert pack(WORKED).segments.length.tolist() == [2, 2]


def test_moving_keeps_every_field():
    batch = pack(WORKED).to("cpu")
    assert batch.input_ids.tolist() == [5, 6, 7, 5, 9]
    assert (batch.lengths, batch.old_logps is not None) == ((2, 2), True)


def test_a_batch_is_frozen():
    with pytest.raises(FrozenInstanceError):
        pack(WORKED).labels = None


def test_a_feature_without_prompt_is_refused():
    with pytest.raises(InputError, match=r"inputs\[1\] has no prompt token; its first completion token has nothing to"):
        pack([WORKED[0], InputFeature(prompt_ids=(), completion_ids=(7,))])


def test_log_probs_on_some_features_only_are_refused():
    with pytest.raises(
        InputError, match=r"old_logps is set on some sequences and missing on inputs\[1\]; set it on all"
    ):
        pack([WORKED[0], InputFeature(prompt_ids=(5,), completion_ids=(6,))])


@pytest.mark.parametrize("name", ["old_logps", "ref_logps"])
def test_a_feature_with_too_few_log_probs_names_both_counts(name):
    with pytest.raises(
        InputError, match=f"{name} has 1 entries for 2 sampled tokens; give one value per sampled token"
    ):
        InputFeature(prompt_ids=(5,), completion_ids=(6, 7), **{name: (-1.0,)})


def test_a_completion_mask_of_the_wrong_length_names_both_counts():
    with pytest.raises(InputError, match="completion_mask has 1 entries for 2 completion tokens; give one 0 or 1"):
        InputFeature(prompt_ids=(5,), completion_ids=(6, 7), completion_mask=(1,))


def test_rollouts_carry_what_the_loss_needs():
    """One advantage, one per sampled token, and a masked sequence that counts and scores nothing."""
    prompt = Prompt(token_ids=(5, 6))
    one = Rollout(
        trajectory=Trajectory(prompt=prompt, tokens=(7, 8), logps=(-0.1, -0.2)), advantage=2.0, old_logps=(-0.3, -0.4)
    )
    two = Rollout(
        trajectory=Trajectory(prompt=prompt, tokens=(7, 8, 9), sampled=(True, False, True), logps=(-0.5, -0.6)),
        advantage=(1.5, -1.5),
        old_logps=(-0.7, -0.8),
    )
    cut = replace(one, is_masked=True)
    batch = pack([one, two, cut])
    assert batch.labels.tolist() == [-100, 7, 8, -100, 7, -100, 9, -100, -100, -100]
    assert (batch.lengths, batch.offsets.tolist()) == ((2, 2, 0), [0, 2, 4, 4])
    assert batch.advantages[batch.scored].tolist() == [2.0, 2.0, 1.5, -1.5]
    assert batch.sampler_logps[batch.scored].tolist() == torch.tensor([-0.1, -0.2, -0.5, -0.6]).tolist()
    assert batch.old_logps[batch.scored].tolist() == torch.tensor([-0.3, -0.4, -0.7, -0.8]).tolist()
    assert batch.ref_logps is None


def test_what_is_no_sequence_is_refused():
    with pytest.raises(InputError, match=r"inputs\[1\] must be a Rollout or an InputFeature, got dict"):
        pack([WORKED[0], {"input_ids": [1, 2]}])


# --- against an independent construction ----------------------------------------------------------------------------


@st.composite
def features(draw):
    prompt = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4))
    completion = draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=4))
    mask = draw(st.none() | st.lists(st.integers(0, 1), min_size=len(completion), max_size=len(completion)))
    scored = len(completion) if mask is None else sum(mask)
    return InputFeature(
        prompt_ids=tuple(prompt),
        completion_ids=tuple(completion),
        completion_mask=None if mask is None else tuple(mask),
        old_logps=tuple(-0.25 * (i + 1) for i in range(scored)),
    )


def padded_by_hand(batch):
    """The usual padded construction: rows of whole sequences, shifted by one with slices."""
    width = max([2, *(len(f.input_ids) for f in batch)])
    ids = torch.full((len(batch), width), 0)
    own = torch.full((len(batch), width), -100)  # each scored token at its own place
    for i, f in enumerate(batch):
        ids[i, : len(f.input_ids)] = torch.tensor(f.input_ids)
        mask = f.completion_mask or (1,) * len(f.completion_ids)
        for j, (token, keep) in enumerate(zip(f.completion_ids, mask, strict=True)):
            if keep:
                own[i, len(f.prompt_ids) + j] = token
    return ids[:, :-1], own[:, 1:]


@given(st.lists(features(), min_size=1, max_size=5))
def test_packed_rows_are_the_padded_rows_without_padding(batch):
    packed = pack(batch)
    ids, labels = padded_by_hand(batch)
    slots = [max(len(f.input_ids) - 1, 1) for f in batch]
    assert packed.cu_seqlens.tolist() == [0, *torch.tensor(slots).cumsum(0).tolist()]
    assert packed.input_ids.tolist() == [x for row, n in zip(ids, slots, strict=True) for x in row[:n].tolist()]
    assert packed.labels.tolist() == [x for row, n in zip(labels, slots, strict=True) for x in row[:n].tolist()]
    assert packed.position_ids.tolist() == [j for n in slots for j in range(n)]
    assert packed.lengths == tuple(f.num_scored for f in batch)
    assert packed.offsets.diff().tolist() == list(packed.lengths)


@given(st.lists(features(), min_size=1, max_size=5))
def test_every_label_is_the_next_input_of_its_sequence(batch):
    packed = pack(batch)
    rows = pad_tokens(packed.labels, packed.cu_seqlens, fill=-100)
    inputs = pad_tokens(packed.input_ids, packed.cu_seqlens, fill=-1)
    inside = (rows[:, :-1] != -100) & (inputs[:, 1:] != -1)
    assert rows[:, :-1][inside].tolist() == inputs[:, 1:][inside].tolist()


@given(st.lists(features(), min_size=1, max_size=5))
def test_log_probs_are_one_per_scored_token_in_order(batch):
    packed = pack(batch)
    expected = torch.tensor([x for f in batch for x in f.old_logps])
    assert packed.old_logps[packed.labels != -100].tolist() == expected.tolist()
    assert (packed.old_logps[packed.labels == -100] == 0).all()
    assert packed.scored.tolist() == [t for t, label in enumerate(packed.labels.tolist()) if label != -100]


# --- a model whose next token is known ------------------------------------------------------------------------------
# It puts (almost) all mass on token + 1. Counting sequences then have log-prob 0 if, and only if, slot t is scored
# against token t + 1 of its own sequence: a missing shift, or one too many, gives -40 per step.

COUNTING = [
    InputFeature(prompt_ids=(1, 2), completion_ids=(3, 4, 5)),
    InputFeature(prompt_ids=(6,), completion_ids=(7,)),
    InputFeature(prompt_ids=(2, 3, 4), completion_ids=(5, 6), completion_mask=(0, 1)),
]


def next_token_logits(input_ids):
    return 40.0 * torch.nn.functional.one_hot((input_ids + 1) % VOCABULARY, VOCABULARY).float()


def test_the_known_next_token_model_gives_log_prob_zero_to_every_label():
    batch = pack(COUNTING)
    logps, _ = logps_and_entropy(next_token_logits(batch.input_ids), batch.labels)
    assert logps.tolist() == [0.0] * batch.num_slots
    assert (batch.labels != -100).sum().item() == 5


@pytest.mark.parametrize("shift", [-1, 1])
def test_the_known_next_token_model_notices_a_wrong_shift(shift):
    batch = pack(COUNTING)
    wrong = torch.where(batch.labels != -100, (batch.labels + shift) % VOCABULARY, -100)  # counting: a shifted label
    logps, _ = logps_and_entropy(next_token_logits(batch.input_ids), wrong)
    assert logps[wrong != -100].tolist() == [-40.0] * 5


def test_the_known_next_token_model_through_the_head():
    # hidden = one-hot of the input token, head row v = 40 * one-hot(v - 1)
    batch = pack(COUNTING)
    hidden = torch.nn.functional.one_hot(batch.input_ids, VOCABULARY).float()
    weight = 40.0 * torch.eye(VOCABULARY).roll(1, 0)
    logps, _ = Head(weight).score(hidden[batch.scored], batch.labels[batch.scored])
    assert logps.tolist() == [0.0] * 5


def test_the_known_next_token_model_has_ratio_one_to_a_certain_sampler():
    batch = pack([InputFeature(prompt_ids=(1, 2), completion_ids=(3, 4), old_logps=(0.0, 0.0))])
    outputs = {"logits": next_token_logits(batch.input_ids)}
    result = GRPOLoss()(batch.loss_inputs(), outputs, advantages=[2.0], old_logps=batch.old_logps)
    assert result.loss.item() == -2.0
