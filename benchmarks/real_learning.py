"""SmolLM2 learns with gruppo and with TRL's GRPOTrainer on a GPU: held-out accuracy over steps and over time.

    PYTHONPATH=src python benchmarks/real_learning.py run gruppo sums --out gruppo-sums.json
    PYTHONPATH=src python benchmarks/real_learning.py run trl sums --out trl-sums.json
    PYTHONPATH=src python benchmarks/real_learning.py draw *.json --picture docs/figures/against_trl.png

Both train all weights of SmolLM2-135M-Instruct on the same prompts in the same order with the same reward, loss,
learning rate and number of steps; TRL generates with transformers, as without vLLM it does, and has Liger's kernels
where they are installed. Held-out answers are greedy, by the same plain transformers model for both, and no part of the
time. docs/benchmarks.md has the figures, and what was made equal.
"""

import argparse
import gc
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS, GROUP, NEW_TOKENS, LR = 32, 16, 32, 5e-6
HELD_OUT = 512

KINDS = {
    "animal": "tiger horse rabbit monkey elephant sheep donkey goat wolf bear lion zebra camel pig",
    "fruit": "apple lemon banana cherry peach pear mango grape melon plum pineapple strawberry",
    "color": "red blue green yellow purple pink brown black white gray",
    "vehicle": "car bus train bicycle truck boat airplane ship motorcycle tractor",
    "tool": "hammer saw drill wrench axe shovel screwdriver pliers",
    "metal": "iron gold silver copper tin steel lead zinc",
    "vegetable": "carrot potato onion cabbage spinach broccoli cucumber lettuce",
    "profession": "doctor teacher lawyer farmer nurse baker pilot carpenter",
}
NUM_HELD_OUT_WORDS = 2
"""Words of each kind that no training prompt has."""

# --- the two tasks ----------------------------------------------------------------------------------------------------


def sums(held_out: bool) -> list[dict[str, str]]:
    """`builtin:sums`: sums in words, of numbers from 10 to 99."""
    from gruppo.task.carries import sums_rows

    rows = sums_rows("heldout" if held_out else "train")
    return [{"prompt": row["prompt"][0]["content"], "answer": row["answer"]} for row in rows]


def kinds(held_out: bool) -> list[dict[str, str]]:
    """Which of three words is an animal, a fruit, ...: in held-out rows all three words are new."""
    words = {kind: text.split() for kind, text in KINDS.items()}
    words = {kind: w[:NUM_HELD_OUT_WORDS] if held_out else w[NUM_HELD_OUT_WORDS:] for kind, w in words.items()}
    draw, rows = random.Random(int(held_out)), {}
    while len(rows) < (HELD_OUT if held_out else 2500):
        kind, *others = draw.sample(sorted(words), 3)
        answer = draw.choice(words[kind])
        choice = [answer, *(draw.choice(words[other]) for other in others)]
        draw.shuffle(choice)
        article = "an" if kind[0] in "aeiou" else "a"
        prompt = f"Which one is {article} {kind}: {', '.join(choice)}? Answer with that word only."
        rows[prompt] = {"prompt": prompt, "answer": answer}
    return list(rows.values())


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]


def last_number(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the last number of the text is the answer."""
    found = [re.findall(r"\d+", text_of(each)) for each in completions]
    return [float(bool(f) and f[-1] == gold) for f, gold in zip(found, answer, strict=True)]


def last_word(completions: Sequence[Any], answer: Sequence[str], **_: Any) -> list[float]:
    """1 where the last word of the text is the answer."""
    found = [re.findall(r"[a-z]+", text_of(each).lower()) for each in completions]
    return [float(bool(f) and f[-1] == gold) for f, gold in zip(found, answer, strict=True)]


last_number.isolated = last_word.isolated = False  # in this process, as TRL calls it
TASKS: dict[str, tuple[Callable[[bool], list[dict[str, str]]], Callable[..., list[float]]]] = {
    "sums": (sums, last_number),
    "kinds": (kinds, last_word),
}

# --- held-out accuracy ------------------------------------------------------------------------------------------------


class Judge:
    """Greedy held-out accuracy of weights, by a plain transformers model that they are copied into."""

    def __init__(self, folder: str, task: str, device: str, num: int) -> None:
        rows, self.reward = TASKS[task][0](True)[:num], TASKS[task][1]
        self.tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self.tokenizer.pad_token = self.tokenizer.pad_token or self.tokenizer.eos_token
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
        texts = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": row["prompt"]}], add_generation_prompt=True, tokenize=False
            )
            for row in rows
        ]
        self.inputs = self.tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False).to(device)
        self.answers = [row["answer"] for row in rows]

    @torch.no_grad()
    def accuracy(self, trained: torch.nn.Module) -> float:
        own = dict(self.model.named_parameters())
        for name, value in trained.named_parameters():
            own[name].copy_(value)
        out = self.model.generate(
            **self.inputs, max_new_tokens=NEW_TOKENS, do_sample=False, top_p=None, temperature=None
        )
        texts = self.tokenizer.batch_decode(out[:, self.inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        return statistics.fmean(self.reward(texts, answer=self.answers))


# --- the two trainers -------------------------------------------------------------------------------------------------


def gruppo_steps(
    folder: str, task: str, seed: int, steps: int, device: str, at: Callable[[int, float, Any], None], layout: str
) -> dict[str, list[float]]:
    """Train; `at` hears of each step, its seconds and the model. Returns seconds of each stage."""
    from gruppo.trainer import GRPOTrainer, TrainConfig

    stages: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as output:
        config = TrainConfig(
            model=folder, chat=True, prompts_per_step=PROMPTS, group_size=GROUP, max_new_tokens=NEW_TOKENS, steps=steps,
            lr=LR, loss="grpo", clip_range=0.2, beta=0.0, eval_prompts=0, completions_every=0, tensorboard=False,
            save_every=10**6, seed=seed, layout=layout, dtype="bfloat16", output=f"{output}/run",
        )  # fmt: skip
        rows, reward = TASKS[task][0](False), TASKS[task][1]
        trainer = GRPOTrainer(config, rewards=[reward], data=rows, quiet=True)
        try:
            at(0, 0.0, trainer.model.model)
            for number in range(1, steps + 1):
                trainer.watch.take()
                started = time.perf_counter()
                trainer.step()
                wait(device)
                seconds = time.perf_counter() - started
                for name, value in trainer.watch.seconds.items():
                    stages.setdefault(name, []).append(value)
                at(number, seconds, trainer.model.model)
        finally:
            trainer.close()
    return stages


def order(task: str, seed: int, steps: int) -> list[dict[str, str]]:
    """The training rows as gruppo's steps take them."""
    from gruppo.task.order import prompt_indices

    rows = TASKS[task][0](False)
    return [rows[i] for step in range(steps) for i in prompt_indices(len(rows), step, PROMPTS, seed)]


def trl_steps(
    folder: str, task: str, seed: int, steps: int, device: str, at: Callable[[int, float, Any], None]
) -> dict[str, list[float]]:
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    try:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        if device != "cpu":
            apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)
    except ImportError:
        pass
    stages: dict[str, list[float]] = {"sample": []}

    class Clock(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            at(0, 0.0, trainer.model)
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wait(device)
            at(state.global_step, time.perf_counter() - self.started, trainer.model)
            self.started = time.perf_counter()

    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, model_init_kwargs={"dtype": "float32"}, max_steps=steps,
            per_device_train_batch_size=PROMPTS * GROUP, num_generations=GROUP, max_completion_length=NEW_TOKENS,
            gradient_accumulation_steps=1, num_iterations=1, learning_rate=LR, lr_scheduler_type="constant",
            loss_type="grpo", beta=0.0, epsilon=0.2, temperature=1.0, scale_rewards="group", disable_dropout=True,
            gradient_checkpointing=False, bf16=True, use_cpu=device == "cpu", use_vllm=False, shuffle_dataset=False,
            report_to="none", logging_strategy="no", save_strategy="no", disable_tqdm=True, seed=seed,
        )  # fmt: skip
        rows = [
            {"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]}
            for row in order(task, seed, steps)
        ]
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=TASKS[task][1],
            args=config,
            train_dataset=Dataset(InMemoryTable.from_pylist(rows), fingerprint=f"{task}-{seed}"),  # hashes nothing
            processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
            callbacks=[Clock()],
        )
        trainer.remove_callback(PrinterCallback)
        generate = trainer._generate

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return generate(*args, **options)
            finally:
                stages["sample"].append(time.perf_counter() - started)

        trainer._generate = timed
        trainer.train()
    return stages


def wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def run(given: argparse.Namespace) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    judge = Judge(given.model, given.task, device, given.held_out)
    runs: list[dict[str, Any]] = []
    for seed in given.seeds:
        seconds: list[float] = []
        curve: list[tuple[int, float]] = []

        def at(step: int, took: float, model: Any, seconds: Any = seconds, curve: Any = curve) -> None:
            if step:
                seconds.append(took)
            if step % given.every == 0 or step == given.steps:
                curve.append((step, judge.accuracy(model)))

        started = time.perf_counter()
        options = (given.model, given.task, seed, given.steps, device, at)
        stages = trl_steps(*options) if given.trainer == "trl" else gruppo_steps(*options, given.layout)
        medians = {name: statistics.median(values) for name, values in stages.items()}
        runs.append({"seed": seed, "seconds": seconds, "curve": curve, "stages": medians})
        print(
            f"{given.trainer} {given.task} seed {seed}: held-out {' '.join(f'{a:.3f}' for _, a in curve)}; "
            f"{sum(seconds):.1f} s of steps, first {seconds[0]:.1f}, median {statistics.median(seconds):.3f}; "
            f"{ {name: round(value, 3) for name, value in medians.items()} }; "
            f"{time.perf_counter() - started:.0f} s in all",
            flush=True,
        )
        record = {"trainer": given.trainer, "task": given.task, "layout": given.layout, "runs": runs}
        given.out.write_text(json.dumps(record))
        gc.collect()


# --- the picture ------------------------------------------------------------------------------------------------------


def points(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One for each evaluation: the step, the seconds of training until then, the accuracy."""
    for each in record["runs"]:
        passed = [0.0]
        for seconds in each["seconds"]:
            passed.append(passed[-1] + seconds)
        for step, accuracy in each["curve"]:
            place = {"trainer": {"trl": "TRL 1.16"}.get(record["trainer"], record["trainer"]), "seed": each["seed"]}
            yield {"task": record["task"], **place, "step": step, "seconds": passed[step], "accuracy": accuracy}


def draw(given: argparse.Namespace) -> None:
    import altair as alt

    data = [point for file in given.files for point in points(json.loads(file.read_text()))]
    titles = {"sums": "sums in words", "kinds": "which word is a fruit, a tool, ..."}
    rows = []
    for task in dict.fromkeys(point["task"] for point in data):
        chosen = alt.Data(values=[point for point in data if point["task"] == task])
        panels = []
        for x, title in (("step", "steps"), ("seconds", "seconds of training")):
            panels.append(
                alt.Chart(chosen, width=330, height=220, title=titles[task])
                .mark_line(strokeWidth=2, opacity=0.85)
                .encode(
                    x=alt.X(f"{x}:Q", title=title),
                    y=alt.Y("accuracy:Q", title="held-out accuracy, greedy", scale=alt.Scale(domain=[0, 1])),
                    color=alt.Color(
                        "trainer:N",
                        title=None,
                        scale=alt.Scale(domain=["gruppo", "TRL 1.16"], range=["#1d5fa8", "#c8501e"]),
                    ),
                    detail="seed:N",
                )
            )
        rows.append(alt.hconcat(*panels))
    chart = alt.vconcat(*rows).configure_view(stroke=None).configure_axis(grid=True, gridColor="#eceef2")
    chart.save(str(given.picture), scale_factor=2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(required=True)
    runs = verbs.add_parser("run", help="train with one trainer on one task")
    runs.add_argument("trainer", choices=("gruppo", "trl"))
    runs.add_argument("task", choices=tuple(TASKS))
    runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    runs.add_argument("--steps", type=int, default=80)
    runs.add_argument("--every", type=int, default=8, help="steps between two evaluations")
    runs.add_argument("--held-out", type=int, default=HELD_OUT, help="held-out prompts")
    runs.add_argument("--layout", default="auto", help="gruppo's layout of a batch")
    runs.add_argument("--model", help="model folder; SmolLM2 from the package index without it")
    runs.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    runs.set_defaults(call=run)
    pictures = verbs.add_parser("draw", help="a picture of figures")
    pictures.add_argument("files", type=Path, nargs="+")
    pictures.add_argument("--picture", type=Path, required=True)
    pictures.set_defaults(call=draw)
    given = parser.parse_args()
    if given.call is run and given.model is None:
        from gruppo.weights.gguf import folder_of
        from gruppo.weights.smollm2 import smollm2

        given.model = str(folder_of(smollm2(print)))
    given.call(given)


if __name__ == "__main__":
    main()
