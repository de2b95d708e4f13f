"""Rewards and options that cannot be used are refused: what was expected, what came, where, and what to do."""

import pytest
import torch

from gruppo.advantage import ADVANTAGES, GRPOAdvantage, RLOOAdvantage, groups_with_signal
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


@pytest.mark.parametrize("name", ["grpo", "rloo", "drgrpo", "gpg", "best_of_group"])
@pytest.mark.parametrize("value", [1e39, -1e300, 3e38])
def test_rewards_whose_differences_float32_cannot_hold_name_their_place(name, value):
    """3e38 is a float32, and its distance from -3e38 is none."""
    refusal(
        lambda: ADVANTAGES[name]()([0.0, -value, value, 1.0], num_generations=2),
        *(f"rewards[1] is {-value!r}", "the largest reward that float32 advantages can be made of is 1.7e+38"),
    )


def test_the_largest_rewards_give_finite_advantages():
    rewards = [-1.7e38, 1.7e38]
    assert GRPOAdvantage()(rewards, num_generations=2, scale="none").tolist() == pytest.approx(rewards, rel=1e-6)
    wide = torch.tensor([-1e39, 1e39], dtype=torch.float64)
    assert GRPOAdvantage()(wide, num_generations=2, scale="none").tolist() == [-1e39, 1e39]
    refusal(lambda: GRPOAdvantage()([[1e38, 1e38], [0.0, 0.0]], num_generations=2), "rewards[0] is [1e+38, 1e+38]")


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


# --- the rest of the family -----------------------------------------------------------------------------------------

FOUR = [0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", [n for n, c in ADVANTAGES.items() if n not in ("grpo", "rloo")])
def test_a_scale_that_is_not_in_the_formula_is_refused(name):
    estimate = ADVANTAGES[name]()
    own = estimate.scale
    other = "group" if own != "group" else "batch"
    refusal(
        lambda: estimate(FOUR, num_generations=2, scale=other),
        *(f"{type(estimate).__name__} has scale={own!r}", f"got {other!r}", "leave scale out"),
    )


@pytest.mark.parametrize("name", ["opo", "length_shaped", "lead"])
def test_lengths_that_are_needed_are_asked_for(name):
    estimate = ADVANTAGES[name]()
    refusal(lambda: estimate(FOUR, num_generations=2), f"{type(estimate).__name__} needs lengths", "got None")
    refusal(
        lambda: estimate(FOUR, num_generations=2, lengths=[1, 2, 3]),
        "lengths has shape (3,) for 4 rewards",
        "one number",
    )
    refusal(lambda: estimate(FOUR, num_generations=2, lengths=[1, 2, -3, 4]), "lengths[2] is -3.0", "0 or more")


def test_greedy_rewards_are_asked_for():
    estimate = ADVANTAGES["remax"]()
    refusal(lambda: estimate(FOUR, num_generations=2), "ReMaxAdvantage needs greedy_rewards", "got None")
    refusal(
        lambda: estimate(FOUR, num_generations=2, greedy_rewards=[0.0]), "greedy_rewards has 1 entries for 4 rewards"
    )
    refusal(
        lambda: estimate(FOUR, num_generations=2, greedy_rewards=[0.0, NAN, 0.0, 0.0]),
        *("greedy_rewards[1] is nan", "None for no reward"),
    )


@pytest.mark.parametrize("k", [0, -1, 2.0, True])
def test_k_must_be_a_positive_whole_number(k):
    refusal(lambda: ADVANTAGES["pass_at_k"](k=k), "k must be a whole number of at least 1", f"got {k!r}")


def test_k_beyond_the_group():
    refusal(lambda: ADVANTAGES["pass_at_k"](k=3)(FOUR, num_generations=2), "k=3 is more than the 2 rewards", "lower k")


def test_weights_of_gdpo():
    refusal(
        lambda: ADVANTAGES["gdpo"](weights=(1.0,))([[0.0, 1.0]] * 2, num_generations=2),
        *("weights has 1 entries for 2 reward functions", "one each"),
    )


def test_rewards_beyond_the_range_of_beta_norm():
    refusal(
        lambda: ADVANTAGES["beta_norm"]()([0.0, 1.0, -1.0, 1.0], num_generations=2),
        *("rewards[2] is -1", "low=0 to high=1", "set low and high"),
    )
    refusal(lambda: ADVANTAGES["beta_norm"](low=1.0, high=1.0), "low must be below high", "1.0 and 1.0")


def test_an_unknown_count_of_gpg():
    refusal(lambda: ADVANTAGES["gpg"](counted="all"), "counted must be 'signal' or 'nonzero'", "got 'all'")


def test_a_negative_price_of_length():
    refusal(lambda: ADVANTAGES["length_shaped"](weight=-0.1), "weight must be 0 or more", "got -0.1")


@pytest.mark.parametrize("name", ADVANTAGES)
def test_inputs_that_are_not_in_the_formula_are_refused(name):
    estimate = ADVANTAGES[name]()
    inputs = {"lengths": [1, 2, 3, 4], "greedy_rewards": [0.0] * 4, "correct": [True] * 4}
    for keyword in inputs.keys() - {*estimate.needs, *estimate.uses}:
        refusal(
            lambda keyword=keyword: estimate(FOUR, num_generations=2, **{keyword: inputs[keyword]}),
            *(type(estimate).__name__, f"unexpected keyword argument {keyword!r}"),
            error=TypeError,
        )


def test_whether_an_answer_is_right_is_said_once_per_reward():
    estimate = ADVANTAGES["maxrl"]()
    refusal(lambda: estimate(FOUR, num_generations=2, correct=[True]), "correct has 1 entries for 4 rewards")
    refusal(
        lambda: estimate(FOUR, num_generations=2, correct=[True, False, 1, None]),
        "correct[2] must be True, False or None, got 1",
    )
