"""Rewards and options that cannot be used are refused: what was expected, what came, where, and what to do."""

import pytest
import torch

from gruppo.advantage import GRPOAdvantage, RLOOAdvantage, groups_with_signal
from gruppo.errors import InputError

both = pytest.mark.parametrize("cls", [GRPOAdvantage, RLOOAdvantage])
NAN, INF = float("nan"), float("inf")


def refusal(function, *parts, error=InputError):
    with pytest.raises(error) as caught:
        function()
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


@both
def test_rewards_that_groups_do_not_divide(cls):
    refusal(
        lambda: cls()([0.0] * 10, num_generations=4),
        *("rewards has 10 values", "num_generations=4 does not divide", "pass whole groups", "group_ids"),
    )


@both
def test_one_generation_with_group_statistics_names_the_way_out(cls):
    refusal(lambda: cls()([0.0, 1.0]), "num_generations=1 leaves no group", "at least 2 per prompt", 'scale="batch"')


@both
def test_unknown_scale(cls):
    refusal(lambda: cls()([0.0, 1.0], num_generations=2, scale="std"), "'group', 'batch' or 'none'", "got 'std'")


@pytest.mark.parametrize(("value", "text"), [(NAN, "nan"), (INF, "inf"), (-INF, "-inf")])
@pytest.mark.parametrize("form", [list, torch.tensor])
@both
def test_non_finite_rewards_name_their_place(cls, form, value, text):
    refusal(
        lambda: cls()(form([0.0, 1.0, value, 1.0]), num_generations=2),
        *(f"rewards[2] is {text}", "must be finite", "Use None for a sequence that has no reward"),
    )


def test_non_finite_rewards_of_a_table_name_row_and_column():
    refusal(lambda: GRPOAdvantage()([[0.0, 1.0], [0.0, NAN]], num_generations=2), "rewards[1, 1] is nan")


@pytest.mark.parametrize("num_generations", [0, -4, 2.0, True, "4"])
def test_num_generations_must_be_a_positive_whole_number(num_generations):
    refusal(
        lambda: GRPOAdvantage()([0.0] * 4, num_generations=num_generations),
        *("num_generations must be a whole number of at least 1", f"got {num_generations!r}"),
    )


def test_rewards_that_are_no_numbers():
    refusal(lambda: GRPOAdvantage()([0.0, object], num_generations=2), "rewards must be numbers or None", "object")


def test_rows_of_different_length():
    refusal(lambda: GRPOAdvantage()([[0.0, 1.0], [0.0]], num_generations=2), "rows of different length", "'1'", "'2'")


def test_rewards_of_three_axes():
    refusal(lambda: GRPOAdvantage()(torch.zeros(2, 2, 2), num_generations=2), "[N] or [N, functions]", "(2, 2, 2)")


def test_too_few_group_ids():
    refusal(
        lambda: GRPOAdvantage()([0.0, 1.0], group_ids=[0]), "group_ids has 1 entries for 2 rewards", "one per reward"
    )


@both
def test_unknown_normalization(cls):
    refusal(lambda: cls(normalization="std"), "'centered' or 'standard'", "got 'std'")


@both
def test_unknown_ddof(cls):
    refusal(lambda: cls(ddof=2), "0 (population) or 1 (sample)", "got 2")


@pytest.mark.parametrize("eps", [-1e-8, NAN])
@both
def test_negative_eps(cls, eps):
    refusal(lambda: cls(eps=eps), "eps must be 0 or more", f"got {eps!r}")


@both
def test_unknown_keyword(cls):
    refusal(lambda: cls(epsilon=1e-8), "unexpected keyword argument 'epsilon'", error=TypeError)
    refusal(lambda: cls()([0.0, 1.0], num_gen=2), "unexpected keyword argument 'num_gen'", error=TypeError)


def test_filters_check_alike():
    refusal(lambda: groups_with_signal([0.0] * 10, num_generations=4), "rewards has 10 values", "pass whole groups")
    refusal(lambda: groups_with_signal([0.0, NAN], num_generations=2), "rewards[1] is nan")
