"""Padded rows to packed slots and back, and where packed positions say that a sequence starts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gruppo.batch import is_packed, pack_rows, pad_tokens
from gruppo.batch.segments import offsets_from_positions
from gruppo.errors import InputError


def test_pack_rows_drops_padding_on_either_side():
    values, offsets = pack_rows(torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([[0, 1, 1], [1, 1, 0]]))
    assert (values.tolist(), offsets.tolist()) == ([1, 2, 3, 4], [0, 2, 4])


def test_pad_tokens_fills_on_the_right():
    rows = pad_tokens(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), fill=9)
    assert rows.tolist() == [[1, 9], [2, 3]]


def test_pad_tokens_keeps_further_axes():
    rows = pad_tokens(torch.tensor([[1, 2], [3, 4], [5, 6]]), torch.tensor([0, 1, 3]), fill=0)
    assert rows.tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def test_pad_tokens_of_nothing_is_empty():
    assert pad_tokens(torch.zeros(0), torch.tensor([0]), fill=0).shape == (0, 0)


def test_values_and_mask_of_different_shape_are_refused():
    with pytest.raises(InputError, match=r"shape \(2, 3\) and attention_mask \(2, 2\); the first two axes must agree"):
        pack_rows(torch.zeros(2, 3), torch.ones(2, 2))


@given(st.lists(st.lists(st.integers(-5, 5), max_size=5), min_size=1, max_size=5))
def test_padding_and_packing_again_is_the_identity(sequences):
    values = torch.tensor([x for s in sequences for x in s], dtype=torch.int64)
    offsets = torch.tensor([0, *(len(s) for s in sequences)]).cumsum(0)
    rows = pad_tokens(values, offsets, fill=99)
    assert rows.tolist() == [s + [99] * (max(map(len, sequences)) - len(s)) for s in sequences]
    again, again_offsets = pack_rows(rows, rows != 99)
    assert (again.tolist(), again_offsets.tolist()) == (values.tolist(), offsets.tolist())


@pytest.mark.parametrize(
    ("positions", "packed"),
    [
        ([[0, 1, 2, 0, 1]], True),
        ([0, 1, 0], True),
        ([[0, 1, 2]], False),
        ([[0, 1, 2], [0, 1, 2]], False),  # one sequence per row
        ([[0]], False),
    ],
)
def test_positions_that_restart_within_a_row_are_packed(positions, packed):
    assert is_packed(torch.tensor(positions)) is packed


@pytest.mark.parametrize(
    ("positions", "scored", "attention", "offsets"),
    [
        ([0, 1, 2, 0, 1], [0, 1, 1, 0, 1], None, [0, 3, 5]),
        ([0, 0, 0], [1, 1, 1], None, [0, 1, 2, 3]),  # one-slot sequences
        ([0, 1, 0, 0], [0, 1, 0, 0], None, [0, 4]),  # trailing padding joins the sequence before
        ([0, 0, 0, 1], [0, 0, 0, 1], None, [0, 4]),  # padding in front joins the first sequence
        ([0, 1, 0, 0, 1], [0, 1, 0, 0, 1], None, [0, 3, 5]),  # padding between two sequences
        ([0, 1, 0, 1], [0, 1, 0, 0], None, [0, 2, 4]),  # position 1 follows: a sequence without scored tokens
        ([0, 1, 0, 1], [0, 1, 0, 0], [1, 1, 0, 0], [0, 4]),  # unless the attention mask says padding
        ([0, 1, 0], [0, 1, 0], [1, 1, 1], [0, 2, 3]),  # and with a mask an unscored one-slot sequence counts
        ([], [], None, [0]),
    ],
)
def test_where_sequences_start(positions, scored, attention, offsets):
    attention = None if attention is None else torch.tensor(attention)
    found = offsets_from_positions(
        torch.tensor(positions, dtype=torch.int64), torch.tensor(scored, dtype=torch.bool), attention
    )
    assert found.tolist() == offsets


def test_positions_without_a_start_are_refused():
    with pytest.raises(InputError, match=r"no sequence start .* positions must restart at 0"):
        offsets_from_positions(torch.tensor([3, 4]), torch.tensor([True, True]))
