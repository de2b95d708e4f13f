"""Player: episodes in rounds, their limits, and environments that fail. A script is sampled; letters are tokens."""

import sys
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext

import pytest

from gruppo.errors import InputError, RewardError
from gruppo.sampler.base import Sampler, SamplingParams
from gruppo.turns import Answer, Environment
from gruppo.turns.environment import Environments
from gruppo.turns.player import Player, TurnLimits
from gruppo.types import Prompt, Trajectory

END, OPEN, CLOSE = 0, 1, 2


def ids(text):
    return tuple(map(ord, text))


class LetterCodec:
    """A turn is its letters and END; an answer stands between OPEN and CLOSE."""

    stop_ids = (END,)

    def first(self, messages):
        text = "/".join(message["content"] for message in messages)
        return ids(text), text

    def parse(self, tokens):
        return {"role": "assistant", "content": "".join(chr(t) for t in tokens if t != END)}

    def between(self, last, tail):
        text = "".join(message["content"] for message in tail)
        return (*(() if last == END else (END,)), OPEN, *ids(text), CLOSE)


class ScriptedSampler(Sampler):
    """Writes the turns of a script, `script[prompt][sample]`, cut at the limit of the request; token t has logp -t."""

    def __init__(self, script):
        super().__init__(tokenizer=None)
        self.script = script
        self.asked = []

    def submit(self, requests, params):
        self.asked.append(list(requests))
        futures = []
        for request in requests:
            made = []
            for i in range(request.num_samples):
                turns = self.script[request.number][request.first + i]
                played = request.prompt.token_ids.count(CLOSE)
                tokens = (*ids(turns[played]), END)
                limit = request.limit(params)
                made.append(
                    Trajectory(
                        prompt=request.prompt,
                        tokens=tokens[:limit],
                        logps=tuple(-float(t) for t in tokens[:limit]),
                        entropies=(0.5,) * len(tokens[:limit]),
                        versions=(played + 3, played + 3),
                        text=turns[played],
                        stop_reason="stop" if len(tokens) <= limit else "length",
                    )
                )
            future = Future()
            future.set_result(tuple(made))
            futures.append(future)
        return futures


class Echo(Environment):
    """Answers each turn with its text in capitals, until one is "bye"."""

    def step(self, message):
        if message["content"] == "bye":
            return Answer(is_over=True, reward=1.0)
        return Answer(messages=({"role": "user", "content": message["content"].upper()},), reward=0.25)


PLAYERS = []


@pytest.fixture(autouse=True)
def closed_players():
    yield
    while PLAYERS:
        PLAYERS.pop().close()


def play(script, make=Echo, num_samples=1, *, player=None, params=None, **limits):
    environments = Environments({"": make}, {"": ()}, gives_reward=True)
    player = player or Player(environments, {"": LetterCodec()}, TurnLimits(**limits))
    PLAYERS.append(player)
    prompts = [Prompt(token_ids=ids("p"), text="p", source="p", index=i) for i in range(len(script))]
    sampler = ScriptedSampler(script)
    params = params or SamplingParams(max_new_tokens=50, step=1, seed=7)
    groups = player.play(sampler, prompts, num_samples, params, lambda stage: nullcontext())
    return [trajectory for group in groups for trajectory in group], sampler, player


def test_an_episode_is_one_sequence_in_which_the_policys_tokens_are_marked():
    (episode,), _, _ = play([[["ab", "bye"]]])
    assert episode.tokens == (97, 98, END, OPEN, 65, 66, CLOSE, 98, 121, 101, END)
    assert episode.sampled == (True,) * 3 + (False,) * 4 + (True,) * 4
    assert episode.logps == (-97, -98, 0, -98, -121, -101, 0)
    assert episode.entropies == (0.5,) * 7
    assert episode.versions == (3, 4)
    assert (episode.text, episode.stop_reason, episode.env_reward) == ("bye", "done", 1.25)
    assert [(m["role"], m["content"]) for m in episode.messages] == [
        ("assistant", "ab"),
        ("user", "AB"),
        ("assistant", "bye"),
    ]


def test_a_later_turn_goes_on_where_the_draws_before_it_ended():
    _, sampler, _ = play([[["ab", "bye"], ["c", "bye"]]], num_samples=2)
    (first,), second = sampler.asked
    assert (first.num_samples, first.position, first.max_new_tokens) == (2, 0, 50)
    assert [(r.first, r.num_samples, r.position, r.max_new_tokens) for r in second] == [(0, 1, 7, 47), (1, 1, 5, 48)]
    assert second[1].prompt.token_ids == (*ids("p"), 99, END, OPEN, 67, CLOSE)
    assert {(r.seed, r.step, r.number) for r in second} == {(7, 1, 0)}


@pytest.mark.parametrize(
    ("limits", "reason", "num_turns", "num_tokens"),
    [
        ({"max_turns": 2}, "turns", 2, 10),
        ({"max_context": 13}, "context", 2, 10),
        ({"max_context": 16}, "context", 3, 15),
        ({"max_turn_tokens": 2}, "length", 1, 2),
    ],
)
def test_an_episode_is_cut_at_each_limit(limits, reason, num_turns, num_tokens):
    (episode,), _, _ = play([[["ab"] * 9]], **limits)
    own = [m for m in episode.messages if m["role"] == "assistant"]
    assert (episode.stop_reason, len(own), len(episode.tokens)) == (reason, num_turns, num_tokens)
    assert episode.is_truncated and not episode.is_lost


def test_all_turns_together_have_the_token_limit_of_a_completion():
    (episode,), _, _ = play([[["ab"] * 9]], params=SamplingParams(max_new_tokens=7, step=1))
    assert (episode.stop_reason, episode.num_sampled, sum(episode.sampled)) == ("length", 7, 7)


class Gives(Environment):
    """What a test wants its methods to do."""

    made = 0

    def __init__(self):
        type(self).made += 1


def test_an_environment_that_fails_loses_its_episode_alone():
    class Fails(Echo):
        def step(self, message):
            if message["content"] == "x":
                raise ValueError("no x")
            return super().step(message)

    found, _, _ = play([[["x"], ["ab", "bye"]]], Fails, num_samples=2)
    lost, whole = found
    assert lost.is_lost and lost.stop_reason == "env_error" and lost.env_reward is None
    assert "no x" in lost.error and "Fails" not in lost.text
    assert (whole.stop_reason, whole.env_reward) == ("done", 1.25)


@pytest.mark.parametrize("method", ["reset", "step", "reward"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_late_answer_loses_the_episode_with_the_name_of_the_deadline(method, is_async):
    forever = threading.Event()

    def hangs(self, *_):
        forever.wait()

    async def hangs_async(self, *_):
        import asyncio

        await asyncio.Event().wait()

    class Hangs(Echo):
        calls = 0

        def __getattribute__(self, name):
            own = super().__getattribute__(name)
            if name == method and not is_second(self):
                return (hangs_async if is_async else hangs).__get__(self)
            return own

    order = []

    def is_second(env):
        if env not in order:
            order.append(env)
        return order.index(env) > 0

    found, _, _ = play([[["bye"]], [["bye"]]], Hangs, turn_deadline=0.2)
    forever.set()
    assert sorted(t.stop_reason for t in found) == ["deadline", "done"]
    (lost,) = [t for t in found if t.is_lost]
    assert lost.error == f"{method} took longer than turn_deadline=0.2 s"


def test_a_method_that_blocks_the_event_loop_is_late_and_the_next_step_is_played():
    release = threading.Event()

    class Blocks(Echo):
        async def step(self, message):
            if message["content"] == "x":
                release.wait()
            return Answer(is_over=True)

    later = SamplingParams(max_new_tokens=50, step=9)  # a first step without one whole episode would end the run
    found, _, player = play([[["x"], ["a"]]], Blocks, num_samples=2, params=later, turn_deadline=0.1)
    assert "deadline" in {t.stop_reason for t in found}
    release.set()
    found, _, _ = play([[["a"]]], player=player)
    assert [t.stop_reason for t in found] == ["done"]


def test_sys_exit_in_an_environment_ends_its_episode_and_nothing_else():
    class Leaves(Echo):
        def step(self, message):
            if message["content"] == "x":
                sys.exit(3)
            return super().step(message)

    found, _, _ = play([[["x"], ["bye"]]], Leaves, num_samples=2)
    assert [t.stop_reason for t in found] == ["env_error", "done"]
    assert "SystemExit" in found[0].error


def test_a_first_step_without_one_whole_episode_ends_the_run_with_the_traceback():
    class Fails(Echo):
        def reset(self, row, seed):
            raise OSError("no display")

    with pytest.raises(RewardError, match=r"(?s)failed in 2 of 2 episodes \(0 late, 2 with an error\).*no display"):
        play([[["a"], ["a"]]], Fails, num_samples=2)


def test_a_run_ends_when_a_fifth_of_its_episodes_are_lost():
    class Fails(Echo):
        def step(self, message):
            if message["content"] == "x":
                raise OSError("gone")
            return super().step(message)

    params = SamplingParams(max_new_tokens=50, step=9)
    script = [[["x"]] * 8 + [["bye"]] * 24]
    _, _, player = play(script, Fails, num_samples=32, params=params)
    with pytest.raises(RewardError, match=r"16 of 64 are lost in this run, which may lose 20%"):
        play(script, Fails, num_samples=32, params=params, player=player)


def test_environments_are_made_once_and_play_again_unless_their_episode_was_lost():
    closed = []

    class Counts(Echo):
        made = 0

        def __init__(self):
            Counts.made += 1

        def step(self, message):
            if message["content"] == "x":
                raise ValueError
            return super().step(message)

        def close(self):
            closed.append(self)

    params = SamplingParams(max_new_tokens=50, step=9)
    _, _, player = play([[["bye"], ["bye"], ["x"]]], Counts, num_samples=3, params=params)
    play([[["bye"], ["bye"], ["bye"]]], player=player, num_samples=3, params=params)
    assert Counts.made == 4
    player.close()
    assert len(closed) == 4


def test_all_episodes_of_a_group_begin_with_one_seed_and_groups_with_others():
    seeds = []

    class Notes(Echo):
        def reset(self, row, seed):
            seeds.append((row["prompt"], seed))

    play([[["bye"], ["bye"]], [["bye"], ["bye"]]], Notes, num_samples=2)
    assert len({seed for _, seed in seeds}) == 2 and all(0 <= seed < 2**31 for _, seed in seeds)


def test_an_environment_may_give_the_prompt():
    class Asks(Echo):
        def reset(self, row, seed):
            return [{"role": "user", "content": f"{row['prompt']}?"}]

    (episode,), sampler, _ = play([[["bye"]]], Asks)
    assert (episode.prompt.token_ids, episode.prompt.text, episode.prompt.index) == (ids("p?"), "p?", 0)
    assert sampler.asked[0][0].prompt.token_ids == ids("p?")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("hello", r"step of Wrong must return a gruppo.turns.Answer, got str"),
        (Answer(is_over=True, reward=float("nan")), r"step of Wrong gave the reward nan; give a finite number"),
        (Answer(is_over=True, reward="high"), r"step of Wrong gave the reward 'high', no number"),
    ],
)
def test_an_answer_of_a_wrong_kind_is_refused_by_name(answer, message):
    class Wrong(Echo):
        def step(self, _):
            return answer

    with pytest.raises(InputError, match=message):
        play([[["a"]]], Wrong)


def test_stopping_while_an_environment_is_awaited_is_heard():
    class Stop(Exception):
        pass

    asked = threading.Event()
    release = threading.Event()

    class Waits(Echo):
        def step(self, message):
            asked.set()
            release.wait()

    def poll():
        if asked.is_set():
            raise Stop

    environments = Environments({"": Waits}, {"": ()})
    player = Player(environments, {"": LetterCodec()}, TurnLimits(), poll=poll)
    started = time.monotonic()
    with pytest.raises(Stop):
        play([[["a"]]], player=player)
    release.set()
    assert time.monotonic() - started < 20  # not the deadline of 30 s
