"""SmolLM2 learns to use a calculator: products that it cannot work out, in episodes of two turns.

    PYTHONPATH=src python benchmarks/real_tools.py --out real_tools.json
    PYTHONPATH=src python benchmarks/real_tools.py --max-turns 1 --out alone.json   # the same without the calculator

The calculator reads the first turn: where a product such as 12 * 34 stands in it, it tells the value, and the next turn
is the answer. Held-out products are in no training prompt. docs/benchmarks.md has the figures.
"""

import argparse
import json
import random
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.turns import Answer, Environment
from gruppo.types import Message

ASK = "What is {} * {}? Ask the calculator first: write the product that it shall work out."
PRODUCT = re.compile(r"(\d{1,4}) ?[*×] ?(\d{1,4})")


class Calculator(Environment):
    """Tells the value of the first product of the first turn. A turn without one, or the second, is the answer."""

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        self.is_asked = False

    def step(self, message: Message) -> Answer:
        found = PRODUCT.search(message["content"])
        if found is None or self.is_asked:
            return Answer()
        self.is_asked = True
        value = int(found[1]) * int(found[2])
        return Answer(messages=({"role": "user", "content": f"It is {value}. Answer with the number only."},))


def rows() -> list[dict[str, Any]]:
    pairs = [(a, b) for a in range(11, 100) for b in range(11, 100)]
    random.Random(0).shuffle(pairs)
    return [{"prompt": ASK.format(a, b), "answer": str(a * b)} for a, b in pairs[:4512]]


def last_number(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 where the last number of the policy's last turn is the answer."""
    found = [re.findall(r"\d+", text.replace(",", "")) for text in completions]
    return [float(bool(f) and f[-1] == gold) for f, gold in zip(found, answer, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--prompts", type=int, default=32, help="prompts of a step")
    parser.add_argument("--group", type=int, default=16, help="episodes of a prompt")
    parser.add_argument("--max-turns", type=int, default=2, help="1: without the calculator")
    parser.add_argument("--held-out", type=int, default=512)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    given = parser.parse_args()
    from gruppo.weights.gguf import folder_of
    from gruppo.weights.smollm2 import smollm2

    model, runs = str(folder_of(smollm2(print))), []
    for seed in given.seeds:
        started = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            config = TrainConfig(
                model=model, chat=True, prompts_per_step=given.prompts, group_size=given.group, max_new_tokens=64,
                max_turns=given.max_turns, steps=given.steps, lr=given.lr, eval_prompts=given.held_out,
                eval_every=max(given.steps // 8, 1), save_every=10**6, tensorboard=False, seed=seed,
                output=f"{folder}/run",
            )  # fmt: skip
            trainer = GRPOTrainer(config, data=rows(), rewards=[last_number], environment=Calculator, quiet=True)
            result = trainer.train()
            lines = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
            timings = [json.loads(line) for line in (Path(folder) / "run" / "timings.jsonl").read_text().splitlines()]
        runs.append({"seed": seed, "metrics": lines, "timings": timings, "seconds": time.perf_counter() - started})
        curve = " ".join(f"{line['step']}:{line['eval/reward']:.3f}" for line in lines if "eval/reward" in line)
        turns = " ".join(
            f"{line['turns/mean']:.2f}" for line in lines[:: max(len(lines) // 8, 1)] if "turns/mean" in line
        )
        stages = {name: sorted(t.get(name, 0.0) for t in timings)[len(timings) // 2] for name in timings[-1]}
        print(
            f"seed {seed}: {result}; held-out {curve}; turns {turns}; {stages}; {runs[-1]['seconds']:.0f} s", flush=True
        )
        given.out.write_text(json.dumps({"max_turns": given.max_turns, "runs": runs}))


if __name__ == "__main__":
    main()
