r"""Mathematical equivalence through math-verify (the extra `math`): `\frac{1}{2}` equals `0.5`.

math-verify passes model text to a computer algebra system, whose running time has no bound, and its own time limit
needs SIGALRM in the main thread. So that limit is switched off and the worker's deadline takes its place: this is the
one built-in verifier that runs in a worker process.
"""

import logging
import re
from dataclasses import dataclass
from typing import Any, ClassVar

from gruppo.errors import require
from gruppo.reward.verifiers import Verifier

_WORD = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
_LATEX_TEXT = re.compile(r"\\(?:text|mathrm|operatorname)\{[^{}]{0,100}\}")
_IN_MATH = ("$", "\\boxed", "\\(", "\\[")


@dataclass(frozen=True, slots=True, kw_only=True)
class MathMatch(Verifier):
    """1 when the completion's answer is mathematically equal to the gold answer, else 0; unreadable gold abstains."""

    max_chars: int = 2000
    """Characters read from the end of the completion, where the answer is; parsing is slow."""

    isolated: ClassVar[bool] = True

    def prepare(self) -> None:
        """Import math-verify (most of a second), so that the first deadline does not pay for it."""
        _math_verify()

    def score(self, text: str, gold: str) -> float | None:
        math_verify = _math_verify()
        expected = _parse(gold.rpartition("####")[2])
        # A gold answer that only came back as a string was not understood; comparing strings could score it 1.
        if all(isinstance(part, str) for part in expected):
            return None
        found = _parse(text[-self.max_chars :])
        return float(bool(found) and math_verify.verify(expected, found, timeout_seconds=None))


def _parse(text: str) -> list[Any]:
    bare = text.strip()
    is_prose = _WORD.search(_LATEX_TEXT.sub("", bare)) is not None
    if bare and not is_prose and "\n" not in bare and not any(mark in bare for mark in _IN_MATH):
        text = f"\\boxed{{{bare}}}"  # without it, a bare `x^2` is not found and `2\pi` is read as 2
    return _math_verify().parse(text, parsing_timeout=None)


def _math_verify() -> Any:
    try:
        import math_verify
    except ImportError as error:
        raise require("math", "math-verify", "math_match") from error
    # It warns in every process that time limits are off, which they are on purpose.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return math_verify


math_match = MathMatch()
