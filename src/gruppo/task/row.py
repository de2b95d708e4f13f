"""What a row must be: the reasons why one cannot become a prompt.

A row has a `prompt`: a string, or a list of messages with `role` and `content`. All other columns are free,
but their text must be storable. Functions return the reason as text, or None when all is well; whether a bad
row is dropped or ends the run is the caller's choice.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

ROLES = ("system", "developer", "user", "assistant", "tool")

PromptKind = Literal["string", "message list"]


def prompt_kind(prompt: Any) -> PromptKind:
    return "string" if isinstance(prompt, str) else "message list"


def find_problem(row: Mapping[str, Any]) -> str | None:
    """Why this row cannot be used, or None."""
    if "prompt" not in row:
        return f"no 'prompt' column; the row has {', '.join(map(repr, row)) or 'no columns'}"
    return prompt_problem(row["prompt"]) or text_problem(row)


def prompt_problem(prompt: Any) -> str | None:
    """Why this value cannot be a prompt, or None."""
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
        return "the last message is the assistant's; end with the turn that the model is to answer"
    if not last["content"].strip():
        return "prompt is empty: its last message has no content"
    return None


def text_problem(row: Mapping[str, Any]) -> str | None:
    """Why the text inside a row cannot be stored, or None.

    A NUL ends a string in many libraries; a lone surrogate is not a character and cannot be written as UTF-8,
    so neither could be saved with the completions of a run.
    """
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
