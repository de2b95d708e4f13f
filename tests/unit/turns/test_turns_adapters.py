"""Environments of TRL's, Gymnasium's, SkyRL's and gruppo's own kind, unchanged: literal messages, tools and rewards."""

import asyncio
import random
import sqlite3
import sys
import threading
import types
from typing import ClassVar

import pytest
from test_turns_tools import MULTIPLY, called, fetch, multiply

from gruppo.errors import InputError
from gruppo.turns import Answer, Environment, environments_of, tool_schema

ROW = {"prompt": [{"role": "user", "content": "Count to 2."}], "goal": 2}


def turn(*calls, content=""):
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def say(content):
    return {"role": "assistant", "content": content}


class Counter:
    """TRL's kind."""

    made: ClassVar[int] = 0

    def __init__(self):
        type(self).made += 1
        self.resets = 0

    def reset(self, **row) -> str | None:
        self.row, self.count = row, 0
        self.resets += 1
        return f" This is game {self.resets}."

    def increment(self, by: int = 1) -> int:
        """Add to the counter.

        Args:
            by: How much.

        Returns:
            The counter.
        """
        self.count += by
        return self.count

    @staticmethod
    def help() -> str:
        """Tell the rules."""
        return "count"

    @property
    def private(self):
        raise AssertionError("properties are not read")

    def _hidden(self):
        pass

    def get_reward(self) -> float:
        return float(self.count == self.row["goal"])


INCREMENT = {
    "type": "function",
    "function": {
        "name": "increment",
        "description": "Add to the counter.",
        "parameters": {"type": "object", "properties": {"by": {"type": "integer", "description": "How much."}}},
        "return": {"type": "integer", "description": "The counter."},
    },
}
HELP = {
    "type": "function",
    "function": {
        "name": "help",
        "description": "Tell the rules.",
        "parameters": {"type": "object", "properties": {}},
        "return": {"type": "string"},
    },
}


def test_a_class_of_trl_plays_two_episodes_with_one_instance():
    environments = environments_of(factory=Counter)
    assert environments.tools == {"": (HELP, INCREMENT)}
    assert environments.gives_reward
    environment = environments.factories[""]()
    made = Counter.made

    async def play():
        first = await environment.reset(ROW, seed=1)
        answers = [
            await environment.step(turn(called("increment", {"by": 1}), called("increment", {}))),
            await environment.step(turn(called("help", {}), called("reset", {}), called("get_reward", {}))),
            await environment.step(say("2")),
        ]
        rewards = [await environment.reward()]
        second = await environment.reset(ROW, seed=1)
        rewards.append(await environment.reward())
        return first, answers, second, rewards

    first, answers, second, rewards = asyncio.run(play())
    assert first == [{"role": "user", "content": "Count to 2. This is game 1."}]
    assert ROW["prompt"] == [{"role": "user", "content": "Count to 2."}]
    assert answers[0] == Answer(
        messages=(
            {"role": "tool", "name": "increment", "content": "1"},
            {"role": "tool", "name": "increment", "content": "2"},
        )
    )
    assert [each["content"] for each in answers[1].messages] == [
        "count",
        """{"error": "no tool is called 'reset'; tools: help, increment"}""",
        """{"error": "no tool is called 'get_reward'; tools: help, increment"}""",
    ]
    assert answers[2] == Answer()
    assert second == [{"role": "user", "content": "Count to 2. This is game 2."}]
    assert rewards == [1.0, 0.0]
    assert Counter.made == made + 1
    assert environment.instance.row == ROW


def test_environment_sees_that_a_class_is_of_trl_s_kind():
    assert environments_of(Counter).gives_reward


class Stepper:
    """TRL's kind, with a tool that is called step."""

    def reset(self, **row) -> None:
        return None

    def step(self, direction: str) -> str:
        """Walk.

        Args:
            direction: north or south.
        """
        return f"walked {direction}"


def test_environment_factory_makes_step_a_tool_and_a_class_without_get_reward_has_no_reward():
    environments = environments_of(factory=Stepper)
    assert [tool["function"]["name"] for tool in environments.tools[""]] == ["step"]
    assert not environments.gives_reward
    environment = environments.factories[""]()

    async def play():
        assert await environment.reset(ROW, seed=1) is None
        answer = await environment.step(turn(called("step", {"direction": "north"})))
        return answer, await environment.reward()

    answer, reward = asyncio.run(play())
    assert answer.messages == ({"role": "tool", "name": "step", "content": "walked north"},)
    assert reward is None


def test_a_public_close_of_a_class_of_trl_is_a_tool_which_the_model_alone_calls():
    closed = []

    class Door(Stepper):
        def close(self) -> str:
            """Close the door."""
            closed.append(self)
            return "closed"

    environments = environments_of(factory=Door)
    environment = environments.factories[""]()

    async def play():
        await environment.reset(ROW, seed=1)
        await environment.close()

    asyncio.run(play())
    assert closed == []
    assert [tool["function"]["name"] for tool in environments.tools[""]] == ["close", "step"]


class Weather:
    """TRL's kind, async throughout."""

    async def reset(self, city, **row):
        self.city = city

    async def look(self) -> str:
        """Look out of the window."""
        await asyncio.sleep(0)
        return f"rain in {self.city}"

    async def get_reward(self):
        return None


def test_async_methods_are_awaited_and_a_reward_may_be_none():
    environment = environments_of(factory=Weather).factories[""]()

    async def play():
        assert await environment.reset({**ROW, "city": "Rome"}, seed=1) is None
        return await environment.step(turn(called("look", {}))), await environment.reward()

    answer, reward = asyncio.run(play())
    assert answer.messages == ({"role": "tool", "name": "look", "content": "rain in Rome"},)
    assert reward is None


def test_tools_stand_beside_those_of_a_class_of_trl():
    environments = environments_of(factory=Counter, tools=[multiply])
    assert environments.tools == {"": (MULTIPLY, HELP, INCREMENT)}
    environment = environments.factories[""]()

    async def play():
        await environment.reset(ROW, seed=1)
        return await environment.step(turn(called("multiply", {"a": 2, "b": 3}), called("increment", {"by": 5})))

    assert [each["content"] for each in asyncio.run(play()).messages] == ["6", "5"]


def test_a_column_chooses_among_classes_and_is_not_given_to_reset():
    environments = environments_of(factory={"counter": Counter, "weather": Weather})
    assert environments.tools["counter"] == (HELP, INCREMENT)
    assert [tool["function"]["name"] for tool in environments.tools["weather"]] == ["look"]
    assert environments.gives_reward
    row = {**ROW, "environment": "counter"}
    environment = environments.factories[environments.key(row)]()
    asyncio.run(environment.reset(row, seed=1))
    assert environment.instance.row == ROW


def test_one_class_with_a_reward_among_others_makes_a_reward():
    assert environments_of(factory={"a": Counter, "b": Counter, "c": Stepper}).gives_reward


def test_a_row_without_the_column_or_with_an_unknown_name_is_refused():
    environments = environments_of({"counter": Counter, "guess": "guessing:Guess"} | {"guess": Stepper})
    with pytest.raises(InputError, match="no column 'environment', which chooses among the environments counter, gue"):
        environments.key(ROW)
    with pytest.raises(InputError, match=r"environment='counte' \(did you mean 'counter'\?\); the environments are co"):
        environments.key({"environment": "counte"})
    with pytest.raises(InputError, match="environment=None; the environments are counter, guess"):
        environments.key({"environment": None})


class Guess:
    """Gymnasium's kind: a number from 1 to 9, four guesses."""

    def __init__(self):
        self.closed = 0

    def reset(self, *, seed=None, options=None):
        self.number, self.left, self.options = random.Random(seed).randint(1, 9), 4, options
        return "Guess a number from 1 to 9.", {}

    def step(self, text):
        self.left -= 1
        if int(text) == self.number:
            return "Right.", 1.0, True, False, {}
        hint = "higher" if int(text) < self.number else "lower"
        return f"It is {hint}.", -0.25, False, self.left == 0, {}

    def close(self):
        self.closed += 1


def test_a_gymnasium_game_is_played_to_its_end():
    environments = environments_of(Guess)
    assert environments.tools == {"": ()} and environments.gives_reward
    environment = environments.factories[""]()
    number = random.Random(7).randint(1, 9)
    assert number == 6

    async def play():
        first = await environment.reset({"prompt": "Play.", "goal": 3}, seed=7)
        return first, [await environment.step(say(guess)) for guess in ("9", "1", "6")], await environment.reward()

    first, answers, reward = asyncio.run(play())
    assert first == [{"role": "user", "content": "Play.\n\nGuess a number from 1 to 9."}]
    assert answers == [
        Answer(messages=({"role": "user", "content": "It is lower."},), reward=-0.25),
        Answer(messages=({"role": "user", "content": "It is higher."},), reward=-0.25),
        Answer(reward=1.0, is_over=True),
    ]
    assert reward is None
    assert environment.instance.options == {"prompt": "Play.", "goal": 3}


def test_truncated_ends_a_game_too():
    environment = environments_of(Guess).factories[""]()

    async def play():
        await environment.reset({}, seed=7)
        return [await environment.step(say("1")) for _ in range(4)]

    assert [answer.is_over for answer in asyncio.run(play())] == [False, False, False, True]


SYSTEM = {"role": "system", "content": "You play."}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([SYSTEM], [SYSTEM, {"role": "user", "content": "Guess a number from 1 to 9."}]),
        ([], [{"role": "user", "content": "Guess a number from 1 to 9."}]),
        ([{"role": "user", "content": ""}], [{"role": "user", "content": "Guess a number from 1 to 9."}]),
    ],
)
def test_what_reset_says_is_a_user_s_message(prompt, expected):
    environment = environments_of(Guess).factories[""]()
    assert asyncio.run(environment.reset({"prompt": prompt}, seed=1)) == expected


def test_a_reset_that_says_nothing_leaves_the_prompt():
    class Silent(Guess):
        def reset(self, *, seed=None):
            return "", {}

    environment = environments_of(Silent).factories[""]()
    assert asyncio.run(environment.reset(ROW, seed=1)) == ROW["prompt"]


def test_a_large_seed_is_one_that_numpy_takes():
    class Seeded(Guess):
        def reset(self, *, seed=None):
            self.seed = seed
            return "Go.", {}

    environment = environments_of(Seeded).factories[""]()
    asyncio.run(environment.reset({}, seed=2**63 + 5))
    assert environment.instance.seed == 5


def test_close_reaches_the_object_and_the_one_that_was_tried():
    made = []

    def make():
        made.append(Guess())
        return made[-1]

    environment = environments_of(make).factories[""]()
    assert [each.closed for each in made] == [1]

    async def play():
        await environment.reset({}, seed=1)
        await environment.close()
        await environment.close()

    asyncio.run(play())
    assert [each.closed for each in made] == [1, 1]


class Sky:
    """SkyRL's kind."""

    def init(self, prompt):
        self.turns = 0
        return [*prompt, {"role": "user", "content": "Say a."}], {}

    def step(self, action):
        self.turns += 1
        told = [] if self.turns == 2 else [{"role": "user", "content": f"{action}? Again."}]
        return {"observations": told, "reward": float(action == "a"), "done": self.turns == 2, "metadata": {}}


def test_skyrl_s_init_and_step_are_played():
    environment = environments_of(Sky).factories[""]()

    async def play():
        return await environment.reset({"prompt": [SYSTEM]}, seed=1), [await environment.step(say(x)) for x in "ba"]

    first, answers = asyncio.run(play())
    assert first == [SYSTEM, {"role": "user", "content": "Say a."}]
    assert answers == [
        Answer(messages=({"role": "user", "content": "b? Again."},), reward=0.0),
        Answer(reward=1.0, is_over=True),
    ]


class Echo(Environment):
    """gruppo's own kind."""

    gives_reward = True
    tools = (tool_schema(multiply),)

    def reset(self, row, seed):
        self.said = []
        return [{"role": "user", "content": f"{row['goal']} {seed}"}]

    async def step(self, message):
        self.said.append(message["content"])
        return Answer(messages=({"role": "user", "content": message["content"] * 2},), reward=0.5)

    def reward(self):
        return len(self.said)


def make_echo():
    return Echo()


@pytest.mark.parametrize("given", [Echo, make_echo, "my_env:Echo", "my_env:make_echo"])
def test_an_environment_of_gruppo_s_own(given, monkeypatch):
    module = types.ModuleType("my_env")
    module.Echo, module.make_echo = Echo, make_echo
    monkeypatch.setitem(sys.modules, "my_env", module)
    environments = environments_of(given)
    assert environments.tools == {"": (MULTIPLY,)} and environments.gives_reward
    environment = environments.factories[""]()

    async def play():
        first = await environment.reset(ROW, seed=3)
        return first, await environment.step(say("ab")), await environment.reward()

    first, answer, reward = asyncio.run(play())
    assert first == [{"role": "user", "content": "2 3"}]
    assert answer == Answer(messages=({"role": "user", "content": "abab"},), reward=0.5)
    assert reward == 1.0


def test_an_environment_s_long_answer_is_cut():
    environment = environments_of(Echo).factories[""]()

    async def play():
        await environment.reset(ROW, seed=3)
        return await environment.step(say("x" * 15_000))

    content = asyncio.run(play()).messages[0]["content"]
    assert content == "x" * 20_000 + "\n... (30000 characters; only the first 20000 are shown)"


def returning(**methods):
    """A class of one kind whose methods return these."""
    bases = (Environment,) if methods.pop("own", False) else ()
    body = {name: lambda self, *args, value=value, **row: value for name, value in methods.items()}
    return type("Odd", bases, body)


@pytest.mark.parametrize(
    ("cls", "reason"),
    [
        (returning(reset=[{"type": "text"}]), r"reset of Odd returned list \[.*; return text, or None"),
        (returning(reset=("go", {}), step=(3, 0.0, False, False, {})), "step of Odd returned int 3; return text as"),
        (returning(reset=("go", {}), step=("a", 1.0)), "return .text, reward, terminated, truncated, info."),
        (returning(reset=("go", {}), step=("a", "b", 0, 0, {})), "step of Odd gave the reward str 'b'; give a finite"),
        (returning(reset=("go", {}), step=("a", 1e999, 0, 0, {})), "gave the reward float inf; give a finite number"),
        (returning(reset=(5, {}), step=None), "reset of Odd returned int 5; return .text, info."),
        (returning(own=True, reset="hello"), "reset of Odd returned str 'hello'; return a list of messages, or None"),
        (returning(own=True, reset=None, step=Answer(reward=0.0)), "step of Odd gave a reward; set gives_reward = Tr"),
        (returning(own=True, reset=None, step="hello"), "step of Odd returned str 'hello'; return gruppo.turns.Answer"),
    ],
)
def test_what_an_environment_may_not_return_is_named(cls, reason):
    environment = environments_of(cls).factories[""]()

    async def play():
        await environment.reset(ROW, seed=1)
        await environment.step(say("a"))

    with pytest.raises(InputError, match=reason):
        asyncio.run(play())


class NoServer:
    def __init__(self):
        raise ConnectionError("no server at port 80")


class Exits:
    def __init__(self):
        sys.exit(4)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (NoServer, "environment NoServer cannot be made: ConnectionError: no server at port 80"),
        (Exits, "environment Exits cannot be made: RuntimeError: SystemExit: 4"),
        (lambda size: None, "cannot be made: TypeError: .*missing 1 required positional argument: 'size'"),
        (Echo(), "is one object of type Echo, and a run plays many episodes at a time; give the class"),
        (object, "makes an object of type object with neither reset nor step; give a subclass of gruppo.turns.Env"),
        ({}, r"must have names, which are text, got the keys \[\]"),
        ({3: Counter}, r"must have names, which are text, got the keys \[3\]"),
        ("my_absent_module:Env", "no module 'my_absent_module' for environment"),
    ],
)
def test_what_is_no_environment_is_refused_before_the_run(given, reason):
    with pytest.raises(InputError, match=reason):
        environments_of(given)


@pytest.mark.parametrize("given", [Guess, Echo])
def test_tools_beside_an_environment_that_answers_itself_are_refused(given):
    with pytest.raises(InputError, match=f"tools were given beside the environment {given.__name__}, which answers"):
        environments_of(given, tools=[fetch])


def test_a_tool_and_a_method_of_one_name_are_refused():
    def increment(by: int) -> int:
        """Add.

        Args:
            by: How much.
        """
        return by

    with pytest.raises(InputError, match="two tools have the name 'increment'"):
        environments_of(factory=Counter, tools=[increment])


def test_an_environment_and_a_factory_are_not_given_together():
    with pytest.raises(InputError, match="environment and environment_factory were both given"):
        environments_of(Counter, factory=Counter)


def test_an_environment_is_made_and_called_in_one_thread():
    """SQLite refuses a connection in another thread than the one that opened it."""

    class Database:
        def __init__(self):
            self.base = sqlite3.connect(":memory:")

        def reset(self, **row):
            self.base.execute("create table if not exists sold (name)")

        def sell(self, name: str) -> int:
            """Sell.

            Args:
                name: What.
            """
            self.base.execute("insert into sold values (?)", (name,))
            return self.base.execute("select count(*) from sold").fetchone()[0]

    environment = environments_of(Database).factories[""]()

    async def play():
        await environment.reset(ROW, seed=1)
        calls = [called("sell", {"name": name}) for name in "abc"]
        return await environment.step(turn(*calls))

    assert [each["content"] for each in asyncio.run(play()).messages] == ["1", "2", "3"]


def test_after_a_call_that_hangs_the_next_episode_has_another_object():
    release = threading.Event()
    made = []

    class Hangs(Guess):
        def __init__(self):
            super().__init__()
            made.append(self)

        def step(self, text):
            if text == "hang":
                release.wait(20)
            return super().step(text)

    environment = environments_of(Hangs).factories[""]()
    made.clear()

    async def play():
        await environment.reset({}, seed=7)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(environment.step(say("hang")), 0.05)
        with pytest.raises(RuntimeError, match="an episode begins with reset"):
            await environment.step(say("6"))
        await environment.reset({}, seed=7)
        answer = await asyncio.wait_for(environment.step(say("6")), 5)
        release.set()
        while not made[0].closed:  # once its call returns
            await asyncio.sleep(0.01)
        return answer

    assert asyncio.run(play()) == Answer(reward=1.0, is_over=True)
    assert [each.closed for each in made] == [1, 0]


def test_environments_are_made_where_an_event_loop_runs():
    async def in_a_notebook():
        return environments_of(Guess).gives_reward

    assert asyncio.run(in_a_notebook()) is True
