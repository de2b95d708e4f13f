"""A tool by name, and a command line in which a signal comes amid one of its calls."""

import os
import time
from collections.abc import Sequence

SIGNAL_AT: dict[int, int] = {}
"""The signal that call number n of this process sends to it."""
calls = 0


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    global calls
    calls += 1
    if number := SIGNAL_AT.get(calls):
        os.kill(os.getpid(), number)
        time.sleep(5)  # a signal that ends the run finds it waiting for this call
    return a * b


def no_text(a: int) -> int:
    return a


def gruppo_with_signal(words: Sequence[str], call: int, number: int) -> None:
    """`gruppo WORDS`, which gets a signal while the tool is called for the n-th time."""
    from gruppo.cli.main import main

    SIGNAL_AT[call] = number
    main(list(words))
