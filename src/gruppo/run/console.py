"""RunConsole: a bar with the time left and one line per step; plain lines without a terminal. Model text is shown
without control characters or markup."""

import time
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from gruppo.keys import KEYS, Key
from gruppo.types import Group

ORDER = (
    *("reward/mean", "eval/accuracy", "group/dead_frac", "optim/grad_norm"),
    *("live/clip_ratio", "rollout/entropy", "completion/len_mean"),
)
SHOWN = sorted((key for key in KEYS if key.line), key=lambda key: ORDER.index(key.name))
"""Metrics on the line of a step. The loss is not among them, since its value has little meaning by itself."""

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
        if self.progress is None:
            left = (time.monotonic() - self.started) / max(step - self.first, 1) * (self.total - step)
            self.console.print(f"{line}  left {readable_time(left)}", soft_wrap=True)
            return
        self.progress.update(self.task, completed=step, state=shown(SHOWN[0], metrics))
        if step % max(self.total // 20, 1) == 0 or step == self.total:
            self.console.print(line, soft_wrap=True)

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def completions(self, title: str, groups: Sequence[Group], limit: int = 4) -> None:
        """The best and the worst completion of a few groups."""
        table = Table(title=title, title_justify="left")
        for name in ("prompt", "completion", "reward", "advantage"):
            table.add_column(name, justify="right" if name in ("reward", "advantage") else "left", overflow="fold")
        for group in groups[:limit]:
            ordered = sorted(group.rollouts, key=lambda r: -(r.reward if r.reward is not None else float("-inf")))
            for rollout in ordered[:1] + ordered[1:][-1:]:
                advantage = rollout.advantage
                if isinstance(advantage, tuple):
                    advantage = sum(advantage) / max(len(advantage), 1)
                table.add_row(
                    visible(group.prompt.text),
                    visible(rollout.trajectory.text),
                    "-" if rollout.reward is None else f"{rollout.reward:g}",
                    f"{advantage:+.2f}",
                )
        self.console.print(table)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()


def step_line(step: int, total: int, metrics: Mapping[str, float], seconds: float) -> str:
    """The state of a step in plain words."""
    parts = [shown(key, metrics) for key in SHOWN if key.name in metrics or key.name in ALWAYS]
    parts[0] += by_reward(metrics)
    return "  ".join([f"step {step:>{len(str(total))}}/{total}", *parts, readable_time(seconds)])


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
