"""Short runs of the embedded model, and what is compared between them."""

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet
import torch

from gruppo.model import TransformersModel
from gruppo.sampler.vllm.server import ServerProcess
from gruppo.types import InputFeature, SampleResponse, Trajectory

PROMPTS = ["47+85=", "12+9=", "99+1=", "5+5=", "30+31=", "8+64="]


class PortServer(ServerProcess):
    """A server of somebody else's: on a port, without a key."""

    def start(self) -> None:
        if not self.address.startswith("http"):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            self.address, self.key, self.listens = f"http://127.0.0.1:{port}", "", {"host": "127.0.0.1", "port": port}
        super().start()


def options(output: Path, **changes: Any) -> dict[str, Any]:
    """A run of few and small steps; each moves the weights by much."""
    small = {"prompts_per_step": 8, "group_size": 4, "max_new_tokens": 4, "steps": 6, "temperature": 0.7, "lr": 1e-3}
    record = {"eval_prompts": 0, "completions_every": 1, "tensorboard": False, "threads": 1, "output": str(output)}
    return small | record | changes


def completions(run: Path) -> dict[str, list[dict[str, Any]]]:
    """All that was sampled in a run, by file: tokens, log-probs, rewards."""
    files = sorted((run / "completions").glob("*.parquet"))
    return {file.name: pyarrow.parquet.read_table(file).to_pylist() for file in files}


def update(model: TransformersModel, steps: int = 1) -> None:
    """Large steps in an arbitrary direction."""
    vocabulary = model.model.config.vocab_size
    model.set_optimizer("AdamW", lr=0.01)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        rows = torch.randint(3, vocabulary, (4, 7), generator=generator).tolist()
        features = [InputFeature(prompt_ids=tuple(row[:3]), completion_ids=tuple(row[3:])) for row in rows]
        model.forward_backward(features, advantages=[1.0, -1.0, 0.5, -0.5])
        model.clip_grad_and_step()


def logps_by_transformers(model: Any, sequences: Sequence[Trajectory], temperature: float) -> list[list[float]]:
    """From plain logits in float64, one sequence at a time."""
    found = []
    for sequence in sequences:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*sequence.prompt_ids, *sequence.tokens]])).logits[0].double()
        first = len(sequence.prompt_ids) - 1
        logps = (logits / temperature).log_softmax(-1)
        found.append([logps[first + j, token].item() for j, token in enumerate(sequence.tokens)])
    return found


def largest_gap(model: Any, responses: Sequence[SampleResponse], temperature: float) -> float:
    """Between what the sampler reported and what transformers computes."""
    sequences = [s for r in responses for s in r.sequences]
    rows = logps_by_transformers(model, sequences, temperature)
    return max(abs(a - b) for s, row in zip(sequences, rows, strict=True) for a, b in zip(s.logps, row, strict=True))
