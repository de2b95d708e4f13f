"""Page of a report: one self-contained HTML file with data, charts and the token viewer.

A strict content security policy admits its scripts and style by hash. Model output is embedded as JSON with `<`
escaped, or compressed, and only ever shown as text.
"""

import base64
import gzip
import hashlib
import html
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from gruppo import __version__
from gruppo.codec import json_text
from gruppo.doctor import Finding, State
from gruppo.process.streams import shell_word
from gruppo.report.charts import charts, ledger_chart, run_names
from gruppo.report.data import (
    UNREADABLE,
    Limits,
    TokenTexts,
    chosen_steps,
    config_table,
    ledger,
    loss_text,
    step_data,
    summary,
)
from gruppo.run.reader import RunReader
from gruppo.run.transcript import STOPS

MOST_STEPS = 24
"""Most steps of a run with completions on the page."""
MOST_TOKENS = 300_000
"""Most tokens on a page, over all runs: about ten megabytes with their numbers."""
LEDGER_STEPS = 50

NO_GAP = (
    "No gap was measured: completions were sampled with the trainer's own weights in its process. The token viewer "
    "shows the gap of each token whose log-probs were computed twice."
)


def report_page(
    runs: Sequence[RunReader],
    *,
    findings: Sequence[Sequence[Finding]] = (),
    states: Sequence[State] = (),
) -> str:
    """Report of one or more runs as HTML.

    Args:
        findings: the doctor's findings for each run; empty if not looked for.
        states: the state of each run; empty to take it from the status file.
    """
    data = page_data(runs, findings=findings, states=states)
    data |= chart_data(runs, findings=findings)
    blocks: list[str] = []
    shown = chosen = recorded = 0
    lost = ""
    for i, run in enumerate(runs):
        own = data["runs"][i]
        own["ledger"] = ledger_data(run)
        steps, unreadable = chosen_steps(run, MOST_STEPS), []
        texts, limits = TokenTexts(run), Limits(tokens=MOST_TOKENS // len(runs) // max(len(steps), 1))
        for step in steps:
            try:
                blocks.append(_packed_step(i, step_data(run, step, texts, limits)))
            except UNREADABLE:
                unreadable.append(step)
        own["steps_here"] = [step for step in steps if step not in unreadable]
        shown, chosen = shown + len(own["steps_here"]), chosen + len(steps)
        recorded += len(own["steps_recorded"])
        lost += _left_out(run, unreadable)
    command = f"gruppo view {' '.join(map(shell_word, data['paths']))}"
    held = f"It holds the completions of {f'{shown} of' if shown < recorded else 'all'} {recorded} recorded steps"
    data["note"] = (
        f"{held}: the first, the last, those with extreme metrics, and others evenly between. {command} shows all."
        if chosen < recorded
        else f"{held}. Groups beyond its size are left out, which the viewer then notes; {command} shows all."
    ) + lost
    blocks.append(_data_block("data", to_json(data), "application/json"))
    scripts = [vega_script(), _source("page.js") + _source("viewer.js")]
    inline = "\n".join(f"<script>{text}</script>" for text in scripts)
    return _filled(data["title"], "\n".join(blocks), inline, f"script-src {_hashes(scripts)}")


def replay_page(run: RunReader, found: Mapping[str, Any]) -> str:
    """Replayed step as HTML: a table of losses, and completions with the credit that each loss gives.

    Args:
        found: the replay, from `Replay.as_json`.
    """
    step = found["step"]
    data = page_data([run])
    data["runs"][0] |= {"steps_here": [step], "steps_recorded": [step]}
    kept = {name: value for name, value in found.items() if name != "completions"}
    data |= {"title": f"step {step} of {data['title']}", "questions": []}
    data["replay"] = kept | {"completions": len(found["completions"])}
    data["note"] = f"It holds the completions of the update of step {step} that was replayed."
    replayed = {completion["row"]: completion for completion in found["completions"]}
    packed = _packed_step(0, step_data(run, step, TokenTexts(run), Limits(tokens=MOST_TOKENS), replayed))
    blocks = [packed, _data_block("data", to_json(data), "application/json")]
    script = _source("page.js") + _source("viewer.js")
    return _filled(data["title"], "\n".join(blocks), f"<script>{script}</script>", f"script-src {_hashes([script])}")


def live_page(title: str) -> str:
    """Page that `gruppo view` serves; it fetches its data and the chart library from the same server."""
    script = _source("page.js") + _source("viewer.js")
    block = _data_block("data", to_json({"live": True}), "application/json")
    policy = f"script-src 'self' {_hashes([script])}; connect-src 'self'"
    return _filled(title, block, f"<script>{script}</script>", policy)


def page_data(
    runs: Sequence[RunReader], *, findings: Sequence[Sequence[Finding]] = (), states: Sequence[State] = ()
) -> dict[str, Any]:
    """Data of the page except charts, ledger and completions."""
    names = run_names(runs)
    shown = []
    for i, run in enumerate(runs):
        facts = summary(run)
        state = asdict(states[i]) if states else _status_of(facts)
        own = [asdict(finding) for finding in findings[i]] if findings else []
        facts |= {"name": names[i], "state": state, "findings": own, "ledger": None}
        shown.append(facts | {"steps_here": facts["steps_recorded"]})
    title = f"{', '.join(names)} · gruppo"
    options = config_table(runs)
    paths = [str(run.path) for run in runs]
    facts = {"title": title, "version": __version__, "runs": shown, "config": options, "paths": paths, "note": ""}
    return facts | {"stops": STOPS}


def chart_data(runs: Sequence[RunReader], *, findings: Sequence[Sequence[Finding]] = ()) -> dict[str, Any]:
    """Charts of the page."""
    questions = charts(runs, findings)
    if all(run.config().get("sampler") == "torch" for run in runs):
        questions[3]["none"] = NO_GAP
    return {"questions": questions}


def _status_of(facts: Mapping[str, Any]) -> dict[str, str]:
    """State of a run from its status file alone."""
    of = f" of {facts['steps']}" if facts["steps"] else ""
    where = f"step {facts['step']}{of}"
    texts = {
        "running": f"at {where}",
        "done": f"finished {where}",
        "stopped": f"stopped after {where} and saved; gruppo resume goes on",
        "failed": f"failed after {where}: {facts['error']}",
        "killed": f"its process ended after {where} without a word; gruppo resume goes on",
    }
    return {"name": facts["status"], "text": texts.get(facts["status"], f"at {where}")}


def ledger_data(run: RunReader) -> dict[str, Any] | None:
    """Token ledger in words; None for a run without completions."""
    recorded = run.completion_steps()
    steps = recorded[:: -(-len(recorded) // LEDGER_STEPS) or 1]
    found = ledger(run, steps)
    lost = _left_out(run, found["unreadable"])
    if not found["steps"]:
        return {"generated": 0, "note": lost.strip()} if lost else None
    parts = _loss_parts(loss_text(run))
    rejects = "; ".join(f"{name}: {parts[name]}" for name in ("select", "correction") if name in parts)
    titles = {
        "other": ("written by a tool or a user", "the policy did not sample them"),
        "left_out": (
            "in a group left out",
            "dropped by dynamic sampling: no signal, or more groups than the step takes",
        ),
        "masked": ("in a masked completion", "cut off at max_new_tokens, with mask_truncated"),
        "no_advantage": (
            "in a group without an advantage",
            "all completions of the group earned the same, or count as equal",
        ),
        "at_mean": (
            "at the mean of its group",
            "others of the group have an advantage; this one earned the baseline, or was not judged",
        ),
        "rejected": ("rejected by the loss", rejects or "this loss rejects none"),
    }
    lines = [{"title": titles[name][0], "what": titles[name][1], "count": found["total"][name]} for name in titles]
    count = len(found["steps"])
    weight = parts.get("weight", "not recorded; see the documentation of the loss")
    config = run.config()
    minibatches, epochs = (int(config.get(name) or 1) for name in ("minibatches", "epochs_per_batch"))
    where = "In a recorded step that is"
    if minibatches * epochs > 1:
        where = f"A step has {minibatches * epochs} updates, and each divides by what it trains on: on average"
    sequences, scored = (found[name] / count / minibatches for name in ("sequences", "scored"))
    limited = (
        " Completions beyond completions_limit count too but are not included here." if found["unrecorded"] else ""
    )
    divisor = [
        f"The loss is a {weight}." if weight.startswith("mean") else f"Weight of a token: {weight}.",
        f"{where} {sequences:,.0f} completions with {scored:,.0f} scored tokens. Tokens without an advantage "
        f"and masked completions count too.{limited}",
    ]
    all_ = count == len(recorded)
    note = f"Over {'all ' if all_ else ''}{count} recorded steps{'' if all_ else f' of {len(recorded)}'}."
    if found["unrecorded"]:
        covered, made = found["recorded"], found["recorded"] + found["unrecorded"]
        note += f" It covers {covered:,} of {made:,} completions; completions_limit left out the rest."
    trained = found["total"][""]
    made = {"generated": sum(found["total"].values()), "lines": lines, "trained": trained, "divisor": divisor}
    return made | {
        "note": note + lost,
        "chart": ledger_chart(found["steps"], {"": "trained on"} | {k: v[0] for k, v in titles.items()}),
    }


def _left_out(run: RunReader, steps: Sequence[int]) -> str:
    """Sentence on unreadable completions files, after a space; empty if there are none."""
    files = [run.completions_file(step) for step in steps]
    if not files:
        return ""
    verb = "is" if len(files) == 1 else "are"
    return f" {', '.join(f.name for f in files)} cannot be read and {verb} left out (in {files[0].parent})."


def _loss_parts(text: str) -> dict[str, str]:
    """Parts of a loss by name, parsed from its text: one indented line each."""
    pairs = (line.strip().partition(" ") for line in text.splitlines() if line.startswith("  "))
    return {name: words.strip() for name, _, words in pairs}


# --- the file ---------------------------------------------------------------------------------------------------------


def to_json(value: Any) -> str:
    """JSON in ASCII; NaN and infinity become null."""
    try:
        return json.dumps(value, allow_nan=False, default=str, separators=(",", ":"))
    except ValueError:
        return json.dumps(json.loads(json_text(value)), separators=(",", ":"))


@cache
def vega_script() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script."""
    import vl_convert

    # Wrapped in a function: the bundle has thousands of top-level names.
    return _inlined(f"(() => {{{vl_convert.javascript_bundle('window.vegaEmbed = vegaEmbed;')}}})();")


@cache
def _source(name: str) -> str:
    return _inlined(files("gruppo.report").joinpath(name).read_text(encoding="utf-8"))


def _inlined(script: str) -> str:
    """Script made safe to embed: nothing in it closes the element or opens a comment."""
    assert "</script" not in script.lower() and "<!--" not in script
    return script


def _data_block(name: str, text: str, kind: str) -> str:
    return f'<script id="{name}" type="{kind}">{text.replace("<", chr(92) + "u003c")}</script>'


def _packed_step(run: int, step: Mapping[str, Any]) -> str:
    packed = gzip.compress(to_json(step).encode(), 6, mtime=0)
    return _data_block(f"step-{run}-{step['step']}", base64.b64encode(packed).decode(), "text/plain")


def _hashes(texts: Iterable[str]) -> str:
    def each() -> Iterator[str]:
        for text in texts:
            yield f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    return " ".join(each())


def _filled(title: str, data: str, scripts: str, policy: str) -> str:
    style = _source("page.css")
    rest = "img-src data:; base-uri 'none'; form-action 'none'"
    rules = f"default-src 'none'; {policy}; style-src {_hashes([style])}; {rest}"
    given = {"policy": rules, "title": html.escape(title), "style": style, "data": data, "scripts": scripts}
    parts = files("gruppo.report").joinpath("page.html").read_text(encoding="utf-8")
    before, *rest = parts.split("{{")
    return before + "".join(given[name] + text for name, text in (part.split("}}", 1) for part in rest))
