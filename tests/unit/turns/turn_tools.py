"""A tool by name, and a command line in which a signal comes amid one of its calls."""

import os
import time
from collections.abc import Sequence
from pathlib import Path

SIGNALS: dict[Path, int] = {}
"""The signal that the next call sends to this process once a path is there."""
calls = 0


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    global calls
    calls += 1
    for path in [path for path in SIGNALS if path.exists()]:
        os.kill(os.getpid(), SIGNALS.pop(path))
        time.sleep(5)  # a signal that ends the run finds it waiting for this call
    return a * b


def no_text(a: int) -> int:
    return a


def gruppo_with_signal(words: Sequence[str], path: Path, number: int) -> None:
    """`gruppo WORDS`, which gets a signal amid a call of the tool, the first one after the path is there."""
    from gruppo.cli.main import main

    SIGNALS[path] = number
    main(list(words))
