"""Which sequences share a forward: every one once, within the budget, evenly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppo.batch import split_by_tokens, split_padded
from gruppo.errors import InputError

lengths_and_budget = st.tuples(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60))


def test_worked_example():
    assert split_by_tokens([4, 3, 2, 1], tokens_per_microbatch=5) == [[0, 3], [1, 2]]


def test_a_sequence_over_the_budget_goes_alone():
    assert split_by_tokens([9, 2, 2], tokens_per_microbatch=5) == [[0], [1, 2]]


def test_everything_fits_one_micro_batch():
    assert split_by_tokens([3, 1, 2], tokens_per_microbatch=6) == [[0, 1, 2]]


def test_nothing_to_split_gives_no_micro_batch():
    assert split_by_tokens([], tokens_per_microbatch=5) == []


@pytest.mark.parametrize("split", [split_by_tokens, split_padded])
def test_a_budget_below_one_is_refused(split):
    with pytest.raises(InputError, match="tokens_per_microbatch must be at least 1, got 0"):
        split([1], tokens_per_microbatch=0)


@pytest.mark.parametrize("split", [split_by_tokens, split_padded])
@given(lengths_and_budget)
@settings(max_examples=60)
def test_every_sequence_is_in_exactly_one_micro_batch(split, case):
    lengths, budget = case
    assert sorted(i for part in split(lengths, budget) for i in part) == list(range(len(lengths)))


@pytest.mark.parametrize("split", [split_by_tokens, split_padded])
@given(lengths_and_budget)
@settings(max_examples=60)
def test_no_micro_batch_is_empty_and_each_keeps_the_order(split, case):
    parts = split(*case)
    assert all(part and part == sorted(part) for part in parts)


@given(lengths_and_budget)
@settings(max_examples=100)
def test_token_counts_stay_within_the_budget_unless_one_sequence_exceeds_it(case):
    lengths, budget = case
    over = [part for part in split_by_tokens(lengths, budget) if sum(lengths[i] for i in part) > budget]
    assert [part for part in over if len(part) > 1] == []


@given(lengths_and_budget)
@settings(max_examples=100)
def test_loads_differ_by_at_most_the_longest_sequence_that_shares(case):
    # Longest first into the emptiest: when the fullest got its last sequence it was the emptiest.
    lengths, budget = case
    shared = [part for part in split_by_tokens(lengths, budget) if all(lengths[i] < budget for i in part)]
    loads = [sum(lengths[i] for i in part) for part in shared]
    if loads:
        assert max(loads) - min(loads) <= max(lengths[i] for part in shared for i in part)


@given(st.lists(st.integers(1, 10), min_size=1, max_size=30), st.integers(30, 60))
@settings(max_examples=60)
def test_the_number_of_micro_batches_is_as_small_as_their_evenness_allows(lengths, budget):
    # n micro-batches suffice once their mean load is 10 (the longest sequence) below the budget.
    fewest, enough = -(-sum(lengths) // budget), -(-sum(lengths) // (budget - 10))
    assert fewest <= len(split_by_tokens(lengths, budget)) <= enough


def test_padded_worked_example():
    assert split_padded([4, 1, 3, 1], tokens_per_microbatch=8) == [[0, 2], [1, 3]]


@given(lengths_and_budget)
@settings(max_examples=100)
def test_padded_area_stays_within_the_budget_unless_one_sequence_exceeds_it(case):
    lengths, budget = case
    area = {tuple(part): len(part) * max(lengths[i] for i in part) for part in split_padded(lengths, budget)}
    assert [part for part, slots in area.items() if slots > budget and len(part) > 1] == []
