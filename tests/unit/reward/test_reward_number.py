r"""The final number of a text, from hand-made cases to every GSM8K reference solution."""

import json
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppo.reward import NumberMatch, number_match
from gruppo.reward.number import final_number, gold_number

GSM8K = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "gsm8k"


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
        (r"#### 2\pi", 2),
        (r"\boxed{42}", 42),
        (r"\boxed{1{,}234}", 1234),
        (r"\boxed{1\,234}", 1234),
        (r"\boxed{\$18}", 18),
        (r"\boxed{50\%}", 50),
        (r"\boxed{18\text{ dollars}} for 7 days", 18),
        (r"\boxed{\frac{3}{4}}", "3/4"),
        (r"\boxed{-\dfrac{3}{4}} of 12", "-3/4"),
        (r"\boxed{\frac12}", "1/2"),
        (r"\frac1{2}", "1/2"),
        (r"\frac{1}2", "1/2"),
        (r"\frac 1 2", "1/2"),
        (r"\dfrac34", "3/4"),
        (r"\tfrac{12}5 km", "12/5"),
        (r"-\frac12", "-1/2"),
        (r"#### -\frac12", "-1/2"),
        (r"x=\frac12.", "1/2"),
        (r"\frac10", None),
        (r"\frac123", None),
        (r"\frac{1}23", None),
        (r"\frac1{2}3", None),
        (r"\boxed{\frac1234}", None),
        (r"2\frac12", None),
        (r"2\frac{1}{2}", None),
        ("an area of 25 cm^2", 25),
        (r"25\text{ cm}^{2}", 25),
        ("5 m s^-1 or 5 m s^{-1}", 5),
        ("2^10", 10),
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
    ("gold", "number"),
    [
        ("#### 18", 18),
        ("2*9 = 18\n#### 18 dollars\nfor 7 days", 18),
        (r"from 3 and 6: \boxed{18}", 18),
        (r"\boxed{\frac12}", "1/2"),
        (r"\boxed{5} is right\n#### Done", 5),
        ("18", 18),
        ("$1,234.50", "1234.5"),
        ("The answer is 18 apples.", 18),
        ("€ 18 of H2O", 18),
        ("60 km/h", 60),
        ("25 cm^2", 25),
        ("25 m/s^{-2}", 25),
        (r"25\,\text{cm}^{2}", 25),
        (r"$90^\circ$", 90),
        (r"90^{\circ}", 90),
        (r"\left(-\frac{3}{4}\right)", "-3/4"),
        ("x = -5", -5),
        ("1e-05", "1/100000"),
        ("2.5e+16", 25 * 10**15),
        ("(1,2)", None),
        ("[1, 2]", None),
        ("1,2,3", None),
        ("12,34", None),
        ("3 or 4", None),
        ("3:30", None),
        ("10-3", None),
        ("2^10", None),
        ("6 * 3 = 18", None),
        (r"\boxed{(1,2)}", None),
        (r"of 2 and 3: \boxed{2, 3}", None),
        (r"18, or \boxed{x}", None),
        ("#### (1,2)", None),
        ("#### 5 + 3 = 8", None),
        (r"#### 2\pi", None),
        ("#### Step 3\nso it is 18.", None),
        ("x^2", None),
        ("2^x", None),
        ("x+3", None),
        (r"2\pi", None),
        ("2π", None),
        (r"\sqrt{2}", None),
        ("√2", None),
        (r"\frac{x}{2}", None),
        (r"\frac{\pi}{4}", None),
        (r"2\frac12", None),
        (r"\frac123", None),
        ("9" * 101, None),
        ("3/0", None),
        ("True", None),
        ("", None),
    ],
)
def test_a_gold_holds_exactly_one_number_or_none(gold, number):
    assert gold_number(gold) == (None if number is None else Fraction(number))


def test_a_gold_that_is_not_a_number_pays_none_of_its_parts():
    golds = ["(1,2)", "3 or 4", r"\sqrt{2}", r"\frac{\pi}{2}"]
    texts = ["1", "2", "4", "", r"\boxed{(1,2)}"]
    assert [number_match(completions=texts, answer=[gold] * 5) for gold in golds] == [[None] * 5] * 4


@pytest.mark.parametrize(
    ("text", "gold", "score"),
    [
        ("18", "2*9 = <<2*9=18>>18\n#### 18", 1.0),
        ("It is 18.0 dollars", "18", 1.0),
        ("0.75", "3/4", 1.0),
        ("1,234", 1234, 1.0),
        ("18", 18.0, 1.0),
        (r"\frac34", "0.75", 1.0),
        ("0.5", r"\frac12", 1.0),
        (r"\frac123", r"\frac12", 0.0),
        ("The area is 25 cm^2", "25 cm^2", 1.0),
        ("The area is 2 cm^2", "25 cm^2", 0.0),
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
    gold = gold_number(text)
    assert gold is None or final_number(text) == gold
    assert number_match(completions=[text], answer=[text]) == [None if gold is None else 1.0]


@pytest.mark.parametrize(("file", "num"), [("train.jsonl", 7473), ("test.jsonl", 1319)])
def test_all_gsm8k_solutions_score_1_and_with_a_corrupted_number_0(file, num):
    if not (GSM8K / file).is_file():
        pytest.skip("GSM8K is not here")
    rows = [json.loads(line) for line in (GSM8K / file).read_text(encoding="utf-8").splitlines()]
    answers = [row["answer"] for row in rows]
    corrupted = [_corrupt(answer) for answer in answers]
    numbers = [answer.rpartition("#### ")[2] for answer in answers]
    assert len(answers) == num
    assert number_match(completions=answers, answer=answers) == [1.0] * num
    assert number_match(completions=corrupted, answer=answers) == [0.0] * num
    assert number_match(completions=answers, answer=numbers) == [1.0] * num
    sentences = [f"The answer is ${number}." for number in numbers]
    assert number_match(completions=sentences, answer=answers) == [1.0] * num
    boxes = [f"So it is \\boxed{{{number}}} after 365 days." for number in numbers]
    assert number_match(completions=boxes, answer=answers) == [1.0] * num


def _corrupt(answer):
    head, _, number = answer.rpartition("#### ")
    return f"{head}#### {int(number.replace(',', '')) + 1}"
