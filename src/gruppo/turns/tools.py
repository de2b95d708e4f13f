"""Tools: functions that the policy calls, as TRL's `tools=[function]` takes them."""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from gruppo.errors import InputError, require_train
from gruppo.process.by_name import did_you_mean, import_object
from gruppo.turns.ask import ask
from gruppo.turns.environment import Answer, Environment, ToolSchema
from gruppo.types import Message

MAX_ANSWER_CHARS = 20_000
"""A tool's or an environment's answer is cut there: what floods must not fill the context."""

Ask = Callable[..., Any]
"""`ask`, or that of an environment with a thread of its own."""

NO_NAME = "unknown"
"""Name in the answer to a call that has none: some chat templates want one."""


def tool_schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """The schema of a function, from its type hints and its Google docstring, as transformers writes it.

    Parameters that a `functools.partial` has bound are left out.
    """
    require_train("a tool", "transformers")
    from transformers.utils.chat_template_utils import get_json_schema

    function = tool.func if isinstance(tool, partial) else tool
    name = getattr(function, "__name__", "")
    if not name or inspect.isclass(function):
        raise InputError(f"tool {tool!r} is not a function; give a function, a method or a functools.partial of one")
    try:
        schema = get_json_schema(function)
        parameters = inspect.signature(tool).parameters
    except Exception as error:  # transformers has errors of its own, and reading hints runs code of the user's
        raise InputError(
            f"tool {name!r} cannot be described to the model: {error}; give each parameter a type hint, and the "
            "docstring what the tool does and, under 'Args:', a line 'parameter: what it is' for each"
        ) from error
    for each in parameters.values():
        if each.kind not in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY):
            raise InputError(f"tool {name!r} takes {each}, which a call cannot give by name; give it a plain parameter")
    if isinstance(tool, partial):
        described = schema["function"]["parameters"]
        free = parameters.keys() - tool.keywords.keys()
        described["properties"] = {key: value for key, value in described["properties"].items() if key in free}
        if required := [key for key in described.pop("required", []) if key in free]:
            described["required"] = required
    return schema


class Toolbox:
    """Tools by name, and the answers to a turn that calls them."""

    def __init__(self, tools: Sequence[Callable[..., Any] | str] = ()) -> None:
        if callable(tools) or isinstance(tools, str):
            raise InputError(f"tools={tools!r} is one tool; give a list of them: tools=[...]")
        self.functions: dict[str, Callable[..., Any]] = {}
        self._parameters: dict[str, Mapping[str, Any]] = {}
        schemas: list[ToolSchema] = []
        for given in tools:
            tool = import_object(given, "tool") if isinstance(given, str) else given
            if not callable(tool):
                raise InputError(f"tool {given!r} is {type(tool).__name__}, not a function; name one: module:function")
            schema = tool_schema(tool)
            name = schema["function"]["name"]
            if name in self.functions:
                raise InputError(f"two tools have the name {name!r}, by which the model calls them; rename one")
            self.functions[name] = tool
            self._parameters[name] = schema["function"]["parameters"]
            schemas.append(schema)
        self.schemas = tuple(schemas)

    async def answer(self, message: Message, ask: Ask = ask) -> Answer:
        """Answers to all calls of a turn, in order; without a call there is none, and the episode is over."""
        answers = [await self._answer(call, ask) for call in message.get("tool_calls") or ()]
        return Answer(messages=tuple(answers))

    async def _answer(self, call: Mapping[str, Any], ask: Ask) -> Message:
        """What a tool returns, or what went wrong, for the model to read."""
        asked = call.get("function") or {}
        name = str(asked.get("name") or NO_NAME)
        message = Message(role="tool", name=cut(name), content="")
        if call.get("id"):
            message["tool_call_id"] = call["id"]
        try:
            function, arguments = self._read(call, name)
            returned = await ask(function, **arguments)
            text = returned if type(returned) is str else await ask(str, returned)  # code of the user's may write it
            message["content"] = cut(text)
        except Exception as error:  # whatever a tool raises is told to the model
            reason = str(error) or type(error).__name__
            message["content"] = json.dumps({"error": cut(reason)}, ensure_ascii=False)
            message["is_error"] = True
        return message

    def _read(self, call: Mapping[str, Any], name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
        """The function of a call and its arguments, or an error that says what is wrong with the call."""
        if reason := call.get("error"):
            raise InputError(str(reason))
        if name not in self.functions:
            known = ", ".join(self.functions) or "none"
            raise InputError(f"no tool is called {name!r}{did_you_mean(name, self.functions)}; tools: {known}")
        arguments = call["function"].get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError as error:
                raise InputError(f"the arguments of {name!r} are not JSON: {error}") from error
        if not isinstance(arguments, Mapping):
            raise InputError(f"the arguments of {name!r} must be an object with names, got {json.dumps(arguments)}")
        described = self._parameters[name]
        known = described["properties"]
        if wrong := sorted(arguments.keys() - known.keys()):
            raise InputError(
                f"{name!r} has no argument {wrong[0]!r}{did_you_mean(wrong[0], known)}; it takes {_names(known)}"
            )
        if missing := [each for each in described.get("required", ()) if each not in arguments]:
            raise InputError(f"{name!r} needs the argument {missing[0]!r}; it takes {_names(known)}")
        return self.functions[name], dict(arguments)


class ToolEnvironment(Environment):
    """Tools alone: the calls of a turn are answered, and a turn without one ends the episode."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self.tools = toolbox.schemas

    async def reset(self, row: Mapping[str, Any], seed: int) -> None:
        return None

    async def step(self, message: Message) -> Answer:
        return await self._toolbox.answer(message)

    async def reward(self) -> None:
        return None

    async def close(self) -> None:
        return None


def cut(text: str) -> str:
    """A text that is no longer than an answer may be, and that can be encoded."""
    text = encodable(text)
    if len(text) <= MAX_ANSWER_CHARS:
        return text
    return f"{text[:MAX_ANSWER_CHARS]}\n... ({len(text)} characters; only the first {MAX_ANSWER_CHARS} are shown)"


def encodable(text: str) -> str:
    """A text without lone surrogates, which would stop the tokenizer."""
    return text.encode("utf-8", "replace").decode()


def _names(known: Mapping[str, Any]) -> str:
    return ", ".join(known) or "none"
