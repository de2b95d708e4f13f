"""Self-test of an installation: checks the invariances that training relies on, with the embedded model."""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gruppo.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from gruppo.model import TransformersModel

CLOSE = 1e-4
"""Relative distance of gradients that differ only in the order of float32 sums."""
EQUAL_LOGPS = 1e-3
"""Distance of float32 log-probs in nats; GPU kernels sum in other orders."""
GROUP, TOKENS = 8, 4


@dataclass(frozen=True, slots=True)
class Check:
    """Result of one check: passed or not, and the number behind it."""

    name: str
    is_passed: bool
    detail: str
    seconds: float = 0.0


def self_test() -> Iterator[Check]:
    """Run the checks one by one; a check that raises has failed."""
    with _quiet():
        rollouts = _rollouts()
        checks: tuple[tuple[str, Callable[[], tuple[bool, str]]], ...] = (
            ("gradients do not depend on the split into micro-batches", lambda: _equal_gradients(rollouts, split=True)),
            ("shared prompts have the gradients of padded rows", lambda: _equal_gradients(rollouts, split=False)),
            ("weights are saved and loaded bit for bit", lambda: _round_trip(rollouts)),
            ("the sampler's log-probs are the trainer's", lambda: _same_logps(rollouts)),
        )
        for name, check in checks:
            started = time.monotonic()
            try:
                is_passed, detail = check()
            except Exception as error:  # anything may be wrong with an installation
                is_passed, detail = False, f"{type(error).__name__}: {error}"
            yield Check(name, is_passed, detail, time.monotonic() - started)


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide transformers' progress bars."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _model(**options: object) -> "TransformersModel":
    from gruppo.model import TransformersModel

    return TransformersModel("builtin", dtype="float32", compile=False, **options)  # type: ignore[arg-type]


def _rollouts() -> list[Rollout]:
    """Sample completions of a few prompts."""
    from gruppo.sampler import SamplingParams, TorchSampler
    from gruppo.task import load_prompts
    from gruppo.task.carries import carries_rows

    model = _model()
    rows = carries_rows("heldout")[:: 512 // 4]
    assert model.tokenizer is not None  # it was loaded with the model
    prompts = load_prompts(rows, model.tokenizer).prompts
    samples = TorchSampler(model).draw(prompts, GROUP, SamplingParams(max_new_tokens=TOKENS, seed=0, step=1))
    # Advantages of one sign, so that equal completions, which a small model often draws, do not cancel.
    return [Rollout(trajectory=t, advantage=1.0 + i) for drawn in samples for i, t in enumerate(drawn)]


def _gradient(model: "TransformersModel", rollouts: list[Rollout]) -> "Tensor":
    import torch

    model.forward_backward(rollouts)
    return torch.cat([p.grad.flatten() for p in model.weights.parameters if p.grad is not None])


def _equal_gradients(rollouts: list[Rollout], *, split: bool) -> tuple[bool, str]:
    other = {"tokens_per_microbatch": 64} if split else {"layout": "shared"}
    expected, found = (_gradient(_model(**{"layout": "padded"} | options), rollouts) for options in ({}, other))
    gap = float((expected - found).norm() / expected.norm())
    return gap < CLOSE, f"relative distance {gap:.1e}"


def _round_trip(rollouts: list[Rollout]) -> tuple[bool, str]:
    import torch

    model, other = _model(), _model()
    model.set_optimizer("AdamW", lr=1e-3)
    model.forward_backward(rollouts)
    model.clip_grad_and_step()
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model")
        other.load(Path(folder) / "model")
    pairs = list(zip(model.model.parameters(), other.model.parameters(), strict=True))
    different = sum(not torch.equal(a, b) for a, b in pairs)
    return different == 0, f"{different} of {len(pairs)} tensors differ"


def _same_logps(rollouts: list[Rollout]) -> tuple[bool, str]:
    scored = _model().forward_only([replace(rollout, old_logps=None) for rollout in rollouts])["logps"]
    gaps = [
        abs(a - b)
        for rollout, logps in zip(rollouts, scored, strict=True)
        for a, b in zip(rollout.trajectory.logps or (), logps.tolist(), strict=True)
    ]
    return max(gaps) < EQUAL_LOGPS, f"largest gap {max(gaps):.1e} over {len(gaps)} tokens"
