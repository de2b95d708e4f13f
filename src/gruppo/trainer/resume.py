"""Resume: continues a run from its newest checkpoint, if its options, prompts and base weights are unchanged.

The origin of a run is its options, with digests of its prompts and base weights.
"""

import hashlib
import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gruppo.errors import InputError
from gruppo.process.streams import shell_word
from gruppo.run.directory import RunDirectory
from gruppo.run.reader import RunReader, numbered
from gruppo.trainer.config import TrainConfig
from gruppo.trainer.disk import disk_needs
from gruppo.trainer.state import Ending, Position, Snapshots
from gruppo.types import Prompt

if TYPE_CHECKING:
    from gruppo.model.ranked import Actor

logger = logging.getLogger(__name__)

FREE = {"steps", "epochs", "output"}
"""Options that may change between start and resume: the last step, and the directory."""


def options_of(config: TrainConfig) -> dict[str, Any]:
    """Options that must not change within a run."""
    found = config.model_dump(mode="json", exclude=FREE)
    return found | found.pop("advanced")


def prompts_digest(prompts: Sequence[Prompt]) -> str:
    """Number and digest of prompts: their tokens, and what rewards get.

    >>> prompts_digest([Prompt(token_ids=(1, 2), source="1+1=", columns={"answer": "2"})])
    '1 prompts (3ae031400b71)'
    """
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(array("q", prompt.token_ids).tobytes())
        digest.update(json.dumps([prompt.source, dict(prompt.columns)], skipkeys=True, default=_name_of_type).encode())
    return f"{len(prompts)} prompts ({digest.hexdigest()[:12]})"


def _name_of_type(value: Any) -> str:
    return type(value).__name__


def check_origin(run: RunReader, now: Mapping[str, Any], *, accept: bool) -> list[str]:
    """Differences between what a run started from and what it gets now; an error unless accepted."""
    run.check_format()
    # Any of them shows that it began: a full disk may have dropped the others.
    has_record = any((run.path / name).exists() for name in ("status.json", "metrics.jsonl"))
    if not has_record and not numbered(run.path / "checkpoints"):
        return []
    try:
        then = run.origin()
        found = [f"{name} {then[name]!r} -> {now[name]!r}" for name in now if name in then and then[name] != now[name]]
        usual = options_of(TrainConfig())  # an option that is newer than the run has its default
        if missing := [name for name in now if name not in then and (name not in usual or now[name] != usual[name])]:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            found.append(f"its origin.json is damaged and lacks {', '.join(missing[:5])}{more}")
    except InputError as error:
        found = [str(error)]
    if found and not accept:
        raise InputError(
            f"{run.path} was made from something else: {'; '.join(found)}. Put it back, or go on with it as it is now "
            "with --accept-changes (in Python GRPOTrainer(..., accept_changes=True)). --steps N needs no such consent, "
            "unless data is a stream, of which more steps read more rows"
        )
    return found


def go_on(
    run: RunDirectory, config: TrainConfig, model: "Actor", snapshots: Snapshots, changes: Sequence[str]
) -> Position:
    """Restore model and state from the newest checkpoint, and drop the records of later steps."""
    place = snapshots.load_newest() or Position()
    is_done, ended = _was_done(run, place.step)
    ended = place.ended or ended
    place = replace(place, is_done=is_done, ended=ended if ended is not None and ended.holds(config) else None)
    if config.steps < place.step:
        raise InputError(f"steps={config.steps} is behind the run, which is at step {place.step}; give a higher one")
    if place.folder is None and run.model.exists():
        raise InputError(
            f"{run.path} has a model and no checkpoint to go on from; train on from the model with "
            f"--model {shell_word(run.model)} and another output"
        )
    if not place.step and place.unfinished is None:
        logger.warning("%s was not saved after a step; it starts over", run.path)
    num_saved = len(numbered(run.checkpoints))
    disk_needs(config, model, step=place.step, num_saved=num_saved).check(config, run.path)
    # The first evaluation is made again too, if there was no step after it.
    redo_line = place.unfinished is not None or (place.step == 0 and place.ended is None)
    run.go_on_after(place.step, config.to_yaml(), redo_line=redo_line)
    if changes:
        logger.warning("the run goes on with changes: %s", "; ".join(changes))
        run.log_event("changes", step=place.step, changes=list(changes))
    return place


def _was_done(run: RunReader, step: int) -> tuple[bool, Ending | None]:
    """True if the run was done at this step, and how it ended."""
    try:
        status = run.status()
        is_done = (status.get("status"), status.get("step")) == ("done", step)
        return is_done, Ending.read(status.get("ended")) if is_done else None
    except (InputError, ValueError, KeyError, TypeError):
        return False, None
