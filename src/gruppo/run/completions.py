"""Completions of a step as a table, one row per rollout as they were drawn. `docs/run_directory.md` has the columns."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
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


Update = tuple[Sequence[int], Sequence[int], Mapping[str, np.ndarray]]
"""What one update saw: numbers of rollouts among those that were trained on, their lengths, and columns of their tokens
one after the other."""

_PLAIN = {str, int, float, bool, type(None)}


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The rollouts of a step as columns of plain values, which another process can read: what `record_table` takes.

    It is made and sent while training waits, and so holds few objects.
    """

    step: int
    groups: list[tuple[int, str, tuple[int, ...], Mapping[str, Any] | str, str, int]]
    """Of each group: index, text, tokens and columns of its prompt (or the columns' JSON), status, and size."""
    rollouts: dict[str, list[Any]]
    """Fields of the rollouts and their trajectories by name; one that is None in all of them is absent."""
    flat: dict[str, list[Any]]
    """Fields with a value per token that all rollouts have, one rollout after the other: fewer objects to send."""
    rewards: dict[str, list[float | None]]
    extras: dict[str, "list[Any] | pa.Array"]
    """What reward functions logged. Values that are not plain are a column of the table already."""
    errors: dict[str, list[str | None]]
    updates: list[tuple[Sequence[int], Sequence[int], dict[str, tuple[str, bytes]]]]
    """What updates saw, the latest last, with columns as type and bytes. It stands above fields of the rollouts."""
    trained: list[int]
    """Rows of the rollouts that were trained on, which updates number; -1 for one that is left out."""
    left_out: int
    """Rollouts beyond the limit."""

    @property
    def num_rows(self) -> int:
        return sum(size for *_, size in self.groups)


def record_of(
    step: int, groups: Sequence[Group], limit: int | None = None, updates: Sequence[Update] = ()
) -> StepRecord:
    """The record of the groups, with at most `limit` rollouts: whole groups, those that are trained on first."""
    total = sum(len(group.rollouts) for group in groups)
    chosen = set(range(len(groups))) if limit is None or total <= limit else _within(groups, limit)
    rows: list[Rollout] = []
    trained: list[int] = []
    for i, group in enumerate(groups):
        size = len(group.rollouts)
        if group.status == "kept":
            trained += range(len(rows), len(rows) + size) if i in chosen else [-1] * size
        rows += group.rollouts if i in chosen else ()
    said = [row.trajectory for row in rows]
    fields: dict[str, list[Any]] = {
        # A comprehension each: the interpreter reads a slot faster so than by any function that takes its name.
        "lengths": [len(each.tokens) for each in said],
        "sampled": [each.sampled for each in said],
        "logps": [each.logps for each in said],
        "sampler_entropies": [each.entropies for each in said],
        "versions": [each.versions for each in said],
        "text": [each.text for each in said],
        "stop_reason": [each.stop_reason for each in said],
        "reward": [row.reward for row in rows],
        "correct": [row.correct for row in rows],
        "shaped": [row.shaped for row in rows],
        "advantage": [row.advantage for row in rows],
        "is_masked": [row.is_masked for row in rows],
        "old_logps": [row.old_logps for row in rows],
        "policy_logps": [row.policy_logps for row in rows],
        "ref_logps": [row.ref_logps for row in rows],
        "entropies": [row.entropies for row in rows],
        "rejected": [row.rejected for row in rows],
        "clipped": [row.clipped for row in rows],
    }
    flat = {"tokens": list(chain.from_iterable([each.tokens for each in said]))}
    for name in ("logps", "sampler_entropies"):
        with suppress(TypeError):  # some have none
            flat[name] = list(chain.from_iterable(fields[name]))
            del fields[name]
    extras = _by_name([row.extras for row in rows])
    written = [groups[i] for i in sorted(chosen)]
    columns: list[Any] = [group.prompt.columns for group in written]
    kinds = set(map(type, chain.from_iterable(each.values() for each in columns)))
    if not (kinds <= _PLAIN and set(map(type, columns)) <= {dict}):
        columns = list(map(json_text, columns))
    return StepRecord(
        step=step,
        groups=[
            (group.prompt.index, group.prompt.text, group.prompt.token_ids, each, group.status, len(group.rollouts))
            for group, each in zip(written, columns, strict=True)
        ],
        rollouts={
            name: values for name, values in fields.items() if not (rows and values[0] is None and _is_void(values))
        },
        flat=flat,
        rewards=_by_name([row.rewards for row in rows]),
        extras={
            name: values if set(map(type, values)) <= _PLAIN else _logged(values) for name, values in extras.items()
        },
        errors=_by_name([row.errors for row in rows]),
        updates=[
            (indices, lengths, {name: (column.dtype.str, column.tobytes()) for name, column in seen.items()})
            for indices, lengths, seen in updates
        ],
        trained=trained if updates else [],
        left_out=total - len(rows),
    )


def record_table(record: StepRecord) -> pa.Table:
    """The table of a record, one row per rollout."""
    num, tokens = record.num_rows, _Tokens(record)
    indices, texts, token_ids, prompts, statuses, sizes = list(zip(*record.groups, strict=True)) or [()] * 6
    owner_N = np.repeat(np.arange(len(sizes), dtype=np.int32), np.array(sizes, np.int64))
    unknown: list[Any] = [None] * num
    rollouts = defaultdict(lambda: unknown, record.rollouts)
    advantages, token_advantages = rollouts["advantage"], unknown
    if tokens.has_token_advantages:
        token_advantages = [a if isinstance(a, tuple) else None for a in advantages]
        advantages = [None if isinstance(a, tuple) else a for a in advantages]
    entropies = tokens.own("sampler_entropies")
    if "entropies" in record.rollouts:
        entropies = tokens.over(tokens.own("entropies"), entropies)
    columns = {
        "step": pa.array(np.full(num, record.step)),
        "prompt_index": pa.array(np.array(indices, np.int64)[owner_N]),
        "sample": pa.array(np.fromiter(chain.from_iterable(map(range, sizes)), np.int32, num)),
        "status": _names(owner_N, statuses),
        "prompt": _names(owner_N, texts),
        "prompt_ids": pa.array([ids for ids, size in zip(token_ids, sizes, strict=True) for _ in range(size)], IDS),
        "columns": _names(owner_N, [each if isinstance(each, str) else json_text(each) for each in prompts]),
        "completion": _texts(rollouts["text"]),
        "stop_reason": pa.array(rollouts["stop_reason"], pa.string()).dictionary_encode(),
        "versions": pa.array(rollouts["versions"], IDS),
        "reward": _numbers(rollouts["reward"]),
        "correct": pa.array(rollouts["correct"], pa.bool_()),
        "shaped": _numbers(rollouts["shaped"]),
        "advantage": _numbers(advantages),
        "token_advantages": tokens.lists(tokens.known(token_advantages)),
        "tokens": pa.ListArray.from_arrays(tokens.offsets_N, pa.array(record.flat["tokens"], pa.int32())),
        "sampled": pa.array(rollouts["sampled"], SCHEMA.field("sampled").type),
        "logps": tokens.lists(tokens.own("logps")),
        **{name: tokens.lists(tokens.own(name), name) for name in LOGPS},
        "entropies": tokens.lists(entropies, "entropies"),
        "untrained": tokens.untrained(np.array([status == "kept" for status in statuses], np.bool_)[owner_N]),
        "clipped": tokens.lists(tokens.own("clipped"), "clipped", SCHEMA.field("clipped").type),
    }
    columns |= {f"reward/{_whole(name)}": _numbers(values) for name, values in record.rewards.items()}
    for name, values in record.extras.items():
        columns[f"extra/{_whole(name)}"] = values if isinstance(values, pa.Array) else _logged(values)
    columns |= {f"error/{_whole(name)}": _texts(values) for name, values in record.errors.items()}
    further = [pa.field(name, columns[name].type) for name in list(columns)[len(SCHEMA) :]]
    schema = pa.schema([*SCHEMA, *further], metadata={ROWS_LEFT_OUT: str(record.left_out)})
    return pa.Table.from_arrays(list(columns.values()), schema=schema)


def completions_table(step: int, groups: Sequence[Group], limit: int | None = None) -> pa.Table:
    """The table of groups whose rollouts hold all there is to write."""
    return record_table(record_of(step, groups, limit))


def groups_of(table: pa.Table) -> list[Group]:
    """The groups that `completions_table` wrote, without greedy completions and without tokens that a loss rejected."""
    found = table.schema
    for field in SCHEMA:
        if found.get_field_index(field.name) < 0 or found.field(field.name).type != field.type:
            raise ValueError(f"it has no column {field.name!r} of type {field.type}")
    for field in found:
        if field.name.startswith("reward/") and field.type != pa.float64():
            raise ValueError(f"column {field.name!r} has no numbers")
    groups: list[Group] = []
    rollouts: list[Rollout] = []
    for row in table.to_pylist():
        if row["sample"] == 0:
            rollouts = []
            columns = dict(json.loads(row["columns"]).items())
            prompt = Prompt(
                token_ids=_entries(row, "prompt_ids"), text=row["prompt"], columns=columns, index=row["prompt_index"]
            )
            groups.append(Group(prompt=prompt, rollouts=(), status=row["status"]))
        rollouts.append(_rollout(row, groups[-1].prompt))
        groups[-1] = replace(groups[-1], rollouts=tuple(rollouts))
    return groups


def _entries(row: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """The values of a list in a row, each of which must be there."""
    values = tuple(row[name])
    if None in values:
        raise ValueError(f"a value in {name!r} is absent")
    return values


def _rollout(row: Mapping[str, Any], prompt: Prompt) -> Rollout:
    sampled = None if row["sampled"] is None else tuple(row["sampled"])

    def per_token(name: str) -> tuple[float, ...] | None:
        values = row[name]
        if values is None or sampled is None:
            return None if values is None else _entries(row, name)
        kept = [value for value, is_sampled in zip(values, sampled, strict=True) if is_sampled]
        return _entries({name: kept}, name)

    trajectory = Trajectory(
        prompt=prompt,
        tokens=_entries(row, "tokens"),
        sampled=sampled,
        logps=per_token("logps"),
        versions=_entries(row, "versions"),
        text=row["completion"],
        stop_reason=row["stop_reason"],
    )
    advantage = per_token("token_advantages")
    if advantage is None and row["advantage"] is None:
        raise ValueError("a value in 'advantage' is absent")
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


def _within(groups: Sequence[Group], limit: int) -> set[int]:
    order = sorted(range(len(groups)), key=lambda i: groups[i].status != "kept")
    totals = accumulate(len(groups[i].rollouts) for i in order)
    return {i for i, total in zip(order, totals, strict=True) if total <= limit}


def _is_void(values: Sequence[Any]) -> bool:
    return values.count(None) == len(values)


def _by_name(mappings: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    names = sorted(set().union(*mappings)) if any(mappings) else ()
    return {name: [each.get(name) for each in mappings] for name in names}


@dataclass(frozen=True, slots=True)
class _Values:
    """Values of the sampled tokens of some rows, one row after the other."""

    known_N: np.ndarray
    """Which rows."""
    flat: np.ndarray
    start_N: np.ndarray
    """Where those of each row begin."""


class _Tokens:
    """The tokens of all rows, one after the other: N rows, T tokens, S of them sampled."""

    def __init__(self, record: StepRecord) -> None:
        num = record.num_rows
        self.record = record
        self.length_N = np.array(record.rollouts["lengths"], np.int64)
        self.offsets_N = _offsets(self.length_N)
        self.num_N = self.length_N
        """Sampled tokens of each row."""
        self.sampled_T: np.ndarray | None = None
        if "sampled" in record.rollouts:
            flags = zip(record.rollouts["sampled"], record.rollouts["lengths"], strict=True)
            self.sampled_T = _flat((each or (True,) * length for each, length in flags), np.bool_)
            self.num_N = np.diff(np.concatenate([[0], self.sampled_T.cumsum()])[self.offsets_N])
        self.advantages = record.rollouts["advantage"]
        self.has_token_advantages = tuple in set(map(type, self.advantages))
        self.is_masked_N = np.array(record.rollouts["is_masked"], np.bool_)
        self.seen = [
            {name: np.frombuffer(data, kind) for name, (kind, data) in seen.items()} for _, _, seen in record.updates
        ]
        """Columns of each update."""
        self.update_N = np.full(num, -1)
        """The last update that trained on each row, and where its tokens begin there."""
        self.start_N = np.zeros(num, np.int64)
        trained = np.array(record.trained, np.int64)
        for i, (indices, lengths, _) in enumerate(record.updates):
            row = trained[np.array(indices, np.int64)]
            self.update_N[row[row >= 0]] = i
            self.start_N[row[row >= 0]] = _offsets(np.array(lengths, np.int64))[:-1][row >= 0]
        self.update_N[self.is_masked_N | (self.num_N == 0)] = -1

    def own(self, name: str) -> _Values:
        """A field of the rollouts."""
        if name in self.record.flat:
            values = np.array(self.record.flat[name], np.float64)
            return _Values(np.ones(len(self.num_N), np.bool_), values, _offsets(self.num_N)[:-1])
        return self.known(self.record.rollouts.get(name, ()))

    def known(self, lists: Sequence[Sequence[float] | None]) -> _Values:
        """Values of the rows that have a list."""
        known_N = np.zeros(len(self.num_N), np.bool_)
        if not _is_void(lists):
            known_N[:] = [each is not None for each in lists]
        flat = _flat((each for each in lists if each is not None), np.float64)
        return _Values(known_N, flat, _offsets(np.where(known_N, self.num_N, 0))[:-1])

    def over(self, first: _Values, second: _Values) -> _Values:
        """The values of the first, and of the second where the first has none."""
        start_N = np.where(first.known_N, first.start_N, len(first.flat) + second.start_N)
        return _Values(first.known_N | second.known_N, np.concatenate([first.flat, second.flat]), start_N)

    def last(self, own: _Values, name: str) -> _Values:
        """What the last updates saw, over the values of the rollouts."""
        parts = [columns.get(name) for columns in self.seen]
        ends = list(accumulate((0 if part is None else len(part) for part in parts), initial=0))
        base = np.array([-1 if part is None else end for part, end in zip([*parts, None], ends, strict=True)])
        base_N = base[self.update_N]
        seen = np.concatenate([part for part in parts if part is not None])
        return self.over(_Values(base_N >= 0, seen, base_N + self.start_N), own)

    def gathered(self, own: _Values, name: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Rows with a value per sampled token, `[N]` bool, and the values of all of them, in order."""
        values = self.last(own, name) if any(name in columns for columns in self.seen) else own
        num_N = np.where(values.known_N, self.num_N, 0)
        offsets_N = _offsets(num_N)
        at_S = np.repeat(values.start_N - offsets_N[:-1], num_N) + np.arange(offsets_N[-1])
        return values.known_N, values.flat[at_S]

    def lists(self, own: _Values, name: str = "", kind: pa.ListType = NUMBERS) -> pa.Array:
        """A list per row with a number at each sampled token, null for a row without.

        Args:
            own: values of the rollouts, which stand where no update has a column of this name.
        """
        known_N, values_S = self.gathered(own, name)
        numbers = pa.array(values_S, kind.value_type, safe=False)
        if self.sampled_T is not None:
            sampled_T = self.sampled_T[np.repeat(known_N, self.length_N)]
            spread_T = np.zeros(len(sampled_T), values_S.dtype)
            spread_T[sampled_T] = values_S
            numbers = pa.array(spread_T, kind.value_type, mask=~sampled_T, safe=False)
        offsets_N = _offsets(np.where(known_N, self.length_N, 0))
        return pa.ListArray.from_arrays(offsets_N, numbers, mask=None if known_N.all() else pa.array(~known_N))

    def untrained(self, is_kept_N: np.ndarray) -> pa.Array:
        """The reason why each token is not trained on, as a list per row."""
        advantages = self.advantages
        if self.has_token_advantages:
            has_advantage_N = np.array([any(a) if isinstance(a, tuple) else a != 0 for a in advantages], np.bool_)
        else:
            has_advantage_N = np.array(advantages, np.float64) != 0
        reason_N = np.select([~is_kept_N, self.is_masked_N, ~has_advantage_N], [LEFT_OUT, MASKED, NO_ADVANTAGE], 0)
        reason_S = np.repeat(reason_N, self.num_N)
        is_open_S = reason_S == 0  # by its row, and so by the numbers of each token
        known_N, rejected_S = self.gathered(self.own("rejected"), "rejected")
        _mark(reason_S, is_open_S, np.repeat(known_N, self.num_N), rejected_S != 0, REJECTED)
        if self.has_token_advantages:
            is_tuple_N = np.array([isinstance(a, tuple) for a in advantages], np.bool_)
            advantage_S = _flat((a for a in advantages if isinstance(a, tuple)), np.float64)
            _mark(reason_S, is_open_S, np.repeat(is_tuple_N, self.num_N), advantage_S == 0, NO_ADVANTAGE)
        reason_T = reason_S
        if self.sampled_T is not None:
            reason_T = np.full(len(self.sampled_T), OTHER)
            reason_T[self.sampled_T] = reason_S
        names = pa.DictionaryArray.from_arrays(pa.array(reason_T, pa.int32()), pa.array(UNTRAINED))
        return pa.ListArray.from_arrays(self.offsets_N, names)


def _mark(reason_S: np.ndarray, is_open_S: np.ndarray, is_known_S: np.ndarray, holds: np.ndarray, reason: int) -> None:
    """Give tokens a reason where it holds; `holds` has an entry for each token whose row is known."""
    holds_S = np.zeros(len(reason_S), np.bool_)
    holds_S[is_known_S] = holds
    reason_S[is_open_S & holds_S] = reason


def _flat(lists: Iterable[Sequence[Any]], kind: Any) -> np.ndarray:
    return np.fromiter(chain.from_iterable(lists), kind)


def _offsets(length_N: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], length_N.cumsum()]).astype(np.int32)


def _numbers(values: Sequence[float | None]) -> pa.Array:
    return pa.array(values, pa.float64())


def _names(index_N: np.ndarray, texts: Sequence[str]) -> pa.Array:
    """A text per row out of few texts, each of which Parquet stores once."""
    found = _texts(texts).dictionary_encode()
    return pa.DictionaryArray.from_arrays(found.indices.to_numpy()[index_N], found.dictionary)


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
