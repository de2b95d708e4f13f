"""Where features meet: every estimator with every way in which a reward changes before it is compared.

One batch whose right answers are known. Whatever is switched on, a right answer never gets less than a wrong one of the
same length, equal rewards get exactly 0, and the advantages say something.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from gruppo.advantage import ADVANTAGES
from gruppo.reward import RewardShape
from gruppo.trainer.advantages import AdvantageAssigner, kl_to_reference
from gruppo.types import Group, Prompt, Rollout, Trajectory

RIGHT = (  # per group: which of six answers are right
    (True, False, True, False, False, False),
    (True, True, True, True, True, False),
    (False, False, False, False, True, False),
    (True, True, False, False, True, False),
)
LENGTHS = (4, 4, 4, 9, 9, 9)
LIMIT = 9
CASES = ("plain", "kl_in_reward", "overlong", "truncated_factor", "two rewards", "none", "all at once")


def estimator(name: str) -> Any:
    options: dict[str, Any] = {"k": 3} if name == "pass_at_k" else {}
    if name in ("grpo", "rloo", "best_of_group"):
        options["normalization"] = "standard"
    return ADVANTAGES[name](**options)


def make_groups(right: Sequence[Sequence[bool]], case: str, *, rewards: dict[str, float] | None = None) -> list[Group]:
    """Groups of answers of known length; the log-ratio to the reference differs a little between answers."""
    groups = []
    for p, flags in enumerate(right):
        rollouts = []
        for i, (is_right, length) in enumerate(zip(flags, LENGTHS, strict=True)):
            sequence = Trajectory(prompt=Prompt(token_ids=(1,)), tokens=(3,) * length, logps=(-1.0,) * length, text="x",
                stop_reason="length" if length == LIMIT else "stop",
            )  # fmt: skip
            values: dict[str, float | None] = {"answer": float(is_right)}
            if case in ("two rewards", "all at once"):
                values["form"] = 1.0 if i % 2 else 0.5  # less for the first of each length, right or wrong
            if rewards is not None:
                values = dict(rewards)
            correct: bool | None = is_right
            reward: float | None = sum(WEIGHTS[n] * v for n, v in values.items() if v is not None)
            if case in ("none", "all at once") and i == 5:
                values, correct, reward = dict.fromkeys(values), None, None
            kl = 0.001 * (1 + (i * 7 + p * 3) % 5) if case in ("kl_in_reward", "all at once") else 0.0
            rollouts.append(
                Rollout(
                    trajectory=sequence, reward=reward, rewards=values, correct=correct,
                    old_logps=(-1.0 + kl / length,) * length, ref_logps=(-1.0,) * length,
                )
            )  # fmt: skip
        greedy = Rollout(trajectory=rollouts[0].trajectory, reward=0.5, rewards={}, correct=False)
        groups.append(Group(prompt=Prompt(token_ids=(1,), index=p), rollouts=tuple(rollouts), greedy=greedy))
    return groups


WEIGHTS = {"answer": 1.0, "form": 0.2}


def make_stage(name: str, case: str) -> AdvantageAssigner:
    weights = dict(WEIGHTS) if case in ("two rewards", "all at once") else {"answer": 1.0}
    shape = RewardShape(
        max_length=LIMIT,
        overlong_cache=4 if case in ("overlong", "all at once") else 0,
        truncated_factor=0.5 if case in ("truncated_factor", "all at once") else None,
    )
    estimate = estimator(name)
    if name == "gdpo":
        estimate = ADVANTAGES[name](weights=tuple(weights.values()))
    return AdvantageAssigner(estimate=estimate, shape=shape, weights=weights, correct_by="answer")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_a_right_answer_never_gets_less_than_a_wrong_one_of_the_same_length(name: str, case: str) -> None:
    kl_coef = 0.05 if case in ("kl_in_reward", "all at once") else 0.0
    groups = make_stage(name, case).assign(make_groups(RIGHT, case), kl_coef)
    compared, apart = 0, 0
    for group in groups:
        by_length: dict[int, list[Rollout]] = {}
        for rollout in group.rollouts:
            by_length.setdefault(len(rollout.trajectory.tokens), []).append(rollout)
        for pair in by_length.values():
            for one in pair:
                for other in pair:
                    if one.correct is True and other.correct is False:
                        compared += 1
                        apart += one.advantage > other.advantage
                        # Where every three of six hold a right answer, pass@3 pays nobody, and their KL decides.
                        slack = kl_coef * abs(kl_to_reference(one) - kl_to_reference(other))
                        slack = slack + 1e-7 if name == "pass_at_k" else 0.0
                        assert one.advantage >= other.advantage - slack, (one.advantage, other.advantage)
    assert compared >= 5
    # best_of_group pays one answer per group, if it is the only best; pass@3 none where four of six are right
    assert apart >= {"best_of_group": 0, "pass_at_k": 2}.get(name, 5)
    abstained = [r.advantage for g in groups for r in g.rollouts if r.reward is None]
    assert abstained == [0.0] * (4 if case in ("none", "all at once") else 0)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ADVANTAGES)
def test_dynamic_sampling_keeps_the_groups_that_the_estimator_can_learn_from(name: str, case: str) -> None:
    """By the answers alone: penalties make no signal, and take none away."""
    right = [*RIGHT, (True,) * 6, (False,) * 6]
    groups, stage = make_groups(right, case), make_stage(name, case)
    judged = stage.has_signal(groups)
    plain = replace(stage, shape=RewardShape(max_length=LIMIT)).assign(groups)
    assert judged == [any(r.advantage for r in g.rollouts) for g in plain]
    assert judged[2]  # one of six is right
    assert judged[0] or name == "best_of_group"  # two of six, of which neither is alone in the first place
    if name not in ("reinforce_pp", "reinforce_pp_baseline", "remax", "lead", "length_shaped", "gdpo"):
        # Answers that are all alike teach those nothing that look at a group's rewards alone.
        assert case in ("two rewards", "all at once") or judged[4:] == [False, False]


@pytest.mark.parametrize("case", ["plain", "kl_in_reward", "two rewards", "none"])
@pytest.mark.parametrize("name", [n for n in ADVANTAGES if n not in ("lead", "length_shaped", "remax")])
@pytest.mark.row("R-21", "equal rewards with every estimator and penalty")
def test_equal_rewards_give_exactly_zero(name: str, case: str) -> None:
    """All answers alike, policy and reference the same up to rounding: no estimator may see a spread."""
    for is_right in (True, False):
        # 0.1 + 0.2 is not 0.3: the sums differ in their last digit, as weighted sums do.
        stage, rewards = make_stage(name, case), {"answer": float(is_right)}
        groups = make_groups([(is_right,) * 6] * 3, "none" if case == "none" else "plain", rewards=rewards)
        if case == "two rewards":
            groups = [
                replace(g, rollouts=tuple(
                    replace(r, rewards={"answer": float(is_right), "form": 0.5}, reward=(0.1 + 0.2, 0.3)[i % 2])
                    for i, r in enumerate(g.rollouts)
                ))
                for g in groups
            ]  # fmt: skip
        if case == "kl_in_reward":
            groups = [
                replace(g, rollouts=tuple(
                    replace(r, old_logps=tuple(-1.0 + 1e-7 * (i - 2) for _ in r.trajectory.tokens))
                    for i, r in enumerate(g.rollouts)
                ))
                for g in groups
            ]  # fmt: skip
        assigned = stage.assign(groups, kl_coef=0.5 if case == "kl_in_reward" else 0.0)
        assert {r.advantage for g in assigned for r in g.rollouts} == {0.0}
        assert stage.has_signal(groups) == [False] * 3


@pytest.mark.parametrize("name", ["lead", "length_shaped", "remax"])
def test_estimators_that_look_further_give_zero_to_answers_that_are_alike_in_that_too(name: str) -> None:
    stage = make_stage(name, "plain")
    groups = make_groups([(True,) * 6] * 2, "plain")
    alike = groups[0].rollouts[0]
    groups = [replace(g, rollouts=(alike,) * 6, greedy=alike) for g in groups]
    assert {r.advantage for g in stage.assign(groups) for r in g.rollouts} == {0.0}
    assert stage.has_signal(groups) == [False, False]


# --- the findings themselves, by hand -------------------------------------------------------------------------------


def four(rewards: Sequence[float], lengths: Sequence[int], limit: int) -> Group:
    rollouts = []
    for reward, length in zip(rewards, lengths, strict=True):
        sequence = Trajectory(prompt=Prompt(token_ids=(1,)), tokens=(3,) * length, logps=(-1.0,) * length, text="x",
            stop_reason="length" if length == limit else "stop",
        )  # fmt: skip
        rollouts.append(Rollout(trajectory=sequence, reward=reward, rewards={"answer": reward}, correct=reward >= 1.0))
    return Group(prompt=Prompt(token_ids=(1,)), rollouts=tuple(rollouts))


def test_pass_at_k_with_the_overlong_penalty_still_tells_right_from_wrong() -> None:
    # Group of 8 with three right, all of length 4 = the limit: the penalty of 1 is the same for all, and goes.
    group = four([1, 1, 0, 0, 0, 1, 0, 0], [4] * 8, limit=4)
    stage = AdvantageAssigner(
        estimate=ADVANTAGES["pass_at_k"](k=2), shape=RewardShape(max_length=4, overlong_cache=4),
        weights={"answer": 1.0}, correct_by="answer",
    )  # fmt: skip
    (assigned,) = stage.assign([group])
    # fails = C(5,2)/C(8,2) = 10/28, std = sqrt(10/28 * 18/28); right: fails/std; wrong: (fails - 4/7)/std
    std = (10 / 28 * 18 / 28) ** 0.5
    right, wrong = 10 / 28 / std, (10 / 28 - 4 / 7) / std
    expected = [right, right, wrong, wrong, wrong, right, wrong, wrong]
    assert [r.advantage for r in assigned.rollouts] == pytest.approx(expected, abs=1e-6)
    assert (round(right, 2), round(wrong, 2)) == (0.75, -0.45)


@pytest.mark.parametrize("name", ["pass_at_k", "lead"])
def test_a_penalty_acts_after_a_comparison_of_right_and_wrong(name: str) -> None:
    group = four([1, 1, 0, 0], [2, 2, 2, 2], limit=4)
    shape = RewardShape(max_length=4, overlong_cache=4)
    stage = AdvantageAssigner(
        estimate=estimator(name), shape=shape, weights={"answer": 1.0}, correct_by="answer"
    )  # fmt: skip
    longer = replace(group.rollouts[1].trajectory, tokens=(3,) * 3, logps=(-1.0,) * 3)
    group = replace(group, rollouts=(group.rollouts[0], replace(group.rollouts[1], trajectory=longer),
                                     *group.rollouts[2:]))  # fmt: skip
    plain = replace(stage, shape=RewardShape(max_length=4)).assign([group])[0]
    shaped = stage.assign([group])[0]
    # Penalties 1/2, 3/4, 1/2, 1/2 with mean 9/16: what is left of them is +1/16, -3/16, +1/16, +1/16.
    expected = [a.advantage + d for a, d in zip(plain.rollouts, (1 / 16, -3 / 16, 1 / 16, 1 / 16), strict=True)]
    assert [r.advantage for r in shaped.rollouts] == pytest.approx(expected, abs=1e-6)


def test_a_tiny_penalty_does_not_outweigh_being_right_for_gdpo() -> None:
    group = four([1, 1, 0, 0], [10, 91, 10, 10], limit=1000)
    stage = AdvantageAssigner(
        estimate=ADVANTAGES["gdpo"](), shape=RewardShape(max_length=1000, overlong_cache=910),
        weights={"answer": 1.0}, correct_by="answer",
    )  # fmt: skip
    (assigned,) = stage.assign([group])
    # The penalty is 1/910 on the second; in its column that is (1, 0.9989, 0, 0), normalised.
    assert [r.advantage for r in assigned.rollouts] == pytest.approx([0.867, 0.865, -0.866, -0.866], abs=5e-4)


def test_gdpo_tells_groups_apart_whose_sums_are_equal() -> None:
    rollouts = tuple(
        Rollout(trajectory=four([0], [3], 9).rollouts[0].trajectory, reward=3.0, rewards=values, correct=False)
        for values in ({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 3.0}, {"a": 0.0, "b": 3.0})
    )
    group = Group(prompt=Prompt(token_ids=(1,)), rollouts=rollouts)
    weights = {"a": 3.0, "b": 1.0}
    shape = RewardShape(max_length=9)
    gdpo = AdvantageAssigner(
        estimate=ADVANTAGES["gdpo"](weights=(3.0, 1.0)), shape=shape, weights=weights, correct_by="a"
    )
    grpo = AdvantageAssigner(estimate=estimator("grpo"), shape=shape, weights=weights, correct_by="a")
    assert gdpo.has_signal([group]) == [True] and grpo.has_signal([group]) == [False]
    (assigned,) = gdpo.assign([group])
    assert [r.advantage for r in assigned.rollouts] == pytest.approx([1.1547, -0.5774, -0.5774], abs=1e-4)


def test_beta_norm_and_maxrl_take_the_success_rate_from_the_answers() -> None:
    """With a KL of 0.001 in the reward the success rate is still 1/4, and no reward is out of bounds."""
    group = four([1, 0, 0, 0], [4] * 4, limit=9)
    scored = tuple(replace(r, old_logps=(-0.99975,) * 4, ref_logps=(-1.0,) * 4) for r in group.rollouts)
    assert kl_to_reference(scored[0]) == pytest.approx(0.001, rel=1e-6)
    for name, expected in (("maxrl", [3.0, -1, -1, -1]), ("beta_norm", [0.75, -0.25, -0.25, -0.25])):
        stage = AdvantageAssigner(
            estimate=estimator(name), shape=RewardShape(max_length=9), weights={"answer": 1.0}, correct_by="answer"
        )  # fmt: skip
        (assigned,) = stage.assign([replace(group, rollouts=scored)], kl_coef=1.0)
        assert [r.advantage for r in assigned.rollouts] == pytest.approx(expected, abs=1e-6)
