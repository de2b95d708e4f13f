"""The page of several runs in a real browser: each can be told from the others, on a narrow screen and in the dark."""

import itertools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import until
from written_runs import metrics_of, run_directory

from gruppo.doctor import Finding
from gruppo.report.page import report_page

GROUPS = ("group/dead_frac", "group/all_right_frac", "group/all_wrong_frac")
LONG = "a_very_long_name_of_a_run_with_many_options_in_it_lr_3e6_beta_001_group_16_clip_02_028_seed_0"
FINDING = Finding(
    rule="gradient_spike",
    severity="problem",
    text="the gradient jumps",
    evidence="9 is above 1",
    remedy="lower lr",
    metric="optim/grad_norm",
    step=3,
)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of eight runs, one with a long name, and a finding in the third."""
    folder, runs = tmp_path_factory.mktemp("overlay"), []
    for i in range(8):
        draw = random.Random(i)
        with run_directory(folder / (LONG if i == 1 else f"run{i}"), 6) as run:
            for step in range(1, 7):
                run.log_metrics(step, metrics_of(step, draw) | {key: draw.random() for key in GROUPS})
                run.log_timings(step, {"sample": 1.0, "train": 2.0})
            run.set_status("done", 6)
        runs.append(run)
    file = folder / "all.html"
    file.write_text(report_page(runs, findings=[[FINDING] if i == 2 else [] for i in range(8)]))
    return file.as_uri()


def drawn(page: Any, key: str) -> Any:
    """The card of the chart that has a key, drawn."""
    card = page.locator(f"[data-keys~='{key}']").first
    card.scroll_into_view_if_needed()
    until(page, f"document.querySelector('[data-keys~=\"{key}\"] .plot[data-drawn]') !== null")
    return card


@pytest.mark.parametrize("width", [400, 1280])
def test_the_legend_has_every_run_and_every_key_whole(open_page, address, width):
    page = open_page(address, viewport={"width": width, "height": 900}).page
    card = drawn(page, "group/dead_frac")
    names = card.locator(".legend > span").all_text_contents()
    assert names == ["run0", LONG, *(f"run{i}" for i in range(2, 8)), "dead", "all_right", "all_wrong"]
    for item in card.locator(".legend > span").all():
        box, around = item.bounding_box(), card.bounding_box()
        assert box["x"] >= around["x"] and box["x"] + box["width"] <= around["x"] + around["width"]
        assert item.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_swatch_of_the_legend_is_the_line_of_the_chart(open_page, address):
    page = open_page(address).page
    card = drawn(page, "optim/grad_norm")
    swatches = card.locator(".legend line").evaluate_all("all => all.map(l => getComputedStyle(l).stroke)")
    lines = card.locator(".mark-line path").evaluate_all("all => all.map(l => getComputedStyle(l).stroke)")
    assert len(set(swatches)) == 8 and lines == swatches
    heads = page.locator(".run .swatch").evaluate_all("all => all.map(l => getComputedStyle(l).backgroundColor)")
    assert heads == swatches


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_mark_of_a_finding_has_the_colour_of_what_is_bad_and_names_its_run(open_page, address, scheme):
    page = open_page(address, color_scheme=scheme).page
    card = drawn(page, "optim/grad_norm")
    mark = card.locator(".mark-rule.role-mark line")
    colour = page.evaluate("variable('bad')").lstrip("#")
    wanted = f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (0, 2, 4))})"
    assert mark.evaluate("e => getComputedStyle(e).stroke") == wanted
    mark.hover(force=True)
    facts = page.evaluate("[...document.querySelectorAll('#tip dl > *')].map(x => x.textContent)")
    shown = dict(zip(facts[::2], facts[1::2], strict=True))
    assert (shown["run"], shown["rule"]) == ("run2", "gradient_spike")


# Machado, Oliveira and Fernandes (2009), severity 1.
SIGHT = {
    "all": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def lab(colour: str, sight: np.ndarray) -> np.ndarray:
    """CIELAB of a colour as it is seen."""
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.clip(sight @ np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    f = np.cbrt(xyz / np.array([0.9505, 1.0, 1.089]))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("sight", SIGHT)
def test_eight_colours_are_far_apart_for_the_colour_blind_too(theme, sight):
    import gruppo.report

    style = (Path(gruppo.report.__file__).parent / "page.css").read_text()
    colours = [re.findall(rf"--c{i}: (#\w+);", style)[theme] for i in range(1, 9)]
    seen = [lab(colour, SIGHT[sight]) for colour in colours]
    gaps = {(i + 1, j + 1): np.linalg.norm(seen[i] - seen[j]) for i, j in itertools.combinations(range(8), 2)}
    assert min(gaps.values()) > 10, min(gaps, key=lambda pair: gaps[pair])
