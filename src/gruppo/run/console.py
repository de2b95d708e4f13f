"""RunConsole: a bar with the time left and one line per step; plain lines without a terminal. Model text is shown
without control characters or markup."""

import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gruppo.types import Group, Rollout

SHOWN: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("reward", "reward/mean", "{:.3f}".format),
    ("held-out", "eval/accuracy", "{:.3f}".format),
    ("signal", "group/dead_frac", lambda dead: f"{1 - dead:.0%} of groups"),
    ("grad", "optim/grad_norm", "{:.2g}".format),
    ("clip", "live/clip_ratio", "{:.1%}".format),
    ("entropy", "rollout/entropy", "{:.2f}".format),
    ("length", "completion/len_mean", "{:.0f}".format),
)
"""Metrics on the line of a step: word, key, form. The loss is not among them, since its value says little."""

ALWAYS = ("reward/mean", "optim/grad_norm")
"""Keys whose absence is shown: nothing was scored, or nothing trained."""


class RunConsole:
    """Reports a run."""

    def __init__(self, total_steps: int, console: Console | None = None, first_step: int = 0) -> None:
        self.console = console or Console(highlight=False)
        self.total = total_steps
        self.first = first_step
        self.started = time.monotonic()
        self.progress: Progress | None = None
        if self.console.is_terminal:
            self.progress = Progress(
                TextColumn("[bold]training"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[state]}"),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.task = self.progress.add_task("training", total=total_steps, completed=first_step, state="")
            self.progress.start()

    def step(self, step: int, metrics: Mapping[str, float], seconds: float) -> None:
        """One readable line; on a terminal every tenth step, since the bar shows the rest."""
        line = step_line(step, self.total, metrics, seconds)
        if self.progress is not None:
            reward = metrics.get("reward/mean")
            state = "reward none" if reward is None else f"reward {reward:.3f}"
            self.progress.update(self.task, completed=step, state=state)
            if step % max(self.total // 20, 1) == 0 or step == self.total:
                self.progress.console.print(line, soft_wrap=True)
            return
        left = (time.monotonic() - self.started) / max(step - self.first, 1) * (self.total - step)
        self.console.print(f"{line}  left {readable_time(left)}", soft_wrap=True)

    def say(self, text: str) -> None:
        (self.progress.console if self.progress else self.console).print(Text(text), soft_wrap=True)

    def completions(self, title: str, groups: Sequence[Group], limit: int = 4) -> None:
        """The best and the worst completion of a few groups."""
        table = Table(title=title, title_justify="left")
        for name in ("prompt", "completion", "reward", "advantage"):
            table.add_column(name, justify="right" if name in ("reward", "advantage") else "left", overflow="fold")
        for group in groups[:limit]:
            ordered = sorted(group.rollouts, key=lambda r: -(r.reward if r.reward is not None else float("-inf")))
            for rollout in ordered[:1] + ordered[1:][-1:]:
                table.add_row(
                    visible(group.prompt.text),
                    visible(rollout.trajectory.text),
                    "-" if rollout.reward is None else f"{rollout.reward:g}",
                    f"{_mean_advantage(rollout):+.2f}",
                )
        (self.progress.console if self.progress else self.console).print(table)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()


def step_line(step: int, total: int, metrics: Mapping[str, float], seconds: float) -> str:
    """The state of a step in plain words."""
    parts = [f"step {step:>{len(str(total))}}/{total}"]
    for word, key, form in SHOWN:
        if key in metrics or key in ALWAYS:
            parts.append(f"{word} {form(metrics[key]) if key in metrics else 'none'}")
    return "  ".join([*parts, readable_time(seconds)])


def _mean_advantage(rollout: Rollout) -> float:
    advantage = rollout.advantage
    return sum(advantage) / max(len(advantage), 1) if isinstance(advantage, tuple) else advantage


def readable_time(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Text that is safe on a terminal: control, format and unassigned characters as escapes, but for those in `keep`.

    >>> print(printable("\x1b[2J Caf\u00e9\u202e"))
    \x1b[2J Café\u202e
    """
    return "".join(
        # A space of another width is not printable to Python, and harmless.
        c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def visible(text: Any, limit: int = 200) -> Text:
    """Model text for a terminal: no control characters, no markup, not endless."""
    kept = printable(str(text).replace("\n", "\u21b5"), keep="")
    return Text(kept if len(kept) <= limit else f"{kept[:limit]}…")
