"""Episodes on the page: turns as blocks, calls and answers by name, how each ended; hostile tools do no harm."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pages import until
from test_hostile_pages import ATTACKS
from written_episodes import QUESTION, Words, answers, call, episode, says, write_episodes
from written_runs import metrics_of, rollout, run_directory

from gruppo.report.charts import charts
from gruppo.report.data import TEXT_LIMIT, Limits, TokenTexts, step_data, step_rows
from gruppo.report.page import report_page
from gruppo.run.directory import RunDirectory
from gruppo.run.transcript import STOPS
from gruppo.types import Group, Prompt

MEGABYTE = 2**20
BLOCKS = """card => [...card.querySelectorAll('.turn')].map(block => [
  block.querySelector('.turn-label').textContent + (block.classList.contains('failed') ? ' (red)' : ''),
  ...[...block.querySelectorAll('.said')].map(e => (e.classList.contains('failed') ? 'RED ' : '') + e.textContent),
  [...block.querySelectorAll('.tok')].map(token => token.textContent).join('')])"""
CALL = '<tool_call>↵\n{"name": "multiply", "arguments": {"a": 37, "b": 48}}↵\n</tool_call><|im_end|>'


def told(text: str) -> str:
    return f"↵<|im_start|>user↵{text}<|im_end|>↵<|im_start|>assistant↵"


def tool(text: str) -> str:
    return told(f"<tool_response>↵{text}↵</tool_response>")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return write_episodes(tmp_path_factory.mktemp("episodes") / "run", steps=2)


@pytest.fixture(scope="module")
def address(run: RunDirectory) -> str:
    return written(run)


def written(run: RunDirectory) -> str:
    file = run.path / "report.html"
    file.write_text(report_page([run]))
    return file.resolve().as_uri()


# --- data -------------------------------------------------------------------------------------------------------------


def test_the_page_has_each_message_with_its_calls_as_one_writes_them(run: RunDirectory) -> None:
    group, _ = step_data(run, 1, TokenTexts(run))["groups"]
    plain = {"characters": 0, "calls": [], "failed": False, "text": ""}
    assert group["rollouts"][0]["messages"] == [
        plain | {"own": True, "by": "assistant", "calls": [{"text": "multiply(a=37, b=48)", "failed": False}]},
        plain | {"own": False, "by": "multiply", "text": "1776", "characters": 4},
        plain | {"own": True, "by": "assistant", "text": "The answer is 1776.", "characters": 19},
    ]
    unread = "unreadable call: it is no JSON: Expecting ',' at character 12"
    assert group["rollouts"][3]["messages"][0]["calls"] == [{"text": unread, "failed": True}]
    assert group["rollouts"][3]["messages"][1]["failed"] is True


def test_rows_of_a_search_have_all_that_was_said_and_the_number_of_turns(run: RunDirectory) -> None:
    rows = step_rows(run, 1)
    assert [row[-1] for row in rows] == [2, 3, 1, 3, 1, 1, 1, 2, 3, 3]
    assert rows[0][4] == "multiply(a=37, b=48)\n1776\nThe answer is 1776."
    assert rows[8][4:] == ["4\nhigher\n6\nlower\n5\nYou win!", "done", 1.0, True, 3]


def test_a_prompt_of_its_own_is_that_of_the_rollout(run: RunDirectory) -> None:
    _, game = step_data(run, 1, TokenTexts(run))["groups"]
    assert "from 1 to 8." in game["prompt"]
    assert game["rollouts"][0]["prompt"] is None and "from 1 to 16." in game["rollouts"][1]["prompt"]


def test_long_messages_share_the_room_of_a_text(tmp_path: Path) -> None:
    words, prompt = Words(), Prompt(token_ids=(1,), text=QUESTION)
    talk = [says("x" * 99), answers("long " * 30_000), says("end"), answers("no " * 5)]
    made = episode(words, prompt, talk, random.Random(0))
    run = write_episodes(tmp_path / "run", (prompt, [made]), words=words)
    (found,) = step_data(run, 1, TokenTexts(run), Limits(tokens=10**6))["groups"][-1]["rollouts"]
    assert [len(message["text"]) for message in found["messages"]] == [99, TEXT_LIMIT // 4, 3, 15]
    assert found["messages"][1]["characters"] == 150_000
    (whole,) = step_data(run, 1, TokenTexts(run))["groups"][-1]["rollouts"]
    assert len(whole["messages"][1]["text"]) == 150_000


def test_a_file_from_before_episodes_is_shown(run: RunDirectory, tmp_path: Path) -> None:
    with run_directory(tmp_path / "old", 1) as old:
        old.log_metrics(1, metrics_of(1, random.Random(0)))
    old.completions_file(1).parent.mkdir(exist_ok=True)
    pq.write_table(run.completions(1).drop_columns(["messages"]), old.completions_file(1))
    group, _ = step_data(old, 1, TokenTexts(old))["groups"]
    assert group["rollouts"][0]["messages"] is None and group["rollouts"][0]["text"] == "The answer is 1776."
    assert step_rows(old, 1)[0][4:] == ["The answer is 1776.", "stop", 1.0, True, None]
    assert "<!doctype html>" in report_page([old])


@pytest.mark.parametrize(
    "text", ["", "no JSON", "{}", "[1]", "[" * 10**5, '[{"role": 1, "content": [{"a": 2}], "tool_calls": [3, {}]}]']
)
def test_messages_that_are_not_those_of_a_run_do_no_harm(text: str, run: RunDirectory, tmp_path: Path) -> None:
    table = run.completions(1)
    place = table.schema.get_field_index("messages")
    column = table.schema.field("messages")
    odd = table.set_column(place, column, [[text] * table.num_rows])
    with run_directory(tmp_path / "odd", 1) as made:
        pass
    made.completions_file(1).parent.mkdir(exist_ok=True)
    pq.write_table(odd, made.completions_file(1))
    (first, *_), _ = (group["rollouts"] for group in step_data(made, 1, TokenTexts(made))["groups"])
    if text.startswith("[{"):
        calls = [{"text": "None()", "failed": False}]
        said = {"own": False, "by": "1", "text": '[{"a": 2}]', "characters": 10, "calls": calls, "failed": False}
        assert first["messages"] == [said]
    else:
        assert first["messages"] is None
    assert "<!doctype html>" in report_page([made])


def test_turns_have_charts_where_there_are_turns_and_no_place_elsewhere(run: RunDirectory, tmp_path: Path) -> None:
    names = ["Learning", "Signal", "Policy", "Sampler", "Turns", "Time"]
    found = charts([run])
    assert [question["name"] for question in found] == names
    assert [chart["title"] for chart in found[4]["charts"]] == [
        *("turns of an episode", "tool calls of an episode", "calls that fail", "episodes cut or lost"),
        "tokens written by others",
    ]
    with run_directory(tmp_path / "plain", 1) as plain:
        plain.log_metrics(1, metrics_of(1, random.Random(0)))
    names.remove("Turns")
    assert [question["name"] for question in charts([plain])] == names


# --- the viewer -------------------------------------------------------------------------------------------------------


def chosen(open_page: Any, address: str, words: str = "37") -> Any:
    opened = open_page(address)
    opened.page.locator(".group").filter(has_text=words).first.click()
    assert opened.errors == []
    return opened.page


def test_each_turn_is_a_block_with_its_calls_and_what_was_answered(open_page, address):
    page = chosen(open_page, address)
    cards = page.locator(".rollout")
    assert cards.nth(0).evaluate(BLOCKS) == [
        ["turn 1", "multiply(a=37, b=48)", CALL],
        ["answer", "multiply 1776", tool("1776")],
        ["turn 2", "The answer is 1776.<|im_end|>"],
    ]
    error = "TypeError: can't multiply sequence by non-int of type 'str'"
    assert [block[:2] for block in cards.nth(1).evaluate(BLOCKS)] == [
        ["turn 1", 'multiply(a=37, b="forty-eight")'],
        ["answer (red)", f"RED multiply failed {error}"],
        ["turn 2", "multiply(a=37, b=48)"],
        ["answer", "multiply 1776"],
        ["turn 3", "It is 1776, I think.<|im_end|>"],
    ]
    assert cards.nth(3).evaluate(BLOCKS)[0][:2] == [
        "turn 1",
        "RED unreadable call: it is no JSON: Expecting ',' at character 12",
    ]
    label, line, tokens = cards.nth(5).evaluate(BLOCKS)[1]
    assert (label, line[:24], tokens) == ("answer, not seen by the policy", "search Lorem ipsum dolor", "")
    colours = [set(cards.nth(0).locator(f"{kind} .tok").evaluate_all("all => all.map(t => getComputedStyle(t).color)"))
               for kind in (".turn.own", ".turn:not(.own)")]  # fmt: skip
    assert len(colours[0]) == len(colours[1]) == 1 and colours[0] != colours[1]  # what was given is grey


def test_a_conversation_without_tools_has_its_roles_and_its_own_prompt(open_page, address):
    page = chosen(open_page, address, "Guess")
    first = page.locator(".rollout").nth(0)
    assert first.evaluate(BLOCKS) == [
        ["turn 1", "4<|im_end|>"],
        ["answer", "user higher", told("higher")],
        ["turn 2", "6<|im_end|>"],
        ["answer", "user lower", told("lower")],
        ["turn 3", "5<|im_end|>"],
        ["answer, not seen by the policy", "user You win!", ""],
    ]
    assert first.locator(".prompt-text").count() == 0
    assert "from 1 to 16." in page.locator(".rollout").nth(1).locator(".prompt-text").text_content()


def test_every_end_is_in_words_and_a_lost_episode_says_why(open_page, address):
    page = chosen(open_page, address)
    ends = page.locator(".rollout .end")
    assert ends.all_text_contents() == [
        "the model ended it",
        "the environment ended it",
        "the model ended it",
        "cut at the limit of turns",
        "cut at the limit of tokens",
        "cut at the end of the model's context",
        "lost: the environment failed: ZeroDivisionError: division by zero",
        "lost: the environment did not answer in time: no answer within 30 s",
    ]
    assert ends.evaluate_all("all => all.map(e => e.className)") == [
        *["end"] * 3,
        *["end cut"] * 3,
        *["end lost"] * 2,
    ]
    failed = page.locator(".rollout").nth(6).locator("details").filter(has_text="environment failed")
    assert "line 7, in step" in failed.text_content()
    assert page.locator("#v-stop option").all_text_contents() == ["any", *STOPS.values()]
    assert page.locator("#v-stop option").evaluate_all("all => all.map(o => o.value)") == ["", *STOPS]


def test_completions_name_their_turns_and_calls(open_page, address):
    page = chosen(open_page, address)
    heads = page.locator(".rollout .head").all_text_contents()
    numbers = ["2 turns, 1 call", "3 turns, 2 calls", "1 turn", "3 turns, 3 calls", "1 turn"]
    assert [head.endswith(f"{number} ") for head, number in zip(heads, numbers, strict=False)] == [True] * 5


def test_a_search_finds_what_a_tool_said_and_shows_the_place(open_page, address):
    page = chosen(open_page, address)
    page.fill("#v-text", "non-int OF type")
    assert page.locator(".rollout:not(.dim) .head").all_text_contents()[0].startswith("#1")
    assert page.locator(".rollout:not(.dim)").count() == 1
    page.click("#v-all")
    until(page, "/in 2 of 2 steps/.test(document.querySelector('#v-results .note').textContent)")
    found = page.locator("#v-results tbody tr td:nth-child(4)").all_text_contents()
    assert len(found) == 2 and all(text.startswith("3 turns") and "non-int of type" in text for text in found)
    page.fill("#v-text", "")
    page.select_option("#v-stop", "env_error")
    assert page.locator(".rollout:not(.dim) .end").all_text_contents() == [
        "lost: the environment failed: ZeroDivisionError: division by zero"
    ]


def test_the_conversation_is_there_in_full(open_page, address):
    page = chosen(open_page, address)
    card = page.locator(".rollout").nth(1)
    card.locator("summary").filter(has_text="conversation").click()
    card.locator(".message > b").nth(4).wait_for()  # it is written once the fold has opened
    assert card.locator(".message > b").all_text_contents() == [
        *("policy", "multiply, failed", "policy", "multiply", "policy")
    ]
    assert card.locator(".message pre").all_text_contents() == [
        "Let me see. ",
        'multiply(a=37, b="forty-eight")',
        "TypeError: can't multiply sequence by non-int of type 'str'",
        "multiply(a=37, b=48)",
        "1776",
        "It is 1776, I think.",
    ]


def test_a_turn_that_goes_on_after_the_first_tokens_keeps_its_number(open_page, tmp_path):
    words, prompt = Words(), Prompt(token_ids=(1,), text="long")
    talk = [says("one"), answers("a b " * 400), says("two"), answers("c " * 10), says("three")]
    made = episode(words, prompt, talk, random.Random(0), reward=1.0)
    page = chosen(open_page, written(write_episodes(tmp_path / "run", (prompt, [made]), words=words)), "long")
    strip = page.locator(".strip").first
    strip.locator("button").click()
    assert [block[0] for block in strip.evaluate(BLOCKS)] == [
        *("turn 1", "answer", "tool or user, continued", "turn 2", "answer", "turn 3")
    ]


# --- hostile ones -----------------------------------------------------------------------------------------------------


def test_what_a_hostile_tool_says_is_shown_and_never_run(open_page, tmp_path):
    words, draw = Words(), random.Random(0)
    with run_directory(tmp_path / "run", 1) as run:
        groups = []
        for i, (name, text) in enumerate(ATTACKS.items()):
            prompt = Prompt(token_ids=(3,), text=name, index=i)
            talk = [says(text, call(text, **{text: text}), error=text), answers(text, text, is_error=True), says(text)]
            facts = {"stop_reason": "env_error", "error": text, "reward": None}
            groups.append(Group(prompt=prompt, rollouts=(episode(words, prompt, talk, draw, **facts),)))
        huge = [says("go"), answers((ATTACKS["script"] + ATTACKS["ansi"]) * (MEGABYTE // 60)), says("end")]
        prompt = Prompt(token_ids=(3,), text="huge", index=99)
        made = replace(rollout(prompt, draw, 3, text="end"))
        longest = replace(made, trajectory=replace(made.trajectory, messages=tuple(huge)))
        run.write_completions(1, [*groups, Group(prompt=prompt, rollouts=(longest,))])
        run.log_metrics(1, metrics_of(1, draw))
        run.set_status("done", 1)
        words.save(run.path / "model")
    opened = open_page(written(run))
    assert (run.path / "report.html").stat().st_size < 5 * 2**20
    page = opened.page
    page.select_option("#v-sort", "drawn")
    for i, name in enumerate(ATTACKS):
        page.locator(".group").nth(i).click()
        page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        page.locator(".rollout .message pre").nth(3).wait_for(state="attached")
        shown = page.locator(".rollout .message pre").all_text_contents()
        if name in ("script", "comment", "image", "style", "markup"):
            assert shown[0] == ATTACKS[name] and shown[3] == ATTACKS[name]
        text = page.locator("#v-panel").inner_text()
        assert not any(mark in text for mark in "\x1b\x07\u202e\u2066\u200f\u061c\x00\x08")
    page.locator(".group").nth(len(ATTACKS)).click()
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    notes = page.locator(".message > b").filter(has_text="characters")
    notes.first.wait_for(state="attached")
    (note,) = notes.all_text_contents()
    assert note.startswith("multiply (the first 6,666 of ")
    page.fill("#v-text", "hacked")
    page.click("#v-all")
    until(page, "/in 1 of 1 steps/.test(document.querySelector('#v-results .note').textContent)")
    assert page.evaluate("[window.hacked, document.images.length, document.scripts.length]") == [None, 0, 4]
    assert [url for url in opened.requests if not url.startswith("data:")] == [opened.page.url.partition("#")[0]]
    assert opened.errors == []


def test_the_data_of_a_page_holds_no_end_of_a_script(tmp_path: Path) -> None:
    words, prompt = Words(), Prompt(token_ids=(3,), text="</script>")
    talk = [says("x"), answers("</script><script>window.hacked = 1</script>"), says("y")]
    run = write_episodes(tmp_path / "run", (prompt, [episode(words, prompt, talk, random.Random(0))]), words=words)
    page = report_page([run])
    assert "window.hacked" not in page  # steps are packed
    assert json.dumps(STOPS["turns"]) in page
