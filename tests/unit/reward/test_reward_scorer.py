"""How a step is cut into calls."""

from gruppo.reward.scorer import StepCompletions


def step(prompts):
    return StepCompletions(prompts, ["c"] * len(prompts), None, {}, 0, 0)


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


def test_a_completion_is_described_without_control_characters():
    given = StepCompletions(["p\x1b[2J"], ["\x00" * 300], None, {}, 0, 0)
    text = given.describe(0)
    assert text.isprintable()
    assert text.startswith("completion 0 '\\x00") and "1202 characters" in text
