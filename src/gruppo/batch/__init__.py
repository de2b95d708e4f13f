"""Packed batches: sequences as flat tensors.

`docs/dataflow.md` shows one batch in all layouts. A new layout is a new function beside `pack` that returns a
`PackedBatch`; nothing downstream depends on how the slots were laid out.
"""

from gruppo.batch.microbatch import split_by_tokens, split_padded, split_shared
from gruppo.batch.packed import PackedBatch, SharedPrompts, Totals, pack, pack_rows, pad_tokens
from gruppo.batch.segments import IGNORE_INDEX, Segments, is_packed
from gruppo.batch.shared import pack_shared, prompt_groups

__all__ = [
    "IGNORE_INDEX", "PackedBatch", "Segments", "SharedPrompts", "Totals", "is_packed", "pack", "pack_rows",
    "pack_shared", "pad_tokens", "prompt_groups", "split_by_tokens", "split_padded", "split_shared",
]  # fmt: skip
