"""Text of a model that attacks: nothing of it runs, neither in the page nor in the terminal."""

import random
import re
from pathlib import Path
from typing import Any

import pytest
from pages import until
from warm_process import run_python
from written_runs import metrics_of, rollout, run_directory

from gruppo.report.page import report_page
from gruppo.run.directory import RunDirectory
from gruppo.run.reader import RunReader
from gruppo.types import Group, Prompt

ATTACKS = {
    "script": "</script><script>window.hacked = 1</script>",
    "comment": "<!--<script>window.hacked = 1",
    "image": '<img src="x" onerror="window.hacked = 1"><svg onload="window.hacked = 1">',
    "style": "</style><style>body { display: none }</style>",
    "ansi": "\x1b[2J\x1b]0;hacked\x07\x1b[31mred",
    "markup": "[/red][bold]bold[/bold][link=http://a.b]x[/link]",
    "direction": "right \u202e\u2066 left \u200f\u061c",
    "surrogate": "half \ud83d pair \udc00",
    "null": "a\x00b\r\x08\x7f",
    "template": "${window.hacked=1} {{data}} {{scripts}} \\u003cscript>",
    "separator": "line\u2028and\u2029paragraph",
}
HUGE = 10 * 2**20


@pytest.fixture(scope="module")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """A run whose every text attacks: prompt, columns, completion, names of rewards, extras, errors, config."""
    draw = random.Random(0)
    folder = tmp_path_factory.mktemp("hostile") / "<img src=x onerror=window.hacked=1>"
    with run_directory(folder, 2, model="'</script><script>window.hacked = 1</script>'") as run:
        groups = []
        for i, (name, text) in enumerate(ATTACKS.items()):
            prompt = Prompt(token_ids=(3,), text=f"{name}: {text}", columns={"answer": text, text: text}, index=i)
            facts: dict[str, Any] = {"extras": {text: text}, "errors": {text: text}}
            drawn = [rollout(prompt, draw, 3, text=text, **facts) for _ in range(2)]
            groups.append(Group(prompt=prompt, rollouts=tuple(drawn)))
        run.write_completions(1, groups)
        prompt = Prompt(token_ids=(3,), text="huge", index=99)
        huge = (ATTACKS["script"] + "x" * 1000) * (HUGE // 1000)
        long = rollout(prompt, draw, 100_000, text=huge)
        run.write_completions(2, [Group(prompt=prompt, rollouts=(long, rollout(prompt, draw, 3)))])
        for step in (1, 2):
            run.log_metrics(step, metrics_of(step, draw) | {ATTACKS["script"]: 1.0, ATTACKS["image"]: 2.0})
        run.set_status("failed", 2, error=ATTACKS["script"] + ATTACKS["ansi"])
    return run


def written(run: RunDirectory) -> tuple[str, bytes]:
    """Address of the report of a run that another process wrote, and what that printed."""
    made = run_python(["-m", "gruppo", "report", run.path], capture_output=True)
    assert made.returncode == 0
    return (run.path / "report.html").resolve().as_uri(), made.stdout + made.stderr


def test_nothing_of_a_hostile_run_runs(open_page, hostile_run):
    address, printed = written(hostile_run)
    assert b"\x1b" not in printed
    opened = open_page(address)
    page = opened.page
    page.evaluate("viewer.go(1)")
    until(page, "document.querySelectorAll('.group').length === " + str(len(ATTACKS)))
    for i in range(len(ATTACKS)):
        page.locator(".group").nth(i).click()
        for summary in page.query_selector_all(".rollout summary"):
            summary.click()
    page.fill("#v-text", "window")
    page.click("#v-all")
    until(page, "/in 2 of 2 steps/.test(document.querySelector('#v-results .note').textContent)")
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    page.wait_for_timeout(300)
    assert page.evaluate("[window.hacked, document.images.length, document.title.includes('<img')]") == [None, 0, True]
    assert page.evaluate("document.scripts.length") == 5  # Vega, the page's own, the data, two steps
    assert [url for url in opened.requests if not url.startswith("data:")] == [address]
    assert opened.errors == []


def test_hostile_text_is_shown_as_it_is_with_escapes_for_what_hides(open_page, hostile_run):
    page = open_page(written(hostile_run)[0]).page
    page.evaluate("viewer.go(1)")
    until(page, "viewer.data.step === 1")
    page.select_option("#v-sort", "drawn")
    shown = {}
    for i, name in enumerate(ATTACKS):
        page.locator(".group").nth(i).click()
        shown[name] = page.locator(".prompt-text").text_content().removeprefix(name + ": ")
    for name in ("script", "comment", "image", "style", "markup", "template"):
        assert shown[name] == ATTACKS[name]
    assert shown["ansi"] == r"\x1b[2J\x1b]0;hacked\x07\x1b[31mred"
    assert shown["direction"] == r"right \u202e\u2066 left \u200f\u061c"
    assert shown["null"] == r"a\x00b\x0d\x08\x7f"
    assert shown["surrogate"] == "half ? pair ?"  # Parquet has no half characters; the writer replaces them
    assert shown["separator"] == r"line\u2028and\u2029paragraph"


def test_ten_megabytes_open_and_are_cut_with_a_note(open_page, hostile_run):
    address, _ = written(hostile_run)
    assert (hostile_run.path / "report.html").stat().st_size < 5 * 2**20
    page = open_page(address).page
    until(page, "viewer.data && viewer.data.step === 2")
    strip = page.locator(".strip").filter(has=page.locator("button"))
    assert strip.locator(".tok").count() == 1500
    assert "4,000" in strip.locator("button").text_content()
    for _ in range(2):
        strip = page.locator(".rollout", has=page.locator("button, .strip .note")).first
        strip.locator("button").click()
    assert page.locator(".strip .note").text_content().strip().startswith("… 96,000 more tokens are not in this file")
    assert page.evaluate("window.hacked") is None


def test_a_hostile_name_of_a_run_directory_does_not_reach_the_terminal(tmp_path: Path) -> None:
    folder = tmp_path / "\x1b[2Jrun"
    made = run_python(["-m", "gruppo", "report", folder], capture_output=True)
    assert made.returncode == 2 and b"\x1b" not in made.stdout + made.stderr
    with run_directory(tmp_path / "run", 1) as run:
        run.log_metrics(1, {"reward/mean": 1.0})
    run.path.rename(folder)  # gruppo makes no folder of such a name
    made = run_python(["-m", "gruppo", "report", folder], capture_output=True)
    assert made.returncode == 0 and b"\x1b" not in made.stdout + made.stderr


def test_marks_of_direction_in_the_names_of_runs_are_escapes_everywhere(open_page, tmp_path):
    draw = random.Random(0)
    prompt = Prompt(token_ids=(3,), text="1+1=", index=0)
    runs = []
    for name in ("\u202ertl", "\u2067isolated\u200b"):
        with run_directory(tmp_path / "run", 1) as run:
            run.log_metrics(1, metrics_of(1, draw))
            run.write_completions(1, [Group(prompt=prompt, rollouts=(rollout(prompt, draw, 3),))])
        runs.append(RunReader(run.path.rename(tmp_path / name)))
    for shown in (runs[:1], runs):
        file = tmp_path / f"report-{len(shown)}.html"
        file.write_text(report_page(shown))
        page = open_page(file.as_uri()).page
        page.evaluate("document.querySelectorAll('#options details').forEach(d => { d.open = true; })")
        text = "".join([page.title(), *page.locator("section:not(#charts), footer").all_inner_texts()])
        assert not re.search("[\u202a-\u202e\u2066-\u2069\u200b]", text)
        assert page.locator("#overview .run > :first-child").first.text_content() == r"\u202ertl"
        assert page.title().startswith(r"\u202ertl")
    assert page.locator("#v-run option").all_text_contents() == [r"\u202ertl", r"\u2067isolated\u200b"]
