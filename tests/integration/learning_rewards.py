"""A reward that knows nothing: a coin per completion."""

import random
from collections.abc import Sequence


def coin(completions: Sequence[str], step: int) -> list[float]:
    rng = random.Random(f"coin {step}")
    return [float(rng.random() < 0.5) for _ in completions]


coin.isolated = False  # type: ignore[attr-defined]
