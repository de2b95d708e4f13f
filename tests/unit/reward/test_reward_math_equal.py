r"""Mathematical equivalence. math-verify is called directly here; its hangs are tests of the scorer."""

import pytest

from gruppo.reward import math_match

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"so $x = 0.5$.", r"\frac{1}{2}", 1.0),
        ("1/2", r"$\frac{1}{2}$", 1.0),
        (r"\boxed{2\pi}", r"2\pi", 1.0),
        (r"\boxed{2}", r"2\pi", 0.0),
        (r"2\pi", "2", 0.0),
        (r"\boxed{1 + x^2}", "x^2+1", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1,2\}", 1.0),
        ("72", "48/2 = 24, 48+24 = 72\n#### 72", 1.0),
        ("The answer is 71", "#### 72", 0.0),
        ("", "72", 0.0),
        ("no idea", "72", 0.0),
    ],
)
def test_equal_expressions_score_1(text, gold, score):
    assert math_match(completions=[text], answer=[gold]) == [score]


@pytest.mark.parametrize("gold", ["", "apple", "the answer is unknown", r"$\frac{1}{$", "()", "?", None])
def test_a_gold_answer_that_cannot_be_read_abstains_whatever_the_completion_says(gold):
    texts = [str(gold), f"${gold}$", f"\\boxed{{{gold}}}", "1"]
    assert math_match(completions=texts, answer=[gold] * 4) == [None] * 4


def test_an_answer_inside_the_thoughts_is_not_read():
    texts = [r"<think>\boxed{42}</think>", r"<think>\boxed{42}", r"<think>42</think>\boxed{41}", r"<think>41</think>42"]
    assert math_match(completions=texts, answer=["42"] * 4) == [0.0, 0.0, 0.0, 1.0]
