"""A whole run on a GPU: where the time of a step goes, steps per minute, and whether the plan's memory is right.

    PYTHONPATH=src python benchmarks/train.py

A model of the shape of Qwen3-0.6B with random weights, 16 prompts x 8 completions of up to 256 tokens, a toy reward,
through the trainer as `gruppo train` runs it. docs/benchmarks.md has the figures.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from step import CASES, COMMON, make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from gruppo.trainer import GRPOTrainer, TrainConfig


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(COMMON["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0", pad_token="w1", eos_token="w5")


def even(completions: list[str], **_: Any) -> list[float]:
    """The share of words with an even number."""
    rows = [completion.split() for completion in completions]
    return [sum(int(word[1:]) % 2 == 0 for word in row) / max(len(row), 1) for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--out", help="write the figures to this JSON file")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/train.py measures on a GPU, and there is none")
    draw = random.Random(0)
    rows = [
        " ".join(f"w{draw.randrange(COMMON['vocab_size'])}" for _ in range(draw.randint(128, 256))) for _ in range(200)
    ]
    data = [{"prompt": row, "answer": "1"} for row in rows]
    model = make_model(CASES["0.6b"])
    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            steps=given.steps, prompts_per_step=16, group_size=8, max_new_tokens=256, eval_prompts=0, lora=given.lora,
            tokens_per_microbatch=16384, output=f"{folder}/run", tensorboard=False, save_every=1000,
        )  # fmt: skip
        trainer = GRPOTrainer(config, model=model, tokenizer=make_tokenizer(), rewards=[even], data=data)
        planned = trainer.plan().memory
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
        peak = torch.cuda.max_memory_allocated()
        timings = [json.loads(line) for line in (Path(folder) / "run" / "timings.jsonl").read_text().splitlines()]
    print("first step:", {name: round(seconds, 2) for name, seconds in timings[0].items()})
    stages = {
        name: statistics.median(row.get(name, 0.0) for row in timings[1:]) for name in timings[-1] if name != "step"
    }
    whole = sum(stages.values())
    for name, seconds in stages.items():
        print(f"{name:12} {seconds:7.3f} s  {seconds / whole:4.0%}")
    print(f"{60 / whole:.1f} steps per minute; memory planned {planned / 2**30:.1f} GiB, peak {peak / 2**30:.1f} GiB")
    if given.out:
        found = {
            "stages": stages,
            "steps_per_minute": 60 / whole,
            "planned": planned,
            "peak": peak,
            "first": timings[0],
        }
        Path(given.out).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
