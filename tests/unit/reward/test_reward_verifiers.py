"""Text matching, tags, patterns and lengths, on strings and on messages."""

import pytest

from gruppo.errors import InputError
from gruppo.reward import (
    ExactMatch,
    LengthPenalty,
    NormalizedMatch,
    NumberMatch,
    PatternMatch,
    SoftOverlong,
    TagFormat,
    ThinkFormat,
    exact_match,
    normalized_match,
    number_match,
    tag_format,
    think_format,
)
from gruppo.reward.verifiers import completion_texts, normalize, text_inside, without_thoughts


def message(text):
    return [{"role": "assistant", "content": text}]


@pytest.mark.parametrize(
    ("text", "gold", "exact", "normal"),
    [
        ("42", "42", 1.0, 1.0),
        (" 42\n", "42", 1.0, 1.0),
        ("42.", "42", 0.0, 1.0),
        ("PARIS", "Paris", 0.0, 1.0),
        ("“Paris”!", "paris", 0.0, 1.0),
        ("new   york", "New York", 0.0, 1.0),
        ("(B)", "b", 0.0, 1.0),
        ("-5", "5", 0.0, 0.0),
        ("−5", "-5", 0.0, 1.0),
        (".5", "5", 0.0, 0.0),
        ("-$5", "-5", 0.0, 1.0),
        ("3.5", "35", 0.0, 0.0),
        ("London", "Paris", 0.0, 0.0),
        ("", "Paris", 0.0, 0.0),
        ("Straße", "STRASSE", 0.0, 1.0),
        ("कि", "का", 0.0, 0.0),
    ],
)
def test_exact_and_normalised_match(text, gold, exact, normal):
    for completion in (text, message(text)):
        assert exact_match(completions=[completion], answer=[gold]) == [exact]
        assert normalized_match(completions=[completion], answer=[gold]) == [normal]


def test_a_row_without_an_answer_abstains():
    assert exact_match(completions=["42"], answer=[None]) == [None]


def test_a_number_as_gold_is_compared_as_text():
    assert exact_match(completions=["42"], answer=[42]) == [1.0]


def test_the_column_is_a_parameter_and_must_be_there():
    assert ExactMatch(column="target")(completions=["a"], target=["a"], answer=["b"]) == [1.0]
    with pytest.raises(InputError, match="needs the column 'target', got answer"):
        ExactMatch(column="target")(completions=["a"], answer=["b"])


def test_only_the_last_block_is_read_when_inside_is_given():
    inside = NormalizedMatch(inside="answer")
    texts = ["<answer>1</answer><answer>2</answer>", "2", "<answer>2", "2</answer>", "</answer><answer>2"]
    assert inside(completions=texts, answer=["2"] * 5) == [1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("42", "42"),
        ("<think>41</think> 42", " 42"),
        ("41</think>42", "42"),
        ("<think>40</think>41<think>41</think>42", "42"),
        ("<think>a</think>42<think>43", "42"),
        ("42<think>43", "42"),
        ("<think>a</think>", ""),
        ("", ""),
        ("<think>42", None),
        (" \n<think>42", None),
        ("<think>41</think>\n<think>42", None),
        ("<think>41<think>42</think>43", "43"),
        ("<thinking>42", "<thinking>42"),
    ],
)
def test_thoughts_end_at_the_last_closing_tag_and_an_unclosed_one_never_ends(text, answer):
    assert without_thoughts(text) == answer


@pytest.mark.parametrize("verifier", [exact_match, normalized_match, number_match])
def test_a_verifier_reads_the_answer_and_not_the_thoughts(verifier):
    texts = ["<think>41</think>42", "<think>42</think>41", "<think>42", "<think>42</think>", "42<think>41"]
    assert verifier(completions=texts, answer=["42"] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert verifier(completions=[message(text) for text in texts], answer=["42"] * 5) == [1.0, 0.0, 0.0, 0.0, 1.0]


def test_a_block_inside_the_thoughts_is_not_read():
    inside = NormalizedMatch(inside="answer")
    texts = ["<think><answer>2</answer></think>2", "<think><answer>1</answer></think><answer>2</answer>"]
    assert inside(completions=texts, answer=["2", "2"]) == [0.0, 1.0]


def test_thought_without_an_answer_is_not_the_empty_answer():
    assert exact_match(completions=["", "<think>a</think>", "<think>a"], answer=[""] * 3) == [1.0, 1.0, 0.0]


def test_a_gold_that_cannot_be_used_abstains_for_completions_without_an_answer_too():
    golds = ["(1,2)"] * 3
    assert NumberMatch(inside="answer")(completions=["<answer>2</answer>", "2", "<think>2"], answer=golds) == [None] * 3


def test_normalising_is_idempotent():
    for text in ("-$3.50!", "a . b", "(-.5)", "« Ça va ? »"):
        assert normalize(normalize(text)) == normalize(text)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>a</think>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a</think>text<answer>b</answer>", 0.0),
        ("text<think>a</think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b</answer>text", 0.0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 0.0),
        ("<think><think>a</think></think><answer>b</answer>", 0.0),
        ("<think>a<answer>b</answer></think>", 0.0),
        ("<think>a<think>b</think><answer>c</answer>", 0.0),
        ("<think>a</answer>b</think><answer>c</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer> </answer>", 0.0),
        ("</think><think>a<answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_tags_must_stand_once_in_order_and_hold_something(text, score):
    assert tag_format(completions=[text, message(text)]) == [score, score]


def test_a_tag_opened_by_the_prompt_counts():
    assert TagFormat(prefix="<think>\n")(completions=["a</think><answer>b</answer>"]) == [1.0]
    assert TagFormat(tags=["sum"])(completions=["<sum>1</sum>"]) == [1.0]
    with pytest.raises(InputError):
        TagFormat(tags=())


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think>b", 1.0),
        ("\n <think>\na\n</think>\n\nb\nc\n", 1.0),
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> \n", 0.0),
        ("<think></think>b", 0.0),
        ("<think> \n</think>b", 0.0),
        ("text<think>a</think>b", 0.0),
        ("a</think>b", 0.0),
        ("<think>a b", 0.0),
        ("</think>a<think>b", 0.0),
        ("<think><think>a</think>b", 0.0),
        ("<think>a</think></think>b", 0.0),
        ("<think>a</think>b<think>c</think>d", 0.0),
        ("<think>a</think>b<think>", 0.0),
        ("b", 0.0),
        ("", 0.0),
    ],
)
def test_thought_must_stand_once_and_first_with_an_answer_after_it(text, score):
    assert think_format(completions=[text, message(text)]) == [score, score]


def test_thought_opened_by_the_prompt_counts():
    opened = ThinkFormat(prefix="<think>\n")
    texts = ["a</think>b", "<think>a</think>b", "</think>b", "a</think>", "a"]
    assert opened(completions=texts) == [1.0, 0.0, 0.0, 0.0, 0.0]


def test_a_pattern_is_searched_in_the_end_of_the_text():
    pattern = PatternMatch(pattern=r"^Answer: \d+$", max_chars=12)
    assert pattern(completions=["Answer: 42", message("Answer: x"), "..." * 9 + "Answer: 1234"]) == [1.0, 0.0, 1.0]


def test_a_pattern_may_come_with_the_row():
    assert PatternMatch()(completions=["abc", "abc", "abc"], pattern=["b", "^b", None]) == [1.0, 0.0, None]


def test_an_expression_that_does_not_compile_is_refused_at_construction():
    with pytest.raises(InputError, match=r"'\(' is not a regular expression"):
        PatternMatch(pattern="(")


def test_soft_overlong_is_equation_13_of_dapo():
    soft = SoftOverlong(max_length=20, cache=8)
    lengths = [0, 12, 13, 16, 19, 20, 21, 1000]
    assert soft(completion_ids=[[0] * n for n in lengths]) == [0.0, 0.0, -0.125, -0.5, -0.875, -1.0, -1.0, -1.0]
    with pytest.raises(InputError):
        SoftOverlong(max_length=10, cache=11)


def test_length_penalty_grows_with_the_distance_from_the_target():
    assert LengthPenalty(scale=100)(completion_ids=[[], [0] * 25, [0] * 500]) == [0.0, -0.25, -1.0]
    assert LengthPenalty(target=10, scale=10)(completion_ids=[[0] * 5, [0] * 10, [0] * 15]) == [-0.5, 0.0, -0.5]


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
    assert completion_texts([completion, "next"]) == [text, "next"]
