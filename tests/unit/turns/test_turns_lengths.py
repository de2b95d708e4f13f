"""The length of an episode is what the policy wrote: a tool that says more changes no penalty, advantage or metric."""

import pytest

from gruppo.advantage import ADVANTAGES
from gruppo.reward import RewardScorer, RewardShape
from gruppo.reward.length import LengthPenalty, SoftOverlong
from gruppo.rollout.driver import Driver
from gruppo.rollout.source import rollout_metrics
from gruppo.trainer.advantages import AdvantageAssigner
from gruppo.types import Group, Message, Prompt, Rollout, Trajectory

WRITTEN = ((3, 4), (2, 1), (6, 4), (1, 1))
"""Tokens of the two turns of each episode of a group."""
OVERLONG = RewardShape(max_length=10, overlong_cache=5, truncated_factor=0.5)


def episode(turns, given):
    first, second = turns
    tool: Message = {"role": "tool", "name": "multiply", "content": "9" * given}
    own = ({"role": "assistant", "content": "ask"}, {"role": "assistant", "content": "1"})
    return Trajectory(
        prompt=Prompt(token_ids=(5, 6)),
        tokens=(7,) * first + (9,) * given + (8,) * second,
        sampled=(True,) * first + (False,) * given + (True,) * second,
        logps=(-1.0,) * (first + second),
        text="1",
        stop_reason="length" if first + second == 10 else "stop",
        messages=(own[0], tool, own[1]),
    )


def group(given):
    rollouts = []
    for i, turns in enumerate(WRITTEN):
        right = i % 2 == 0
        trajectory = episode(turns, given)
        rollouts.append(Rollout(trajectory=trajectory, reward=float(right), rewards={"r": float(right)}, correct=right))
    return Group(prompt=Prompt(token_ids=(5, 6)), rollouts=tuple(rollouts), greedy=rollouts[1])


def assigned(given, name, shape):
    assigner = AdvantageAssigner(estimate=ADVANTAGES[name](), shape=shape, weights={"r": 1.0}, correct_by="r")
    (found,) = assigner.assign([group(given)])
    return [(r.shaped, r.advantage, r.is_masked) for r in found.rollouts]


@pytest.mark.parametrize("shape", [OVERLONG, RewardShape(max_length=10)], ids=["overlong", "plain"])
@pytest.mark.parametrize("name", ADVANTAGES)
def test_no_advantage_depends_on_how_much_a_tool_says(name, shape):
    assert assigned(40, name, shape) == assigned(1, name, shape)


def test_the_overlong_penalty_counts_what_the_policy_wrote():
    """7, 3, 10 and 2 tokens of at most 10, of which the last 5 cost up to 1; the third was cut: half its reward."""
    assert [shaped for shaped, _, _ in assigned(40, "grpo", OVERLONG)] == pytest.approx([1 - 0.4, 0, 0.5 - 1, 0])


def test_length_rewards_are_handed_what_the_policy_wrote():
    with RewardScorer([LengthPenalty(scale=10), SoftOverlong(max_length=10, cache=5)], workers=1) as scorer:
        driver = Driver(sampler=None, scorer=scorer, player=object())  # type: ignore[arg-type]  # neither is used
        drawn = tuple(episode(turns, 40) for turns in WRITTEN)
        ((found,), _) = driver.score([drawn[0].prompt], [drawn], step=0, seed=0)
    values = [[pytest.approx(x) for x in pair] for pair in ((-0.7, -0.4), (-0.3, 0), (-1, -1), (-0.2, 0))]
    assert [list(rollout.rewards.values()) for rollout in found.rollouts] == values


def test_length_and_truncation_metrics_count_what_the_policy_wrote():
    few, many = rollout_metrics([group(1)]), rollout_metrics([group(40)])
    assert {name for name in few if few[name] != many[name]} == {"turns/given_tokens"}
    assert (many["completion/len_mean"], many["completion/len_p95"]) == (5.5, 10)
    assert (many["completion/truncated_frac"], many["turns/given_tokens"]) == (0.25, 40)
