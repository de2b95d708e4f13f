"""Table: the numbers that rules look at, from a run's metrics, completions and newest checkpoint."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gruppo.codec import group_numbers
from gruppo.errors import GruppoError
from gruppo.run.reader import RunReader, read_json, read_lines

if TYPE_CHECKING:
    import pyarrow as pa

MOST_FILES = 32
"""Files of completions to read, spread over the run: more would change no finding and take time."""
MOST_WEIGHTS = 1 << 16
"""Numbers to read from each tensor of a checkpoint; the share of lost updates needs no more."""
NGRAM = 4
"""Tokens in a piece that counts as repeated when it recurs; shorter pieces recur in any text."""

_FACTOR = np.uint64(6364136223846793005)  # Knuth's for 64-bit generators: products wrap around

Points = list[tuple[int, float]]
"""Steps with their values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """The `N` completions of one step."""

    step: int
    prompts: list[str]
    columns: list[str]
    """Other columns of the prompts, as JSON."""
    group_N: np.ndarray
    """Group number of each completion."""
    reward_N: np.ndarray
    correct_N: np.ndarray
    """1 right, 0 wrong, NaN not judged."""
    credit_N: np.ndarray
    """|advantage| x trained tokens: roughly its share of the step's gradient."""
    length_N: np.ndarray
    """Tokens that the policy sampled."""
    distinct_N: np.ndarray
    """Share of distinct pieces of `NGRAM` of them; NaN for a shorter text."""
    gap_T: np.ndarray
    """|sampler's log-prob - trainer's| of each token that has both."""
    errors: dict[str, str]
    """First failure of each reward function, and of the environment."""
    stops: Mapping[str, int] = field(default_factory=dict)
    """Completions by stop reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updates:
    """Last update, from a checkpoint."""

    step: int
    update: np.ndarray
    """Size of AdamW's step at each weight, at the highest lr of the run."""
    spacing: np.ndarray
    """Distance of each weight to the next float32 number; weights of exactly 0 are left out."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Numbers of a run.

    >>> table = Table(metrics=[{"step": 1, "reward/mean": 0.5}, {"step": 2, "reward/mean": None}])
    >>> table.series("reward/mean")
    [(1, 0.5)]
    """

    metrics: Sequence[Mapping[str, Any]]
    config: Mapping[str, Any] = field(default_factory=dict)
    rollouts: Sequence[Rollouts] = ()
    correct_by: str | None = None
    """Reward that decides which answers are right."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weight of each reward; 1 if missing."""
    held_out: Sequence[Mapping[str, Any]] = ()
    """Held-out rows: `prompt` and other columns."""
    updates: Updates | None = None

    @classmethod
    def of(cls, run: RunReader) -> Self:
        """Table of a run directory; unreadable parts are left out."""
        lines = [line for line in run.metrics() if type(line.get("step")) is int]
        starts = [event for event in run.events() if event.get("event") == "start"]
        decides, weights = (starts[-1].get(name) if starts else None for name in ("correct_by", "weights"))
        return cls(
            metrics=lines,
            config=run.config(),
            correct_by=decides if isinstance(decides, str) else None,
            weights={k: v for k, v in weights.items() if _is_number(v)} if isinstance(weights, dict) else {},
            rollouts=_read_rollouts(run),
            held_out=read_lines(run.held_out),
            updates=_read_updates(run, [line["optim/lr"] for line in lines if _is_number(line.get("optim/lr"))]),
        )

    @cached_property
    def keys(self) -> list[str]:
        return list(dict.fromkeys(name for line in self.metrics for name in line if name != "step"))

    @cached_property
    def steps(self) -> list[int]:
        """Steps taken; the evaluation before the first does not count."""
        return [line["step"] for line in self.metrics if line["step"] > 0]

    def series(self, name: str) -> Points:
        """Steps with finite values of a key. Gaps between sampler and trainer may come from the completions."""
        found = [(line["step"], line[name]) for line in self.metrics if _is_number(line.get(name))]
        if not found and name in _GAPS:
            found = [(r.step, float(_GAPS[name](r.gap_T))) for r in self.rollouts if len(r.gap_T)]
        return found


_GAPS = {"sampler/logp_gap_mean": np.mean, "sampler/logp_gap_max": np.max}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and isfinite(value)


def _read_rollouts(run: RunReader) -> list[Rollouts]:
    steps = run.completion_steps()
    if len(steps) > MOST_FILES:
        steps = sorted({steps[i] for i in np.linspace(0, len(steps) - 1, MOST_FILES).round().astype(int)})
    found = []
    for step in steps:
        try:
            found.append(_rollouts(step, run.completions(step)))
        except (GruppoError, KeyError, ValueError):  # a damaged file, or one of another version
            continue
    return found


def _rollouts(step: int, table: "pa.Table") -> Rollouts:
    tokens_N = _counts(table, "tokens")
    tokens = _flat(table, "tokens", np.int64)
    ends = np.cumsum(tokens_N)
    rows = [tokens[end - n : end] for end, n in zip(ends, tokens_N, strict=True)]
    rows = [_own(row, flags) for row, flags in zip(rows, table["sampled"], strict=True)]
    advantage_N = np.abs(_numbers(table, "advantage"))
    trained_T = np.append(_is_trained(table), False).astype(np.int64)  # one more, for empty completions at the end
    trained_N = np.where(tokens_N > 0, np.add.reduceat(trained_T, ends - tokens_N), 0) if len(rows) else np.zeros(0)
    prompts = table["prompt"].to_pylist()
    failed = [name for name in table.column_names if name.startswith("error/")]
    texts = {name.removeprefix("error/"): [t for t in table[name].to_pylist() if t] for name in failed}
    return Rollouts(
        step=step,
        prompts=prompts,
        columns=table["columns"].to_pylist(),
        group_N=group_numbers(table),
        reward_N=_numbers(table, "reward"),
        correct_N=np.array([np.nan if c is None else float(c) for c in table["correct"].to_pylist()]),
        credit_N=np.nan_to_num(advantage_N) * trained_N,
        length_N=np.array([len(row) for row in rows], np.int64),
        distinct_N=np.array([distinct_share(row) for row in rows]),
        gap_T=_gap(table),
        errors={name: found[0] for name, found in texts.items() if found},
        stops=Counter(table["stop_reason"].to_pylist()),
    )


def _own(tokens: np.ndarray, sampled: Any) -> np.ndarray:
    """The tokens that the policy sampled."""
    return tokens[sampled.values.to_numpy(zero_copy_only=False)] if sampled.is_valid else tokens


def distinct_share(tokens: np.ndarray) -> float:
    """Share of distinct pieces of `NGRAM` tokens: 1 if nothing repeats.

    >>> distinct_share(np.array([1, 2, 3, 4, 5])), distinct_share(np.array([7, 7, 7, 7, 7, 7]))
    (1.0, 0.3333333333333333)
    """
    if len(tokens) < NGRAM:
        return float("nan")
    num = len(tokens) - NGRAM + 1
    keys = np.zeros(num, np.uint64)
    for i in range(NGRAM):  # hash each piece: much faster to compare than tokens
        keys = keys * _FACTOR + tokens[i : i + num].astype(np.uint64)
    keys.sort()
    return (1 + np.count_nonzero(keys[1:] != keys[:-1])) / num


def _gap(table: "pa.Table") -> np.ndarray:
    """Distances between the log-probs of sampler and trainer, where both are known."""
    import pyarrow.compute as pc

    rows = table.filter(pc.and_(table["logps"].is_valid(), table["old_logps"].is_valid()))  # type: ignore[attr-defined]  # made at run time
    sampler_T, trainer_T = _flat(rows, "logps", np.float64), _flat(rows, "old_logps", np.float64)
    gap_T = np.abs(sampler_T - trainer_T)
    return gap_T[np.isfinite(gap_T)]


def _counts(table: "pa.Table", name: str) -> np.ndarray:
    import pyarrow.compute as pc

    return pc.list_value_length(table[name]).to_numpy(zero_copy_only=False)  # type: ignore[attr-defined]  # made at run time


def _flat(table: "pa.Table", name: str, kind: Any) -> np.ndarray:
    """Values of a list column, flattened; null is NaN."""
    import pyarrow.compute as pc

    values = pc.list_flatten(table[name])  # type: ignore[attr-defined]  # made at run time
    return values.to_numpy().astype(kind)


def _is_trained(table: "pa.Table") -> np.ndarray:
    """True for each token that is trained on."""
    import pyarrow as pa
    import pyarrow.compute as pc

    reasons = pc.list_flatten(table["untrained"]).cast(pa.string())  # type: ignore[attr-defined]  # made at run time
    return pc.equal(reasons, "").to_numpy(zero_copy_only=False)  # type: ignore[attr-defined]  # made at run time


def _numbers(table: "pa.Table", name: str) -> np.ndarray:
    return table[name].to_numpy().astype(np.float64)


def _read_updates(run: RunReader, rates: Sequence[float]) -> Updates | None:
    """AdamW's last update, lr * m / (sqrt(v) + eps), from the newest checkpoint; None if there is none.

    Uses the highest learning rate, because a schedule ends with updates that are meant to vanish.
    """
    steps = run.checkpoint_steps()
    if not steps:
        return None
    from safetensors import SafetensorError, safe_open

    folder = run.path / "checkpoints" / f"step-{steps[-1]:06d}"
    weights, state = folder / "weights.safetensors", folder / "optimizer.safetensors"
    if not (weights.is_file() and state.is_file()):  # a sharded model's, or not ours: a pipe would never end
        return None
    spacing, update = [], []
    try:
        groups = read_json(folder / "optimizer.json")["param_groups"]
        with safe_open(weights, "numpy") as file:
            for name in file.keys():  # noqa: SIM118  # no mapping
                weight = _some(file, name)
                spacing.append(np.spacing(np.abs(weight[weight != 0])))
        with safe_open(state, "numpy") as file:
            names = set(file.keys())
            for group in groups:
                beta1, beta2 = group["betas"]
                lr = max(rates, default=group["lr"])
                for i in group["params"]:
                    if f"{i}.exp_avg" not in names:
                        continue  # no gradient yet
                    taken = float(file.get_tensor(f"{i}.step"))
                    mean = _some(file, f"{i}.exp_avg") / (1 - beta1**taken)
                    square = _some(file, f"{i}.exp_avg_sq") / (1 - beta2**taken)
                    update.append(np.abs(lr * mean / (np.sqrt(square) + group["eps"])))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError, ZeroDivisionError):
        return None
    if not update or not spacing:
        return None
    return Updates(step=steps[-1], update=np.concatenate(update), spacing=np.concatenate(spacing))


def _some(file: Any, name: str) -> np.ndarray:
    """First rows of a tensor, at most `MOST_WEIGHTS` numbers."""
    part = file.get_slice(name)
    shape = part.get_shape()
    per_row = max(int(np.prod(shape[1:])), 1)
    rows = part[: min(max(MOST_WEIGHTS // per_row, 1), shape[0])] if shape else file.get_tensor(name)
    return np.asarray(rows, np.float32).reshape(-1)[:MOST_WEIGHTS]
