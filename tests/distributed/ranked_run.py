"""Runs of the trainer on one of several ranks: `python ranked_run.py RANK WORLD PORT FOLDER CASE...`.

Each case is a short run of the embedded task, all of them in one process per rank. WORLD 1 is the trainer as it is.
"""

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch

from gruppo.parallel.ranks import Ranks, join
from gruppo.trainer import GRPOTrainer, TrainConfig

USUAL: dict[str, Any] = {
    "model": "builtin", "data": "builtin:carries", "steps": 6, "prompts_per_step": 8, "group_size": 4, "lr": 1e-3,
    "max_new_tokens": 4, "eval_prompts": 8, "tokens_per_microbatch": 96, "threads": 1, "save_every": 3,
    "tensorboard": False, "ranks_exact": True, "shard": os.environ.get("SHARD", "full"),
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dapo, dynamic sampling": {"loss": "dapo", "dynamic_sampling": 3},
    "gspo with kl, shared prompts": {"loss": "gspo", "beta": 0.05, "layout": "shared"},
    "drgrpo, minibatches": {"loss": "drgrpo", "minibatches": 2, "layout": "padded"},
    "top_entropy": {"loss": "top_entropy", "minibatches": 2},
    "clip_cov": {"loss": "clip_cov"},
    "lora with kl": {"lora": True, "lora_rank": 4, "beta": 0.05},
    "kl in reward, entropy target": {"kl_in_reward": 0.05, "entropy_target": 0.3, "entropy_coef": 0.01},
    "ahead": {"max_staleness": 1},
    "recomputed": {"gradient_checkpointing": True},
    "bfloat16": {"dtype": "bfloat16"},
    "bnpo": {"loss": "bnpo"},
    "not exact": {"ranks_exact": False},
    "tools": {
        "model": "builtin-chat",
        "data": "builtin:calculator",
        "tools": ["gruppo.task.calculator:multiply"],
        "max_new_tokens": 40,
        "max_turns": 3,
        "beta": 0.05,
        "completions_every": 1,
    },
}


def run(case: str, folder: Path, ranks: Ranks | None, **changes: Any) -> None:
    """One run, on this rank."""
    if ranks is not None and ranks.rank:
        from gruppo.trainer.rank_worker import follow

        follow(ranks)
        return
    config = TrainConfig(**USUAL | CASES[case] | changes, output=str(folder / case.replace(" ", "-").replace(",", "")))
    GRPOTrainer(config, quiet=True, ranks=ranks).train()
    if ranks is not None:
        ranks.broadcast({"call": "end", "code": 0})


def poison() -> None:
    """Make one number of this rank's gradient NaN in the second update."""
    from gruppo.model.sharding import ShardedWeights, local

    put, calls = ShardedWeights.put_gradients, []

    def put_and_poison(self: ShardedWeights) -> None:
        put(self)
        calls.append(1)
        if len(calls) == 2:
            gradient = self.named()["model.layers.1.mlp.down_proj.weight"].grad
            assert gradient is not None
            local(gradient)[0, 0] = torch.nan

    ShardedWeights.put_gradients = put_and_poison  # type: ignore[method-assign]


def note_hashed(log: Path) -> None:
    """Note every file that this rank hashes."""
    from gruppo.weights import files

    sha256 = files._sha256

    def sha256_and_note(path: Path) -> str:
        with log.open("a") as opened:
            opened.write(f"{path.name}\n")
        return sha256(path)

    files._sha256 = sha256_and_note


def main() -> None:
    rank, world, port, folder, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    os.environ |= {"RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    logging.basicConfig()
    if os.environ.get("POISON"):
        poison()
    if os.environ.get("HASHED"):
        note_hashed(Path(os.environ["HASHED"], rank))
    ranks = None if world == "1" else join(120)
    for case in cases:
        run(case, Path(folder), ranks)
    if ranks is not None:
        torch.distributed.destroy_process_group()
        os._exit(0)  # as the command does: torch's threads may outlive the interpreter


if __name__ == "__main__":
    main()
