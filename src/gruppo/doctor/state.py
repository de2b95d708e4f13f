"""State of a run in one line: is it learning, and what says so."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gruppo.doctor.finding import CORRECT, FEWEST_STEPS, REWARD, Change, Finding
from gruppo.doctor.progress import SURE_OF_PROGRESS, Fall, Progress, held_out_scores
from gruppo.doctor.rules import applied
from gruppo.doctor.table import Table
from gruppo.errors import InputError
from gruppo.keys import held_out_name
from gruppo.process.streams import printable
from gruppo.run.reader import RunReader

_NAMES = {REWARD: "reward", CORRECT: "right answers"}

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
    return _state(status, table, found), [*_end(status, table), *found]


def _end(status: dict[str, Any], table: Table) -> list[Finding]:
    """Finding for a run that failed or was killed."""
    at = f"after step {table.steps[-1]}" if table.steps else "before its first step"
    go_on = "run `gruppo resume` if a step was saved, else start the run again"
    if status.get("status") == "failed":
        return [
            Finding(
                rule="failed",
                severity="problem",
                step=None,
                text="the run failed",
                evidence=f"{at}: {_error(status)}",
                remedy=f"fix the cause of the error, then {go_on}; events.jsonl has the history",
            )
        ]
    if status.get("status") == "killed":
        text, evidence = (
            "the process of the run is gone",
            f"{at}: status.json says running, but no process is",
        )
        remedy = f"check whether the machine ran out of memory, then {go_on}"
        return [
            Finding(rule="killed", severity="warning", step=None, text=text, evidence=evidence, remedy=remedy),
        ]
    return []


def _early(status: dict[str, Any]) -> str:
    """Why a run ended before its last step; empty if it did not."""
    ended = status.get("ended")
    if not isinstance(ended, dict):
        return ""
    return printable(f" of {ended.get('steps')}, ended by {ended.get('by')}")[:80]


def _error(status: dict[str, Any]) -> str:
    """First line of the error that ended a run."""
    return printable(str(status.get("error", "no reason recorded")).partition("\n")[0])[:500]


def _state(status: dict[str, Any], table: Table, found: Sequence[Finding]) -> State:
    name, steps = status.get("status"), len(table.steps)
    at = f"after step {table.steps[-1]}" if steps else "before its first step"
    if name == "failed":
        return State("failed", f"failed {at}: {_error(status)}")
    ended = {
        "done": "finished",
        "stopped": "stopped by a signal",
        "killed": "killed (its process is gone)",
        "unknown": "without a readable status file,",
    }
    how = f"{ended.get(str(name), 'running,')} {at}{_early(status)}"
    if steps < 2 * FEWEST_STEPS:
        few = f"{how}: too early to tell; it takes at least {2 * FEWEST_STEPS} steps"
        return State("killed" if name == "killed" else "too_early", few)
    if Change.of(table.series(REWARD)) is None:
        return State("stalled", ", ".join([f"{how}, stalled: no completion has a reward", *_held_out(table)]))
    fall, progress = Fall.of(table), Progress.of(table)
    because = ", ".join(_numbers(table, progress))
    if fall is not None:
        score = _NAMES.get(fall.key) or held_out_name(fall.key)
        others = ", ".join(text for text in _numbers(table, progress) if not text.startswith(f"{score} "))
        fell = f"{score} fell from {fall.best:.3f} to {fall.last:.3f}" + (f"; {others}" if others else "")
        return State("collapsed", f"{how}, collapsed: {fell}")
    if progress.direction != "up":
        cause = f"; likely: {found[0].text}" if found else ""
        return State("stalled", f"{how}, stalled: {because}{cause}")
    problem = next((finding for finding in found if finding.severity == "problem"), None)
    if problem is not None:
        because = f"{because}; but {problem.text}"
    if not progress.is_judged:
        because = f"{because}; no reward decides what is right"
    if name == "done":
        learned = "it learned" if progress.is_judged else "the reward rose"
        return State("finished", f"{how}, {learned}: {because}")
    named: dict[Any, Name] = {"stopped": "stopped", "killed": "killed"}
    learns = "learning" if progress.is_judged else "the reward rises"
    return State(named.get(name, "learning"), f"{how}, {learns}: {because}")


def _numbers(table: Table, progress: Progress) -> list[str]:
    """The numbers that judge a run, the decisive one first: held-out score, right answers, reward."""
    right, reward = table.series(CORRECT), table.series(REWARD)
    shown = [] if right == reward else [(_NAMES[CORRECT], right)]
    numbers = [] if progress.held_out is None else _held_out(table)
    for name, points in [*shown, (_NAMES[REWARD], reward)]:
        change = Change.of(points)
        if change is not None:
            numbers.append(
                f"{name} {change.first:.3f} -> {change.last:.3f} (noise {SURE_OF_PROGRESS * change.error:.3f})"
            )
    return numbers if progress.held_out is not None else numbers + _held_out(table)


def _held_out(table: Table) -> list[str]:
    """Held-out score at the first and last evaluation."""
    scores = held_out_scores(table)
    if not scores:
        return []
    ends = [f"{each.value:.3f}" for each in (scores if len(scores) == 1 else (scores[0], scores[-1]))]
    return [f"{held_out_name(scores[0].key)} {' -> '.join(ends)}"]
