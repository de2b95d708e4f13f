"""The run directory: what a run leaves behind, and all that `resume` needs.

config.yaml        the resolved config
env.json           versions, threads, device
metrics.jsonl      one line per step; a function of config and seed alone, so that equal runs have equal files
timings.jsonl      one line per step: where the time went
events.jsonl       what happened when: start, checkpoint, advice, stop
completions/       step-000010.parquet: every completion with rewards, advantage, tokens and log-probs, what reward
                   functions logged (`extra/<name>`) and why one failed (`error/<name>`)
checkpoints/       step-000050/: weights, optimizer, manifest
model/             the result, as transformers, PEFT and vLLM load it
status.json        running, done, stopped or failed, and at which step
lock               the process that owns the directory
"""

import json
import logging
import os
import platform
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from gruppo import __version__
from gruppo.errors import InputError
from gruppo.trainer.config import TrainConfig
from gruppo.types import Group

logger = logging.getLogger(__name__)

Status = Literal["running", "done", "stopped", "failed"]


class RunDir:
    """Writes one run. Create a new one with `create`, go on in an old one with `reopen`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.model = path / "model"
        self.dropped = 0
        """Records that could not be written. A full disk stops no run; it stops at a checkpoint that fails."""

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

    def environment_changes(self) -> list[str]:
        """What is not as it was when the run began, where it could change the last digits."""
        try:
            before = json.loads((self.path / "env.json").read_text())
        except (OSError, ValueError):
            return ["env.json cannot be read"]
        then, now = _flat(before), _flat(environment())
        return [f"{name} {then.get(name)} -> {now.get(name)}" for name in sorted(then.keys() | now.keys())
                if then.get(name) != now.get(name)]  # fmt: skip

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
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            try:
                owner = json.loads(lock.read_text())
            except ValueError:
                owner = None
            if not isinstance(owner, dict):
                owner = {}
            if owner.get("host") == mine["host"] and not _is_alive(owner.get("pid"), owner.get("started")):
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
        dropped = {"log/dropped": float(self.dropped)} if self.dropped else {}
        metrics = {**metrics, **dropped}
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
        with self._dropping("status.json"):
            aside.write_text(json.dumps({"status": status, "step": step, **facts}, indent=1))
            aside.replace(self.path / "status.json")

    def write_completions(self, step: int, groups: Sequence[Group]) -> None:
        """All rollouts that a step sampled, one row each, with what reward functions logged and where they failed."""
        import pyarrow as pa
        import pyarrow.parquet as pq

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
        file = self.path / "completions" / f"step-{step:06d}.parquet"
        with self._dropping(file.name):
            file.parent.mkdir(exist_ok=True)
            try:
                pq.write_table(pa.table(columns), file)
            except OSError:
                file.unlink(missing_ok=True)  # half a file would look like a whole one
                raise

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        # Opened for each line: what was written is on its way to the disk whatever happens next.
        path = self.path / name
        with self._dropping(name):
            size = path.stat().st_size if path.exists() else 0
            try:
                with path.open("a", encoding="utf-8") as file:
                    file.write(_line(record))
            except OSError:
                with suppress(OSError):
                    os.truncate(path, size)  # half a line would hide all that follow
                raise

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """A record that cannot be written is counted and dropped, with one warning."""
        try:
            yield
        except OSError as error:
            if not self.dropped:
                logger.warning("%s cannot be written (%s); the run goes on without such records", name, error)
            self.dropped += 1


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


def _flat(environment: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in environment.items() if k != "packages"} | environment.get("packages", {})


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


def _column(values: list[Any]) -> list[Any]:
    """Values of one type, as a table needs them: whole numbers beside fractions become floats, other mixtures text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    if len(kinds) > 1 or kinds == {str}:
        return [None if value is None else _clean(str(value)) for value in values]
    return values


def _is_alive(pid: Any, started: Any) -> bool:
    """Does the process still run, and is it the same one? Numbers are given out again, in containers soon."""
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return started is None or started == _started(pid)


def _started(pid: int) -> str | None:
    """When a process began, as the kernel counts: boot and tick. None where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name in parentheses may hold anything; the start is the 20th field after it.
        return f"{boot}-{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return None
