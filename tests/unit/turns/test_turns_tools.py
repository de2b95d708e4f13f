"""Tools: functions as TRL's `tools=[...]` takes them; what the model is told of them, and what it is answered."""

import asyncio
import functools
import json
import subprocess
import sys
import threading
import time
import types

import pytest

from gruppo.errors import InputError
from gruppo.turns import environments_of, tool_schema
from gruppo.turns.ask import CallThread, ask


def multiply(a: int, b: int) -> int:
    """
    Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


async def fetch(city: str, unit: str = "C") -> dict[str, str]:
    """Tell the weather.

    Args:
        city: Where.
        unit: C or F.
    """
    await asyncio.sleep(0)
    return {"city": city, "unit": unit}


def raising(text: str) -> str:
    """Refuse.

    Args:
        text: Anything.
    """
    raise ValueError(f"not {text}")


MULTIPLY = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two whole numbers.",
        "parameters": {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "description": "The first number."},
                "b": {"type": "integer", "description": "The second number."},
            },
            "required": ["a", "b"],
        },
        "return": {"type": "integer", "description": "The product."},
    },
}


def called(name, arguments, **more):
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def answered(tools, *calls):
    """What an environment of these tools answers a turn with these calls."""
    environment = environments_of(tools=tools).factories[""]()
    turn = {"role": "assistant", "content": ""} | ({"tool_calls": list(calls)} if calls else {})
    return asyncio.run(environment.step(turn))


def told(tools, call):
    """The text of the one answer, which must be an error."""
    (message,) = answered(tools, call).messages
    assert message["is_error"] is True
    return message["content"]


def test_the_schema_is_that_of_transformers():
    environments = environments_of(tools=[multiply])
    assert environments.tools == {"": (MULTIPLY,)}
    assert environments.factories[""]().tools == (MULTIPLY,)
    assert not environments.gives_reward and environments.key({}) == ""


def test_tools_alone_leave_the_prompt_and_give_no_reward():
    environment = environments_of(tools=[multiply]).factories[""]()

    async def play():
        return (
            await environment.reset({"prompt": "2*3="}, seed=1),
            await environment.reward(),
            await environment.close(),
        )

    assert asyncio.run(play()) == (None, None, None)


def test_no_tools_and_no_environment_are_no_turns():
    assert environments_of() is None


def test_calls_of_a_turn_are_answered_in_order_as_one_tail():
    answer = answered(
        [multiply, fetch],
        called("fetch", {"city": "Rome"}, id="call_1"),
        called("multiply", '{"a": 6, "b": 7}'),
    )
    assert answer.messages == (
        {"role": "tool", "name": "fetch", "content": "{'city': 'Rome', 'unit': 'C'}", "tool_call_id": "call_1"},
        {"role": "tool", "name": "multiply", "content": "42"},
    )
    assert not answer.is_over and answer.reward is None


def test_a_turn_without_calls_ends_the_episode():
    answer = answered([multiply])
    assert answer.messages == ()


def test_what_a_tool_raises_is_its_answer():
    answer = answered([raising, multiply], called("raising", {"text": "now"}), called("multiply", {"a": 2, "b": 3}))
    assert answer.messages == (
        {"role": "tool", "name": "raising", "content": '{"error": "not now"}', "is_error": True},
        {"role": "tool", "name": "multiply", "content": "6"},
    )
    assert not answer.is_over


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (called("multiplx", {}), "no tool is called 'multiplx' (did you mean 'multiply'?); tools: multiply"),
        (called("multiply", {"a": 1}), "'multiply' needs the argument 'b'; it takes a, b"),
        (called("multiply", {"a": 1, "b": 2, "c": 3}), "'multiply' has no argument 'c'; it takes a, b"),
        (called("multiply", [1, 2]), "the arguments of 'multiply' must be an object with names, got [1, 2]"),
        (
            called("multiply", "{a: 1}"),
            "the arguments of 'multiply' are not JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1)",
        ),
        ({"error": "no JSON after <tool_call>"}, "no JSON after <tool_call>"),
    ],
)
def test_a_wrong_call_is_answered_with_the_reason(call, error):
    assert json.loads(told([multiply], call)) == {"error": error}


def test_a_call_that_could_not_be_read_is_of_an_unknown_tool():
    (message,) = answered([multiply], {"error": "no JSON"}).messages
    assert message["name"] == "unknown"


def test_an_error_without_text_has_its_name():
    def broken(x: int) -> int:
        """Break.

        Args:
            x: A number.
        """
        raise RuntimeError

    assert told([broken], called("broken", {"x": 1})) == '{"error": "RuntimeError"}'


@pytest.mark.parametrize("kind", [SystemExit, StopIteration])
def test_a_tool_that_exits_is_an_error_like_others(kind):
    """Neither may reach the event loop: one would end it, and the other cannot be held by a future."""

    def leave(code: int) -> int:
        """Leave.

        Args:
            code: A number.
        """
        raise kind(code)

    async def leave_async(code: int) -> int:
        """Leave.

        Args:
            code: A number.
        """
        sys.exit(code)

    assert told([leave], called("leave", {"code": 3})) == f'{{"error": "{kind.__name__}: 3"}}'
    assert told([leave_async], called("leave_async", {"code": 3})) == '{"error": "SystemExit: 3"}'


def test_a_long_answer_is_cut_with_a_note():
    def flood(times: int) -> str:
        """Flood.

        Args:
            times: How often.
        """
        return "x" * times

    (message,) = answered([flood], called("flood", {"times": 20_000})).messages
    assert message["content"] == "x" * 20_000
    (message,) = answered([flood], called("flood", {"times": 20_001})).messages
    assert message["content"] == "x" * 20_000 + "\n... (20001 characters; only the first 20000 are shown)"


def test_an_answer_can_be_encoded():
    def odd(x: int) -> str:
        """Return half of a pair.

        Args:
            x: A number.
        """
        return "a\ud83d"

    (message,) = answered([odd], called("odd", {"x": 1})).messages
    assert message["content"] == "a?"


def test_a_result_that_cannot_be_written_is_an_error():
    class Mute:
        def __str__(self):
            raise ValueError("mute")

    def silent(x: int) -> object:
        """Return something.

        Args:
            x: A number.
        """
        return Mute()

    assert told([silent], called("silent", {"x": 1})) == '{"error": "mute"}'


class Shop:
    def __init__(self):
        self.sold = []

    def sell(self, function: str, self_service: bool = False) -> str:
        """Sell a thing.

        Args:
            function: What it is for.
            self_service: Whether nobody helps.
        """
        self.sold.append(function)
        return f"{len(self.sold)} sold"


def test_methods_are_tools_and_arguments_may_have_any_name():
    shop = Shop()
    (message,) = answered([shop.sell], called("sell", {"function": "tea"})).messages
    assert message["content"] == "1 sold" and shop.sold == ["tea"]


def test_what_a_partial_has_bound_is_not_shown_and_not_taken():
    for bound in (functools.partial(multiply, b=7), functools.partial(multiply, 7)):
        free = "a" if bound.keywords else "b"
        parameters = tool_schema(bound)["function"]["parameters"]
        assert list(parameters["properties"]) == parameters["required"] == [free]
        (message,) = answered([bound], called("multiply", {free: 6})).messages
        assert message["content"] == "42"
        other = "b" if free == "a" else "a"
        assert f"has no argument '{other}'" in told([bound], called("multiply", {free: 6, other: 1}))


def test_tools_by_name(monkeypatch):
    module = types.ModuleType("my_tools")
    module.multiply = multiply
    monkeypatch.setitem(sys.modules, "my_tools", module)
    assert environments_of(tools=["my_tools:multiply"]).tools == {"": (MULTIPLY,)}
    with pytest.raises(InputError, match="no 'multiplx' for tool 'my_tools:multiplx'"):
        environments_of(tools=["my_tools:multiplx"])


def untyped(a, b: int):
    """Add.

    Args:
        a: One.
        b: Another.
    """


def undocumented(a: int):
    return a


def half_documented(a: int, b: int):
    """Add.

    Args:
        a: One.
    """


def by_position(a: int, /):
    """Add.

    Args:
        a: One.
    """


@pytest.mark.parametrize(
    ("tool", "reason"),
    [
        (untyped, "tool 'untyped' cannot be described to the model: Argument a is missing a type hint"),
        (undocumented, "because it has no docstring"),
        (half_documented, "no description for the argument 'b'; give each parameter a type hint, and the docstring"),
        (by_position, "takes a: int, which a call cannot give by name"),
        (Shop, "is not a function; give a function, a method or a functools.partial"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused(tool, reason):
    with pytest.raises(InputError, match=reason):
        environments_of(tools=[tool])


def test_tools_that_share_a_name_are_refused():
    with pytest.raises(InputError, match="two tools have the name 'multiply'"):
        environments_of(tools=[multiply, functools.partial(multiply, b=2)])


def test_one_tool_without_a_list_is_refused():
    with pytest.raises(InputError, match="is one tool; give a list"):
        environments_of(tools=multiply)


def test_a_sync_tool_does_not_hold_the_event_loop():
    """Eight sleeps of 0.2 s, more than the threads of asyncio's own pool on two cores, take the time of one."""

    def wait(seconds: float) -> str:
        """Wait.

        Args:
            seconds: How long.
        """
        time.sleep(seconds)
        return "done"

    made = environments_of(tools=[wait]).factories[""]
    turn = {"role": "assistant", "content": "", "tool_calls": [called("wait", {"seconds": 0.2})]}

    async def play():
        ticks = 0
        steps = asyncio.gather(*[made().step(turn) for _ in range(8)])
        while not steps.done():
            await asyncio.sleep(0.01)
            ticks += 1
        return ticks, steps.result()

    began = time.perf_counter()
    ticks, answers = asyncio.run(play())
    assert time.perf_counter() - began < 1.0  # 1.6 s one after the other
    assert ticks >= 5
    assert [answer.messages[0]["content"] for answer in answers] == ["done"] * 8


def test_a_call_that_is_given_up_leaves_the_loop_alone():
    """Its result comes later, to nobody; the next call does not wait for it."""
    release, ended = threading.Event(), threading.Event()
    complaints = []

    def hang():
        release.wait(20)
        ended.set()

    async def play():
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ask(hang), 0.05)
        five = await asyncio.wait_for(ask(lambda: 5), 5)
        release.set()
        while not ended.is_set():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        return five

    assert asyncio.run(play()) == 5
    assert complaints == []


def test_a_call_that_hangs_does_not_keep_the_process():
    call = "asyncio.run(asyncio.wait_for(ask(time.sleep, 60), 0.1))"
    script = f"import asyncio, time; from gruppo.turns.ask import ask; {call}"
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 1 and ran.stderr.strip().endswith("TimeoutError")


def test_one_call_thread_makes_all_calls_and_ends_with_its_object():
    async def play():
        calls = CallThread()
        return {await calls.ask(threading.get_ident) for _ in range(5)}, {await ask(threading.get_ident)}

    same, other = asyncio.run(play())
    assert len(same) == 1 and same != other and threading.get_ident() not in same | other
    deadline = time.monotonic() + 5
    while (alive := same & {thread.ident for thread in threading.enumerate()}) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive
