"""Checkpoints of a run as folders: writes them whole, finds the newest to resume from, prunes the rest. The caller
decides what is in them (`trainer/state.py`)."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from gruppo import faults
from gruppo.errors import CheckpointError
from gruppo.process.streams import shell_word
from gruppo.run.reader import numbered
from gruppo.weights.files import Entries, commit_folder, read_manifest, remove, remove_temporary, temporary

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class Checkpoints:
    """The folders `step-000050/` of one run."""

    folder: Path
    keep: int
    _current: int | None = None
    """Step of the checkpoint that this process has loaded or written last."""
    _has_warned: bool = False

    def save(self, step: int, write: Callable[[Path], Entries | None]) -> None:
        """Write the state after `step`, unless it exists; then delete all but the newest `keep`."""
        folder = self.folder / f"step-{step:06d}"
        if step == self._current and _is_whole(folder, step):
            return
        try:
            if folder.exists() or folder.is_symlink():
                _move_away(folder)
            commit_folder(folder, write, {"kind": "training", "step": step})
        except CheckpointError as error:
            last = max((n for n, path in self._folders().items() if _is_whole(path, n, has_hashes=False)), default=None)
            ahead = "no step was saved before"
            if last is not None:
                files = (path for path in self._folders()[last].rglob("*") if path.is_file())
                size = sum(path.stat().st_size for path in files) / 2**20
                ahead = f"a checkpoint needs about {size:.1f} MiB; the steps after {last} are lost; then go on from it"
            raise CheckpointError(f"{error}; {ahead}: gruppo resume {shell_word(self.folder.parent)}") from error
        self._current = step
        faults.reach("committed", step)
        self._prune(step)

    def load_step(self, step: int, read: Callable[[Path], T]) -> T:
        """Read the checkpoint of one step with `read`; it must be whole."""
        folder = self.folder / f"step-{step:06d}"
        _check(folder, step)
        return read(folder)

    def load(self, read: Callable[[Path], T]) -> T | None:
        """Read the newest whole checkpoint with `read`; None if none was ever written.

        A checkpoint that is not whole, or that `read` refuses with a CheckpointError, is skipped with a warning.
        """
        reasons = []
        for step, folder in sorted(self._folders().items(), reverse=True):
            try:
                _check(folder, step)
                found = read(folder)
            except CheckpointError as error:
                logger.warning("skipping a checkpoint: %s", error)
                reasons.append(str(error))
            else:
                self._current = step
                return found
        if reasons:
            raise CheckpointError(
                f"none of the {len(reasons)} checkpoints in {self.folder} is whole; nothing was changed. The newest: "
                f"{reasons[0]}"
            )
        return None

    def _folders(self) -> dict[int, Path]:
        """Folders by step, whole or not."""
        return {n: path for n, path in numbered(self.folder).items() if path.is_dir() and not path.suffix}

    def _prune(self, newest: int) -> None:
        """Delete whole checkpoints older than the newest `keep`; one that cannot be deleted stays."""
        # None after `newest`: a run that went back to an older one has not reached them again.
        older = [(n, path) for n, path in self._folders().items() if n < newest and not path.is_symlink()]
        older = sorted((n, path) for n, path in older if _is_whole(path, n, has_hashes=False))
        old = [path for _, path in older[: max(len(older) - self.keep + 1, 0)]]
        if self.folder.is_symlink():
            if old:
                self._warn("the folder is a link, and what is in its target may not be the run's")
            return
        remove_temporary(self.folder)
        for path in old:
            try:
                remove(path)
            except OSError as error:
                self._warn(str(error))

    def _warn(self, reason: str) -> None:
        if not self._has_warned:
            logger.warning("old checkpoints in %s cannot be deleted and stay: %s", self.folder, reason)
        self._has_warned = True


def _check(folder: Path, step: int, *, has_hashes: bool = True) -> None:
    """Raise CheckpointError unless a folder is the complete checkpoint of the step."""
    facts = read_manifest(folder, has_hashes=has_hashes)
    if (facts.get("kind"), facts.get("step")) != ("training", step):
        raise CheckpointError(f"{folder} is not the checkpoint of step {step}: its manifest names another")


def _is_whole(folder: Path, step: int, *, has_hashes: bool = True) -> bool:
    try:
        _check(folder, step, has_hashes=has_hashes)
    except CheckpointError:
        return False
    return True


def _move_away(path: Path) -> None:
    """Rename whatever blocks a checkpoint: a damaged one of the same step, or a file that is not the run's."""
    name = f"damaged-{path.name}{temporary(path).suffix.removeprefix('.tmp')}"
    try:
        path.rename(path.with_name(name))
    except OSError as error:
        raise CheckpointError(f"{path} is in the way and cannot be renamed: {error}") from error
    logger.warning("%s was in the way of a checkpoint; it is now %s", path, name)
