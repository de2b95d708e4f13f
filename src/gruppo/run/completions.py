"""Completions of a step as a table, one row per rollout as they were drawn. `docs/run_directory.md` has the columns."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from math import isfinite
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from gruppo.types import Group, Prompt, Rollout, Trajectory

UNTRAINED = ("", "other", "left_out", "masked", "no_advantage", "rejected")
"""Reasons why a token is not trained on; the first that holds counts. Empty: it is."""

OTHER, LEFT_OUT, MASKED, NO_ADVANTAGE, REJECTED = range(1, len(UNTRAINED))

ROWS_LEFT_OUT = b"rows_left_out"

LOGPS = ("old_logps", "policy_logps", "ref_logps")
IDS, NUMBERS = pa.list_(pa.int32()), pa.list_(pa.float64())
NAMES = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "prompt_index": pa.int64(),
        "sample": pa.int32(),
        "status": NAMES,
        "prompt": NAMES,
        "prompt_ids": IDS,
        "columns": NAMES,
        "completion": pa.string(),
        "stop_reason": NAMES,
        "versions": IDS,
        "reward": pa.float64(),
        "correct": pa.bool_(),
        "shaped": pa.float64(),
        "advantage": pa.float64(),
        "token_advantages": NUMBERS,
        "tokens": IDS,
        "sampled": pa.list_(pa.bool_()),
        **dict.fromkeys(("logps", *LOGPS, "entropies"), NUMBERS),
        "untrained": pa.list_(NAMES),
        "clipped": pa.list_(pa.int8()),
    }
)
"""The columns that every file has; those of reward functions come after them."""


def completions_table(step: int, groups: Sequence[Group], limit: int | None = None) -> pa.Table:
    """The rollouts of the groups, at most `limit`: whole groups, those that are trained on before others."""
    total = sum(len(group.rollouts) for group in groups)
    groups = groups if limit is None or total <= limit else _within(groups, limit)
    rows = [rollout for group in groups for rollout in group.rollouts]
    trajectories = [row.trajectory for row in rows]
    sizes = [len(group.rollouts) for group in groups]
    owner_N = np.repeat(np.arange(len(groups), dtype=np.int32), sizes)
    tokens = _Tokens(rows)
    advantages = [row.advantage for row in rows]
    columns = {
        "step": pa.array(np.full(len(rows), step)),
        "prompt_index": pa.array(np.array([group.prompt.index for group in groups], np.int64)[owner_N]),
        "sample": pa.array(np.fromiter(chain.from_iterable(map(range, sizes)), np.int32, len(rows))),
        "status": _names(owner_N, [group.status for group in groups]),
        "prompt": _names(owner_N, [group.prompt.text for group in groups]),
        "prompt_ids": pa.array([group.prompt.token_ids for group in groups], IDS).take(pa.array(owner_N)),
        "columns": _names(owner_N, [json_text(group.prompt.columns) for group in groups]),
        "completion": _texts([each.text for each in trajectories]),
        "stop_reason": pa.array([each.stop_reason for each in trajectories]).dictionary_encode(),
        "versions": pa.array([each.versions for each in trajectories], IDS),
        "reward": _numbers([row.reward for row in rows]),
        "correct": pa.array([row.correct for row in rows], pa.bool_()),
        "shaped": _numbers([row.shaped for row in rows]),
        "advantage": _numbers([None if isinstance(a, tuple) else a for a in advantages]),
        "token_advantages": tokens.lists([a if isinstance(a, tuple) else None for a in advantages]),
        "tokens": pa.ListArray.from_arrays(tokens.offsets_N, _flat((each.tokens for each in trajectories), np.int32)),
        "sampled": pa.array([each.sampled for each in trajectories], SCHEMA.field("sampled").type),
        "logps": tokens.lists([each.logps for each in trajectories]),
        **{name: tokens.lists([getattr(row, name) for row in rows]) for name in LOGPS},
        "entropies": tokens.lists(
            [row.trajectory.entropies if row.entropies is None else row.entropies for row in rows]
        ),
        "untrained": tokens.untrained([group.status == "kept" for group in groups for _ in group.rollouts]),
        "clipped": tokens.lists([row.clipped for row in rows]).cast(SCHEMA.field("clipped").type),
    }
    for kind, array in (("rewards", _numbers), ("extras", _logged), ("errors", _texts)):
        mappings = [getattr(row, kind) for row in rows]
        for name in sorted(set().union(*mappings)):
            columns[f"{kind[:-1]}/{_whole(name)}"] = array([mapping.get(name) for mapping in mappings])
    further = [pa.field(name, columns[name].type) for name in list(columns)[len(SCHEMA) :]]
    schema = pa.schema([*SCHEMA, *further], metadata={ROWS_LEFT_OUT: str(total - len(rows))})
    return pa.Table.from_arrays(list(columns.values()), schema=schema)


def groups_of(table: pa.Table) -> list[Group]:
    """The groups that `completions_table` wrote, without greedy completions and without tokens that a loss rejected."""
    groups: list[Group] = []
    rollouts: list[Rollout] = []
    for row in table.to_pylist():
        if row["sample"] == 0:
            rollouts = []
            columns = json.loads(row["columns"])
            prompt = Prompt(
                token_ids=tuple(row["prompt_ids"]), text=row["prompt"], columns=columns, index=row["prompt_index"]
            )
            groups.append(Group(prompt=prompt, rollouts=(), status=row["status"]))
        rollouts.append(_rollout(row, groups[-1].prompt))
        groups[-1] = replace(groups[-1], rollouts=tuple(rollouts))
    return groups


def _rollout(row: Mapping[str, Any], prompt: Prompt) -> Rollout:
    sampled = None if row["sampled"] is None else tuple(row["sampled"])

    def per_token(name: str) -> tuple[float, ...] | None:
        values = row[name]
        if values is None or sampled is None:
            return None if values is None else tuple(values)
        return tuple(value for value, is_sampled in zip(values, sampled, strict=True) if is_sampled)

    trajectory = Trajectory(
        prompt=prompt,
        tokens=tuple(row["tokens"]),
        sampled=sampled,
        logps=per_token("logps"),
        versions=tuple(row["versions"]),
        text=row["completion"],
        stop_reason=row["stop_reason"],
    )
    advantage = per_token("token_advantages")
    return Rollout(
        trajectory=trajectory,
        reward=row["reward"],
        rewards={name.removeprefix("reward/"): value for name, value in row.items() if name.startswith("reward/")},
        correct=row["correct"],
        shaped=row["shaped"],
        advantage=row["advantage"] if advantage is None else advantage,
        is_masked="masked" in row["untrained"],
        old_logps=per_token("old_logps"),
        policy_logps=per_token("policy_logps"),
        ref_logps=per_token("ref_logps"),
        entropies=per_token("entropies"),
    )


def parquet_bytes(table: pa.Table) -> pa.Buffer:
    """The table as a Parquet file."""
    lists = [field.name for field in table.schema if field.type == NUMBERS]
    named = [field.name for field in table.schema if field.type == NAMES]
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


def _within(groups: Sequence[Group], limit: int) -> list[Group]:
    order = sorted(range(len(groups)), key=lambda i: groups[i].status != "kept")
    totals = accumulate(len(groups[i].rollouts) for i in order)
    chosen = {i for i, total in zip(order, totals, strict=True) if total <= limit}
    return [group for i, group in enumerate(groups) if i in chosen]


class _Tokens:
    """The tokens of all rows, one after the other: N rows, T tokens."""

    def __init__(self, rows: Sequence[Rollout]) -> None:
        self.rows = rows
        self.length_N = np.array([len(row.trajectory.tokens) for row in rows], np.int64)
        self.offsets_N = _offsets(self.length_N)
        self.sampled_T: np.ndarray | None = None
        if any(row.trajectory.sampled is not None for row in rows):
            flags = (row.trajectory.sampled or (True,) * len(row.trajectory.tokens) for row in rows)
            self.sampled_T = _flat(flags, np.bool_)

    def lists(self, values: Sequence[Sequence[float] | None]) -> pa.Array:
        """A list per row from one value per sampled token, null where there are none."""
        if self.sampled_T is None:
            return pa.array(values, NUMBERS)
        known_N = np.array([v is not None for v in values], np.bool_)
        sampled_T = self.sampled_T[np.repeat(known_N, self.length_N)]
        spread_T = np.zeros(len(sampled_T))
        spread_T[sampled_T] = _flat((v for v in values if v is not None), np.float64)
        offsets_N = _offsets(np.where(known_N, self.length_N, 0))
        return pa.ListArray.from_arrays(offsets_N, pa.array(spread_T, mask=~sampled_T), mask=pa.array(~known_N))

    def untrained(self, is_kept: Sequence[bool]) -> pa.Array:
        """The reason why each token is not trained on, as a list per row."""
        reason_N = [
            LEFT_OUT if not kept else MASKED if row.is_masked else 0 if row.has_advantage else NO_ADVANTAGE
            for row, kept in zip(self.rows, is_kept, strict=True)
        ]
        reason_T = np.repeat(np.array(reason_N, np.int32), self.length_N)
        for i, row in enumerate(self.rows):
            if reason_N[i] or (row.rejected is None and not isinstance(row.advantage, tuple)):
                continue  # the same for all tokens
            start, end = self.offsets_N[i : i + 2]
            reasons = np.zeros(row.trajectory.num_sampled, np.int32)
            if row.rejected is not None:
                reasons[np.array(row.rejected, np.bool_)] = REJECTED
            if isinstance(row.advantage, tuple):
                reasons[np.array(row.advantage) == 0] = NO_ADVANTAGE
            reason_T[start:end][slice(None) if self.sampled_T is None else self.sampled_T[start:end]] = reasons
        if self.sampled_T is not None:
            reason_T[~self.sampled_T] = OTHER
        return pa.ListArray.from_arrays(self.offsets_N, pa.DictionaryArray.from_arrays(reason_T, pa.array(UNTRAINED)))


def _flat(lists: Iterable[Sequence[Any]], kind: Any) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), kind)


def _offsets(length_N: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], length_N.cumsum()]).astype(np.int32)


def _numbers(values: Sequence[float | None]) -> pa.Array:
    return pa.array(values, pa.float64())


def _names(index_N: np.ndarray, texts: list[str]) -> pa.Array:
    """A text per row out of few texts, each of which Parquet stores once."""
    return _texts(texts).dictionary_encode().take(pa.array(index_N))


def _texts(texts: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # a lone surrogate, which a model may well produce
        return pa.array([None if text is None else _whole(text) for text in texts], pa.string())


def _whole(text: str) -> str:
    """Text without half characters, which no file in UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()


def _logged(values: list[Any]) -> pa.Array:
    """Values that reward functions logged. Whole numbers beside fractions become fractions; values without a common
    type of a table become text, objects JSON."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        values, kinds = [None if value is None else float(value) for value in values], {float}
    if len(kinds) <= 1 and kinds <= {int, float, bool, list}:
        try:
            array = pa.array(values)
            if not pa.types.is_nested(getattr(array.type, "value_type", pa.null())):
                return array
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            pass
    texts = (value if isinstance(value, str | None) else json_text(value) for value in values)
    return _texts(list(texts))


def json_text(value: Any) -> str:
    """JSON text; numbers that JSON does not have become null, other objects text."""
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_finite(value))


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value
