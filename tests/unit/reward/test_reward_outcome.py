"""Weighted totals and statistics in the presence of abstentions."""

import statistics as stdlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.errors import InputError
from gruppo.reward import RewardResult, RewardScorer, load_reward, weighted_totals
from gruppo.reward.result import merged_metrics, statistics

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
    with RewardScorer(rewards) as scorer:
        result = scorer.score(["p", "p", "q"], ["a", "b", "abcd"], columns={"answer": ["a", "a", "a"]})
        assert scorer.worker_pids == []
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
    with RewardScorer(["exact_match"]) as scorer:
        result = scorer.score([], [], columns={"answer": []})
    assert (result.totals, result.values, result.metrics) == ([], {"exact_match": []}, {})


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


def test_metrics_of_a_step_in_two_rounds_are_those_of_one_round():
    def f(completions):
        values = {"none": None, "nan": float("nan")}
        return [values.get(text, float(len(text))) for text in completions]

    texts = ["a", "nan", "none", "ccc", "nan", "eeeee", "a"]
    with RewardScorer([load_reward(f, isolated=False), "exact_match"]) as scorer:
        rounds = [
            scorer.score(["p"] * len(part), part, columns={"answer": ["a"] * len(part)}, step=1)
            for part in (texts, texts[:2], texts[2:])
        ]
    merged = merged_metrics(rounds[1:])
    # 1 3 5 1 of 7: mean 2.5, squares 2.25 + 0.25 + 6.25 + 2.25 = 11, over 4
    assert merged == pytest.approx(rounds[0].metrics)
    assert (merged["reward/f/mean"], merged["reward/f/std"]) == pytest.approx((2.5, 2.75**0.5))
    assert (merged["reward/f/abstain_frac"], merged["reward/f/error_frac"]) == pytest.approx((3 / 7, 2 / 7))
    assert merged["reward/correct_frac"] == pytest.approx(2 / 7)
