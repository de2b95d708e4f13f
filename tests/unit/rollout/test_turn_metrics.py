"""Metrics of turns, counted by hand on three episodes."""

from typing import Any

import pytest

from gruppo.keys import find
from gruppo.rollout.turn_metrics import turn_metrics
from gruppo.types import Prompt, Trajectory

PROMPT = Prompt(token_ids=(1,))
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
UNREAD = {"error": "it is no JSON"}


def says(*calls: Any) -> Any:
    return {"role": "assistant", "content": "so", "tool_calls": list(calls)}


def answer(*, is_error: bool = False) -> Any:
    return {"role": "tool", "content": "2", "is_error": is_error}


def episode(tokens: str, *messages: Any, **facts: Any) -> Trajectory:
    """An episode with a token for each letter: `p` of the policy, `o` of others."""
    sampled = tuple(letter == "p" for letter in tokens)
    return Trajectory(prompt=PROMPT, tokens=(5,) * len(tokens), sampled=sampled, messages=messages, **facts)


EPISODES = [
    # 3 turns, 3 calls of which one cannot be read; 2 of 3 answers are errors; 5 given tokens
    episode(
        "ppoooppoop", says(CALL, UNREAD), answer(), answer(is_error=True), says(CALL), answer(is_error=True), says()
    ),
    # 1 turn, cut
    episode("ppp", says(), stop_reason="turns"),
    # 1 turn, 1 call, no answer: lost
    episode("p", says(CALL), stop_reason="deadline"),
    # 1 turn, then a user who is wrong: that is no call
    episode("ppo", says(), {"role": "user", "content": "no", "is_error": True}, stop_reason="done"),
]


def test_each_number_is_that_of_a_count_by_hand() -> None:
    assert turn_metrics(EPISODES) == {
        "turns/mean": 6 / 4,
        "turns/max": 3.0,
        "turns/calls": 4 / 4,
        "turns/call_error_frac": 2 / 4,
        "turns/unparsed_frac": 1 / 4,
        "turns/lost_frac": 1 / 4,
        "turns/cut_frac": 1 / 4,
        "turns/given_tokens": 6 / 4,
    }


def test_completions_without_turns_are_no_episodes() -> None:
    plain = Trajectory(prompt=PROMPT, tokens=(5,) * 9)
    assert turn_metrics([plain, *EPISODES]) == turn_metrics(EPISODES)
    assert turn_metrics([plain]) == turn_metrics([]) == {}


def test_shares_of_calls_are_absent_without_calls() -> None:
    assert turn_metrics(EPISODES[1:2]).keys() == {
        *("turns/mean", "turns/max", "turns/calls", "turns/lost_frac", "turns/cut_frac", "turns/given_tokens")
    }


@pytest.mark.parametrize(
    ("stop", "lost", "cut"),
    [
        ("stop", 0, 0),
        ("done", 0, 0),
        ("length", 0, 1),
        ("turns", 0, 1),
        ("context", 0, 1),
        ("deadline", 1, 0),
        ("env_error", 1, 0),
    ],
)
def test_every_end_is_complete_cut_or_lost(stop: Any, lost: float, cut: float) -> None:
    found = turn_metrics([episode("p", says(), stop_reason=stop)])
    assert (found["turns/lost_frac"], found["turns/cut_frac"]) == (lost, cut)


def test_every_number_is_in_the_registry_under_its_own_name() -> None:
    for name in turn_metrics(EPISODES):
        key = find(name)
        assert key is not None and key.name == name
    assert find("turns/max").reduce == "max"  # pyright: ignore[reportOptionalMemberAccess]
