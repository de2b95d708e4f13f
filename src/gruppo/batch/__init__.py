"""Packed batches: sequences as flat tensors.

    segments.py    Segments: which slot belongs to which sequence, and sums over a sequence
    pack.py        rollouts -> PackedBatch; the only shift by one of a run is here
    shared.py      the same with each prompt computed once per group
    batch.py       PackedBatch: the tensors of one forward and its loss; SharedPrompts: rows of shared prompts
    padded.py      padded [B, L] <-> packed [T]
    microbatch.py  which sequences share a forward, under a token budget
    totals.py      Totals: what a whole optimizer step divides by

`docs/dataflow.md` shows one batch in all layouts. A new layout is a new function beside `pack` that returns a
`PackedBatch`; nothing downstream knows how the slots were laid out.
"""

from gruppo.batch.batch import PackedBatch, SharedPrompts
from gruppo.batch.microbatch import split_by_tokens, split_padded, split_shared
from gruppo.batch.pack import pack
from gruppo.batch.padded import is_packed, pack_rows, pad_tokens
from gruppo.batch.segments import IGNORE_INDEX, Segments
from gruppo.batch.shared import pack_shared, prompt_groups
from gruppo.batch.totals import Totals

__all__ = [
    "IGNORE_INDEX",
    "PackedBatch",
    "Segments",
    "SharedPrompts",
    "Totals",
    "is_packed",
    "pack",
    "pack_rows",
    "pack_shared",
    "pad_tokens",
    "prompt_groups",
    "split_by_tokens",
    "split_padded",
    "split_shared",
]
