"""Charts of a report, in Vega-Lite through Altair: the metrics of one or more runs, grouped by question.

The page supplies the colours, light or dark, and draws the legend, so that it can wrap.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

import numpy as np

from gruppo.doctor import Finding, Table
from gruppo.keys import find
from gruppo.report.data import Points, is_ahead, metric_series, stage_seconds
from gruppo.run.reader import RunReader

MOST_POINTS = 400
"""Most points drawn of a curve; of more, the lowest and highest of each stretch."""
HEIGHT = 170
POINTS_SHOWN = 25
"""Most points of a curve that get a dot each."""
SMOOTHED_FROM = 30
"""Fewest points of a curve that gets a running mean."""
MOST_RUNS = 8
"""Most runs that can be told apart: the page has this many colours."""
DASHES = ((1, 0), (6, 3), (2, 2), (9, 3, 2, 3), (12, 4), (2, 5))
"""Dash patterns for the keys of a chart, in order."""


@dataclass(frozen=True)
class Panel:
    """Chart of some keys; left out with fewer than `fewest` curves."""

    title: str
    keys: tuple[str, ...]
    fewest: int = 1


@dataclass(frozen=True)
class Question:
    """Question with the charts that answer it. Other keys that begin with one of `others` follow at the end."""

    name: str
    """In the page's list of parts."""
    title: str
    answer: str
    panels: tuple[Panel, ...]
    others: tuple[str, ...]
    is_optional: bool = False
    """It is left out where a run has none of its keys."""


QUESTIONS = (
    Question(
        "Learning",
        "Is it learning?",
        "The held-out score decides: its prompts are never trained on. The reward of training samples shows the same "
        "earlier, with more noise.",
        (
            Panel("held-out accuracy", ("eval/accuracy",)),
            Panel("held-out reward", ("eval/reward",)),
            Panel("held-out pass@k", ("eval/pass@<k>",)),
            Panel("reward", ("reward/mean", "reward/shaped_mean")),
            Panel("right answers", ("reward/correct_frac",)),
            Panel("reward by function", ("reward/<name>/mean",), fewest=2),
            Panel("tokens per completion", ("completion/len_mean", "completion/len_p95")),
        ),
        ("eval/", "reward/", "completion/"),
    ),
    Question(
        "Signal",
        "Is the signal alive?",
        "A group teaches through differences. If all completions of a prompt earn the same, it teaches nothing.",
        (
            Panel("groups", ("group/dead_frac", "group/all_right_frac", "group/all_wrong_frac")),
            Panel("spread of the reward", ("reward/std",)),
            Panel("cut off or empty", ("completion/truncated_frac", "completion/empty_frac")),
            Panel("completions with an advantage", ("live/frac",)),
            Panel("failures of reward functions", ("reward/<name>/error_frac", "reward/<name>/timeout_frac")),
            Panel("groups of dynamic sampling", ("dynamic/groups_kept", "dynamic/groups_dropped")),
        ),
        ("group/", "dynamic/"),
    ),
    Question(
        "Policy",
        "Is the policy stable?",
        "Entropy falls slowly in a healthy run. KL, clipped tokens and the gradient show steps that are too large.",
        (
            Panel("entropy, nats per token", ("rollout/entropy", "live/entropy")),
            Panel("KL to the policy that sampled", ("live/approx_kl",)),
            Panel("KL to the reference", ("policy/kl", "reward/kl")),
            Panel("clipped tokens", ("live/clip_ratio_high", "live/clip_ratio_low")),
            Panel("norm of the gradient", ("optim/grad_norm",)),
            Panel("token that moved most: ratio", ("live/token_ratio_max",)),
            Panel("token that moved most: KL", ("live/token_kl_max",)),
            Panel("loss", ("policy/loss",)),
            Panel("tokens rejected by the loss", ("live/rejected_frac",)),
        ),
        ("policy/", "optim/", "live/"),
    ),
    Question(
        "Sampler",
        "Do sampler and trainer agree?",
        "Both should have the same log-prob for a token. A gap points to stale weights or to different precision.",
        (
            Panel("gap of log-probs", ("sampler/logp_gap_mean",)),
            Panel("largest gap", ("sampler/logp_gap_max",)),
            Panel("KL of sampler and trainer", ("sampler/kl",)),
            Panel("effective share of tokens", ("sampler/ess", "sampler/sequence_ess")),
            Panel("staleness, in updates", ("rollout/staleness",)),
            Panel("gap on fixed tokens after a weight sync", ("sync/canary_gap",)),
        ),
        ("sampler/", "sync/", "rollout/"),
    ),
    Question(
        "Turns",
        "Do the turns work?",
        "Calls that fail, and episodes that are cut or lost, cost as much as others and teach little.",
        (
            Panel("turns of an episode", ("turns/mean", "turns/max")),
            Panel("tool calls of an episode", ("turns/calls",)),
            Panel("calls that fail", ("turns/call_error_frac", "turns/unparsed_frac")),
            Panel("episodes cut or lost", ("turns/cut_frac", "turns/lost_frac")),
            Panel("tokens written by others", ("turns/given_tokens",)),
        ),
        ("turns/",),
        is_optional=True,
    ),
    Question("Time", "Where does the time go?", "Seconds of a step by stage.", (), ("log/",)),
)


def charts(runs: Sequence[RunReader], findings: Sequence[Sequence[Finding]] = ()) -> list[dict[str, Any]]:
    """Questions with their charts. `findings` has those of each run; a finding's metric always gets a chart."""
    names = run_names(runs)
    series = {name: metric_series(run) for name, run in zip(names, runs, strict=True)}
    for name, run, own in zip(names, runs, findings, strict=False):
        missing = {finding.metric for finding in own if finding.metric} - series[name].keys()
        table = Table.of(run) if missing else None  # the doctor takes some metrics from the completions
        series[name] |= {metric: points for metric in missing if table and (points := table.series(metric))}
    known = sorted({key for each in series.values() for key in each if not _is_end(key, each)})
    marks = [(name, finding) for name, each in zip(names, findings, strict=False) for finding in each]
    marked = {finding.metric for _, finding in marks}
    used: set[str] = set()
    answers = []
    for question in QUESTIONS:
        drawn, further = [], []
        for panel in question.panels:
            keys = _in_order(panel, known)
            # A held-out score that is always 0 keeps its chart: it matters.
            is_shown = marked.intersection(keys) or "eval/accuracy" in keys or not _is_zero(keys, series)
            if len(keys) >= panel.fewest and keys and is_shown:
                drawn.append(_chart(panel.title, keys, series, marks))
                used.update(keys)
        if question is QUESTIONS[-1]:
            drawn += _time_charts(names, runs)
        facts = {"name": question.name, "title": question.title}
        answers.append(facts | {"answer": question.answer, "charts": drawn, "further": further})
    prefixes = [prefix for question in QUESTIONS for prefix in question.others]
    for question, answer in zip(QUESTIONS, answers, strict=True):
        own = [key for key in known if key.startswith(question.others)]
        if question is QUESTIONS[0]:  # the user's own metrics
            own += [key for key in known if not key.startswith(tuple(prefixes))]
        rest = [key for key in own if key not in used]
        answer["zero"] = [key for key in rest if key not in marked and _is_zero([key], series)]
        for key in rest:
            if key not in answer["zero"]:
                answer["charts" if key in marked else "further"].append(_chart(key, [key], series, marks))
    pairs = zip(QUESTIONS, answers, strict=True)
    return [
        answer
        for question, answer in pairs
        if not question.is_optional or any(k.startswith(question.others) for k in known)
    ]


def run_names(runs: Sequence[RunReader]) -> list[str]:
    """Name of each run: its folder, with the parent folder if two are the same."""
    paths = [run.path.resolve() for run in runs]
    names = [path.name for path in paths]
    return [f"{p.parent.name}/{p.name}" if names.count(p.name) > 1 else p.name for p in paths]


def _in_order(panel: Panel, known: Sequence[str]) -> list[str]:
    found = []
    for pattern in panel.keys:
        # A pattern such as reward/<name>/mean matches only names of its own registry entry.
        found += [
            name for name in known if name == pattern or ((key := find(name)) is not None and key.name == pattern)
        ]
    return list(dict.fromkeys(found))


def _is_end(key: str, series: Mapping[str, Points]) -> bool:
    """True for an end of another key's interval, which is drawn with that key."""
    whole = re.sub("_(low|high)$", "", key)
    return whole != key and whole in series and key.startswith("eval/")


def _is_zero(keys: Sequence[str], series: Mapping[str, Mapping[str, Points]]) -> bool:
    return all(value == 0 for each in series.values() for key in keys for _, value in each.get(key, ()))


def _chart(
    title: str, keys: Sequence[str], series: Mapping[str, Mapping[str, Points]], marks: Sequence[tuple[str, Finding]]
) -> dict[str, Any]:
    """Curves of some keys, coloured by key for one run and by run for several."""
    import altair as alt

    rows = []
    for run, values in series.items():
        for key in keys:
            smooth = not key.startswith("eval/") and key != "optim/lr"
            ends = [dict(values.get(f"{key}_{end}", ())) for end in ("low", "high")] if key.startswith("eval/") else []
            for step, value, mean in _thinned(values.get(key, []), smooth):
                row = {"step": step, "value": value, "mean": mean, "key": _short(key, keys), "run": run}
                rows.append(row | dict(zip(("low", "high"), (end.get(step) for end in ends), strict=False)))
    low, high = _domain(keys, rows)
    is_log = low > 0 and high / low > 1000
    kind = {"type": "log"} if is_log else {"zero": False}
    scale = alt.Scale(domain=[low, high], nice=False, clamp=True, **kind)  # pyright: ignore[reportArgumentType]
    x = _step_axis(rows)
    # Without a precision, the format takes that of the tick distance: 10 becomes 1e+1.
    ticks = alt.Axis(values=_powers(low, high), format="~e") if is_log else alt.Axis(tickCount=4, format=".6~g")
    y = alt.Y("value:Q", title=None, scale=scale, axis=ticks)
    by = "run" if len(series) > 1 else "key"
    is_single = len(series) == 1 and len(keys) == 1
    shorts = [_short(key, keys) for key in keys]
    dashed = [list(DASHES[i % len(DASHES)]) for i in range(len(keys))]
    order = list(series) if by == "run" else shorts
    color = alt.Color(f"{by}:N", scale=alt.Scale(domain=order), legend=None)
    dash = alt.StrokeDash("key:N", scale=alt.Scale(domain=shorts, range=dashed), legend=None)
    tooltip = [
        alt.Tooltip("step:Q", format="d"),
        alt.Tooltip("value:Q", format=".4~g"),
        *([alt.Tooltip("low:Q", format=".4~g"), alt.Tooltip("high:Q", format=".4~g")] if _has(rows, "low") else []),
        *([alt.Tooltip("mean:Q", title="running mean", format=".4~g")] if _has(rows, "mean") else []),
        *([] if is_single else [alt.Tooltip("key:N"), alt.Tooltip("run:N")]),
    ]
    hover = alt.selection_point(on="pointerover", nearest=True, empty=False, clear="pointerout")
    layers: list[Any] = []
    bounds, with_range = _usual(keys, low, high)
    if bounds is not None:
        values = alt.Data(values=[{"bottom": bounds[0], "top": bounds[1]}])
        area = alt.Chart(values).mark_rect(style="usual", clip=True)  # pyright: ignore[reportArgumentType]
        layers.append(area.encode(y=alt.Y("bottom:Q", scale=scale, title=None), y2="top:Q"))
    if _has(rows, "low"):
        interval = alt.Chart().mark_area(opacity=0.18)
        layers.append(interval.encode(x=x, y=alt.Y("low:Q", title=None, scale=scale), y2="high:Q", color=color))
    has_mean = _has(rows, "mean")
    line = alt.Chart().mark_line(strokeWidth=1 if has_mean else 2, opacity=0.35 if has_mean else 1)
    layers.append(line.encode(x=x, y=y, color=color, strokeDash=dash))
    if has_mean:
        smooth_line = alt.Chart().mark_line(strokeWidth=2)
        layers.append(smooth_line.encode(x=x, y=alt.Y("mean:Q", scale=scale, title=None), color=color, strokeDash=dash))
    points = alt.Chart().mark_point(filled=True, size=45).encode(x=x, y=y, color=color, tooltip=tooltip)
    longest = max(Counter((row["key"], row["run"]) for row in rows).values(), default=0)
    hidden = 1 if longest <= POINTS_SHOWN else 0
    layers.append(points.encode(opacity=alt.condition(hover, alt.value(1), alt.value(hidden))).add_params(hover))
    own = [
        {"step": mark.step, "text": mark.text, "rule": mark.rule, "severity": mark.severity, "run": run}
        for run, mark in marks
        if mark.metric in keys and mark.step is not None
    ]
    if own:
        rule = alt.Chart(alt.Data(values=own)).mark_rule(style="finding", strokeWidth=2)  # pyright: ignore[reportArgumentType]
        facts = ["step:Q", *(["run:N"] if by == "run" else []), "rule:N", "severity:N", "text:N"]
        layers.append(rule.encode(x=x, tooltip=facts))
    chart = alt.layer(*layers, data=alt.NamedData(name="rows")).properties(width="container", height=HEIGHT)
    legend = [] if is_single else _legend(order, dashed if by == "key" else ())
    if by == "run" and len(keys) > 1:
        legend += [{"name": name, "color": None, "dash": each} for name, each in zip(shorts, dashed, strict=True)]
    described = [_described(key) | {"range": key in with_range} for key in keys]
    return {"title": title, "keys": described, "spec": _spec(chart, rows), "bounds": bounds, "legend": legend}


def _legend(names: Sequence[str], dashes: Sequence[Sequence[int]] = ()) -> list[dict[str, Any]]:
    """Legend entries: each name with the number of its colour, and its dash."""
    return [{"name": name, "color": i, "dash": dashes[i] if dashes else None} for i, name in enumerate(names)]


def _step_axis(rows: Sequence[Mapping[str, Any]]) -> Any:
    import altair as alt

    steps = [row["step"] for row in rows] or [0]
    few = range(min(steps), max(steps) + 1)
    axis = alt.Axis(values=list(few), format="d") if len(few) < 6 else alt.Axis(tickCount=5, format="d")
    return alt.X("step:Q", title="step", axis=axis, scale=alt.Scale(nice=False))


def _powers(low: float, high: float) -> list[float]:
    """Powers of ten for an axis, at most five."""
    exponents = range(ceil(log10(low)), floor(log10(high)) + 1)
    return [10.0**exponent for exponent in exponents[:: ceil(len(exponents) / 5) or 1]]


def _spec(chart: Any, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Chart with its data, added after Altair, whose validation of data would take longer than all the rest."""
    return chart.to_dict(validate=False) | {"datasets": {"rows": rows}}


def _short(key: str, keys: Sequence[str]) -> str:
    """Keys as a legend shows them, without their common prefix."""
    parts = key.split("/")
    same = all(other.split("/")[0] == parts[0] for other in keys)
    return "/".join(parts[1:]).removesuffix("_frac") if same and len(parts) > 1 and len(keys) > 1 else key


def _described(name: str) -> dict[str, str]:
    key = find(name)
    what = ("", "", "") if key is None else (key.what, key.over, key.expected)
    return {"key": name, **dict(zip(("what", "over", "expect"), (text.replace("`", "") for text in what), strict=True))}


def _has(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    return any(row.get(name) is not None for row in rows)


def _thinned(points: Points, smooth: bool) -> list[tuple[int, float, float | None]]:
    """Points to draw, each with the running mean over a twentieth of the run."""
    if not points:
        return []
    values = np.array([value for _, value in points])
    means: list[float | None] = [None] * len(points)
    if smooth and len(points) >= SMOOTHED_FROM:
        half = max(len(points) // 40, 1)
        sums = np.concatenate([[0.0], values.cumsum()])
        first, last = (np.clip(np.arange(len(points)) + at, 0, len(points)) for at in (-half, half + 1))
        means = [float(f"{mean:.5g}") for mean in (sums[last] - sums[first]) / (last - first)]
    kept = range(len(points))
    if len(points) > MOST_POINTS:
        stretches = np.array_split(np.arange(len(points)), MOST_POINTS // 2)
        ends = {int(s[values[s].argmin()]) for s in stretches} | {int(s[values[s].argmax()]) for s in stretches}
        kept = sorted(ends | {0, len(points) - 1})
    return [(points[i][0], float(f"{points[i][1]:.6g}"), means[i]) for i in kept]


def _domain(keys: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Range of the vertical axis."""
    values = [row[name] for row in rows for name in ("value", "low", "high") if row.get(name) is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    is_share = all(re.search(r"_frac$|^eval/(accuracy|pass@)", key) for key in keys)
    if is_share and low >= 0 and high <= 1:
        return 0.0, 1.0 if high > 0.4 else high * 1.1
    if low > 0 and high / low > 1000:
        return low, high
    if high - low < 0.05 * abs(high):  # nearly constant: do not let noise fill the chart
        middle, room = (low + high) / 2, 0.05 * abs(high) or 1.0
        return middle - room, middle + room
    room = (high - low) * 0.08
    return (0.0 if 0 <= low < (high - low) else low - room), high + room


def _usual(keys: Sequence[str], low: float, high: float) -> tuple[tuple[float, float] | None, list[str]]:
    """Usual range on the axis, and its keys: one key, or several with the same range."""
    ranges = {name: key.typical for name in keys if (key := find(name)) is not None and key.typical is not None}
    if len(set(ranges.values())) != 1:
        return None, []
    bottom, top = next(iter(ranges.values()))
    bottom, top = max(bottom, low), min(top, high)
    return ((bottom, top), list(ranges)) if top > bottom else (None, [])


def _time_charts(names: Sequence[str], runs: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Seconds by stage for one run, background stages apart; seconds of the whole step for several runs."""
    import altair as alt

    both = {name: stage_seconds(run) for name, run in zip(names, runs, strict=True)}
    stages = {name: {s: points for s, points in each.items() if not is_ahead(s)} for name, each in both.items()}
    if not any(stages.values()):
        return []
    if len(runs) > 1:
        totals: dict[str, dict[str, Points]] = {}
        for name, each in stages.items():
            steps = sorted({step for points in each.values() for step, _ in points})
            by_step = dict.fromkeys(steps, 0.0)
            for points in each.values():
                for step, value in points:
                    by_step[step] += value
            totals[name] = {"seconds of a step": sorted(by_step.items())}
        return [_chart("seconds of a step", ["seconds of a step"], totals, ())]
    rows = []
    (each,) = stages.values()
    steps = sorted({step for points in each.values() for step, _ in points})
    for stretch in np.array_split(np.array(steps), min(len(steps), 100)):
        first, last = int(stretch[0]), int(stretch[-1])
        for stage, points in each.items():
            seconds = [value for step, value in points if first <= step <= last]
            rows.append({"step": last, "seconds": sum(seconds) / len(stretch), "stage": stage})
    order = sorted(each, key=lambda stage: -sum(value for _, value in each[stage]))
    color = alt.Color("stage:N", scale=alt.Scale(domain=order), legend=None)
    tooltip = ["stage:N", alt.Tooltip("step:Q", format="d"), alt.Tooltip("seconds:Q", format=".3~g")]
    area = _stacked(len(steps)).encode(
        x=_step_axis(rows), y=alt.Y("seconds:Q", title=None, axis=alt.Axis(tickCount=4)), color=color, tooltip=tooltip
    )
    what = {"key": "timings.jsonl", "what": "seconds by stage", "over": "", "expect": "", "range": False}
    found = {"title": "seconds of a step", "keys": [what], "spec": _spec(area, rows), "bounds": None}
    found = [found | {"legend": _legend(order)}, _stage_bars("seconds of the whole run", each, what)]
    if ahead := {stage: points for stage, points in both[names[0]].items() if is_ahead(stage)}:
        what = what | {"what": "seconds by stage of background work during the steps above"}
        found.append(_stage_bars("seconds in the background", ahead, what))
    return found


def _stage_bars(title: str, stages: Mapping[str, Points], what: Mapping[str, Any]) -> dict[str, Any]:
    import altair as alt

    total = {stage: sum(value for _, value in points) for stage, points in stages.items()}
    order = sorted(total, key=lambda stage: -total[stage])
    bars = alt.Chart(alt.NamedData(name="rows")).properties(width="container", height=HEIGHT).mark_bar()
    bars = bars.encode(
        x=alt.X("seconds:Q", title=title, axis=alt.Axis(tickCount=5)),
        y=alt.Y("stage:N", sort=order, title=None),
        color=alt.Color("stage:N", scale=alt.Scale(domain=order), legend=None),
        tooltip=["stage:N", alt.Tooltip("seconds:Q", format=".3~g")],
    )
    rows = [{"stage": stage, "seconds": total[stage]} for stage in order]
    return {"title": title, "keys": [what], "spec": _spec(bars, rows), "bounds": None, "legend": []}


def _stacked(steps: int) -> Any:
    """Areas over the steps; bars for a single step, where an area would have no width."""
    import altair as alt

    chart = alt.Chart(alt.NamedData(name="rows")).properties(width="container", height=HEIGHT)
    return chart.mark_area(opacity=0.85) if steps > 1 else chart.mark_bar(opacity=0.85, size=48)


def ledger_chart(rows: Sequence[Mapping[str, int]], titles: Mapping[str, str]) -> dict[str, Any]:
    """Share of each step's tokens by what became of them."""
    import altair as alt

    used = [name for name in titles if any(row[name] for row in rows)]
    cells = [
        {"step": row["step"], "share": row[name] / (sum(row[each] for each in titles) or 1), "tokens": titles[name]}
        for row in rows
        for name in used
    ]
    order = [titles[name] for name in used]
    chart = _stacked(len(rows)).encode(
        x=_step_axis(rows),
        y=alt.Y("share:Q", title=None, axis=alt.Axis(format="%", tickCount=4), scale=alt.Scale(domain=[0, 1])),
        color=alt.Color("tokens:N", scale=alt.Scale(domain=order), legend=None),
        tooltip=["tokens:N", alt.Tooltip("step:Q", format="d"), alt.Tooltip("share:Q", format=".1%")],
    )
    what = {
        "key": "untrained",
        "what": "share of the tokens of a recorded step",
        "over": "",
        "expect": "",
        "range": False,
    }
    spec = _spec(chart, cells)
    return {"title": "tokens by step", "keys": [what], "spec": spec, "bounds": None, "legend": _legend(order)}
