"""RunReader: everything that a run has recorded, read-only, for finished and for running ones. Needs no torch."""

import json
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError
from gruppo.run.lock import is_owned

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"step-(\d+)(\.parquet)?")


class RunReader:
    """A run directory to read from.

    run = RunReader("runs/first")
    run.config()["loss"], run.metrics()[-1]["reward/mean"], run.completions(10).to_pylist()[0]["completion"]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.model = self.path / "model"
        self.best = self.path / "best"
        """The model with the best held-out accuracy, of a run with `keep_best`."""
        self.held_out = self.path / "heldout.jsonl"

    def config(self) -> dict[str, Any]:
        """The options of the run, with `output` where the directory now lies."""
        self.check()
        return read_yaml(self.path / "config.yaml") | {"output": str(self.path)}

    def check(self) -> None:
        """Raise where there is no run."""
        if not (self.path / "config.yaml").is_file():
            raise InputError(f"{self.path} is not a run directory: it has no config.yaml")

    def status(self) -> dict[str, Any]:
        """`status` (running, done, stopped, failed or killed), `step`, and the `error` of a run that failed.

        killed: the file says running, and the process is gone.
        """
        found = _read_json(self.path / "status.json")
        is_killed = found.get("status") == "running" and not is_owned(self.path)
        return found | ({"status": "killed"} if is_killed else {})

    def origin(self) -> dict[str, Any]:
        """What the run was made from: its options but for `steps` and `output`, and digests of prompts and weights."""
        return _read_json(self.path / "origin.json")

    def environment(self) -> dict[str, Any]:
        """Versions, threads and device of the machine on which the run began."""
        return _read_json(self.path / "env.json")

    def metrics(self) -> list[dict[str, Any]]:
        """A line per step; a number that was not finite is None."""
        return read_lines(self.path / "metrics.jsonl")

    def timings(self) -> list[dict[str, Any]]:
        """A line per step: the seconds of each stage."""
        return read_lines(self.path / "timings.jsonl")

    def events(self) -> list[dict[str, Any]]:
        """Events besides the steps, each with its `time` and `event`."""
        return read_lines(self.path / "events.jsonl")

    def completion_steps(self) -> list[int]:
        """The steps whose completions were written."""
        return sorted(numbered(self.path / "completions"))

    def completions(self, step: int) -> "pa.Table":
        """The rollouts of a step, with the columns of `gruppo.run.completions`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = numbered(self.path / "completions").get(step)
        if file is None:
            raise InputError(f"{self.path} has no completions of step {step}; it has {self.completion_steps()}")
        try:
            return pq.read_table(file)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{file} cannot be read: {error}") from error

    def checkpoint_steps(self) -> list[int]:
        """The steps with a checkpoint that was finished. Whether its files are whole is for `Checkpoints` to check."""
        folders = numbered(self.path / "checkpoints")
        return sorted(step for step, folder in folders.items() if (folder / "manifest.json").is_file())


def numbered(folder: Path) -> dict[int, Path]:
    """Entries of a folder by step: `step-000010`, `step-000010.parquet`; anything else in it is left alone."""
    found = ((_NUMBERED.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return {int(name[1]): path for name, path in found if name is not None and name[1] == f"{int(name[1]):06d}"}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; one that is not whole is left out.

    The last line may be cut: by a crash, or because it is just being written. Any other is a damage that is logged.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("no record")
            records.append(record)
        except (ValueError, RecursionError):
            if number < len(lines):
                logger.warning("%s:%d is damaged and left out", path, number)
    return records


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The `option: value` lines of a config file."""
    import yaml

    path = Path(path).expanduser()
    if not path.is_file():
        raise InputError(f"config file {path} does not exist")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict | None):
        raise InputError(f"{path} must hold `option: value` lines, got a {type(values).__name__}")
    return values or {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} cannot be read: it must hold a mapping, got {type(found).__name__}")
    return found
