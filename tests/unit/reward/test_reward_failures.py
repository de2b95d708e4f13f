"""R-15 and R-16 without processes: when failures are tolerated and when they stop the run."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest
from processes import wait_until

from gruppo.errors import InputError, RewardError
from gruppo.reward import RewardScorer, load_reward


def f(completions):
    for text in completions:
        if "bad" in text:
            raise KeyError("no such answer")
    return [1.0] * len(completions)


def scorer(**kwargs):
    return RewardScorer([load_reward(f, isolated=False)], **kwargs)


@pytest.mark.parametrize("num_bad", [1, 3])
@pytest.mark.row("R-15", "one of four raises")
def test_an_exception_costs_only_the_completion_that_caused_it(num_bad):
    texts = ["bad"] * num_bad + ["good"] * (4 - num_bad)
    with scorer() as rewards:
        result = rewards.score(["p"] * 4, texts)
    assert result.totals == [None] * num_bad + [1.0] * (4 - num_bad)
    assert result.metrics["reward/f/error_frac"] == num_bad / 4
    assert result.metrics["reward/f/mean"] == 1.0
    assert result.tracebacks["f"].endswith("KeyError: 'no such answer'")


@pytest.mark.row("R-15", "all of a group raise")
def test_a_whole_group_may_fail_after_the_first_step():
    with scorer() as rewards:
        assert rewards.score(["p"] * 4, ["bad"] * 4, step=1).totals == [None] * 4


@pytest.mark.row("R-16", "all raise at the first step")
def test_failing_on_everything_at_the_first_step_stops_with_traceback_and_sample():
    with scorer() as rewards, pytest.raises(RewardError) as caught:
        rewards.score(["What?"] * 4, ["bad one"] * 4)
    assert caught.value.exit_code == 4
    text = str(caught.value)
    assert "reward 'f' failed on 4 of 4 completions at step 0 (4 errors, 0 timeouts, 0 dead workers)" in text
    assert "completion 0 'bad one' of prompt 'What?'" in text
    assert "raise KeyError" in text


@pytest.mark.row("R-16", "more than half raise")
def test_more_than_half_of_a_large_step_stops_the_run():
    with scorer() as rewards:
        rewards.score(["p"] * 40, ["bad"] * 20 + ["good"] * 20, step=5)
        with pytest.raises(
            RewardError, match=r"failed on 21 of 40(?s:.*)21 of the last 40 completions failed, the budget is 50%"
        ):
            rewards.score(["p"] * 40, ["bad"] * 21 + ["good"] * 19, step=6)


def test_small_steps_are_counted_together_with_those_before_them():
    with scorer() as rewards:
        for step in range(1, 9):  # half of the last 32, time and again
            rewards.score(["p"] * 8, ["bad"] * 4 + ["good"] * 4, step=step)
        with pytest.raises(RewardError, match=r"failed on 5 of 8(?s:.*)17 of the last 32 completions failed"):
            rewards.score(["p"] * 8, ["bad"] * 5 + ["good"] * 3, step=9)


def test_failures_are_only_reported_when_they_must_not_stop():
    with scorer(stop_on_failures=False) as rewards:
        for step in range(3):  # nothing succeeds at the first step, all of a step fails, all of the run fails
            result = rewards.score(["p"] * 20, ["bad"] * 20, step=step)
            assert result.totals == [None] * 20
            assert result.metrics["reward/f/error_frac"] == 1.0
            assert list(result.failures["f"]) == list(range(20))


def test_abstaining_is_not_failing():
    def abstains(completions):
        return [None] * len(completions)

    with RewardScorer([load_reward(abstains, isolated=False)]) as rewards:
        result = rewards.score(["p"] * 40, ["a"] * 40)
    assert result.totals == [None] * 40
    assert result.metrics == {
        "reward/abstains/abstain_frac": 1.0,
        "reward/abstains/error_frac": 0.0,
        "reward/abstains/timeout_frac": 0.0,
    }


def test_sys_exit_in_a_reward_does_not_end_the_trainer():
    def leaves(completions):
        raise SystemExit(0)

    with RewardScorer([load_reward(leaves, isolated=False)]) as rewards:
        assert rewards.score(["p"], ["a"], step=1).totals == [None]


# --- in this process, with a deadline ------------------------------------------------------------------------------


def loops(completions):
    while "bad" in completions:
        pass
    return [1.0] * len(completions)


def sleeps(completions):
    if "bad" in completions:
        time.sleep(1000)
    return [1.0] * len(completions)


async def awaits(completions):
    if "bad" in completions:
        await asyncio.sleep(1000)
    return [1.0] * len(completions)


def timed(function, **options):
    return RewardScorer([replace(load_reward(function, isolated=False), is_timed=True)], **options)


@pytest.mark.parametrize("function", [loops, sleeps, awaits])
def test_a_call_in_this_process_is_given_up_at_its_deadline(function):
    with timed(function, deadline_s=0.5, failure_score=-1.0) as rewards:
        result = rewards.score(["p"] * 4, ["good", "bad", "good", "good"], step=1)
        assert result.totals == [1.0, -1.0, 1.0, 1.0]
        assert result.metrics[f"reward/{function.__name__}/timeout_frac"] == 0.25
        assert "no answer within 0.5 s; the call was given up (reward_deadline)" in result.tracebacks[function.__name__]
        assert rewards.score(["p"] * 2, ["good"] * 2, step=2).totals == [1.0, 1.0]


def test_a_loop_that_was_given_up_ends():
    with timed(loops, deadline_s=0.1) as rewards:
        rewards.score(["p"] * 2, ["bad", "good"], step=1)
    wait_until(lambda: not any(thread.name == "reward loops" for thread in threading.enumerate()), seconds=60)


def test_what_is_late_as_a_whole_is_called_again_by_group_with_the_deadline_for_each_completion(caplog):
    sizes = []

    def slow(completions):
        sizes.append(len(completions))
        time.sleep(0.15 * len(completions))
        return [1.0] * len(completions)

    with timed(slow, deadline_s=0.5) as rewards:
        for _ in range(2):
            assert rewards.score(["p", "p", "q", "q"], ["a"] * 4, step=1).totals == [1.0] * 4
    assert sizes == [4, 1, 1, 1, 1, 2, 2] * 2
    assert "reward 'slow' took longer than reward_deadline=0.5 s for a call of 4 completions" in caplog.text


def test_async_calls_share_one_event_loop_also_after_one_was_given_up():
    """HTTP clients that a module keeps are bound to a loop."""
    loops = []

    async def judge(completions):
        loops.append(asyncio.get_running_loop())
        return await awaits(completions)

    with timed(judge, deadline_s=0.5) as rewards:
        for step, texts in enumerate((["good"], ["good", "bad"], ["good"])):
            rewards.score(["p"] * len(texts), texts, step=step)
    assert len(loops) == 5 and len(set(loops)) == 1


def test_waiting_for_a_call_in_this_process_can_be_stopped():
    def stop():
        raise InterruptedError("Ctrl-C")

    with timed(sleeps, poll=stop) as rewards, pytest.raises(InterruptedError, match="Ctrl-C"):
        rewards.score(["p"], ["bad"])


def test_running_out_of_memory_in_this_process_ends_the_run():
    def greedy(completions):
        raise MemoryError("full")

    with timed(greedy) as rewards, pytest.raises(MemoryError, match="full"):
        rewards.score(["p"], ["a"])


@pytest.mark.parametrize(
    "kwargs", [{"workers": 0}, {"deadline_s": 0.0}, {"deadline_s": float("nan")}, {"failure_score": float("nan")}]
)
def test_settings_that_cannot_work_are_refused(kwargs):
    with pytest.raises(InputError, match="workers must be at least 1"):
        scorer(**kwargs)
