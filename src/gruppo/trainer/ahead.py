"""Rollouts ahead: steps are sampled and scored in the background while earlier steps train.

With `max_staleness` k, step m is sampled from the weights after step max(0, m - 1 - k), whatever the clock says. One
worker takes the steps in order, so a step of a run with k = 1 takes as long as the slower of sampling and training, and
the result depends on the schedule alone. What is sampled and not yet trained on is part of every checkpoint: a run that
is killed goes on bit for bit.
"""

import copy
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gruppo import faults
from gruppo.errors import CheckpointError, SamplerError
from gruppo.sampler import Sampler, TorchSampler
from gruppo.trainer.rollout import RolloutSource
from gruppo.types import Group, Prompt, Rollout, Trajectory
from gruppo.weights.store import NotTaken, Published, WeightStore

if TYPE_CHECKING:
    from torch import Tensor

    from gruppo.model import TransformersModel
    from gruppo.trainer.stream import StreamedRollouts

TEXTS, NUMBERS = "ahead.json", "ahead.safetensors"
WORKER = "rollouts"
WAIT = 0.2
"""Seconds between two looks at the stop flag while rollouts are awaited."""


@dataclass(slots=True)
class StopHook:
    """The hook by which a run is stopped, for its sampler and its rewards.

    It does nothing while a step is sampled in the background: a step that is being sampled is part of the run.
    """

    poll: Callable[[], None]
    ahead: "RolloutsAhead | StreamedRollouts | None" = None

    def __call__(self) -> None:
        if self.ahead is None or self.ahead.is_idle:
            self.poll()


@dataclass(frozen=True, slots=True)
class Sampled:
    """Groups of a step, their metrics, and the seconds that each stage took in the background."""

    groups: list[Group]
    metrics: dict[str, float]
    seconds: dict[str, float]


class Weights(Protocol):
    """Weights of one version on their way to a sampler of their own."""

    @property
    def sampler(self) -> Sampler: ...

    @property
    def version(self) -> int:
        """Updates that the trainer's weights have seen."""
        ...

    def publish(self) -> Any:
        """The trainer's weights as they are now; called between steps."""
        ...

    def load(self, published: Any) -> dict[str, float]:
        """Sample from these; called by the worker."""
        ...

    def release(self, published: Any) -> None:
        """No older weights are needed any more."""
        ...


class StoredWeights:
    """Weights in a folder per version, for vLLM."""

    def __init__(self, model: "TransformersModel", store: WeightStore, sampler: Sampler) -> None:
        self.model, self.store, self.sampler = model, store, sampler
        self._last: Published | None = None

    @property
    def version(self) -> int:
        return self.model.version

    def publish(self) -> Published:
        if self._last is None or self._last.version != self.model.version:
            self._last = self.store.publish(self.model)
        return self._last

    def load(self, published: Published) -> dict[str, float]:
        loaded = self.sampler.loaded
        if loaded is not None and loaded.version == published.version:
            return {}
        fault = ""
        for _ in range(2):
            try:
                return self.sampler.load(published)
            except NotTaken as error:
                fault = str(error)
        raise SamplerError(
            f"the weights of version {published.version} did not reach the sampler, tried twice: {fault}. Nothing was "
            f"sampled from them; the files are in {published.folder}"
        )

    def release(self, published: Published) -> None:
        self.store.release(published)


class CopiedWeights:
    """Weights of a copy of the model in this process, for the torch sampler. What does not train is shared."""

    def __init__(self, model: "TransformersModel", poll: Callable[[], None] = lambda: None) -> None:
        self.model, self.twin = model, model.twin()
        self.sampler = TorchSampler(self.twin, poll=poll)

    @property
    def version(self) -> int:
        return self.model.version

    def publish(self) -> tuple[int, dict[str, "Tensor"]]:
        return self.model.version, self.model.trained()

    def hand_over(self, model: "TransformersModel", sampler: Any) -> dict[str, float]:
        """Bring the copy up to date, as a store does between steps."""
        return {} if self.twin.version == model.version else self.load(self.publish())

    def close(self) -> None:
        """Nothing is kept."""

    def load(self, published: tuple[int, dict[str, "Tensor"]]) -> dict[str, float]:
        self.twin.version, trained = published
        own = dict(self.twin.model.named_parameters())
        with torch.no_grad():
            for name, value in trained.items():
                own[name].copy_(value)
        return {}

    def release(self, published: Any) -> None:
        """Nothing is kept."""


class RolloutsAhead:
    """Rollouts of the steps to come, in order.

    Args:
        source: samples and scores a step. Only the worker uses it, until `drain` has returned.
        staleness: steps that may lie between the weights that sample and those that train.
        last: the last step of the run.
        poll: called while rollouts are awaited; raises to stop.
    """

    def __init__(
        self, source: RolloutSource, weights: Weights, *, staleness: int, last: int, poll: Callable[[], None]
    ) -> None:
        self.source, self.weights, self.staleness, self.last, self.poll = source, weights, staleness, last, poll
        self._worker = ThreadPoolExecutor(1, thread_name_prefix=WORKER)
        self._pending: deque[tuple[int, Future[Sampled], Any]] = deque()

    def take(self, number: int) -> Sampled:
        """The rollouts of the next step; what is due is launched from the weights as they are."""
        first = self._pending[-1][0] + 1 if self._pending else number
        for due in range(first, min(number + self.staleness, self.last) + 1):
            self._launch(due)
        taken, future, published = self._pending[0]
        assert taken == number, f"step {taken} is next, not {number}"
        while not future.done():
            self.poll()
            wait([future], timeout=WAIT)
        sampled = future.result()
        self._pending.popleft()
        if published is not None:
            self.weights.release(published)
        return sampled

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being sampled."""
        return all(future.done() for _, future, _ in list(self._pending))  # main changes it meanwhile

    def drain(self) -> None:
        """Wait until nothing is being sampled: the sampler and the rewards are free."""
        wait([future for _, future, _ in self._pending])

    def close(self) -> None:
        """Drop what has not begun, and wait for the rest."""
        self._worker.shutdown(wait=True, cancel_futures=True)

    def _launch(self, number: int) -> None:
        published = self.weights.publish()
        solved = copy.deepcopy(self.source.solved)  # prompts are drawn by what is known now
        self._pending.append((number, self._worker.submit(self._sample, number, published, solved), published))

    def _sample(self, number: int, published: Any, solved: Any) -> Sampled:
        seconds: dict[str, float] = {}

        @contextmanager
        def timed(name: str) -> Iterator[None]:
            started = time.monotonic()
            if faults.PLAN:
                faults.PLAN.reach(name, number - 1)
            yield
            seconds[f"ahead/{name}"] = seconds.get(f"ahead/{name}", 0.0) + time.monotonic() - started

        with timed("sync"):
            reported = self.weights.load(published)
        source = replace(self.source, sampler=self.weights.sampler, solved=solved, timed=timed)
        groups, metrics = source.next(number)
        return Sampled(groups, reported | metrics, seconds)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write what is sampled and not yet trained on. Waits for what is being sampled."""
        self.drain()
        steps, groups = [], []
        for number, future, _ in self._pending:
            if future.exception() is not None:  # raised when its step is taken
                break
            sampled = future.result()
            groups += sampled.groups
            steps.append(
                {"step": number, **asdict(replace(sampled, groups=[])), "groups": [*map(facts_of, sampled.groups)]}
            )
        write(folder, steps, groups)

    def load(self, folder: Path, prompts: Sequence[Prompt]) -> None:
        """Read what `save` wrote. A run that was saved without a schedule has nothing to read."""
        with reading(folder, prompts) as (steps, group_of):
            for step in steps if isinstance(steps, list) else ():
                future: Future[Sampled] = Future()
                future.set_result(Sampled([*map(group_of, step["groups"])], step["metrics"], step["seconds"]))
                self._pending.append((step["step"], future, None))


def write(folder: Path, facts: Any, groups: Sequence[Group]) -> None:
    """Write groups that wait: `facts` hold what `facts_of` gives for each of them, in this order."""
    (folder / TEXTS).write_text(json.dumps(facts, default=str), encoding="utf-8")
    written = [r.trajectory for g in groups for r in (*g.rollouts, *([g.greedy] if g.greedy else []))]
    columns = {
        "tokens": torch.tensor([token for t in written for token in t.tokens], dtype=torch.int64),
        "logps": torch.tensor([x for t in written for x in t.logps or ()], dtype=torch.float64),
        "entropies": torch.tensor([x for t in written for x in t.entropies or ()], dtype=torch.float64),
    }
    save_file(columns, folder / NUMBERS)


@contextmanager
def reading(folder: Path, prompts: Sequence[Prompt]) -> Iterator[tuple[Any, Callable[[dict[str, Any]], Group]]]:
    """The facts that `write` wrote, None if there are none, and what makes groups of them, called in their order."""
    try:
        has_any = (folder / TEXTS).exists()
        facts = json.loads((folder / TEXTS).read_text(encoding="utf-8")) if has_any else None
        numbers = load_file(folder / NUMBERS) if has_any else {}
        columns = {name: iter(values.tolist()) for name, values in numbers.items()}
        by_index = {prompt.index: prompt for prompt in prompts}
        yield facts, lambda each: _group(each, by_index[each["prompt"]], columns)
    except (OSError, ValueError, KeyError, TypeError, StopIteration, SafetensorError) as error:
        raise CheckpointError(f"{folder / TEXTS} cannot be read: {error!r}") from error


def facts_of(group: Group) -> dict[str, Any]:
    """A group without its numbers per token."""
    greedy = None if group.greedy is None else _rollout_facts(group.greedy)
    rollouts = [_rollout_facts(rollout) for rollout in group.rollouts]
    return {"prompt": group.prompt.index, "status": group.status, "rollouts": rollouts, "greedy": greedy}


def _rollout_facts(rollout: Rollout) -> dict[str, Any]:
    trajectory = rollout.trajectory
    assert trajectory.sampled is None, "a trajectory with turns of others cannot wait"
    own = {name: getattr(rollout, name) for name in ("reward", "rewards", "correct", "extras", "errors")}
    return own | {
        "num": len(trajectory.tokens),
        "has": [name for name in ("logps", "entropies") if getattr(trajectory, name) is not None],
        "trajectory": {"versions": trajectory.versions, "text": trajectory.text, "stop_reason": trajectory.stop_reason},
    }


def _group(facts: dict[str, Any], prompt: Prompt, columns: dict[str, Iterator[Any]]) -> Group:
    rollouts = tuple(_rollout(each, prompt, columns) for each in facts["rollouts"])
    greedy = None if facts["greedy"] is None else _rollout(facts["greedy"], prompt, columns)
    return Group(prompt=prompt, rollouts=rollouts, status=facts["status"], greedy=greedy)


def _rollout(facts: dict[str, Any], prompt: Prompt, columns: dict[str, Iterator[Any]]) -> Rollout:
    num, has, own = facts.pop("num"), facts.pop("has"), facts.pop("trajectory")
    own["versions"] = tuple(own["versions"])
    numbers = {name: tuple(next(columns[name]) for _ in range(num)) for name in ("tokens", *has)}
    return Rollout(trajectory=Trajectory(prompt=prompt, **numbers, **own), **facts)
