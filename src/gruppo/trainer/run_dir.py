"""The run directory: what a run leaves behind, and all that `resume` needs.

config.yaml        the resolved config
env.json           versions, threads, device
metrics.jsonl      one line per step; a function of config and seed alone, so that equal runs have equal files
timings.jsonl      one line per step: where the time went
events.jsonl       what happened when: start, checkpoint, advice, stop
completions/       step-000010.parquet: every completion with reward, advantage, tokens and log-probs
checkpoints/       step-000050/: weights, optimizer, manifest
model/             the result, as transformers, PEFT and vLLM load it
status.json        running, done, stopped or failed, and at which step
lock               the process that owns the directory
"""

import json
import os
import platform
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from gruppo import __version__
from gruppo.errors import InputError
from gruppo.trainer.config import TrainConfig
from gruppo.types import Group

Status = Literal["running", "done", "stopped", "failed"]


class RunDir:
    """Writes one run. Create a new one with `create`, go on in an old one with `reopen`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"

    @classmethod
    def create(cls, config: TrainConfig) -> "RunDir":
        path = Path(config.output)
        run = cls(path)
        try:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise InputError(
                    f"output={config.output!r} exists already; nothing was touched. Go on with "
                    f"`gruppo resume {config.output}`, or choose another output"
                )
            path.mkdir(parents=True, exist_ok=True)
        except InputError:
            raise
        except (OSError, ValueError) as error:  # a file in the way, no permission, a name that is none
            raise InputError(f"output={config.output!r} cannot be a directory: {error}; choose another") from error
        run.take_lock()
        run.write_config(config)
        (path / "env.json").write_text(json.dumps(environment(), indent=1))
        return run

    @classmethod
    def reopen(cls, path: Path) -> "RunDir":
        if not (path / "config.yaml").is_file():
            raise InputError(f"{path} is not a run directory: it has no config.yaml")
        run = cls(path)
        run.take_lock()
        return run

    def config(self) -> TrainConfig:
        """The config of the run, with the directory where it now lies."""
        return TrainConfig.from_yaml(self.path / "config.yaml", {"output": str(self.path)})

    def write_config(self, config: TrainConfig) -> None:
        aside = self.path / "config.yaml.tmp"
        aside.write_text(config.to_yaml(), encoding="utf-8")
        aside.replace(self.path / "config.yaml")

    def withdraw(self) -> None:
        """Take back what `create` wrote: the run never began."""
        for name in ("config.yaml", "env.json", "lock"):
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # not empty: somebody else's
            self.path.rmdir()

    # --- ownership ------------------------------------------------------------------------------------------------

    def take_lock(self) -> None:
        """Own the directory, unless a living process does."""
        lock = self.path / "lock"
        mine = {"pid": os.getpid(), "host": socket.gethostname()}
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            try:
                owner = json.loads(lock.read_text())
            except ValueError:
                owner = None
            if not isinstance(owner, dict):
                owner = {}
            if owner.get("host") == mine["host"] and not _is_alive(owner.get("pid")):
                lock.unlink(missing_ok=True)  # its process is gone
                return self.take_lock()
            raise InputError(
                f"{self.path} is in use by process {owner.get('pid')} on {owner.get('host')}; stop it first "
                f"(or delete {lock} if it no longer runs)"
            ) from None
        with os.fdopen(descriptor, "w") as file:
            json.dump(mine, file)

    def release_lock(self) -> None:
        (self.path / "lock").unlink(missing_ok=True)

    # --- records --------------------------------------------------------------------------------------------------

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        # JSON has no NaN; null says that there was no number, and the run goes on to its own guard.
        values = {k: metrics[k] if isfinite(metrics[k]) else None for k in sorted(metrics)}
        self._append("metrics.jsonl", {"step": step, **values})

    def log_timings(self, step: int, seconds: Mapping[str, float]) -> None:
        self._append("timings.jsonl", {"step": step, **{k: round(v, 6) for k, v in seconds.items()}})

    def log_event(self, kind: str, **facts: Any) -> None:
        self._append("events.jsonl", {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind, **facts})

    def metrics(self) -> list[dict[str, Any]]:
        """All lines of metrics.jsonl; a last line cut off by a crash is left out."""
        path = self.path / "metrics.jsonl"
        return _read_lines(path) if path.exists() else []

    def forget_after(self, step: int, *, redo_line: bool = False) -> None:
        """Drop the records of steps that a resumed run will take again; `redo_line`: and the line of `step` itself."""
        for name in ("metrics.jsonl", "timings.jsonl"):
            path = self.path / name
            if path.exists():
                kept = [line for line in _read_lines(path) if line["step"] <= step - redo_line]
                aside = path.with_suffix(".tmp")
                aside.write_text("".join(_line(record) for record in kept))
                aside.replace(path)
        for file in (self.path / "completions").glob("step-*.parquet"):
            if int(file.stem.removeprefix("step-")) > step:
                file.unlink()

    def set_status(self, status: Status, step: int, **facts: Any) -> None:
        aside = self.path / "status.json.tmp"
        aside.write_text(json.dumps({"status": status, "step": step, **facts}, indent=1))
        aside.replace(self.path / "status.json")

    def write_completions(self, step: int, groups: tuple[Group, ...]) -> None:
        """All rollouts of a step, one row each."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [(g.prompt, i, r) for g in groups for i, r in enumerate(g.rollouts)]
        columns: dict[str, list[Any]] = {
            "step": [step] * len(rows),
            "prompt_index": [p.index for p, _, _ in rows],
            "sample": [i for _, i, _ in rows],
            "prompt": [_clean(p.text) for p, _, _ in rows],
            "completion": [_clean(r.sequence.text) for _, _, r in rows],
            "reward": [r.reward for _, _, r in rows],
            "advantage": [r.advantage for _, _, r in rows],
            "stop_reason": [r.sequence.stop_reason for _, _, r in rows],
            "policy_version": [r.sequence.policy_version for _, _, r in rows],
            "tokens": [list(r.sequence.tokens) for _, _, r in rows],
            "logps": [list(r.sequence.logps) for _, _, r in rows],
        }
        for name in sorted({n for _, _, r in rows for n in r.rewards}):
            columns[f"reward/{name}"] = [r.rewards.get(name) for _, _, r in rows]
        folder = self.path / "completions"
        folder.mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), folder / f"step-{step:06d}.parquet")

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        # Opened for each line: what was written is on its way to the disk whatever happens next.
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(_line(record))


def environment() -> dict[str, Any]:
    """Versions and the machine's shape, without names or paths."""
    import torch

    packages = ("torch", "transformers", "peft", "safetensors", "numpy")
    return {
        "python": platform.python_version(),
        "packages": {"gruppo": __version__} | {name: metadata.version(name) for name in packages},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cores": os.cpu_count(),
    }


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"


def _read_lines(path: Path) -> list[dict[str, Any]]:
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def _clean(text: str) -> str:
    """Parquet refuses lone surrogates, which a model may well produce."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _is_alive(pid: Any) -> bool:
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
