"""The report of a demo run in a real browser: charts, tokens, keyboard, search, with the numbers of the run's files."""

import json
import math
from typing import Any

import pyarrow.parquet as pq
import pytest
from pages import until

from gruppo.doctor import Finding, State
from gruppo.report.page import report_page
from gruppo.run.reader import RunReader

STEPS = (10, 20, 30)


def rows_of(run: RunReader, step: int) -> list[dict[str, Any]]:
    return pq.read_table(run.path / "completions" / f"step-{step:06d}.parquet").to_pylist()


def number(text: str) -> float:
    return float(text.replace("−", "-").replace(",", ""))


PLACE = "[document.activeElement.closest('.strip')?.dataset.sample, document.activeElement.dataset.i]"
MARKS = """[...document.querySelectorAll('.chart')].map(
  (c) => c.querySelectorAll('svg .mark-line path, svg .mark-area path, svg .mark-rect path').length
)"""
COLUMNS = {"sampler": "logps", "old": "old_logps", "new": "policy_logps", "ref": "ref_logps", "entropy": "entropies"}
QUANTITIES = ("credit", "advantage", "kl", "ref_kl", "entropy", "surprise", "gap", "clip", "why")


def panel_numbers(page: Any) -> dict[str, str]:
    return page.locator("#token dd").evaluate_all(
        "all => Object.fromEntries(all.map(d => [d.dataset.name, d.textContent]))"
    )


def draw_all(page: Any) -> None:
    """Scroll through the page: a chart is drawn when it comes near the window."""
    page.evaluate("document.querySelectorAll('#charts details').forEach(d => { d.open = true; })")
    page.wait_for_timeout(100)
    for plot in page.query_selector_all(".plot"):
        plot.scroll_into_view_if_needed()
    until(page, "[...document.querySelectorAll('.plot')].every(p => p.hasAttribute('data-drawn'))")


def test_the_report_opens_from_disk_with_every_chart_and_without_a_request(open_page, demo_run, demo_report):
    opened = open_page(demo_report)
    draw_all(opened.page)
    marks = opened.page.evaluate(MARKS)
    assert len(marks) >= 20 and all(marks)
    assert opened.errors == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [demo_report]


def test_a_chart_has_a_point_for_every_step_of_the_metrics(open_page, demo_run, demo_report):
    page = open_page(demo_report).page
    draw_all(page)
    lines = (demo_run.path / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, lines) if "reward/mean" in record]
    drawn = page.evaluate("document.querySelector('[data-keys=\"reward/mean\"] .mark-line path').getAttribute('d')")
    assert len(drawn.replace("M", "L").split("L")) - 1 == len(steps) == 30


def test_the_tooltip_of_a_chart_has_the_metrics_of_the_step(open_page, demo_run, demo_report):
    page = open_page(demo_report).page
    plot = page.locator("[data-keys='eval/accuracy'] svg")
    plot.scroll_into_view_if_needed()
    points = page.locator("[data-keys='eval/accuracy'] svg .mark-symbol path")
    points.last.hover(force=True)
    facts = page.evaluate("[...document.querySelectorAll('#tip dl > *')].map(x => x.textContent)")
    shown = dict(zip(facts[::2], facts[1::2], strict=True))
    last = [m for m in demo_run.metrics() if "eval/accuracy" in m][-1]
    assert number(shown["step"]) == last["step"] == 30
    assert number(shown["value"]) == pytest.approx(last["eval/accuracy"], rel=1e-3)
    assert number(shown["low"]) == pytest.approx(last["eval/accuracy_low"], rel=1e-3)


def test_clicking_a_group_shows_its_tokens(open_page, demo_run, demo_report):
    page = open_page(demo_report).page
    card = page.locator(".group").nth(5)
    number_of_group = int(card.get_attribute("data-group"))
    card.click()
    rows = rows_of(demo_run, 30)[4 * number_of_group : 4 * number_of_group + 4]
    assert page.locator(".panel .prompt-text").text_content() == rows[0]["prompt"]
    assert page.locator(".strip").count() == 4
    for row in rows:
        tokens = page.locator(f".strip[data-sample='{row['sample']}'] .tok").all_text_contents()
        assert len(tokens) == len(row["tokens"])
        assert "".join(tokens).removesuffix("<eos>") == row["completion"]
    shown = [float(text.split()[1]) for text in page.locator(".rollout .head b").all_text_contents()]
    assert shown == sorted((row["reward"] for row in rows), reverse=True)


def test_hovering_shows_the_numbers_of_the_parquet_file(open_page, demo_run, demo_report):
    page = open_page(demo_report).page
    page.select_option("#v-sort", "moved")
    page.locator(".group").first.click()
    group = int(page.locator(".group").first.get_attribute("data-group"))
    compared = 0
    for row in rows_of(demo_run, 30)[4 * group : 4 * group + 4]:
        for i in range(len(row["tokens"])):
            page.locator(f".strip[data-sample='{row['sample']}'] .tok[data-i='{i}']").hover()
            shown = panel_numbers(page)
            for name, column in COLUMNS.items():
                assert number(shown[name]) == pytest.approx(row[column][i], rel=1e-4, abs=1e-6)
            moved = row["policy_logps"][i] - row["old_logps"][i]
            assert number(shown["ratio"]) == pytest.approx(math.exp(moved), abs=1e-4)
            assert number(shown["kl"]) == pytest.approx(math.exp(moved) - 1 - moved, rel=0.05, abs=1e-6)
            assert number(shown["advantage"]) == pytest.approx(row["advantage"], rel=1e-4)
            assert number(shown["credit"]) == pytest.approx(row["advantage"] * moved, rel=1e-2, abs=3e-6)
            assert shown["clip"] == {-1: "clipped low", 0: "not clipped", 1: "clipped high"}[row["clipped"][i]]
            assert shown["why"] == ("yes" if row["untrained"][i] == "" else "no: no advantage")
            compared += 1
    assert compared >= 12


def test_the_keyboard_alone_reaches_a_token(open_page, demo_report):
    page = open_page(demo_report).page
    kind = "document.activeElement.className.split(' ')[0]"
    page.focus("#v-text")
    for _ in range(12):
        if page.evaluate(kind) == "group":
            break
        page.keyboard.press("Tab")
    assert page.evaluate(kind) == "group"
    before = page.evaluate("document.activeElement.dataset.group")
    page.keyboard.press("ArrowRight" if page.evaluate("!!document.activeElement.nextElementSibling") else "ArrowLeft")
    assert page.evaluate("document.activeElement.dataset.group") != before
    page.keyboard.press("Enter")
    first = page.evaluate(PLACE)
    assert first[1] == "0" and panel_numbers(page)["sampler"] != "–"
    page.keyboard.press("ArrowRight")
    assert page.evaluate(PLACE) == [first[0], "1"]
    page.keyboard.press("ArrowDown")
    second = page.evaluate(PLACE)
    assert second[0] != first[0] and second[1] == "1"
    page.keyboard.press("End")
    assert "completion " + second[0] in page.locator("#token").text_content()
    page.keyboard.press("Escape")
    assert page.evaluate(kind) == "group"
    page.keyboard.press("[")
    until(page, "document.getElementById('v-step').textContent === '20'")


def test_the_first_top_token_is_a_link_to_the_one_that_moved_most(open_page, demo_run, demo_report):
    page = open_page(demo_report).page
    page.select_option("#v-sort", "moved")
    page.locator(".group").first.click()
    page.locator(".top-tokens a").first.click()
    until(page, "document.activeElement.classList.contains('tok')")
    moved = {}
    for row in rows_of(demo_run, 30):
        for i, (new, old) in enumerate(zip(row["policy_logps"] or (), row["old_logps"], strict=False)):
            moved[row["prompt"], row["sample"], i] = math.exp(new - old) - 1 - (new - old)
    sample, i = page.evaluate(PLACE)
    prompt = page.locator(".panel .prompt-text").text_content()
    assert moved[prompt, int(sample), int(i)] == pytest.approx(max(moved.values()), rel=1e-3)


def test_filters_and_the_search_over_steps_find_what_the_files_hold(open_page, demo_run, demo_report):
    page = open_page(demo_report).page
    page.select_option("#v-correct", "false")
    rows = rows_of(demo_run, 30)
    wrong = {row["prompt_index"] for row in rows if row["correct"] is False}
    assert page.locator(".group").count() == len(wrong)
    page.select_option("#v-correct", "")
    page.fill("#v-text", "1")
    page.fill("#v-low", "1")
    page.click("#v-all")
    until(page, "/in 3 of 3 steps/.test(document.querySelector('#v-results .note').textContent)")
    rows = [row for step in STEPS for row in rows_of(demo_run, step)]
    fitting = [row for row in rows if row["reward"] >= 1 and "1" in row["prompt"] + row["completion"]]
    assert page.locator("#v-results .note").text_content().startswith(f"{len(fitting)} found")
    assert page.locator("#v-results tbody tr").count() == min(len(fitting), 200)


def test_a_prompt_over_the_run_lists_its_answers(open_page, demo_run, demo_report):
    page = open_page(demo_report).page
    page.locator(".group").first.click()
    index = int(page.locator(".panel h3").text_content().split()[1])
    page.click("#v-history")
    until(page, "/in 3 of 3 steps/.test(document.querySelector('#v-results .note').textContent)")
    texts = page.locator("#v-results tbody td:nth-child(4)").all_text_contents()
    rows = [row for step in STEPS for row in rows_of(demo_run, step)]
    assert texts == [row["completion"] for row in rows if row["prompt_index"] == index]


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_each_quantity_colours_the_tokens_that_have_it(open_page, demo_run, demo_report, quantity):
    page = open_page(demo_report).page
    page.select_option("#v-sort", "spread")
    page.locator(".group").first.click()
    page.select_option("#v-color", quantity)
    coloured = page.locator(".strip .tok").evaluate_all("all => all.filter(t => t.style.backgroundColor).length")
    legend = page.locator("#v-legend").text_content()
    if quantity == "clip":
        group = int(page.locator(".group").first.get_attribute("data-group"))
        rows = rows_of(demo_run, 30)[4 * group : 4 * group + 4]
        assert coloured == sum(mark != 0 for row in rows for mark in row["clipped"]) > 0
    else:
        assert (coloured > 0) != ("0 at every token" in legend)
        assert coloured > 0 or quantity == "gap"  # the sampler of the demo is the trainer's own model


def test_a_finding_stands_as_text_with_a_way_to_its_chart(open_page, demo_run, tmp_path):
    attack = "<img src=x onerror=window.hacked=1>"
    finding = Finding(
        rule="reward_hacking",
        severity="problem",
        text=attack,
        evidence="0.5 is above 0.2",
        remedy=f"try `gruppo reward check` {attack}",
        metric="optim/grad_norm",
        step=20,
    )
    state = State("finished", "finished after step 30, it learned: reward 0.500 -> 1.000")
    file = tmp_path / "report.html"
    file.write_text(report_page([demo_run], findings=[[finding]], states=[state]))
    opened = open_page(file.as_uri())
    page = opened.page
    assert page.locator(".state .pill").text_content() == "finished"
    assert page.locator(".state span").last.text_content() == "after step 30, it learned: reward 0.500 → 1.000"
    item = page.locator(".findings li")
    assert item.locator("b").text_content() == attack
    assert item.locator("p code").text_content() == "gruppo reward check"
    assert item.locator("p").last.text_content() == f"try gruppo reward check {attack}"
    item.locator("button").click()
    until(page, "document.querySelector('[data-keys~=\"optim/grad_norm\"] .plot[data-drawn]') !== null")
    top = page.evaluate("document.querySelector('[data-keys~=\"optim/grad_norm\"]').getBoundingClientRect().top")
    assert 0 < top < 900
    assert page.evaluate("[window.hacked, document.images.length]") == [None, 0] and opened.errors == []


def test_dark_and_light_follow_the_system_and_the_button(open_page, demo_report):
    dark = open_page(demo_report, color_scheme="dark").page
    background = "getComputedStyle(document.body).backgroundColor"
    assert sum(map(int, dark.evaluate(background)[4:-1].split(","))) < 150
    dark.click("#theme")
    assert sum(map(int, dark.evaluate(background)[4:-1].split(","))) > 600
    draw_all(dark)


def test_a_narrow_screen_has_nothing_beyond_its_edge(open_page, demo_report):
    page = open_page(demo_report, viewport={"width": 380, "height": 800}).page
    draw_all(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 380


def test_texts_on_their_background_have_the_contrast_of_wcag_aa(open_page, demo_report):
    for scheme in ("light", "dark"):
        page = open_page(demo_report, color_scheme=scheme).page
        for name in ("fg", "muted", "accent", "good", "warn", "bad"):
            for under in ("bg", "card"):
                assert page.evaluate(CONTRAST, [name, under]) >= 4.5, (scheme, name, under)


CONTRAST = """([over, under]) => {
  const light = (name) => {
    const hex = variable(name).slice(1);
    const parts = [0, 2, 4].map((i) => parseInt(hex.slice(i, i + 2), 16) / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const [a, b] = [light(over), light(under)].sort((x, y) => y - x);
  return (a + 0.05) / (b + 0.05);
}"""


TOKEN_CONTRAST = """(kind) => {
  const token = document.querySelector('.strip .tok' + kind);
  const parts = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number), scale = text.startsWith('color') ? 1 : 255;
    return [...numbers.slice(0, 3).map((x) => x / scale), numbers[3] ?? 1];
  };
  const light = (c) => {
    const [r, g, b] = c.slice(0, 3).map((x) => (x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const card = parts(getComputedStyle(token.closest('.card')).backgroundColor);
  const colours = ['transparent', ...['plus', 'minus', 'heat'].map((hue) => `rgba(var(--${hue}), 0.65)`),
    ...[1, 2, 3, 4, 5, 6].map((i) => `color-mix(in srgb, var(--c${i}) 38%, transparent)`)];
  return colours.map((colour) => {
    token.style.backgroundColor = colour;
    const over = parts(getComputedStyle(token).backgroundColor), text = parts(getComputedStyle(token).color);
    const under = over.slice(0, 3).map((x, i) => over[3] * x + (1 - over[3]) * card[i]);
    const [a, b] = [light(text), light(under)].sort((x, y) => y - x);
    return [colour, (a + 0.05) / (b + 0.05)];
  });
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("kind", [".special", ":not(.special)"])
def test_tokens_of_full_colour_have_the_contrast_of_wcag_aa(open_page, demo_report, scheme, kind):
    page = open_page(demo_report, color_scheme=scheme).page
    found = dict(page.evaluate(TOKEN_CONTRAST, kind))
    assert len(found) == 10 and min(found.values()) >= 4.5, found
