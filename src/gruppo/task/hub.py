"""Data sets of the Hugging Face hub, by name: `hf://org/name[/config][@revision][:split]`.

The only module that imports `datasets` (extra `data`). Nothing is executed from the hub: `datasets` reads
data files only, and a revision can be pinned.
"""

import re
from pathlib import Path
from typing import Any

from gruppo.errors import InputError, require

HUB_PREFIX = "hf://"
_PART = r"[A-Za-z0-9][\w.-]*"  # must not begin with a dot: `datasets` would take ../x for a local folder
_SPEC = re.compile(
    rf"hf://(?P<id>{_PART}(?:/{_PART})?)(?:/(?P<config>{_PART}))?"
    r"(?:@(?P<revision>[A-Za-z0-9][\w.-]*))?(?::(?P<split>\w+(?:\[[\w%:-]*\])?))?"
)


def load_hub(spec: str) -> Any:
    """The `datasets.Dataset` that a spec names; the split is `train` when none is named."""
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise InputError(f"{spec!r} must read hf://org/name[/config][@revision][:split]")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise require("data", "datasets", f"reading {spec}") from error
    name = match["id"]
    if Path(name).exists():
        # `datasets` prefers a folder of that name to the hub, which is not what hf:// says.
        raise InputError(f"{spec}: the local path {name!r} would be read instead of the hub; pass its files by path")
    try:
        return load_dataset(name, match["config"], split=match["split"] or "train", revision=match["revision"])
    except (OSError, ValueError) as error:  # not found, no network, no such split or config
        raise InputError(f"{spec} cannot be loaded: {error}") from error
