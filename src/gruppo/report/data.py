"""Data of a report, read from the records of a run. Needs neither torch nor a network."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gruppo.codec import UNTRAINED, group_numbers, json_text
from gruppo.doctor.finding import Change
from gruppo.errors import InputError
from gruppo.keys import HELD_OUT_SCORES, held_out_key, held_out_name
from gruppo.run.completions import ROWS_LEFT_OUT
from gruppo.run.reader import RunReader
from gruppo.run.transcript import call_text
from gruppo.task.builtin import EMBEDDED

if TYPE_CHECKING:
    import pyarrow as pa

Points = list[tuple[int, float]]

LOGPS = {"logps": "sampler", "old_logps": "old", "policy_logps": "new", "ref_logps": "ref", "entropies": "entropy"}
"""Columns with a number per token, and their names on the page."""
ROW_COLUMNS = ("prompt_index", "sample", "prompt", "completion", "messages", "stop_reason", "reward", "correct")
DIGITS = 7
"""Significant digits of per-token numbers, as many as float32 has."""
TEXT_LIMIT = 20_000
"""Most characters of a text in a self-contained page, and of a text in search results."""
SHORTEST = 400
"""Characters that each message of a long conversation keeps."""
UNREADABLE = (InputError, KeyError, ValueError)
"""Errors from a completions file that is damaged or of another version."""
TELLING = (
    ("live/token_kl_max", max),
    ("optim/grad_norm", max),
    ("sampler/logp_gap_max", max),
    ("reward/mean", min),
    ("reward/mean", max),
    ("completion/len_mean", max),
)
"""Metrics whose most extreme step belongs on the page."""


def metric_series(run: RunReader) -> dict[str, Points]:
    """Numbers of a run by key, each with its step."""
    return _series(run.metrics())


def stage_seconds(run: RunReader) -> dict[str, Points]:
    """Seconds per step by stage."""
    return _series(run.timings())


def is_ahead(stage: str) -> bool:
    """True for a background stage, whose seconds are not part of the step."""
    return stage.startswith("ahead/")


def _series(records: Iterable[Mapping[str, Any]]) -> dict[str, Points]:
    found: dict[str, dict[int, float]] = {}
    for record in records:
        step = record.get("step")
        for key, value in record.items() if type(step) is int else ():
            if key != "step" and type(value) in (int, float) and isfinite(value):
                found.setdefault(key, {})[step] = value  # pyright: ignore[reportArgumentType]  # an int, as just seen
    return {key: sorted(points.items()) for key, points in sorted(found.items())}


def summary(run: RunReader) -> dict[str, Any]:
    """Overview of a run: what it is, its state, and its main numbers."""
    config, series = run.config(), metric_series(run)
    rewards = config.get("rewards") or []
    try:
        status = run.status()
    except InputError:  # not started yet, or the disk was full
        status = {"status": "unknown"}
    try:
        environment = run.environment()
    except InputError:
        environment = {}
    stages = stage_seconds(run).items()
    seconds = sum(value for stage, points in stages if not is_ahead(stage) for _, value in points)
    last = max((points[-1][0] for points in series.values()), default=0)
    return {
        "name": run.path.resolve().name,
        "status": str(status.get("status")),
        "error": str(status.get("error", "")),
        "step": last,
        "steps": config.get("steps"),
        "model": str(config.get("model")),
        "data": str(config.get("data")),
        "rewards": [str(name) for name in (rewards if isinstance(rewards, list) else [rewards])],
        "loss": str(config.get("loss")),
        "loss_text": loss_text(run),
        "advantage": str(config.get("advantage")),
        "group_size": config.get("group_size"),
        "seed": config.get("seed"),
        "device": str(environment.get("device", "")),
        "version": str((environment.get("packages") or {}).get("gruppo", "")),
        "seconds": seconds,
        "tiles": _tiles(series),
        "steps_recorded": run.completion_steps(),
    }


def loss_text(run: RunReader) -> str:
    """Loss in words, as recorded at the start of the run; empty if it was not."""
    texts = [event["loss"] for event in run.events() if event.get("event") == "start" and "loss" in event]
    return str(texts[-1]) if texts else ""


def _tiles(series: Mapping[str, Points]) -> list[dict[str, Any]]:
    """First and last value of a few keys. Noisy ones are means over the same windows as in the state line."""
    tiles: list[dict[str, Any]] = []
    if (score := held_out_key(series)) is not None:
        points = series[score]
        low, high = (dict(series.get(f"{score}_{end}", ())).get(points[-1][0]) for end in ("low", "high"))
        tile = {"title": held_out_name(score), "first": points[0][1], "last": points[-1][1], "low": low, "high": high}
        tiles.append(tile | {"format": "share" if score == HELD_OUT_SCORES[0] else "number", "key": score})
    for key, title, form in (
        ("reward/mean", "reward", "number"),
        ("group/dead_frac", "groups that teach nothing", "share"),
        ("rollout/entropy", "entropy, nats per token", "number"),
        ("completion/len_mean", "tokens per completion", "length"),
    ):
        if points := series.get(key):
            change = Change.of(points)
            first, last = (points[0][1], points[-1][1]) if change is None else (change.first, change.last)
            tiles.append({"title": title, "first": first, "last": last, "format": form, "key": key})
    return tiles


def config_table(runs: Sequence[RunReader]) -> list[dict[str, Any]]:
    """Options with their value in each run; those that differ first."""
    configs = [run.config() for run in runs]
    names = dict.fromkeys(name for config in configs for name in config)
    rows = []
    for name in names:
        values = [_option(config.get(name)) for config in configs]
        rows.append({"name": str(name), "values": values, "differs": len(set(values)) > 1 and name != "output"})
    return sorted(rows, key=lambda row: not row["differs"])


def _option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


# --- completions ------------------------------------------------------------------------------------------------------


class TokenTexts:
    """Texts of tokens, from the tokenizer stored with a run: its model, a checkpoint or a local base.

    Nothing is fetched. Without a tokenizer, tokens show as numbers.
    """

    def __init__(self, run: RunReader) -> None:
        self.run = run
        self._texts: dict[int, str] = {}

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer

        for file in self._files():
            try:
                return Tokenizer.from_file(str(file))
            except Exception:  # of any class: these files may not be ours; another folder may work
                continue
        return None

    def _files(self) -> Iterable[Path]:
        folders = [self.run.model, self.run.best]
        folders += [
            self.run.path / "checkpoints" / f"step-{step:06d}" / "model" for step in self.run.checkpoint_steps()
        ]
        name = str(self.run.config().get("model"))
        if name in EMBEDDED:
            folders.append(EMBEDDED[name])
        else:
            folders.append(Path(name).expanduser())
            folders += _cached(name, self.run.config().get("revision"))
        return [folder / "tokenizer.json" for folder in folders if (folder / "tokenizer.json").is_file()]

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """Texts of the ids that have one."""
        if self._tokenizer is None:
            return {}
        decode, wanted = self._tokenizer.decode, set(ids)
        for number in wanted - self._texts.keys():
            # Some decoders drop the leading space of the first token.
            once, twice = (decode([number] * count, skip_special_tokens=False) for count in (1, 2))
            self._texts[number] = twice[len(once) :] if twice.startswith(once) else once
        return {number: self._texts[number] for number in wanted}


def _cached(name: str, revision: Any) -> list[Path]:
    """Folder in the hub's cache with a model's tokenizer."""
    try:
        from huggingface_hub import try_to_load_from_cache

        hub_id = name.removeprefix("hf://").partition("@")
        found = try_to_load_from_cache(hub_id[0], "tokenizer.json", revision=revision or hub_id[2] or None)
    except (ImportError, ValueError):  # not a model id
        return []
    return [Path(found).parent] if isinstance(found, str) else []


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on what a self-contained page takes of a step."""

    tokens: int
    """Of all groups together. The most eventful groups come first, and one is always kept."""
    tokens_of_one: int = 4_000
    """Of one completion."""


def step_data(
    run: RunReader,
    step: int,
    texts: TokenTexts,
    limits: Limits | None = None,
    replayed: Mapping[int, Mapping[str, Any]] | None = None,
) -> dict[str, Any]:
    """Groups of a step with every token and its numbers, and the number of rollouts left out.

    Args:
        replayed: completions of a replay by their row in the file; others are left out.
    """
    table = run.completions(step)
    left_out = int((table.schema.metadata or {}).get(ROWS_LEFT_OUT, 0))
    rows = _compact(table, limits)
    if replayed is not None:
        most = None if limits is None else limits.tokens_of_one
        rows = [
            row | {"rollout": row["rollout"] | _credit(replayed[i], most)}
            for i, row in enumerate(rows)
            if i in replayed
        ]
    groups = _grouped(rows)
    if limits is not None:
        chosen = _most_telling(groups, limits.tokens)
        left_out += sum(len(group["rollouts"]) for group in groups) - sum(len(group["rollouts"]) for group in chosen)
        groups = chosen
    ids = {number for group in groups for rollout in group["rollouts"] for number in rollout["ids"]}
    found = texts.of(ids)
    return {"step": step, "left_out": left_out, "groups": groups, "texts": found, "reasons": UNTRAINED}


def step_rows(run: RunReader, step: int) -> list[list[Any]]:
    """Rollouts of a step for a search: group, sample, prompt, text, stop reason, reward, right or not, and turns.

    The text of an episode is all that was said in it.
    """
    table, found = run.completions(step, ROW_COLUMNS), []
    for group, row in zip(group_numbers(table).tolist(), table.to_pylist(), strict=True):
        said = _messages(row.get("messages"), TEXT_LIMIT)
        text = row["completion"] if said is None else "\n".join(_words(message) for message in said)
        texts = [_cut(each, TEXT_LIMIT) for each in (row["prompt"], text)]
        judged = [row["stop_reason"], _rounded(row["reward"]), row["correct"]]
        turns = None if said is None else sum(message["own"] for message in said)
        found.append([group, row["sample"], row["prompt_index"], *texts, *judged, turns])
    return found


def _words(message: Mapping[str, Any]) -> str:
    return "\n".join(filter(None, [message["text"], *(call["text"] for call in message["calls"])]))


def _messages(text: str | None, most: int | None) -> list[dict[str, Any]] | None:
    """The conversation of an episode, its texts cut to `most` characters in all; None for one that cannot be read."""
    try:
        messages = json.loads(text or "null")
    except (ValueError, RecursionError):
        return None
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return None
    share = most and max(most // max(len(messages), 1), SHORTEST)
    found = []
    for message in messages:
        parts = [_text(message.get(name)) for name in ("reasoning_content", "content")]
        said = "\n".join(part for part in parts if part)
        calls = message.get("tool_calls")
        calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
        found.append(
            {
                "own": message.get("role") == "assistant",
                "by": _text(message.get("name")) or _text(message.get("role")),
                "text": _cut(said, share),
                "characters": len(said),
                "calls": [{"text": _cut(call_text(call), share), "failed": bool(call.get("error"))} for call in calls],
                "failed": bool(message.get("is_error")),
            }
        )
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "" if value is None else json_text(value)


def _compact(table: "pa.Table", limits: Limits | None) -> list[dict[str, Any]]:
    """Completions as plain values. Lists beyond the limit are cut, and their full length kept."""
    most = None if limits is None else limits.tokens_of_one
    names = set(table.column_names)
    lists = [
        name for name in ("tokens", "sampled", "untrained", "clipped", "token_advantages", *LOGPS) if name in names
    ]
    lengths = [0 if ids is None else len(ids) for ids in table.column("tokens")]
    plain = table.drop_columns(lists).to_pylist()
    columns = {name: [_list(value, most) for value in table.column(name)] for name in lists}
    reason = {name: code for code, name in enumerate(UNTRAINED)}
    rows = []
    for i, (group, row) in enumerate(zip(group_numbers(table).tolist(), plain, strict=True)):
        parts = {kind: _prefixed(row, f"{kind}/") for kind in ("reward", "extra", "error")}
        untrained = columns["untrained"][i] if "untrained" in columns else None
        tokens = {short: columns[name][i] if name in columns else None for name, short in LOGPS.items()}
        rows.append(
            {
                "group": group,
                "index": row["prompt_index"],
                "status": row["status"],
                "prompt": _cut(row["prompt"], most and TEXT_LIMIT),
                "columns": _cut(row["columns"], most and TEXT_LIMIT),
                "rollout": {
                    "sample": row["sample"],
                    "text": _cut(row["completion"], most and TEXT_LIMIT),
                    "characters": len(row["completion"] or ""),
                    "messages": _messages(row.get("messages"), most and TEXT_LIMIT),
                    "stop": row["stop_reason"],
                    "versions": row["versions"],
                    "reward": _rounded(row["reward"]),
                    "correct": row["correct"],
                    "shaped": _rounded(row["shaped"]),
                    "advantage": _rounded(row["advantage"]),
                    "advantages": columns["token_advantages"][i] if "token_advantages" in columns else None,
                    "parts": {name: _rounded(value) for name, value in parts["reward"].items()},
                    "extras": {k: _cut(v, TEXT_LIMIT) if isinstance(v, str) else v for k, v in parts["extra"].items()},
                    "errors": {name: _cut(str(value), 4_000) for name, value in parts["error"].items() if value},
                    "length": lengths[i],
                    "ids": columns["tokens"][i] or [],
                    "sampled": columns["sampled"][i],
                    "why": None if untrained is None else [reason.get(name, 0) for name in untrained],
                    "clipped": columns["clipped"][i] if "clipped" in columns else None,
                    **tokens,
                },
            }
        )
    return rows


def _credit(completion: Mapping[str, Any], most: int | None) -> dict[str, Any]:
    """Credit of each token by variant of a replay, to six significant digits, and the advantages."""
    credit = [[x if x is None else float(f"{x:.6g}") for x in values[:most]] for values in completion["credit"]]
    given = ["per token" if isinstance(value, list) else _rounded(value) for value in completion["advantage"]]
    return {"credit": credit, "given": given}


def _prefixed(row: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): row[name] for name in row if name.startswith(prefix)}


def _list(value: "pa.Scalar", most: int | None) -> list[Any] | None:
    """List value cut to `most` entries, fractions rounded."""
    items = value.values[:most] if value.is_valid else None  # pyright: ignore[reportAttributeAccessIssue]  # a list
    if items is None:
        return None
    if str(items.type) != "double":
        return items.to_pylist()
    numbers = items.to_numpy(zero_copy_only=False)
    size = np.abs(np.nan_to_num(numbers, nan=1.0, posinf=1.0, neginf=1.0))
    scale = 10.0 ** (DIGITS - 1 - np.floor(np.log10(np.maximum(size, 1e-300))))  # faster than formatting each
    return [x if isfinite(x) else None for x in (np.round(numbers * scale) / scale).tolist()]


def _rounded(value: float | None) -> float | None:
    return float(f"{value:.{DIGITS}g}") if value is not None and isfinite(value) else None


def _cut(text: str | None, most: int | None) -> str:
    return "" if text is None else text[:most]


def _grouped(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    runs = [list(run) for _, run in groupby(rows, key=lambda row: row["group"])]
    found = []
    for run in runs:
        group = {name: run[0][name] for name in ("index", "status", "prompt", "columns")}
        own = [None if row["prompt"] == group["prompt"] else row["prompt"] for row in run]
        rollouts = [row["rollout"] | {"prompt": prompt} for row, prompt in zip(run, own, strict=True)]
        found.append(group | {"rollouts": rollouts})
    return found


def _most_telling(groups: list[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Groups up to a number of tokens, in order: those whose policy moved most are chosen first, then every n-th."""

    def moved(group: Mapping[str, Any]) -> float:
        pairs = ((r["new"] or (), r["old"] or ()) for r in group["rollouts"])
        return max((abs(a - b) for new, old in pairs for a, b in zip(new, old, strict=False) if a and b), default=0.0)

    sizes = [sum(len(rollout["ids"]) for rollout in group["rollouts"]) for group in groups]
    if sum(sizes) <= tokens:
        return groups
    extreme = sorted(range(len(groups)), key=lambda i: -moved(groups[i]))[: max(len(groups) // 8, 1)]
    spread = sorted(range(len(groups)), key=lambda i: int(f"{i:020b}"[::-1], 2))  # first, middle, quarters, ...
    chosen: set[int] = set()
    for i in dict.fromkeys([*extreme, *spread]):
        if not chosen or sum(sizes[j] for j in chosen) + sizes[i] <= tokens:
            chosen.add(i)
    return [group for i, group in enumerate(groups) if i in chosen]


def chosen_steps(run: RunReader, most: int) -> list[int]:
    """Steps to show, up to a number: the first, the last, the extremes by `TELLING`, the rest spread evenly."""
    steps = run.completion_steps()
    if len(steps) <= most:
        return steps
    series, recorded = metric_series(run), set(steps)
    chosen = {steps[0], steps[-1]}
    for key, extreme in TELLING:
        if points := [(value, step) for step, value in series.get(key, ()) if step in recorded]:
            chosen.add(extreme(points)[1])
    for i in np.linspace(0, len(steps) - 1, most).round().astype(int):
        if len(chosen) < most:
            chosen.add(steps[i])
    return sorted(chosen)


# --- the ledger of tokens ---------------------------------------------------------------------------------------------


LEDGER_COLUMNS = ("status", "untrained", "prompt_index", "sample", "advantage", "token_advantages")


def ledger(run: RunReader, steps: Sequence[int]) -> dict[str, Any]:
    """Fate of the tokens of some steps: not written by the policy, left out, masked, without an advantage, rejected,
    trained on; with what the loss divides by, and the steps whose file cannot be read.

    A token without an advantage counts as `at_mean` if another of its group has one. `unrecorded` counts the
    completions beyond the limit of a file.
    """
    rows, unreadable = [], []
    sequences = scored = recorded = unrecorded = 0
    for step in steps:
        try:
            table = run.completions(step, LEDGER_COLUMNS)
        except UNREADABLE:
            unreadable.append(step)
            continue
        if "untrained" not in table.column_names:  # written before this column existed
            continue
        counts = dict.fromkeys(UNTRAINED, 0)
        for pair in table.column("untrained").combine_chunks().flatten().value_counts().to_pylist():
            counts[pair["values"]] = counts.get(pair["values"], 0) + pair["counts"]
        sequences += table.column("status").to_pylist().count("kept")
        scored += counts[""] + counts["no_advantage"] + counts["rejected"]
        at_mean = _at_mean(table)
        counts |= {"no_advantage": counts["no_advantage"] - at_mean, "at_mean": at_mean}
        rows.append({"step": step, **counts})
        recorded += table.num_rows
        unrecorded += int((table.schema.metadata or {}).get(ROWS_LEFT_OUT, 0))
    total = {name: sum(row[name] for row in rows) for name in (*UNTRAINED, "at_mean")}
    found = {"steps": rows, "total": total, "sequences": sequences, "scored": scored, "unreadable": unreadable}
    return found | {"recorded": recorded, "unrecorded": unrecorded}


def _at_mean(table: "pa.Table") -> int:
    """Tokens without an advantage in a group where another token has one."""

    def per_row(name: str, holds: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Number of values in each list for which something holds."""
        lists = table.column(name).combine_chunks()
        owner = np.repeat(np.arange(table.num_rows), lists.value_lengths().fill_null(0).to_numpy())
        return np.bincount(owner[holds(lists.flatten().to_numpy(zero_copy_only=False))], minlength=table.num_rows)

    group_N = group_numbers(table)
    without_N = per_row("untrained", lambda names: names == "no_advantage")
    has_advantage_N = np.nan_to_num(table.column("advantage").to_numpy()) != 0
    if "token_advantages" in table.column_names:
        has_advantage_N |= per_row("token_advantages", lambda values: np.nan_to_num(values) != 0) > 0
    has_advantage_G = np.bincount(group_N, has_advantage_N) > 0
    return int(without_N[has_advantage_G[group_N]].sum())
