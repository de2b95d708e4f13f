"""Rows in which prompts stand once: literals by hand, and the packed batch as the independent source."""

import random

import pytest
import torch

from gruppo.batch import pack, pack_shared, prompt_groups, split_shared
from gruppo.errors import InputError
from gruppo.types import InputFeature


def feature(prompt, completion, **options):
    return InputFeature(prompt_ids=tuple(prompt), completion_ids=tuple(completion), **options)


def random_groups(seed=0, groups=5, size=4):
    rng = random.Random(seed)
    tokens = lambda low, high: tuple(rng.randrange(9) for _ in range(rng.randint(low, high)))  # noqa: E731
    prompts = [tokens(1, 9) for _ in range(groups)]
    made = [feature(prompt, tokens(0, 6)) for prompt in prompts for _ in range(size)]
    rng.shuffle(made)
    return made


def test_two_groups_in_one_row_by_hand():
    """The second group's completion of one token has no slot; the last sequence equals the second but for its last."""
    batch = pack_shared(
        [feature([5, 6], [7, 8, 2]), feature([5, 6], [9, 2]), feature([4], [1]), feature([5, 6], [9, 3])]
    )
    rows = batch.shared
    assert rows.input_ids.tolist() == [[5, 6, 4, 7, 8, 9]]
    assert rows.position_ids.tolist() == [[0, 1, 0, 2, 3, 2]]
    assert rows.own_start.tolist() == [[0, 0, 2, 3, 3, 5]]
    assert rows.prompt_start.tolist() == [[0, 0, 0, 0, 0, 0]]
    assert rows.prompt_stop.tolist() == [[0, 0, 0, 2, 2, 2]]
    assert rows.slot_of.tolist() == [0, 1, 3, 4, 0, 1, 5, 2, 0, 1, 5]
    assert rows.num_slots == 6
    assert batch.labels.tolist() == [-100, 7, 8, 2, -100, 9, 2, 1, -100, 9, 3]


def test_prompts_that_differ_in_one_token_are_not_merged():
    near = [feature([5, 6, 7], [1, 2]), feature([5, 6, 8], [1, 2]), feature([5, 6], [7, 1]), feature([5, 6, 7], [3, 2])]
    assert prompt_groups(near) == [0, 1, 2, 0]
    rows = pack_shared(near).shared
    assert rows.input_ids.tolist() == [[5, 6, 7, 5, 6, 8, 5, 6, 1, 3, 1, 7]]  # a group's completions stand together
    assert rows.prompt_start.tolist()[0][8:] == [0, 0, 3, 6]
    assert rows.prompt_stop.tolist()[0][8:] == [3, 3, 6, 8]


@pytest.mark.parametrize("row_slots", [None, 12, 30])
def test_every_slot_of_the_batch_finds_its_token_and_position(row_slots):
    features = random_groups()
    batch, plain = pack_shared(features, row_slots=row_slots, multiple_of=4), pack(features)
    rows = batch.shared
    assert torch.equal(rows.input_ids.flatten()[rows.slot_of], plain.input_ids)
    assert torch.equal(rows.position_ids.flatten()[rows.slot_of], plain.position_ids)
    assert torch.equal(batch.labels, plain.labels)
    assert rows.row_length % 4 == 0
    assert row_slots != 30 or rows.row_length <= 32  # 12 is less than the longest sequence, which is not cut


def test_a_group_that_is_longer_than_a_row_repeats_its_prompt():
    features = [feature([5, 6, 7], [i, i, 1]) for i in range(4)]  # a prompt of 3, four completions of 2 slots
    assert pack_shared(features).shared.num_slots == 3 + 4 * 2
    rows = pack_shared(features, row_slots=7).shared
    assert rows.input_ids.tolist() == [[5, 6, 7, 0, 0, 2, 2], [5, 6, 7, 1, 1, 3, 3]]


def test_padding_looks_at_itself_only():
    rows = pack_shared([feature([5, 6], [7, 8])], multiple_of=5).shared
    assert rows.own_start.tolist() == [[0, 0, 2, 3, 4]]
    assert rows.prompt_stop.tolist() == [[0, 0, 2, 0, 0]]


def test_masked_completion_tokens_are_computed_and_not_scored():
    batch = pack_shared([feature([5], [7, 8, 9], completion_mask=(1, 0, 1)), feature([5], [6])])
    assert batch.shared.input_ids.tolist() == [[5, 7, 8]]
    assert batch.labels.tolist() == [7, -100, 9, 6]


def test_a_step_splits_into_whole_groups_where_they_fit():
    """Groups of 4 + 3 + 3 = 10 and 4 + 2 = 6 tokens; a budget of 16 holds both, 10 holds each, 8 splits the first."""
    arguments = ([0, 1, 0], [4, 4, 4], [3, 2, 3])
    assert split_shared(*arguments, tokens_per_microbatch=16) == [[0, 1, 2]]
    assert split_shared(*arguments, tokens_per_microbatch=10) == [[0, 2], [1]]
    assert split_shared(*arguments, tokens_per_microbatch=8) == [[0], [1], [2]]


def test_splits_hold_the_budget_and_lose_nothing():
    rng = random.Random(1)
    for _ in range(50):
        groups = [g for g in range(6) for _ in range(rng.randint(1, 9))]
        lengths = [rng.randint(1, 20) for _ in range(6)]
        prompts, own = [lengths[g] for g in groups], [rng.randint(0, 15) for _ in groups]
        budget = rng.randint(36, 120)
        parts = split_shared(groups, prompts, own, budget)
        assert sorted(i for part in parts for i in part) == list(range(len(groups)))
        for part in parts:
            assert sum(lengths[g] for g in {groups[i] for i in part}) + sum(own[i] for i in part) <= budget
        if budget >= max(lengths[g] + sum(o for o, h in zip(own, groups, strict=True) if h == g) for g in range(6)):
            assert all(sum(g in {groups[i] for i in part} for part in parts) == 1 for g in range(6))


def test_a_budget_of_zero_is_refused():
    with pytest.raises(InputError, match="at least 1, got 0"):
        split_shared([0], [1], [1], 0)
