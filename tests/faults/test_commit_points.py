"""R-04: a process that dies between any two operations of a commit leaves the previous checkpoint, whole."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from warm_process import WarmProcess

from gruppo.errors import CheckpointError
from gruppo.model.checkpoint import read_manifest
from gruppo.trainer.run_dir import RunDir

pytestmark = pytest.mark.slow


def save(folder: Path, step: int, die_at: int) -> None:
    """Save a checkpoint and leave with code 9 before operation number `die_at`; with 0 if there are fewer."""
    from torch import nn

    from gruppo.trainer.checkpoints import save_checkpoint

    class Actor:
        """What a checkpoint needs of the actor."""

        def __init__(self) -> None:
            torch.manual_seed(step)
            self.model = nn.Linear(3, 2)
            self.optimizer = torch.optim.AdamW(self.model.parameters())
            self.version = step

    actor: Any = Actor()
    actor.model(torch.ones(3)).sum().backward()
    actor.optimizer.step()
    count = 0

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            if count == die_at:
                os._exit(9)
            count += 1
            return original(*args, **kwargs)

        return call

    from gruppo.model import checkpoint

    os.fsync, os.rename, os.mkdir, os.rmdir = (counted(f) for f in (os.fsync, os.rename, os.mkdir, os.rmdir))
    checkpoint.save_file = counted(checkpoint.save_file)
    Path.write_text = counted(Path.write_text)
    save_checkpoint(RunDir(folder), actor, step, keep=1)


def weights_of(step: int) -> torch.Tensor:
    torch.manual_seed(step)
    return torch.nn.Linear(3, 2).weight.detach()


def is_whole(folder: Path) -> bool:
    try:
        return read_manifest(folder)["kind"] == "training"
    except CheckpointError:
        return False


def test_dying_between_any_two_operations_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    first = tmp_path / "first"
    process = WarmProcess(tmp_path / "log", save, first, 1, 10**6)
    assert process.wait() == 0
    process.close()
    newest = []
    for point in range(100):
        run = tmp_path / f"die-{point}"
        shutil.copytree(first, run)
        process = WarmProcess(tmp_path / f"log-{point}", save, run, 2, point)
        code = process.wait()
        process.close()
        assert code in (0, 9), process.output
        found = sorted((run / "checkpoints").glob("step-*"))
        whole = [p for p in found if is_whole(p)]
        assert whole, f"after dying at operation {point} nothing whole is left of {[p.name for p in found]}"
        step = int(whole[-1].name.removeprefix("step-"))
        moved = load_file(whole[-1] / "weights.safetensors")["weight"]
        # One AdamW step of 1e-3 from the seed's weights: the content is that step's and no other's.
        assert (moved - weights_of(step)).abs().max() == pytest.approx(1e-3, rel=1e-2)
        # Nothing half-written has a checkpoint's name; one that is half-deleted is older than the newest.
        assert all(p.name < whole[-1].name for p in found if p not in whole)
        newest.append(step)
        if code == 0:
            break
    # mkdir, four files, manifest, their flushes, the rename, the parent's flush, the pruning
    assert len(newest) > 12
    assert newest == sorted(newest) and newest[0] == 1 and newest[-1] == 2
