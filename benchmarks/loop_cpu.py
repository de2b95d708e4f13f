"""The whole training loop against TRL's, on a CPU.

    benchmarks/setup_peers.sh .venv-bench
    .venv-bench/bin/python benchmarks/loop_cpu.py

How to read the figures, and those measured so far: docs/benchmarks.md.
"""

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median, quantiles
from time import perf_counter, process_time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # datasets and transformers look for a network; none is needed

import torch
import transformers
from datasets import Dataset
from timing import machine
from transformers import AutoTokenizer, PrinterCallback, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig
from trl import GRPOTrainer as TRLTrainer

from gruppo.reward import exact_match as gruppo_exact_match
from gruppo.task.builtin import builtin_config, builtin_model_path, builtin_tokenizer
from gruppo.task.order import prompt_indices
from gruppo.trainer import GRPOTrainer, TrainConfig

BLOCK = 5
"""Steps of one trainer before the other takes its turn."""
WARMUP = 10
"""First steps of each that are not timed."""
LEARNING_STEPS = 80
"""With at least so many steps both must have learnt."""
WINDOW = 20
"""Steps at each end over which the reward is averaged."""
LEARNING_RATE = 1e-4
SEED = 0
RESULTS = Path(__file__).parent / "results" / "loop_cpu.json"

STAGES = ("generation", "scoring", "loss + backward", "optimizer", "rest")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What both trainers do in one step."""

    name: str
    title: str
    model: str
    prompts: int
    group: int
    new_tokens: int
    gruppo_reward: str
    trl_reward: Callable[..., Any]
    goal: float | None
    """gruppo's steps per second over TRL's, at least; None: shown, not judged."""
    gain: float
    """How much the mean reward must at least have risen between the two windows."""


@dataclass(frozen=True, slots=True)
class Times:
    """The two clocks at one moment."""

    wall: float = field(default_factory=perf_counter)
    cpu: float = field(default_factory=process_time)

    def passed(self) -> tuple[float, float]:
        """Seconds since then, by each clock."""
        return perf_counter() - self.wall, process_time() - self.cpu


@dataclass(slots=True)
class Record:
    """What one trainer did, per step."""

    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    lengths: list[float] = field(default_factory=list)
    distinct: list[int] = field(default_factory=list)
    """Different sequences of the step."""
    live: list[int] = field(default_factory=list)
    """Sequences whose advantage is not 0."""

    def add(self, took: tuple[float, float], stages: dict[str, float], reward: float, length: float) -> None:
        seconds, cpu_seconds = took
        self.seconds.append(seconds)
        self.cpu_seconds.append(cpu_seconds)
        self.stages.append(stages | {"rest": seconds - sum(stages.values())})
        self.rewards.append(reward)
        self.lengths.append(length)


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The timed steps of one trainer."""

    steps_per_second: float
    """Of the median step."""
    median_ms: float
    q1_ms: float
    q3_ms: float
    cpu_ms: float
    """Median of the processor time: less moved by other load than the clock on the wall."""
    stages_ms: dict[str, float]
    """Median of each stage; medians need not add up to the median step."""
    first_reward: float
    last_reward: float
    mean_length: float


def exact_match(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float | None]:
    """gruppo's built-in reward under a name, which TRL asks for."""
    return gruppo_exact_match(completions, answer=answer)


def even_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Even token ids over the 32 possible: a random model has 0.5 of them, and ending early does not pay."""
    return [sum(token % 2 == 0 for token in ids) / 32 for ids in completion_ids]


even_tokens.isolated = False  # gruppo would run it in worker processes; TRL runs it in its own

# --- the two shapes ---------------------------------------------------------------------------------------------------


def make_shapes(folder: Path) -> list[Shape]:
    long_model = save_random_model(folder / "random")
    return [
        Shape(
            name="carries",
            title="embedded model and task, 32 prompts x 8 completions x 4 tokens",
            model=str(builtin_model_path()),
            prompts=32,
            group=8,
            new_tokens=4,
            gruppo_reward="exact_match",
            trl_reward=exact_match,
            goal=4.0,
            gain=0.1,
        ),
        Shape(
            name="long",
            title="random model, vocabulary 1024, 8 prompts x 8 completions x 32 tokens",
            model=long_model,
            prompts=8,
            group=8,
            new_tokens=32,
            gruppo_reward="loop_cpu:even_tokens",
            trl_reward=even_tokens,
            goal=None,
            gain=0.01,
        ),
    ]


def save_random_model(folder: Path) -> str:
    """The embedded architecture with a vocabulary of 1024, so that the end token is rare, and random weights."""
    tokenizer = builtin_tokenizer()
    tokenizer.add_tokens([f"<{number}>" for number in range(len(tokenizer), 1024)])
    config = builtin_config()
    config.vocab_size = len(tokenizer)
    torch.manual_seed(SEED)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


# --- the two trainers -------------------------------------------------------------------------------------------------


class Stopwatch:
    """Seconds spent in chosen methods, since the last `take`."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time one object's method from now on."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[name] += perf_counter() - start

        setattr(owner, method, timed)

    def take(self) -> dict[str, float]:
        seconds, self.seconds = self.seconds, defaultdict(float)
        return seconds


class Gruppo:
    """gruppo's trainer, with everything that is not a step switched off."""

    def __init__(self, shape: Shape, steps: int, threads: int, folder: Path) -> None:
        config = TrainConfig(
            model=shape.model,
            rewards=(shape.gruppo_reward,),
            prompts_per_step=shape.prompts,
            group_size=shape.group,
            max_new_tokens=shape.new_tokens,
            steps=steps,
            lr=LEARNING_RATE,
            eval_prompts=0,
            completions_every=0,
            tensorboard=False,
            threads=threads,
            seed=SEED,
            output=str(folder / f"gruppo-{shape.name}"),
        )
        self.trainer = GRPOTrainer(config, quiet=True)
        self.watch = Stopwatch()
        self.watch.watch(self.trainer.model, "run", "loss + backward")
        self.watch.watch(self.trainer.model, "clip_grad_and_step", "optimizer")
        self.record = Record()

    def rows(self, steps: int) -> list[dict[str, Any]]:
        """The prompts of all steps, in the order in which `step` takes them."""
        config, prompts = self.trainer.config, self.trainer.prompts.train.prompts
        taken = (prompt_indices(len(prompts), i, config.prompts_per_step, config.seed) for i in range(steps))
        return [{"prompt": prompts[i].source, **prompts[i].columns} for indices in taken for i in indices]

    def step(self) -> None:
        self.trainer.watch.take()
        start = Times()
        metrics = self.trainer.step()
        took = start.passed()
        stages = {"generation": self.trainer.watch.seconds["sample"], "scoring": self.trainer.watch.seconds["reward"]}
        self.record.add(took, stages | self.watch.take(), metrics["reward/mean"], metrics["completion/len_mean"])
        rollouts = [rollout for group in self.trainer.kept for rollout in group.rollouts]
        self.record.distinct.append(len({(r.trajectory.prompt_ids, r.trajectory.tokens) for r in rollouts}))
        self.record.live.append(sum(r.advantage != 0 for r in rollouts))


class TRL(TrainerCallback):
    """TRL's trainer. Its own `train()` runs; after every `BLOCK` of its steps the other trainer gets its turn."""

    def __init__(
        self, shape: Shape, rows: list[dict[str, Any]], steps: int, other: Callable[[], None], folder: Path
    ) -> None:
        config = GRPOConfig(
            output_dir=str(folder / f"trl-{shape.name}"),
            model_init_kwargs={"dtype": "float32"},
            max_steps=steps,
            per_device_train_batch_size=shape.prompts * shape.group,
            num_generations=shape.group,
            max_completion_length=shape.new_tokens,
            gradient_accumulation_steps=1,
            num_iterations=1,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            loss_type="grpo",
            beta=0.0,
            epsilon=0.2,
            temperature=1.0,
            scale_rewards="group",
            disable_dropout=True,
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            use_vllm=False,
            dataloader_pin_memory=False,
            shuffle_dataset=False,  # the rows come in the order in which gruppo takes them
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            seed=SEED,
        )
        self.trainer = TRLTrainer(
            model=shape.model,
            reward_funcs=shape.trl_reward,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=AutoTokenizer.from_pretrained(shape.model),
            callbacks=[self],
        )
        self.trainer.remove_callback(PrinterCallback)
        self.other = other
        self.watch = Stopwatch()
        for method in ("_generate", "_generate_and_score_completions", "_prepare_inputs", "training_step"):
            self.watch.watch(self.trainer, method, method)
        self.watch.watch(self.trainer.accelerator, "clip_grad_norm_", "optimizer")
        self.record = Record()

    def train(self) -> None:
        self.trainer.train()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.watch.watch(self.trainer.optimizer, "step", "optimizer")
        self.watch.take()
        self.start = Times()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A step lasts from the end of this method to its next call: the data loader and all callbacks count.
        took = self.start.passed()
        spent = self.watch.take()
        stages = {
            "generation": spent["_generate"],
            "scoring": spent["_generate_and_score_completions"] - spent["_generate"],
            "loss + backward": spent["training_step"] - spent["_prepare_inputs"],
            "optimizer": spent["optimizer"],
        }
        metrics = self.trainer._metrics["train"]
        self.record.add(took, stages, metrics["reward"][-1], metrics["completions/mean_length"][-1])
        if state.global_step % BLOCK == 0:
            for _ in range(BLOCK):
                self.other()
        self.start = Times()


def run(shape: Shape, steps: int, threads: int, folder: Path) -> dict[str, Record]:
    """Both trainers through the same prompts, in alternating blocks of steps."""
    gruppo = Gruppo(shape, steps, threads, folder)
    try:
        trl = TRL(shape, gruppo.rows(steps), steps, gruppo.step, folder)
        trl.train()
    finally:
        gruppo.trainer.close()
    assert len(gruppo.record.seconds) == len(trl.record.seconds) == steps
    return {"gruppo": gruppo.record, "TRL": trl.record}


# --- figures ----------------------------------------------------------------------------------------------------------


def summarise(record: Record) -> Summary:
    q1, middle, q3 = quantiles(record.seconds[WARMUP:], n=4, method="inclusive")
    window = min(WINDOW, len(record.rewards) // 2)
    return Summary(
        steps_per_second=1 / middle,
        median_ms=middle * 1e3,
        q1_ms=q1 * 1e3,
        q3_ms=q3 * 1e3,
        cpu_ms=median(record.cpu_seconds[WARMUP:]) * 1e3,
        stages_ms={name: median(stages[name] for stages in record.stages[WARMUP:]) * 1e3 for name in STAGES},
        first_reward=fmean(record.rewards[:window]),
        last_reward=fmean(record.rewards[-window:]),
        mean_length=fmean(record.lengths),
    )


def block_ratios(records: dict[str, Record]) -> list[float]:
    """TRL's time over gruppo's, for each pair of neighbouring blocks."""
    starts = range(WARMUP, len(records["gruppo"].seconds), BLOCK)
    ours, theirs = ([sum(records[name].seconds[i : i + BLOCK]) for i in starts] for name in ("gruppo", "TRL"))
    return [b / a for a, b in zip(ours, theirs, strict=True)]


def tables(summaries: dict[str, Summary]) -> str:
    lines = ["          steps/s   ms per step   quartiles ms        CPU ms   reward, first and last steps   tokens"]
    for name, s in summaries.items():
        lines.append(
            f"{name:8}  {s.steps_per_second:7.2f}   {s.median_ms:11.1f}   {s.q1_ms:6.1f} - {s.q3_ms:6.1f}   "
            f"{s.cpu_ms:9.1f}   {s.first_reward:11.3f} -> {s.last_reward:.3f}          {s.mean_length:8.2f}"
        )
    lines += ["", "ms of it  " + "".join(f"{name:>17}" for name in STAGES)]
    for name, s in summaries.items():
        lines.append(f"{name:8}  " + "".join(f"{s.stages_ms[stage]:17.2f}" for stage in STAGES))
    return "\n".join(lines)


def verdicts(shape: Shape, ratio: float, summaries: dict[str, Summary], steps: int) -> list[tuple[bool, str]]:
    """Is each goal met, and the sentence that says so."""
    goals = []
    if shape.goal is not None:
        text = f"{shape.name}: {ratio:.2f} times TRL's steps per second, goal {shape.goal:g}"
        goals.append((ratio >= shape.goal, text))
    if steps >= LEARNING_STEPS:
        for name, s in summaries.items():
            gain = s.last_reward - s.first_reward
            text = f"{shape.name}: {name}'s reward rose by {gain:.3f}, goal {shape.gain:g}"
            goals.append((gain >= shape.gain, text))
    return goals


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=f"""
Trains the same tiny model on the same prompts with gruppo's GRPOTrainer and with TRL's, and compares their steps per
second. Both run in this process and take turns after every {BLOCK} steps, so that other load on the machine falls on
both alike; the first {WARMUP} steps of each are not timed. Two shapes:

  carries  the embedded model on its "dropped carries" task, 32 prompts x 8 completions x 4 tokens
  long     a random model of its architecture that writes 32 tokens, 8 x 8 x 32; for information

Equal: weights, prompts of each step, group size, token limit, loss (grpo, clip range 0.2, no KL), one AdamW update per
batch at {LEARNING_RATE:g}, gradient clipped at norm 1, float32, reward function, threads. Checkpoints, logs and
evaluation are off in both.

"steps/s" is that of the median step; "CPU ms" is the processor time of the median step, which other load moves less.
"generation" to "rest" are medians of the stages of a step. Exit status 1: gruppo takes fewer than 4 times TRL's steps
per second in `carries`, or, with {LEARNING_STEPS} steps or more, one of the two trainers has not learnt.
""",
        epilog="Example: loop_cpu.py --steps 160 --threads 2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=LEARNING_STEPS,
        help=f"steps of each trainer, a multiple of {BLOCK} (default: {LEARNING_STEPS}, about three minutes)",
    )
    parser.add_argument("--shape", choices=("carries", "long"), help="only this shape (default: both)")
    parser.add_argument("--threads", type=int, default=1, help="threads torch may use (default: 1)")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="where the figures go as JSON (default: %(default)s)"
    )
    arguments = parser.parse_args()
    least = WARMUP + 2 * BLOCK
    if arguments.steps < least or arguments.steps % BLOCK:
        parser.error(f"--steps must be a multiple of {BLOCK} and at least {least}, got {arguments.steps}")
    if arguments.threads < 1:
        parser.error(f"--threads must be at least 1, got {arguments.threads}")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module="transformers|trl|torch")

    about = machine() | {name: version(name) for name in ("gruppo", "trl", "transformers")}
    print(f"{arguments.steps} steps of each trainer, {WARMUP} of them not timed")
    print(", ".join(f"{key} {value}" for key, value in about.items()), end="\n\n")
    results, outcome = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for shape in make_shapes(Path(folder)):
            if arguments.shape not in (None, shape.name):
                continue
            records = run(shape, arguments.steps, arguments.threads, Path(folder))
            summaries = {name: summarise(record) for name, record in records.items()}
            ratio = summaries["TRL"].median_ms / summaries["gruppo"].median_ms
            ratios = block_ratios(records)
            print(f"{shape.name}: {shape.title}\n\n{tables(summaries)}\n")
            ours = records["gruppo"]
            work = {
                "sequences": shape.prompts * shape.group,
                "distinct": round(fmean(ours.distinct[WARMUP:])),
                "with_advantage": round(fmean(ours.live[WARMUP:])),
            }
            cpu_ratio = summaries["TRL"].cpu_ms / summaries["gruppo"].cpu_ms
            print(
                f"ratio {ratio:.2f}, of pairs of blocks {min(ratios):.2f} to {max(ratios):.2f}, of CPU {cpu_ratio:.2f}"
            )
            print("of {sequences} sequences {distinct} differ and {with_advantage} have an advantage\n".format(**work))
            outcome += verdicts(shape, ratio, summaries, arguments.steps)
            results[shape.name] = {
                "shape": shape.title,
                "ratio": round(ratio, 3),
                "cpu_ratio": round(cpu_ratio, 3),
                "ratio_of_blocks": [round(r, 3) for r in ratios],
                "work": work,
                **{name: _rounded(asdict(s)) for name, s in summaries.items()},
                "rewards": {name: [round(r, 4) for r in record.rewards] for name, record in records.items()},
            }
    for is_met, sentence in outcome:
        print(f"{'met ' if is_met else 'MISSED'}  {sentence}")
    record = {
        "machine": about,
        "steps": arguments.steps,
        "warmup": WARMUP,
        **results,
        "goals": [{"met": is_met, "goal": sentence} for is_met, sentence in outcome],
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    return 0 if all(is_met for is_met, _ in outcome) else 1


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return round(value, 4) if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())
