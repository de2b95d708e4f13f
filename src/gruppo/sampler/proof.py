"""Does the engine sample from the weights we trained? A canary answers after every hand-over.

Fixed tokens are scored by both sides. Their log-probs must agree, and must have moved if the trainer's have: an engine
that kept its old weights agrees well with a trainer that took a small step.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gruppo.model.transformers_model import TransformersModel
from gruppo.types import InputFeature

BOUNDS = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Largest gap of a canary token's log-prob. Tokens drawn blindly have log-probs of -10 and less, which low precision
rounds by several percent; in float32 both sides agree to about 1e-5."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the canary said."""

    gap: float
    """Largest difference between the two sides."""
    moved: float
    """Largest change of the engine's log-probs since the last hand-over; nan at the first."""
    fault: str | None
    """None when the engine has the trainer's weights."""


@dataclass(slots=True)
class Canary:
    """Fixed rows of tokens, and what was last seen of them on both sides.

    Args:
        rows: token ids; the first of a row is context.
        bound: largest gap that passes.
    """

    rows: tuple[tuple[int, ...], ...]
    bound: float
    expected: np.ndarray | None = None
    _seen: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @classmethod
    def draw(
        cls, vocabulary: int, *, length: int = 12, num_rows: int = 4, bound: float = BOUNDS["float32"]
    ) -> "Canary":
        """The same tokens for every run of a model."""
        tokens = np.random.default_rng(0).integers(0, vocabulary, (num_rows, max(length, 2)))
        return cls(rows=tuple(tuple(row) for row in tokens.tolist()), bound=bound)

    def score(self, model: TransformersModel) -> np.ndarray:
        """The trainer's side, at temperature 1."""
        features = [InputFeature(prompt_ids=row[:1], completion_ids=row[1:]) for row in self.rows]
        logps = model.forward_only(features, temperature=1.0)["logps"]
        return np.concatenate([row.double().cpu().numpy() for row in logps])

    def judge(self, engine: str, expected: np.ndarray, answered: Sequence[Sequence[float]]) -> Verdict:
        """Compare; a verdict without fault becomes what the next one is compared with."""
        got = np.concatenate([np.asarray(row, dtype=np.float64) for row in answered]) if answered else np.empty(0)
        if got.shape != expected.shape or not np.isfinite(got).all():
            return Verdict(
                float("nan"), float("nan"), f"{got.size} numbers came for {expected.size}, or not finite ones"
            )
        gap = float(np.abs(got - expected).max())
        before = self._seen.get(engine)
        moved = float("nan") if before is None else float(np.abs(got - before[1]).max())
        trainer_moved = 0.0 if before is None else float(np.abs(expected - before[0]).max())
        fault = None
        if gap > self.bound:
            fault = (
                f"log-probs of {expected.size} fixed tokens differ by up to {gap:.2g}; at most {self.bound:g} is right"
            )
        elif moved == 0 and trainer_moved > self.bound / 100:
            fault = f"its log-probs did not move at all, the trainer's by up to {trainer_moved:.2g}"
        else:
            self._seen[engine] = (expected, got)
        return Verdict(gap, moved, fault)

    def forget(self, engine: str) -> None:
        """After a restart the engine has nothing to have moved from."""
        self._seen.pop(engine, None)
