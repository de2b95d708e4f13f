"""R-13 and R-15 to R-20: hostile reward functions in real worker processes.

A deadline is short where a test waits until it has passed, and long elsewhere: the machine may be slow. Every bound on
time is a multiple of what is expected.
"""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes import is_running, wait_until

from gruppo.errors import InputError, RewardError
from gruppo.reward import RewardScorer, budget, load_reward, workers

HOSTILE = Path(__file__).parents[1] / "unit" / "reward"
PROMPTS = ["p"] * 4 + ["q"] * 4
TEXTS = ["a", "b", "bad", "c", "d", "e", "f", "g"]
SHORT_S = 0.5
LONGER_THAN_A_TEST_S = 1000.0
ONE_FAILED = [1.0, 1.0, -1.0, 1.0, 1.0, 1.0, 1.0, 1.0]


@pytest.fixture(autouse=True)
def hostile(monkeypatch):
    monkeypatch.syspath_prepend(HOSTILE)


def scorer(*names, **kwargs):
    settings = {"workers": 1, "deadline_s": 60.0, "failure_score": -1.0, **kwargs}
    return RewardScorer([f"hostile_rewards:{name}" for name in names], **settings)


def wait_until_gone(pids, seconds):
    end = time.monotonic() + seconds
    while any(is_running(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return [pid for pid in pids if is_running(pid)]


@pytest.mark.parametrize("name", ["python_loop", "c_call", "sleep", "ignores_signals", "closes_pipes"])
@pytest.mark.row("R-13", "loops, sleep, a C call that holds the lock, blocked signals")
def test_a_hanging_reward_costs_only_the_completion_that_hangs_it(name, monkeypatch):
    monkeypatch.setattr(workers, "_EXIT_S", 0.1)  # a worker without its pipe stays
    with scorer(name, workers=2, deadline_s=60.0 if name == "closes_pipes" else SHORT_S) as rewards:
        result = rewards.score(PROMPTS, TEXTS)
        assert result.totals == ONE_FAILED
        assert result.metrics[f"reward/{name}/mean"] == 0.75
        assert result.metrics[f"reward/{name}/abstain_frac"] == 0.0
        key = "error_frac" if name == "closes_pipes" else "timeout_frac"
        assert result.metrics[f"reward/{name}/{key}"] == 0.125
        assert len(rewards.worker_pids) == 2
        assert all(is_running(pid) for pid in rewards.worker_pids)
        assert rewards.score(["p"] * 2, ["x", "y"], step=1).totals == [1.0, 1.0]


def test_a_reward_that_writes_into_every_pipe_is_killed_at_once(monkeypatch):
    monkeypatch.setattr(workers, "_EXIT_S", 0.1)
    with scorer("writes_pipes", deadline_s=LONGER_THAN_A_TEST_S) as rewards:
        assert rewards.score(PROMPTS, TEXTS).totals == ONE_FAILED  # at once: its message is none


@pytest.mark.parametrize(
    ("name", "ending"),
    [("exits", "exit code 3"), ("segfaults", "killed by SIGSEGV"), ("out_of_memory", "ran out of memory")],
)
@pytest.mark.row("R-19", "exit, SIGSEGV, RLIMIT_AS in a worker")
def test_a_dying_worker_is_replaced_and_costs_one_completion(name, ending):
    with scorer(name) as rewards:
        rewards.start()
        before = rewards.worker_pids
        result = rewards.score(PROMPTS, TEXTS)
        assert result.totals == ONE_FAILED
        assert result.metrics[f"reward/{name}/error_frac"] == 0.125
        assert result.metrics[f"reward/{name}/timeout_frac"] == 0.0
        assert ending in result.tracebacks[name]
        assert len(rewards.worker_pids) == 1
        assert rewards.worker_pids != before
        assert rewards.score(PROMPTS, ["a"] * 8, step=1).totals == [1.0] * 8


@pytest.mark.row("R-15", "one completion of eight raises")
def test_a_raising_reward_abstains_for_the_completion_that_raised():
    with scorer("raises", "leaves") as rewards:
        result = rewards.score(PROMPTS, TEXTS)
    assert result.values["raises"] == [1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert result.values["leaves"] == [1.0, 1.0, None, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert result.totals == [2.0, 2.0, None, 2.0, 2.0, 2.0, 2.0, 2.0]
    assert result.metrics["reward/raises/error_frac"] == 0.125
    assert result.tracebacks["raises"].splitlines()[-1] == "KeyError: 'no such answer'"
    assert "hostile_rewards.py" in result.tracebacks["raises"]


@pytest.mark.row("R-18", "NaN, inf, None and 1e38 from a worker")
def test_values_that_are_not_numbers_abstain():
    with scorer("not_a_number") as rewards:
        result = rewards.score(["p"] * 6, ["a", "nan", "inf", "none", "big", "int"])
    assert result.totals == [1.0, None, None, None, 1e38, None]
    assert result.metrics["reward/not_a_number/error_frac"] == 0.5


@pytest.mark.row("R-17", "one value for four completions")
def test_a_wrong_shape_from_a_worker_is_an_input_error_and_the_scorer_stays_usable():
    with scorer("one_value", workers=2) as rewards:
        with pytest.raises(InputError, match="reward 'one_value' returned 1 values for 4 completions"):
            rewards.score(PROMPTS, TEXTS)
        assert rewards.score(["p"], ["x"]).totals == [1.0]


@pytest.mark.row("R-16", "all raise at the first step")
def test_failing_everywhere_at_step_0_stops_with_the_first_traceback():
    with scorer("raises_always") as rewards, pytest.raises(RewardError, match="the judge is down") as caught:
        rewards.score(PROMPTS, TEXTS)
    assert caught.value.exit_code == 4
    assert "completion 0 'a' of prompt 'p'" in str(caught.value)


@pytest.mark.row("R-16", "all raise from step 3 on")
def test_failing_later_stops_when_the_budget_is_spent():
    with scorer("raises_from_step_3") as rewards:
        for step in range(3):
            assert rewards.score(["p"] * 16, ["a"] * 16, step=step).totals == [1.0] * 16
        with pytest.raises(RewardError, match="at step 3"):
            rewards.score(["p"] * 16, ["a"] * 16, step=3)


@pytest.mark.row("R-13", "every call hangs")
def test_hanging_on_everything_at_step_0_stops_early():
    prompts = [str(number // 4) for number in range(64)]
    early = pytest.raises(RewardError, match=r"\(0 errors, [89] timeouts, 0 dead workers\)")  # and not 64
    with scorer("sleep_always", workers=2, deadline_s=0.3) as rewards, early:
        rewards.score(prompts, ["a"] * 64)


@pytest.mark.row("R-19", "every worker dies")
def test_many_dead_workers_stop_the_run(monkeypatch):
    monkeypatch.setattr(budget, "_MAX_FAILED", 0.1)
    monkeypatch.setattr(budget, "_FREE_FAILURES", 3)
    with scorer("exits") as rewards, pytest.raises(RewardError, match="exit code 3"):
        rewards.score(PROMPTS, ["bad"] * 8, step=5)


def test_a_worker_that_never_is_ready_is_named_with_its_functions_and_the_deadline(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_START_DEADLINE_S", 0.5)
    (tmp_path / "endless_import.py").write_text(
        "import multiprocessing, time\n"
        "if multiprocessing.parent_process() is not None:\n    time.sleep(1000)\n"
        "def f(completions):\n    return [1.0] * len(completions)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    text = "had not imported 'f' within 0.6 s \\(the greater of reward_deadline and 0.5 s\\)"
    with RewardScorer(["endless_import:f"], deadline_s=0.6) as rewards, pytest.raises(RewardError, match=text):
        rewards.score(["p"], ["a"])


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(f"{how}_from_step_3", marks=pytest.mark.long) for how in ("dies", "sleeps")), "raises_from_step_3"],
)
def test_failing_on_everything_stops_a_run_of_small_steps_too(name):
    deadline_s = 0.4 if name == "sleeps_from_step_3" else 60.0
    with scorer(name, workers=2, deadline_s=deadline_s) as rewards:
        for step in range(3):
            assert rewards.score(["p"] * 4 + ["q"] * 4, ["a"] * 8, step=step).totals == [1.0] * 8
        with pytest.raises(
            RewardError, match=r"failed on 1 of 8(?s:.*)17 of the last 32 completions failed, the budget is 50%"
        ):
            for step in range(3, 7):
                rewards.score(["p"] * 4 + ["q"] * 4, ["a"] * 8, step=step)


def test_a_slow_reward_without_a_guilty_completion_gets_the_deadline_for_each(caplog):
    with scorer("slow_each", deadline_s=SHORT_S) as rewards:  # 0.1 s each: 6 take longer, one does not
        for step in range(2):
            assert rewards.score(["p"] * 6, ["a"] * 6, step=step).totals == [1.0] * 6
    assert caplog.text.count("'slow_each' took longer than reward_deadline=0.5 s for a call of 6 completions") == 2
    assert len(caplog.messages) == 3  # and one about the stack in all


RANKED = ["a", "bb", "ccc", "dddd", "aa", "a", "aaa", "aaaaa"]
RANKS = [0, 1 / 3, 2 / 3, 1, 1 / 3, 0, 2 / 3, 1]
TWO_GROUPS = ["p"] * 4 + ["q"] * 4


def test_a_reward_that_compares_a_group_is_late_once_and_gives_the_same_values(tmp_path, monkeypatch, caplog):
    late = tmp_path / "late"
    late.touch()
    monkeypatch.setenv("GRUPPO_TEST_FILE", str(late))
    with scorer("ranks", workers=1, deadline_s=SHORT_S) as rewards:
        for step in range(3):
            assert rewards.score(TWO_GROUPS, RANKED, step=step).totals == RANKS
    assert not late.exists()
    assert caplog.text.count("took longer than reward_deadline=0.5 s for a call of 8 completions") == 1


@pytest.mark.parametrize(("text", "value"), [("bad", -1.0), ("loud", None)])
def test_a_completion_that_breaks_a_comparing_reward_leaves_the_others_to_be_compared(text, value):
    with scorer("ranks", workers=1, deadline_s=SHORT_S) as rewards:
        totals = rewards.score(TWO_GROUPS, ["a", "bb", text, "dddd", *RANKED[4:]], step=1).totals
    assert totals == [0, 1 / 2, value, 1, *RANKS[4:]]


@pytest.mark.row("R-20", "a reward that changes cwd, seeds, environment and handlers")
def test_a_meddling_reward_leaves_the_trainer_as_it_was(capfd, monkeypatch):
    monkeypatch.setenv("GRUPPO_TEST", "kept")
    random.seed(5)
    expected = random.Random(5).random()
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)]
    directory = os.getcwd()
    with scorer("meddles", workers=2) as rewards:
        assert rewards.score(PROMPTS, TEXTS).totals == [1.0] * 8
    assert random.random() == expected
    assert os.getcwd() == directory
    assert os.environ["GRUPPO_TEST"] == "kept"
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)] == handlers
    shown = capfd.readouterr()
    assert shown.out == ""
    assert shown.err.count("printed by a reward") == 2
    assert shown.err.count("written by a reward") == 2


@pytest.mark.row("R-20", "a reward that changes its folder")
def test_what_one_call_changed_is_gone_in_the_next(monkeypatch):
    monkeypatch.setenv("GRUPPO_TEST_CWD", os.getcwd())
    with scorer("where") as rewards:
        assert [rewards.score(["p"], ["x"], step=step).totals for step in range(3)] == [[1.0]] * 3


@pytest.mark.row("R-20", "unseeded draws")
def test_unseeded_draws_depend_on_the_seed_and_not_on_the_worker():
    with scorer("draws", workers=2) as rewards:
        first = rewards.score(PROMPTS, TEXTS, rng_seed=1).totals
        second = rewards.score(PROMPTS, TEXTS, rng_seed=2).totals
        for _ in range(3):
            assert rewards.score(PROMPTS, TEXTS, rng_seed=1).totals == first
    with scorer("meddles", "draws", workers=2) as rewards:
        assert rewards.score(PROMPTS, TEXTS, rng_seed=1).values["draws"] == first
    assert first != second


def test_results_keep_their_order_over_many_workers_and_rewards():
    texts = ["x" * (number * 7 % 40) for number in range(64)]
    prompts = [str(number // 4) for number in range(64)]
    with scorer("length", "length_async", workers=3) as rewards:
        result = rewards.score(prompts, texts)
    assert result.values["length"] == [float(len(text)) for text in texts]
    assert result.values["length_async"] == [float(len(text)) for text in texts]


def test_async_calls_of_a_worker_share_one_event_loop():
    with scorer("same_loop") as rewards:
        assert [rewards.score(["p"], ["a"]).totals for _ in range(3)] == [[1.0]] * 3


def test_a_column_that_a_worker_cannot_rebuild_is_an_input_error():
    with scorer("with_answer") as rewards, pytest.raises(InputError, match="cannot be sent to its worker"):
        rewards.score(["p"], ["a"], columns={"answer": [lambda: None]})


def test_groups_are_not_torn_between_workers():
    with scorer("group_size", workers=2) as rewards:
        assert rewards.score(["p"] * 3 + ["q"] * 5, ["a"] * 8).totals == [3.0] * 3 + [5.0] * 5
        assert rewards.score(["p"] * 8, ["a"] * 8).totals == [8.0] * 8
        assert rewards.score(["p"] * 8, ["a"] * 8, group_ids=[0] * 4 + [1] * 4).totals == [4.0] * 8


def test_messages_columns_and_instances_reach_a_worker():
    chat = [{"role": "user", "content": "1+1="}]
    scaled = load_reward("hostile_rewards:Scaled", factor=2.0)
    with RewardScorer([scaled, "hostile_rewards:named_lambda"]) as rewards:
        assert rewards.score(["p"], ["abc"]).totals == [8.0]
    with scorer("length", "with_answer") as rewards:
        assert rewards.score([chat], ["abc"], columns={"answer": ["x"]}).values["length"] == [3.0]


def test_what_a_worker_logs_comes_back_in_order():
    with scorer("logs", workers=2) as rewards:
        result = rewards.score(PROMPTS, TEXTS)
    assert result.extras == {"first_letter": ["a", "b", "b", "c", "d", "e", "f", "g"]}
    assert result.metrics["reward/logs/calls_of"] == 4.0
    with scorer("logs_too_few") as rewards, pytest.raises(InputError, match="got 0 values for 8 completions"):
        rewards.score(["p"] * 8, TEXTS)


@pytest.mark.row("R-13", "a catastrophic pattern")
def test_math_match_runs_in_a_worker_and_a_catastrophic_pattern_is_killed():
    pytest.importorskip("math_verify")
    pattern = load_reward("pattern_match", pattern=r"(\s*\w+\s*)*$")
    texts = [r"\boxed{\frac{1}{2}}", "0.5", "a" * 40 + "!"]
    with RewardScorer(["math_match"], deadline_s=60.0) as rewards:
        assert rewards.score(["p"] * 3, texts, columns={"answer": ["0.5"] * 3}).totals == [1.0, 1.0, 0.0]
    with RewardScorer([pattern], deadline_s=SHORT_S, failure_score=-1.0) as rewards:
        assert rewards.score(["p"] * 3, texts).totals == [1.0, 1.0, -1.0]


def test_no_process_is_started_until_one_is_needed_and_none_is_left_after_closing():
    with RewardScorer(["exact_match"]) as rewards:
        rewards.start()
        rewards.score(["p"], ["a"], columns={"answer": ["a"]})
        assert rewards.worker_pids == []
    with scorer("length", workers=2) as rewards:
        assert rewards.worker_pids == []
        rewards.score(["p"], ["a"])
        pids = rewards.worker_pids
        assert len(pids) == 2
    assert wait_until_gone(pids, 30.0) == []


@pytest.mark.row("R-19", "SIGKILL of an idle worker")
def test_a_worker_that_is_killed_while_idle_is_nobodys_failure():
    with scorer("length") as rewards:
        rewards.score(PROMPTS, TEXTS)
        os.kill(rewards.worker_pids[0], signal.SIGKILL)
        assert wait_until_gone(rewards.worker_pids, 30.0) == []
        result = rewards.score(PROMPTS, TEXTS, step=1)
        assert result.totals == [float(len(text)) for text in TEXTS]
        assert result.tracebacks == {}


def test_workers_that_end_with_the_thread_that_started_them_are_nobodys_failure():
    with scorer("length", workers=1) as rewards:  # of two, one may still start when the thread ends
        thread = threading.Thread(target=rewards.score, args=(PROMPTS, TEXTS))
        thread.start()
        thread.join()
        assert wait_until_gone(rewards.worker_pids, 30.0) == []
        result = rewards.score(PROMPTS, TEXTS, step=1)
        assert result.totals == [float(len(text)) for text in TEXTS]
        assert result.tracebacks == {}


@pytest.mark.parametrize("name", ["leaves_an_alarm", "leaves_an_exception"])
@pytest.mark.row("R-19", "an exception that a call left for the time after it")
def test_an_exception_that_a_call_left_behind_is_nobodys_failure(name):
    with scorer(name, workers=2, deadline_s=20.0) as rewards:
        # Both are ready; the second is given what it leaves behind; it waits while the first works; both work.
        for step, texts in enumerate((["a", "b"], ["a", "leave"], ["slow"], ["a", "b"])):
            result = rewards.score(["p", "q"][: len(texts)], texts, step=step)
            assert result.totals == [1.0] * len(texts) and result.tracebacks == {}
        assert len(rewards.worker_pids) == 2


def test_a_worker_that_no_longer_reads_does_not_block_the_trainer(monkeypatch):
    monkeypatch.setattr(workers, "_PIPE_STALL_S", 1)
    with scorer("stray_thread", deadline_s=LONGER_THAN_A_TEST_S) as rewards:
        assert rewards.score(["p"], ["bad"]).totals == [1.0]
        worker = psutil.Process(rewards.worker_pids[0])
        before = worker.cpu_times().user
        wait_until(lambda: worker.cpu_times().user > before + 0.2, seconds=60.0)  # its thread has the lock
        result = rewards.score(["p"], ["x" * 4_000_000], step=1)  # does not fit into the pipe
        assert result.totals == [1.0]
        assert result.tracebacks == {}


def test_a_signal_to_the_whole_job_leaves_the_workers_to_the_trainer():
    with scorer("length") as rewards:
        rewards.score(PROMPTS, TEXTS)
        pids = rewards.worker_pids
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        rewards.score(PROMPTS, TEXTS, step=1)
        assert rewards.worker_pids == pids


def test_programs_that_a_reward_started_die_with_its_worker(tmp_path, monkeypatch):
    monkeypatch.setenv("GRUPPO_TEST_FILE", str(tmp_path / "pid"))
    started, late = tmp_path / "pid", []

    def end_its_time():
        if not late and started.exists() and started.read_text():
            late.append(rewards._pool.workers[0])
            late[0].expires = 0.0

    with scorer("starts_program", deadline_s=LONGER_THAN_A_TEST_S, poll=end_its_time) as rewards:
        assert rewards.score(["p"], ["bad"], step=1).metrics["reward/starts_program/timeout_frac"] == 1.0
        program = int(started.read_text())
        assert wait_until_gone([program], 30.0) == []


def test_leaving_by_an_exception_while_waiting_kills_the_busy_worker():
    busy: list[int] = []

    def leave():
        if not busy and rewards._pool.workers[0].call is not None:
            busy.extend(rewards.worker_pids)
            raise KeyboardInterrupt

    with scorer("sleep", deadline_s=60.0, poll=leave) as rewards:
        with pytest.raises(KeyboardInterrupt):
            rewards.score(["p"], ["bad"])
        assert wait_until_gone(busy, 30.0) == []
        assert rewards.score(["p"], ["a"]).totals == [1.0]


def test_a_module_that_only_the_worker_cannot_import_says_so(tmp_path, monkeypatch):
    path = tmp_path / "vanishing_rewards.py"
    path.write_text("def f(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(tmp_path)
    reward = load_reward("vanishing_rewards:f")
    path.unlink()
    with RewardScorer([reward]) as rewards, pytest.raises(InputError, match="no module 'vanishing_rewards'"):
        rewards.score(["p"], ["a"])


def run_script(tmp_path, body, *, wait=True):
    script = tmp_path / "train_script.py"
    script.write_text(textwrap.dedent(body))
    package = Path(__file__).parents[2] / "src"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(HOSTILE)])}
    process = subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=tmp_path
    )
    if not wait:
        return process, "", ""
    try:
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    return process, out, err


def test_a_script_without_a_main_guard_is_not_run_again_by_its_workers(tmp_path):
    process, out, _ = run_script(
        tmp_path,
        """
        from gruppo.reward import RewardScorer
        print("top")
        scorer = RewardScorer(["hostile_rewards:length"])
        print(scorer.score(["p"], ["abc"]).totals)
        """,  # and without close(): leaving must not wait for idle workers
    )
    assert (process.returncode, out) == (0, "top\n[3.0]\n")


def test_a_reward_of_the_script_itself_works_with_a_main_guard(tmp_path):
    process, out, err = run_script(
        tmp_path,
        """
        from gruppo.reward import RewardScorer
        def mine(completions, **kwargs):
            return [2.0 * len(text) for text in completions]
        if __name__ == "__main__":
            with RewardScorer([mine]) as scorer:
                print(scorer.score(["p"], ["abc"]).totals)
        """,
    )
    assert (process.returncode, out) == (0, "[6.0]\n"), err


def test_a_reward_of_a_script_without_a_main_guard_is_refused_before_the_script_runs_twice(tmp_path):
    process, out, err = run_script(
        tmp_path,
        """
        from gruppo.reward import RewardScorer
        def mine(completions, **kwargs):
            return [2.0 * len(text) for text in completions]
        print("top")
        RewardScorer([mine]).score(["p"], ["abc"])
        """,
    )
    assert (process.returncode, out) == (1, "top\n")
    assert "reward 'mine' is defined in the script that runs" in err and "if __name__ == '__main__':" in err


@pytest.mark.parametrize(
    ("name", "text"), [("length", "a"), ("c_call", "bad"), ("sleep", "bad"), ("stray_thread", "bad")]
)
@pytest.mark.parametrize("deadline_s", [1.0, 40.0])
@pytest.mark.row("R-39", "SIGKILL of the trainer of reward workers")
def test_no_worker_outlives_a_killed_trainer(tmp_path, name, text, deadline_s):
    process, *_ = run_script(
        tmp_path,
        f"""
        import threading, time
        from gruppo.reward import RewardScorer
        scorer = RewardScorer(["hostile_rewards:{name}"], deadline_s={deadline_s})
        scorer.score(["p"], ["a"])
        print(*scorer.worker_pids, flush=True)
        scorer.score(["p"], ["{text}"])
        time.sleep(1000)
        """,
        wait=False,
    )
    assert process.stdout is not None and process.stderr is not None
    pids = [int(pid) for pid in process.stdout.readline().split()]
    time.sleep(0.6)  # into the second call
    process.kill()
    process.wait()
    process.stdout.close()
    process.stderr.close()
    assert len(pids) == 2
    assert wait_until_gone(pids, 30.0) == []


@pytest.mark.row("R-54", "restarts of workers")
def test_restarts_leak_neither_processes_nor_file_descriptors():
    me = psutil.Process()
    with scorer("exits") as rewards:
        rewards.score(PROMPTS, TEXTS)
        descriptors, children = me.num_fds(), len(me.children())
        for step in range(1, 4):
            rewards.score(["p"], ["bad"], step=step)
        assert (me.num_fds(), len(me.children())) == (descriptors, children)


@pytest.mark.clock
def test_a_call_for_256_short_completions_costs_milliseconds():
    prompts = [str(number // 8) for number in range(256)]
    with scorer("length", workers=2) as rewards:
        rewards.score(prompts, ["short"] * 256)
        times = []
        for step in range(1, 31):
            start = time.perf_counter()
            rewards.score(prompts, ["short"] * 256, step=step)
            times.append(time.perf_counter() - start)
    assert min(times) < 0.010  # 1.3 ms on an idle machine
