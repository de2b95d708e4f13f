"""RunReader: everything that a run has recorded, read-only, for finished and for running ones. Needs no torch."""

import json
import logging
import os
import re
import stat
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppo import __version__
from gruppo.errors import InputError
from gruppo.process.streams import shell_word

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger(__name__)

_NUMBERED = re.compile(r"step-(\d+)(\.parquet)?")


FORMAT = 1
"""Number of the format of a run directory. Raise it with any change that keeps older runs from being resumed."""

MAX_CONFIG_BYTES = 2**20
MAX_CONFIG_VALUES = 10_000
MAX_JSON_BYTES, MAX_LINES_BYTES = 2**24, 2**30
"""Of a file of one record, and of one with a line per step."""
MAX_DIGITS = 18
"""Of an integer that has 64 bits."""


class RunReader:
    """A run directory to read from.

    run = RunReader("runs/first")
    run.config()["loss"], run.metrics()[-1]["reward/mean"], run.completions(10).to_pylist()[0]["completion"]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = at_home(path)
        self.model = self.path / "model"
        self.best = self.path / "best"
        """The model with the best held-out accuracy, of a run with `keep_best`."""
        self.held_out = self.path / "heldout.jsonl"

    def config(self) -> dict[str, Any]:
        """Options of the run, with the directory's current place as `output`."""
        self.check()
        return read_yaml(self.path / "config.yaml") | {"output": str(self.path)}

    def check(self) -> None:
        """Raise where there is no run."""
        try:
            has_config = (self.path / "config.yaml").is_file()
        except ValueError:  # a NUL in its name
            has_config = False
        if not has_config:
            raise InputError(f"{self.path} is not a run directory: it has no config.yaml")

    def check_owner(self, is_trusted: bool) -> None:
        """Raise where another user could have written what this run names: rewards, losses and tools are imported."""
        self.check()
        for path in (self.path, self.path / "config.yaml"):
            found = path.stat()
            is_open = found.st_mode & stat.S_IWOTH
            if (found.st_uid != os.geteuid() or is_open) and not is_trusted:
                whose = f"belongs to another user (uid {found.st_uid})"
                mode = f"can be written by every user (mode {stat.S_IMODE(found.st_mode):o}; chmod o-w)"
                raise InputError(
                    f"{path} {mode if is_open else whose}, and code that its config names would be run: "
                    "rewards, loss, metrics, tools, environment. Read it first; --trust goes on all the same"
                )

    def check_format(self) -> None:
        """Raise where another version wrote this run, in a format that this one cannot go on with."""
        try:
            found = self.environment()
        except InputError:
            return  # lost; the checkpoints have checks of their own
        if (number := found.get("format", 0)) == FORMAT:
            return
        version = str(found.get("packages", {}).get("gruppo", "of an unknown version"))
        raise InputError(
            f"{self.path} was written by gruppo {version:.40} in run format {number!s:.20} and cannot be resumed by "
            f"gruppo {__version__}, which has run format {FORMAT}; nothing was touched. gruppo report, view, sample "
            f"and export still read it, and gruppo train --model {shell_word(self.model)} trains on from its model"
        )

    def status(self) -> dict[str, Any]:
        """`status` (running, done, stopped, failed or killed), `step`, the `error` of a run that failed, and what
        `ended` it before its last step.

        killed: the file says running, but the process no longer exists.
        """
        from gruppo.run.lock import is_owned

        found = read_json(self.path / "status.json")
        is_killed = found.get("status") == "running" and not is_owned(self.path)
        return found | ({"status": "killed"} if is_killed else {})

    def origin(self) -> dict[str, Any]:
        """Origin of the run: its options except `steps` and `output`, and digests of prompts and weights."""
        return read_json(self.path / "origin.json")

    def environment(self) -> dict[str, Any]:
        """Versions, threads and device of the machine on which the run began."""
        found = read_json(self.path / "env.json")
        if not isinstance(found.get("packages", {}), dict):
            raise InputError(f"{self.path / 'env.json'} cannot be read: its packages must be a mapping")
        return found

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

    def completions_file(self, step: int) -> Path:
        return self.path / "completions" / f"step-{step:06d}.parquet"

    def completions(self, step: int, columns: Sequence[str] | None = None) -> "pa.Table":
        """The rollouts of a step, with the columns of `gruppo.run.completions`, or with these of them.

        A file that was written before a column existed lacks it.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        file = self.completions_file(step)
        if not file.is_file():
            raise InputError(f"{self.path} has no completions of step {step}; it has {self.completion_steps()}")
        try:
            if columns is not None:
                there = set(pq.read_schema(file).names)
                columns = [name for name in columns if name in there]
            return pq.read_table(file, columns=columns)
        except (OSError, pa.ArrowException) as error:
            raise InputError(f"{file} cannot be read: {error}; choose another step") from error

    def checkpoint_steps(self) -> list[int]:
        """The steps with a checkpoint that was finished. Whether its files are whole is for `Checkpoints` to check."""
        folders = numbered(self.path / "checkpoints")
        return sorted(step for step, folder in folders.items() if (folder / "manifest.json").is_file())

    def saved(self) -> str:
        """The saved state of the run in words, with the command that continues from it."""
        steps = self.checkpoint_steps()
        what = f"step {steps[-1]} is saved" if steps else "no step is saved, and it starts over"
        return f"{what}: gruppo resume {shell_word(self.path)}"


def at_home(path: str | Path) -> Path:
    """A path with ~ written out."""
    try:
        return Path(path).expanduser()
    except RuntimeError:  # no such user, or none that has a home
        user = Path(path).parts[0]
        raise InputError(f"{path}: no home folder is known for {user}; write the path out, or ./{path}") from None


def numbered(folder: Path) -> dict[int, Path]:
    """Entries of a folder by step: `step-000010`, `step-000010.parquet`; anything else is ignored."""
    found = ((_NUMBERED.fullmatch(path.name), path) for path in (folder.iterdir() if folder.is_dir() else ()))
    return {int(name[1]): path for name, path in found if name is not None and name[1] == f"{int(name[1]):06d}"}


def read_file(path: Path, most: int) -> bytes:
    """Content of a file of a run, which a stranger may have made: a pipe has no end, nor has a device.

    Args:
        most: bytes; a file that has more is refused.
    """
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFCHR: "device", stat.S_IFBLK: "device"}
            kind = kinds.get(stat.S_IFMT(found.st_mode), "special file")
            raise InputError(f"{path} is a {kind}, and a run has a regular file of that name; move it away")
        if found.st_size > most:
            raise InputError(f"{path} has {found.st_size:,} bytes, and at most {most:,} are read; name another")
        with open(file, "rb", closefd=False) as opened:
            return opened.read(most)
    finally:
        os.close(file)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Records of a JSONL file, without incomplete ones.

    The last line may be cut: by a crash, or because it is just being written. Any other is a damage that is logged.
    """
    try:
        lines = read_file(path, MAX_LINES_BYTES).split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line, parse_int=_integer)
            if not isinstance(record, dict):
                raise ValueError("no record")
            records.append(record)
        except (ValueError, RecursionError):
            if number < len(lines):
                logger.warning("%s:%d is damaged and left out", path, number)
    return records


def _integer(digits: str) -> int | float:
    """A number without a fraction; as a float where it has more than 64 bits, which no table takes."""
    return int(digits) if len(digits) <= MAX_DIGITS else float(digits)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The `option: value` lines of a config file."""
    import yaml

    path = at_home(path)
    try:
        if not path.is_file():
            raise InputError(f"config file {path} does not exist; give one that does")
        text = read_file(path, MAX_CONFIG_BYTES).decode("utf-8")
        nodes = (event for event in yaml.parse(text, Loader=yaml.SafeLoader) if isinstance(event, yaml.NodeEvent))
        if next(islice(nodes, MAX_CONFIG_VALUES, None), None) is not None:
            raise InputError(f"config file {path} has more than {MAX_CONFIG_VALUES:,} values; name another file")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _check_yaml(node, path)
        values = None if node is None else loader.construct_document(node)
    except InputError:
        raise
    except RecursionError:
        raise InputError(f"{path} is not YAML that can be used: it is nested too deeply; write options flat") from None
    except (yaml.YAMLError, ValueError, OSError) as error:  # not UTF-8, a number of 5,000 digits, not readable
        raise InputError(f"{path} is not YAML: {str(error)[:1000]}; fix it there") from None
    if not isinstance(values, dict | None):
        raise InputError(f"{path} must hold `option: value` lines, got a {type(values).__name__}")
    return values or {}


def _check_yaml(root: Any, path: Path) -> None:
    """Refuse duplicate keys, numbers to base 60, and aliases that expand to more values than a config has: a few
    hundred bytes can expand to billions."""
    sizes: dict[int, int] = {}

    def size(node: Any) -> int:
        if id(node) not in sizes:
            sizes[id(node)] = MAX_CONFIG_VALUES  # what it is inside itself
            parts = node.value if isinstance(node.value, list) else []
            if not parts and ":" in node.value and node.tag.endswith((":int", ":float")):
                raise InputError(
                    f"{path}:{node.start_mark.line + 1}: {node.value[:80]} is a number to base 60 in YAML; write it "
                    "without colons, or in quotes if it is a text"
                )
            pairs = [part if isinstance(part, tuple) else (part,) for part in parts]
            keys = Counter(pair[0].value for pair in pairs if len(pair) == 2 and isinstance(pair[0].value, str))
            twice = next((key for key, count in keys.items() if count > 1 and key != "<<"), None)
            if twice is not None:
                raise InputError(f"{path}:{node.start_mark.line + 1}: {twice[:80]!r} is given twice; leave one out")
            sizes[id(node)] = 1 + sum(size(part) for pair in pairs for part in pair)
        return sizes[id(node)]

    if root is not None and size(root) > MAX_CONFIG_VALUES:
        raise InputError(f"{path} stands for more than {MAX_CONFIG_VALUES:,} values by its aliases; write them out")


def read_json(path: Path) -> dict[str, Any]:
    """The record of a JSON file."""
    try:
        found = json.loads(read_file(path, MAX_JSON_BYTES))
    except InputError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} cannot be read: it must hold a mapping, got {type(found).__name__}")
    return found
