"""State of a run in one line: whether it learns, and why one may think so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gruppo.doctor.finding import FALLEN, FEWEST_STEPS, SURE, Change, Fall, Finding
from gruppo.doctor.rules import applied
from gruppo.doctor.table import Points, Table
from gruppo.errors import InputError
from gruppo.output import printable
from gruppo.run.reader import RunReader

Name = Literal["too_early", "learning", "stalled", "collapsed", "finished", "stopped", "killed", "failed"]


@dataclass(frozen=True, slots=True)
class State:
    """The state of a run: a word for programs, a sentence for people."""

    name: Name
    text: str


def state_line(run: RunReader) -> State:
    """The state of a run, from its records alone."""
    return summary(run)[0]


def summary(run: RunReader) -> tuple[State, list[Finding]]:
    """State and findings of a run, reading it once."""
    table = Table.of(run)
    found = applied(table)
    try:
        status = run.status()
    except InputError:  # it has not begun, or its disk was full
        status = {"status": "unknown"}
    return _state(status, table, found), found


def _state(status: dict[str, Any], table: Table, found: Sequence[Finding]) -> State:
    name, steps = status.get("status"), len(table.steps)
    at = f"after step {table.steps[-1]}" if steps else "before its first step"
    if name == "failed":
        return State("failed", f"failed {at}: {printable(str(status.get('error', 'no reason recorded')))[:500]}")
    ended = {
        "done": "finished",
        "stopped": "stopped by a signal",
        "killed": "killed, since its process is gone,",
        "unknown": "without a status file that can be read,",
    }
    how = f"{ended.get(str(name), 'running,')} {at}"
    if steps < 2 * FEWEST_STEPS:
        few = f"{how}: too early to tell, {2 * FEWEST_STEPS} steps are the least"
        return State("killed" if name == "killed" else "too_early", few)
    change = Change.of(table.series("reward/mean"))
    held_out = _held_out(table.series("eval/accuracy"))
    if change is None:
        return State("stalled", f"{how}, stalled: no completion has a reward{held_out}")
    reward = f"reward {change.first:.3f} -> {change.last:.3f} (noise {SURE * change.error:.3f})"
    because = f": {reward}{held_out}"
    scores, lows, highs = (table.series(f"eval/accuracy{end}") for end in ("", "_low", "_high"))
    has_bounds = len(scores) > 1 and len(scores) == len(lows) == len(highs)
    fall = Fall.of(table)
    if fall is not None:
        return State("collapsed", f"{how}, collapsed: reward fell from {fall.best:.3f} to {fall.last:.3f}{held_out}")
    if has_bounds:
        best = max(range(len(scores)), key=lambda i: scores[i][1])
        if highs[-1][1] < lows[best][1] and scores[-1][1] < FALLEN * scores[best][1]:
            lost = f"held-out accuracy fell from {scores[best][1]:.3f} to {scores[-1][1]:.3f}; {reward}"
            return State("collapsed", f"{how}, collapsed: {lost}")
    is_better = has_bounds and lows[-1][1] > highs[0][1]
    is_worse = has_bounds and highs[-1][1] < lows[0][1]
    if is_better and not change.rises():
        because = f":{held_out.removeprefix(',')}, {reward}"
    if not (change.rises() or is_better) or is_worse:
        cause = f"; likely: {found[0].text}" if found else ""
        return State("stalled", f"{how}, stalled{because}{cause}")
    problem = next((finding for finding in found if finding.severity == "problem"), None)
    if problem is not None:
        because = f"{because}; but {problem.text}"
    if name == "done":
        return State("finished", f"{how}, it learned{because}")
    named: dict[Any, Name] = {"stopped": "stopped", "killed": "killed"}
    return State(named.get(name, "learning"), f"{how}, learning{because}")


def _held_out(points: Points) -> str:
    """The held-out score at its first and last evaluation, as the end of a sentence."""
    if not points:
        return ""
    if len(points) == 1:
        return f", held-out accuracy {points[0][1]:.3f}"
    return f", held-out accuracy {points[0][1]:.3f} -> {points[-1][1]:.3f}"
