"""How many rows the head holds at a time, and what a step of it will need, before anything is allocated."""

from dataclasses import dataclass

GPU_SCRATCH = 1_300_000_000
CPU_SCRATCH = 1 << 28
"""Bytes of logits and directions held at a time, whatever the number of tokens: 1.21 GiB, on a CPU 256 MiB."""
CHUNK_ROWS = 512
MAX_WINDOW_ROWS = 8192
PRODUCT_ROWS = 2048  # d_hidden is fastest in pieces of this many rows (H200, cuBLAS of CUDA 13)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows held at a time."""

    chunk: int  # of float32 logits
    window: int  # of directions
    entropy_window: int  # of both


def sizes(vocabulary: int, scratch_bytes: int, *, logit_bytes: int, direction_bytes: int, route: str) -> Sizes:
    """What fits into the scratch memory."""
    vocabulary = max(vocabulary, 1)
    chunk = max(1, min(CHUNK_ROWS, scratch_bytes // (4 * vocabulary * logit_bytes)))
    held = 0 if route == "logits" else chunk * vocabulary * logit_bytes
    window = max(1, min((scratch_bytes - held) // (vocabulary * direction_bytes), MAX_WINDOW_ROWS))
    whole = PRODUCT_ROWS if window >= PRODUCT_ROWS else min(chunk, window)  # whole pieces for the products
    both = max(1, min(scratch_bytes // (vocabulary * (logit_bytes + direction_bytes)), MAX_WINDOW_ROWS))
    return Sizes(chunk, window // whole * whole, both)


def memory_estimate(
    num_tokens: int,
    hidden_size: int,
    vocabulary: int,
    *,
    trained: bool,
    bytes_per_weight: int = 2,
    route: str = "logits",
) -> dict[str, int]:
    """Bytes that `train` will allocate on a GPU, before anything is: scratch, gradients, and per-token results.

    >>> sum(memory_estimate(16384, 2560, 151936, trained=False).values()) < 1.5 * 2**30
    True
    """
    rows = sizes(vocabulary, GPU_SCRATCH, logit_bytes=4, direction_bytes=bytes_per_weight, route=route)
    window = min(rows.window, num_tokens)
    chunk = 0 if route == "logits" else min(rows.chunk, num_tokens)
    piece = min(PRODUCT_ROWS, num_tokens)
    return {
        "scratch": chunk * vocabulary * 4 + window * vocabulary * bytes_per_weight,
        "d_hidden": num_tokens * hidden_size * bytes_per_weight + piece * hidden_size * 4,
        "d_weight": vocabulary * hidden_size * 4 + window * hidden_size * bytes_per_weight if trained else 0,
        "per_token": num_tokens * 4 * 6 + window * -(-vocabulary // 256) * 8,
    }
