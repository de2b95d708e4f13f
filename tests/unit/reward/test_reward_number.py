r"""The final number of a text, from hand-made cases to every GSM8K reference solution."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.reward import NumberMatch, number_match
from gruppo.reward.number import final_number

GSM8K = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("#### 18", 18),
        ("#### 1,234", 1234),
        ("####18", 18),
        ("#### $1,234.50", "1234.5"),
        ("#### -7", -7),
        ("#### 18 dollars.", 18),
        ("#### **18**", 18),
        ("#### 50%", 50),
        ("9 eggs\n#### 18\nThat is for 7 days.", 18),
        ("#### Step 3\nso it is 18.", 18),
        ("#### 3. Add up\nThe total is 18.", 18),
        ("#### 5 + 3 = 8", 8),
        ("### Step 2\n\\boxed{18}", 18),
        (r"#### 5, no: \boxed{6}", 6),
        (r"\boxed{5} then #### 6", 6),
        (r"\boxed{42}", 42),
        (r"\boxed{1{,}234}", 1234),
        (r"\boxed{1\,234}", 1234),
        (r"\boxed{\$18}", 18),
        (r"\boxed{50\%}", 50),
        (r"\boxed{18\text{ dollars}} for 7 days", 18),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{-\dfrac{3}{4}} of 12", "-3/4"),
        (r"\boxed{x = -5}", -5),
        (r"\boxed{7", 7),
        (r"first \boxed{1}, then \boxed{2}", 2),
        (r"\boxed{none}, or 3", None),
        ("It is 18.", 18),
        ("It is $18.00.", 18),
        ("It is 3.0", 3),
        ("It is .5", "1/2"),
        ("It is 3/4 of it", "3/4"),
        ("It is 3 / 4", "3/4"),
        ("-$5", -5),
        ("$-5", -5),
        ("−5", -5),
        ("it is -5", -5),
        ("10-3", 3),
        ("5 - 3", 3),
        ("- 5 apples", 5),
        ("(7)-5", 5),
        ("The answer is...18", 18),
        ("1,2,3", 3),
        ("12,34", 34),
        ("1,234,567", 1234567),
        ("1e3", 1000),
        ("2.5e-1", "1/4"),
        ("3/0", None),
        ("18 for H2O", 18),
        ("18 in v1.2.3", 18),
        ("no number", None),
        ("", None),
        ("9" * 101, None),
        ("9" * 100_000, None),
        ("1e999999999", 1),
        ("٣", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == (None if number is None else Fraction(number))


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("18", "2*9 = <<2*9=18>>18\n#### 18", 1.0),
        ("It is 18.0 dollars", "18", 1.0),
        ("0.75", "3/4", 1.0),
        ("1,234", 1234, 1.0),
        ("18", 18.0, 1.0),
        ("19", "18", 0.0),
        ("", "18", 0.0),
        ("180", "18", 0.0),
        ("-18", "18", 0.0),
        ("18", "no number here", None),
        ("", "", None),
    ],
)
def test_number_match(text, gold, score):
    assert number_match(completions=[text], answer=[gold]) == [score]
    assert number_match(completions=[[{"role": "assistant", "content": text}]], answer=[gold]) == [score]


def test_number_match_reads_inside_a_tag():
    inside = NumberMatch(inside="answer")
    assert inside(completions=["<answer>18</answer> of 20", "18"], answer=["18", "18"]) == [1.0, 0.0]


@given(st.integers(-(10**15), 10**15))
def test_an_integer_is_read_back_however_it_is_written(number):
    shapes = ("{0}", "{0:,}", "#### {0:,}", "so it is {0:,}.", r"\boxed{{{0}}}", "{0}.00", "**{0}**", "${0}$", "={0}")
    assert {final_number(shape.format(number)) for shape in shapes} == {Fraction(number)}


@given(st.text(max_size=200))
def test_no_text_breaks_it(text):
    found = final_number(text)
    assert found is None or number_match(completions=[text], answer=[text]) == [1.0]


@pytest.mark.skipif(not GSM8K.is_file(), reason="the GSM8K test set is not here")
def test_all_gsm8k_solutions_score_1_and_with_a_corrupted_number_0():
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    answers = [row["answer"] for row in rows]
    corrupted = [_corrupt(answer) for answer in answers]
    numbers = [answer.rpartition("#### ")[2] for answer in answers]
    assert len(answers) == 1319
    assert number_match(completions=answers, answer=answers) == [1.0] * 1319
    assert number_match(completions=corrupted, answer=answers) == [0.0] * 1319
    sentences = [f"The answer is ${number}." for number in numbers]
    assert number_match(completions=sentences, answer=answers) == [1.0] * 1319
    boxes = [f"So it is \\boxed{{{number}}} after 365 days." for number in numbers]
    assert number_match(completions=boxes, answer=answers) == [1.0] * 1319


def _corrupt(answer):
    head, _, number = answer.rpartition("#### ")
    return f"{head}#### {int(number.replace(',', '')) + 1}"
