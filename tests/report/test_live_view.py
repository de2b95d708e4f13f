"""`gruppo view` and `gruppo train --view` as processes, a run that goes on, and a run of a thousand steps."""

import random
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pages import until
from warm_process import Command, run_python
from written_runs import metrics_of, rollout, run_directory, write_large_run

from gruppo.doctor import Finding, State
from gruppo.report.view_server import ViewServer
from gruppo.types import Group, Prompt

STEPS = 1000
reach = urllib.request.build_opener(urllib.request.ProxyHandler({})).open  # this machine, past any proxy of the network


@contextmanager
def viewed(path: Path) -> Iterator[str]:
    """Address of a `gruppo view` in another process."""
    command = [sys.executable, "-m", "gruppo", "view", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield line.removeprefix("view: ").strip()
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0


def test_a_run_that_goes_on_is_followed(open_page, tmp_path):
    draw = random.Random(0)
    prompt = Prompt(token_ids=(3,), text="1+1=", index=0)

    def write(step: int) -> None:
        run.log_metrics(step, metrics_of(step, draw) | {"reward/mean": step / 10})
        run.write_completions(
            step, [Group(prompt=prompt, rollouts=(rollout(prompt, draw, 3), rollout(prompt, draw, 3)))]
        )

    with run_directory(tmp_path / "run", 10) as run:
        write(1)
        run.set_status("running", 1)
        with viewed(run.path) as address:
            opened = open_page(address)
            until(opened.page, "document.getElementById('live').textContent === 'running · step 1 of 10'")
            until(opened.page, "document.querySelectorAll('.plot[data-drawn]').length > 3")
            write(2)
            until(opened.page, "document.getElementById('live').textContent === 'running · step 2 of 10'")
            assert opened.page.locator("#v-step").text_content() == "1"  # what is looked at stays
            opened.page.click("#v-next")
            until(opened.page, "viewer.data.step === 2")
            until(opened.page, "document.querySelector('.tile .value').textContent === '0.2'")
            assert opened.errors == []
            assert {url.split("/")[2] for url in opened.requests} == {address.split("/")[2]}
        opened.page.evaluate("refresh()")
        until(opened.page, "document.getElementById('live').textContent === 'gruppo view has stopped'")


def test_charts_that_cannot_be_made_are_an_error_in_the_page(browser, tmp_path):
    with run_directory(tmp_path / "run", 1) as run:
        run.log_metrics(1, {"reward/mean": 0.5})
    with viewed(run.path) as address:
        page = browser.new_context().new_page()
        page.route("**/charts.json", lambda route: route.fulfill(status=500, body="<b>metrics.jsonl cannot be read"))
        page.goto(address)
        until(page, "document.getElementById('charts').textContent.includes('<b>metrics.jsonl cannot be read')")
        page.context.close()


SIZES = (
    "--steps 10000 --prompts-per-step 4 --group-size 4 --max-new-tokens 4 --eval-every 0 --no-tensorboard --threads 1"
)


def train(output: Path) -> Command:
    words = ["-m", "gruppo", "train", "--view", *SIZES.split(), "--output", output]
    return Command(words, stdout=subprocess.PIPE, text=True)


@pytest.mark.long
def test_train_view_serves_the_run_and_ends_with_it(tmp_path):
    with train(tmp_path / "run") as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("view: "))
        address = line.removeprefix("view: ").strip()
        with reach(address, timeout=20) as answer:
            assert answer.read().startswith(b"<!doctype html>")
        next(line for line in process.stdout if line.startswith("step "))  # signals are the run's now
        process.send_signal(signal.SIGTERM)
        process.stdout.read()
        assert process.wait(60) == 75  # stopped and saved
    with pytest.raises(urllib.error.URLError):
        reach(address, timeout=5)


@pytest.mark.long
def test_the_page_of_a_run_that_is_killed_ends_too(tmp_path):
    with train(tmp_path / "run") as process:
        assert process.stdout is not None
        address = next(line for line in process.stdout if line.startswith("view: ")).removeprefix("view: ").strip()
        process.kill()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            reach(address, timeout=5).close()
        except (urllib.error.URLError, OSError):
            return
        time.sleep(0.1)
    pytest.fail("the server outlived the run")


FINDING = Finding(
    rule="flat", severity="warning", text="flat", evidence="0", remedy="wait", metric="optim/grad_norm", step=1
)
PLACES = {
    "nav": "#nav a[href='#ledger']",
    "finding": ".findings button",
    "chart": "[data-keys='reward/mean'] summary",
    "further": "#charts details:not(.what) > summary >> nth=-1",
    "further chart": "[data-keys='mine/number_7'] summary",
    "loss": ".divisor summary",
    "options": "#options summary",
}
HERE = "[document.activeElement.localName, document.activeElement.textContent]"
OPEN = "[...document.querySelectorAll('main details[open] > summary')].map(s => s.textContent)"


def test_what_is_open_and_what_has_the_focus_stay_so_when_the_page_follows_the_run(open_page, tmp_path):
    draw = random.Random(0)
    prompt = Prompt(token_ids=(3,), text="1+1=", index=0)
    with run_directory(tmp_path / "run", 20) as run:

        def write(step: int) -> None:
            run.log_metrics(step, metrics_of(step, draw))
            run.write_completions(step, [Group(prompt=prompt, rollouts=(rollout(prompt, draw, 20),))])
            run.set_status("running", step)

        write(1)
        server = ViewServer([run], summary=lambda _: (State("learning", "at a step"), [FINDING]))
        server.start()
        opened = open_page(server.url)
        page = opened.page
        until(page, "document.querySelector('.divisor') && document.querySelector('.findings button')")
        for place in PLACES.values():
            if place.split(" >> ")[0].endswith("summary"):
                page.locator(place).click()
        before = page.evaluate(OPEN)
        assert len(before) >= 5
        for step, place in enumerate(PLACES.values(), 2):
            page.locator(place).focus()
            focused = page.evaluate(HERE)
            write(step)
            page.evaluate("void refresh()")
            until(page, f"!isRefreshing && DATA.runs[0].step === {step}")
            assert page.evaluate(OPEN) == before
            assert page.evaluate(HERE) == focused and focused[0] != "body"
        page.locator(PLACES["further"]).click()
        page.locator(PLACES["options"]).click()
        write(12)
        page.evaluate("void refresh()")
        until(page, "!isRefreshing && DATA.runs[0].step === 12")
        assert len(page.evaluate(OPEN)) < len(before) - 1  # closed by hand
        assert opened.errors == []
        server.close()


@pytest.fixture(scope="module")
def large_run(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "run"
    return write_large_run(path, steps=STEPS, groups=32, group_size=8, length=40)


@pytest.fixture(scope="module")
def large_report(large_run):
    assert run_python(["-m", "gruppo", "report", large_run.path], capture_output=True).returncode == 0
    return large_run.path / "report.html"


def drawn(open_page, report):
    page = open_page(report.resolve().as_uri()).page
    until(page, "document.querySelector('.plot[data-drawn] svg') && document.querySelector('.tok') !== null")
    return page


def test_the_report_of_a_thousand_steps_is_small_and_shows_some_of_them(open_page, large_report):
    assert large_report.stat().st_size < 25e6
    assert "24 of 1000 recorded steps" in drawn(open_page, large_report).locator("#foot").text_content()


@pytest.mark.clock
def test_the_report_of_a_thousand_steps_opens_in_three_seconds(open_page, large_report):
    # A busy machine may be slow once.
    assert min(drawn(open_page, large_report).evaluate("performance.now()") for _ in range(3)) < 3000


@pytest.mark.clock
def test_view_of_a_thousand_steps_starts_in_a_second(large_run):
    seconds = []
    for _ in range(3):
        started = time.monotonic()
        with viewed(large_run.path):
            seconds.append(time.monotonic() - started)
    assert min(seconds) < 1


def test_view_of_a_thousand_steps_loads_any_step(open_page, large_run):
    with viewed(large_run.path) as address:
        page = open_page(address).page
        assert page.evaluate("[viewer.steps.length, viewer.number]") == [STEPS, STEPS]
        for step in (1, 500, 777):
            page.evaluate(f"void viewer.go({step})")
            until(page, f"viewer.data.step === {step}")
            assert page.locator(".group").count() == 32 and page.locator(".strip").count() == 8
        page.evaluate("document.getElementById('v-groups').scrollTop = 1e6")
        page.locator(".group").last.click()
        page.fill("#v-text", "What is 31 + 31?")
        assert page.locator(".group").count() == 1
        assert not re.search("not in this", page.locator("#v-note").text_content())
