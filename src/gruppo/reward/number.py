r"""The number a solution ends with: `#### 1,234`, `\boxed{1234}`, or the last number in the text.

Numbers are compared as exact fractions, so 3.0 equals 3 and 0.5 equals 1/2, and 0.1 equals 0.10. A percent or
currency sign is dropped: 50% equals 50.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from gruppo.reward.verifier import Verifier

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z0-9_]) (?<![0-9]\.)      # not inside a word (H2O) or a version (1.2.3)
    (?P<sign>(?<![)\]}}])[-+])?         # after a bracket it is a subtraction
    (?:[$€£¥] (?P<inner_sign>-)?)?
    (?:
        \\[dt]?frac\{{ (?P<top>-?{_DIGITS}) \}} \{{ (?P<bottom>{_DIGITS}) \}}
      | (?P<whole>{_DIGITS}(?:\.[0-9]+)? | (?<!\.)\.[0-9]+) (?P<exponent>[eE][-+]?[0-9]{{1,2}}(?![0-9]))?
        (?: [ ]?/[ ]? (?P<over>{_DIGITS}) (?![0-9/]) )?
    )
    """,
    re.VERBOSE,
)
_MAX_DIGITS = 100
"""A longer run of digits is not an answer; converting one takes quadratic time."""
_WINDOW = 400
"""Characters around a number that are looked at: the rest of a long text is skipped at the speed of `str.rfind`."""
_ASCII_SIGNS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " "})


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberMatch(Verifier):
    """1 when the final number of the completion equals the one of the gold answer, else 0; no gold number abstains.

    >>> NumberMatch()(completions=["It is $1,234.00."], answer=["6*200+34 = 1234\\n#### 1234"])
    [1.0]
    """

    def score(self, text: str, gold: str) -> float | None:
        expected = final_number(gold)
        return None if expected is None else float(final_number(text) == expected)


def final_number(text: str) -> Fraction | None:
    r"""The number that `text` ends with: after the last `####` or in the last `\boxed{}`, else the last one.

    >>> final_number(r"so \boxed{\frac{3}{4}} of the 12 apples")
    Fraction(3, 4)
    """
    boxed_at, marked_at = text.rfind("\\boxed{"), text.rfind("####")
    if marked_at > boxed_at:
        marked = _after_marker(text[marked_at + 4 : marked_at + 4 + _WINDOW])
        if marked is not None:
            return marked
    if boxed_at >= 0:
        start = boxed_at + len("\\boxed{")
        return _last_number(_braced(text[start : start + _WINDOW]))
    return _last_number(text)


def _after_marker(tail: str) -> Fraction | None:
    """The number of a GSM8K line. None for a heading: "#### Step 3" and "#### 3. Add up" are Markdown."""
    line = _plain(tail.lstrip(" ").partition("\n")[0]).strip(" *")
    match = _NUMBER.match(line)
    if match is None:
        return None
    rest = line[match.end() :]
    is_heading = re.match(r"[.:)]\s+\w", rest) is not None or _NUMBER.search(rest) is not None
    return None if is_heading else _value(match)


def _braced(text: str) -> str:
    """Up to the brace that closes the one before `text`; all of it when that is missing."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return text[: brace.start()]
    return text


def _last_number(text: str) -> Fraction | None:
    end = max(text.rfind(digit) for digit in "0123456789") + 1
    start = max(end - _WINDOW, 0)
    window = _plain(text[start : end + 2])  # a fraction ends in a brace, and what follows a number may matter
    last = None
    for match in _NUMBER.finditer(window):
        last = match
    if last is None or (start > 0 and last.start() == 0):  # it began before the window: far too long
        return None
    return _value(last)


def _plain(text: str) -> str:
    r"""Without what stands between digits in LaTeX (`1{,}234`, `1\,234`, `\$5`), and with ASCII signs."""
    for noise, plain in (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%")):
        text = text.replace(noise, plain)
    return text.translate(_ASCII_SIGNS)


def _value(match: re.Match[str]) -> Fraction | None:
    top, bottom = match["top"] or match["whole"], match["bottom"] or match["over"] or "1"
    if len(top) > _MAX_DIGITS or len(bottom) > _MAX_DIGITS:
        return None
    denominator = int(bottom.replace(",", ""))
    if denominator == 0:
        return None
    value = Fraction(top.replace(",", "") + (match["exponent"] or "")) / denominator
    is_negative = (match["sign"] or "").startswith("-") != (match["inner_sign"] is not None)
    return -value if is_negative else value


number_match = NumberMatch()
