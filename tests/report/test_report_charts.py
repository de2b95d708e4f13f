"""Charts of a report: what is in them, and what a renderer makes of them."""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import vl_convert
from written_runs import metrics_of, rollout, run_directory

from gruppo.cli.main import run as run_command
from gruppo.errors import InputError
from gruppo.report.charts import charts, ledger_chart
from gruppo.report.data import summary
from gruppo.run.directory import RunDirectory
from gruppo.run.reader import RunReader
from gruppo.types import Group, Prompt


@dataclass(frozen=True)
class Found:
    metric: str | None
    step: int | None = 2
    rule: str = "kl"
    severity: str = "problem"
    text: str = "the policy runs away"
    evidence: str = "KL is 9"
    remedy: str = "lower lr"


def logged(path: Path, *values: dict[str, float], seconds: dict[str, float] | None = None) -> RunDirectory:
    """A run with these metrics, a mapping for each step."""
    with run_directory(path, len(values)) as run:
        for step, each in enumerate(values, 1):
            run.log_metrics(step, each)
            if seconds:
                run.log_timings(step, seconds)
        run.set_status("done", len(values))
    return run


def chart_of(key: str, runs: list[Any], findings: Any = ()) -> dict[str, Any]:
    found = charts(runs, findings)
    (chart,) = (c for q in found for c in q["charts"] + q["further"] if key in [k["key"] for k in c["keys"]])
    return chart


def drawn(chart: dict[str, Any]) -> str:
    """The chart as SVG, by the renderer that the page uses too."""
    return vl_convert.vegalite_to_svg(chart["spec"] | {"width": 300})


def labels(chart: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Texts along the horizontal and the vertical axis."""
    both = []
    for axis in "XY":
        svg = drawn(chart)
        start = re.search(rf'aria-label="{axis}-axis', svg)
        assert start is not None
        part = svg[start.start() :]
        part = part[part.index("role-axis-label") : part.index("role-axis-domain")]
        both.append(re.findall(r"<text[^>]*>([^<]*)</text>", part))
    return both[0], both[1]


def test_ticks_are_plain_numbers_and_whole_steps(tmp_path: Path) -> None:
    run = logged(tmp_path / "run", *({"optim/grad_norm": value} for value in (0.5, 4.0, 9.9)))
    steps, values = labels(chart_of("optim/grad_norm", [run]))
    assert steps == ["1", "2", "3"]
    assert values == ["0", "2", "4", "6", "8", "10"]


def test_a_logarithmic_axis_has_few_powers_of_ten(tmp_path: Path) -> None:
    run = logged(tmp_path / "run", *({"optim/grad_norm": 10.0**power} for power in (-2, 0, 1.5)))
    chart = chart_of("optim/grad_norm", [run])
    _, values = labels(chart)
    assert 3 <= len(values) <= 6 and all(re.fullmatch(r"1e[+−-]\d+", text) for text in values)
    grids = re.findall(r'role-axis-grid"[^>]*>(.*?)</g>', drawn(chart))
    assert grids and max(grid.count("<line") for grid in grids) <= 6


def test_one_step_has_bars_of_some_width(tmp_path: Path) -> None:
    run = logged(tmp_path / "run", {"reward/mean": 0.5}, seconds={"sample": 2.0, "train": 1.0})
    counts = {"": 30, "other": 0, "left_out": 0, "masked": 10, "no_advantage": 0, "at_mean": 0, "rejected": 0}
    titles = {name: name or "trained on" for name in counts}
    (seconds,) = (c for c in charts([run])[-1]["charts"] if c["title"] == "seconds of a step")
    for chart in (seconds, ledger_chart([{"step": 1, **counts}], titles)):
        bars = re.findall(r'aria-roledescription="bar"[^>]* d="M[^"]*?h([\d.]+)', drawn(chart))
        assert len(bars) == 2 and all(float(width) > 10 for width in bars)


def test_a_name_that_ends_like_an_interval_is_a_metric_of_its_own(tmp_path: Path) -> None:
    values = {"reward/x/temperature_high": 3.0, "mine_low": 2.0, "eval/accuracy": 0.5, "eval/accuracy_low": 0.4}
    found = charts([logged(tmp_path / "run", values | {"live/clip_ratio": 0.2, "live/clip_ratio_high": 0.1})])
    shown = {key["key"] for q in found for c in q["charts"] + q["further"] for key in c["keys"]}
    assert shown == {
        "reward/x/temperature_high",
        "mine_low",
        "eval/accuracy",
        "live/clip_ratio",
        "live/clip_ratio_high",
    }


def test_the_range_that_is_drawn_is_the_one_in_the_text(tmp_path: Path) -> None:
    values = {"policy/kl": 0.9, "reward/kl": 0.5, "completion/truncated_frac": 0.6, "completion/empty_frac": 0.3}
    run = logged(tmp_path / "run", dict.fromkeys(values, 0.0), values)
    kl, cut = (chart_of(key, [run]) for key in ("policy/kl", "completion/truncated_frac"))
    assert kl["bounds"][1] == cut["bounds"][1] == 0.1
    ranges = {key["key"]: (key["range"], key["expect"]) for chart in (kl, cut) for key in chart["keys"]}
    assert ranges["policy/kl"] == (True, "below 0.1, rising slowly")
    assert ranges["completion/truncated_frac"] == (True, "below 0.1")
    assert ranges["completion/empty_frac"] == (False, "0") and not ranges["reward/kl"][0]


def test_background_seconds_are_not_added_to_those_of_a_step(tmp_path: Path) -> None:
    seconds = {"sample": 1.0, "train": 2.0, "ahead/sample": 50.0}
    first, second = (
        logged(tmp_path / name, {"reward/mean": 0.5}, {"reward/mean": 0.6}, seconds=seconds) for name in "ab"
    )
    assert summary(first)["seconds"] == 6.0
    by_title = {chart["title"]: chart["spec"]["datasets"]["rows"] for chart in charts([first])[-1]["charts"]}
    assert {row["stage"]: row["seconds"] for row in by_title["seconds of the whole run"]} == {
        "sample": 2.0,
        "train": 4.0,
    }
    assert {row["stage"] for row in by_title["seconds of a step"]} == {"sample", "train"}
    assert by_title["seconds in the background"] == [{"stage": "ahead/sample", "seconds": 100.0}]
    (both,) = (chart for chart in charts([first, second])[-1]["charts"] if chart["title"] == "seconds of a step")
    assert {row["value"] for row in both["spec"]["datasets"]["rows"]} == {3.0}


@pytest.mark.parametrize("metric", ["optim/skipped", "completion/empty_frac", "mine/zero", "mine/other"])
def test_the_metric_of_a_finding_always_has_a_chart_with_a_mark(tmp_path: Path, metric: str) -> None:
    values = {"optim/skipped": 0.0, "completion/empty_frac": 0.0, "mine/zero": 0.0, "mine/other": 1.0}
    run = logged(tmp_path / "run", values, values)
    found = charts([run], [[Found(metric)]])
    (chart,) = (c for q in found for c in q["charts"] if metric in [key["key"] for key in c["keys"]])
    assert "the policy runs away" in str(chart["spec"])
    assert "<svg" in drawn(chart) and metric not in [key for q in found for key in q["zero"]]
    without_step = charts([run], [[Found(metric, step=None)]])
    assert any(metric == key["key"] for q in without_step for c in q["charts"] for key in c["keys"])


def test_a_held_out_accuracy_of_0_has_a_chart(tmp_path: Path) -> None:
    """It is no detail among the numbers that are always 0, as those beside it are."""
    values = {"eval/accuracy": 0.0, "eval/pass@1": 0.0, "completion/empty_frac": 0.0}
    first = charts([logged(tmp_path / "run", values, values)])[0]
    (chart,) = (c for c in first["charts"] if c["title"] == "held-out accuracy")
    assert [row["value"] for row in chart["spec"]["datasets"]["rows"]] == [0.0, 0.0]
    assert first["zero"] == ["completion/empty_frac", "eval/pass@1"]


def test_a_gap_that_the_doctor_took_from_the_completions_has_a_chart(tmp_path: Path) -> None:
    run, draw = logged(tmp_path / "run", {"reward/mean": 0.5}, {"reward/mean": 0.5}), random.Random(0)
    prompt = Prompt(token_ids=(3,), text="1+1=", index=0)
    for step in (1, 2):
        made = rollout(prompt, draw, 4)
        away = tuple(x - step for x in made.trajectory.logps or ())
        run.write_completions(step, [Group(prompt=prompt, rollouts=(replace(made, old_logps=away),))])
    found = charts([run], [[Found("sampler/logp_gap_mean")]])
    (chart,) = found[3]["charts"]
    rows = chart["spec"]["datasets"]["rows"]
    assert [(row["step"], row["value"]) for row in rows] == [(1, pytest.approx(1.0)), (2, pytest.approx(2.0))]


def test_a_mark_among_several_runs_names_its_run(tmp_path: Path) -> None:
    values = {"optim/grad_norm": 1.0}
    runs = [logged(tmp_path / name, values, values) for name in ("first", "second")]
    text = str(chart_of("optim/grad_norm", runs, [[], [Found("optim/grad_norm")]])["spec"]["layer"][-1])
    assert "'run': 'second'" in text and "'field': 'run'" in text
    assert "'field': 'run'" not in str(
        chart_of("optim/grad_norm", runs[:1], [[Found("optim/grad_norm")]])["spec"]["layer"][-1]
    )


def dashes(chart: dict[str, Any]) -> dict[str, Any]:
    """The dash of each curve by its key, as it is drawn."""
    lines = re.findall(r'<path aria-label="[^>]*aria-roledescription="line mark"[^>]*', drawn(chart))
    dashed = [re.search(r'stroke-dasharray="([^"]*)"', line) for line in lines]
    keys = [re.search(r"key: (\S+?)[;\"]", line) for line in lines]
    return {key[1]: dash and dash[1] for key, dash in zip(keys, dashed, strict=True) if key is not None}


def test_a_metric_has_the_same_dash_alone_and_among_runs(tmp_path: Path) -> None:
    values = {"group/dead_frac": 0.1, "group/all_right_frac": 0.2, "group/all_wrong_frac": 0.3}
    runs = [logged(tmp_path / name, values, values) for name in ("first", "second")]
    alone, both = (dashes(chart_of("group/dead_frac", some)) for some in (runs[:1], runs))
    assert alone == both and len(set(alone.values())) == 3


def test_a_legend_names_every_run_and_every_key(tmp_path: Path) -> None:
    values = {"reward/mean": 0.1, "reward/shaped_mean": 0.2}
    runs = [logged(tmp_path / f"run{i}", values, values) for i in range(8)]
    legend = chart_of("reward/mean", runs)["legend"]
    assert [(item["name"], item["color"]) for item in legend[:8]] == [(f"run{i}", i) for i in range(8)]
    assert [item["name"] for item in legend[8:]] == ["mean", "shaped_mean"]
    assert [item["name"] for item in chart_of("reward/mean", runs[:1])["legend"]] == ["mean", "shaped_mean"]


def test_more_runs_than_colours_are_refused(tmp_path: Path) -> None:
    paths = [str(logged(tmp_path / f"run{i}", {"reward/mean": 0.1}).path) for i in range(9)]
    with pytest.raises(InputError, match="9 runs"):
        run_command(["report", *paths, "--output", str(tmp_path / "all.html")])
    assert run_command(["report", *paths[:8], "--output", str(tmp_path / "all.html")]) == 0


def test_a_tile_has_the_numbers_of_the_state_line(tmp_path: Path) -> None:
    from gruppo.doctor import state_line

    draw = random.Random(3)
    run = logged(
        tmp_path / "run", *(metrics_of(step, draw) | {"reward/mean": step**2 / 10000} for step in range(1, 101))
    )
    tile = next(tile for tile in summary(run)["tiles"] if tile["key"] == "reward/mean")
    assert f"reward {tile['first']:.3f} -> {tile['last']:.3f} (" in state_line(RunReader(run.path)).text
