"""Text of models and data sets: answers in tags, and what may reach a terminal."""

import pytest

from gruppo.text import completion_text, printable, text_inside


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("so <answer> 7 </answer>", " 7 "),
        ("<answer>1</answer> no, <answer>2</answer>.", "2"),
        ("<answer>1<answer>2</answer>", "2"),
        ("<answer></answer>", ""),
        ("7", None),
        ("</answer><answer>", None),
    ],
)
def test_the_last_block_in_tags_counts(text: str, inside: str | None) -> None:
    assert text_inside(text, "answer") == inside


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("42", "42"),
        ([{"role": "user", "content": "6*7"}, {"role": "assistant", "content": "42"}], "42"),
        ([{"role": "assistant", "content": [{"type": "text", "text": "4"}, {"text": "2"}, {"type": "image"}]}], "42"),
        ([{"role": "assistant", "content": None}], ""),
        ([], ""),
    ],
)
def test_the_text_of_a_conversation_is_that_of_its_last_message(completion: object, text: str) -> None:
    assert completion_text(completion) == text


def test_new_lines_stay_and_surrogates_do_not() -> None:
    assert printable("a\n\tb\ud800\x9b") == "a\n\tb\\ud800\\x9b"
    assert printable("a\n\tb", keep="") == "a\\n\\tb"


def test_each_escape_names_its_character() -> None:
    # controls, overrides, separators, private use, a tag, an unassigned code point
    assert printable("\x1b[2J\x07\r\x7f") == "\\x1b[2J\\x07\\r\\x7f"
    assert printable("\u202e\u2066\u200f\u2028\ue000") == "\\u202e\\u2066\\u200f\\u2028\\ue000"
    assert printable("\U000e0041\U0010ffff") == "\\U000e0041\\U0010ffff"


def test_text_of_any_language_stays_as_it_is() -> None:
    text = "Größe 3\u202f000\u00a0€, \u4f60\u597d\u3000\u0915\u093f e\u0301 \U0001f9ee [/red] \\x1b"
    assert printable(text) == text
