"""Folders of files that are complete or do not exist.

A folder is written aside under a temporary name, flushed to disk, given its manifest (every file with size and sha256)
last, and renamed. A folder without a valid manifest is not a checkpoint, whatever it is called.
"""

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gruppo import faults
from gruppo.errors import CheckpointError

MANIFEST = "manifest.json"


def commit_folder(folder: Path, write: Callable[[Path], None], facts: dict[str, Any]) -> None:
    """Let `write` fill a new folder, then make it appear under its name at once, with a manifest."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; nothing was written")
    aside = folder.parent / f".{folder.name}.tmp-{uuid.uuid4().hex[:8]}"
    try:
        aside.mkdir(parents=True)
        write(aside)
        set_usual_mode(aside)
        files = {}
        for path in sorted(p for p in aside.rglob("*") if p.is_file()):
            files[path.relative_to(aside).as_posix()] = {"size": path.stat().st_size, "sha256": _sha256(path)}
            _flush(path)
        manifest = aside / MANIFEST
        manifest.write_text(json.dumps(facts | {"files": files}, indent=1, sort_keys=True))
        _flush(manifest)
        if faults.PLAN:
            faults.PLAN.reach("filled", facts.get("step", 0))
        os.rename(aside, folder)
        _flush(folder.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if not isinstance(error, OSError | SafetensorError):  # safetensors has its own error for a full disk
            raise
        space = f" ({shutil.disk_usage(folder.parent).free / 2**20:.0f} MiB free)" if folder.parent.exists() else ""
        raise CheckpointError(
            f"could not write {folder}: {error}{space}; what was saved before is untouched"
        ) from error


def set_usual_mode(folder: Path) -> None:
    """Give safetensors files the mode that the umask gives other new files; they are created for their owner alone."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a complete folder; raises CheckpointError with the reason when it is not one."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was never finished, or is not a checkpoint")
    try:
        manifest = json.loads(path.read_text())
        files = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    for name, (size, sha256) in files.items():
        file = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or file.is_symlink():
            raise CheckpointError(f"{path} names {name!r}, which lies outside the folder")
        if not file.is_file():
            raise CheckpointError(f"{folder} lacks {name}")
        if file.stat().st_size != size or _sha256(file) != sha256:
            raise CheckpointError(f"{file} is damaged: its size or hash is not the manifest's")
    return manifest


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
