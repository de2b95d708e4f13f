"""Origin of a run: its options and digests of its prompts and base weights. A run that goes on must have the same."""

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from gruppo.errors import InputError
from gruppo.run.reader import RunReader, numbered
from gruppo.trainer.config import TrainConfig
from gruppo.types import Prompt

FREE = {"steps", "epochs", "output"}
"""Options that a run may change: its last step, and the place of its directory."""


def options_of(config: TrainConfig) -> dict[str, Any]:
    """Options that stay as they are for all of a run."""
    return config.model_dump(mode="json", exclude=FREE)


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


def check(run: RunReader, now: Mapping[str, Any], *, accept: bool) -> list[str]:
    """Differences between what a run was made from and what it is given now; an error unless they are accepted."""
    run.check()
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
