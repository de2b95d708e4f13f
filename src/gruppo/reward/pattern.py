"""Reward for text that a regular expression finds. The expression is the user's, so its running time is unknown:
the text is capped and the match runs in a worker process, where a catastrophic one is killed at the deadline.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from gruppo.errors import InputError
from gruppo.reward.verifier import column_values
from gruppo.text import completion_text


@dataclass(frozen=True, slots=True, kw_only=True)
class PatternMatch:
    """1 when the pattern is found in the completion, else 0. `^`, `$` and `.` mean what they mean in `re`.

    >>> PatternMatch(pattern=r"\\d+ apples")(completions=["12 apples", "a dozen"])
    [1.0, 0.0]
    """

    pattern: str = ""
    """The expression; when empty, each row brings its own in `column`, and a row without one abstains."""
    column: str = "pattern"
    max_chars: int = 2048
    r"""How much of the completion's end is searched. Even `\d+ apples` takes quadratic time on a run of digits: 25 ms
    for this length, a minute for 100 kB."""

    isolated: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _compile(self.pattern)

    @property
    def needs(self) -> tuple[str, ...]:
        return () if self.pattern else (self.column,)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float | None]:
        if self.pattern:
            patterns: Sequence[Any] = [self.pattern] * len(completions)
        else:
            patterns = column_values(self, columns, self.column)
        return [self._score_one(*pair) for pair in zip(completions, patterns, strict=True)]

    def _score_one(self, completion: Any, pattern: Any) -> float | None:
        if pattern is None:
            return None
        return float(_compile(pattern).search(completion_text(completion)[-self.max_chars :]) is not None)


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise InputError(f"pattern {pattern!r} is not a regular expression: {error}") from error


pattern_match = PatternMatch()
