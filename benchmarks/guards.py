"""What guards and records cost, and what a long run leaves behind.

    OMP_NUM_THREADS=1 python benchmarks/guards.py                    # 500 steps, then the shares of a step
    OMP_NUM_THREADS=1 python benchmarks/guards.py --steps 100

First a long run whose reward workers are killed every tenth step: the slope of memory and of open files over its
steps, with the standard error of the fit. It is first because the allocator would give it what the others left.

Then the clock, on steps of the demo: blocks of steps without any record, with those of `gruppo demo`, which writes
completions at every tenth step, and with completions of every step, as `gruppo train` writes them, take turns in any
order, and each is compared with the block beside it. The figure needs a machine that does nothing else, with a core for
the process that writes.

Then processor time of the training thread, which a busy machine disturbs less: the share of each guard and record, of
the demo as it records and of a model of 50 million parameters with completions of every step; what the other process
uses is shown beside it. A token is recorded at the same price whatever the model, so that price is shown too: it can be
held against any step.
"""

import argparse
import functools
import gc
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from timing import settle_allocator

from gruppo.cli import demo
from gruppo.model import optim
from gruppo.reward import call, scorer
from gruppo.run import recorder
from gruppo.run.recorder import Recorder
from gruppo.run.signals import StopFlag
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.trainer.trainer import TrainResult

WARMUP = 20
"""First steps that are not counted."""
KILL_EVERY = 10

GUARDS: dict[str, tuple[Any, str]] = {
    "returned rewards are numbers": (call, "check_returned"),
    "failures within the budget": (scorer, "_check_step"),
    "signal poll": (StopFlag, "poll"),
}
RECORDS: dict[str, tuple[Any, str]] = {
    "warnings, completions sent": (Recorder, "sampled"),
    "metrics, to file and trackers": (Recorder, "step"),
    "timings": (Recorder, "timed"),
}
NORM = "gradient norm, of the clipping"

BLOCK, ROUNDS = 10, 150
"""Steps of a block on the clock, and rounds of blocks."""
MODES: dict[str, tuple[int, bool]] = {
    "no record": (0, False),
    "as the demo records": (demo.PRESET["completions_every"], True),
    "completions of every step": (1, True),
}
"""`completions_every`, and whether anything is recorded."""


def length(completions: list[str], **columns: Any) -> list[float]:
    """A reward that runs in the workers."""
    return [float(len(text)) for text in completions]


def watched(owner: Any, name: str, spent: dict[str, float], title: str) -> None:
    """Replace a function by one that adds up its processor time."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        started = time.thread_time()
        try:
            return function(*arguments, **options)
        finally:
            spent[title] += time.thread_time() - started

    setattr(owner, name, timed)


def watch_all() -> dict[str, float]:
    """Processor time of each guard and record by its title, from now on."""
    spent: dict[str, float] = defaultdict(float)
    for title, (owner, name) in (GUARDS | RECORDS).items():
        watched(owner, name, spent, title)
    watched(optim.torch.nn.utils, "get_total_norm", spent, NORM)
    return spent


def shares(spent: dict[str, float], warmup: int, steps: int, objects: dict[str, Any], **changes: Any) -> None:
    """Print what part of a step each guard and record takes."""
    tokens = 0
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(config(folder, warmup + steps, **changes), quiet=True, **objects)
        result = TrainResult(0)
        for _ in range(warmup):
            trainer._take_step(result)
        trainer.recorder.flush()
        spent.clear()
        writer = trainer.recorder._writer._process
        assert writer is not None
        begun, elsewhere = time.thread_time(), processor_time(writer.pid)
        for _ in range(steps):
            trainer._take_step(result)
            tokens += sum(len(rollout.trajectory.tokens) for group in trainer.groups for rollout in group.rollouts)
        total = time.thread_time() - begun
        trainer.recorder.flush()
        elsewhere = processor_time(writer.pid) - elsewhere
        step = median(line["sample"] + line["reward"] + line["train"] for line in trainer.run.timings()[warmup:])
        size, given = sum(p.numel() for p in trainer.model.model.parameters()), trainer.config
        trainer.close()
    print(f"{size / 1e6:.1f} million parameters, {given.prompts_per_step} x {given.group_size} completions", end=": ")
    print(f"{total / steps * 1e3:.1f} ms of processor time, {step * 1e3:.1f} ms on the clock\n")
    for title in (*GUARDS, *RECORDS):
        print(f"{title:36} {spent[title] / total:7.2%}")
    print(f"{'together':36} {sum(spent[title] for title in (*GUARDS, *RECORDS)) / total:7.2%}")
    print(f"{NORM:36} {spent[NORM] / total:7.2%}")
    print(f"{'completions to Parquet, elsewhere':36} {elsewhere / total:7.2%}")
    own, other = sum(spent[title] for title in RECORDS) / tokens, elsewhere / tokens
    print(
        f"{tokens / steps:.0f} tokens a step, each recorded in {own * 1e6:.2f} us, and {other * 1e6:.2f} us elsewhere\n"
    )


def processor_time(pid: int) -> float:
    """Seconds that another process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def clock() -> None:
    """Print how much longer a step of the demo is with records. The weights stay, so that all steps are alike."""
    times: dict[str, list[float]] = {title: [] for title in MODES}
    recording = {name: getattr(Recorder, name) for name in ("sampled", "step", "timed")}
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(config(folder, 10**4, lr=1e-12), quiet=True)
        result = TrainResult(0)
        for _ in range(WARMUP):
            trainer._take_step(result)
        trainer.recorder.flush()
        gc.collect()
        gc.freeze()  # a collection of everything comes once in 200 steps, and would be counted for one block alone
        draw = random.Random(0)
        for _ in range(ROUNDS):
            for title, (every, records) in draw.sample(list(MODES.items()), len(MODES)):
                trainer.recorder.completions_every = every
                for name, function in recording.items():
                    setattr(Recorder, name, function if records else lambda *_, **__: None)
                begun = time.perf_counter()
                for _ in range(BLOCK):
                    trainer._take_step(result)
                times[title].append((time.perf_counter() - begun) / BLOCK)
                trainer.recorder.flush()  # what a run waits for at a checkpoint: at most two steps
        trainer.close()
    gc.unfreeze()
    for name, function in recording.items():
        setattr(Recorder, name, function)
    first = times["no record"]
    print(f"on the clock, {ROUNDS} rounds of blocks of {BLOCK} steps (load {os.getloadavg()[0]:.1f} at the end):\n")
    for title, values in times.items():
        ratios = [value / beside - 1 for value, beside in zip(values, first, strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        error = 0.93 * (high - low) / len(ratios) ** 0.5  # of a median, by the spread of its quartiles
        print(f"{title:36} {median(values) * 1e3:6.2f} ms {middle:+7.2%} +- {error:.2%}")
    print()


def real_model() -> dict[str, Any]:
    """A model of the shape of Qwen3 with random weights that runs on a CPU, and the tokenizer of the embedded one."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from gruppo.weights.source import load_tokenizer

    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 12, "vocab_size": 16384}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    return {"model": Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)), "tokenizer": load_tokenizer("builtin")}


def slopes(steps: int) -> bool:
    """Print how memory and open files grow over a long run; True if neither does by more than the noise."""
    memory: list[float] = []
    files: list[float] = []
    killed = 0

    def look(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        nonlocal killed
        memory.append(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**10)
        files.append(len(os.listdir("/proc/self/fd")))
        if step % KILL_EVERY == 0:
            os.kill(trainer.scorer.worker_pids[0], signal.SIGKILL)
            killed += 1

    with tempfile.TemporaryDirectory() as folder:
        changes = {"rewards": "guards:length", "save_every": 50}
        GRPOTrainer(config(folder, steps, **changes), quiet=True, callbacks=[look]).train()
    print(f"{steps} steps, {killed} reward workers killed, {threading.active_count()} threads left")
    is_flat = True
    for title, unit, values in (("memory", "kB", memory), ("open files", "files", files)):
        # The first fifth fills caches.
        settled = values[len(values) // 5 :]
        slope, error = fit(settled)
        grew = slope * len(settled)
        is_within = slope <= 3 * error or grew < 0.01 * settled[0]
        is_flat = is_flat and is_within
        print(f"{title}: {settled[0]:.0f} -> {settled[-1]:.0f} {unit}, {slope:+.4f} +- {error:.4f} {unit} per step")
    print()
    return is_flat


def fit(values: list[float]) -> tuple[float, float]:
    """Slope of a line through the values, and its standard error."""
    middle, mean = (len(values) - 1) / 2, fmean(values)
    spread = sum((i - middle) ** 2 for i in range(len(values)))
    slope = sum((i - middle) * (value - mean) for i, value in enumerate(values)) / spread
    rest = sum((value - mean - slope * (i - middle)) ** 2 for i, value in enumerate(values))
    return slope, (rest / (len(values) - 2) / spread) ** 0.5


def config(folder: str, steps: int, **changes: Any) -> TrainConfig:
    options: dict[str, Any] = {"steps": steps, "output": f"{folder}/run", "eval_prompts": 0, "threads": 1, "lr": 1e-4}
    return TrainConfig(**options | {"save_every": 10**6} | changes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500, help="steps of the long run")
    steps = parser.parse_args().steps
    sys.path.insert(0, str(Path(__file__).parent))  # where the workers find the reward
    settle_allocator()
    recorder.WRITER_AFTER_S = -1.0  # as in a run that has lasted a while
    is_flat = slopes(steps)
    clock()
    spent = watch_all()
    shares(spent, WARMUP, 100, {}, completions_every=demo.PRESET["completions_every"])
    shares(spent, 1, 3, real_model(), prompts_per_step=4, max_new_tokens=64)
    return 0 if is_flat else 1


if __name__ == "__main__":
    sys.exit(main())
