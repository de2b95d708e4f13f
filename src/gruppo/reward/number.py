r"""The number a solution ends with: `#### 1,234`, `\boxed{1234}`, or the last number in the text.

Numbers are compared as exact fractions, without percent and currency signs. Of a completion the last number counts; a
gold answer must hold one number and no more. Pairs, lists and formulas are for `math_match`.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice

from gruppo.reward.verifiers import Verifier

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
# TeX takes one digit where braces are absent: \frac12 is 1/2.
_TOP, _BOTTOM = rf"[ ]?(?:[0-9]|\{{-?{_DIGITS}\}})", rf"[ ]?(?:[0-9]|\{{{_DIGITS}\}})"
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z0-9_]) (?<![0-9]\.)      # not inside a word (H2O) or a version (1.2.3)
    (?P<sign>(?<![)\]}}])[-+])?         # after a bracket it is a subtraction
    (?:[$€£¥] (?P<inner_sign>-)?)?
    (?:
        \\[dt]?frac (?P<top>{_TOP}) (?P<bottom>{_BOTTOM})
      | (?P<whole>{_DIGITS}(?:\.[0-9]+)? | (?<!\.)\.[0-9]+) (?P<exponent>[eE][-+]?[0-9]{{1,2}}(?![0-9]))?
        (?: [ ]?/[ ]? (?P<over>{_DIGITS}) (?![0-9/]) )?
    )
    (?P<factor> [0-9]+ | \\[dt]?frac{_TOP}{_BOTTOM} )?     # \frac123 and 2\frac12 are two numbers side by side
    """,
    re.VERBOSE,
)
_FORMULA = re.compile(r"\\(?!text|mathrm|mbox|circ|degree|left|right)[A-Za-z]|[+√π]|\^(?!\{?\\circ)")
"""Marks of a formula, unlike those of a unit: `\\sqrt{2}`, `2\\pi`, `x+3`, `2^x`."""
_UNIT_POWER = re.compile(r"(?<=[A-Za-z}])\^(?:-?[0-9]+|\{-?[0-9]+\})")
_MAX_DIGITS = 100
"""Longest run of digits accepted as an answer, because conversion takes quadratic time."""
_WINDOW = 400
"""Characters around a number that are looked at: the rest of a long text is skipped at the speed of `str.rfind`."""
_ASCII_SIGNS = str.maketrans({"−": "-", "–": "-", "\u00a0": " ", "\u202f": " "})


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberMatch(Verifier):
    """1 if the final number of the completion equals the gold number, else 0; abstains if the gold is not exactly one
    number.

    >>> NumberMatch()(completions=["It is $1,234.00."], answer=["6*200+34 = 1234\\n#### 1234"])
    [1.0]
    """

    def score(self, text: str, gold: str) -> float | None:
        expected = gold_number(gold)
        return None if expected is None else float(final_number(text) == expected)


def final_number(text: str) -> Fraction | None:
    r"""The number that `text` ends with: after the last `####` or in the last `\boxed{}`, else the last one.

    >>> final_number(r"so \boxed{\frac{3}{4}} of the 12 apples")
    Fraction(3, 4)
    """
    marked, part = _answer_part(text)
    return _last_number(part) if marked is None else marked


def gold_number(text: str) -> Fraction | None:
    r"""The one number of a gold answer: after the last `####` or in the last `\boxed{}`, else in the whole text.

    None when there are two, or when the number is part of a formula. Words, units and currencies do not matter.

    >>> gold_number("about 25 cm^2"), gold_number("(1,2)")
    (Fraction(25, 1), None)
    """
    marked, part = _answer_part(text)
    if marked is not None:
        return marked
    part = _plain(part)
    matches = list(islice(_NUMBER.finditer(part), 2))
    if len(matches) != 1:
        return None
    around = part[: matches[0].start()] + " " + part[matches[0].end() :]
    return None if _FORMULA.search(around) else _value(matches[0])


def _answer_part(text: str) -> tuple[Fraction | None, str]:
    r"""The number after the last `####`, if there is one, and what to search if not: the last `\boxed{}`, or all."""
    boxed_at, marked_at = text.rfind("\\boxed{"), text.rfind("####")
    marked = None
    if marked_at > boxed_at:
        marked = _after_marker(text[marked_at + 4 : marked_at + 4 + _WINDOW])
    if boxed_at < 0:
        return marked, text
    start = boxed_at + len("\\boxed{")
    return marked, _braced(text[start : start + _WINDOW])


def _after_marker(tail: str) -> Fraction | None:
    """The number of a GSM8K line. None for a formula and for a Markdown heading: "#### Step 3", "#### 3. Add up"."""
    line = _plain(tail.lstrip(" ").partition("\n")[0]).strip(" *")
    match = _NUMBER.match(line)
    if match is None:
        return None
    rest = line[match.end() :]
    is_heading = re.match(r"[.:)]\s+\w", rest) is not None
    return None if is_heading or _NUMBER.search(rest) or _FORMULA.search(rest) else _value(match)


def _braced(text: str) -> str:
    """The part up to the brace that closes the one before `text`; all of it if there is none."""
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
    matches = list(_NUMBER.finditer(window))
    if not matches or (start > 0 and matches[-1].start() == 0):  # it began before the window: far too long
        return None
    return _value(matches[-1])


def _plain(text: str) -> str:
    r"""With ASCII signs, without LaTeX between digits (`1{,}234`, `1\,234`, `\$5`) and powers of units (`cm^2`)."""
    for noise, plain in (("{,}", ","), ("\\,", ""), ("\\!", ""), ("\\$", "$"), ("\\%", "%")):
        text = text.replace(noise, plain)
    return _UNIT_POWER.sub("", text.translate(_ASCII_SIGNS))


def _value(match: re.Match[str]) -> Fraction | None:
    top = (match["top"] or match["whole"]).strip(" {}")
    bottom = (match["bottom"] or match["over"] or "1").strip(" {}")
    if match["factor"] or len(top) > _MAX_DIGITS or len(bottom) > _MAX_DIGITS:
        return None
    denominator = int(bottom.replace(",", ""))
    if denominator == 0:
        return None
    value = Fraction(top.replace(",", "") + (match["exponent"] or "")) / denominator
    is_negative = (match["sign"] or "").startswith("-") != (match["inner_sign"] is not None)
    return -value if is_negative else value


number_match = NumberMatch()
