"""R-04: a process that dies between any two operations of a commit leaves the previous checkpoint, whole."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from warm_process import WarmProcess

from gruppo.errors import CheckpointError
from gruppo.weights.files import read_manifest

pytestmark = pytest.mark.slow
DIED = 9


def save(folder: Path, step: int, die_at: int) -> None:
    """Save a checkpoint and leave with code 9 before operation number `die_at`; with 0 if there are fewer."""
    from torch import nn

    from gruppo.model.checkpoint import save_training_state
    from gruppo.model.optim import MasterWeights
    from gruppo.run.checkpoints import Checkpoints
    from gruppo.trainer.state import RunState, Snapshots

    class Actor:
        """What a checkpoint needs of the actor."""

        def __init__(self) -> None:
            torch.manual_seed(step)
            self.model = nn.Linear(3, 2)
            self.weights = MasterWeights(self.model)
            self.optimizer = torch.optim.AdamW(self.weights.parameters)
            self.version = step

        def save_state(self, folder: Path) -> None:
            save_training_state(self.weights, self.optimizer, folder)

    actor: Any = Actor()
    actor.model(torch.ones(3)).sum().backward()
    actor.optimizer.step()
    count = 0

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == die_at:
                os._exit(DIED)
            count += 1
            return original(*args, **kwargs)

        return call

    from gruppo.model import checkpoint

    os.fsync, os.rename, os.mkdir, os.rmdir = (counted(f) for f in (os.fsync, os.rename, os.mkdir, os.rmdir))
    checkpoint.save_file = counted(checkpoint.save_file)
    Path.write_text = counted(Path.write_text)
    Snapshots(Checkpoints(folder / "checkpoints", keep=1), actor, RunState()).save(step)


def weights_of(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.nn.Linear(3, 2).weight.detach()


def is_whole(folder: Path) -> bool:
    try:
        return read_manifest(folder)["kind"] == "training"
    except CheckpointError:
        return False


def save_and_die_everywhere(folder: Path) -> None:
    """A first checkpoint, then for each operation of the second a copy whose writer died there."""
    first = folder / "first"
    run_in_fork(first, 1, 10**6)
    codes = []
    while not codes or codes[-1] == DIED:
        run = folder / f"die-{len(codes)}"
        shutil.copytree(first, run)
        codes.append(run_in_fork(run, 2, len(codes)))
    (folder / "codes.json").write_text(json.dumps(codes))


def run_in_fork(run: Path, step: int, die_at: int) -> int:
    pid = os.fork()
    if pid == 0:
        save(run, step, die_at)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.row("R-04", "an end at every mkdir, write, fsync, rename and rmdir")
def test_dying_between_any_two_operations_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    process = WarmProcess(tmp_path / "log", save_and_die_everywhere, tmp_path)
    assert process.wait() == 0, process.output
    process.close()
    codes = json.loads((tmp_path / "codes.json").read_text())
    # mkdir, four files, manifest, their flushes, the rename, the parent's flush, the pruning
    assert len(codes) > 12 and codes == [DIED] * (len(codes) - 1) + [0]
    newest = []
    for point in range(len(codes)):
        found = sorted((tmp_path / f"die-{point}" / "checkpoints").glob("step-*"))
        whole = [p for p in found if is_whole(p)]
        assert whole, f"after dying at operation {point} nothing whole is left of {[p.name for p in found]}"
        step = int(whole[-1].name.removeprefix("step-"))
        moved = load_file(whole[-1] / "weights.safetensors")["weight"]
        # One AdamW step of 1e-3 from the seed's weights: the content is that step's and no other's.
        assert (moved - weights_of(step)).abs().max() == pytest.approx(1e-3, rel=1e-2)
        # Nothing half-written has a checkpoint's name; one that is half-deleted is older than the newest.
        assert all(p.name < whole[-1].name for p in found if p not in whole)
        newest.append(step)
    assert newest == sorted(newest) and newest[0] == 1 and newest[-1] == 2
