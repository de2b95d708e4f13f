"""Rewards that misbehave after some steps, for runs of real processes. `step` counts the steps before this one."""

import os
import time
from pathlib import Path


def compares(completions: list[str], step: int, **others: object) -> list[float]:
    """1 for each completion that differs from another of its call; alone, 0. One call of the third step is late."""
    late = Path(os.environ["GRUPPO_TEST_LATE"])
    if step == 2 and not late.exists():
        late.touch()
        time.sleep(4.0)
    return [float(any(text != other for other in completions)) for text in completions]


def raises_after_step_4(completions: list[str], step: int, **others: object) -> list[float]:
    if step >= 4:
        raise RuntimeError("the judge is down")
    return [float(len(set(text))) for text in completions]


def quotes_control_characters(completions: list[str], **others: object) -> list[float]:
    raise ValueError(f"cannot read \x1b[2J\x1b]0;title\x07 in {completions[0]!r}")
