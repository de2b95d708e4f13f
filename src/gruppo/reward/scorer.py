"""Scores of a step's completions by several reward functions, whatever those functions do.

Functions marked `isolated` run in worker processes, others in this one. A worker gets several whole groups in one call.
Only when such a call fails are its completions tried again one at a time, so that a failure costs the completion that
brought it about and no other. (A function that compares completions with each other then sees them alone.)
"""

import atexit
import contextlib
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from gruppo.errors import InputError
from gruppo.reward.base import PER_STEP, STANDARD, Parameters, Reward, as_completions, check_columns, parameters_of
from gruppo.reward.call import Call, CallResult, FunctionSpec, call_reward
from gruppo.reward.load import load_reward, number_names, sendable
from gruppo.reward.outcome import FailureLimit, Outcome, RewardResult, combine
from gruppo.reward.workers import WorkerPool

_log = logging.getLogger(__name__)

_MAX_SHOWN = 200


class RewardScorer:
    """Reward functions with the processes they run in. One `score` at a time; use it in a `with`, or call `close`.

    Functions that share their own name get numbers: `f`, `f_2`.

    >>> with RewardScorer(["exact_match"]) as scorer:
    ...     scorer.score(["1+1="], ["2"], columns={"answer": ["2"]}).totals
    [1.0]
    """

    def __init__(
        self,
        rewards: Sequence[Reward | str | Callable[..., Any]],
        *,
        workers: int = 2,
        deadline_s: float = 10.0,
        failure_score: float = 0.0,
        stop_on_failures: bool = True,
        correct_by: str | None = None,
        correct_at: float = 1.0,
        poll: Callable[[], None] | None = None,
    ) -> None:
        """Nothing is started here; workers start with the first `score` that needs them, or with `start`.

        Args:
            deadline_s: wall-clock time for one call in a worker. A completion that alone takes longer has failed.
            failure_score: value of a completion whose verification timed out or killed the worker. It should be the
                least that the functions give, or the policy gains by breaking them.
            stop_on_failures: raise when a function fails too often. False only reports failures in the result.
            correct_by: name of the function that decides whether an answer is right. None: the first verifier, or the
                first function where there is none.
            correct_at: the least value of that function that means right.
            poll: cancellation hook, called at least twice a second while waiting; raise to abort.
        """
        if not rewards:
            raise InputError(f"rewards needs at least one function, such as 'exact_match', got {rewards!r}")
        self.rewards = number_names([load_reward(reward) for reward in rewards])
        if workers < 1 or not deadline_s > 0 or not math.isfinite(failure_score):
            raise InputError(
                "workers must be at least 1, deadline_s positive and failure_score finite, got "
                f"{workers}, {deadline_s} and {failure_score}"
            )
        self.correct_by = _deciding(self.rewards, correct_by)
        self.correct_at = correct_at
        self._isolated = [reward for reward in self.rewards if reward.isolated]
        self._parameters = {reward.name: parameters_of(reward.function) for reward in self.rewards}
        functions = [FunctionSpec(name=reward.name, function=sendable(reward)) for reward in self._isolated]
        self._pool = WorkerPool(functions, size=workers, poll=poll)
        self._num_workers = workers
        self._deadline_s = deadline_s
        self._failure_score = float(failure_score)
        self._limit = FailureLimit() if stop_on_failures else None
        self._one_at_a_time: set[str] = set()
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._pool.pids

    def start(self) -> None:
        """Start the workers ahead of time, without waiting for them; nothing happens if no function needs one."""
        if self._isolated:
            # Before multiprocessing's own exit handler, which would wait for idle workers for ever.
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._pool.start()

    def close(self) -> None:
        """End the workers. A later `score` starts new ones."""
        atexit.unregister(self.close)
        self._pool.close()

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise when a function needs a column that the data set does not have."""
        for reward in self.rewards:
            check_columns(reward, self._parameters[reward.name], [*STANDARD, *columns])

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        step: int = 0,
        rng_seed: int = 0,
        group_ids: Sequence[int] | None = None,
    ) -> RewardResult:
        """Rewards of all completions, in their order.

        Args:
            prompts: the row's prompt of each completion, a string or a list of messages.
            completions: texts; functions get messages where the prompt is one.
            columns: further columns of the rows, one value per completion.
            group_ids: group of each completion. The members of a group stand together and go to a function in one
                call. None: a run of equal prompts is a group.

        Raises:
            InputError: a function needs a column that is absent, or returned something that is not one value per
                completion.
            RewardError: a function failed more often than is tolerated.
        """
        given = StepCompletions(prompts, completions, completion_ids, columns, step, rng_seed, group_ids)
        for reward in self.rewards:
            check_columns(reward, self._parameters[reward.name], given.available)
        outcomes = {reward.name: Outcome(name=reward.name, values=[None] * given.num) for reward in self.rewards}
        if given.num:
            for reward in self.rewards:
                if not reward.isolated:
                    self._score_here(reward, given, outcomes[reward.name])
            if self._isolated:
                self._score_in_workers(given, outcomes)
            if self._limit is not None:
                for outcome in outcomes.values():
                    self._limit.close_step(outcome, step, given.describe)
        weights = {reward.name: reward.weight for reward in self.rewards}
        return combine(list(outcomes.values()), weights, correct_by=self.correct_by, correct_at=self.correct_at)

    def _score_here(self, reward: Reward, given: "StepCompletions", outcome: Outcome) -> None:
        queue: deque[Sequence[int]] = deque([range(given.num)])
        while queue:
            indices = queue.popleft()
            arguments = given.arguments(self._parameters[reward.name], indices)
            result = call_reward(reward.name, reward.function, arguments, len(indices))
            queue.extend(self._record(outcome, given, indices, result))

    def _score_in_workers(self, given: "StepCompletions", outcomes: Mapping[str, Outcome]) -> None:
        self.start()
        pending: dict[int, Sequence[int]] = {}
        queue: deque[Call] = deque()

        def add(function: int, indices: Sequence[int]) -> None:
            call = Call(
                id=next(self._ids),
                function=function,
                arguments=given.arguments(self._parameters[self._isolated[function].name], indices),
                num=len(indices),
                seed=abs(given.rng_seed) * 1_000_003 + indices[0],
                deadline_s=self._deadline_s,
            )
            pending[call.id] = indices
            queue.append(call)

        chunks: list[range] = given.chunks(self._num_workers)
        for function, reward in enumerate(self._isolated):
            singly = reward.name in self._one_at_a_time
            for indices in [range(i, i + 1) for i in range(given.num)] if singly else chunks:
                add(function, indices)
        late: set[str] = set()
        with contextlib.closing(self._pool.run(queue)) as results:
            for call, result in results:
                outcome = outcomes[self._isolated[call.function].name]
                if result.kind == "timeout" and call.num > 1:
                    late.add(outcome.name)
                for indices in self._record(outcome, given, pending.pop(call.id), result):
                    add(call.function, indices)
        for name in late:
            if not outcomes[name].timeouts:
                self._one_at_a_time.add(name)
                _log.warning(
                    "reward %r takes longer than deadline_s=%g for a whole call, though no completion alone does; "
                    "from now on it gets one completion at a time. A longer deadline_s avoids that",
                    name,
                    self._deadline_s,
                )

    def _record(
        self, outcome: Outcome, given: "StepCompletions", indices: Sequence[int], result: CallResult
    ) -> list[Sequence[int]]:
        """Enter a result, and return the calls that are to be made because of it."""
        if result.kind == "invalid":
            raise InputError(result.text)
        if result.kind == "scored":
            outcome.add_scores(indices, result)
        elif len(indices) > 1:
            return [(index,) for index in given.spread(indices)]
        else:
            outcome.add_failure(indices[0], result, self._failure_score)
        if self._limit is not None:
            self._limit.check_step(outcome, given.step, given.describe)
        return []


class StepCompletions:
    """Completions of one step as arguments for reward functions: checked once, cut into calls."""

    def __init__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        step: int = 0,
        rng_seed: int = 0,
        group_ids: Sequence[int] | None = None,
    ) -> None:
        columns = columns or {}
        self.num = len(completions)
        self.step = step
        self.rng_seed = rng_seed
        lists = [("prompts", prompts), ("completion_ids", completion_ids), ("group_ids", group_ids), *columns.items()]
        for name, values in lists:
            if values is not None and len(values) != self.num:
                raise InputError(f"{name} has {len(values)} entries for {self.num} completions; give one for each")
        self._texts = completions
        self._prompts = prompts
        self._group_ids = group_ids
        if group_ids is not None:
            firsts = [group_ids[i] for i in range(self.num) if i == 0 or self._starts_group(i)]
            torn = next((group for group, times in Counter(firsts).items() if times > 1), None)
            if torn is not None:
                raise InputError(f"group_ids must keep the completions of a group together, got {torn} in two places")
        self.available: dict[str, Any] = {
            **{name: values for name, values in columns.items() if name not in STANDARD},
            "prompts": prompts,
            "completions": as_completions(prompts, completions),
            "step": step,
            "rng_seed": rng_seed,
        }
        if completion_ids is not None:
            self.available["completion_ids"] = completion_ids

    def arguments(self, parameters: Parameters, indices: Sequence[int]) -> dict[str, Any]:
        """Arguments of a function with these parameters, for some of the completions."""
        return {
            name: value if name in PER_STEP else [value[index] for index in indices]
            for name, value in self.available.items()
            if parameters.takes(name)
        }

    def chunks(self, parts: int) -> list[range]:
        """About `parts` runs of equal size, never cut within a group: a function may compare its members."""
        aim = -(-self.num // parts)
        cuts = [0]
        for start in range(1, self.num):
            if start - cuts[-1] >= aim and self._starts_group(start):
                cuts.append(start)
        return [range(start, end) for start, end in zip(cuts, [*cuts[1:], self.num], strict=True)]

    def spread(self, indices: Sequence[int]) -> list[int]:
        """The same completions in an order that visits every group early: one bad group should not look like all."""
        place: dict[int, int] = {}
        for index in indices:
            starts = index - 1 not in place or self._starts_group(index)
            place[index] = 0 if starts else place[index - 1] + 1
        return sorted(indices, key=lambda index: (place[index], index))

    def describe(self, index: int) -> str:
        """A completion for an error text, short and without control characters."""
        prompt, text = repr(self._prompts[index]), repr(self._texts[index])
        return f"completion {index} {_shorten(text)} of prompt {_shorten(prompt)}"

    def _starts_group(self, index: int) -> bool:
        marks = self._prompts if self._group_ids is None else self._group_ids
        this, before = marks[index], marks[index - 1]
        return this is not before and this != before


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}... ({len(text)} characters)"


def _deciding(rewards: Sequence[Reward], wanted: str | None) -> str:
    """Name of the reward that decides whether an answer is right."""
    names = [reward.name for reward in rewards]
    if wanted is None:
        return next((r.name for r in rewards if getattr(r.function, "decides_correctness", False)), names[0])
    if wanted not in names:
        raise InputError(f"correct_by={wanted!r} is not one of the rewards; they are {', '.join(names)}")
    return wanted
