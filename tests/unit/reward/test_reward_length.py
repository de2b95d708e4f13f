"""Shapes of the reward: literals of DAPO's equation 13, and of the price of being cut off."""

import pytest

from gruppo.errors import InputError
from gruppo.reward import RewardResult, RewardShape
from gruppo.reward.combine import merged_metrics


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


def test_metrics_of_two_calls_are_those_of_one():
    one = RewardResult(
        totals=[1.0, None], values={"a": [1.0, None]}, correct=[True, None],
        metrics={"reward/mean": 1.0, "reward/std": 0.0, "reward/a/mean": 1.0, "reward/a/std": 0.0,
                 "reward/a/abstain_frac": 0.5, "reward/a/own": 6.0},
    )  # fmt: skip
    other = RewardResult(
        totals=[3.0, 3.0, 5.0, 4.0], values={"a": [3.0, 3.0, 5.0, 4.0]}, correct=[False, False, True, False],
        metrics={"reward/mean": 3.75, "reward/std": 0.8, "reward/a/mean": 3.75, "reward/a/std": 0.8,
                 "reward/a/abstain_frac": 0.0},
    )  # fmt: skip
    merged = merged_metrics([one, other])
    # 1 3 3 5 4: mean 3.2, squares 4.84 + 2 * 0.04 + 3.24 + 0.64 = 8.8, over 5 is 1.76
    assert merged == pytest.approx(
        {"reward/mean": 3.2, "reward/std": 1.76**0.5, "reward/a/mean": 3.2, "reward/a/std": 1.76**0.5,
         "reward/a/abstain_frac": 1 / 6, "reward/a/own": 6.0, "reward/correct_frac": 2 / 5}
    )  # fmt: skip
    assert merged_metrics([one]) == one.metrics
