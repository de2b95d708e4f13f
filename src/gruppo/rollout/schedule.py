"""Schedules: when the rollouts of a step are sampled, and from which weights.

`Schedule` samples a step when it is its turn. `Ahead` samples further steps in the background: with `max_staleness` k,
step m is sampled from the weights after step max(0, m - 1 - k), whatever the clock says. One worker takes the steps in
order, so a step of a run with k = 1 takes as long as the slower of sampling and training, and the result depends on the
schedule alone. What is sampled and not yet trained on is part of every checkpoint: a run that is killed goes on bit for
bit. `stream.py` has the third schedule, in which groups overtake each other.
"""

import copy
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from gruppo import codec
from gruppo.errors import CheckpointError
from gruppo.rollout.driver import Stopwatch
from gruppo.rollout.handover import HandOver
from gruppo.rollout.source import RolloutSource
from gruppo.types import Group, Prompt

FACTS, ROLLOUTS = "ahead.json", "ahead.arrow"
WORKER = "rollouts"
WAIT = 0.2
"""Seconds between two looks at the stop flag while rollouts are awaited."""


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """All groups of a step, their metrics, and the seconds that each stage took in the background."""

    groups: list[Group]
    metrics: dict[str, float]
    seconds: dict[str, float] = field(default_factory=dict)


class Schedule:
    """Rollouts of one step after the other, each sampled when it is its turn, from the newest weights."""

    def __init__(self, source: RolloutSource, weights: HandOver) -> None:
        self.source, self.weights = source, weights

    def take(self, number: int) -> StepRollouts:
        """The rollouts of the next step."""
        self.weights.bring(self.source.driver.watch)
        groups, metrics = self.source.next(number)
        return StepRollouts(groups, self.weights.reported | metrics)

    @property
    def is_idle(self) -> bool:
        """Whether a run may be stopped amid what the sampler does now."""
        return True

    def drain(self) -> None:
        """Wait until the sampler and the rewards are free."""

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest."""

    def save(self, folder: Path, step: int) -> None:
        """Write what is sampled and not yet trained on, when so many steps are complete."""

    def load(self, folder: Path) -> None:
        """Read what `save` wrote. A run may have been saved under another schedule, whose rollouts are left out."""


@dataclass(slots=True)
class StopHook:
    """The hook by which a run is stopped, for its sampler and its rewards.

    It does nothing while a step is sampled in the background: a step that is being sampled is part of the run.
    """

    poll: Callable[[], None]
    schedule: Schedule | None = None

    def __call__(self) -> None:
        if self.schedule is None or self.schedule.is_idle:
            self.poll()


class Background(Schedule):
    """A schedule with a worker, a thread that samples and scores while the caller trains.

    Args:
        last: the last step of the run.
        poll: called while rollouts are awaited; raises to stop.
    """

    def __init__(self, source: RolloutSource, weights: HandOver, *, last: int, poll: Callable[[], None]) -> None:
        super().__init__(source, weights)
        self.last, self.poll = last, poll
        self.worker = ThreadPoolExecutor(1, thread_name_prefix=WORKER)

    def wait_for(self, future: Future[Any]) -> Any:
        """The result of a task of the worker, while signals are seen."""
        while not future.done():
            self.poll()
            wait([future], timeout=WAIT)
        return future.result()


class Ahead(Background):
    """Steps to come, sampled in order.

    Args:
        source: only the worker uses it, until `drain` has returned.
        staleness: steps that may lie between the weights that sample and those that train.
    """

    def __init__(self, source: RolloutSource, weights: HandOver, *, staleness: int, **options: Any) -> None:
        super().__init__(source, weights, **options)
        self.staleness = staleness
        self._pending: deque[tuple[int, Future[StepRollouts], Any]] = deque()
        """Steps that are sampled or to be, each with its weights."""
        self._taken: tuple[int, StepRollouts] | None = None

    def take(self, number: int) -> StepRollouts:
        """The rollouts of the next step; what is due is launched from the weights as they are."""
        first = self._pending[-1][0] + 1 if self._pending else number
        for due in range(first, min(number + self.staleness, self.last) + 1):
            published = self.weights.publish()
            solved = copy.deepcopy(self.source.solved)  # prompts are drawn by what is known now
            self._pending.append((due, self.worker.submit(self._sample, due, published, solved), published))
        taken, future, published = self._pending[0]
        assert taken == number, f"step {taken} is next, not {number}"
        rollouts = self.wait_for(future)
        self._pending.popleft()
        self._taken = taken, rollouts
        if published is not None:
            self.weights.release(published)
        return rollouts

    @property
    def is_idle(self) -> bool:
        return all(future.done() for _, future, _ in list(self._pending))  # main changes it meanwhile

    def drain(self) -> None:
        wait([future for _, future, _ in self._pending])

    def close(self) -> None:
        self.worker.shutdown(wait=True, cancel_futures=True)

    def _sample(self, number: int, published: Any, solved: Any) -> StepRollouts:
        watch = Stopwatch(lambda: number - 1, "ahead/")
        with watch("sync"):
            self.weights.load(published)
        driver = replace(self.source.driver, watch=watch)
        groups, metrics = replace(self.source, driver=driver, solved=solved).next(number)
        return StepRollouts(groups, self.weights.reported | metrics, watch.seconds)

    def save(self, folder: Path, step: int) -> None:
        """Write what is sampled and not yet trained on. Waits for what is being sampled."""
        self.drain()
        # A step that failed after its rollouts were taken is taken again.
        sampled = [self._taken] if self._taken is not None and self._taken[0] > step else []
        for number, future, _ in self._pending:
            if future.exception() is not None:  # raised when its step is taken
                break
            sampled.append((number, future.result()))
        facts = [{"step": number, "metrics": each.metrics, "seconds": each.seconds} for number, each in sampled]
        write(folder, facts, [each.groups for _, each in sampled])

    def load(self, folder: Path) -> None:
        with reading(folder, self.source.prompts) as (steps, groups):
            for step, sampled in zip(steps, groups, strict=True) if isinstance(steps, list) else ():
                future: Future[StepRollouts] = Future()
                future.set_result(StepRollouts(sampled, step["metrics"], step["seconds"]))
                self._pending.append((step["step"], future, None))


# --- checkpoints ------------------------------------------------------------------------------------------------------


def write(folder: Path, facts: Any, groups: Sequence[Sequence[Group]]) -> None:
    """Write groups that wait, a table for each part of them."""
    (folder / FACTS).write_text(json.dumps(facts), encoding="utf-8")
    tables = [codec.to_bytes(codec.encode(part, with_greedy=True)) for part in groups]
    (folder / ROLLOUTS).write_bytes(b"".join(tables))


@contextmanager
def reading(folder: Path, prompts: Sequence[Prompt]) -> Iterator[tuple[Any, list[list[Group]]]]:
    """The facts and groups that `write` wrote; no facts where there are none."""
    try:
        if not (folder / FACTS).exists():
            yield None, []
            return
        by_index: Mapping[int, Prompt] = {prompt.index: prompt for prompt in prompts}
        tables = codec.from_bytes((folder / ROLLOUTS).read_bytes())
        facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
        yield facts, [codec.decode(table, by_index) for table in tables]
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise CheckpointError(f"{folder / FACTS} cannot be read: {error!r}") from error
