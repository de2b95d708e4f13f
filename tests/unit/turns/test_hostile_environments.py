"""Environments that misbehave: the run says what happened, goes on by rule, and trains on what was played."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, nullcontext

import pytest
from chat_templates import codec_of
from test_player import LetterCodec, ScriptedSampler, ids

from gruppo.errors import InputError
from gruppo.sampler.base import SamplingParams
from gruppo.turns import Answer, Environment, environments_of
from gruppo.turns.calls import mistral
from gruppo.turns.player import Player, TurnLimits
from gruppo.types import Prompt

OVER = Answer(is_over=True)
LATER = SamplingParams(max_new_tokens=50, step=9, seed=7)


class Ends(Environment):
    def step(self, message):
        return OVER


def prompt(**columns):
    return Prompt(token_ids=ids("p"), text="p", source=[{"role": "user", "content": "p"}], columns=columns)


def play(make, turns=("a",), *, num_samples=1, rounds=1, given=None, codec=None, **limits):
    """The episodes of as many steps, each of the same turns."""
    environments = environments_of(make)
    player = Player(environments, {"": codec or LetterCodec()}, TurnLimits(turn_deadline=0.3, **limits))
    sampler = ScriptedSampler([[list(turns)] * num_samples])
    with closing(player):
        played = [
            player.play(sampler, [given or prompt()], num_samples, LATER, lambda stage: nullcontext())
            for _ in range(rounds)
        ]
    return [episode for (group,) in played for episode in group]


def answering(*messages):
    return type("Answering", (Environment,), {"step": lambda self, message: Answer(messages=messages)})


def beginning(messages):
    return type("Beginning", (Ends,), {"reset": lambda self, row, seed: messages})


# --- what an environment is given -------------------------------------------------------------------------------------


def test_an_environment_that_changes_its_row_changes_no_other_episode_and_no_reward():
    seen = []

    class Changes(Ends):
        def reset(self, row, seed):
            seen.append((row["prompt"][0]["content"], list(row["cards"])))
            row["prompt"][0]["content"] = "easy"
            row["cards"].pop()

    lock = threading.Lock()  # has no copy
    given = prompt(cards=[1, 2], lock=lock)
    play(Changes, num_samples=2, given=given)
    assert seen == [("p", [1, 2])] * 2
    assert (given.source, given.columns) == ([{"role": "user", "content": "p"}], {"cards": [1, 2], "lock": lock})


def test_what_the_policy_said_stays_when_its_environment_changes_the_message():
    class Changes(Environment):
        def step(self, message):
            message["content"] = "right"
            message["tool_calls"][0]["function"]["arguments"]["items"].sort()
            return OVER

    class Calls(LetterCodec):
        def parse(self, tokens):
            call = {"type": "function", "function": {"name": "sort", "arguments": {"items": [3, 1]}}}
            return super().parse(tokens) | {"tool_calls": [call]}

    (episode,) = play(Changes, codec=Calls())
    assert episode.text == "a"
    assert episode.messages[0]["tool_calls"][0]["function"]["arguments"] == {"items": [3, 1]}


def test_a_prompt_that_its_environment_changes_later_stays():
    said = [{"role": "user", "content": "q"}]

    class Changes(Environment):
        def reset(self, row, seed):
            return said

        def step(self, message):
            said[0]["content"] = "changed"
            return OVER

    (episode,) = play(Changes)
    assert (episode.prompt.text, episode.prompt.source) == ("q", [{"role": "user", "content": "q"}])


# --- what it returns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"role": "user"}, r"answered with dict {'role': 'user'}; a message has a role and content, which are text"),
        ({"role": "user", "content": None}, "which are text"),
        ({"role": "user", "content": b"x"}, "which are text"),
        ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "which are text"),
        ({"content": "x"}, "which are text"),
        ("x", "answered with str 'x'; a message"),
        ({"role": "assistant", "content": "x"}, "a message of the role 'assistant', the policy's own; give 'user'"),
    ],
)
def test_an_answer_that_is_no_message_is_refused_by_name(message, reason):
    with pytest.raises(InputError, match=f"step of Answering answered with .*{reason.removeprefix('answered with ')}"):
        play(answering(message))


@pytest.mark.parametrize("messages", ["hello", None, {"role": "user", "content": "x"}])
def test_messages_that_are_no_list_are_refused(messages):
    class Alone(Environment):
        def step(self, message):
            return Answer(messages=messages)

    with pytest.raises(InputError, match=r"step of Alone answered with \w+ .*; give a list of messages"):
        play(Alone)


@pytest.mark.parametrize("message", [{"role": "user"}, {"role": "user", "content": None}, {"content": "x"}])
def test_a_prompt_of_half_messages_is_refused_by_name(message):
    with pytest.raises(InputError, match=r"reset of Beginning returned a message without a role or content: dict \{"):
        play(beginning([message]))


def test_an_empty_prompt_is_refused_by_name():
    with pytest.raises(InputError, match=r"reset of Beginning returned list \[\]; return a list of messages, or None"):
        play(beginning([]))


def test_a_prompt_and_an_answer_can_be_encoded():
    (episode,) = play(beginning([{"role": "user", "content": "a\ud83d"}]))
    assert (episode.prompt.text, episode.prompt.source[0]["content"]) == ("a?", "a?")
    (episode,) = play(answering({"role": "tool", "name": "\ud83d", "content": "b\ud83d"}), ["a"] * 10)
    assert (episode.messages[1]["name"], episode.messages[1]["content"]) == ("?", "b?")


def test_one_answer_object_may_be_returned_again_and_again():
    episodes = play(answering({"role": "user", "content": "B"}), ["a"] * 10, num_samples=2)
    assert [(len(e.messages), e.stop_reason, e.text) for e in episodes] == [(20, "turns", "a")] * 2


def test_an_answer_of_50_mb_is_cut():
    (episode,) = play(answering({"role": "user", "content": "B" * 50_000_000}), ["a"] * 10)
    assert len(episode.messages[1]["content"]) == 20_058


def test_a_prompt_of_50_mb_loses_its_episode_and_is_not_tokenised():
    class Never(LetterCodec):
        def first(self, messages):
            raise AssertionError

    flood = beginning([{"role": "user", "content": "B" * 50_000_000}])
    (episode,) = play(flood, codec=Never(), max_context=1000)
    assert episode.stop_reason == "env_error"
    assert episode.error == "reset gave a prompt of 50000000 characters for a context of 1000 tokens; give less"
    (episode,) = play(beginning([{"role": "user", "content": "B" * 900}]), max_context=1000)
    assert episode.stop_reason == "done"


def test_an_id_that_the_template_would_refuse_is_replaced():
    """The policy writes it: that must not end the run."""
    for text in ("[TOOL_CALLS]add[CALL_ID]x[ARGS]{}", '[TOOL_CALLS] [{"name": "add", "arguments": {}, "id": "x_y"}]'):
        (call,) = mistral(text)[1]
        assert call["id"] == "call00000"
        tail = [{"role": "tool", "name": "add", "tool_call_id": call["id"], "content": "3"}]
        assert len(codec_of("nine").between(None, tail)) > 3


# --- what it raises ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
def test_what_is_raised_is_told_as_it_is(kind, is_async):
    """And at once: none of these is a late answer."""

    class Raises(Environment):
        def step(self, message):
            raise kind

    class RaisesAsync(Environment):
        async def step(self, message):
            raise kind

    (episode,) = play(RaisesAsync if is_async else Raises)
    assert episode.stop_reason == "env_error" and kind.__name__ in episode.error


def test_a_task_that_exits_leaves_the_event_loop_alone():
    async def leave():
        sys.exit(3)

    class Leaves(Environment):
        async def step(self, message):
            await asyncio.create_task(leave())

    first, second = play(Leaves, rounds=2)
    assert first.stop_reason == second.stop_reason == "env_error"
    assert "SystemExit: 3" in first.error


def test_a_method_that_stops_the_event_loop_is_answered_all_the_same():
    class Stops(Environment):
        async def step(self, message):
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0)
            return OVER

    assert [episode.stop_reason for episode in play(Stops, num_samples=2, rounds=2)] == ["done"] * 4


def test_an_object_that_cannot_be_made_again_loses_its_episode():
    class Once(Ends):
        made = 0

        def __init__(self):
            Once.made += 1
            if Once.made == 3:
                raise OSError("no port is left")

    episodes = play(Once, num_samples=2)
    assert sorted(episode.stop_reason for episode in episodes) == ["done", "env_error"]
    assert any("no port is left" in episode.error for episode in episodes)


def test_an_object_that_cannot_be_closed_is_refused_before_the_run():
    class Stays(Ends):
        def close(self):
            raise OSError("busy")

    with pytest.raises(InputError, match=r"environment .*Stays cannot be closed: OSError: busy"):
        environments_of(Stays)


def test_one_object_for_two_episodes_is_refused():
    only = Ends()
    with pytest.raises(InputError, match="environment Ends: the same object was made for two episodes"):
        play(lambda: only, num_samples=2)
    assert len(play(lambda: Ends(), num_samples=2)) == 2


# --- what it does to the process --------------------------------------------------------------------------------------


def test_an_environment_that_changes_the_folder_leaves_the_run_in_its_own(tmp_path):
    class Moves(Ends):
        def step(self, message):
            os.chdir(tmp_path)
            return OVER

    home = os.getcwd()
    try:
        play(Moves)
        assert os.getcwd() == home
    finally:
        os.chdir(home)


def is_gone(child):
    for _ in range(250):
        if os.waitpid(child, os.WNOHANG)[0]:
            return True
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork where threads run, which is the point
@pytest.mark.parametrize("way", ["sync", "async", "raises", "to_thread"])
def test_a_copy_of_the_run_that_an_environment_has_forked_ends_when_it_returns(way):
    children = []

    def fork():
        child = os.fork()
        if child:
            children.append(child)
        elif way == "raises":
            raise ValueError
        return OVER

    class Forks(Environment):
        def step(self, message):
            return fork()

    class ForksAsync(Environment):
        async def step(self, message):
            return await asyncio.to_thread(fork) if way == "to_thread" else fork()

    (episode,) = play(Forks if way in ("sync", "raises") else ForksAsync)
    (child,) = children
    assert is_gone(child)
    assert episode.stop_reason == "done"


def test_a_call_of_to_thread_that_hangs_does_not_keep_the_process():
    script = """if True:
        import asyncio, time
        from gruppo.turns.player import Player
        async def hang():
            await asyncio.to_thread(time.sleep, 60)
        player = Player(None, {})
        print(player._within([hang], [0.1], poll=lambda: None))
        player.close()
    """
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0 and ran.stdout.startswith("[<object object"), ran.stderr
