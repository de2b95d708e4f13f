"""Which checkpoint to resume from, and which to prune."""

import json
import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from gruppo.errors import CheckpointError, InputError
from gruppo.model import TransformersModel
from gruppo.model.checkpoint import load_training_state, save_training_state
from gruppo.trainer.run_dir import RunDir
from gruppo.trainer.state import RunState
from gruppo.weights.files import commit_folder, read_manifest

logger = logging.getLogger(__name__)


def save_checkpoint(
    run: RunDir,
    model: TransformersModel,
    step: int,
    keep: int,
    unfinished: Mapping[str, float] | None = None,
    run_state: RunState | None = None,
) -> None:
    """Write the state after `step`; once it is safe, delete all but the newest `keep`.

    `unfinished`: the metrics of the step, if it was interrupted before they were recorded.
    `run_state`: what later steps depend on besides weights and optimizer.
    """
    folder = run.checkpoints / f"step-{step:06d}"
    if folder.exists():
        try:
            read_manifest(folder)
            return
        except CheckpointError:
            shutil.rmtree(folder)  # a damaged one of the same step; its replacement is about to be written

    def write(aside: Path) -> None:
        save_training_state(model.weights, model.optimizer, aside)
        if run_state is not None:
            run_state.save(aside)
        (aside / "trainer.json").write_text(
            json.dumps({"step": step, "version": model.version, "unfinished": unfinished})
        )

    commit_folder(folder, write, {"kind": "training", "step": step})
    for old in sorted(run.checkpoints.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def load_newest(
    run: RunDir, model: TransformersModel, run_state: RunState | None = None
) -> tuple[int, dict[str, float] | None]:
    """Load the newest checkpoint that is whole; its step and `unfinished` metrics. Never starts over silently."""
    folders = sorted(run.checkpoints.glob("step-*"), reverse=True)
    for folder in folders:
        try:
            read_manifest(folder)
        except CheckpointError as error:
            logger.warning("skipping a checkpoint: %s", error)
            continue
        load_training_state(model.weights, model.optimizer, folder)
        if run_state is not None:
            run_state.load(folder)
        state = json.loads((folder / "trainer.json").read_text())
        model.version = state["version"]
        return state["step"], state.get("unfinished")
    if folders:
        raise CheckpointError(
            f"none of the {len(folders)} checkpoints in {run.checkpoints} is whole; nothing was changed"
        )
    raise InputError(f"{run.path} has no checkpoint to resume from: it stopped before its first one; start it anew")
