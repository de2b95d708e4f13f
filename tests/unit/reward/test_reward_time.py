"""R-14: the built-in verifiers take linear time on text made to slow them down."""

import time

import pytest

from gruppo.reward import (
    NumberMatch,
    PatternMatch,
    exact_match,
    normalized_match,
    number_match,
    tag_format,
    think_format,
)

VERIFIERS = {
    "exact": exact_match,
    "normalized": normalized_match,
    "number": number_match,
    "inside": NumberMatch(inside="answer"),
    "tags": tag_format,
    "think": think_format,
    "pattern": PatternMatch(pattern=r"\d+ apples"),
}

# Each is what some usual regular expression for the job is quadratic on.
HOSTILE = {
    "digits": "9",
    "groups": "1,111",
    "slashes": "1/",
    "fractions": r"\frac{1}{",
    "bare fractions": r"\frac1",
    "powers": "cm^2",
    "boxes": r"\boxed{",
    "braces": "{",
    "markers": "#### ",
    "spaces": " ",
    "words": "1 ",
    "lines": "\n",
    "opening tags": "<think>",
    "closing tags": "</think>",
    "half tags": "<think></think><answer>",
    "minus signs": "-",
    "exponents": "1e",
    "points": "1.",
    "combining marks": "\u0315\u0300",
    "ligatures": "\ufdfa",
    "punctuation": "!",
}


def seconds(verifier, text):
    columns = {} if verifier in (tag_format, think_format) else {"answer": [text[:50] + "7"]}
    best = float("inf")
    for _ in range(3):
        start = time.process_time()  # not the clock on the wall: other processes share the machine
        verifier(completions=[text], **columns)
        best = min(best, time.process_time() - start)
    return best


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.row("R-14", "adversarial text of n and 2n characters")
def test_twice_the_text_takes_at_most_three_times_as_long(name):
    for kind, part in HOSTILE.items():
        short, long = ((part * (size // len(part) + 1))[:size] for size in (100_000, 200_000))
        for _ in range(3):  # a measurement may be disturbed, three in a row are a fact
            base, double = seconds(VERIFIERS[name], short), seconds(VERIFIERS[name], long)
            # Below 5 ms it is the clock that is measured.
            if double < max(3 * base, 0.005):
                break
        else:
            pytest.fail(f"{kind}: 100 kB take {base * 1e3:.1f} ms, 200 kB take {double * 1e3:.1f} ms")
