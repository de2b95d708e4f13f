"""RunConsole: on a terminal a progress bar and a line per step, in a notebook one line that is replaced, elsewhere a
line per step. Model text is shown without control characters or markup."""

import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from os.path import commonprefix
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from gruppo.keys import HELD_OUT_SCORES, KEYS, Key, held_out_key
from gruppo.process.streams import printable
from gruppo.run.transcript import STOPS, call_text, calls_of, counted, speaker
from gruppo.types import Group, Prompt, Trajectory

ORDER = (
    *("reward/mean", *HELD_OUT_SCORES, "group/dead_frac", "optim/grad_norm"),
    *("live/clip_ratio", "rollout/entropy", "completion/len_mean"),
)
SHOWN = sorted((key for key in KEYS if key.line), key=lambda key: ORDER.index(key.name))
"""Metrics on the line of a step. The loss is not among them, since its value has little meaning by itself."""

DROPPED_FIRST = ("live/clip_ratio", "rollout/entropy", "completion/len_mean", "optim/grad_norm")
"""Metrics that a line leaves out, in this order, when it is too long."""

_WHOLE_START, _WHOLE_END = re.compile(r"(?:.*[\s>])?", re.S), re.compile(r"(?:.*[\s<])?", re.S)
"""A text up to its last blank or mark of a template, and the same of one that is written backwards."""

WIDTH = 100
"""Most columns of a line where there is no terminal to measure."""

STAGES = {
    "sample": "sampling",
    "reward": "scoring",
    "train": "training",
    "eval": "evaluating",
    "sync": "sending weights to the sampler",
    "write": "writing completions",
    "checkpoint": "saving",
}
"""Stages of a step as the bar names them, by their names in timings.jsonl."""

ALWAYS = ("reward/mean", "optim/grad_norm")
"""Keys whose absence is shown: nothing was scored, or nothing trained."""


class _Stage(ProgressColumn):
    """Current stage of the run, with its duration if it takes a while."""

    def __init__(self, stage: Callable[[], str]) -> None:
        super().__init__()
        self.stage, self.name, self.since = stage, "", time.monotonic()

    def render(self, task: Task) -> Text:
        name = self.stage()
        if name != self.name:
            self.name, self.since = name, time.monotonic()
        seconds = time.monotonic() - self.since
        return Text(f"{STAGES.get(name, name)} {readable_time(seconds)}" if seconds > 2 else STAGES.get(name, name))


def notebook_line() -> Callable[[str], None]:
    """Function that shows a line in one output of a notebook, in place of the line before."""
    from IPython.display import display  # pyright: ignore[reportMissingImports]  # there in every notebook

    output = display({"text/plain": ""}, raw=True, display_id=True)
    return lambda text: output.update({"text/plain": text}, raw=True)


class RunConsole:
    """Reports a run.

    Args:
        stage: the stage that the run is in, by its name in timings.jsonl.
    """

    def __init__(
        self,
        total_steps: int,
        console: Console | None = None,
        first_step: int = 0,
        stage: Callable[[], str] = lambda: "",
    ) -> None:
        self.console = console or Console(highlight=False)
        is_notebook = self.console.is_jupyter
        if is_notebook:
            self.console = Console(highlight=False, force_jupyter=False, width=WIDTH)  # lines of text, not outputs
        self.total = total_steps
        self.first = first_step
        self.started = time.monotonic()
        self.progress: Progress | None = None
        self._show_in_place = notebook_line() if is_notebook else None
        if self.console.is_terminal and not is_notebook:
            self.progress = Progress(
                SpinnerColumn(),
                _Stage(stage),
                BarColumn(20),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.task = self.progress.add_task("training", total=total_steps, completed=first_step, state="")
            self.progress.start()

    @property
    def width(self) -> int:
        """Columns that a line may take."""
        return min(self.console.width, WIDTH) if self.console.is_terminal else WIDTH

    def step(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """A line; where the last step is shown in place, only for each twentieth of a run and evaluations."""
        left = (time.monotonic() - self.started) / max(step - self.first, 1) * (self.total - step)
        line = step_line(step, self.total, metrics, seconds, left=left, width=self.width)
        if self.progress is not None:
            self.progress.update(self.task, completed=step, state=shown(SHOWN[0], metrics))
        elif self._show_in_place is not None:
            self._show_in_place(line)
        else:
            return self._print(line)
        if step % max(self.total // 20, 1) == 0 or step == self.total or held_out_key(metrics):
            self._print(step_line(step, self.total, metrics, seconds, width=self.width))

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """The line of an evaluation that belongs to no step: that of the start."""
        score = held_out_key(metrics)
        scores = [shown(key, metrics) for key in SHOWN if key.name == score]
        self._print("  ".join([f"step {step:>{len(str(self.total))}}/{self.total}", *(scores or ["held-out none"])]))

    def say(self, text: str) -> None:
        """A sentence, broken between words."""
        self._print("\n".join(textwrap.wrap(text, self.width, subsequent_indent="  ", break_long_words=False)))

    def _print(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def completions(self, title: str, groups: Sequence[Group], limit: int = 4) -> None:
        """The best and the worst completion of a few groups: of those that teach something, if there are any."""
        table = Table(title=title, title_justify="left")
        for name in ("prompt", "completion", "reward", "advantage"):
            table.add_column(name, justify="right" if name in ("reward", "advantage") else "left", overflow="fold")
        questions = questions_of([group.prompt for group in groups])
        teaching = [group for group in groups if any(rollout.has_advantage for rollout in group.rollouts)]
        for group in teaching[:limit] or groups[:1]:
            ordered = sorted(group.rollouts, key=lambda r: -(r.reward if r.reward is not None else float("-inf")))
            prompt = visible(questions[group.prompt.text])
            for rollout in ordered[:1] + ordered[1:][-1:]:
                advantage = rollout.advantage
                if isinstance(advantage, tuple):
                    advantage = sum(advantage) / max(len(advantage), 1)
                table.add_row(
                    prompt,
                    said(rollout.trajectory),
                    "-" if rollout.reward is None else f"{rollout.reward:g}",
                    f"{advantage:+.2f}",
                )
                prompt = Text()  # once for both
        self.console.print(table, width=self.width)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()


def step_line(
    step: int,
    total: int,
    metrics: Mapping[str, float],
    seconds: float,
    *,
    left: float | None = None,
    width: int | None = None,
) -> str:
    """The state of a step in plain words, with the seconds `left`; metrics that exceed `width` are left out."""
    hidden = {*HELD_OUT_SCORES} - {held_out_key(metrics)}
    parts = {
        key.name: shown(key, metrics)
        for key in SHOWN
        if (key.name in metrics or key.name in ALWAYS) and key.name not in hidden
    }
    parts["reward/mean"] += by_reward(metrics)
    ends = [readable_time(seconds), *([] if left is None else [f"left {readable_time(left)}"])]
    start = f"step {step:>{len(str(total))}}/{total}"
    line = "  ".join([start, *parts.values(), *ends])
    for name in DROPPED_FIRST:
        if width is None or len(line) <= width:
            break
        parts.pop(name, None)
        line = "  ".join([start, *parts.values(), *ends])
    return line


def shown(key: Key, metrics: Mapping[str, float]) -> str:
    """A metric with its word."""
    value = metrics.get(key.name)
    return f"{key.line.partition(' {')[0]} none" if value is None else key.line.format(value, rest=1 - value)


def by_reward(metrics: Mapping[str, float]) -> str:
    """The mean of each reward function in parentheses, where there are several.

    >>> by_reward({"reward/a/abstain_frac": 0.0, "reward/a/mean": 0.25, "reward/b/abstain_frac": 1.0})
    ' (a 0.250, b none)'
    """
    names = [name.split("/")[1] for name in metrics if name.startswith("reward/") and name.endswith("/abstain_frac")]
    if len(names) < 2:
        return ""
    means = {name: metrics.get(f"reward/{name}/mean") for name in names}
    return f" ({', '.join(f'{name} none' if mean is None else f'{name} {mean:.3f}' for name, mean in means.items())})"


def readable_time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def questions_of(prompts: Sequence[Prompt]) -> dict[str, str]:
    """Question that a reader wants to see of each prompt, by its text: the last message of the user, else the row's
    own text, before any chat template, without the words that all of them begin and end with.

    >>> texts = ("Add the numbers: 12+30=\\nAnswer:", "Add the numbers: 14+51=\\nAnswer:")
    >>> list(questions_of([Prompt(token_ids=(), text=text) for text in texts]).values())
    ['12+30=', '14+51=']
    """
    found: dict[str, str] = {}
    rows: dict[str, str] = {}
    for prompt in prompts:
        if isinstance(prompt.source, str):
            rows[prompt.text] = prompt.source or prompt.text
        else:
            asked = [message["content"] for message in prompt.source if message["role"] == "user"]
            found[prompt.text] = asked[-1] if asked else prompt.text
    texts, start, end = list(dict.fromkeys(rows.values())), 0, 0
    if len(texts) > 1:
        # Whole words only: the first digit of two numbers may be the same.
        start = _common(texts, _WHOLE_START)
        end = _common([text[start:][::-1] for text in texts], _WHOLE_END)
    return found | {key: text[start : len(text) - end].strip() or text for key, text in rows.items()}


def _common(texts: Sequence[str], whole: re.Pattern[str]) -> int:
    found = whole.match(commonprefix(texts))  # noqa: RUF071  # of texts, not of paths
    return len(found[0]) if found else 0


def said(trajectory: Trajectory) -> Text:
    """The text of a completion; of an episode its last turn, and the numbers of turns and calls."""
    text = visible(trajectory.text)
    if trajectory.messages is not None:
        numbers = counted(trajectory.messages)
        lost = f"; {STOPS[trajectory.stop_reason]}" if trajectory.is_lost else ""
        text.append(f"{' ' if text else ''}({numbers}{lost})", "dim")
    return text


def spoken(trajectory: Trajectory, limit: int = 2_000) -> list[Text]:
    """The lines of an episode: each text and call of the policy, each answer by who gave it, and how it ended."""
    lines: list[Text] = []
    turn = 0
    for message in trajectory.messages or ():
        said = visible(message["content"], limit)
        if message["role"] == "assistant":
            turn += 1
            calls = [
                Text(visible(call_text(call), limit).plain, "red" if call.get("error") else "")
                for call in calls_of(message)
            ]
            parts = [*([Text(said.plain, "bold")] if said or not calls else []), *calls]
            lines += [Text.assemble(f"  {turn if i == 0 else '':>2}  ", part) for i, part in enumerate(parts)]
        else:
            is_error = message.get("is_error", False)
            who = f"{visible(speaker(message), 40)}{' failed' if is_error else ''}: "
            lines.append(Text.assemble("      ", (f"{who}{said}", "red" if is_error else "dim")))
    why = visible(trajectory.error.rstrip().rpartition("\n")[2].strip()) if trajectory.is_lost else ""
    end = f"  {counted(trajectory.messages or ())}; {STOPS[trajectory.stop_reason]}{f': {why}' if why else ''}"
    return [*lines, Text(end, "red" if trajectory.is_lost else "")]


def visible(text: Any, limit: int = 200) -> Text:
    """Model text for a terminal: no control characters, no markup, not endless."""
    kept = printable(str(text).replace("\n", "\u21b5"), keep="")
    return Text(kept if len(kept) <= limit else f"{kept[:limit]}…")
