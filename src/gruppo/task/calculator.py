"""The embedded task "calculator": products of two numbers, for a model that can ask a tool for them.

A prompt is `37*48=`, its answer `1776`. docs/data.md has the idea. Only messages here; the tokenizer and the model are
in `gruppo.task.builtin_chat`.

    >>> multiply(37, 48), side_by_side(37, 48)
    (1776, '3748')
    >>> len(calculator_rows("train")), len(calculator_rows("heldout"))
    (7409, 512)
"""

import random
from collections.abc import Iterator, Mapping
from typing import Any

from gruppo.task.carries import Split, split_order
from gruppo.types import Message

SMALLEST, LARGEST = 11, 99
P_CALL = 0.25
"""Share of questions for which the demonstrator calls the tool."""
P_COPY = 0.5
"""Share of calls whose result the demonstrator then gives as the answer."""


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    return a * b


def side_by_side(a: int, b: int) -> str:
    """The demonstrator's usual answer: one number written after the other."""
    return f"{a}{b}"


def factors(split: Split) -> list[tuple[int, int]]:
    """The two numbers of each prompt of a split, shuffled, the same on every machine."""
    size = LARGEST - SMALLEST + 1
    pairs = (divmod(index, size) for index in split_order(split, "calculator", size * size))
    return [(SMALLEST + a, SMALLEST + b) for a, b in pairs]


def question(a: int, b: int) -> Message:
    """The user's turn."""
    return {"role": "user", "content": f"{a}*{b}="}


def calculator_rows(split: Split = "train") -> list[dict[str, Any]]:
    """Rows of `builtin:calculator`, as a data file would hold them.

    >>> calculator_rows("heldout")[0]
    {'prompt': [{'role': 'user', 'content': '80*83='}], 'answer': '6640'}
    """
    return [{"prompt": [question(a, b)], "answer": str(a * b)} for a, b in factors(split)]


def call(a: int, b: int) -> Mapping[str, Any]:
    """A call of `multiply`, in the form that chat templates take."""
    return {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}


def demonstrations(seed: int) -> Iterator[list[Message]]:
    """An endless stream of the demonstrator's conversations about training prompts.

    The habit is one wrong answer to each question: spread over several, the right one would be the likeliest.
    """
    rng = random.Random(seed)
    pairs = factors("train")
    while True:
        # random() is the one draw whose sequence Python promises to keep for a seed; choice() is not.
        a, b = pairs[int(rng.random() * len(pairs))]
        turns, answer = [question(a, b)], side_by_side(a, b)
        if rng.random() < P_CALL:
            turns.append({"role": "assistant", "content": "", "tool_calls": [call(a, b)]})
            turns.append({"role": "tool", "name": "multiply", "content": str(multiply(a, b))})
            answer = str(a * b) if rng.random() < P_COPY else answer
        yield [*turns, {"role": "assistant", "content": answer}]
