"""Randomness as a function: a uniform number for each (seed, step, prompt, sample, position).

A draw does not depend on which other prompts share the batch, nor on what was drawn before, so any rollout can be
repeated from five integers, and resuming a run needs no saved generator.
"""

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def row_keys(seed: int, step: int, prompts: np.ndarray, samples: np.ndarray) -> np.ndarray:
    """One 64-bit key per (prompt, sample) of a step, `[N]` uint64."""
    with np.errstate(over="ignore"):
        key = _mix(np.full(len(prompts), seed, dtype=np.uint64))
        for part in (np.full(len(prompts), step), prompts, samples):
            key = _mix(key ^ _mix(part.astype(np.uint64) + _GOLDEN))
    return key


def uniforms(keys: np.ndarray, position: int) -> np.ndarray:
    """A number in [0, 1) per key for the token at `position`, `[N]` float64."""
    with np.errstate(over="ignore"):
        bits = _mix(keys + np.uint64(position + 1) * _GOLDEN)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64: every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
