"""Weighted totals and statistics in the presence of abstentions."""

import statistics as stdlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.errors import InputError
from gruppo.reward import RewardPool, load_reward, weighted_totals
from gruppo.reward.combine import statistics

VALUES = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=20)


def test_the_total_is_the_weighted_sum_over_those_that_do_not_abstain():
    values = {"a": [1.0, 1.0, None, None], "b": [0.5, None, 0.5, None]}
    assert weighted_totals(values, {"a": 2.0, "b": -1.0}) == [1.5, 2.0, -0.5, None]


def test_a_reward_of_weight_zero_does_not_undo_an_abstention():
    values = {"a": [None, 1.0], "shown": [5.0, 5.0]}
    assert weighted_totals(values, {"a": 1.0, "shown": 0.0}) == [None, 1.0]
    assert weighted_totals({"shown": [5.0]}, {"shown": 0.0}) == [0.0]


def test_a_total_beyond_float32_abstains():
    assert weighted_totals({"a": [3e38], "b": [3e38]}, {"a": 1.0, "b": 1.0}) == [None]


def test_weights_and_values_must_be_of_the_same_functions():
    with pytest.raises(InputError, match=r"values are of \['a'\], weights of \['b'\]"):
        weighted_totals({"a": [1.0]}, {"b": 1.0})
    with pytest.raises(InputError, match="one value per completion"):
        weighted_totals({"a": [1.0], "b": [1.0, 2.0]}, {"a": 1.0, "b": 1.0})


def test_statistics_of_nothing_are_left_out_rather_than_nan():
    assert statistics([None, None]) == {}
    assert statistics([2.0]) == {"mean": 2.0, "std": 0.0}
    assert statistics([0.1, 0.1, 0.1]) == {"mean": 0.1, "std": 0.0}
    assert statistics([3e38, -3e38]) == {"mean": 0.0, "std": 3e38}


@given(VALUES)
def test_statistics_are_those_of_the_values_that_are_there(values):
    present = [value for value in values if value is not None]
    found = statistics(values)
    if present:
        assert found["mean"] == pytest.approx(stdlib.fmean(present), abs=1e-9)
        assert found["std"] == pytest.approx(stdlib.pstdev(present), abs=1e-6)
    else:
        assert found == {}


def test_a_step_of_two_rewards_has_values_totals_and_metrics():
    def halves(completions):
        return [None if text == "b" else len(text) / 2 for text in completions]

    rewards = ["exact_match", load_reward(halves, isolated=False, weight=0.5)]
    with RewardPool(rewards) as pool:
        result = pool.score(["p", "p", "q"], ["a", "b", "abcd"], columns={"answer": ["a", "a", "a"]})
        assert pool.worker_pids == []
    assert result.values == {"exact_match": [1.0, 0.0, 0.0], "halves": [0.5, None, 2.0]}
    assert result.totals == [1.25, 0.0, 1.0]
    assert result.metrics == {
        "reward/mean": 0.75,
        "reward/std": pytest.approx(0.540061724867322),
        "reward/correct_frac": pytest.approx(1 / 3),
        "reward/exact_match/mean": pytest.approx(1 / 3),
        "reward/exact_match/std": pytest.approx(0.4714045207910317),
        "reward/exact_match/abstain_frac": 0.0,
        "reward/exact_match/error_frac": 0.0,
        "reward/exact_match/timeout_frac": 0.0,
        "reward/halves/mean": 1.25,
        "reward/halves/std": 0.75,
        "reward/halves/abstain_frac": pytest.approx(1 / 3),
        "reward/halves/error_frac": 0.0,
        "reward/halves/timeout_frac": 0.0,
    }
    assert result.tracebacks == {}


def test_no_completions_give_an_empty_result():
    with RewardPool(["exact_match"]) as pool:
        result = pool.score([], [], columns={"answer": []})
    assert (result.totals, result.values, result.metrics) == ([], {"exact_match": []}, {})
