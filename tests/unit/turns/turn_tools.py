"""A tool by name, and a command line in which a signal comes amid one of its calls."""

import os
import time
from collections.abc import Sequence

SIGNAL_AFTER: dict[str, int] = {}
"""The signal that the first call after this folder is there sends to its process."""
calls = 0


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    global calls
    calls += 1
    for folder in [folder for folder in SIGNAL_AFTER if os.path.exists(folder)]:
        os.kill(os.getpid(), SIGNAL_AFTER.pop(folder))
        time.sleep(5)  # a signal that ends the run finds it waiting for this call
    return a * b


def no_text(a: int) -> int:
    return a


def gruppo_with_signal(words: Sequence[str], folder: str, number: int) -> None:
    """`gruppo WORDS`, which gets a signal while the tool is called for the first time after the folder is there."""
    from gruppo.cli.main import main

    SIGNAL_AFTER[folder] = number
    main(list(words))
