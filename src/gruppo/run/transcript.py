"""Transcript of an episode for people: its calls as one would write them, its answers, and its end in words."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from gruppo.types import Message, StopReason

STOPS: Mapping[StopReason, str] = {
    "stop": "the model ended it",
    "done": "the environment ended it",
    "length": "cut at the limit of tokens",
    "turns": "cut at the limit of turns",
    "context": "cut at the end of the model's context",
    "deadline": "lost: the environment did not answer in time",
    "env_error": "lost: the environment failed",
}
"""What each stop reason means."""


def num_turns(messages: Sequence[Message]) -> int:
    """Turns of the policy."""
    return sum(message["role"] == "assistant" for message in messages)


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    """Tool calls of a message, those that could not be read among them."""
    return message.get("tool_calls") or ()


def call_text(call: Mapping[str, Any]) -> str:
    """A tool call as one would write it; one that could not be read, with the reason.

    >>> call_text({"function": {"name": "multiply", "arguments": '{"a": 37, "b": 48}'}})
    'multiply(a=37, b=48)'
    >>> call_text({"error": "it is no JSON"})
    'unreadable call: it is no JSON'
    """
    if call.get("error"):
        return f"unreadable call: {call['error']}"
    function = call.get("function")
    function = function if isinstance(function, Mapping) else {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        return f"{function.get('name')}({arguments})"
    given = ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False, default=str)}" for name, value in arguments.items()
    )
    return f"{function.get('name')}({given})"


def counted(messages: Sequence[Message]) -> str:
    """The numbers of turns and calls.

    >>> call = {"function": {"name": "add", "arguments": {}}}
    >>> counted([{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "assistant", "content": "5"}])
    '2 turns, 1 call'
    """
    turns, calls = num_turns(messages), sum(len(calls_of(message)) for message in messages)
    return f"{turns} turn{'s' * (turns != 1)}" + (f", {calls} call{'s' * (calls != 1)}" if calls else "")


def speaker(message: Message) -> str:
    """Who says a message that the policy did not write: a tool by its name, else the role.

    >>> speaker({"role": "tool", "content": "1776", "name": "multiply"}), speaker({"role": "user", "content": "go on"})
    ('multiply', 'user')
    """
    return message.get("name") or message["role"]
