"""RewardScorer: scores of a step's completions by several reward functions, their totals, metrics and failures.

Functions marked `isolated` run in worker processes, several whole groups in one call; others run in this process. The
completions of a call that fails are tried one at a time, which finds those that break it; the rest of each group is
then scored in one call, since a function may compare them. A completion that makes a verifier hang or die gets
`failure_score`; an exception or a NaN of the function itself is None, as if it had abstained. docs/rewards.md says why.
"""

import atexit
import contextlib
import itertools
import logging
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from gruppo.errors import InputError, RewardError
from gruppo.output import printable
from gruppo.reward.call import FLOAT32_MAX, Call, CallResult, StepCompletions, TrainerState, call_reward, call_within
from gruppo.reward.load import Reward, load_reward, number_names, sendable
from gruppo.reward.remote import RemoteReward
from gruppo.reward.workers import WorkerPool

_log = logging.getLogger(__name__)

_HUGE = 1e18
"""The square of a larger reward is infinite in float32."""

_MAX_FAILED_STEP = 0.5
"""Share of a step's completions on which a function may fail, in whatever way."""
_MAX_FAILED_RUN = 0.2
"""Share of all completions so far, beyond one step's worth, for which a function may raise or return NaN. Timeouts and
dead workers are caused by the model's text and do not count."""
_FREE_FAILURES = 16
"""Fewer failures than this are tolerated whatever their share, so that one bad group does not stop a run."""
_FIRST_TIMEOUTS = 8
"""Timeouts without a single success that end the first step: a function that waits for a dead server would otherwise
hold the run for the deadline times the number of completions."""
_GROUPWISE_SCORES = 10
"""Times that a function gets one group per call after it was late with several and with no completion alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """Rewards of one step, in the order of its completions."""

    totals: list[float | None]
    """Weighted sum per completion; None where every function with a weight abstained."""
    values: dict[str, list[float | None]]
    """Each function's own values."""
    correct: list[bool | None]
    """True for a right answer: the value of the function that decides it is at least its threshold. None where that
    function abstained, or no function decides."""
    metrics: dict[str, float]
    """`reward/{mean,std}` of the totals, `reward/correct_frac`,
    `reward/<name>/{mean,std,abstain_frac,error_frac,timeout_frac}`, and what the functions logged as
    `reward/<name>/<metric>`. A mean of nothing is left out."""
    extras: dict[str, list[Any]] = field(default_factory=dict)
    """Columns that the functions logged, None where there is no value."""
    failures: dict[str, dict[int, str]] = field(default_factory=dict)
    """Of each function that failed: completion -> traceback or reason."""

    @property
    def tracebacks(self) -> dict[str, str]:
        """The first failure of each function that had one."""
        return {name: reasons[min(reasons)] for name, reasons in self.failures.items()}


_Planned = tuple[Sequence[int], float]
"""A call to make: its completions, and its deadline in seconds."""


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
        names = [reward.name for reward in self.rewards]
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
        self._isolated = {reward.name: reward for reward in self.rewards if reward.isolated}
        functions = {name: sendable(reward) for name, reward in self._isolated.items()}
        self._pool = WorkerPool(functions, size=workers, deadline_s=deadline_s, poll=poll)
        self._poll = poll
        self._deadline_s = deadline_s
        self._failure_score = float(failure_score)
        self._stop_on_failures = stop_on_failures
        self._num_completions = 0
        self._num_errors: Counter[str] = Counter()
        # More steps than a window of so many completions can have
        window = 2 * _FREE_FAILURES
        self._recent: dict[str, deque[tuple[int, int]]] = {name: deque(maxlen=window) for name in names}
        """Failures and completions of the last steps."""
        self._groupwise: Counter[str] = Counter()
        """Times that a function still gets one group per call."""
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def facts(self) -> dict[str, Any]:
        """What the records of a run say of its rewards: which one decides what is right, and their weights."""
        return {"correct_by": self.correct_by, "weights": {reward.name: reward.weight for reward in self.rewards}}

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
    ) -> RewardResult:
        """Rewards of all completions, in their order.

        Args:
            prompts: the row's prompt of each completion, a string or a list of messages.
            completions: texts; functions get messages where the prompt is one.
            columns: further columns of the rows, one value per completion.
            prompt_texts: the prompts as the model saw them, with the chat template.
            group_ids: group of each completion. The members of a group stand together and go to a function in one
                call. None: a run of equal prompts is a group.

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
            prompts, completions, completion_ids, columns, step, rng_seed, group_ids, state, prompt_texts
        )
        outcomes = {reward.name: Outcome(name=reward.name, values=[None] * given.num) for reward in self.rewards}
        for reward in self.rewards:
            if reward.isolated or not given.num:
                continue
            queue: deque[_Planned] = deque([(range(given.num), self._deadline_s)])
            if self._groupwise[reward.name]:
                queue = deque(self._group_calls(reward.name, given))
            while queue:
                indices, deadline_s = queue.popleft()
                call = (reward.name, reward.function, given.arguments(reward, indices), len(indices))
                # The paths of a run begin in the working directory, wherever a function goes.
                here = os.open(".", getattr(os, "O_PATH", os.O_RDONLY))
                try:
                    if reward.is_timed:
                        result = call_within(deadline_s, self._poll, *call)
                    elif isinstance(reward.function, RemoteReward):  # it keeps its deadlines, one for each request
                        result = call_within(math.inf, self._poll, *call)
                    else:
                        result = call_reward(*call)
                finally:
                    os.fchdir(here)
                    os.close(here)
                queue.extend(self._record(outcomes[reward.name], given, indices, result))
        if self._isolated and given.num:
            self._score_in_workers(given, outcomes)
        self._num_completions += given.num
        for outcome in outcomes.values():
            self._recent[outcome.name].append((len(outcome.reasons), given.num))
            if outcome.late_call:
                self._see_lateness(outcome)
            if outcome.reasons and self._stop_on_failures:
                self._check_budget(outcome, given)
        return self._combine(list(outcomes.values()))

    def _group_calls(self, name: str, given: StepCompletions) -> list[_Planned]:
        """A call for each group, for a function that was late with several of them."""
        self._groupwise[name] -= 1
        return [(group, self._deadline_s * len(group)) for group in given.groups]

    def _score_in_workers(self, given: StepCompletions, outcomes: Mapping[str, "Outcome"]) -> None:
        """Enter the values of the isolated functions."""
        self.start()
        queue: deque[Call] = deque()

        def add(name: str, calls: Sequence[_Planned]) -> None:
            for indices, deadline_s in calls:
                call = Call(
                    id=next(self._ids),
                    function=name,
                    indices=indices,
                    arguments=given.arguments(self._isolated[name], indices),
                    seed=abs(given.rng_seed) * 1_000_003 + indices[0],
                    deadline_s=deadline_s,
                )
                queue.append(call)

        chunks: list[_Planned] = [(chunk, self._deadline_s) for chunk in given.chunks(self._pool.size)]
        for name in self._isolated:
            add(name, self._group_calls(name, given) if self._groupwise[name] else chunks)
        with contextlib.closing(self._pool.run(queue)) as results:
            for call, result in results:
                add(call.function, self._record(outcomes[call.function], given, call.indices, result))

    def _see_lateness(self, outcome: "Outcome") -> None:
        """One group per call for some time, for a function that was late with several completions and with none alone.

        A delay that has passed must not change the run, so the time ends.
        """
        if outcome.failures["timeout"]:
            return
        self._groupwise[outcome.name] = _GROUPWISE_SCORES
        _log.warning(
            "reward %r took longer than reward_deadline=%g s for a call of %d completions, though for none of them "
            "alone. They were scored again in whole groups; the next %d times a call gets one group and the "
            "deadline for each of its completions. A longer reward_deadline avoids that",
            outcome.name,
            self._deadline_s,
            outcome.late_call,
            _GROUPWISE_SCORES,
        )

    def _check_budget(self, outcome: "Outcome", given: StepCompletions) -> None:
        """Raise when too many completions of the last steps failed, or of the run."""
        recent = self._recent[outcome.name]
        while sum(num for _, num in recent) - recent[0][1] >= 2 * _FREE_FAILURES:
            recent.popleft()
        failures, num = (sum(column) for column in zip(*recent, strict=True))
        if failures >= _FREE_FAILURES and failures > _MAX_FAILED_STEP * num:
            limit = f"{failures} of the last {num} completions failed, the budget is {_MAX_FAILED_STEP:.0%}"
            raise _too_many(outcome, given, limit)
        self._num_errors[outcome.name] += outcome.failures["raised"]
        errors, num = self._num_errors[outcome.name], self._num_completions
        # One step's worth is free: early in a run, a share of all completions is a share of very few.
        is_over = errors >= _FREE_FAILURES and errors > _MAX_FAILED_RUN * num + given.num
        if outcome.failures["raised"] and is_over:
            raise _too_many(outcome, given, f"{errors} of {num} in this run, the budget is {_MAX_FAILED_RUN:.0%}")

    def _record(
        self, outcome: "Outcome", given: StepCompletions, indices: Sequence[int], result: CallResult
    ) -> list[_Planned]:
        """Enter a result, and return the calls that are to be made because of it."""
        if result.kind == "invalid":
            raise InputError(printable(result.text))
        is_first = indices[0] not in outcome.alone
        if result.kind == "timeout" and len(indices) > 1:
            outcome.late_call = max(outcome.late_call, len(indices))
        if result.kind != "scored" and len(indices) > 1 and is_first:
            outcome.alone |= dict.fromkeys(indices)
            return [((index,), self._deadline_s) for index in given.spread(indices)]
        if result.kind != "scored":
            for index in indices:
                outcome.failures[result.kind] += 1
                outcome.reasons[index] = printable(result.text)
                if result.kind != "raised":
                    outcome.values[index] = self._failure_score
        else:
            outcome.has_scored = outcome.has_scored or len(result.non_finite) < len(indices)
            if len(indices) == 1 and not is_first:
                return self._rest_of_group(outcome, given, indices[0], result)
            for index, value in zip(indices, result.values, strict=True):
                outcome.values[index] = value
            for place in result.non_finite:
                outcome.failures["raised"] += 1
                outcome.reasons[indices[place]] = "it returned NaN, an infinity, or a number beyond float32"
            for column, logged in result.extras.items():
                outcome.extras.setdefault(column, {}).update(zip(indices, logged, strict=True))
            for metric, value in result.metrics.items():
                outcome.metrics.setdefault(metric, []).append((value, len(indices)))
        if outcome.reasons and self._stop_on_failures:
            _check_step(outcome, given)
        return self._rest_of_group(outcome, given, indices[0], result) if len(indices) == 1 and not is_first else []

    def _rest_of_group(
        self, outcome: "Outcome", given: StepCompletions, index: int, result: CallResult
    ) -> list[_Planned]:
        """Note how a completion fared alone; after the last of its group, the call for those that did not fail."""
        outcome.alone[index] = result
        tried = {other: outcome.alone[other] for other in given.group_of(index)}
        if None in tried.values():
            return []
        rest = [other for other, found in tried.items() if found is not None and found.kind == "scored"]
        if len(rest) == 1:  # nothing to compare it with: what it gave alone counts
            del outcome.alone[rest[0]]
            return self._record(outcome, given, rest, tried[rest[0]] or result)
        return [(rest, self._deadline_s * len(rest))] if rest else []

    def _combine(self, outcomes: Sequence["Outcome"]) -> RewardResult:
        """Totals, correctness, metrics and logged columns of a finished step."""
        values = {outcome.name: outcome.values for outcome in outcomes}
        totals = weighted_totals(values, {reward.name: reward.weight for reward in self.rewards})
        decided = [None] * len(totals) if self.correct_by is None else values[self.correct_by]
        correct = [None if value is None else value >= self.correct_at for value in decided]
        means: dict[str, tuple[float, int]] = {}
        extras: dict[str, list[Any]] = {}
        for outcome in outcomes:
            logged = {
                name: (math.fsum(value * num for value, num in calls), sum(num for _, num in calls))
                for name, calls in outcome.metrics.items()
            }
            shares = {
                "abstain_frac": outcome.values.count(None),
                "error_frac": outcome.failures["raised"] + outcome.failures["died"],
                "timeout_frac": outcome.failures["timeout"],
            }
            logged |= {name: (count, len(totals)) for name, count in shares.items()}
            means |= {f"reward/{outcome.name}/{name}": mean for name, mean in logged.items()}
            for column, by_index in outcome.extras.items():
                key = f"{outcome.name}/{column}" if column in extras else column
                extras[key] = [by_index.get(index) for index in range(len(totals))]
            largest = max((abs(value) for value in outcome.values if value is not None), default=0.0)
            if largest > _HUGE:
                _log.warning(
                    "reward %r returned %g; values of this size drown every other reward", outcome.name, largest
                )
        return RewardResult(
            totals=totals,
            values=values,
            correct=correct,
            metrics=_metrics(totals, values, correct, means),
            extras=extras,
            failures={outcome.name: dict(outcome.reasons) for outcome in outcomes if outcome.reasons},
        )


def _with_deadline(reward: Reward, seconds: float) -> Reward:
    """The reward; of a server with this deadline, unless it has one of its own."""
    function = reward.function
    if not isinstance(function, RemoteReward) or function.deadline is not None:
        return reward
    return replace(reward, function=replace(function, deadline=seconds))


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Scores and failures of one reward function in one step, filled in as results come."""

    name: str
    values: list[float | None]
    has_scored: bool = False
    """A call gave a value, None included."""
    late_call: int = 0
    """Completions of the largest call that was late, if it had several."""
    alone: dict[int, CallResult | None] = field(default_factory=dict)
    """Completions of a call that failed: what each gives alone, None until it is tried."""
    failures: Counter[str] = field(default_factory=Counter)
    """Number of failures by `ResultKind`; NaN and infinities count as `raised`."""
    reasons: dict[int, str] = field(default_factory=dict)
    """Completion -> traceback or reason, of every failure."""
    extras: dict[str, dict[int, Any]] = field(default_factory=dict)
    """Logged columns: completion -> value."""
    metrics: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    """Logged metrics: value and number of completions of each call."""


def _check_step(outcome: Outcome, given: StepCompletions) -> None:
    """Raise as soon as a step has too many failures, without waiting for the rest of it."""
    num, failures = len(outcome.values), len(outcome.reasons)
    is_hanging = outcome.failures["timeout"] >= _FIRST_TIMEOUTS and not outcome.has_scored
    if given.step == 0 and (failures == num or is_hanging):
        raise _too_many(outcome, given, "nothing succeeded at the first step")
    if failures >= _FREE_FAILURES and failures > _MAX_FAILED_STEP * num:
        raise _too_many(outcome, given, f"the budget is {_MAX_FAILED_STEP:.0%} of a step")


def _too_many(outcome: Outcome, given: StepCompletions, limit: str) -> RewardError:
    first = min(outcome.reasons)  # not the first to arrive: workers answer in any order
    errors, timeouts, deaths = (outcome.failures[kind] for kind in ("raised", "timeout", "died"))
    return RewardError(
        f"reward {outcome.name!r} failed on {len(outcome.reasons)} of {given.num} completions at step {given.step} "
        f"({errors} errors, {timeouts} timeouts, {deaths} dead workers): {limit}. "
        f"First failure, on {given.describe(first)}:\n{outcome.reasons[first]}"
    )


def merged_metrics(results: Sequence[RewardResult]) -> dict[str, float]:
    """The metrics of several calls as if they had been one: shares and logged metrics by the number of completions."""
    if len(results) == 1:
        return dict(results[0].metrics)
    means: dict[str, tuple[float, int]] = {}
    for key in dict.fromkeys(key for result in results for key in result.metrics):
        there = [(result.metrics[key], len(result.totals)) for result in results if key in result.metrics]
        means[key] = (math.fsum(value * num for value, num in there), sum(num for _, num in there))
    totals = [total for result in results for total in result.totals]
    names = results[0].values if results else ()
    values = {name: [value for result in results for value in result.values[name]] for name in names}
    return _metrics(totals, values, [is_right for result in results for is_right in result.correct], means)


def _metrics(
    totals: Sequence[float | None],
    values: Mapping[str, Sequence[float | None]],
    correct: Sequence[bool | None],
    means: Mapping[str, tuple[float, int]],
) -> dict[str, float]:
    """Metrics of scored completions: statistics of totals and values, share of right answers, and other means.

    Args:
        means: sum and count by key. Where a function logged a metric by the name of a statistic, the statistic stays.
    """
    columns = {"reward": totals} | {f"reward/{name}": column for name, column in values.items()}
    metrics = {f"{name}/{key}": value for name, column in columns.items() for key, value in statistics(column).items()}
    judged = [is_right for is_right in correct if is_right is not None]
    if judged:
        metrics["reward/correct_frac"] = sum(judged) / len(judged)
    return metrics | {key: total / num for key, (total, num) in means.items() if num and key not in metrics}


def weighted_totals(values: Mapping[str, Sequence[float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """Sum of weight times value over the functions that did not abstain.

    A weight of 0 means "log only": such a function does not turn an abstention into a reward of 0.

    >>> weighted_totals({"a": [1.0, None, None], "b": [3.0, 3.0, None]}, {"a": 1.0, "b": 0.5})
    [2.5, 1.5, None]
    """
    if set(values) != set(weights):
        raise InputError(f"values are of {sorted(values)}, weights of {sorted(weights)}; give one weight per function")
    if len({len(column) for column in values.values()}) > 1:
        sizes = {name: len(column) for name, column in values.items()}
        raise InputError(f"every function needs one value per completion, got {sizes}")
    counted = [name for name in values if weights[name] != 0.0] or list(values)
    totals: list[float | None] = []
    for row in zip(*(values[name] for name in counted), strict=True):
        terms = [weights[name] * value for name, value in zip(counted, row, strict=True) if value is not None]
        total = sum(terms) if terms else None
        if total is not None and not abs(total) <= FLOAT32_MAX:
            _log.warning("a total reward of %g does not fit into float32 and is left out", total)
            total = None
        totals.append(total)
    return totals


def statistics(values: Sequence[float | None]) -> dict[str, float]:
    """Mean and population standard deviation of what is not None; empty when all is.

    >>> statistics([1.0, None, 3.0])
    {'mean': 2.0, 'std': 1.0}
    """
    present = [value for value in values if value is not None]
    if not present:
        return {}
    if min(present) == max(present):  # rounding must not give equal values a spread
        return {"mean": present[0], "std": 0.0}
    # Exactly rounded sums do not depend on the order in which workers answer. Scaled, since a square may overflow.
    mean = math.fsum(present) / len(present)
    scale = max(abs(value - mean) for value in present)
    spread = math.fsum(((value - mean) / scale) ** 2 for value in present) / len(present)
    return {"mean": mean, "std": scale * math.sqrt(spread)}
