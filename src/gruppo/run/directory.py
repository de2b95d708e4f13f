"""RunDirectory: writes the records of one run, and is owned by one process."""

import json
import logging
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, Self

from gruppo import __version__
from gruppo.errors import InputError
from gruppo.process.streams import shell_word
from gruppo.run.lock import NAME, RunLock, is_owned
from gruppo.run.reader import FORMAT, RunReader, numbered, read_lines
from gruppo.types import Group, Prompt
from gruppo.weights.files import remove, remove_temporary, replace_file

logger = logging.getLogger(__name__)

Status = Literal["running", "done", "stopped", "failed"]

FILES = (
    *("config.yaml", "origin.json", "env.json", "status.json", "heldout.jsonl", "eval.parquet"),
    *("metrics.jsonl", "timings.jsonl", "events.jsonl", "learning_curve.png", "report.html"),
)
FOLDERS = ("checkpoints", "completions", "model", "best", "tensorboard", "sync")
"""Names of everything that a run writes, but for its lock."""


class RunDirectory(RunReader):
    """A run directory to write to. `create` makes a new one, `reopen` opens an existing one; both take its lock.

    As a context manager it gives the lock back, and takes a new run back that fails before it is `running`.
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self.checkpoints = self.path / "checkpoints"
        self.dropped = 0
        """Records that could not be written. A full disk does not stop a run; only a failed checkpoint does."""
        self._has_begun = True
        self._made: list[Path] = []
        """Folders that were not there before the run, the innermost first."""
        self._lock: RunLock | None = None

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
                run._made = [each for each in (path, *path.parents) if not each.exists()]
                for folder in run._made:
                    _check_name(folder.name, output)
                path.mkdir(parents=True, exist_ok=True)
        except InputError:
            raise
        except (OSError, ValueError, RecursionError) as error:  # a file in the way, no permission, a name that is none
            raise InputError(
                f"output={output[:200]!r} cannot be a directory: {str(error)[:200]}; choose another"
            ) from error
        if is_used and not run._is_ours():
            raise InputError(
                f"output={output!r} exists already and is not a run; nothing was touched. Choose another output"
            )
        run._has_begun = is_used  # what is new here is this run's, also while the lock is being taken
        try:
            run._lock = RunLock(path)
            if is_used:
                run._clear(overwrite)
            replace_file(path / "config.yaml", config.encode(), flush=True)
            replace_file(path / "env.json", json.dumps(current_environment(), indent=1).encode())
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
        run._check_kinds()
        with run._needed():
            run._lock = RunLock(run.path)
        return run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        is_void = error is not None and not self._has_begun  # left there, it would stop the next try
        if is_void and (self._lock is not None or not is_owned(self.path)):
            with suppress(OSError):
                self._remove()
                remove(self.path / NAME)
        if self._lock is not None:
            self._lock.give_back()
        if is_void:
            for folder in self._made:
                with suppress(OSError):  # not empty: it has files that are not the run's
                    folder.rmdir()

    def _check_kinds(self) -> None:
        """Refuse anything but a regular file, or a folder, in the place of one, because the run could not keep its
        records."""
        for name in (*FILES, *FOLDERS, NAME):
            path = self.path / name
            if path.exists() and not (path.is_dir() if name in FOLDERS else path.is_file()):
                wrong = "folder" if path.is_dir() else "file" if path.is_file() else "pipe or a device"
                right = "folder" if name in FOLDERS else "regular file"
                raise InputError(
                    f"{path} is a {wrong}, and a run has a {right} of that name; nothing was touched. Move it away"
                )

    def _is_ours(self) -> bool:
        """True if a run began here. A lone config.yaml may be the user's."""
        found = {name for name in ("env.json", "status.json", "metrics.jsonl") if (self.path / name).exists()}
        return (self.path / NAME).exists() or (bool(found) and (self.path / "config.yaml").exists())

    def _clear(self, overwrite: bool) -> None:
        """Make room for a new run where one was."""
        is_saved = bool(numbered(self.checkpoints)) or self.model.exists()
        if is_saved and not overwrite:
            output = str(self.path)
            raise InputError(
                f"output={output!r} exists already; nothing was touched. Go on with "
                f"`gruppo resume {shell_word(output)}`, start over in its place with --overwrite (in Python "
                "GRPOTrainer(config, overwrite=True)), or choose another output"
            )
        if not is_saved:
            logger.warning("%s holds a run that ended before its first checkpoint; it starts over", self.path)
        self._has_begun = False
        self._remove()

    def _remove(self) -> None:
        """Remove what a run writes, and nothing else."""
        for name in (*FILES, *FOLDERS):
            remove(self.path / name)
        remove_temporary(self.path)

    # --- a run that goes on ---------------------------------------------------------------------------------------

    def go_on_after(self, step: int, config: str, *, redo_line: bool = False) -> None:
        """Make ready for the steps after `step`: later records go, `config` may have another last step.

        `redo_line`: the metrics of `step` itself are written again, too.
        """
        with self._needed():
            self.forget_after(step, redo_line=redo_line)
            replace_file(self.path / "config.yaml", config.encode(), flush=True)
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
                    kept = [line for line in kept if _step(line) <= step - redo_line]
                replace_file(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        completions = self.path / "completions"
        if not completions.is_symlink():  # what is in its target may not be the run's
            for file in [file for at, file in numbered(completions).items() if at > step]:
                remove(file)
        for folder in (self.path, self.checkpoints, completions):
            remove_temporary(folder)

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
        path, content = self.path / "status.json", {"status": status, "step": step}
        with self._dropping(path.name):
            try:
                replace_file(path, json.dumps(content | facts, indent=1).encode())
            except OSError:
                # A full disk: the block that the file has already takes a short text.
                _overwrite(
                    path,
                    json.dumps(
                        content | {k: v[:500] if isinstance(v, str) else v for k, v in facts.items()}, indent=1
                    ).encode(),
                )

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

    def write_origin(self, origin: Mapping[str, Any]) -> None:
        """Write what the run started from, for `gruppo resume` to compare with."""
        with self._needed():
            replace_file(self.path / "origin.json", json.dumps(origin, indent=1).encode(), flush=True)

    def write_held_out(self, prompts: Sequence[Prompt]) -> None:
        """The rows that are held out, as a data set: `prompt` and the other columns under the names of the run."""
        from gruppo.codec import json_text

        if prompts:
            lines = [json_text({"prompt": prompt.source, **prompt.columns}) + "\n" for prompt in prompts]
            with self._needed():
                replace_file(self.held_out, "".join(lines).encode())

    def write_completions(self, step: int, groups: Sequence[Group], limit: int | None = None) -> int:
        """Write the file of a step's rollouts, at most `limit` of them; returns how many were left out."""
        from gruppo.run.completions import ROWS_LEFT_OUT, completions_table, parquet_bytes

        table, file = completions_table(step, groups, limit), self.completions_file(step)
        with self._dropping(file.name):
            file.parent.mkdir(exist_ok=True)
            replace_file(file, parquet_bytes(table))
        return int(table.schema.metadata[ROWS_LEFT_OUT])

    def _append(self, name: str, record: Mapping[str, Any]) -> None:
        """Append a line to a file, all of it or nothing; it is on its way to the disk whatever happens next."""
        line = _ENCODER.encode(record).encode() + b"\n"
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
        with self._dropping(name), open(os.open(self.path / name, flags, 0o666), "ab", buffering=0) as file:
            written = 0
            try:
                written = file.write(line)
                if written != len(line):
                    raise OSError("the disk took half a line")
            except OSError:
                with suppress(OSError):
                    file.truncate(os.fstat(file.fileno()).st_size - written)  # half a line would hide all that follow
                raise

    @contextmanager
    def _needed(self) -> Iterator[None]:
        """A file without which a run cannot begin or go on."""
        try:
            yield
        except OSError as error:
            raise InputError(f"{self.path} cannot be written: {error}; free some space, or make it writable") from error

    @contextmanager
    def _dropping(self, name: str) -> Iterator[None]:
        """A record that cannot be written is dropped."""
        try:
            yield
        except OSError as error:
            self.drop(name, error)

    def drop(self, name: str, error: OSError) -> None:
        """Count a record that cannot be written, with one warning."""
        if not self.dropped:
            logger.warning("%s cannot be written (%s); the run goes on without such records", name, error)
        self.dropped += 1


def current_environment() -> dict[str, Any]:
    """The format of the run, versions and the machine's shape, without names or paths."""
    import torch

    packages = ("torch", "transformers", "peft", "safetensors", "numpy")
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "packages": {"gruppo": __version__} | {name: metadata.version(name) for name in packages},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cores": os.cpu_count(),
    }


_ENCODER = json.JSONEncoder(allow_nan=False)


def _check_name(name: str, output: str) -> None:
    """Refuse the name of a new folder that cannot be read off a screen."""
    if not name.isprintable() or name != name.strip():
        raise InputError(
            f"output={output[:200]!r} would make a folder {name[:200]!r}: its name has characters that cannot be seen, "
            "or blanks at an end; choose another"
        )


def _step(line: Mapping[str, Any]) -> float:
    """Step of a record; one without is as if it were never written."""
    step = line.get("step")
    return step if isinstance(step, int) else inf


def _overwrite(path: Path, content: bytes) -> None:
    """Overwrite an existing file in place."""
    with open(os.open(path, os.O_RDWR | os.O_NOFOLLOW), "r+b", buffering=0) as file:
        file.write(content)
        file.truncate()
