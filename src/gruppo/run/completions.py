"""Completions of a step as a Parquet file, a line per rollout in the order of the draw (docs/run_directory.md).

What the lines say is the codec's (`gruppo/codec.py`); here is which of them are written, and how a file is packed.
"""

from collections.abc import Sequence
from itertools import accumulate

import pyarrow as pa
import pyarrow.parquet as pq

from gruppo import codec
from gruppo.types import Group

ROWS_LEFT_OUT = b"rows_left_out"
"""Key of a file's metadata: the number of rollouts beyond the limit."""


def completions_table(step: int, groups: Sequence[Group], limit: int | None = None) -> pa.Table:
    """The table of a step with at most `limit` rollouts: whole groups, those that were trained on first."""
    chosen = within(groups, limit)
    left_out = sum(len(group.rollouts) for group in groups) - sum(len(group.rollouts) for group in chosen)
    return codec.encode(chosen, step).replace_schema_metadata({ROWS_LEFT_OUT: str(left_out)})


def within(groups: Sequence[Group], limit: int | None) -> list[Group]:
    """Whole groups of at most `limit` rollouts, in the order of the draw; those that were trained on go first."""
    if limit is None:
        return list(groups)
    order = sorted(range(len(groups)), key=lambda i: groups[i].status != "kept")
    totals = accumulate(len(groups[i].rollouts) for i in order)
    return [groups[i] for i in sorted(i for i, total in zip(order, totals, strict=True) if total <= limit)]


def parquet_bytes(table: pa.Table) -> pa.Buffer:
    """The table as a Parquet file."""
    lists = [field.name for field in table.schema if field.type == codec.NUMBERS]
    named = [field.name for field in table.schema if field.type == codec.NAMES]
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        use_dictionary=[*named, "untrained.list.element"],  # pyright: ignore[reportArgumentType]  # names do as well
        # Log-probs are mostly float32 numbers: bytes of equal significance side by side compress to that size.
        use_byte_stream_split=[f"{name}.list.element" for name in lists],  # pyright: ignore[reportArgumentType]
        write_statistics=False,
    )
    return sink.getvalue()
