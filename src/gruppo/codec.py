"""Codec of rollouts: groups as an Arrow table, a line per rollout, and back.

The one form in which rollouts leave the process: completions on disk, rollouts that wait in a checkpoint, and what the
first rank sends the others. `docs/run_directory.md` explains the columns. Written once and read again, a table is the
same: what the codec cannot keep exactly (objects that rewards logged) it turns into text the first time.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain, groupby
from math import isfinite
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from gruppo.types import ENVIRONMENT, LOST, Group, Prompt, Rollout, Trajectory

UNTRAINED = ("", "other", "left_out", "masked", "no_advantage", "rejected")
"""Reasons why a token is not trained on; the first that holds counts. Empty: it is."""
_OTHER, _LEFT_OUT, _MASKED, _NO_ADVANTAGE, _REJECTED = range(1, len(UNTRAINED))

GREEDY = -1
"""Sample number of the greedy completion of a group."""

IDS, NUMBERS, FLAGS = pa.list_(pa.int32()), pa.list_(pa.float64()), pa.list_(pa.bool_())
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
        "messages": pa.string(),
        "stop_reason": NAMES,
        "versions": IDS,
        "reward": pa.float64(),
        "correct": pa.bool_(),
        "shaped": pa.float64(),
        "advantage": pa.float64(),
        "token_advantages": NUMBERS,
        "tokens": IDS,
        "sampled": FLAGS,
        **dict.fromkeys(("logps", "old_logps", "policy_logps", "ref_logps", "entropies"), NUMBERS),
        "untrained": pa.list_(NAMES),
        "clipped": pa.list_(pa.int8()),
    }
)
"""The columns that every table has; `reward/NAME`, `extra/NAME` and `error/NAME` of reward functions follow them."""
LATER = frozenset({"messages"})
"""Columns that tables of earlier versions lack."""


def encode(groups: Sequence[Group], step: int = 0, *, with_greedy: bool = False) -> pa.Table:
    """The table of groups. `with_greedy`: also of their greedy completions, as sample -1."""
    lines = [
        (group, sample, rollout)
        for group in groups
        for sample, rollout in [
            *([(GREEDY, group.greedy)] if with_greedy and group.greedy is not None else []),
            *enumerate(group.rollouts),
        ]
    ]
    rollouts = [rollout for _, _, rollout in lines]
    prompts = [group.prompt for group, _, _ in lines]
    said = [rollout.trajectory for rollout in rollouts]
    json_of = {id(group.prompt): json_text(group.prompt.columns) for group in groups}
    advantages = [rollout.advantage for rollout in rollouts]

    def per_token(values: Iterable[Sequence[Any] | None], kind: pa.ListType = NUMBERS) -> pa.Array:
        """A list per line with a value at each sampled token, null at the tokens of others."""
        return pa.array([_spread(s.sampled, each) for s, each in zip(said, values, strict=True)], kind)

    columns = {
        "step": pa.array([step] * len(lines), pa.int64()),
        "prompt_index": pa.array([prompt.index for prompt in prompts], pa.int64()),
        "sample": pa.array([sample for _, sample, _ in lines], pa.int32()),
        "status": _names([group.status for group, _, _ in lines]),
        "prompt": _names([s.prompt.text for s in said]),
        "prompt_ids": pa.array([s.prompt_ids for s in said], IDS),
        "columns": _names([json_of[id(prompt)] for prompt in prompts]),
        "completion": _texts([s.text for s in said]),
        "messages": _texts([None if s.messages is None else json_text(s.messages) for s in said]),
        "stop_reason": _names([s.stop_reason for s in said]),
        "versions": pa.array([s.versions for s in said], IDS),
        "reward": _floats([r.reward for r in rollouts]),
        "correct": pa.array([r.correct for r in rollouts], pa.bool_()),
        "shaped": _floats([r.shaped for r in rollouts]),
        "advantage": _floats([None if isinstance(a, tuple) else a for a in advantages]),
        "token_advantages": per_token(a if isinstance(a, tuple) else None for a in advantages),
        "tokens": pa.array([s.tokens for s in said], IDS),
        "sampled": pa.array([s.sampled for s in said], FLAGS),
        "logps": per_token(s.logps for s in said),
        "old_logps": per_token(r.old_logps for r in rollouts),
        "policy_logps": per_token(r.policy_logps for r in rollouts),
        "ref_logps": per_token(r.ref_logps for r in rollouts),
        "entropies": per_token(r.entropies or s.entropies for r, s in zip(rollouts, said, strict=True)),
        "untrained": _reasons([_untrained(rollout, group.status == "kept") for group, _, rollout in lines]),
        "clipped": per_token((r.clipped for r in rollouts), pa.list_(pa.int8())),
    }
    for prefix, make in {"reward": _floats, "extra": _logged, "error": _texts}.items():
        given = [getattr(rollout, f"{prefix}s") for rollout in rollouts]
        for name in sorted(set().union(*given)):
            columns[f"{prefix}/{_whole(name)}"] = make([each.get(name) for each in given])
    further = [pa.field(name, columns[name].type) for name in list(columns)[len(SCHEMA) :]]
    return pa.Table.from_arrays(list(columns.values()), schema=pa.schema([*SCHEMA, *further]))


def decode(table: pa.Table, prompts: Mapping[int, Prompt] | None = None) -> list[Group]:
    """The groups of a table. A ValueError or KeyError tells what is wrong with one that `encode` did not make.

    Entropies are the policy's in its last update where the table has that update's log-probs, else the sampler's. Which
    tokens a loss rejected is not read back.

    Args:
        prompts: the prompts by their numbers, with what a table does not hold; None: as the table has them. A
            trajectory whose prompt has other tokens keeps them.
    """
    check(table)
    columns = {name: _values(table.column(name)) for name in table.column_names if name != "untrained"}
    columns["is_masked"] = _has_reason(table, _MASKED).tolist()
    kinds = {kind: [name for name in columns if name.startswith(f"{kind}/")] for kind in ("reward", "extra", "error")}
    groups: list[Group] = []
    lines = range(table.num_rows)
    for _, run in groupby(lines, key=group_numbers(table).tolist().__getitem__):
        first, *others = run
        index = columns["prompt_index"][first]
        prompt = prompts[index] if prompts is not None else _prompt(columns, first)
        made = {i: _rollout(columns, i, _own_prompt(columns, i, prompt), kinds) for i in (first, *others)}
        greedy = made.pop(first) if columns["sample"][first] == GREEDY else None
        status = columns["status"][first]
        groups.append(Group(prompt=prompt, rollouts=tuple(made.values()), status=status, greedy=greedy))
    return groups


def to_bytes(table: pa.Table) -> bytes:
    """A table as Arrow's stream format has it; streams may follow each other in a file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_bytes(content: bytes) -> list[pa.Table]:
    """The tables of one or several streams. An ArrowException is a ValueError."""
    source, tables = pa.BufferReader(content), []
    while source.tell() < len(content):
        tables.append(pa.ipc.open_stream(source).read_all())
    return tables


def check(table: pa.Table) -> None:
    """Raise ValueError for a table that lacks a column, or has it in another type."""
    for field in SCHEMA:
        if field.name in LATER and field.name not in table.column_names:
            continue
        if table.schema.get_field_index(field.name) < 0 or table.schema.field(field.name).type != field.type:
            raise ValueError(f"it has no column {field.name!r} of type {field.type}")
    for field in table.schema:
        if field.name.startswith("reward/") and field.type != pa.float64():
            raise ValueError(f"column {field.name!r} has no numbers")


def group_numbers(table: pa.Table) -> np.ndarray:
    """The number of each line's group: a group begins where samples are counted anew, or with another prompt."""
    sample_N, prompt_N = (table.column(name).to_numpy() for name in ("sample", "prompt_index"))
    begins_N = np.ones(table.num_rows, np.bool_)
    begins_N[1:] = (sample_N[1:] <= sample_N[:-1]) | (prompt_N[1:] != prompt_N[:-1])
    return begins_N.cumsum() - 1


# --- to columns -------------------------------------------------------------------------------------------------------


def _spread(sampled: Sequence[bool] | None, values: Sequence[Any] | None) -> Sequence[Any] | None:
    """Values of the sampled tokens at their places among all tokens.

    >>> _spread((True, False, True), (-0.5, -0.1))
    [-0.5, None, -0.1]
    """
    if sampled is None or values is None:
        return values
    given = iter(values)
    return [next(given) if is_sampled else None for is_sampled in sampled]


def _untrained(rollout: Rollout, is_kept: bool) -> list[int]:
    """Why each token of a rollout is not trained on, as a place in `UNTRAINED`."""
    trajectory, advantage = rollout.trajectory, rollout.advantage
    if not is_kept or rollout.is_masked or not rollout.has_advantage:
        reasons = [_LEFT_OUT if not is_kept else _MASKED if rollout.is_masked else _NO_ADVANTAGE]
        reasons *= trajectory.num_sampled
    else:
        reasons = [0] * trajectory.num_sampled
        if rollout.rejected is not None:
            reasons = [_REJECTED if is_rejected else 0 for is_rejected in rollout.rejected]
        if isinstance(advantage, tuple):
            reasons = [why if a else _NO_ADVANTAGE for why, a in zip(reasons, advantage, strict=True)]
    return [_OTHER if why is None else why for why in _spread(trajectory.sampled, reasons) or ()]


def _reasons(codes: Sequence[Sequence[int]]) -> pa.Array:
    ends = pa.array([0, *accumulate(map(len, codes))], pa.int32())
    flat = pa.array(np.fromiter(chain.from_iterable(codes), np.int32))
    return pa.ListArray.from_arrays(ends, pa.DictionaryArray.from_arrays(flat, pa.array(UNTRAINED)))


def _floats(values: Sequence[float | None]) -> pa.Array:
    return pa.array(values, pa.float64())


def _names(texts: Sequence[str]) -> pa.Array:
    return _texts(texts).dictionary_encode()


def _texts(texts: Sequence[str | None]) -> pa.Array:
    try:
        return pa.array(texts, pa.string())
    except UnicodeEncodeError:  # a lone surrogate, which a model may well produce
        return pa.array([None if text is None else _whole(text) for text in texts], pa.string())


def _whole(text: str) -> str:
    """Text without half characters, which no file in UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode()


def _logged(values: Sequence[Any]) -> pa.Array:
    """Values that reward functions logged. Whole numbers beside fractions become fractions; values without a common
    type become text, objects JSON."""
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
    return _texts([value if isinstance(value, str | None) else json_text(value) for value in values])


def json_text(value: Any) -> str:
    """JSON text; numbers that JSON does not have become null, other objects text."""
    try:
        return _ENCODER.encode(value)
    except ValueError:
        return _ENCODER.encode(_finite(value))


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not isfinite(value) else value


# --- from columns -----------------------------------------------------------------------------------------------------


def _values(column: pa.ChunkedArray) -> list[Any]:
    """The values of a column, lists as tuples."""
    if not pa.types.is_list(column.type):
        return column.to_pylist()
    lists = column.combine_chunks()
    values = lists.flatten()
    is_plain = not values.null_count and not pa.types.is_dictionary(values.type)
    # Several times as fast, and a step has millions of numbers.
    flat = values.to_numpy(zero_copy_only=False).tolist() if is_plain else values.to_pylist()
    starts, known = [0, *accumulate(lists.value_lengths().fill_null(0).to_pylist())], lists.is_valid().to_pylist()
    return [tuple(flat[starts[i] : starts[i + 1]]) if is_known else None for i, is_known in enumerate(known)]


def _has_reason(table: pa.Table, reason: int) -> np.ndarray:
    """Lines of which a token is not trained on for this reason."""
    lists = table.column("untrained").combine_chunks()
    line_T = np.repeat(np.arange(len(lists)), lists.value_lengths().fill_null(0).to_numpy())
    names = lists.flatten()
    has_it_T = pa.compute.equal(names.cast(pa.string()), UNTRAINED[reason]).to_numpy(zero_copy_only=False)  # type: ignore[attr-defined]  # made at run time
    return np.bincount(line_T[has_it_T], minlength=len(lists)) > 0


def _prompt(columns: Mapping[str, list[Any]], i: int) -> Prompt:
    own = dict(json.loads(columns["columns"][i]))
    ids = _known("prompt_ids", columns["prompt_ids"][i])
    return Prompt(token_ids=ids, text=columns["prompt"][i], columns=own, index=columns["prompt_index"][i])


def _own_prompt(columns: Mapping[str, list[Any]], i: int, prompt: Prompt) -> Prompt:
    """The prompt of a trajectory: its group's, unless an environment gave it one of its own."""
    ids = _known("prompt_ids", columns["prompt_ids"][i])
    return prompt if ids == prompt.token_ids else replace(prompt, token_ids=ids, text=columns["prompt"][i])


def _messages(text: str | None) -> tuple[Any, ...] | None:
    return None if text is None else tuple(json.loads(text))


def _rollout(columns: Mapping[str, list[Any]], i: int, prompt: Prompt, kinds: Mapping[str, Sequence[str]]) -> Rollout:
    sampled = columns["sampled"][i]

    def per_token(name: str) -> tuple[Any, ...] | None:
        values = columns[name][i]
        if values is not None and sampled is not None:
            values = tuple(v for v, is_sampled in zip(values, sampled, strict=True) if is_sampled)
        return values if values is None else _known(name, values)

    def by_name(kind: str) -> dict[str, Any]:
        return {name.removeprefix(f"{kind}/"): columns[name][i] for name in kinds[kind]}

    errors = {name: text for name, text in by_name("error").items() if text is not None}
    stop_reason = columns["stop_reason"][i]
    advantages, policy_logps, entropies = map(per_token, ("token_advantages", "policy_logps", "entropies"))
    (advantage,) = _known("advantage", (columns["advantage"][i],)) if advantages is None else (advantages,)
    trajectory = Trajectory(
        prompt=prompt,
        tokens=_known("tokens", columns["tokens"][i]),
        sampled=sampled,
        logps=per_token("logps"),
        entropies=entropies if policy_logps is None else None,
        versions=_known("versions", columns["versions"][i]),  # type: ignore[arg-type]  # two numbers
        text=columns["completion"][i],
        stop_reason=stop_reason,
        messages=_messages(columns["messages"][i]) if "messages" in columns else None,
        error=errors.get(ENVIRONMENT, "") if stop_reason in LOST else "",
    )
    return Rollout(
        trajectory=trajectory,
        reward=columns["reward"][i],
        rewards=by_name("reward"),
        correct=columns["correct"][i],
        extras={name: value for name, value in by_name("extra").items() if value is not None},
        errors=errors,
        shaped=columns["shaped"][i],
        advantage=advantage,
        is_masked=columns["is_masked"][i],
        old_logps=per_token("old_logps"),
        ref_logps=per_token("ref_logps"),
        policy_logps=policy_logps,
        entropies=None if policy_logps is None else entropies,
        clipped=per_token("clipped"),
    )


def _known(name: str, values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Values each of which must be there."""
    if values is None or None in values:
        raise ValueError(f"a value in {name!r} is absent")
    return values
