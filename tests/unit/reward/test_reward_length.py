"""Shapes of the reward: literals of DAPO's equation 13, and of the price of being cut off."""

import pytest

from gruppo.errors import InputError
from gruppo.reward import RewardShape


def test_the_soft_overlong_penalty_of_dapo():
    # The paper's: limit 20480, cache 4096. 0 up to 16384, (16384 - length) / 4096 up to 20480, then -1.
    shape = RewardShape(max_length=20480, overlong_cache=4096)
    lengths = [1, 16384, 16385, 18432, 20479, 20480, 20481, 40000]
    shaped = shape([1.0] * 8, lengths, [False] * 8)
    assert shaped == [1.0, 1.0, 1.0 - 1 / 4096, 0.5, 1.0 - 4095 / 4096, 0.0, 0.0, 0.0]


def test_a_completion_that_was_cut_off_keeps_a_share_of_its_reward_and_never_gains():
    shape = RewardShape(max_length=8, truncated_factor=0.25)
    assert shape([1.0, 1.0, -1.0, 0.0], [8] * 4, [False, True, True, True]) == [1.0, 0.25, -1.0, 0.0]
    assert RewardShape(max_length=8, truncated_factor=0.0)([2.0, -2.0], [8, 8], [True, True]) == [0.0, -2.0]


def test_both_in_their_order():
    # 1 * 0.5 - 1 and 1 - 0.5; an abstention stays one
    shape = RewardShape(max_length=4, overlong_cache=2, truncated_factor=0.5)
    assert shape([1.0, 1.0, None], [4, 3, 4], [True, False, True]) == [-0.5, 0.5, None]


def test_without_options_rewards_are_left_alone():
    shape = RewardShape(max_length=4)
    assert shape.does_nothing
    assert shape([0.1, None], [4, 4], [True, True]) == [0.1, None]


def test_options_out_of_range_are_refused():
    with pytest.raises(InputError, match=r"cache must be in 1\.\.max_length=4, got 5"):
        RewardShape(max_length=4, overlong_cache=5)
    with pytest.raises(InputError, match=r"truncated_factor must be in 0\.\.1, got -1"):
        RewardShape(max_length=4, truncated_factor=-1)
