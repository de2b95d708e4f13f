"""Tool calls: what a turn of the policy calls, read from its text by the markers of its chat template.

>>> content, calls = hermes('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
>>> content, calls[0]["function"]
('Let me see.', {'name': 'add', 'arguments': {'a': 1}})
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gruppo.errors import InputError
from gruppo.turns.environment import ToolSchema

Call = dict[str, Any]
"""A call in OpenAI's form. One that could not be read has an `error`, and no arguments."""
Form = Callable[[str, Sequence[ToolSchema]], tuple[str, list[Call]]]
"""From the text of a turn, with the tools: the text without its calls, and the calls in order."""

_WORDS = {"True": True, "False": False, "None": None}
_JSON = json.JSONDecoder()
_MISTRAL_ID = re.compile("[A-Za-z0-9]{9}")
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r'"name"\s*:\s*"([^"\\]*)"')
_TAGGED_NAME = re.compile(r"\s*(?:<function=([^>\n]+)>|([^\s<>{}]+))")
_TAGGED_ARGUMENT = re.compile(  # a value ends before the next key, so that reading stays linear
    r"<parameter=([^>\n]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>"
    r"|<arg_key>((?:(?!<arg_key>).)*?)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>",
    re.DOTALL,
)


def hermes(text: str, tools: Sequence[ToolSchema] = ()) -> tuple[str, list[Call]]:
    """Calls as Hermes and Qwen write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""
    begins, ends = "<tool_call>", "</tool_call>"
    calls: list[Call] = []
    said, at = "", 0
    while (start := text.find(begins, at)) >= 0:
        said += text[at:start]
        start += len(begins)
        try:
            value, at = _decoded(text, start)
            if not (at == len(text) or text.startswith((begins, ends), at)):
                raise ValueError("the call is not valid JSON: text follows its closing brace")
            calls.append(call_of(value))
        except ValueError as error:
            at = min((found for mark in (begins, ends) if (found := text.find(mark, start)) >= 0), default=len(text))
            calls.append(_unread(text[start:at], error))
        at += len(ends) if text.startswith(ends, at) else 0
    return _numbered(text, said + text[at:], calls)


def llama(text: str, tools: Sequence[ToolSchema] = ()) -> tuple[str, list[Call]]:
    """Calls as Llama writes them: {"name": ..., "parameters": {...}}, alone or after <|python_tag|>; several stand one
    after the other."""
    mark = "<|python_tag|>"
    said, is_marked, body = text.partition(mark)
    if not is_marked:
        said, body = "", text.lstrip()
        if not re.match(r'\{\s*"name"\s*:', body):  # an answer may be JSON too
            return text, []
    calls: list[Call] = []
    at = 0
    while at < len(body):
        try:
            value, end = _decoded(body, at)
            calls.append(call_of(value))
        except ValueError as error:
            calls.append(_unread(body[at:], error))
            break
        at = re.compile(rf"(?:[;,\s]|{re.escape(mark)})*").match(body, end).end()  # type: ignore[union-attr]
    return _numbered(text, said, calls or [_unread("", "the call is empty")])


def mistral(text: str, tools: Sequence[ToolSchema] = ()) -> tuple[str, list[Call]]:
    """Calls as Mistral writes them: [TOOL_CALLS] and a list of {"name": ..., "arguments": {...}}, or a name and its
    arguments."""
    said, *bodies = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for body in bodies:
        named = re.match(r"\s*([^\s\[\]{}]+)(?:\[CALL_ID\](\w+))?(?:\[ARGS\])?", body)
        name, given = (named[1], {"id": named[2]} if named[2] else {}) if named else ("", {})
        try:
            value, end = _decoded(body, named.end() if named else 0)
            if end < len(body):
                raise ValueError("the call is not valid JSON: text follows its end")
            found = value if isinstance(value, list) and not named else [value]
            calls += [call_of({"name": name, "arguments": each} | given if named else each) for each in found]
        except ValueError as error:
            calls.append(_unread(body, error, name))
    # The chat templates refuse a conversation with any other id, and the policy may write one.
    calls = [
        {key: value for key, value in call.items() if key != "id" or _MISTRAL_ID.fullmatch(value)} for call in calls
    ]
    return _numbered(text, said, calls)


def tagged(text: str, tools: Sequence[ToolSchema] = ()) -> tuple[str, list[Call]]:
    """Calls as Qwen3-Coder, Nemotron and GLM write them: a name and arguments in tags, as text.

    >>> tagged("<tool_call><function=add><parameter=x>1</parameter></function></tool_call>")[1][0]["function"]
    {'name': 'add', 'arguments': {'x': '1'}}
    """
    said, *bodies = text.split("<tool_call>")
    calls: list[Call] = []
    for body in bodies:
        body, _, after = body.partition("</tool_call>")
        said += after
        named = _TAGGED_NAME.match(body)
        if not named:
            calls.append(_unread(body, "the call has no name"))
            continue
        name, inside = named[1] or named[2], body[named.end() :].strip().removesuffix("</function>")
        if left := _TAGGED_ARGUMENT.sub("", inside).strip():
            calls.append(_unread("", f"the arguments cannot be read: {left[:200]}", name))
            continue
        found = [match.groups() for match in _TAGGED_ARGUMENT.finditer(inside)]
        arguments = {key or other: value if key else given for key, value, other, given in found}
        calls.append(call_of({"name": name, "arguments": _typed(name, arguments, tools)}))
    return _numbered(text, said, calls)


FORMS: tuple[tuple[str, Form], ...] = (
    ("<tool_call>", hermes),
    ("[TOOL_CALLS]", mistral),
    ("<|python_tag|>", llama),
    ("<tool_call>", tagged),
)
"""Ways of writing calls, by the marker that begins one; of two with one marker, the first unless a template writes
the other."""


def form_of(tokenizer: Any, tools: Sequence[ToolSchema], written: str, name: str, arguments: Mapping[str, Any]) -> Form:
    """The form that a model calls tools in: the one that reads the call which its template writes, else that whose
    marker it knows.

    Args:
        written: a turn that calls `name` with `arguments`, as the chat template writes it; empty: it does not.
    """
    for _, form in FORMS:
        calls = form(written, tools)[1]
        if [(call["function"], call.get("error")) for call in calls] == [
            ({"name": name, "arguments": arguments}, None)
        ]:
            return form
    known = tokenizer.get_vocab() if not written else ()
    if form := next((form for mark, form in FORMS if mark in known), None):
        return form
    shown = f"; its chat template writes {written[:80]!r}" if written else ""
    raise InputError(
        f"tools are given, but nothing says how this model calls them{shown}; set tokenizer.response_template, or take "
        "a model that calls tools as Hermes, Qwen, GLM, Llama or Mistral do"
    )


def call_of(value: Any) -> Call:
    """A call from its JSON value. `arguments` may be named `parameters`, and may be JSON text."""
    inner = value.get("function") if isinstance(value, Mapping) else None
    body = inner if isinstance(inner, Mapping) else value
    name = body.get("name") if isinstance(body, Mapping) else None
    if not (isinstance(body, Mapping) and isinstance(name, str) and name):
        return _unread(value if isinstance(value, str) else json.dumps(value), "the call has no name")
    arguments = body.get("arguments", body.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return _unread("", f"the arguments are not valid JSON: {arguments[:200]}", name)
    if not (arguments is None or isinstance(arguments, Mapping)):
        return _unread("", f"the arguments are not an object: {json.dumps(arguments)[:200]}", name)
    call: Call = {"type": "function", "function": {"name": name, "arguments": dict(arguments or {})}}
    given = value.get("id") or body.get("id")
    return call | ({"id": given} if isinstance(given, str) else {})


def unreadable(reason: object) -> list[Call]:
    """One call that could not be read, for a turn whose calls cannot be told apart."""
    return with_ids([_unread("", reason)])


def with_ids(calls: Sequence[Call]) -> list[Call]:
    """The calls of a turn with an id each, of nine characters, which all templates take."""
    return [{"id": f"call{index:05}"} | call for index, call in enumerate(calls)]


def _numbered(text: str, said: str, calls: list[Call]) -> tuple[str, list[Call]]:
    return (said.strip(), with_ids(calls)) if calls else (text, [])


def _typed(name: str, arguments: Mapping[str, str], tools: Sequence[ToolSchema]) -> dict[str, Any]:
    """Arguments that are text, as values of the types that the tool declares."""
    declared = next((tool["function"] for tool in tools if tool["function"]["name"] == name), {})
    properties = declared.get("parameters", {}).get("properties", {})
    typed: dict[str, Any] = dict(arguments)
    for key, text in arguments.items():
        if properties.get(key, {}).get("type", "string") != "string":
            try:
                typed[key] = _WORDS[text] if text in _WORDS else json.loads(text)
            except (ValueError, RecursionError):
                continue  # the tool says what is wrong with it
    return typed


def _unread(body: str, reason: object, name: str = "") -> Call:
    found = _NAME.search(body)
    name = name or (found[1] if found else "")
    return {"type": "function", "function": {"name": name, "arguments": {}}, "error": str(reason)}


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where what follows it begins."""
    start = _end_of_space(text, start)
    try:
        value, end = _JSON.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise ValueError(f"the call is not valid JSON: {error.msg} at character {error.pos - start}") from error
    except RecursionError as error:
        raise ValueError("the call is not valid JSON: it is nested too deeply") from error
    return value, _end_of_space(text, end)


def _end_of_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    return found.end() if found else start
