"""Advantages: values to the digit, exact zeros, abstentions, and groups of any size."""

import math
from itertools import chain, permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gruppo.advantage import ADVANTAGES, Groups, GRPOAdvantage, RLOOAdvantage

# Two prompts with four sequences each.
REWARDS = [0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
ESTIMATES = [
    GRPOAdvantage(),
    GRPOAdvantage(normalization="standard"),
    GRPOAdvantage(normalization="standard", ddof=0),
    GRPOAdvantage(normalization="standard", eps=0.0),
    RLOOAdvantage(),
    RLOOAdvantage(normalization="standard"),
]
every_estimate = pytest.mark.parametrize("estimate", ESTIMATES, ids=repr)


def test_centered_subtracts_the_mean_of_the_group():
    advantages = GRPOAdvantage()(REWARDS, num_generations=4, scale="group")
    assert advantages.tolist() == [-0.5, 0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25]


def test_standard_divides_by_the_sample_deviation_of_the_group():
    # 0 1 0 1: deviations 0.5, std = sqrt(4 * 0.25 / 3) = 0.57735, 0.5 / 0.57735 = 0.86603
    # 1 0 0 0: deviations 0.75 and -0.25, std = sqrt((0.5625 + 3 * 0.0625) / 3) = 0.5
    advantages = GRPOAdvantage(normalization="standard")(REWARDS, num_generations=4, scale="group")
    half = math.sqrt(3) / 2
    assert advantages.tolist() == pytest.approx([-half, half, -half, half, 1.5, -0.5, -0.5, -0.5], abs=1e-6)
    assert [round(x, 4) for x in advantages.tolist()[:2]] == [-0.8660, 0.8660]


def test_population_deviation_with_ddof_zero():
    # 1 0 0 0: std = sqrt(0.75 / 4) = sqrt(3) / 4, so 0.75 / std = sqrt(3)
    advantages = GRPOAdvantage(normalization="standard", ddof=0)([1.0, 0.0, 0.0, 0.0], num_generations=4)
    root = math.sqrt(3)
    assert advantages.tolist() == pytest.approx([root, -root / 3, -root / 3, -root / 3], abs=1e-6)


def test_scale_batch_divides_by_the_deviation_of_all_rewards():
    # All eight: mean 0.375, squares 3 * 0.390625 + 5 * 0.140625 = 1.875, n - 1 = 7; the means stay the groups'
    std = math.sqrt(1.875 / 7)
    advantages = GRPOAdvantage(normalization="standard")(REWARDS, num_generations=4, scale="batch")
    expected = [x / std for x in (-0.5, 0.5, -0.5, 0.5, 0.75, -0.25, -0.25, -0.25)]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_scale_none_does_not_divide():
    standard = GRPOAdvantage(normalization="standard")
    assert torch.equal(standard(REWARDS, num_generations=4, scale="none"), GRPOAdvantage()(REWARDS, num_generations=4))


@pytest.mark.parametrize("scale", ["batch", "none"])
def test_one_generation_compares_over_the_batch(scale):
    assert GRPOAdvantage()([0.0, 1.0, 2.0], num_generations=1, scale=scale).tolist() == [-1.0, 0.0, 1.0]


def test_one_generation_with_batch_deviation():
    # 0 1 2: sample std 1
    advantages = GRPOAdvantage(normalization="standard")([0.0, 1.0, 2.0], scale="batch")
    assert advantages.tolist() == pytest.approx([-1.0, 0.0, 1.0], abs=1e-6)


def test_eps_joins_the_deviation():
    # deviations +-1 of 0 2: sample std sqrt(2); with eps = 1: 1 / (1 + sqrt(2))
    advantages = GRPOAdvantage(normalization="standard", eps=1.0)([0.0, 2.0], num_generations=2)
    assert advantages.tolist() == pytest.approx([-1 / (1 + math.sqrt(2)), 1 / (1 + math.sqrt(2))], abs=1e-6)


# --- exact zeros ----------------------------------------------------------------------------------------------------


@every_estimate
@pytest.mark.row("R-21", "0.7 in float32, seven times")
def test_seven_rewards_of_0_7_in_float32_give_exactly_zero(estimate):
    advantages = estimate(torch.tensor([0.7] * 7, dtype=torch.float32), num_generations=7)
    assert advantages.tolist() == [0.0] * 7


@pytest.mark.parametrize("form", ["float32 tensor", "float64 tensor", "list", "rows of three", "tensor rows of three"])
@pytest.mark.parametrize("scale", ["group", "batch"])
@every_estimate
@pytest.mark.row("R-21", "equal rewards of any value")
def test_equal_rewards_that_no_float_holds_give_exactly_zero(estimate, scale, form):
    for n in range(2, 33):
        rewards = {
            "float32 tensor": torch.tensor([0.1 * 3] * n, dtype=torch.float32),
            "float64 tensor": torch.tensor([0.1 * 3] * n, dtype=torch.float64),
            "list": [0.1 + 0.1 + 0.1] * n,
            "rows of three": [[0.1, 0.1, 0.1]] * n,
            "tensor rows of three": torch.full((n, 3), 0.1),
        }[form]
        assert estimate(rewards, num_generations=n, scale=scale).tolist() == [0.0] * n


def _step_from(value, towards):
    """Four numbers of float32, the second one step from the others."""
    return np.array([value, np.nextafter(np.float32(value), np.float32(towards)), value, value], np.float32)


NOISE = {
    "one step": _step_from(1.0, 2.0),
    "a thousand and a step": _step_from(1000.0, 0.0),
    "below zero": _step_from(-0.7, 0.0),
    "0.1, 0.6 and 0.7, added in every order": np.array([
        np.float32(a) + np.float32(b) + np.float32(c) for a, b, c in permutations([0.1, 0.6, 0.7])
    ]),
}  # fmt: skip


@pytest.mark.parametrize("rewards", NOISE.values(), ids=NOISE)
@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.row("R-21", "rewards that differ by steps of float32, with every estimator")
def test_rewards_that_differ_by_rounding_give_exactly_zero(name, rewards):
    assert len(set(rewards.tolist())) > 1
    estimate: Any = ADVANTAGES[name]()
    given = {"lengths": [3] * len(rewards), "greedy_rewards": [float(rewards[0])] * len(rewards)}
    more = {keyword: value for keyword, value in given.items() if keyword in (*estimate.needs, *estimate.uses)}
    if name == "beta_norm":
        more["correct"] = [True] * len(rewards)  # its own formula takes rewards between 0 and 1 only
    assert estimate(rewards.tolist(), num_generations=len(rewards), **more).tolist() == [0.0] * len(rewards)


def test_rewards_that_a_person_would_tell_apart_are_compared():
    # A millionth: four times what counts as rounding. 3 values: mean 1/3 above the lower, sample std sqrt(1/3).
    advantages = GRPOAdvantage(normalization="standard", eps=0.0)([1.0, 1.0, 1.000001], num_generations=3)
    assert advantages.tolist() == pytest.approx([-1 / math.sqrt(3), -1 / math.sqrt(3), 2 / math.sqrt(3)], rel=1e-4)


@every_estimate
def test_a_group_without_spread_is_zero_beside_one_with_spread(estimate):
    advantages = estimate([0.7, 0.7, 0.7, 0.0, 1.0, 1.0], num_generations=3)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert (advantages[3:] != 0).all()


@every_estimate
def test_advantages_of_a_group_sum_to_zero(estimate):
    advantages = estimate(torch.tensor([0.1, 0.7, -2.0, 5.0], dtype=torch.float64), num_generations=4)
    assert advantages.sum().item() == pytest.approx(0.0, abs=1e-12)


# --- groups ---------------------------------------------------------------------------------------------------------


def test_group_ids_may_be_ragged_and_in_any_order():
    # a: 1 and 3 (mean 2), b: 5 alone, c: 0, 0, 3 (mean 1)
    rewards = [1.0, 0.0, 5.0, 3.0, 0.0, 3.0]
    ids = ["a", "c", "b", "a", "c", "c"]
    assert GRPOAdvantage()(rewards, group_ids=ids).tolist() == [-1.0, -1.0, 0.0, 1.0, -1.0, 2.0]


@pytest.mark.parametrize("ids", [torch.tensor([7, 7, 3, 3]), [7, 7, 3, 3], [(0, 1), (0, 1), None, None]])
def test_group_ids_may_be_anything_hashable(ids):
    assert GRPOAdvantage()([0.0, 1.0, 4.0, 0.0], group_ids=ids).tolist() == [-0.5, 0.5, 2.0, -2.0]


@given(st.permutations(range(8)))
def test_group_ids_follow_the_sequences(order):
    estimate = GRPOAdvantage(normalization="standard")
    straight = estimate(REWARDS, num_generations=4)
    shuffled = estimate([REWARDS[i] for i in order], group_ids=[i // 4 for i in order])
    torch.testing.assert_close(shuffled, straight[list(order)], rtol=1e-6, atol=1e-6)


@every_estimate
def test_group_ids_equal_num_generations(estimate):
    ids = [i // 4 for i in range(8)]
    assert torch.equal(estimate(REWARDS, group_ids=ids), estimate(REWARDS, num_generations=4))


def test_none_abstains():
    # group 1: 1 and 3 remain, mean 2; group 2: only 5 remains, so there is nothing to compare
    advantages = GRPOAdvantage()([1.0, None, 3.0, None, None, 5.0], num_generations=3)
    assert advantages.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0, 0.0]


def test_none_takes_no_part_in_the_deviation():
    # 1 and 3: sample std sqrt(2)
    advantages = GRPOAdvantage(normalization="standard")([1.0, None, 3.0], num_generations=3)
    assert advantages.tolist() == pytest.approx([-1 / math.sqrt(2), 0.0, 1 / math.sqrt(2)], abs=1e-6)


def test_none_takes_no_part_in_the_deviation_of_the_batch():
    # 1, 3 and 8: mean 4, squares 9 + 1 + 16 = 26, std sqrt(13); group means 2 and 8
    advantages = GRPOAdvantage(normalization="standard")([1.0, 3.0, None, 8.0], num_generations=2, scale="batch")
    root = math.sqrt(13)
    assert advantages.tolist() == pytest.approx([-1 / root, 1 / root, 0.0, 0.0], abs=1e-6)


def test_a_function_that_abstains_leaves_the_others_of_its_row():
    # rows 1 + 1, (None) + 1, None + None
    advantages = GRPOAdvantage()([[1.0, 1.0], [None, 1.0], [None, None]], num_generations=3)
    assert advantages.tolist() == [0.5, -0.5, 0.0]


@pytest.mark.parametrize("as_tensor", [True, False])
def test_rows_of_several_reward_functions_are_summed(as_tensor):
    rows = [[0.0, 1.0], [1.0, 2.0], [0.5, 0.0], [0.5, 1.0]]
    rewards = torch.tensor(rows) if as_tensor else rows
    assert GRPOAdvantage()(rewards, num_generations=2).tolist() == [-1.0, 1.0, -0.5, 0.5]


def test_a_list_of_scalar_tensors_is_a_list_of_numbers():
    rewards = [torch.tensor(1.0), torch.tensor(0.0)]
    assert GRPOAdvantage()(rewards, num_generations=2).tolist() == [0.5, -0.5]


def test_bool_and_integer_rewards_are_numbers():
    assert GRPOAdvantage()([True, False], num_generations=2).tolist() == [0.5, -0.5]
    assert GRPOAdvantage()(torch.tensor([3, 1]), num_generations=2).tolist() == [1.0, -1.0]


def test_no_rewards_give_no_advantages():
    assert GRPOAdvantage()([], num_generations=4).tolist() == []


@pytest.mark.parametrize(
    ("rewards", "dtype"),
    [
        ([0.0, 1.0], torch.float32),
        (torch.tensor([0, 1]), torch.float32),
        (torch.tensor([0.0, 1.0], dtype=torch.bfloat16), torch.float32),
        (torch.tensor([0.0, 1.0], dtype=torch.float64), torch.float64),
    ],
)
def test_dtype_of_the_result(rewards, dtype):
    assert GRPOAdvantage()(rewards, num_generations=2).dtype == dtype


def test_no_gradient_flows_to_the_rewards():
    rewards = torch.tensor([0.0, 1.0], requires_grad=True)
    assert GRPOAdvantage()(rewards, num_generations=2).requires_grad is False


def test_statistics_are_taken_in_float64():
    # In float32 the mean of 1e8 + (0, 1, 2, 3) * 8 would be off by whole units.
    rewards = torch.tensor([1e8, 1e8 + 8, 1e8 + 16, 1e8 + 24])
    assert GRPOAdvantage()(rewards, num_generations=4).tolist() == [-12.0, -4.0, 4.0, 12.0]


# --- leave-one-out --------------------------------------------------------------------------------------------------

groups_of_rewards = st.lists(st.lists(st.floats(-10, 10), min_size=2, max_size=6), min_size=1, max_size=4)


@given(groups_of_rewards)
def test_rloo_is_the_reward_minus_the_mean_of_the_others(groups):
    flat = torch.tensor(list(chain(*groups)), dtype=torch.float64)
    ids = [i for i, group in enumerate(groups) for _ in group]
    expected = [r - (sum(g) - r) / (len(g) - 1) if max(g) > min(g) else 0.0 for g in groups for r in g]
    torch.testing.assert_close(
        RLOOAdvantage()(flat, group_ids=ids), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


@given(groups_of_rewards)
def test_centered_is_the_reward_minus_the_mean_of_all(groups):
    flat = torch.tensor(list(chain(*groups)), dtype=torch.float64)
    ids = [i for i, group in enumerate(groups) for _ in group]
    expected = [r - sum(g) / len(g) if max(g) > min(g) else 0.0 for g in groups for r in g]
    torch.testing.assert_close(
        GRPOAdvantage()(flat, group_ids=ids), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )


def test_rloo_of_two():
    assert RLOOAdvantage()([0.0, 1.0], num_generations=2).tolist() == [-1.0, 1.0]


def test_rloo_leaves_out_who_abstains():
    # 1 and 4 remain: 1 - 4 and 4 - 1
    assert RLOOAdvantage()([1.0, None, 4.0], num_generations=3).tolist() == [-3.0, 0.0, 3.0]


def test_standard_rloo_divides_by_the_deviation_of_the_whole_group():
    # 1 0 0 0: leave-one-out 1 and -1/3, sample std 0.5
    advantages = RLOOAdvantage(normalization="standard")([1.0, 0.0, 0.0, 0.0], num_generations=4)
    assert advantages.tolist() == pytest.approx([2.0, -2 / 3, -2 / 3, -2 / 3], abs=1e-6)


def test_groups_read_the_statistics_by_hand():
    groups = Groups.read([1.0, 3.0, None, 8.0], 2, None, "group")
    assert groups.count().tolist() == [2.0, 1.0]
    assert groups.mean().tolist() == [2.0, 8.0]
    assert groups.has_spread().tolist() == [True, False]
