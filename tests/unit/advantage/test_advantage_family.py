"""Every estimator against a formula written again in plain Python, against verl's numbers, and under permutation."""

import math
import random
from collections.abc import Callable
from itertools import combinations
from statistics import fmean, pstdev, stdev
from typing import Any

import pytest
import torch

from gruppo.advantage import (
    ADVANTAGES,
    BestOfGroupAdvantage,
    BetaNormAdvantage,
    DRGRPOAdvantage,
    GDPOAdvantage,
    GPGAdvantage,
    GRPOAdvantage,
    LEADAdvantage,
    LengthShapedAdvantage,
    LitePPOAdvantage,
    MaxRLAdvantage,
    OPOAdvantage,
    PassAtKAdvantage,
    ReinforcePlusPlusAdvantage,
    ReinforcePlusPlusBaselineAdvantage,
    ReMaxAdvantage,
    RLOOAdvantage,
)

# Three prompts with four completions each; the second group has no spread.
REWARDS = [1.0, 0.0, 0.25, 0.0, 0.5, 0.5, 0.5, 0.5, 0.0, 1.0, 1.0, 0.75]
LENGTHS = [3, 5, 2, 4, 1, 2, 6, 3, 7, 2, 4, 1]
GREEDY = [0.5] * 4 + [1.0] * 4 + [0.0] * 4
EPS = 1e-8

Groups = dict[Any, list[int]]
Formula = Callable[[list[float], list[int], list[float], Groups], list[float]]


def in_groups(function: Callable[[list[float], list[int]], list[float]]) -> Formula:
    """A formula that looks at one group at a time, given its rewards and lengths."""

    def over_batch(rewards: list[float], lengths: list[int], greedy: list[float], groups: Groups) -> list[float]:
        result = [0.0] * len(rewards)
        for members in groups.values():
            values = function([rewards[i] for i in members], [lengths[i] for i in members])
            for i, value in zip(members, values, strict=True):
                result[i] = value
        return result

    return over_batch


def grpo(r: list[float], _: list[int]) -> list[float]:
    return [(x - fmean(r)) / (stdev(r) + EPS) for x in r]


def rloo(r: list[float], _: list[int]) -> list[float]:
    return [x - (sum(r) - x) / (len(r) - 1) for x in r]


def drgrpo(r: list[float], _: list[int]) -> list[float]:
    return [x - fmean(r) for x in r]


def opo(r: list[float], n: list[int]) -> list[float]:
    tokens = [x for x, count in zip(r, n, strict=True) for _ in range(count)]  # one reward per token
    return [x - fmean(tokens) for x in r]


def maxrl(r: list[float], _: list[int]) -> list[float]:
    return [x / fmean(r) - 1 for x in r] if fmean(r) > 0 else [0.0] * len(r)


def length_shaped(r: list[float], n: list[int]) -> list[float]:
    rate = sum(x >= 0.75 for x in r) / len(r)
    shaped = [x - 0.3 * rate * count / max(n) for x, count in zip(r, n, strict=True)]
    return [x - fmean(shaped) for x in shaped]


def lead(r: list[float], n: list[int]) -> list[float]:
    right = [x >= 0.75 for x in r]
    of_right = [count for count, ok in zip(n, right, strict=True) if ok]
    std = stdev(of_right) if len(of_right) > 1 else 0.0
    shaped = []
    for count, ok in zip(n, right, strict=True):
        shaped.append(math.exp(-0.2 * (count - fmean(of_right)) / (std + EPS)) if ok else -1.0)
    if max(shaped) == min(shaped):
        return [0.0] * len(r)
    rate = len(of_right) / len(r)
    weight = lambda p: 0.4 + 1.1 / (1 + math.exp(10 * (p - 0.75)))  # noqa: E731
    base = [(s - fmean(shaped)) / (stdev(shaped) + EPS) for s in shaped]
    return [b * (weight(rate) if b > 0 else weight(1 - rate)) for b in base]


def pass_at_2(r: list[float], _: list[int]) -> list[float]:
    """By drawing all subsets: mean over the subsets that a completion is in, of their normalised pass."""
    passes = {s: float(any(r[i] >= 0.75 for i in s)) for s in combinations(range(len(r)), 2)}
    mean, std = fmean(passes.values()), pstdev(passes.values())
    if std == 0:
        return [0.0] * len(r)
    return [fmean((p - mean) / std for s, p in passes.items() if i in s) for i in range(len(r))]


def best_of_group(r: list[float], _: list[int]) -> list[float]:
    """Leave-one-out: how much the maximum would lose without this completion."""
    return [max(r) - max(r[:i] + r[i + 1 :]) for i in range(len(r))]


def lite_ppo(rewards, lengths, greedy, groups):
    return [c / (stdev(rewards) + EPS) for c in in_groups(drgrpo)(rewards, lengths, greedy, groups)]


def whitened_over_tokens(values: list[float], lengths: list[int]) -> list[float]:
    tokens = [x for x, count in zip(values, lengths, strict=True) for _ in range(count)]
    return [(x - fmean(tokens)) / (stdev(tokens) + EPS) for x in values]


def reinforce_pp(rewards, lengths, greedy, groups):
    return whitened_over_tokens(rewards, lengths)


def reinforce_pp_baseline(rewards, lengths, greedy, groups):
    return whitened_over_tokens(in_groups(drgrpo)(rewards, lengths, greedy, groups), lengths)


def remax(rewards, lengths, greedy, groups):
    return [r - g for r, g in zip(rewards, greedy, strict=True)]


def gdpo(rewards, lengths, greedy, groups):  # one reward function
    parts = in_groups(lambda r, n: grpo(r, n) if max(r) > min(r) else [0.0] * len(r))(rewards, lengths, greedy, groups)
    return [(p - fmean(parts)) / (stdev(parts) + EPS) for p in parts]


def gpg(rewards, lengths, greedy, groups):
    dead = sum(len(m) for m in groups.values() if len({rewards[i] for i in m}) == 1)
    centered = in_groups(drgrpo)(rewards, lengths, greedy, groups)
    return [c * len(rewards) / (len(rewards) - dead) for c in centered]


def beta_norm(rewards, lengths, greedy, groups):
    rates = {g: fmean(rewards[i] for i in m) for g, m in groups.items()}
    mean, var = fmean(rates.values()), stdev(rates.values()) ** 2
    a, b = (mean * (1 - mean) / var - 1) * mean, (mean * (1 - mean) / var - 1) * (1 - mean)
    double = lambda x: torch.tensor(x, dtype=torch.float64)  # noqa: E731
    density = torch.distributions.Beta(double(1 + a / 3), double(1 + b / 3))
    result = [0.0] * len(rewards)
    for g, members in groups.items():
        for i in members:
            result[i] = (rewards[i] - rates[g]) / density.log_prob(double(rates[g])).exp().item()
    return result


CASES: dict[str, tuple[Any, Formula]] = {
    "grpo": (GRPOAdvantage("standard"), in_groups(lambda r, n: grpo(r, n) if max(r) > min(r) else [0.0] * len(r))),
    "rloo": (RLOOAdvantage(), in_groups(rloo)),
    "drgrpo": (DRGRPOAdvantage(), in_groups(drgrpo)),
    "lite_ppo": (LitePPOAdvantage(), lite_ppo),
    "reinforce_pp": (ReinforcePlusPlusAdvantage(), reinforce_pp),
    "reinforce_pp_baseline": (ReinforcePlusPlusBaselineAdvantage(), reinforce_pp_baseline),
    "remax": (ReMaxAdvantage(), remax),
    "gdpo": (GDPOAdvantage(), gdpo),
    "opo": (OPOAdvantage(), in_groups(opo)),
    "gpg": (GPGAdvantage(), gpg),
    "maxrl": (MaxRLAdvantage(), in_groups(maxrl)),
    "beta_norm": (BetaNormAdvantage(), beta_norm),
    "pass_at_k": (PassAtKAdvantage(k=2, correct_at=0.75), in_groups(pass_at_2)),
    "best_of_group": (BestOfGroupAdvantage(), in_groups(best_of_group)),
    "length_shaped": (LengthShapedAdvantage(weight=0.3, correct_at=0.75), in_groups(length_shaped)),
    "lead": (LEADAdvantage(length_weight=0.2, correct_at=0.75), in_groups(lead)),
}
every = pytest.mark.parametrize("name", CASES)


def call(estimate, rewards, lengths=LENGTHS, greedy=GREEDY, **options):
    inputs = {"lengths": lengths, "greedy_rewards": greedy}
    more = {name: inputs[name] for name in (*estimate.needs, *estimate.uses) if name != "correct"}
    return estimate(torch.tensor(rewards, dtype=torch.float64), **more, **options)


def close(got: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-14)


def test_every_estimator_by_name_is_in_this_table_and_no_other():
    assert set(CASES) == set(ADVANTAGES)
    for name, (estimate, _) in CASES.items():
        assert type(estimate) is ADVANTAGES[name]


@every
def test_three_groups_of_four_agree_with_the_formula(name):
    estimate, formula = CASES[name]
    groups = {g: list(range(4 * g, 4 * g + 4)) for g in range(3)}
    expected = formula(REWARDS, LENGTHS, GREEDY, groups)
    assert max(map(abs, expected)) > 0.1  # the case says something
    close(call(estimate, REWARDS, num_generations=4), expected)


@every
def test_ragged_groups_in_any_order_agree_with_the_formula(name):
    estimate, formula = CASES[name]
    ids = ["c", "a", "b", "a", "b", "b", "a", "c", "a", "b", "b", "c"]  # 4, 5 and 3
    groups = {g: [i for i, x in enumerate(ids) if x == g] for g in "cab"}
    close(call(estimate, REWARDS, group_ids=ids), formula(REWARDS, LENGTHS, GREEDY, groups))


@every
@pytest.mark.parametrize("seed", range(4))
def test_advantages_follow_their_sequences_through_any_permutation(name, seed):
    estimate = CASES[name][0]
    straight = call(estimate, REWARDS, num_generations=4)
    order = random.Random(seed).sample(range(12), 12)
    pick = lambda values: [values[i] for i in order]  # noqa: E731
    ids = [i // 4 for i in order]
    moved = call(estimate, pick(REWARDS), pick(LENGTHS), pick(GREEDY), group_ids=ids)
    torch.testing.assert_close(moved, straight[order], rtol=1e-12, atol=1e-14)


@every
def test_the_order_of_groups_does_not_matter(name):
    estimate = CASES[name][0]
    order = [8, 9, 10, 11, 0, 1, 2, 3, 4, 5, 6, 7]
    pick = lambda values: [values[i] for i in order]  # noqa: E731
    moved = call(estimate, pick(REWARDS), pick(LENGTHS), pick(GREEDY), num_generations=4)
    straight = call(estimate, REWARDS, num_generations=4)
    torch.testing.assert_close(moved, straight[order], rtol=1e-12, atol=1e-14)


@every
def test_a_batch_of_equal_rewards_gets_exactly_zero_where_the_formula_says_so(name):
    # Equal rewards, equal lengths and an equal greedy reward leave nothing to tell completions apart.
    advantages = call(CASES[name][0], [0.7] * 12, [3] * 12, [0.7] * 12, num_generations=4)
    assert advantages.tolist() == [0.0] * 12


LOOKS_BEYOND_THE_GROUP = {"reinforce_pp", "reinforce_pp_baseline", "remax"}


@every
def test_a_group_without_spread_gets_exactly_zero_except_where_the_baseline_is_not_its_own(name):
    rewards = [0.7, 0.7, 0.7, 0.7, *REWARDS[:4]]
    advantages = call(CASES[name][0], rewards, [3, 3, 3, 3, 5, 2, 4, 1], [0.0] * 8, num_generations=4)
    assert (advantages[:4].tolist() == [0.0] * 4) is (name not in LOOKS_BEYOND_THE_GROUP)
    assert (advantages[4:] != 0).any()


@every
def test_who_abstains_gets_zero_and_is_in_no_statistic(name):
    estimate = CASES[name][0]
    inputs = {"lengths": [3, 5, 9, 2, 4, 8, 6], "greedy_rewards": [0.5] * 7}
    needs = [name for name in (*estimate.needs, *estimate.uses) if name != "correct"]
    rewards, keep = [1.0, 0.0, None, 0.25, 0.0, None, 0.75], [0, 1, 3, 4, 6]
    ids = ["a", "a", "a", "a", "b", "b", "b"]
    got = estimate(rewards, group_ids=ids, **{n: inputs[n] for n in needs})
    without = estimate(
        [rewards[i] for i in keep],
        group_ids=[ids[i] for i in keep],
        **{n: [inputs[n][i] for i in keep] for n in needs},
    )
    assert got[[2, 5]].tolist() == [0.0, 0.0]
    torch.testing.assert_close(got[keep], without)


def test_numbers_of_verl():
    """Results of verl 0.9.1's functions in float64 for the same rewards, lengths and greedy rewards."""
    verl = {
        "reinforce_pp": [
            1.503045641, -1.028399648, -0.395538326, -1.028399648, 0.237322996, 0.237322996,
            0.237322996, 0.237322996, -1.028399648, 1.503045641, 1.503045641, 0.870184318,
        ],
        "reinforce_pp_baseline": [
            2.016909425, -0.564734639, 0.080676377, -0.564734639, 0.242029131, 0.242029131,
            0.242029131, 0.242029131, -1.532851163, 1.048792901, 1.048792901, 0.403381885,
        ],
        "opo": [
            0.75, -0.25, 0.0, -0.25, 0.0, 0.0, 0.0, 0.0, -0.482142857, 0.517857143, 0.517857143, 0.267857143,
        ],
        "remax": [0.5, -0.5, -0.25, -0.5, -0.5, -0.5, -0.5, -0.5, 0.0, 1.0, 1.0, 0.75],
        "best_of_group": [0.75] + [0.0] * 11,
    }  # fmt: skip
    for name, expected in verl.items():
        got = call(CASES[name][0], REWARDS, num_generations=4)
        assert got.tolist() == pytest.approx(expected, abs=3e-8), name
    # Its GPG counts the rewards that are not 0 (9 of 12) and holds the quotient in float32.
    gpg = [0.916666694, -0.416666679, -0.083333336, -0.416666679, 0.0, 0.0, 0.0, 0.0]
    gpg += [-0.916666694, 0.416666679, 0.416666679, 0.083333336]
    assert call(GPGAdvantage("nonzero"), REWARDS, num_generations=4).tolist() == pytest.approx(gpg, abs=3e-8)
    best = call(BestOfGroupAdvantage("standard", eps=1e-6), REWARDS, num_generations=4)
    assert best.tolist() == pytest.approx([1.584808283] + [0.0] * 11, abs=1e-9)


# --- by hand --------------------------------------------------------------------------------------------------------


def test_gdpo_sees_rewards_that_a_sum_would_hide():
    rows = [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]]
    # Each column: two of four, deviations 0.5, sample std sqrt(1/3). With weights 3 and 1 the sums are
    # s = (3 - 1, 1 - 3, 4, -4) * 0.866 = (2, -2, 4, -4) * 0.866, whose std is 0.866 * sqrt(40 / 3).
    got = GDPOAdvantage(weights=(3.0, 1.0))(torch.tensor(rows, dtype=torch.float64), num_generations=4)
    assert got.tolist() == pytest.approx([x / math.sqrt(40 / 3) for x in (2, -2, 4, -4)], abs=1e-7)
    same_sum = GRPOAdvantage()(rows[:2], num_generations=2)
    assert same_sum.tolist() == [0.0, 0.0]


def test_gdpo_does_not_care_about_the_scale_of_a_reward():
    rows = torch.tensor([[1.0, 0.2], [0.0, 0.7], [0.0, 0.4], [1.0, 0.4]], dtype=torch.float64)
    scaled = rows * torch.tensor([1.0, 1000.0])
    estimate = GDPOAdvantage(eps=0.0)
    torch.testing.assert_close(estimate(scaled, num_generations=4), estimate(rows, num_generations=4))


def test_gdpo_gives_zero_to_a_group_that_no_function_tells_apart():
    rows = [[0.1, 0.3], [0.1, 0.3], [0.1, 0.3], [1.0, 0.3], [0.0, 0.3], [0.5, 0.1]]
    got = GDPOAdvantage()(rows, num_generations=3)
    assert got[:3].tolist() == [0.0, 0.0, 0.0]
    assert got[3] > 0 > got[5]


def test_a_reward_of_weight_zero_takes_no_part_in_gdpo():
    rows = [[1.0, 5.0], [0.0, 7.0], [None, 3.0]]
    assert GDPOAdvantage(weights=(1.0, 0.0))(rows, num_generations=3).tolist() == pytest.approx(
        GDPOAdvantage()([1.0, 0.0, None], num_generations=3).tolist()
    )


def test_pass_at_k_stops_paying_for_prompts_that_are_solved_often_enough():
    # 3 of 4 right: every pair has a right one. 1 of 4: 3 of 6 pairs pass, mean 1/2, std 1/2; right: (1 - 1/2) / (1/2),
    # wrong: 1/2 - C(2, 1) / C(3, 1) = -1/6 over 1/2.
    estimate = PassAtKAdvantage(k=2)
    assert estimate([1.0, 1.0, 1.0, 0.0], num_generations=4).tolist() == [0.0] * 4
    got = estimate([1.0, 0.0, 0.0, 0.0], num_generations=4)
    assert got.tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


@pytest.mark.parametrize("k", [1, 2, 3, 5, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    rewards = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    passes = {s: float(any(rewards[i] for i in s)) for s in combinations(range(6), k)}
    mean, std = fmean(passes.values()), pstdev(passes.values())
    expected = [fmean((p - mean) / std for s, p in passes.items() if i in s) if std else 0.0 for i in range(6)]
    close(call(PassAtKAdvantage(k=k), rewards, num_generations=6), expected)


def test_pass_at_one_is_grpo_with_the_population_deviation():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    expected = GRPOAdvantage("standard", ddof=0, eps=0.0)(rewards, num_generations=4)
    torch.testing.assert_close(PassAtKAdvantage(k=1)(rewards, num_generations=4), expected)


def test_two_that_share_the_first_place_lead_by_nothing():
    assert BestOfGroupAdvantage()([1.0, 1.0, 0.0], num_generations=3).tolist() == [0.0, 0.0, 0.0]


def test_maxrl_is_zero_where_nobody_is_right_and_where_the_mean_is_negative():
    assert MaxRLAdvantage()([0.0, 0.0, -1.0, 0.5], num_generations=2).tolist() == [0.0] * 4


def test_beta_norm_maps_rewards_of_another_range():
    plain = BetaNormAdvantage()([1.0, 0.0, 0.0, 0.0, 1.0, 1.0], num_generations=3)
    other = BetaNormAdvantage(low=-1.0, high=1.0)([1.0, -1.0, -1.0, -1.0, 1.0, 1.0], num_generations=3)
    torch.testing.assert_close(other, plain)


def test_beta_norm_is_flat_when_all_prompts_are_equally_hard():
    got = BetaNormAdvantage()([1.0, 0.0, 0.0, 1.0], num_generations=2)
    assert got.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_beta_norm_is_zero_where_all_or_none_are_right_whatever_their_rewards():
    # Rates 0, 1, 1/2: mean 1/2, variance 1/4, so a Beta with a + b = 0: flat. Only the last group is between 0 and 1.
    right = [False, False, True, True, True, False]
    got = BetaNormAdvantage()([0.25, 0.0, 1.0, 0.5, 1.0, 0.0], num_generations=2, correct=right)
    assert got.tolist() == [0.0, 0.0, 0.0, 0.0, 0.5, -0.5]
    # Rates 0, 1/2, 1/2: mean 1/3, variance 1/12, a + b = 5/3; 1 + a/3 = 32/27 and 1 + b/3 = 37/27.
    density = torch.distributions.Beta(torch.tensor(32 / 27), torch.tensor(37 / 27)).log_prob(torch.tensor(0.5)).exp()
    right = [False, False, True, False, True, False]
    got = BetaNormAdvantage()([0.25, 0.0, 1.0, 0.0, 1.0, 0.0], num_generations=2, correct=right)
    half = 0.5 / density.item()
    assert got.tolist() == pytest.approx([0.0, 0.0, half, -half, half, -half], rel=1e-6)


def test_right_answers_of_different_length_have_a_signal_in_the_length_shaped_estimators():
    # shaped: 1 - 0.5 * 10/20 = 0.75 and 1 - 0.5 = 0.5
    got = LengthShapedAdvantage(weight=0.5)([1.0, 1.0], num_generations=2, lengths=[10, 20])
    assert got.tolist() == [0.125, -0.125]
    short, long = LEADAdvantage()([1.0, 1.0], num_generations=2, lengths=[10, 20]).tolist()
    assert short == pytest.approx(-long * (0.4 + 1.1 / (1 + math.exp(2.5))) / (0.4 + 1.1 / (1 + math.exp(-7.5))))


def test_without_lengths_reinforce_pp_counts_each_completion_once():
    rewards = torch.tensor([1.0, 0.0, 0.0, 3.0], dtype=torch.float64)
    # mean 1, squares 0 + 1 + 1 + 4 = 6, std sqrt(2)
    close(ReinforcePlusPlusAdvantage(eps=0.0)(rewards), [0.0, -1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)])
    same = ReinforcePlusPlusAdvantage(eps=0.0)(rewards, lengths=[1, 1, 1, 1])
    torch.testing.assert_close(same, ReinforcePlusPlusAdvantage(eps=0.0)(rewards))


def test_without_lengths_a_group_without_spread_gets_exactly_zero_from_reinforce_pp_baseline():
    # In float64 the centred rewards of the first group add up to 5.6e-17, and their mean is not exactly 0.
    rewards = torch.tensor([0.1, 0.7, 0.3, 0.5, 0.5, 0.5], dtype=torch.float64)
    got = ReinforcePlusPlusBaselineAdvantage()(rewards, num_generations=3)
    assert got[3:].tolist() == [0.0, 0.0, 0.0]


def test_an_answer_that_nobody_judged_is_in_no_success_rate():
    # One right and one wrong of two that count: pass@1 is 1/2, with a deviation of 1/2.
    call = {"num_generations": 3, "correct": [True, False, None]}
    assert PassAtKAdvantage(k=1)([1.0, 0.0, 0.0], **call).tolist() == pytest.approx([1.0, -1.0, 0.0])
    # mean reward 1/3 over a rate of 1/2
    assert MaxRLAdvantage()([1.0, 0.0, 0.0], **call).tolist() == pytest.approx([4 / 3, -2 / 3, -2 / 3])


def test_remax_leaves_out_a_prompt_whose_greedy_completion_has_no_reward():
    assert ReMaxAdvantage()([1.0, 0.0], scale="none", greedy_rewards=[None, 0.25]).tolist() == [0.0, -0.25]
