"""What reaches the terminal: readable lines, and no control character or markup of a model's."""

import io
import re
from typing import Any, get_args

import pytest
from rich.console import Console

from gruppo.keys import KEYS
from gruppo.process.streams import printable
from gruppo.run.console import SHOWN, RunConsole, readable_time, spoken, step_line, visible
from gruppo.run.transcript import STOPS, call_text
from gruppo.types import CUT, LOST, Group, Prompt, Rollout, StopReason, Trajectory

METRICS = {
    "reward/mean": 0.4375,
    "group/dead_frac": 0.25,
    "optim/grad_norm": 0.123,
    "completion/len_mean": 3.9,
    "live/clip_ratio": 0.0123,
    "rollout/entropy": 0.678,
}
HOSTILE = "\x1b[2J\x1b]0;owned\x07[/red][bold]\u202e\u2066\u200f\x00\x9b31m\ud800</script>\tend"
FORBIDDEN = ("\x1b", "\x07", "\u202e", "\u2066", "\u200f", "\x00", "\x9b", "\t")


def test_the_line_of_a_step() -> None:
    assert step_line(7, 120, METRICS, 0.0417) == (
        "step   7/120  reward 0.438  signal 75%  grad 0.12  clip 1.2%  entropy 0.68  length 4  42 ms"
    )


def test_a_line_that_is_too_long_leaves_out_what_matters_least() -> None:
    given = METRICS | {"eval/accuracy": 0.5, "completion/len_mean": 1024.0}
    assert step_line(1000, 1000, given, 99.9, left=5940.0) == (
        "step 1000/1000  reward 0.438  held-out accuracy 0.500  signal 75%  grad 0.12  clip 1.2%  entropy 0.68  "
        "length 1024  99.9 s  left 99 min"
    )
    assert step_line(1000, 1000, given, 99.9, left=5940.0, width=100) == (
        "step 1000/1000  reward 0.438  held-out accuracy 0.500  signal 75%  grad 0.12  99.9 s  left 99 min"
    )
    assert step_line(1000, 1000, given, 99.9, width=60) == (
        "step 1000/1000  reward 0.438  held-out accuracy 0.500  signal 75%  99.9 s"
    )


def test_every_line_of_a_log_fits_100_columns_and_of_a_terminal_its_width() -> None:
    sentence = "layout auto: " + "prompt tokens computed once instead of eight times, " * 4
    for terminal, width, limit in ((False, 80, 100), (True, 80, 80), (True, 300, 100)):
        console, raw = printed(force_terminal=terminal, color_system=None, width=width)
        report = RunConsole(1000, console)
        report.say(sentence)
        report.step(1000, METRICS | {"eval/accuracy": 0.5, "completion/len_mean": 1024.0}, 99.9)
        report.completions("t", hostile_groups())
        report.close()
        text = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", raw.getvalue().decode())
        lines = [line for line in re.split("[\r\n]", text) if "left" not in line or not terminal]  # without the bar
        assert max(map(len, lines)) <= limit
        assert " ".join(text.split()).count(sentence.split(": ")[1].strip()) == 1 or terminal


def test_the_bar_names_the_stage_and_how_long_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    console, raw = printed(force_terminal=True, color_system=None, width=100)
    now = [100.0]
    monkeypatch.setattr("gruppo.run.console.time.monotonic", lambda: now[0])
    stage = ["eval"]
    report = RunConsole(10, console, stage=lambda: stage[0])
    assert report.progress is not None
    report.progress.refresh()
    now[0] += 35.0
    report.progress.refresh()
    stage[0] = "sample"
    report.progress.refresh()
    report.close()
    frames = re.findall("(evaluating|sampling)( [0-9.]+ s)?", raw.getvalue().decode())
    assert [frame for i, frame in enumerate(frames) if frame not in frames[:i]] == [
        ("evaluating", ""),
        ("evaluating", " 35.0 s"),
        ("sampling", ""),
    ]


def test_a_terminal_has_a_line_for_every_evaluation() -> None:
    console, raw = printed(force_terminal=True, color_system=None, width=100)
    report = RunConsole(100, console)
    for step in range(1, 11):
        report.step(step, METRICS | ({"eval/accuracy": 0.5} if step == 7 else {}), 0.01)
    report.close()
    assert re.findall(r"step +(\d+)/100", raw.getvalue().decode()) == ["5", "7", "10"]


def test_the_score_of_the_start_is_a_line_once_it_is_there() -> None:
    console, raw = printed(width=80)
    RunConsole(200, console).evaluated(0, {"eval/accuracy": 0.299})
    assert raw.getvalue().decode() == "step   0/200  held-out accuracy 0.299\n"


def test_the_table_shows_groups_that_teach_something_and_each_prompt_once() -> None:
    console, raw = printed(width=80)

    def group(name: str, *advantages: float) -> Group:
        prompt = Prompt(token_ids=(1,), text=name)
        made = (Trajectory(prompt=prompt, tokens=(3,), text=f"{name}{a:g}") for a in advantages)
        rollouts = tuple(Rollout(trajectory=t, reward=a, advantage=a) for t, a in zip(made, advantages, strict=True))
        return Group(prompt=prompt, rollouts=rollouts)

    groups = [
        group("dead", 0.0, 0.0),
        group("live", 1.5, 0.0, -1.5),
        group("also", 0.5, -0.5),
        group("more", 1.0, -1.0),
    ]
    RunConsole(10, console).completions("t", groups, limit=2)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in raw.getvalue().decode().splitlines()]
    assert [row for row in rows if row] == [
        ["live", "live1.5", "1.5", "+1.50"],
        ["", "live-1.5", "-1.5", "-1.50"],
        ["also", "also0.5", "0.5", "+0.50"],
        ["", "also-0.5", "-0.5", "-0.50"],
    ]
    raw.truncate(0)
    RunConsole(10, console).completions("t", groups[:1] * 3, limit=2)
    assert raw.getvalue().decode().count("dead0") == 2  # none teaches: one group shows what they look like


def shown_prompts(*prompts: Prompt) -> list[str]:
    """The first column of the table, without the rows in which it is empty."""
    console, raw = printed(width=100)
    groups = []
    for prompt in prompts:
        trajectory = Trajectory(prompt=prompt, tokens=(3,), text="c")
        groups.append(Group(prompt=prompt, rollouts=(Rollout(trajectory=trajectory, reward=1.0, advantage=1.0),)))
    RunConsole(10, console).completions("t", groups)
    rows = [line.split("│")[1].strip() for line in raw.getvalue().decode().splitlines() if "│" in line]
    return [row for row in rows if row]


# --- episodes ---------------------------------------------------------------------------------------------------------

MULTIPLY = {"function": {"name": "multiply", "arguments": '{"a": 37, "b": "x"}'}}
TALK: Any = (
    {"role": "assistant", "content": "Let me\nsee.", "tool_calls": [MULTIPLY, {"error": "it is no JSON"}]},
    {"role": "tool", "content": "TypeError: no", "name": "multiply", "is_error": True},
    {"role": "user", "content": "go on"},
    {"role": "assistant", "content": "1776"},
)


def talked(**facts: Any) -> Trajectory:
    prompt = Prompt(token_ids=(1,), text="37*48?")
    return Trajectory(prompt=prompt, tokens=(3,), **({"text": "1776", "messages": TALK} | facts))


def test_a_row_with_turns_has_the_last_text_and_the_numbers() -> None:
    console, raw = printed(width=100)
    made = [
        talked(),
        talked(text="", messages=TALK[:1], stop_reason="env_error", error="KeyError: 1"),
    ]
    rollouts = tuple(Rollout(trajectory=t, reward=r, advantage=1.0) for t, r in zip(made, (1.0, None), strict=True))
    RunConsole(10, console).completions("t", [Group(prompt=made[0].prompt, rollouts=rollouts)])
    text = raw.getvalue().decode()
    assert "1776 (2 turns, 2 calls) " in text
    cells = [line.split("│")[2].strip() for line in text.splitlines() if line.count("│") > 3]
    assert " ".join(cells[1:]) == "(1 turn, 2 calls; lost: the environment failed)"
    assert "\x1b" not in text


def test_an_episode_is_printed_turn_by_turn() -> None:
    assert [line.plain for line in spoken(talked(stop_reason="turns"))] == [
        "   1  Let me\u21b5see.",
        '      multiply(a=37, b="x")',
        "      unreadable call: it is no JSON",
        "      multiply failed: TypeError: no",
        "      user: go on",
        "   2  1776",
        "  2 turns, 2 calls; cut at the limit of turns",
    ]
    lost = talked(messages=TALK[:1], stop_reason="deadline", error="Traceback\n  no answer within 30 s\n")
    assert spoken(lost)[-1].plain == (
        "  1 turn, 2 calls; lost: the environment did not answer in time: no answer within 30 s"
    )


def test_nothing_that_a_tool_says_reaches_the_terminal() -> None:
    call = {"function": {"name": HOSTILE, "arguments": {HOSTILE: HOSTILE}}}
    talk: Any = (
        {"role": "assistant", "content": HOSTILE, "tool_calls": [call, {"error": HOSTILE}]},
        {"role": "tool", "content": HOSTILE * 100_000, "name": HOSTILE, "is_error": True},
    )
    console, raw = printed(force_terminal=True, color_system=None, width=100)
    made = talked(text=HOSTILE, messages=talk, stop_reason="env_error", error=HOSTILE)
    for line in spoken(made):
        console.print(line, soft_wrap=True)
    rollout = Rollout(trajectory=made, advantage=1.0)
    report = RunConsole(10, console)
    report.completions("t", [Group(prompt=made.prompt, rollouts=(rollout,))])
    report.close()
    text = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "", raw.getvalue().decode())
    assert not any(mark in text for mark in FORBIDDEN)
    assert len(text) < 20_000


@pytest.mark.parametrize(
    ("call", "text"),
    [
        ({"function": {"name": "f", "arguments": {}}}, "f()"),
        ({"function": {"name": "f", "arguments": {"a": [1, None], "b": {"c": 1.5}}}}, 'f(a=[1, null], b={"c": 1.5})'),
        ({"function": {"name": "f", "arguments": "not JSON"}}, "f(not JSON)"),
        ({"function": {"name": "f", "arguments": "[1, 2]"}}, "f([1, 2])"),
        ({"function": {"name": "f", "arguments": None}}, "f()"),
        ({"function": 3}, "None()"),
        ({"error": "no name", "function": {"name": "f"}}, "unreadable call: no name"),
    ],
)
def test_a_call_is_written_as_one_writes_it(call: dict[str, Any], text: str) -> None:
    assert call_text(call) == text


def test_every_stop_reason_has_its_words_which_begin_with_its_kind() -> None:
    assert list(STOPS) == list(get_args(StopReason))
    assert {stop for stop, words in STOPS.items() if words.startswith("cut ")} == CUT
    assert {stop for stop, words in STOPS.items() if words.startswith("lost: ")} == LOST


SYSTEM = "Respond in the following format: <reasoning> ... </reasoning> <answer> ... </answer>"
TURNS = "<|im_start|>system\n{}<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def test_the_table_shows_the_question_of_a_chat_and_not_its_template() -> None:
    def chat(question: str) -> Prompt:
        turns = [("system", SYSTEM), ("user", "Hello"), ("assistant", "Hello!"), ("user", question)]
        source: Any = [{"role": role, "content": text} for role, text in turns]
        return Prompt(token_ids=(1,), text=TURNS.format(SYSTEM, question), source=source)

    assert shown_prompts(chat("How many apples?"), chat("How many pears?")) == ["How many apples?", "How many pears?"]


def test_the_table_leaves_out_what_all_prompts_of_a_step_begin_and_end_with() -> None:
    def made(form: str, *questions: str) -> list[Prompt]:
        return [Prompt(token_ids=(1,), text=form.format(SYSTEM, text), source=text) for text in questions]

    # `How many` is common too, and so is the question mark: what is left is whole words.
    assert shown_prompts(*made(TURNS, "How many apples?", "How many pears?")) == ["apples?", "pears?"]
    sums = made("Add the numbers ({}).\nQ: {}\nA:", "12+30=", "14+31=")
    assert shown_prompts(*sums) == ["12+30=", "14+31="]  # not 2+30= and 4+31=, though all begin with a 1
    assert shown_prompts(*made("{1}", "12+30=", "14+31=")) == ["12+30=", "14+31="]
    (one,) = made(TURNS, "How many apples?")  # the row's text, also where there is nothing to compare the template with
    assert shown_prompts(one, one) == ["How many apples?", "How many apples?"]


def test_the_line_of_a_step_with_an_evaluation() -> None:
    line = step_line(10, 10, METRICS | {"eval/accuracy": 0.9}, 2.0)
    assert "  held-out accuracy 0.900  " in line and line.endswith("2.0 s")
    both = step_line(10, 10, METRICS | {"eval/accuracy": 0.9, "eval/reward": 1.5}, 2.0)
    assert both == line  # the reward of held-out prompts is told where nothing else is known of them
    assert "  held-out reward 1.500  " in step_line(10, 10, METRICS | {"eval/reward": 1.5}, 2.0)


def test_the_line_of_a_step_in_which_nothing_was_scored() -> None:
    bare = {"group/dead_frac": 1.0, "completion/len_mean": 3.9}
    assert step_line(1, 9, bare, 1.0) == "step 1/9  reward none  signal 0%  grad none  length 4  1.0 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (1, "1.0 s"),
        (59.94, "59.9 s"),
        (150, "2 min"),
        (5999, "100 min"),
        (7200, "2.0 h"),
    ],
)
def test_times_are_readable(seconds: float, text: str) -> None:
    assert readable_time(seconds) == text


@pytest.mark.row("R-48", "ANSI, markup and bidi marks in completions")
def test_visible_text_has_no_control_characters_and_no_markup() -> None:
    shown = visible(HOSTILE)
    assert not any(c in shown.plain for c in FORBIDDEN)
    assert shown.plain.encode("utf-8")  # no lone surrogate is left
    assert "[/red][bold]" in shown.plain and shown.spans == []
    assert shown.plain.endswith("</script>\\tend")


def test_visible_text_shows_line_ends_and_is_not_endless() -> None:
    assert visible("a\nb").plain == "a\u21b5b"
    assert visible("x" * 500, limit=10).plain == "x" * 10 + "…"
    assert visible("x" * 10, limit=10).plain == "x" * 10
    assert visible(None).plain == "None"


def hostile_groups() -> list[Group]:
    sequence = Trajectory(prompt=Prompt(token_ids=(1,)), tokens=(3,), logps=(-1.0,), text=HOSTILE, stop_reason="stop")
    prompt = Prompt(token_ids=(1,), text=HOSTILE)
    rollouts = (Rollout(trajectory=sequence, reward=1.0), Rollout(trajectory=sequence, reward=None, advantage=-0.5))
    return [Group(prompt=prompt, rollouts=rollouts)]


def printed(encoding: str = "utf-8", errors: str = "strict", **options: Any) -> tuple[Console, io.BytesIO]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding, errors=errors, write_through=True)
    return Console(file=stream, highlight=False, **options), raw


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.row("R-48", "hostile completions in the table")
def test_the_table_of_completions_lets_nothing_through(terminal: bool) -> None:
    console, raw = printed(force_terminal=terminal, color_system=None, width=100)
    report = RunConsole(10, console)
    report.completions("title", hostile_groups())
    report.close()
    text = raw.getvalue().decode()
    forbidden = [c for c in FORBIDDEN if c != "\x1b"]
    assert not any(c in text for c in forbidden)
    assert "[2J" in text  # shown as text ...
    assert "\x1b[2J" not in text and "\x1b]0" not in text  # ... and not obeyed


def test_a_line_of_the_run_takes_no_markup() -> None:
    console, raw = printed(width=80)
    RunConsole(10, console).say("note: [/red] is not markup")
    assert raw.getvalue().decode() == "note: [/red] is not markup\n"


def test_plain_lines_are_one_per_step_with_the_time_left() -> None:
    console, raw = printed(width=20)
    report = RunConsole(10, console)
    for step in (1, 2, 3):
        report.step(step, METRICS, 0.01)
    lines = raw.getvalue().decode().splitlines()
    assert [line[:10] for line in lines] == ["step  1/10", "step  2/10", "step  3/10"]
    assert all("  left " in line for line in lines)


def test_a_narrow_terminal_shows_the_table() -> None:
    console, raw = printed(width=20)
    RunConsole(10, console).completions("t", hostile_groups())
    lines = raw.getvalue().decode().splitlines()
    assert len(lines) > 5 and all(len(line) <= 20 for line in lines)


def test_an_advantage_per_token_is_shown_as_its_mean() -> None:
    console, raw = printed(width=80)
    trajectory = Trajectory(prompt=Prompt(token_ids=(1,)), tokens=(3, 4), text="x")
    group = Group(prompt=Prompt(token_ids=(1,)), rollouts=(Rollout(trajectory=trajectory, advantage=(0.5, -1.0)),))
    RunConsole(10, console).completions("t", [group])
    assert "-0.25" in raw.getvalue().decode()


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


def test_the_line_of_a_step_has_the_keys_that_the_registry_marks() -> None:
    shown = ["reward/mean", "eval/accuracy", "eval/reward", "group/dead_frac", "optim/grad_norm", "live/clip_ratio"]
    assert [key.name for key in SHOWN] == [*shown, "rollout/entropy", "completion/len_mean"]
    assert {key.name for key in KEYS if key.line} == {key.name for key in SHOWN}


def test_several_rewards_are_shown_apart() -> None:
    several = METRICS | {
        "reward/number_match/abstain_frac": 0.0,
        "reward/number_match/mean": 0.25,
        "reward/think_format/abstain_frac": 0.5,
        "reward/think_format/mean": 0.75,
        "reward/judge/abstain_frac": 1.0,
        "reward/number_match/own": 7.0,
    }
    line = step_line(7, 120, several, 0.042)
    assert "  reward 0.438 (number_match 0.250, think_format 0.750, judge none)  signal" in line
