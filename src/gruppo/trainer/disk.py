"""Disk of a run: what it will write into its directory, checked against the room there is."""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gruppo.errors import InputError
from gruppo.trainer.config import TrainConfig

if TYPE_CHECKING:
    from gruppo.model.ranked import Actor

FILE_BYTES, TOKEN_BYTES = 2**14, 20
"""Bytes of a file of completions without its tokens, and of each token in it: id, text and four numbers, compressed."""
MiB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskNeeds:
    """Bytes that a run will write into its directory, at most."""

    checkpoint: int
    """One checkpoint."""
    num_checkpoints: int
    """Checkpoints that are there at a time, beside those that there are already."""
    models: int
    """The model at the end, the best one, and weights on their way to vLLM."""
    completions: int
    """Files of completions, each at its limit."""

    @property
    def total(self) -> int:
        return self.checkpoint * self.num_checkpoints + self.models + self.completions

    def check(self, config: TrainConfig, folder: Path) -> None:
        """Raise InputError if the disk of a folder has less room."""
        disk = shutil.disk_usage(folder)
        if self.total <= disk.free or not disk.total:  # some network file systems report no size
            return
        raise InputError(
            f"output={config.output!r} is on a disk with {_size(disk.free)} free, and the run writes up to "
            f"{_size(self.total)} there: {self.num_checkpoints} checkpoint(s) of {_size(self.checkpoint)} "
            f"(keep_checkpoints={config.keep_checkpoints}, and a new one before an old one goes), {_size(self.models)} "
            f"of models, {_size(self.completions)} of completions (completions_every={config.completions_every}, "
            f"max_new_tokens={config.max_new_tokens}). Free some space, choose another output, lower keep_checkpoints "
            "or raise completions_every"
        )


def disk_needs(config: TrainConfig, model: "Actor", *, step: int = 0, num_saved: int = 0) -> DiskNeeds:
    """What a run that is at `step`, with `num_saved` checkpoints, has still to write."""
    trained = sum(parameter.nbytes for parameter in model.weights.parameters)
    whole = sum(parameter.nbytes for parameter in model.model.parameters())
    saved = whole if model.lora is None else trained
    to_come = config.steps // config.save_every - step // config.save_every + (config.steps % config.save_every > 0)
    num_models = 1 + 2 * config.keep_best  # the best one before is there until the new one is
    if config.sampler != "torch":
        num_models += 2 + config.max_staleness
    every, rows = config.completions_every, config.prompts_per_step * config.group_size
    rows = min(rows * max(config.dynamic_sampling, 1), config.advanced.completions_limit)
    num_files = config.steps // every - step // every if every else 0
    return DiskNeeds(
        checkpoint=3 * trained + (saved if config.ref_every else 0),  # weights, and two moments of Adam
        num_checkpoints=min(to_come, config.steps - step, max(config.keep_checkpoints + 1 - num_saved, 1)),
        models=saved * num_models if step < config.steps else 0,
        completions=num_files * (FILE_BYTES + rows * config.max_new_tokens * TOKEN_BYTES),
    )


def _size(num_bytes: int) -> str:
    """Bytes in the unit that leaves few digits.

    >>> _size(3 * 2**19), _size(5 * 2**40)
    ('1.5 MiB', '5,120.0 GiB')
    """
    return f"{num_bytes / MiB:,.1f} MiB" if num_bytes < 1024 * MiB else f"{num_bytes / MiB / 1024:,.1f} GiB"
