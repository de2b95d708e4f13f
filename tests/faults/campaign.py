"""Campaign: runs that are killed and stopped again and again, and must end in the bits of the undisturbed run.

    python tests/faults/campaign.py [--kills 200] [--terms 50] [--runs 20] [--seed 0]

A life of a run is a process. Each gets one fault: SIGKILL or SIGTERM, half of them at a random moment (while it loads,
samples, trains, evaluates or saves), half at a random site of `gruppo.faults`. After it the user does what the tool
prints: the command of "go on with: ..." after a SIGTERM; after a SIGKILL the same command again, and where that one is
refused, the command which the refusal names. The last life of a run is left alone.

Lives are forks of a process that has imported everything; the seed fixes all faults, but not what a random moment hits.
"""

import argparse
import hashlib
import json
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet

from gruppo.task.carries import carries_rows

sys.path.append(str(Path(__file__).parents[1]))
from warm_process import WarmProcess, gruppo

SAVE_EVERY = 4
EVAL_EVERY = 6
OPTIONS: dict[str, Any] = {
    "prompts_per_step": 4,
    "group_size": 4,
    "max_new_tokens": 4,
    "steps": 60,
    "save_every": SAVE_EVERY,
    "lr": 1e-3,
    "eval_prompts": 8,
    "eval_every": EVAL_EVERY,
    "completions_every": 5,
    "tensorboard": False,
    "threads": 1,
}
TURNS: dict[str, Any] = {
    "model": "builtin-chat",
    "data": "builtin:calculator",
    "tools": "gruppo.task.calculator:multiply",
    "max_new_tokens": 30,
    "max_turns": 3,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "full weights": {},
    "LoRA": {"lora": True, "lora_rank": 4, "beta": 0.01},
    "KL reference": {"beta": 0.02, "ref_every": 3, "ref_mix": 0.5},
    "epochs": {"epochs_per_batch": 2, "minibatches": 2, "lr_schedule": "cosine", "warmup_steps": 3},
    "dynamic": {"dynamic_sampling": 2, "retire_solved": 1},
    "bfloat16": {"dtype": "bfloat16"},
    "keep 1": {"keep_checkpoints": 1},
    "workers": {
        "rewards": "campaign_rewards:short_and_right",
        "kl_in_reward": 0.01,
        "kl_target": 0.1,
        "entropy_target": 0.5,
        "entropy_coef": 0.001,
    },
    "best": {"keep_best": True, "patience": 9},
    "ahead by 1": {"max_staleness": 1, "dynamic_sampling": 2, "retire_solved": 1},
    "ahead by 2": {"max_staleness": 2, "epochs_per_batch": 2, "minibatches": 2},
    "turns": TURNS,
    "turns ahead": TURNS | {"max_staleness": 1, "dynamic_sampling": 2},
}


@dataclass
class Tally:
    """What was done to the runs of a variant, and what came of it."""

    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    """Everything that went wrong, in words."""


@dataclass
class Campaign:
    """Runs in a folder, disturbed by the draws of `rng`."""

    folder: Path
    rng: random.Random
    tallies: dict[str, Tally] = field(default_factory=dict)
    undisturbed: dict[str, tuple[dict[str, Any], float]] = field(default_factory=dict)
    """By variant: what the run made, and how long a life takes to its second checkpoint."""
    lives: int = 0

    def __post_init__(self) -> None:
        self.data = self.folder / "sums.jsonl"
        self.data.write_text("".join(json.dumps(row) + "\n" for row in carries_rows("train")[::60]))
        self.start(["--version"]).wait()  # the imports, which would count as the first life's

    def words(self, variant: str, run: Path) -> list[str]:
        """The command of the user."""
        found = ["train"]
        for name, value in (OPTIONS | {"data": self.data, "output": run} | VARIANTS[variant]).items():
            flag = name.replace("_", "-")
            found += (
                [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
            )
        return found

    def start(self, words: list[str], *plan: tuple[str, int, str]) -> WarmProcess:
        self.lives += 1
        return WarmProcess(self.folder / f"life-{self.lives}.log", gruppo, words, *plan)

    def expected(self, variant: str) -> tuple[dict[str, Any], float]:
        """The undisturbed run of a variant, made once."""
        if variant not in self.undisturbed:
            run = self.folder / f"undisturbed-{len(self.undisturbed)}"
            begun, process = time.monotonic(), self.start(self.words(variant, run))
            process.wait_until((run / "checkpoints" / f"step-{2 * SAVE_EVERY:06d}").exists)
            seconds = time.monotonic() - begun
            assert process.wait(600) == 0, process.output
            process.close()
            self.undisturbed[variant] = product(run), seconds
        return self.undisturbed[variant]

    def disturb(self, variant: str, kinds: Sequence[str]) -> int:
        """A run with these faults in this order; how many of them struck before it was done."""
        tally = self.tallies.setdefault(variant, Tally())
        made, seconds = self.expected(variant)
        run = self.folder / "run"
        shutil.rmtree(run, ignore_errors=True)
        first = self.words(variant, run)
        words, struck, is_over = first, 0, False
        for kind in kinds:
            words, has_struck, is_over = self.life(tally, run, first, words, kind, seconds)
            struck += has_struck
            if is_over:
                break
        if not is_over:
            self.life(tally, run, first, words, "", seconds)
        tally.counts["runs"] += 1
        differing = [name for name, value in product(run).items() if value != made[name]]
        if differing:
            tally.faults.append(f"{run.name}: {', '.join(differing)} are not those of the undisturbed run")
        else:
            tally.counts["equal"] += 1
        return struck

    def life(
        self, tally: Tally, run: Path, first: list[str], words: list[str], kind: str, seconds: float
    ) -> tuple[list[str], bool, bool]:
        """One process with one fault: the command to go on with, whether the fault struck, whether the run is done."""
        saved, at = newest(run), recorded(run)
        if at - saved > SAVE_EVERY:
            tally.faults.append(f"{at - saved} steps were lost")
        tally.counts["lost"] += max(at - saved, 0)
        site, delay = self.draw(saved, seconds) if kind else (None, None)
        plan = [(*site, kind)] if site else []
        process = self.start(words, *plan)
        children: list[psutil.Process] = []
        if delay is not None:
            end = time.monotonic() + delay
            while time.monotonic() < end and recorded(run) < saved + 2 * SAVE_EVERY and process.process.is_alive():
                time.sleep(0.002)
            children = descendants(process)
            process.send(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        code, output = process.wait(600), process.output
        process.close()
        printed = re.findall(r"gruppo (resume \S+?)[`,.]*(?:\s|$)", output)
        if code == 2 and words == first and printed:  # refused, with the command to use
            return self.life(tally, run, first, printed[-1].split(), kind, seconds)
        if gone := [child for child in children if not is_gone(child, 20.0)]:
            tally.faults.append(f"{len(gone)} processes outlived their trainer")
        if code == 0:
            return words, False, True
        tally.counts[kind] += 1
        tally.counts["early"] += saved == 0
        tally.counts["unpruned"] += bool(site) and site[0] == "committed" and kind == "kill"
        if kind == "kill" and code == -signal.SIGKILL:
            return words, True, False
        if kind == "term" and code == 75 and printed:
            tally.counts["75"] += 1
            return printed[-1].split(), True, False
        if kind == "term" and code in (128 + signal.SIGTERM, -signal.SIGTERM):  # not yet, or no longer, training
            return words, True, False
        tally.faults.append(f"`{' '.join(words[:2])}` ended with {code} after {kind or 'no fault'}: {output[-2000:]}")
        return words, True, True

    def draw(self, saved: int, seconds: float) -> tuple[tuple[str, int] | None, float | None]:
        """A site of a step, or a delay in seconds."""
        rng = self.rng
        if rng.random() < 0.5:
            return None, rng.uniform(0.0, seconds)
        following = saved + SAVE_EVERY - saved % SAVE_EVERY
        evaluated = saved + EVAL_EVERY - saved % EVAL_EVERY
        taken = rng.randint(saved, following - 1)
        sites = [
            *((stage, taken) for stage in ("sample", "reward", "train")),
            *((stage, taken + 1) for stage in ("write", "recorded")),
            ("checkpoint", following),
            ("filled", following),
            ("committed", following),
            *([("eval", evaluated)] if evaluated <= following else []),
        ]
        return rng.choice(sites), None


def product(run: Path) -> dict[str, Any]:
    """Everything that two runs must have in common, by name."""
    last = run / "checkpoints" / f"step-{newest(run):06d}"
    files = [*sorted((run / "model").glob("*.safetensors")), *sorted(last.glob("*.safetensors")), last / "trainer.json"]
    completions = sorted((run / "completions").iterdir())
    best = sorted((run / "best").glob("*.safetensors"))
    return {
        "metrics.jsonl": (run / "metrics.jsonl").read_bytes(),
        "no step twice": recorded_steps(run) == list(range(newest(run) + 1)),
        "status.json": json.loads((run / "status.json").read_text()),
        "weights and state": {str(p.relative_to(run)): digest(p) for p in (*files, *best)},
        "completions": {p.name: pyarrow.parquet.read_table(p).to_pylist() for p in completions},
        "leftovers": sorted(str(p.relative_to(run)) for p in run.rglob("*") if ".tmp" in p.name or p.name == "lock"),
    }


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def recorded_steps(run: Path) -> list[int]:
    """Steps of metrics.jsonl, without a last line that is cut off."""
    try:
        lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    except FileNotFoundError:  # none yet, or removed by a run that starts over
        lines = []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def recorded(run: Path) -> int:
    return max(recorded_steps(run), default=0)


def newest(run: Path) -> int:
    """Step of the newest checkpoint; 0 for none."""
    return max((int(p.name.removeprefix("step-")) for p in (run / "checkpoints").glob("step-*")), default=0)


def descendants(process: WarmProcess) -> list[psutil.Process]:
    try:
        return psutil.Process(process.process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def is_gone(process: psutil.Process, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:  # between the two
            return True
        time.sleep(0.05)
    return False


COLUMNS = {
    "runs": "runs",
    "kill": "SIGKILL",
    "term": "SIGTERM",
    "75": "saved, exit 75",
    "early": "before a checkpoint",
    "unpruned": "commit | prune",
    "lost": "steps repeated",
    "equal": "bitwise equal",
}


def table(tallies: dict[str, Tally]) -> str:
    """A line for each variant, and their sum."""
    total: Counter[str] = sum((tally.counts for tally in tallies.values()), Counter())
    rows = [*((name, tally.counts) for name, tally in tallies.items()), ("all", total)]
    lines = [f"{'variant':14}" + "".join(f"  {title}" for title in COLUMNS.values())]
    lines += [
        f"{name:14}" + "".join(f"  {counts[key]:>{len(COLUMNS[key])}}" for key in COLUMNS) for name, counts in rows
    ]
    return "\n".join(lines)


def campaign(folder: Path, *, kills: int, terms: int, runs: int, seed: int) -> dict[str, Tally]:
    """Disturb at least so many runs with so many faults in all; the variants take turns."""
    work = Campaign(folder, random.Random(seed))
    left = Counter(kill=kills, term=terms)
    number = 0
    while number < runs or left.total():
        share = max(runs - number, 1)
        kinds = [kind for kind, count in left.items() for _ in range(-(-count // share))]
        work.rng.shuffle(kinds)
        variant = list(VARIANTS)[number % len(VARIANTS)]
        struck = work.disturb(variant, kinds)
        left -= Counter(kinds[:struck])  # a Counter keeps what is positive
        number += 1
        counts = work.tallies[variant].counts
        print(
            f"run {number}: {variant}, {struck} faults; in all equal {counts['equal']} of {counts['runs']}", flush=True
        )
        if work.tallies[variant].faults:
            print(*work.tallies[variant].faults, sep="\n", flush=True)
    return work.tallies


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"kills": 200, "terms": 50, "runs": 20, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tallies = campaign(Path(folder), **vars(parser.parse_args()))
    print(table(tallies))
    print(f"{time.monotonic() - start:.0f} s")
    faults = [fault for tally in tallies.values() for fault in tally.faults]
    print(*faults or ["every run went on by the command that was printed, and ended in the same bits"], sep="\n")
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
