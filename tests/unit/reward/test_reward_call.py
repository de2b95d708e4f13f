"""R-17 and R-18: what may come back from a reward function, and what may not."""

import logging
from decimal import Decimal

import numpy
import pytest
import torch

from gruppo.errors import InputError
from gruppo.reward import RewardScorer, load_reward
from gruppo.reward.call import check_returned


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1.5, 2.0], [1.5, 2.0]),
        ((True, False), [1.0, 0.0]),
        ([3, -4], [3.0, -4.0]),
        ([None, 1.0], [None, 1.0]),
        ([numpy.float32(0.5), numpy.int64(2)], [0.5, 2.0]),
        ([numpy.array(0.5), torch.tensor(2.0)], [0.5, 2.0]),
        (numpy.array([0.5, 0.25]), [0.5, 0.25]),
        (torch.tensor([1.0, 2.0], requires_grad=True), [1.0, 2.0]),
        ([Decimal("0.5"), 1e38], [0.5, 1e38]),
    ],
)
@pytest.mark.row("R-17", "bool, int, numpy and tensors")
def test_numbers_of_every_kind_become_floats(returned, expected):
    assert check_returned("f", returned, 2).values == expected


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        ([1.0], "returned 1 values for 2 completions.*nothing is broadcast"),
        ([], "returned 0 values for 2 completions"),
        ([1.0, 2.0, 3.0], "returned 3 values for 2 completions"),
        (1.0, "returned float 1.0 for 2 completions"),
        (None, "returned None for 2 completions; .*is a `return` missing"),
        (torch.tensor(1.0), "returned Tensor tensor.1.. for 2 completions"),
        ("ab", "returned str 'ab' for 2 completions"),
        ({"a": 1, "b": 2}, "returned dict"),
        ((float(i) for i in range(2)), "returned generator"),
        ([[1.0], [2.0]], r"returned list \[1.0\] as value 0"),
        (numpy.ones((2, 1)), r"returned list \[1.0\] as value 0"),
        ([1.0, torch.ones(1)], r"returned Tensor tensor\(\[1.\]\) as value 1"),
        (["1", "2"], "returned str '1' as value 0"),
        ([1.0, 2j], "returned complex 2j as value 1; each value must be a float, an int, a bool or None$"),
        (
            [{"score": 1.0}] * 2,
            r"returned dict {'score': 1.0} as value 0; .*return its number, as in result\[\"score\"\]",
        ),
        ([1.0, {"acc": 1}], r"returned dict {'acc': 1} as value 1; .*return its number, as in result"),
        (
            {"score": [1.0, 2.0]},
            r"returned dict {'score': \[1.0, 2.0\]} for 2 .*return its number, as in result\[\"score\"\]$",
        ),
        ({"score": 1.0}, r"returned dict {'score': 1.0} for 2 .*return a list with one float or None per completion"),
    ],
)
@pytest.mark.row("R-17", "returns of every wrong kind")
def test_anything_else_is_refused_by_name(returned, text):
    with pytest.raises(InputError, match=f"reward 'f' {text}"):
        check_returned("f", returned, 2)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, 1e39, numpy.float32("nan")])
@pytest.mark.row("R-18", "NaN, inf and beyond float32")
def test_a_value_that_is_not_finite_in_float32_abstains_and_is_counted(value):
    checked = check_returned("f", [0.25, value], 2)
    assert checked.values == [0.25, None]
    assert checked.non_finite == [1]


def test_nan_counts_as_an_error_of_its_completion_only():
    def f(completions):
        return [1.0, float("nan"), None, 3.0]

    with RewardScorer([load_reward(f, isolated=False)]) as scorer:
        result = scorer.score(["p"] * 4, ["a"] * 4)
    assert result.totals == [1.0, None, None, 3.0]
    assert result.metrics["reward/f/mean"] == 2.0
    assert result.metrics["reward/f/error_frac"] == 0.25
    assert result.metrics["reward/f/abstain_frac"] == 0.5


@pytest.mark.row("R-18", "a huge finite value")
def test_a_huge_finite_value_is_kept_and_warned_about(caplog):
    def f(completions):
        return [1e38, -1e38]

    with RewardScorer([load_reward(f, isolated=False)]) as scorer, caplog.at_level(logging.WARNING):
        result = scorer.score(["p"] * 2, ["a"] * 2)
    assert result.totals == [1e38, -1e38]
    assert result.metrics["reward/f/std"] == pytest.approx(1e38)
    assert "reward 'f' returned 1e+38" in caplog.text
