"""Streamed rollouts: a schedule in which groups overtake each other, and a step takes those that are complete.

A step starts when it has enough groups. Longer ones stay in flight while it trains, and the sampler gets the newer
weights meanwhile. No token is trained on that is older than `max_staleness` steps: a group that gets older is dropped,
and its prompt is sampled again. Which groups a step gets depends on the clock, so a run is not repeated bit for bit.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from gruppo.reward import RewardResult
from gruppo.reward.result import merged_metrics
from gruppo.rollout.driver import Stopwatch, greedy
from gruppo.rollout.handover import HandOver
from gruppo.rollout.schedule import WAIT, Background, StepRollouts, reading, write
from gruppo.rollout.source import RolloutSource, dynamic_metrics, rollout_metrics
from gruppo.sampler.base import Samples
from gruppo.types import Group, Prompt


@dataclass(slots=True, eq=False)
class InFlight:
    """A group from its prompt to its rewards."""

    prompt: Prompt
    step: int
    """The step for which the prompt was drawn; its random numbers follow from it."""
    sent: int = 0
    """The step that was being filled when it was sent off."""
    version: int | None = None
    """Updates that the weights had seen when sampling began; None: it has not begun."""
    futures: list[Future[Samples]] = field(default_factory=list)
    """Of the completions, and of the greedy one if the estimator needs it."""
    group: Group | None = None
    result: RewardResult | None = None

    @property
    def oldest(self) -> int:
        """Version of the oldest token of a group that is complete."""
        assert self.group is not None
        rollouts = (*self.group.rollouts, *([self.group.greedy] if self.group.greedy else []))
        return min(rollout.trajectory.versions[0] for rollout in rollouts)


class Streamed(Background):
    """Groups in flight: those of the next two steps, and longer ones that these have overtaken.

    The caller's thread draws prompts and takes groups. The worker loads weights, submits and scores, one thing at a
    time.

    Args:
        staleness: steps that may lie between the weights that sampled the oldest token and those that train.
        updates: weight updates per step.
        report: called with the kind of an event, its step and its facts.
    """

    def __init__(
        self,
        source: RolloutSource,
        weights: HandOver,
        *,
        staleness: int,
        updates: int,
        report: Callable[..., None],
        **options: Any,
    ) -> None:
        super().__init__(source, weights, **options)
        self.staleness, self.report = staleness, report
        self.bound = staleness * updates
        """Oldest age of a token that is trained on, in updates."""
        self._number = 1
        """The step that is being filled."""
        self._drawn = 0
        """Steps whose prompts were drawn."""
        self._next: deque[tuple[int, Prompt]] = deque()
        """Prompts to sample, each with the step it was drawn for."""
        self._flying: list[InFlight] = []
        self._ready: list[InFlight] = []
        self._returned: SimpleQueue[InFlight | BaseException] = SimpleQueue()
        """From the worker: complete groups, and errors."""
        self._error: BaseException | None = None
        self._loading: tuple[Any, Future[None]] | None = None
        self._sampled_by: int | None = None
        """Version that the sampler has or is about to load."""
        self._loaded = 0
        """Version that the sampler has; the worker's own."""
        self.watch = Stopwatch(lambda: self._number - 1, "ahead/")
        self._resumed: list[int] = []
        """Prompts that were in flight when the run was saved."""

    def take(self, number: int) -> StepRollouts:
        """The groups of the next step: those that are complete, the oldest first."""
        self._number, size, batches = number, self.source.prompts_per_step, self.source.max_batches
        if self._resumed:
            self.report("rollouts_again", step=number, prompts=self._resumed)
            self._resumed = []
        if self._error is not None:
            raise self._error
        self._drawn = max(self._drawn, number - 1)  # a run that began without streaming
        self._hand_over()
        dropped = [flight for flight in self._flying if self._is_stale(flight.version)]
        for flight in dropped:
            self._give_up(flight)
        taken: list[InFlight] = []
        groups: list[Group] = []
        num_kept, most = 0, size * max(batches, 1)
        while num_kept < size and len(groups) < most:
            try:
                for i in range(min(size - num_kept, most - len(groups))):
                    taken.append(self._take_fresh(num_kept + i, dropped))
            except BaseException:  # a signal: they are part of the checkpoint
                self._ready += taken
                raise
            drawn = [flight.group for flight in taken[len(groups) :] if flight.group is not None]
            teaches = [True] * len(drawn)
            if batches:  # some estimators judge a group by the others of its step
                teaches = self.source.has_signal([*groups, *drawn])[len(groups) :]
            groups += [replace(g, status="kept" if t else "no_signal") for g, t in zip(drawn, teaches, strict=True)]
            num_kept += sum(teaches)
        if dropped:
            self.report("rollouts_dropped", step=number, prompts=[flight.prompt.index for flight in dropped])
        metrics = (
            self.weights.reported
            | merged_metrics([flight.result for flight in taken if flight.result is not None])
            | rollout_metrics(groups)
        )
        metrics |= dynamic_metrics(groups, -(-len(groups) // size)) if batches else {}
        return StepRollouts(groups, metrics | {"rollout/dropped": float(len(dropped))}, self.watch.take())

    def drain(self) -> None:
        """Wait until nothing is in flight: the sampler and the rewards are free."""
        self._finish_loading()
        while self._flying:
            self._wait()

    def close(self) -> None:
        """Give up what is in flight."""
        for flight in self._flying:
            for future in flight.futures:
                future.cancel()
        self.worker.shutdown(wait=True, cancel_futures=True)

    # --- the caller's thread ----------------------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Have the sampler load the weights as they are. What is in flight goes on with them."""
        self._finish_loading()
        if self._sampled_by != self.weights.model.version:
            self._sampled_by, published = self.weights.model.version, self.weights.publish()
            self._loading = published, self.worker.submit(self._load, published, self._sampled_by)

    def _finish_loading(self) -> None:
        if self._loading is None:
            return
        published, future = self._loading
        self.wait_for(future)
        self._loading = None
        self.weights.release(published)

    def _is_stale(self, version: int | None) -> bool:
        return version is not None and self.weights.model.version - version > self.bound

    def _give_up(self, flight: InFlight) -> None:
        """Stop sampling a group, and put its prompt back."""
        for future in flight.futures:
            future.cancel()
        self._flying.remove(flight)
        self._next.appendleft((flight.step, flight.prompt))

    def _fill(self, num_taken: int) -> None:
        """Send prompts off until this step, which has so many groups, and the next one can be filled.

        Groups that were overtaken do not count, up to the bound of `1 + staleness` steps.
        """
        size = self.source.prompts_per_step
        wanted = min(2, self.last - self._number + 1) * size - num_taken
        room = (1 + self.staleness) * size - num_taken - len(self._flying) - len(self._ready)
        in_time = len(self._ready) + sum(flight.sent >= self._number - 1 for flight in self._flying)
        for _ in range(min(wanted - in_time, room)):
            while not self._next:
                self._next += [(self._drawn + 1, p) for p in self.source.draw(self._drawn, set(), is_first=True)]
                self._drawn += 1
            step, prompt = self._next.popleft()
            self._flying.append(InFlight(prompt, step, sent=self._number))
            self.worker.submit(self._begin, self._flying[-1])

    def _take_fresh(self, num_taken: int, dropped: list[InFlight]) -> InFlight:
        """The next complete group, the oldest before others. One that is too old goes to `dropped`, its prompt back."""
        while True:
            self._fill(num_taken)
            self._collect()
            while not self._ready:
                self._wait()
            flight = min(self._ready, key=lambda flight: flight.oldest)
            self._ready.remove(flight)
            if not self._is_stale(flight.oldest):
                return flight
            dropped.append(flight)
            self._next.appendleft((flight.step, flight.prompt))

    def _wait(self) -> None:
        self.poll()
        self._collect(WAIT)
        if self._error is not None:
            raise self._error

    def _collect(self, timeout: float = 0.0) -> None:
        """Note what has come back; wait so many seconds for the first."""
        with suppress(Empty):
            while True:
                back = self._returned.get(timeout > 0, timeout)
                timeout = 0.0
                if isinstance(back, BaseException):
                    self._error = back
                elif back in self._flying:  # else it was given up
                    self._flying.remove(back)
                    self._ready.append(back)

    # --- the worker -------------------------------------------------------------------------------------------------

    def _load(self, published: Any, version: int) -> None:
        with self.watch("sync"):
            self.weights.load(published)
        self._loaded = version

    def _begin(self, flight: InFlight) -> None:
        """Submit the requests of a group. A sampler in this process has answered them then."""
        try:
            version, source = self._loaded, self.source
            driver = replace(source.driver, watch=self.watch)
            kinds = [(source.group_size, replace(source.params, step=flight.step))]
            if source.needs_greedy:
                kinds.append((1, greedy(source.params)))
            flight.futures = [future for num, params in kinds for future in driver.submit(flight.prompt, num, params)]
            flight.version = version
        except BaseException as error:
            self._returned.put(error)
            return
        if all(future.done() for future in flight.futures):
            self._finish(flight)
            return
        for future in flight.futures:
            future.add_done_callback(lambda _: self._arrived(flight))

    def _arrived(self, flight: InFlight) -> None:
        if all(future.done() for future in flight.futures):
            with suppress(RuntimeError):  # closed
                self.worker.submit(self._finish, flight)

    def _finish(self, flight: InFlight) -> None:
        """Score a group whose completions are there."""
        if flight.group is not None or any(future.cancelled() for future in flight.futures):
            return
        driver, scored = replace(self.source.driver, watch=self.watch), []
        try:
            for future in flight.futures:
                samples, seed = [future.result()], self.source.params.seed
                scored.append(driver.score([flight.prompt], samples, step=self._number - 1, seed=seed))
        except BaseException as error:
            self._returned.put(error)
            return
        ((group,), flight.result), *alone = scored
        flight.group = replace(group, greedy=alone[0][0][0].rollouts[0] if alone else None)
        self._returned.put(flight)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: Path, step: int) -> None:
        """Write the groups that are complete, and the prompts of those that are not."""
        self._collect()
        ready = [flight for flight in self._ready if flight.group is not None and flight.result is not None]
        facts = {
            "drawn": self._drawn,
            "in_flight": [(flight.step, flight.prompt.index) for flight in self._flying],
            "next": [(step, prompt.index) for step, prompt in self._next],
            "ready": [{"step": flight.step, "metrics": flight.result.metrics} for flight in ready if flight.result],
        }
        write(folder, facts, [[flight.group] for flight in ready if flight.group is not None])

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; what was in flight is sampled again."""
        by_index = {prompt.index: prompt for prompt in self.source.prompts}
        with reading(folder, self.source.prompts) as (facts, groups):
            if not isinstance(facts, dict):  # saved under another schedule
                return
            self._drawn = int(facts["drawn"])
            self._resumed = [index for _, index in facts["in_flight"]]
            self._next += [(step, by_index[index]) for step, index in (*facts["in_flight"], *facts["next"])]
            for ready, (group,) in zip(facts["ready"], groups, strict=True):
                rollouts = group.rollouts
                result = RewardResult(
                    totals=[r.reward for r in rollouts],
                    values={name: [r.rewards[name] for r in rollouts] for name in rollouts[0].rewards},
                    correct=[r.correct for r in rollouts],
                    metrics=ready["metrics"],
                )
                self._ready.append(InFlight(group.prompt, ready["step"], group=group, result=result))
