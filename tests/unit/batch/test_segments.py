"""`Segments`: sums, means and positions over sequences, for rows and for offsets alike."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gruppo.batch import Segments
from gruppo.errors import InputError

NAN = float("nan")


def two_sequences():
    """Sequences of 2 and 3 slots; the first slot of each is a prompt."""
    return Segments.from_offsets(torch.tensor([0, 1, 0, 1, 1]).bool(), torch.tensor([0, 2, 5]))


def test_length_counts_scored_slots():
    assert two_sequences().length.tolist() == [1, 2]


def test_sum_skips_what_is_not_scored_even_nan():
    values = torch.tensor([NAN, 1.0, float("inf"), 2.0, 3.0])
    assert two_sequences().sum(values).tolist() == [1.0, 5.0]


def test_mean_divides_by_the_scored_slots():
    assert two_sequences().mean(torch.tensor([9.0, 1.0, 9.0, 2.0, 3.0])).tolist() == [1.0, 2.5]


def test_mean_of_a_sequence_without_scored_slots_is_zero():
    segments = Segments.from_rows(torch.tensor([[False, False], [True, True]]))
    assert segments.mean(torch.tensor([NAN, NAN, 1.0, 3.0])).tolist() == [0.0, 2.0]


def test_spread_gives_each_slot_the_value_of_its_sequence():
    assert two_sequences().spread(torch.tensor([7.0, 8.0])).tolist() == [7.0, 7.0, 8.0, 8.0, 8.0]


def test_position_restarts_in_each_sequence():
    assert two_sequences().position().tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keep_gives_the_value_or_exactly_zero(dtype):
    values = torch.tensor([NAN, -1.5, -float("inf"), -0.0, 1e-40], dtype=dtype)
    expected = torch.tensor([0.0, -1.5, 0.0, -0.0, 1e-40], dtype=dtype)
    assert torch.equal(two_sequences().keep(values), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_keep_passes_the_gradient_of_scored_slots_only(dtype):
    values = torch.zeros(5, dtype=dtype, requires_grad=True)
    upstream = torch.tensor([NAN, 2.0, NAN, 3.0, -1.0], dtype=dtype)
    two_sequences().keep(values).backward(upstream)
    assert values.grad.tolist() == [0.0, 2.0, 0.0, 3.0, -1.0]


def test_keep_takes_values_that_are_not_contiguous():
    values = torch.arange(10.0).view(5, 2)[:, 1]
    assert two_sequences().keep(values).tolist() == [0.0, 3.0, 0.0, 7.0, 9.0]


def test_one_slot_and_empty_sequences_are_sequences():
    segments = Segments.from_offsets(torch.tensor([True, True, True]), torch.tensor([0, 1, 1, 3]))
    assert (segments.num_sequences, segments.length.tolist()) == (3, [1, 0, 2])
    assert segments.sum(torch.tensor([1.0, 2.0, 4.0])).tolist() == [1.0, 0.0, 6.0]


def test_offsets_that_do_not_end_at_the_last_slot_are_refused():
    with pytest.raises(
        InputError, match=r"must rise from 0 to the number of slots \(3\), got \[0, 2\]; entry i is the"
    ):
        Segments.from_offsets(torch.ones(3).bool(), torch.tensor([0, 2]))


@given(
    st.lists(st.lists(st.booleans(), min_size=4, max_size=4), min_size=1, max_size=5),
    st.integers(0, 1000),
)
def test_rows_and_offsets_give_the_same_numbers(mask, seed):
    mask_BL = torch.tensor(mask)
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(mask_BL.numel(), generator=draw, dtype=torch.float64)
    rows = Segments.from_rows(mask_BL)
    flat = Segments.from_offsets(mask_BL.reshape(-1), torch.arange(len(mask) + 1) * 4)
    expected = torch.stack([v[m].sum() for v, m in zip(values.view(-1, 4), mask_BL, strict=True)])
    for segments in (rows, flat):
        torch.testing.assert_close(segments.sum(values), expected, rtol=1e-14, atol=1e-14)
    assert rows.length.tolist() == flat.length.tolist() == mask_BL.sum(1).tolist()
    assert torch.equal(rows.position(), flat.position())


@given(st.lists(st.lists(st.booleans(), max_size=4), min_size=1, max_size=5))
def test_sum_of_ragged_sequences_passes_its_gradient_back(masks):
    flat = [m for mask in masks for m in mask]
    ends = torch.tensor([0, *(len(m) for m in masks)]).cumsum(0)
    segments = Segments.from_offsets(torch.tensor(flat, dtype=torch.bool), ends)
    values = torch.ones(len(flat), dtype=torch.float64, requires_grad=True)
    weights = torch.arange(1.0, len(masks) + 1, dtype=torch.float64)
    (segments.sum(values) * weights).sum().backward()
    expected = [float(i + 1) if m else 0.0 for i, mask in enumerate(masks) for m in mask]
    assert values.grad.tolist() == expected
