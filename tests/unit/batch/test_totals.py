"""`Totals`: the counts of a step."""

from dataclasses import FrozenInstanceError

import pytest
import torch

from gruppo.batch import Segments, Totals


def test_totals_of_a_batch_count_sequences_and_scored_tokens():
    totals = Totals.of(Segments.from_rows(torch.tensor([[1, 1, 0], [0, 0, 0]]).bool()))
    assert (totals.sequences, int(totals.tokens), int(totals.local_tokens), totals.local_share) == (2, 2, 2, 1.0)


def test_totals_of_a_step_are_the_sums_over_its_micro_batches():
    parts = [Totals(sequences=2, tokens=5), Totals(sequences=1, tokens=4), Totals(sequences=0, tokens=0)]
    assert Totals.over(parts) == Totals(sequences=3, tokens=9, local_tokens=9, local_share=1.0)


def test_totals_of_micro_batches_equal_the_totals_of_the_whole():
    mask = torch.tensor([[1, 1, 0], [0, 1, 0], [1, 1, 1]]).bool()
    parts = [Totals.of(Segments.from_rows(mask[:1])), Totals.of(Segments.from_rows(mask[1:]))]
    step = Totals.over(parts)
    assert (step.sequences, int(step.tokens)) == (3, 6)


def test_the_local_tokens_are_all_tokens_unless_said_otherwise():
    assert Totals(sequences=1, tokens=7).local_tokens == 7
    assert Totals(sequences=1, tokens=7, local_tokens=3).local_tokens == 3


def test_totals_are_frozen():
    with pytest.raises(FrozenInstanceError):
        Totals(sequences=1, tokens=7).tokens = 8
