"""Weights from the shards of two ranks into real vLLM servers: all of them, and an adapter."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from small_runs import PortServer, logps_by_transformers, options

from gruppo.model import LoraSpec
from gruppo.sampler.vllm.engine import engine_arguments
from gruppo.sampler.vllm.http import HttpEngine
from gruppo.sampler.vllm.server import ServerProcess
from gruppo.types import Prompt, Trajectory
from gruppo.weights.canary import canary_rows
from gruppo.weights.source import resolve

ADAPTER = LoraSpec(rank=4)
KINDS = {"all weights": None, "adapter": ADAPTER}


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ServerProcess]]:
    usual = {"model": resolve("builtin"), "dtype": "float32", "max_model_len": 24}
    made = {kind: PortServer(engine_arguments(**usual, lora=lora)) for kind, lora in KINDS.items()}
    yield made
    for process in made.values():
        process.close()


def exported(run: Path) -> Any:
    """The model of a run as transformers and PEFT load it."""
    if not (run / "model" / "adapter_config.json").exists():
        return transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(resolve("builtin"), dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, run / "model")


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_hand_their_shards_over(kind: str, servers: dict[str, ServerProcess], tmp_path: Path) -> None:
    engine = HttpEngine(servers[kind].address, process=servers[kind])
    engine.wait_until_ready()
    lora = {"lora": True, "lora_rank": ADAPTER.rank} if KINDS[kind] else {}
    wanted = options(
        tmp_path / "run", sampler=f"vllm:{servers[kind].address}", model="builtin", data="builtin:carries", **lora
    )
    # The evaluation after the last step hands the last weights over.
    wanted |= {"steps": 3, "eval_prompts": 4, "tokens_per_microbatch": 96, "shard": "full"}
    (tmp_path / "run.yaml").write_text(json.dumps(wanted))  # JSON is YAML
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launcher, "-m", "gruppo", "train", "--config", str(tmp_path / "run.yaml")]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-1500:]

    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "sync/canary_gap" in row]
    assert len(steps) == 3
    assert max(row["sync/canary_gap"] for row in steps) < 1e-4
    assert max(row["sampler/logp_gap_max"] for row in steps) < 1e-4
    assert min(row["sync/canary_moved"] for row in steps[1:]) > 0.01  # the weights were others each time

    model = exported(tmp_path / "run")
    rows = canary_rows(model.config.vocab_size)
    trajectories = [Trajectory(prompt=Prompt(token_ids=row[:1]), tokens=row[1:]) for row in rows]
    if lora:  # the version that was handed over is gone with the run
        engine.load_adapter(tmp_path / "run" / "model")
    expected, found = logps_by_transformers(model, trajectories, 1.0), engine.logps_of(rows)
    assert torch.tensor(expected).sub(torch.tensor(found)).abs().max() < 1e-4
