"""Reward functions that misbehave, for tests with real worker processes; a completion "bad" sets them off."""

import asyncio
import contextlib
import ctypes
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def _texts(completions):
    return [text if isinstance(text, str) else text[-1]["content"] for text in completions]


def length(completions, **kwargs):
    return [float(len(text)) for text in _texts(completions)]


async def length_async(completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(text)) for text in _texts(completions)]


_loops = []


async def same_loop(completions, **kwargs):
    """1 when this runs in the event loop of the first call, as a module's HTTP client needs."""
    _loops.append(asyncio.get_running_loop())
    return [float(_loops[0] is _loops[-1])] * len(completions)


def with_answer(completions, answer):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]


def python_loop(completions, **kwargs):
    while "bad" in completions:
        pass
    return [1.0] * len(completions)


def c_call(completions, **kwargs):
    """Hold the interpreter lock inside one C call: no signal handler and no thread of this process runs."""
    if "bad" in completions:
        pow(7, 10**9)
    return [1.0] * len(completions)


def sleep(completions, **kwargs):
    if "bad" in completions:
        time.sleep(1000)
    return [1.0] * len(completions)


def ignores_signals(completions, **kwargs):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    return sleep(completions)


def sleep_always(completions, **kwargs):
    time.sleep(1000)


def slow_each(completions, **kwargs):
    time.sleep(0.1 * len(completions))
    return [1.0] * len(completions)


def ranks(prompts, completions, **kwargs):
    """Share of the other completions of a prompt that are shorter: 0 for one that is scored alone."""
    file = Path(os.environ.get("GRUPPO_TEST_FILE", "/nonexistent"))
    if "bad" in completions:
        time.sleep(1000)
    if len(completions) > 1 and file.exists():  # late once
        file.unlink()
        time.sleep(1000)
    if "loud" in completions:
        raise KeyError("no such answer")
    sizes = {prompt: [len(c) for p, c in zip(prompts, completions, strict=True) if p == prompt] for prompt in prompts}
    return [
        sum(size < len(text) for size in sizes[prompt]) / max(len(sizes[prompt]) - 1, 1)
        for prompt, text in zip(prompts, completions, strict=True)
    ]


def dies_from_step_3(completions, step, **kwargs):
    if step >= 3:
        os._exit(3)
    return [1.0] * len(completions)


def sleeps_from_step_3(completions, step, **kwargs):
    if step >= 3:
        time.sleep(1000)
    return [1.0] * len(completions)


def exits(completions, **kwargs):
    if "bad" in completions:
        os._exit(3)
    return [1.0] * len(completions)


def segfaults(completions, **kwargs):
    if "bad" in completions:
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0] * len(completions)


def out_of_memory(completions, **kwargs):
    if "bad" in completions:
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        return [float(len(bytearray(2**32)))]
    return [1.0] * len(completions)


def closes_pipes(completions, **kwargs):
    if "bad" in completions:
        os.closerange(3, 100)
        time.sleep(1000)
    return [1.0] * len(completions)


def writes_pipes(completions, **kwargs):
    """Write into every open descriptor but the standard ones, and stay."""
    if "bad" in completions:
        for number in range(3, 64):
            with contextlib.suppress(OSError):
                os.write(number, b"x" * 16)
        time.sleep(1000)
    return [1.0] * len(completions)


def raises(completions, **kwargs):
    for text in completions:
        if "bad" in text:
            raise KeyError("no such answer")
    return [1.0] * len(completions)


def raises_always(completions, **kwargs):
    raise RuntimeError("the judge is down")


def raises_from_step_3(completions, step, **kwargs):
    if step >= 3:
        raise RuntimeError("the judge is down")
    return [1.0] * len(completions)


def leaves(completions, **kwargs):
    if "bad" in completions:
        sys.exit(0)
    return [1.0] * len(completions)


def not_a_number(completions, **kwargs):
    odd = {"nan": float("nan"), "inf": float("inf"), "none": None, "big": 1e38, "int": 10**400}
    return [odd.get(text, 1.0) for text in completions]


def one_value(completions, **kwargs):
    return [1.0]


def leaves_an_alarm(completions, step, **kwargs):
    """Raise ValueError half a second after a call with "leave"; a call with "slow" takes a second."""

    def late(*_):
        raise ValueError("too late")

    if "leave" in completions:
        signal.signal(signal.SIGALRM, late)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
    time.sleep(1.0 if "slow" in completions else 0.2)
    return [1.0] * len(completions)


def leaves_an_exception(completions, **kwargs):
    """As `leaves_an_alarm`, by a thread."""

    ident = threading.get_ident()

    def raise_there():
        time.sleep(0.5)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), ctypes.py_object(ValueError))

    if "leave" in completions:
        threading.Thread(target=raise_there, daemon=True).start()
    time.sleep(1.0 if "slow" in completions else 0.2)
    return [1.0] * len(completions)


def meddles(completions, **kwargs):
    """Print, move, seed, set handlers and leave a thread behind."""
    print("printed by a reward")
    os.write(1, b"written by a reward\n")
    os.chdir("/")
    os.environ["GRUPPO_TEST"] = "changed"
    random.seed(0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    return [1.0] * len(completions)


def stray_thread(completions, **kwargs):
    """Return at once, and leave a thread that soon takes the interpreter lock for good."""

    def take_the_lock():
        time.sleep(0.2)
        pow(7, 10**9)

    if "bad" in completions:
        threading.Thread(target=take_the_lock, daemon=True).start()
    return [1.0] * len(completions)


def draws(completions, **kwargs):
    return [random.random() for _ in completions]


def where(completions, **kwargs):
    """1 in the directory of the trainer; moves away afterwards."""
    here = os.environ["GRUPPO_TEST_CWD"] == os.getcwd()
    os.chdir("/")
    return [float(here)] * len(completions)


def process_id(completions, **kwargs):
    return [float(os.getpid())] * len(completions)


def group_size(prompts, completions, **kwargs):
    return [float(prompts.count(prompt)) for prompt in prompts]


def starts_program(completions, **kwargs):
    """Start a program that outlives the call, record its process id, and hang."""
    if "bad" in completions:
        program = subprocess.Popen(["sleep", "1000"])
        with open(os.environ["GRUPPO_TEST_FILE"], "w") as file:
            file.write(str(program.pid))
        time.sleep(1000)
    return [1.0] * len(completions)


def logs(completions, log_extra, log_metric, **kwargs):
    log_extra("first_letter", [text[:1] for text in completions])
    log_metric("calls_of", len(completions))
    return [1.0] * len(completions)


def logs_too_few(completions, log_extra):
    log_extra("column", [])
    return [1.0] * len(completions)


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, completions, **kwargs):
        return [self.factor * len(text) for text in completions]


named_lambda = lambda completions, **kwargs: [2.0] * len(completions)  # noqa: E731

not_callable = 3


class Within:
    """1 for a length in a range; its options are of several types, one of them by its default alone."""

    def __init__(self, low: int, high: float = 10.0, *, words: tuple[str, ...] = (), inverted=False):
        self.given = (low, high, words, inverted)

    def __call__(self, completions, **kwargs):
        low, high, _, inverted = self.given
        return [float((low <= len(text) <= high) != inverted) for text in completions]
