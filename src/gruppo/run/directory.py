"""RunDirectory: writes the records of one run, and is owned by one process."""

import json
import logging
import os
import platform
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from math import isfinite
from pathlib import Path
from typing import Any, Literal, Self

from gruppo import __version__
from gruppo.errors import InputError
from gruppo.run.reader import RunReader, numbered, read_lines
from gruppo.types import Group, Prompt

logger = logging.getLogger(__name__)

Status = Literal["running", "done", "stopped", "failed"]

OWN = (
    *("config.yaml", "env.json", "status.json", "metrics.jsonl", "timings.jsonl", "events.jsonl", "learning_curve.png"),
    *("checkpoints", "completions", "model", "best", "tensorboard", "sync", "heldout.jsonl", "eval.parquet"),
)
"""Names of everything that a run writes, but for its lock."""


class RunDirectory(RunReader):
    """A run directory to write to. `create` makes a new one, `reopen` goes on in an old one; both take its lock.

    As a context manager it gives the lock back, and takes a new run back that fails before it is `running`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.checkpoints = self.path / "checkpoints"
        self.dropped = 0
        """Records that could not be written. A full disk does not stop a run; only a failed checkpoint does."""
        self._has_begun = True

    @classmethod
    def create(cls, output: str, config: str, *, overwrite: bool = False) -> Self:
        """A new run in `output`, with its options as YAML.

        `output` must not exist, or be empty, or hold a run that was never saved: that one is replaced.

        Args:
            overwrite: replace a run that was saved, too. Files that are not a run's stay.
        """
        run = cls(output)
        path = run.path
        try:
            is_used = path.exists() and (not path.is_dir() or any(path.iterdir()))
            if not is_used:
                path.mkdir(parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # a file in the way, no permission, a name that is none
            raise InputError(f"output={output!r} cannot be a directory: {error}; choose another") from error
        if is_used and not run._is_ours():
            raise InputError(
                f"output={output!r} exists already and is not a run; nothing was touched. Choose another output"
            )
        run.take_lock()
        run._has_begun = False
        try:
            if is_used:
                run._clear(overwrite)
            _replace(path / "config.yaml", config.encode())
            (path / "env.json").write_text(json.dumps(current_environment(), indent=1))
        except BaseException as error:
            run.__exit__(type(error), error, None)
            if isinstance(error, OSError):
                raise InputError(f"output={output!r} cannot be written: {error}; choose another") from error
            raise
        return run

    @classmethod
    def reopen(cls, path: str | Path) -> Self:
        run = cls(path)
        run.check()
        run.take_lock()
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_void = error is not None and not self._has_begun  # left there, it would stop the next try
        if is_void:
            with suppress(OSError):
                self._remove()
        (self.path / "lock").unlink(missing_ok=True)
        if is_void:
            with suppress(OSError):  # not empty: it has files that are not the run's
                self.path.rmdir()

    def _is_ours(self) -> bool:
        """Whether a run began here. A lone config.yaml may be the user's."""
        found = {name for name in ("env.json", "status.json", "metrics.jsonl") if (self.path / name).exists()}
        return (self.path / "lock").exists() or (bool(found) and (self.path / "config.yaml").exists())

    def _clear(self, overwrite: bool) -> None:
        """Make room for a new run where one was."""
        is_saved = bool(numbered(self.checkpoints)) or self.model.exists()
        if is_saved and not overwrite:
            self._has_begun = True  # the other one has, and stays
            output = str(self.path)
            raise InputError(
                f"output={output!r} exists already; nothing was touched. Go on with `gruppo resume {output}`, start "
                "over in its place with --overwrite (in Python overwrite=True), or choose another output"
            )
        if not is_saved:
            logger.warning("%s holds a run that ended before its first checkpoint; it starts over", self.path)
        self._remove()

    def _remove(self) -> None:
        """Remove what a run writes, and nothing else."""
        for name in OWN:
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)
        self._remove_temporary()

    def _remove_temporary(self) -> None:
        """Remove what a killed process left half-written."""
        for folder in (self.path, self.checkpoints):
            for entry in folder.glob(".*.tmp-*"):
                shutil.rmtree(entry, ignore_errors=True)
        for name in OWN:
            (self.path / f"{name}.tmp").unlink(missing_ok=True)

    # --- ownership ------------------------------------------------------------------------------------------------

    def take_lock(self) -> None:
        """Own the directory, unless a living process does."""
        lock = self.path / "lock"
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid())}
        try:
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        except FileExistsError:
            owner: Any = None
            with suppress(ValueError):
                owner = json.loads(lock.read_text())
            owner = owner if isinstance(owner, dict) else {}
            if owner.get("host") == mine["host"] and not _is_alive(owner.get("pid"), owner.get("started")):
                lock.unlink(missing_ok=True)  # its process is gone
                return self.take_lock()
            raise InputError(
                f"{self.path} is in use by process {owner.get('pid')} on {owner.get('host')}; stop it first "
                f"(or delete {lock} if it no longer runs)"
            ) from None
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(mine, file)
        except OSError as error:
            lock.unlink()  # an empty one would be nobody's, and stay
            raise InputError(f"{self.path} cannot be written: {error}; free some space, or choose another") from error

    # --- a run that goes on ---------------------------------------------------------------------------------------

    def go_on_after(self, step: int, config: str, *, redo_line: bool = False) -> None:
        """Make ready for the steps after `step`: later records go, `config` may have another last step.

        `redo_line`: the metrics of `step` itself are written again, too.
        """
        self.forget_after(step, redo_line=redo_line)
        _replace(self.path / "config.yaml", config.encode())
        changes = self.environment_changes()
        if changes:
            logger.warning(
                "the environment has changed since this run started, so it will not be bitwise identical: %s",
                ", ".join(changes),
            )
            self.log_event("environment", step=step, changes=changes)

    def forget_after(self, step: int, *, redo_line: bool = False) -> None:
        """Drop the records of steps that a resumed run will take again, and what a crash left half-written."""
        for name in ("metrics.jsonl", "timings.jsonl", "events.jsonl"):
            path = self.path / name
            if path.exists():
                kept = read_lines(path)
                if name != "events.jsonl":  # what happened has happened
                    kept = [line for line in kept if line["step"] <= step - redo_line]
                _replace(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        later = [file for at, file in numbered(self.path / "completions").items() if at > step]
        for file in (*later, *(self.path / "completions").glob("*.tmp")):
            file.unlink()
        self._remove_temporary()

    def environment_changes(self) -> list[str]:
        """Differences from the environment in which the run began, which could change the last digits."""
        try:
            then, now = ({**env, **env.get("packages", {})} for env in (self.environment(), current_environment()))
        except InputError:
            return ["env.json cannot be read"]
        names = sorted((then.keys() | now.keys()) - {"packages"})
        return [f"{name} {then.get(name)} -> {now.get(name)}" for name in names if then.get(name) != now.get(name)]

    # --- records --------------------------------------------------------------------------------------------------

    def set_status(self, status: Status, step: int, **facts: Any) -> None:
        self._has_begun = True
        with self._dropping("status.json"):
            content = json.dumps({"status": status, "step": step, **facts}, indent=1)
            _replace(self.path / "status.json", content.encode())

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.dropped:
            metrics = {**metrics, "log/dropped": float(self.dropped)}
        # JSON has no NaN: null stands for a number that is none, and the run goes on to its own guard.
        values = {name: value if isfinite(value) else None for name, value in sorted(metrics.items())}
        self._append("metrics.jsonl", {"step": step, **values})

    def log_timings(self, step: int, seconds: Mapping[str, float]) -> None:
        self._append("timings.jsonl", {"step": step, **{k: round(v, 6) for k, v in seconds.items()}})

    def log_event(self, kind: str, **facts: Any) -> None:
        self._append("events.jsonl", {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "event": kind, **facts})

    def write_held_out(self, prompts: Sequence[Prompt]) -> None:
        """The rows that are held out, as a data set: `prompt` and the other columns under the names of the run."""
        from gruppo.run.completions import json_text

        if prompts:
            lines = [json_text({"prompt": prompt.source, **prompt.columns}) + "\n" for prompt in prompts]
            _replace(self.held_out, "".join(lines).encode())

    def write_completions(self, step: int, groups: Sequence[Group], limit: int | None = None) -> int:
        """The rollouts of a step, at most `limit` of them; returns how many were left out."""
        from gruppo.run.completions import ROWS_LEFT_OUT, completions_table, parquet_bytes

        table = completions_table(step, groups, limit)
        file = self.path / "completions" / f"step-{step:06d}.parquet"
        with self._dropping(file.name):
            file.parent.mkdir(exist_ok=True)
            _replace(file, parquet_bytes(table))
        return int(table.schema.metadata[ROWS_LEFT_OUT])

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        # Opened for each line: what was written is on its way to the disk whatever happens next.
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        with self._dropping(name):
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            with open(os.open(self.path / name, flags, 0o666), "ab", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                try:
                    if file.write(line) != len(line):
                        raise OSError("the disk took half a line")
                except OSError:
                    with suppress(OSError):
                        file.truncate(size)  # half a line would hide all that follow
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


def current_environment() -> dict[str, Any]:
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


def _replace(path: Path, content: bytes) -> None:
    """Write a file aside and rename it: half a file would look like a whole one."""
    aside = path.with_name(f"{path.name}.tmp")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def _is_alive(pid: Any, started: Any) -> bool:
    """Whether the process runs and is the same one: ids are used again, in containers soon."""
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
    """Start of a process, as the kernel counts: boot and tick. None where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name in parentheses may hold anything; the start is the 20th field after it.
        return f"{boot}-{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"
    except (OSError, IndexError):
        return None
