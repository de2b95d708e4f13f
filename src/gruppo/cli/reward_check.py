"""`gruppo reward check module:function --data FILE`: try a reward on canned completions before a GPU is touched."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Annotated, Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gruppo.cli.arguments import Arguments, Word, parse
from gruppo.errors import GruppoError, InputError
from gruppo.process.streams import printable
from gruppo.reward import RewardResult, RewardScorer, load_reward
from gruppo.reward.result import statistics
from gruppo.task.sources import resolve_source

MADE_UP_ROW = {"prompt": "What is 6 times 7?", "answer": "42"}
_HUGE = "1 + 1 = 2, <think> \\boxed{ and so on. " * 2700
_MAX_PRINTED = 2000
"""Bytes shown of what a reward prints."""
_JUNK = "\u202e\u0000\u001b[2J\ud800 \U0001f9ee ４２ Z\u0351\u036b\u0343 [/red] </script> "


class RewardCheckArguments(Arguments):
    """Run a reward on good, bad, empty and huge completions and report what it gives, how long it takes and what fails.

    gruppo reward check number_match --data problems.jsonl
    """

    reward: Annotated[str, Word("REWARD", is_positional=True)]
    """A reward with its options, as for `gruppo train`."""
    data: str | None = None
    """Rows to take answers and columns from, as for `gruppo train`; without it, one made-up row."""
    prompt_column: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages."""
    answer_column: str = "answer"
    """Column with the right answer, which the built-in rewards read as `answer`."""
    template: str = "{answer}"
    """Form of a right completion, e.g. 'So it is {answer}.\\n#### {answer}'; \\n is a new line."""
    num_rows: int = 16
    """Rows of the data to try."""
    deadline: float = 10.0
    """Seconds per completion before its process is killed."""


def reward_check(arguments: Sequence[str]) -> int:
    return check_reward(parse(RewardCheckArguments, arguments, "reward check"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """Scores of one kind of completion, one per row."""

    values: list[float | None]
    failures: dict[int, str]
    """Row -> traceback or reason."""
    seconds: float

    @property
    def mean(self) -> float | None:
        return statistics(self.values).get("mean")


def check_reward(given: RewardCheckArguments, console: Console | None = None) -> int:
    """Run the reward on canned completions of a few rows and print its scores; 0 when it can be used, 2 when not."""
    console = console or Console(highlight=False)
    printed: list[str] = []
    try:
        if given.num_rows < 1:
            raise InputError(f"num_rows must be at least 1, got {given.num_rows}")
        source = [MADE_UP_ROW] if given.data is None else given.data
        column = given.answer_column
        inner = {column: "answer"} if "." in column else {}  # else it keeps its name, by which the reward may read it
        found = resolve_source(source, prompt_column=given.prompt_column, column_map=inner)
        if column not in ("answer", *inner, *found.columns):
            raise InputError(f"{found.source} has no column {column!r}; it has {', '.join(map(repr, found.columns))}")
        rows = list(found)[: given.num_rows]
        with _captured(printed):
            trials = _try_all(given, rows)
    except GruppoError as error:
        _show_printed(console, printed)
        _say(console, f"unusable: {error}", "bold red")
        return 2
    _show(console, given.reward, len(rows), trials)
    _show_printed(console, printed)
    problems, warnings = _judge(trials)
    for warning in warnings:
        _say(console, f"warning: {warning}", "yellow")
    failed = next((kind for kind, trial in trials.items() if trial.failures), None)
    if failed is not None:
        reasons = trials[failed].failures
        _say(console, f"first failure ({failed}):\n{reasons[min(reasons)]}")
    for problem in problems:
        _say(console, f"unusable: {problem}", "bold red")
    return 2 if problems else 0


def _try_all(given: RewardCheckArguments, rows: Sequence[Mapping[str, Any]]) -> dict[str, _Trial]:
    """Scores by kind of completion."""
    reward = load_reward(given.reward)
    column = given.answer_column
    if not any(column in row for row in rows):  # a built-in may read another: number_match:column=target
        column = getattr(reward.function, "column", "answer")
    golds = [str(gold) for row in rows if (gold := row.get(column)) is not None]
    template = given.template.replace("\\n", "\n")
    kinds: dict[str, list[str]] = {}
    if len(golds) == len(rows):
        kinds["good"] = [template.replace("{answer}", gold) for gold in golds]
        kinds["bad"] = [template.replace("{answer}", _wrong(gold, golds)) for gold in golds]
    kinds |= {kind: [text] * len(rows) for kind, text in (("empty", ""), ("huge", _HUGE), ("junk", _JUNK))}
    prompts = [row["prompt"] for row in rows]
    columns = {name: [row.get(name) for row in rows] for name in set().union(*rows) - {"prompt"}}
    if golds:
        columns.setdefault("answer", [row.get(column) for row in rows])
    trials: dict[str, _Trial] = {}
    with RewardScorer([reward], deadline_s=given.deadline, stop_on_failures=False) as scorer:

        def score(texts: list[str]) -> RewardResult:
            ids = [list(text.encode(errors="surrogatepass")) for text in texts]  # no tokenizer here: bytes stand in
            return scorer.score(prompts, texts, ids, columns, step=1)

        score(kinds["empty"])  # the first call pays for starting the workers
        for kind, texts in kinds.items():
            started = time.perf_counter()
            result = score(texts)
            seconds = time.perf_counter() - started
            failures = result.failures.get(reward.name, {})
            trials[kind] = _Trial(values=result.values[reward.name], failures=failures, seconds=seconds)
    return trials


def _wrong(gold: str, golds: Sequence[str]) -> str:
    """Another row's answer; with none, the same with other digits; with no digits, a word."""
    other = next((text for text in golds if text.strip() != gold.strip()), None)
    if other is not None:
        return other
    changed = "".join(str((int(char) + 1) % 10) if char in "0123456789" else char for char in gold)
    return changed if changed != gold else "wrong"


def _judge(trials: Mapping[str, _Trial]) -> tuple[list[str], list[str]]:
    """Reasons why the reward is unusable, and warnings."""
    problems: list[str] = []
    warnings: list[str] = []
    for kind, trial in trials.items():
        if len(trial.failures) == len(trial.values) and kind in ("good", "bad"):
            problems.append(f"it fails on every {kind} completion")
        elif trial.failures:
            warnings.append(f"it fails on {len(trial.failures)} of {len(trial.values)} {kind} completions")
    means = {kind: trial.mean for kind, trial in trials.items() if trial.mean is not None}
    if not means:
        problems.append("it gives no value to any completion")
    elif len(set(means.values())) == 1 and "good" in trials:
        everywhere = next(iter(means.values()))
        warnings.append(f"it gives {everywhere:g} to every kind of completion: nothing can be learned from it")
    good, bad = means.get("good"), means.get("bad")
    if "good" not in trials:
        warnings.append(
            "the rows have no gold answer, so good and bad completions were not tried; --answer-column names the column"
        )
    elif good is not None and good == bad:
        warnings.append(f"it cannot tell good from bad: both get {good:g} on average; is the template right?")
    elif good is not None and bad is not None and good < bad:
        warnings.append(f"it prefers bad completions ({bad:g}) to good ones ({good:g})")
    return problems, warnings


def _show(console: Console, spec: str, num_rows: int, trials: Mapping[str, _Trial]) -> None:
    table = Table(box=box.SIMPLE_HEAD if console.is_terminal else box.ASCII2, title=None)
    for heading in ("completions", "mean", "std", "abstained", "failed", "ms per call"):
        table.add_column(heading, justify="left" if heading == "completions" else "right")
    for kind, trial in trials.items():
        stats = statistics(trial.values)
        cells = [kind, *(f"{stats[key]:.4g}" if key in stats else "-" for key in ("mean", "std"))]
        cells += [f"{trial.values.count(None)}/{num_rows}", f"{len(trial.failures)}/{num_rows}"]
        table.add_row(*map(Text, cells), Text(f"{trial.seconds * 1e3:.1f}"))
    _say(console, f"{spec} on {num_rows} rows", "bold")
    console.print(table)
    means = statistics([trial.mean for trial in trials.values()])
    if means:
        _say(console, f"std over kinds: {means['std']:.4g}")


def _show_printed(console: Console, printed: Sequence[str]) -> None:
    """Output that `_captured` kept."""
    if text := "".join(printed).strip():
        _say(console, f"it printed:\n{text}")


@contextmanager
def _captured(printed: list[str]) -> Iterator[None]:
    """Keeps what this process and its workers print from the terminal, and adds its beginning to `printed`."""
    saved: dict[int, int] = {}
    with tempfile.TemporaryFile() as file:
        try:
            for number in (1, 2):
                with suppress(OSError):  # closed
                    saved[number] = os.dup(number)
                    os.dup2(file.fileno(), number)
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, original in saved.items():
                os.dup2(original, number)
                os.close(original)
            file.seek(0)
            printed.append(file.read(_MAX_PRINTED).decode(errors="replace"))
            more = os.fstat(file.fileno()).st_size - _MAX_PRINTED
            printed += [f"\n... ({more:,} more bytes)"] if more > 0 else []


def _say(console: Console, text: str, style: str = "") -> None:
    # A traceback may quote model text: no control characters to the terminal, no markup.
    console.print(Text(printable(text), style=style), soft_wrap=True)
