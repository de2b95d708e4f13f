"""How a step is cut into calls."""

import pytest

from gruppo.errors import InputError
from gruppo.reward.call import StepCompletions


def step(prompts, group_ids=None):
    return StepCompletions(prompts, ["c"] * len(prompts), group_ids=group_ids)


def test_a_step_is_cut_between_groups_only():
    assert step(list("aaaabbbbccccdddd")).chunks(2) == [range(0, 8), range(8, 16)]
    assert step(list("aaaabbbbcccc")).chunks(2) == [range(0, 8), range(8, 12)]
    assert step(list("aaaaaaaa")).chunks(4) == [range(0, 8)]
    assert step(list("abc")).chunks(8) == [range(0, 1), range(1, 2), range(2, 3)]


def test_equal_message_lists_are_one_group_although_they_are_different_objects():
    prompts = [[{"role": "user", "content": "a"}] for _ in range(4)]
    assert step(prompts).chunks(2) == [range(0, 4)]


def test_single_calls_visit_every_group_before_any_twice():
    assert step(list("aaabbbcc")).spread(range(8)) == [0, 3, 6, 1, 4, 7, 2, 5]
    assert step(list("aaabbbcc")).spread(range(3, 8)) == [3, 6, 4, 7, 5]


def test_groups_that_are_named_count_and_prompts_do_not():
    # the same prompt drawn twice in a row is two groups; a prompt written in two ways is one
    assert step(list("aaaaaaaa"), [5] * 4 + [2] * 4).chunks(2) == [range(0, 4), range(4, 8)]
    assert step(list("aaaaaaaa"), [5] * 4 + [2] * 4).spread(range(8)) == [0, 4, 1, 5, 2, 6, 3, 7]
    assert step(list("abab"), [7] * 4).chunks(2) == [range(0, 4)]


@pytest.mark.parametrize(
    ("group_ids", "text"),
    [
        ([0, 0, 1], "group_ids has 3 entries for 4 completions; give one for each"),
        ([0, 1, 0, 1], r"group_ids must keep the completions of a group together, got 0 in two places"),
    ],
)
def test_groups_that_do_not_fit_are_refused(group_ids, text):
    with pytest.raises(InputError, match=text):
        step(list("aaaa"), group_ids)


def test_a_completion_is_described_without_control_characters():
    given = StepCompletions(["p\x1b[2J"], ["\x00" * 300])
    text = given.describe(0)
    assert text.isprintable()
    assert text.startswith("completion 0 '\\x00") and "1202 characters" in text
