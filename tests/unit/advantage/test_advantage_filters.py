"""Filters answer with one bool per sequence, so that groups stay recognisable."""

import pytest
import torch

from gruppo.advantage import GRPOAdvantage, groups_with_signal, not_truncated
from gruppo.errors import InputError


def test_groups_are_kept_or_dropped_whole():
    keep = groups_with_signal([1.0, 1.0, 0.0, 1.0, 0.5, 0.5], num_generations=2)
    assert keep.tolist() == [False, False, True, True, False, False]


def test_a_filtered_batch_still_has_whole_groups():
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0, 3.0, 1.0])
    keep = groups_with_signal(rewards, num_generations=2)
    advantages = GRPOAdvantage()(rewards, num_generations=2)
    assert advantages[keep].tolist() == GRPOAdvantage()(rewards[keep], num_generations=2).tolist() == [-0.5, 0.5, 1, -1]


def test_rewards_that_no_float_holds_have_no_signal():
    assert groups_with_signal([0.1 + 0.1 + 0.1] * 7, num_generations=7).tolist() == [False] * 7


def test_tolerance_widens_what_counts_as_equal():
    assert groups_with_signal([0.5, 0.6, 0.0, 1.0], num_generations=2, tolerance=0.2).tolist() == [
        False,
        False,
        True,
        True,
    ]


def test_signal_of_ragged_groups():
    keep = groups_with_signal([1.0, 0.0, 1.0, 1.0, 1.0], group_ids=["a", "b", "b", "a", "c"])
    assert keep.tolist() == [False, True, True, False, False]


def test_who_abstains_gives_no_signal():
    assert groups_with_signal([1.0, None, None, None], num_generations=2).tolist() == [False] * 4


def test_signal_of_summed_reward_functions():
    # 1 + 0 and 0 + 1 are equal sums
    keep = groups_with_signal([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 1.0]], num_generations=2)
    assert keep.tolist() == [False, False, True, True]


def test_truncated_sequences_are_marked():
    assert not_truncated(["stop", "length", "stop"]).tolist() == [True, False, True]


def test_advantages_first_and_filter_after_counts_the_dropped_in_the_mean():
    rewards, keep = [0.0, 3.0, 3.0], not_truncated(["length", "stop", "stop"])
    assert GRPOAdvantage()(rewards, num_generations=3)[keep].tolist() == [1.0, 1.0]


def test_filter_first_and_advantages_over_group_ids_does_not():
    rewards, keep = torch.tensor([0.0, 3.0, 5.0]), not_truncated(["length", "stop", "stop"])
    ids = torch.tensor([4, 4, 4])
    assert GRPOAdvantage()(rewards[keep], group_ids=ids[keep]).tolist() == [-1.0, 1.0]


def test_an_unknown_stop_reason_names_its_place():
    with pytest.raises(InputError, match=r"stop_reasons\[1\] must be 'stop' or 'length', got 'eos'"):
        not_truncated(["stop", "eos"])


def test_no_sequences_give_an_empty_mask():
    assert (not_truncated([]).tolist(), not_truncated([]).dtype) == ([], torch.bool)
