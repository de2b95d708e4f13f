"""Check of a row: whether its prompt can be used, and its text be stored."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

ROLES = ("system", "developer", "user", "assistant", "tool")


def prompt_kind(prompt: Any) -> Literal["string", "message list"]:
    """The kind of a usable prompt."""
    return "string" if isinstance(prompt, str) else "message list"


def prompt_problem(row: Mapping[str, Any]) -> str | None:
    """The reason why the prompt of a row cannot be used, or None."""
    if "prompt" not in row:
        return f"no 'prompt' column; the row has {', '.join(map(repr, row)) or 'no columns'}"
    prompt = row["prompt"]
    if prompt is None:
        return "prompt is null"
    if isinstance(prompt, str):
        return None if prompt.strip() else "prompt is empty"
    if not isinstance(prompt, Sequence):
        return f"prompt must be a string or a list of messages, got {type(prompt).__name__}"
    if not prompt:
        return "prompt is an empty list of messages"
    for number, message in enumerate(prompt):
        problem = _message_problem(message)
        if problem:
            return f"message {number} of the prompt {problem}"
    last = prompt[-1]
    if last["role"] == "assistant":
        if len(prompt) == 1:
            return "the prompt is a turn of the assistant alone; put the user's before it"
        if more := [key for key, value in last.items() if key not in ("role", "content") and value is not None]:
            return f"the last message is the assistant's and has {more[0]!r}; only its content can be gone on with"
    if not last["content"].strip():
        return "prompt is empty: its last message has no content"
    return None


def text_problem(row: Mapping[str, Any]) -> str | None:
    """The reason why the text inside a row cannot be saved with the completions of a run, or None."""
    for column, whole in row.items():
        # A stack and not recursion: JSON may nest deeper than Python's call stack.
        stack = [column, whole]
        while stack:
            value = stack.pop()
            if isinstance(value, str):
                problem = _character_problem(value)
                if problem:
                    return f"column {column!a} contains {problem}"
            elif isinstance(value, Mapping):
                stack.extend(value.keys())
                stack.extend(value.values())
            elif isinstance(value, list | tuple):
                stack.extend(value)
    return None


def _character_problem(text: str) -> str | None:
    if "\x00" in text:
        return "a NUL character"
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        if 0xDC80 <= code <= 0xDCFF:  # where Python's surrogateescape puts bytes that it cannot decode
            return f"the byte {code - 0xDC00:#04x}, which is not UTF-8"
        return f"a lone surrogate, U+{code:04X}"
    return None


def _message_problem(message: Any) -> str | None:
    if not isinstance(message, Mapping):
        return f"must be an object with 'role' and 'content', got {type(message).__name__}"
    for name in ("role", "content"):
        if name not in message:
            return f"has no {name!r}"
    if message["role"] not in ROLES:
        return f"has role {message['role']!r:.40}; roles are {', '.join(ROLES)}"
    if not isinstance(message["content"], str):
        return f"has content of type {type(message['content']).__name__}; only text is supported"
    return None
