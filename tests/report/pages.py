"""Pages that a browser has open, and waiting for what they show."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Opened:
    """A page with what happened in it."""

    page: Any
    errors: list[str] = field(default_factory=list)
    """Errors and warnings of the console, and exceptions."""
    requests: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


def until(page: Any, condition: str, seconds: float = 20.0) -> None:
    """Wait for a condition in JavaScript. Playwright's own wait needs eval, which the policy of the page forbids."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"not within {seconds} s: {condition}"
        page.wait_for_timeout(30)
