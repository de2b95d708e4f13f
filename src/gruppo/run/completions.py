"""Completions of a step as a table: one row per rollout."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from gruppo.types import Group


def completions_table(step: int, groups: Sequence[Group]) -> pa.Table:
    """All rollouts of the groups, with what reward functions logged and where they failed."""
    rows = [(g.prompt, i, r) for g in groups for i, r in enumerate(g.rollouts)]
    columns: dict[str, list[Any]] = {
        "step": [step] * len(rows),
        "prompt_index": [p.index for p, _, _ in rows],
        "sample": [i for _, i, _ in rows],
        "prompt": [_clean(p.text) for p, _, _ in rows],
        "completion": [_clean(r.trajectory.text) for _, _, r in rows],
        "status": [g.status for g in groups for _ in g.rollouts],
        "reward": [r.reward for _, _, r in rows],
        "correct": [r.correct for _, _, r in rows],
        "shaped": [r.shaped for _, _, r in rows],
        "advantage": [r.advantage for _, _, r in rows],
        "stop_reason": [r.trajectory.stop_reason for _, _, r in rows],
        "policy_version": [r.trajectory.policy_version for _, _, r in rows],
        "tokens": [list(r.trajectory.tokens) for _, _, r in rows],
        "logps": [list(r.trajectory.logps or ()) for _, _, r in rows],
    }
    for kind, field in (("reward", "rewards"), ("extra", "extras"), ("error", "errors")):
        for name in sorted({n for _, _, r in rows for n in getattr(r, field)}):
            columns[f"{kind}/{name}"] = _column([getattr(r, field).get(name) for _, _, r in rows])
    return pa.table(columns)


def _clean(text: str) -> str:
    """Parquet refuses lone surrogates, which a model may well produce."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _column(values: list[Any]) -> list[Any]:
    """Values of one type, as a table needs them: whole numbers beside fractions become floats, other mixtures text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1 or kinds == {str}:
        return [None if value is None else _clean(str(value)) for value in values]
    return values
