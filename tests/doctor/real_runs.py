"""Runs of the embedded model for the doctor: healthy ones, and ones with a fault that is really in them."""

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gruppo.errors import RewardError
from gruppo.run.reader import RunReader
from gruppo.sampler import Sampler, TorchSampler
from gruppo.task.carries import add_without_carries, carries_rows
from gruppo.trainer import GRPOTrainer, TrainConfig

SIZES: dict[str, Any] = {
    "steps": 12,
    "prompts_per_step": 8,
    "group_size": 8,
    "max_new_tokens": 4,
    "lr": 1e-4,
    "eval_prompts": 0,
    "threads": 1,
    "tensorboard": False,
}


def trained(output: Path, objects: dict[str, Any] | None = None, **options: Any) -> RunReader:
    """A run with these options, and Python objects for rewards and data."""
    objects = objects or {}
    if "rewards" in objects:
        options["rewards"] = [f"object:{getattr(each, '__name__', each)}" for each in objects["rewards"]]
    trainer = GRPOTrainer(TrainConfig(**SIZES | options, output=str(output)), **objects, quiet=True)
    trainer.train()
    return RunReader(output)


# --- rewards with a fault ---------------------------------------------------------------------------------------------


def always_one(completions: Sequence[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def never_scores(completions: Sequence[str], **_: Any) -> list[None]:
    return [None] * len(completions)


def nan_on_nines(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """0 / 0 where an answer ends with a 9, as a division by a count does that nobody thought of."""
    return [
        float("nan") if text.endswith("9") else float(text == gold)
        for text, gold in zip(completions, answer, strict=True)
    ]


def pays_wrong(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    return [float(text != gold) for text, gold in zip(completions, answer, strict=True)]


def costs_wrong(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    return [-float(text != gold) for text, gold in zip(completions, answer, strict=True)]


def nines(completions: Sequence[str], **_: Any) -> list[float]:
    return [text.count("9") / 3 for text in completions]


def evens(completions: Sequence[str], **_: Any) -> list[float]:
    """A style that has nothing to do with the sum: even digits."""
    return [sum(digit in "02468" for digit in text) / 4 for text in completions]


def fails_in_step_14(completions: Sequence[str], step: int, **_: Any) -> list[float]:
    if step == 13:
        raise RuntimeError("the judge is gone")
    return [float(text.count("1")) for text in completions]


def length(completions: Sequence[str], **_: Any) -> list[float]:
    return [len(text) / 48 for text in completions]


def nine_tenths(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """A right answer earns 0.9, which is below `correct_at`."""
    return [0.9 * (text == gold) for text, gold in zip(completions, answer, strict=True)]


def outlier(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """A few right answers earn a thousand, for a unit that was mixed up."""
    return [
        float(text == gold) * (1000.0 if gold.endswith(("37", "73", "51")) else 1.0)
        for text, gold in zip(completions, answer, strict=True)
    ]


# --- faults -----------------------------------------------------------------------------------------------------------


def rows_without_carries() -> list[dict[str, str]]:
    return [row for row in carries_rows("train") if not has_carry(row["prompt"])]


def has_carry(prompt: str) -> bool:
    a, b = prompt.removesuffix("=").split("+")
    return int(a[0]) + int(b[0]) > 9 or int(a[1]) + int(b[1]) > 9


def copies(seed: int = 0) -> list[dict[str, str]]:
    """Data of which two rows in three are the same one."""
    rows = [row for row in carries_rows("train") if has_carry(row["prompt"])]
    random.Random(seed).shuffle(rows)
    return [row if i % 3 == 0 else {"prompt": "47+85=", "answer": "132"} for i, row in enumerate(rows[:600])]


def sample_with(trainer: GRPOTrainer, sampler: Sampler) -> None:
    """Have steps, and not evaluations, sampled by another sampler."""
    source = trainer.schedule.source
    trainer.schedule.source = replace(source, driver=replace(source.driver, sampler=sampler))


def unsynced(output: Path) -> RunReader:
    """The sampler has a copy of the weights of the start, and no update reaches it."""
    trainer = GRPOTrainer(TrainConfig(**SIZES | {"lr": 1e-3, "steps": 20}, output=str(output)), quiet=True)
    sample_with(trainer, TorchSampler(trainer.model.twin()))
    trainer.train()
    return RunReader(output)


def other_weights(output: Path) -> RunReader:
    """The sampler has other weights from the first step on: each is perturbed by a quarter of its size."""
    trainer = GRPOTrainer(TrainConfig(**SIZES, output=str(output)), quiet=True)
    twin = trainer.model.twin()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for weight in twin.model.parameters():
            weight.mul_(1 + 0.25 * torch.randn(weight.shape, generator=generator))
    sample_with(trainer, TorchSampler(twin))
    trainer.train()
    return RunReader(output)


def one_nan_gradient(output: Path) -> RunReader:
    """The gradient of one weight is NaN in the fourth step."""
    trainer = GRPOTrainer(TrainConfig(**SIZES, output=str(output)), quiet=True)
    weight = next(trainer.model.model.parameters())
    weight.register_hook(lambda gradient: gradient * (float("nan") if trainer.step_number == 3 else 1.0))
    trainer.train()
    return RunReader(output)


def never_rewarded(output: Path) -> RunReader:
    """No completion has a reward, which ends the run."""
    with suppress(RewardError):
        trained(output, {"rewards": [never_scores]})
    return RunReader(output)


def failed(output: Path) -> RunReader:
    """The reward fails in the middle of the run, on every completion."""
    with suppress(RewardError):
        trained(output, {"rewards": [fails_in_step_14]}, steps=20)
    return RunReader(output)


def wrong_columns() -> list[dict[str, str]]:
    """Held-out rows whose answers are those of other rows."""
    rows = carries_rows("heldout")[:64]
    return [row | {"answer": f"x{other['answer']}"} for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]


HELD_OUT = carries_rows("heldout")[:64]
EVALUATED: dict[str, Any] = {"eval_data": "builtin:carries?split=heldout", "eval_prompts": 128}

FAULTS: dict[str, tuple[str, Callable[[Path], RunReader]]] = {
    "the reward is always 1": ("constant_reward", lambda p: trained(p, {"rewards": [always_one]})),
    "the reward is always None": ("failed no_reward", never_rewarded),
    "the reward is NaN for some": ("reward_fails", lambda p: trained(p, {"rewards": [nan_on_nines]})),
    "wrong answers earn more": (
        "contradicted_reward",
        lambda p: trained(p, {"rewards": ["exact_match", pays_wrong]}, reward_weights=(1.0, 3.0)),
    ),
    "one part of the reward pays for the digit 9": (
        "reward_hacking",
        lambda p: trained(p, {"rewards": ["exact_match", nines]}, reward_weights=(1.0, 5.0), lr=3e-3, steps=40),
    ),
    "a style is paid beside the answer, and only the style is learned": (
        "reward_hacking",
        lambda p: trained(
            p,
            {"rewards": ["exact_match", evens]},
            **EVALUATED,
            reward_weights=(0.02, 1.0),
            lr=3e-4,
            steps=60,
            temperature=1.3,
        ),
    ),
    "the same, named the other way round": (
        "reward_hacking",
        lambda p: trained(
            p,
            {"rewards": [evens, "exact_match"]},
            **EVALUATED,
            reward_weights=(1.0, 0.0),
            lr=1e-3,
            steps=40,
            eval_every=10,
        ),
    ),
    "lr is a hundred times too high": ("collapse", lambda p: trained(p, **EVALUATED, lr=1e-2, steps=24, seed=31)),
    "lr is three hundred times too high": ("collapse", lambda p: trained(p, **EVALUATED, lr=3e-2, steps=24, seed=32)),
    "lr is a thousand times too high": ("collapse", lambda p: trained(p, lr=1e-1, steps=24, seed=33)),
    "lr is far too high for an adapter": (
        "collapse",
        lambda p: trained(p, **EVALUATED, lora=True, lr=1.0, steps=24, seed=34),
    ),
    "temperature is 0.02": ("no_exploration", lambda p: trained(p, **EVALUATED, temperature=0.02, steps=24, seed=35)),
    "temperature is 0.03, with a graded reward": (
        "no_exploration",
        lambda p: trained(p, {"rewards": [digits_right]}, temperature=0.03, steps=24, seed=36),
    ),
    "the answers of the held-out rows are of another form": (
        "never_right",
        lambda p: trained(p, {"eval_data": wrong_columns()}, eval_prompts=None, lr=1e-5, steps=24, seed=37),
    ),
    "the reward fails on all of a later step": ("failed", failed),
    "the reward pays for length": (
        "length_exploitation",
        lambda p: trained(p, {"rewards": [length]}, lr=1e-3, steps=30, max_new_tokens=48, temperature=2.0),
    ),
    "the reward pays for length, and the model repeats digits": (
        "length_exploitation repetition",
        lambda p: trained(p, {"rewards": [length]}, lr=1e-3, steps=40, max_new_tokens=48, temperature=1.5),
    ),
    "max_new_tokens is 2": ("truncation", lambda p: trained(p, max_new_tokens=2)),
    "the answer is none that the model can write": (
        "too_hard",
        lambda p: trained(p, {"data": [row | {"answer": "x"} for row in carries_rows("train")[:200]]}),
    ),
    "the prompts need no carries": (
        "too_easy",
        lambda p: trained(p, {"data": rows_without_carries()}, temperature=1.3),
    ),
    "the entropy bonus has the wrong sign, and the reward no weight": (
        "entropy_collapse",
        lambda p: trained(p, entropy_coef=-1.0, lr=1e-3, reward_weights=(0.0,), steps=40),
    ),
    "lr is too high for eight updates per batch": (
        "collapse kl_blow_up",
        lambda p: trained(p, lr=3e-2, minibatches=4, epochs_per_batch=2, beta=1e-6),
    ),
    "lr is too high, once it is warm": ("collapse", lambda p: trained(p, lr=2e-2, steps=40, warmup_steps=20)),
    "lr is too high, and what is wrong costs 1": (
        "collapse",
        lambda p: trained(p, {"rewards": [costs_wrong]}, lr=2e-2, steps=40, warmup_steps=20),
    ),
    "a right answer earns 0.9": (
        "never_right",
        lambda p: trained(p, {"rewards": [nine_tenths]}, correct_by="nine_tenths", lr=3e-4, steps=40),
    ),
    "some rewards are a thousand times too high": (
        "gradient_spike",
        lambda p: trained(p, {"rewards": [outlier]}, normalization="centered", steps=20, seed=1),
    ),
    "one gradient is NaN": ("gradient_not_finite", one_nan_gradient),
    "two rows in three are the same": ("dominating_prompt", lambda p: trained(p, {"data": copies()})),
    "held-out rows are in the data": (
        "leaking_evaluation",
        lambda p: trained(p, {"data": HELD_OUT + carries_rows("train")[:64], "eval_data": HELD_OUT}, eval_prompts=None),
    ),
    "no update reaches the sampler": ("stale_sampler", unsynced),
    "the sampler has other weights": ("stale_sampler", other_weights),
    "lr is 1e-10": ("precision_lost", lambda p: trained(p, lr=1e-10)),
}
"""What is wrong, the rule that must name it first and others that must see it, and the run."""

LEARNS_ALL_THE_SAME = {
    "the reward is NaN for some",
    "some rewards are a thousand times too high",
    "one gradient is NaN",
    "two rows in three are the same",
    "held-out rows are in the data",
    "no update reaches the sampler",
    "the sampler has other weights",
    "the prompts need no carries",
}
"""Faults with which the share of right answers may rise."""

HEALTHY: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo, another seed": {"seed": 7},
    "gspo, two updates": {"loss": "gspo", "minibatches": 2, "seed": 1},
    "dapo, dynamic sampling": {"loss": "dapo", "dynamic_sampling": 3, "seed": 2},
    "drgrpo, its advantage": {"loss": "drgrpo", "advantage": "drgrpo", "seed": 3},
    "cispo, rloo": {"loss": "cispo", "advantage": "rloo", "seed": 4},
    "LoRA": {"lora": True, "lr": 1e-3, "seed": 5},
    "KL penalty, two epochs": {"beta": 0.04, "epochs_per_batch": 2, "seed": 6},
    "sums with carries alone": {"data": "carries", "seed": 8, "lr": 2e-4},
    "two rewards, bfloat16": {
        "rewards": ("exact_match", "pattern_match:pattern=^([0-9]+)$"),
        "dtype": "bfloat16",
        "seed": 9,
    },
    "sapo, one step ahead": {"loss": "sapo", "max_staleness": 1, "seed": 10},
    "dropped carries wanted, KL in the reward": {"data": "dropped", "kl_in_reward": 0.01, "seed": 11},
    "lr falls to 0": {"lr_schedule": "cosine", "steps": 60, "seed": 13},
    "share of right digits": {"rewards": "digits", "normalization": "centered", "seed": 12},
    "a verifier beside a style that it does not harm": {
        "rewards": ("exact_match", "pattern_match:pattern=^([0-9]{3})$"),
        "reward_weights": (1.0, 0.1),
        "seed": 14,
    },
    "few held-out prompts": {"eval_prompts": 16, "seed": 15},
    "a reward without right or wrong": {"rewards": "evens", "lr": 3e-4, "seed": 16},
    "Dr. GRPO with a KL penalty": {"loss": "drgrpo", "beta": 0.02, "seed": 18},
    "REINFORCE with a KL penalty": {"loss": "reinforce", "beta": 0.002, "seed": 19},
    "the demo": {"steps": 200, "prompts_per_step": 32, "warmup_steps": 10, "completions_every": 10},
}
"""Options of runs in which nothing is wrong: losses, advantages, tasks, LoRA, seeds."""


def digits_right(completions: Sequence[str], answer: Sequence[str], **_: Any) -> list[float]:
    """A graded reward: the share of digits that are right."""
    return [
        sum(a == b for a, b in zip(text, gold, strict=False)) / 3
        for text, gold in zip(completions, answer, strict=True)
    ]


def dropped() -> list[dict[str, str]]:
    """Another task for the same model: the sum of the digits alone."""
    rows = carries_rows("train")
    pairs = [tuple(map(int, row["prompt"].removesuffix("=").split("+"))) for row in rows]
    return [row | {"answer": add_without_carries(*pair)} for row, pair in zip(rows, pairs, strict=True)]


def healthy(name: str, output: Path) -> RunReader:
    options = {"steps": 40, "eval_prompts": 64, "eval_data": "builtin:carries?split=heldout"} | HEALTHY[name]
    objects: dict[str, Any] = {}
    if options.get("data") == "carries":
        objects["data"] = [row for row in carries_rows("train") if has_carry(row["prompt"])]
    if options.get("data") == "dropped":
        objects["data"], options["eval_data"] = dropped(), None
    named = {"digits": digits_right, "evens": evens}
    if options.get("rewards") in named:
        objects["rewards"] = [named[options["rewards"]]]
    return trained(output, objects, **{k: v for k, v in options.items() if k not in objects})
