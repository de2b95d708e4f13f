"""Checkpoints of a run: which one to resume from, and which to prune. What is in one is the caller's."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gruppo import faults
from gruppo.errors import CheckpointError
from gruppo.run.reader import numbered
from gruppo.weights.files import commit_folder, read_manifest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """The folders `step-000050/` of one run."""

    folder: Path
    keep: int

    def save(self, step: int, write: Callable[[Path], None]) -> None:
        """The state after `step`, unless it is there already; once it is safe, all but the newest `keep` go."""
        folder = self.folder / f"step-{step:06d}"
        if folder.exists():
            try:
                read_manifest(folder)
                return
            except CheckpointError:
                shutil.rmtree(folder)  # a damaged one of the same step; its replacement is about to be written
        try:
            commit_folder(folder, write, {"kind": "training", "step": step})
        except CheckpointError as error:
            last = max(numbered(self.folder), default=None)
            ahead = (
                "no step was saved before" if last is None else f"the steps after {last} are lost; then go on from it"
            )
            raise CheckpointError(f"{error}; {ahead}: gruppo resume {self.folder.parent}") from error
        if faults.PLAN:
            faults.PLAN.reach("committed", step)
        for _, old in sorted(numbered(self.folder).items())[: -self.keep]:
            shutil.rmtree(old)

    def newest(self) -> Path | None:
        """The newest folder that is whole; None if no checkpoint was ever written."""
        folders = numbered(self.folder)
        for _, folder in sorted(folders.items(), reverse=True):
            try:
                read_manifest(folder)
                return folder
            except CheckpointError as error:
                logger.warning("skipping a checkpoint: %s", error)
        if folders:
            raise CheckpointError(
                f"none of the {len(folders)} checkpoints in {self.folder} is whole; nothing was changed"
            )
        return None
