"""Score the completions of a step with several reward functions, and survive what they do.

Functions marked `isolated` run in worker processes, others in this one. A worker gets a whole run of groups in one
call. Only when such a call fails are its completions tried again one at a time, so that a failure costs the completion
that brought it about and no other. (A function that compares completions with each other then sees them alone.)
"""

import atexit
import contextlib
import itertools
import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

from gruppo.errors import InputError
from gruppo.reward.base import Parameters, Reward, check_columns, parameters_of
from gruppo.reward.budget import Account, ErrorBudget, Tally
from gruppo.reward.call import Reply, call_reward
from gruppo.reward.combine import RewardResult, gather
from gruppo.reward.crew import Crew
from gruppo.reward.load import load_reward, number_names, sendable
from gruppo.reward.request import Request
from gruppo.reward.worker import Job, Load

_log = logging.getLogger(__name__)


class RewardPool:
    """Reward functions with the processes they run in. One `score` at a time; use it in a `with`, or call `close`.

    Functions that share their own name get numbers: `f`, `f_2`.

    >>> with RewardPool(["exact_match"]) as pool:
    ...     pool.score(["1+1="], ["2"], columns={"answer": ["2"]}).totals
    [1.0]
    """

    def __init__(
        self,
        rewards: Sequence[Reward | str | Callable[..., Any]],
        *,
        workers: int = 2,
        deadline_s: float = 10.0,
        failure_score: float = 0.0,
        error_budget: ErrorBudget | None = None,
        start_limit_s: float = 120.0,
        correct_by: str | None = None,
        correct_at: float = 1.0,
        on_wait: Callable[[], None] | None = None,
    ) -> None:
        """Nothing is started here; workers start with the first `score` that needs them, or with `start`.

        Args:
            deadline_s: wall-clock time for one call in a worker. A completion that alone takes longer has failed.
            failure_score: value of a completion whose verification timed out or killed the worker.
            start_limit_s: time for a worker to import the functions.
            correct_by: name of the function that decides whether an answer is right. None: the first verifier, or the
                first function where there is none.
            correct_at: the least value of that function that means right.
            on_wait: called at least twice a second while waiting; may raise to leave.
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
        loads = [Load(name=reward.name, function=sendable(reward)) for reward in self._isolated]
        self._crew = Crew(loads, size=workers, start_limit_s=start_limit_s, on_wait=on_wait)
        self._workers = workers
        self._deadline_s = deadline_s
        self._failure_score = float(failure_score)
        self._account = Account(error_budget or ErrorBudget())
        self._one_at_a_time: set[str] = set()
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return self._crew.pids

    def start(self) -> None:
        """Start the workers ahead of time, without waiting for them; nothing happens if no function needs one."""
        if self._isolated:
            # Before multiprocessing's own exit handler, which would wait for idle workers for ever.
            atexit.unregister(self.close)
            atexit.register(self.close)
            self._crew.start()

    def close(self) -> None:
        """End the workers. A later `score` starts new ones."""
        atexit.unregister(self.close)
        self._crew.close()

    def check_columns(self, columns: Sequence[str]) -> None:
        """Raise when a function needs a column that the data set does not have."""
        standard = ("prompts", "completions", "completion_ids", "step", "rng_seed")
        for reward in self.rewards:
            check_columns(reward, self._parameters[reward.name], [*standard, *columns])

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        step: int = 0,
        rng_seed: int = 0,
    ) -> RewardResult:
        """Rewards of all completions, in their order.

        Args:
            prompts: the row's prompt of each completion, a string or a list of messages.
            completions: texts; functions get messages where the prompt is one.
            columns: further columns of the rows, one value per completion.

        Raises:
            InputError: a function needs a column that is absent, or returned something that is not one value per
                completion.
            RewardError: a function failed more often than its budget allows.
        """
        request = Request(prompts, completions, completion_ids, columns or {}, step, rng_seed)
        for reward in self.rewards:
            check_columns(reward, self._parameters[reward.name], request.available)
        tallies = {reward.name: Tally(name=reward.name, values=[None] * request.num) for reward in self.rewards}
        if request.num:
            for reward in self.rewards:
                if not reward.isolated:
                    self._score_here(reward, request, tallies[reward.name])
            if self._isolated:
                self._score_in_workers(request, tallies)
            for tally in tallies.values():
                self._account.close_step(tally, step, request.describe)
        weights = {reward.name: reward.weight for reward in self.rewards}
        return gather(tallies, weights, correct_by=self.correct_by, correct_at=self.correct_at)

    def _score_here(self, reward: Reward, request: Request, tally: Tally) -> None:
        parameters = self._parameters[reward.name]
        queue: deque[Sequence[int]] = deque([range(request.num)])
        while queue:
            indices = queue.popleft()
            arguments = request.arguments(parameters, indices)
            reply = call_reward(reward.name, reward.function, arguments, len(indices))
            queue.extend(self._record(tally, request, indices, reply))

    def _score_in_workers(self, request: Request, tallies: Mapping[str, Tally]) -> None:
        self.start()
        pending: dict[int, Sequence[int]] = {}
        queue: deque[Job] = deque()

        def add(load: int, indices: Sequence[int]) -> None:
            parameters = self._parameters[self._isolated[load].name]
            job = self._job(load, parameters, request, indices)
            pending[job.id] = indices
            queue.append(job)

        chunks: list[range] = request.chunks(self._workers)
        for load, reward in enumerate(self._isolated):
            singly = reward.name in self._one_at_a_time
            for indices in [range(i, i + 1) for i in range(request.num)] if singly else chunks:
                add(load, indices)
        late: set[str] = set()
        with contextlib.closing(self._crew.run(queue)) as replies:
            for job, reply in replies:
                tally = tallies[self._isolated[job.load].name]
                if reply.kind == "timeout" and job.num > 1:
                    late.add(tally.name)
                for indices in self._record(tally, request, pending.pop(job.id), reply):
                    add(job.load, indices)
        for name in late:
            if not tallies[name].timeouts:
                self._one_at_a_time.add(name)
                _log.warning(
                    "reward %r takes longer than deadline_s=%g for a whole call, though no completion alone does; "
                    "from now on it gets one completion at a time. A longer deadline_s avoids that",
                    name,
                    self._deadline_s,
                )

    def _job(self, load: int, parameters: Parameters, request: Request, indices: Sequence[int]) -> Job:
        return Job(
            id=next(self._ids),
            load=load,
            arguments=request.arguments(parameters, indices),
            num=len(indices),
            seed=abs(request.rng_seed) * 1_000_003 + indices[0],
            limit_s=self._deadline_s,
        )

    def _record(self, tally: Tally, request: Request, indices: Sequence[int], reply: Reply) -> list[Sequence[int]]:
        """Enter a reply, and return the calls that are to be made because of it."""
        if reply.kind == "invalid":
            raise InputError(reply.text)
        if reply.kind == "scored":
            tally.add_scores(indices, reply)
        elif len(indices) > 1:
            return [(index,) for index in request.spread(indices)]
        else:
            tally.add_failure(indices[0], reply, self._failure_score)
        self._account.check_step(tally, request.step, request.describe)
        return []


def _deciding(rewards: Sequence[Reward], wanted: str | None) -> str:
    """Name of the reward that decides whether an answer is right."""
    names = [reward.name for reward in rewards]
    if wanted is None:
        return next((r.name for r in rewards if getattr(r.function, "decides_correctness", False)), names[0])
    if wanted not in names:
        raise InputError(f"correct_by={wanted!r} is not one of the rewards; they are {', '.join(names)}")
    return wanted
