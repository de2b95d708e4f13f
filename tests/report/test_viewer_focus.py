"""The token viewer by keyboard and by mouse: where the focus is, which token the panel shows, what can be read."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pages import until
from tokenizers import Tokenizer, decoders, models
from written_runs import metrics_of, rollout, run_directory

from gruppo.report.page import report_page
from gruppo.run.directory import RunDirectory
from gruppo.types import Group, Prompt

FOCUS = """(e => [e.className.split(' ')[0] || e.id || e.tagName, e.closest('.strip')?.dataset.sample ?? null,
  e.dataset.i ?? null])(document.activeElement)"""
SYSTEM = "<|im_start|>system\nYou are a careful assistant. Think step by step, then give the answer.<|im_end|>\n"
QUESTIONS = ("How many apples are left?", "How many pears did Ann buy in the second week?", "What is 3 + 4?")
LONG = 3200
NARROW = {"viewport": {"width": 400, "height": 800}}


def written(run: RunDirectory) -> str:
    """Address of the report of a run."""
    file = run.path / "report.html"
    file.write_text(report_page([run]))
    return file.resolve().as_uri()


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Three steps of chats with one system prompt; completions of forty tokens."""
    draw = random.Random(0)
    with run_directory(tmp_path_factory.mktemp("chats") / "run", 3) as run:
        for step in (1, 2, 3):
            groups = []
            for i, question in enumerate(QUESTIONS):
                text = f"{SYSTEM}<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
                prompt = Prompt(token_ids=(3,), text=text, index=i)
                groups.append(Group(prompt=prompt, rollouts=tuple(rollout(prompt, draw, 40) for _ in range(3))))
            run.write_completions(step, groups)
            run.log_metrics(step, metrics_of(step, draw))
        run.set_status("done", 3)
    return written(run)


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A completion of 3,200 tokens, and a short one."""
    draw = random.Random(0)
    prompt = Prompt(token_ids=(3,), text="1+1=", index=0)
    with run_directory(tmp_path_factory.mktemp("long") / "run", 1) as run:
        drawn = [rollout(prompt, draw, length, reward=1.0) for length in (LONG, 30)]
        run.write_completions(1, [Group(prompt=prompt, rollouts=tuple(drawn))])
        run.log_metrics(1, metrics_of(1, draw))
        run.set_status("done", 1)
    return written(run)


def tokens(page: Any, sample: int) -> Any:
    return page.locator(f".strip[data-sample='{sample}'] .tok")


def shown_position(page: Any) -> int:
    """Position of the token that the panel shows, counted from 0."""
    return int(page.locator("#token").text_content().split("position ")[1].split(" of ")[0].replace(",", "")) - 1


# --- the focus --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [".group[aria-pressed='true']", ".tok >> nth=5", "#v-history"])
def test_the_keys_of_steps_work_again_and_again(open_page, chats, where):
    page = open_page(chats).page
    page.locator(where).focus()
    before = page.evaluate(FOCUS)
    for key, step in (("[", 2), ("[", 1), ("]", 2), ("]", 3), ("]", 3), ("[", 2)):
        page.keyboard.press(key)
        until(page, f"viewer.data.step === {step}", 5)
        kind, _, i = page.evaluate(FOCUS)
        assert (kind, i) == (before[0], before[2])


def test_the_button_of_the_first_step_hands_the_focus_to_the_other(open_page, chats):
    page = open_page(chats).page
    page.focus("#v-back")
    for step in (2, 1):
        page.keyboard.press("Enter")
        until(page, f"viewer.data.step === {step}", 5)
    page.wait_for_timeout(100)  # the browser takes the focus from a disabled button with the next frame
    assert page.evaluate("document.activeElement.id") == "v-next"
    page.keyboard.press("]")
    until(page, "viewer.data.step === 2", 5)


def test_each_strip_keeps_one_token_in_the_order_of_tab(open_page, chats):
    page = open_page(chats).page
    page.locator(".tok").first.focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "End", "ArrowDown"):
        page.keyboard.press(key)
    counts = page.locator(".strip").evaluate_all("all => all.map(s => s.querySelectorAll('[tabindex=\"0\"]').length)")
    assert counts == [1, 1, 1]


def test_a_link_to_a_token_works_a_second_time(open_page, chats):
    page = open_page(chats).page
    link = page.locator(".top-tokens a").first
    for _ in range(2):
        link.click()
        until(page, "document.activeElement.classList.contains('tok')", 5)
        page.focus("#v-sort")


# --- which token the panel shows --------------------------------------------------------------------------------------


def test_what_scrolls_under_a_mouse_at_rest_is_not_shown(open_page, long_run):
    page = open_page(long_run).page
    strip = tokens(page, 0)
    strip.nth(0).focus()
    box = page.locator(".strip").first.bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 100)
    page.keyboard.press("ArrowRight")
    for key in ("End", "Home", "End"):
        page.keyboard.press(key)
        page.wait_for_timeout(300)  # events of a scroll come with a later frame
        assert shown_position(page) == int(page.evaluate("document.activeElement.dataset.i"))
    strip.nth(LONG - 20).hover()
    assert shown_position(page) == LONG - 20


def test_a_tap_shows_a_token(open_page, chats):
    page = open_page(chats, has_touch=True, **NARROW).page
    tokens(page, 0).nth(7).tap()
    assert shown_position(page) == 7


UNCOVERED = """(() => {
  const box = document.activeElement.getBoundingClientRect();
  return [box.top >= at('top').getBoundingClientRect().bottom, box.bottom <= at('token').getBoundingClientRect().top];
})()"""


@pytest.mark.parametrize("address", ["chats", "long_run"])
def test_on_a_narrow_screen_no_focused_token_lies_behind_the_panel(open_page, request, address):
    page = open_page(request.getfixturevalue(address), **NARROW).page
    for at in (0, 15):
        page.evaluate("scrollTo(0, 0)")
        tokens(page, 0).nth(at).focus()
        for key in ("ArrowDown", "End", "ArrowUp", "End", "ArrowLeft", "Home", "ArrowDown", "ArrowDown", "ArrowUp"):
            page.keyboard.press(key)
            page.wait_for_timeout(50)
            assert page.evaluate(UNCOVERED) == [True, True], (at, key)


# --- long completions -------------------------------------------------------------------------------------------------


def test_end_and_arrows_reach_every_token_of_a_long_completion(open_page, long_run):
    page = open_page(long_run).page
    tokens(page, 0).nth(1499).focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(FOCUS) == ["tok", "0", "1500"]
    page.keyboard.press("End")
    assert page.evaluate(FOCUS) == ["tok", "0", str(LONG - 1)]
    assert tokens(page, 0).count() == LONG and shown_position(page) == LONG - 1
    page.keyboard.press("ArrowRight")
    assert page.evaluate(FOCUS) == ["tok", "0", str(LONG - 1)]
    page.keyboard.press("ArrowDown")
    assert page.evaluate(FOCUS) == ["tok", "1", "29"]
    page.keyboard.press("Home")
    assert page.evaluate(FOCUS) == ["tok", "1", "0"]


def test_showing_more_by_key_goes_on_at_the_first_new_token(open_page, long_run):
    page = open_page(long_run).page
    for first in (1500, 3000):
        page.locator(".strip button").focus()
        page.keyboard.press("Enter")
        assert page.evaluate(FOCUS) == ["tok", "0", str(first)]
    assert page.locator(".strip button").count() == 0


# --- what can be read -------------------------------------------------------------------------------------------------

SEEN = """all => all.map(p => {
  const whole = p.textContent, box = p.getBoundingClientRect(), range = document.createRange();
  const isSeen = (i) => {
    range.setStart(p.firstChild, i); range.setEnd(p.firstChild, i + 1);
    const r = range.getBoundingClientRect();
    return r.left >= box.left && r.right <= box.right + 1 && r.top >= box.top && r.bottom <= box.bottom + 1;
  };
  return [...whole].filter((_, i) => isSeen(i)).join('');
})"""


@pytest.mark.parametrize("width", [1280, 400])
def test_cards_of_chats_show_where_their_prompts_differ(open_page, chats, width):
    page = open_page(chats, viewport={"width": width, "height": 800}).page
    page.select_option("#v-sort", "drawn")
    seen = page.locator(".group .prompt").evaluate_all(SEEN)
    assert seen == [f"…{question}…" for question in QUESTIONS]


CARDS = {
    1: {"word " * 100 + "the end": "…" + ("word " * 100 + "the end")[-60:]},
    2: {"12+3=": "12+3=", "15+3=": "15+3="},
    3: {"<s>" + "word " * 20: "…" + ("word " * 20)[-61:-1], "Hint. <s>" + "word " * 20: "Hint.…"},
    4: {f"Q: {i}\nThink, then write the answer into a box, with nothing after it.": f"Q: {i}…" for i in range(3)},
    5: {"\U0001f600" * 100: "…" + "\U0001f600" * 60},
}


def test_cards_show_the_end_of_a_prompt_that_stands_alone_and_all_of_a_short_one(open_page, tmp_path):
    draw = random.Random(0)
    with run_directory(tmp_path / "run", 2) as run:
        for step, prompts in CARDS.items():
            made = [Prompt(token_ids=(3,), text=text, index=i) for i, text in enumerate(prompts)]
            run.write_completions(step, [Group(prompt=p, rollouts=(rollout(p, draw, 3),)) for p in made])
            run.log_metrics(step, metrics_of(step, draw))
    page = open_page(written(run)).page
    page.select_option("#v-sort", "drawn")
    for step, prompts in CARDS.items():
        page.evaluate(f"viewer.go({step})")
        until(page, f"viewer.data.step === {step}")
        assert page.locator(".group .prompt").all_text_contents() == list(prompts.values())


@pytest.fixture
def bytes_model(tmp_path: Path) -> Path:
    """A folder with a byte-level tokenizer, whose tokens are single bytes: id 4 + byte."""
    # The alphabet of byte-level BPE: printable Latin-1 stands for itself, other bytes for characters from U+0100 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    alphabet = {byte: chr(byte) if byte in plain else chr(next(others)) for byte in range(256)}
    vocabulary = {f"<{i}>": i for i in range(4)} | {alphabet[byte]: 4 + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_short_completion_whose_characters_are_split_over_tokens_can_be_read(open_page, bytes_model, tmp_path):
    draw = random.Random(0)
    prompt = Prompt(token_ids=(3,), text="Say yes.", index=0)
    with run_directory(tmp_path / "run", 1, model=str(bytes_model)) as run:
        drawn = []
        for text in ("är 好", "yes"):
            ids = tuple(4 + byte for byte in text.encode())
            made = rollout(prompt, draw, len(ids), text=text)
            drawn.append(replace(made, trajectory=replace(made.trajectory, tokens=ids)))
        run.write_completions(1, [Group(prompt=prompt, rollouts=tuple(drawn))])
        run.log_metrics(1, metrics_of(1, draw))
    page = open_page(written(run)).page
    assert "".join(tokens(page, 0).all_text_contents()) == "\ufffd\ufffdr \ufffd\ufffd\ufffd"
    texts = page.locator(".rollout", has=page.locator("[data-sample='0']")).locator("pre")
    assert texts.evaluate_all("all => all.map(p => [p.textContent, p.checkVisibility()])") == [["är 好", True]]
    assert page.locator(".rollout", has=page.locator("[data-sample='1']")).locator("details").count() == 0
