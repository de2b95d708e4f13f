"""Canary: fixed tokens whose log-probs show which weights a sampler has. `docs/vllm.md` describes the proof."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gruppo.types import InputFeature

if TYPE_CHECKING:
    from torch import Tensor

BOUNDS = {"float32": 1e-3, "bfloat16": 1.5, "float16": 0.1}
"""Largest gap of a canary token's log-prob. Tokens drawn blindly have log-probs of -10 and less, which low precision
rounds by several percent: SmolLM2 in vLLM and here differs by 0.33 in bfloat16, and by 6e-5 in float32."""

Rows = tuple[tuple[int, ...], ...]
"""Token ids; the first of a row is context."""


class TrainedModel(Protocol):
    """The trainer's model as publishing uses it: `gruppo.model.TransformersModel`, or another of its kind."""

    model: Any
    """A causal language model of transformers, or of PEFT: it has `state_dict`."""
    lora: Any
    """The adapter that trains; None: all weights."""

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen."""
        ...

    def write_weights(self, folder: Path) -> None: ...

    def forward_only(
        self, inputs: Sequence[InputFeature], *, temperature: float | None = None
    ) -> "dict[str, list[Tensor]]": ...


@dataclass(frozen=True, slots=True)
class Canary:
    """Fixed rows of tokens with the trainer's log-probs of them, at temperature 1."""

    rows: Rows
    logps: tuple[float, ...]
    """Of each row's tokens but the first, one row after the other."""

    @classmethod
    def score(cls, rows: Rows, model: TrainedModel) -> "Canary":
        """The rows as the trainer's model scores them."""
        features = [InputFeature(prompt_ids=row[:1], completion_ids=row[1:]) for row in rows]
        logps = model.forward_only(features, temperature=1.0)["logps"]
        return cls(rows, tuple(x for row in logps for x in row.double().tolist()))


def canary_rows(vocabulary: int, *, length: int = 12) -> Rows:
    """Four rows, the same tokens for every run of a model."""
    tokens = np.random.default_rng(0).integers(0, vocabulary, (4, max(length, 2)))
    return tuple(tuple(row) for row in tokens.tolist())


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of comparing an engine with the trainer."""

    gap: float
    """Largest difference between the two sides."""
    moved: float
    """Largest change of the engine's log-probs since the last weights; nan for the first."""
    fault: str | None
    """None when the engine has the trainer's weights."""


class CanaryCheck:
    """Compares one engine's answers with the trainer's log-probs, and remembers the last good answer.

    A gap above `bound` is a fault. So is an answer that did not move when the trainer's log-probs did.
    """

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self._seen: tuple[np.ndarray, np.ndarray] | None = None

    def judge(self, logps: Sequence[float], answered: Sequence[Sequence[float]]) -> Verdict:
        """Compare; an answer without fault becomes what the next one is compared with."""
        expected, got = np.array(logps, np.float64), np.array([x for row in answered for x in row], np.float64)
        num, moved, trainer_moved, fault = expected.size, float("nan"), 0.0, None
        if got.size != num or not np.isfinite(got).all():
            return Verdict(float("nan"), moved, f"{got.size} numbers came for {num}, or not finite ones")
        gap = float(np.abs(got - expected).max())
        if self._seen is not None:
            trainer_moved, moved = (
                float(np.abs(now - before).max()) for now, before in zip((expected, got), self._seen, strict=True)
            )
        if gap > self.bound:
            fault = f"log-probs of {num} fixed tokens differ by up to {gap:.2g}; at most {self.bound:g} is right"
        elif moved == 0 and trainer_moved > self.bound / 100:
            fault = f"its log-probs did not move at all, the trainer's by up to {trainer_moved:.2g}"
        else:
            self._seen = expected, got
        return Verdict(gap, moved, fault)

    def forget(self) -> None:
        """Drop the last answer: after a restart there is no earlier value to compare with."""
        self._seen = None
