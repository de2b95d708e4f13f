"""RewardScorer: scores a step's completions with several reward functions, and retries calls that fail.

Functions marked `isolated` run in worker processes, several whole groups in one call; others run in this process. The
completions of a call that fails are tried one at a time, which finds those that break it; the rest of each group is
then scored in one call, since a function may compare them. A completion that makes a verifier hang or die gets
`failure_score`; an exception or a NaN of the function itself is None, as if it had abstained. docs/rewards.md says why.

`workers.py` kills, `budget.py` counts failures and ends the run, `result.py` makes totals and metrics.
"""

import atexit
import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from gruppo.errors import InputError
from gruppo.process.streams import printable
from gruppo.reward.budget import Budget
from gruppo.reward.call import Call, CallResult, StepCompletions, TrainerState, call_reward, call_within
from gruppo.reward.load import Reward, load_reward, number_names, sendable
from gruppo.reward.remote import RemoteReward
from gruppo.reward.result import Outcome, RewardResult, combined
from gruppo.reward.workers import WorkerPool
from gruppo.types import Message

_log = logging.getLogger(__name__)


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
        correct_at: float | None = None,
        poll: Callable[[], None] | None = None,
    ) -> None:
        """Nothing is started here; workers start with the first `score` that needs them, or with `start`.

        Args:
            deadline_s: wall-clock time for one call in a worker, or of a timed function in this process. A completion
                that alone takes longer has failed. The call for the rest of its group has this time for each of them.
            failure_score: value of a completion whose verification timed out or killed the worker. It should be the
                least that the functions give, or the policy gains by breaking them.
            stop_on_failures: raise when a function fails too often; at step 0, when it fails on every completion.
                False only reports failures in the result.
            correct_by: name of the function that decides whether an answer is right. None: the first verifier; without
                one nothing decides, unless `correct_at` is given and there is one function.
            correct_at: the least value of that function that means right. None: 1.
            poll: cancellation hook, called at least twice a second while waiting; raise to abort.
        """
        if not rewards:
            raise InputError(f"rewards needs at least one function, such as 'exact_match', got {rewards!r}")
        self.rewards = tuple(_with_deadline(r, deadline_s) for r in number_names([load_reward(r) for r in rewards]))
        if workers < 1 or not deadline_s > 0 or not math.isfinite(failure_score):
            raise InputError(
                "workers must be at least 1, deadline_s positive and failure_score finite, got "
                f"{workers}, {deadline_s} and {failure_score}"
            )
        self._by_name = {reward.name: reward for reward in self.rewards}
        names = list(self._by_name)
        deciding = [reward.name for reward in self.rewards if getattr(reward.function, "decides_correctness", False)]
        if correct_at is not None and len(names) == 1:
            deciding += names
        self.correct_by = next(iter(deciding), None) if correct_by is None else correct_by
        """The function that decides which answers are right; None: nothing does, and only rewards can be compared."""
        if correct_by is not None and correct_by not in names:
            raise InputError(f"correct_by={correct_by!r} is not one of the rewards; they are {', '.join(names)}")
        if correct_at is not None and self.correct_by is None:
            raise InputError(
                f"correct_at={correct_at:g} needs a reward that decides which answers are right, and none of "
                f"{', '.join(names)} is a verifier; name one in correct_by"
            )
        self.correct_at = 1.0 if correct_at is None else correct_at
        self.max_steps, self.steps_per_epoch = 1, 1.0
        """Length of the run and of a pass over its prompts, for `trainer_state`; a trainer sets them."""
        functions = {reward.name: sendable(reward) for reward in self.rewards if reward.isolated}
        self._pool = WorkerPool(functions, size=workers, deadline_s=deadline_s, poll=poll)
        self._needs_workers = bool(functions)
        self._poll = poll
        self._deadline_s = deadline_s
        self._failure_score = float(failure_score)
        self._stop_on_failures = stop_on_failures
        self._budgets = {name: Budget() for name in names}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def weights(self) -> dict[str, float]:
        """Weight of each function in the total."""
        return {reward.name: reward.weight for reward in self.rewards}

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the rewards for a run's records: which one decides what is right, and their weights."""
        return {"correct_by": self.correct_by, "weights": self.weights}

    @property
    def verdict(self) -> str:
        """A sentence on which answers are right."""
        if self.correct_by is None:
            return "no reward decides which answers are right (correct_by names one)"
        return f"an answer is right where {self.correct_by} is at least {self.correct_at:g}"

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the workers that run now."""
        return [worker.pid for worker in self._pool.workers]

    def start(self) -> None:
        """Start the workers ahead of time, without waiting for them; nothing happens if no function needs one."""
        if self._needs_workers:
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
        no_completions = StepCompletions([], [], [], {name: [] for name in columns})
        for reward in self.rewards:
            no_completions.arguments(reward, [])

    def score(
        self,
        prompts: Sequence[Any],
        completions: Sequence[str],
        completion_ids: Sequence[Sequence[int]] | None = None,
        columns: Mapping[str, Sequence[Any]] | None = None,
        step: int = 0,
        rng_seed: int = 0,
        group_ids: Sequence[int] | None = None,
        prompt_texts: Sequence[str] | None = None,
        messages: Sequence[Sequence[Message] | None] | None = None,
    ) -> RewardResult:
        """Rewards of all completions, in their order.

        Args:
            prompts: the row's prompt of each completion, a string or a list of messages.
            completions: texts; functions get messages where the prompt is one.
            columns: further columns of the rows, one value per completion.
            prompt_texts: the prompts as the model saw them, with the chat template.
            group_ids: group of each completion. The members of a group stand together and go to a function in one
                call. None: a run of equal prompts is a group.
            messages: the conversation after each prompt, which functions get in the place of one message.

        Raises:
            InputError: a function needs a column that is absent, or returned something that is not one value per
                completion.
            RewardError: a function failed more often than is tolerated.
        """
        state = TrainerState(
            global_step=step,
            max_steps=self.max_steps,
            epoch=step / self.steps_per_epoch,
            num_train_epochs=self.max_steps / self.steps_per_epoch,
        )
        given = StepCompletions(
            prompts, completions, completion_ids, columns, step, rng_seed, group_ids, state, prompt_texts, messages
        )
        outcomes = {reward.name: Outcome(name=reward.name, values=[None] * given.num) for reward in self.rewards}
        if given.num:
            self._score_all(given, outcomes)
        for name, outcome in outcomes.items():
            self._budgets[name].close_step(outcome)
        return combined(list(outcomes.values()), self.weights, self.correct_by, self.correct_at)

    def _score_all(self, given: StepCompletions, outcomes: Mapping[str, Outcome]) -> None:
        """Enter the values of all functions: whole calls, then each completion of those that failed, then the rest."""
        broken: list[tuple[Call, CallResult]] = []
        alone: dict[tuple[str, int], tuple[Call, CallResult]] = {}

        def enter(call: Call, result: CallResult) -> None:
            outcome = outcomes[call.function]
            outcome.enter(call.indices, result, self._failure_score)
            if outcome.reasons and self._stop_on_failures:
                self._budgets[call.function].check(outcome, given)

        def enter_or_break(call: Call, result: CallResult) -> None:
            if result.kind == "scored" or len(call.indices) == 1:
                enter(call, result)
            else:
                broken.append((call, result))

        def enter_failure(call: Call, result: CallResult) -> None:
            if result.kind == "scored":
                outcomes[call.function].has_scored |= not result.non_finite
                alone[call.function, call.indices[0]] = call, result
            else:
                enter(call, result)

        chunks = given.chunks(self._pool.size)  # as few as keep all workers busy: async functions wait for all at once
        whole = [(r.name, indices) for r in self.rewards for indices in (chunks if r.isolated else [range(given.num)])]
        self._make([self._call(name, given, indices) for name, indices in whole], enter_or_break)
        singles = [(call.function, index) for call, _ in broken for index in given.spread(call.indices)]
        self._make([self._call(name, given, [index]) for name, index in singles], enter_failure)
        self._warn_of_late(broken, outcomes)
        rests: list[Call] = []
        for name, group in itertools.product(outcomes, given.groups):
            rest = [index for index in group if (name, index) in alone]
            if len(rest) == 1:  # nothing to compare it with: what it gave alone counts
                enter(*alone[name, rest[0]])
            elif rest:
                rests.append(self._call(name, given, rest, per_completion=True))
        self._make(rests, enter)

    def _call(self, name: str, given: StepCompletions, indices: Sequence[int], *, per_completion: bool = False) -> Call:
        return Call(
            function=name,
            indices=indices,
            arguments=given.arguments(self._by_name[name], indices),
            seed=abs(given.rng_seed) * 1_000_003 + indices[0],
            deadline_s=self._deadline_s * (len(indices) if per_completion else 1),
        )

    def _make(self, calls: Sequence[Call], take: Callable[[Call, CallResult], None]) -> None:
        """Make calls, first those in this process, and give each with its result to `take`, as they are ready."""
        isolated: list[Call] = []
        for call in calls:
            if self._by_name[call.function].isolated:
                isolated.append(call)
            else:
                take(call, _usable(self._result_here(call)))
        if isolated:
            self.start()
            with contextlib.closing(self._pool.run(isolated)) as results:
                for call, result in results:
                    take(call, _usable(result))

    def _result_here(self, call: Call) -> CallResult:
        reward = self._by_name[call.function]
        given = reward.name, reward.function, call.arguments, len(call.indices)
        if reward.is_timed:
            return call_within(call.deadline_s, self._poll, *given)
        if isinstance(reward.function, RemoteReward):  # it keeps its deadlines, one for each request
            return call_within(math.inf, self._poll, *given)
        return call_reward(*given)

    def _warn_of_late(self, broken: Sequence[tuple[Call, CallResult]], outcomes: Mapping[str, Outcome]) -> None:
        """Warn of functions that were late with several completions, but with none on its own."""
        late = {
            call.function: len(call.indices)
            for call, result in broken
            if result.kind == "timeout" and not outcomes[call.function].failures["timeout"]
        }
        for name, num in late.items():
            _log.warning(
                "reward %r took longer than reward_deadline=%g s for a call of %d completions, though for none of "
                "them alone. They were scored again; a longer reward_deadline saves that time",
                *(name, self._deadline_s, num),
            )


def _usable(result: CallResult) -> CallResult:
    """The result; an error where the function's return value cannot be used."""
    if result.kind == "invalid":
        raise InputError(printable(result.text))
    return result


def _with_deadline(reward: Reward, seconds: float) -> Reward:
    """The reward; of a server with this deadline, unless it has one of its own."""
    function = reward.function
    if not isinstance(function, RemoteReward) or function.deadline is not None:
        return reward
    return replace(reward, function=replace(function, deadline=seconds))
