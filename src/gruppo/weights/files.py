"""Folders of files that are complete or do not exist.

A folder is written aside under a temporary name, flushed to disk, given its manifest (every file with size and sha256)
last, and renamed. A folder without a valid manifest is not a checkpoint, whatever it is called.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from gruppo import faults
from gruppo.errors import CheckpointError

MANIFEST = "manifest.json"
_TEMPORARY = re.compile(r"\..+\.tmp-[0-9a-f]{8}")
_BLOCK, _BLOCKS = 4096, 16
"""Bytes of a block, and blocks of a large tensor that its digest covers."""


Entries = Mapping[str, Mapping[str, Any]]
"""Size and sha256 of files, by their names in a folder."""


def commit_folder(folder: Path, write: Callable[[Path], Entries | None], facts: dict[str, Any]) -> None:
    """Let `write` fill a new folder, then move it to its name atomically, with a manifest.

    Args:
        write: may return entries of the manifest that it has already: of files that other processes wrote and hashed.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} exists already; nothing was written")
    aside = temporary(folder)
    try:
        aside.mkdir(parents=True)
        known = write(aside) or {}
        set_usual_mode(aside)
        paths = {path.relative_to(aside).as_posix(): path for path in aside.rglob("*") if path.is_file()}
        files = {name: known[name] if name in known else flushed(path) for name, path in sorted(paths.items())}
        manifest = aside / MANIFEST
        manifest.write_text(json.dumps(facts | {"files": files}, indent=1, sort_keys=True))
        _flush(manifest)
        faults.reach("filled", facts.get("step", 0))
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


def flushed(path: Path) -> dict[str, Any]:
    """Flush a file to disk; its entry in a manifest."""
    _flush(path)
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def temporary(path: Path) -> Path:
    """A temporary name next to a path, for writing or removing it."""
    return path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")


def replace_file(path: Path, content: bytes, *, flush: bool = False) -> None:
    """Write a file aside and rename it: half a file would look like a whole one. A link is replaced, not followed.

    Args:
        flush: it survives a power cut.
    """
    aside = temporary(path)
    try:
        with aside.open("xb") as file:
            file.write(content)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise


def remove(path: Path) -> None:
    """Remove a file or folder atomically: rename, then delete. A link is unlinked, not followed."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    aside = temporary(path)
    path.rename(aside)
    shutil.rmtree(aside)


def remove_temporary(folder: Path) -> None:
    """Remove what a killed process left half-written or half-removed in a folder. Links are not followed."""
    if folder.is_symlink() or not folder.is_dir():
        return
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name) and not path.is_symlink():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def take_flock(descriptor: int, seconds: float) -> bool:
    """Lock an open file or folder against other processes, until it is closed; False on a file system that cannot.

    Raises BlockingIOError if another process keeps it for that long.
    """
    ends = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.01)
        except OSError:
            return False


def is_free(folder: Path, *, kind: str) -> bool:
    """True if a folder may be written: it is absent, empty, or a complete folder of this kind."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return True
    try:
        return read_manifest(folder, has_hashes=False).get("kind") == kind
    except CheckpointError:
        return False


@contextmanager
def replacing(folder: Path) -> Iterator[None]:
    """Move an existing folder aside while a new one is written; restore it on failure."""
    aside = temporary(folder)
    try:
        folder.rename(aside)
    except FileNotFoundError:
        yield
        return
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be replaced: {error}; move it away") from error
    try:
        yield
    except BaseException:
        if not folder.exists():
            aside.rename(folder)
        raise
    with suppress(OSError):
        remove(aside)


def set_usual_mode(folder: Path) -> None:
    """Give safetensors files the mode of the umask, because they are created readable only by their owner."""
    probe = folder / ".mode"
    probe.touch()
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for file in folder.rglob("*.safetensors"):
        file.chmod(mode)


def read_manifest(folder: Path, *, files: str = "*", has_hashes: bool = True) -> dict[str, Any]:
    """The manifest of a complete folder; raises CheckpointError with the reason when it is not one.

    Args:
        files: pattern of the names that are compared with the manifest.
        has_hashes: compare contents. False: names and sizes only.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it was never finished, or is not a checkpoint")
    try:
        manifest = json.loads(path.read_text())
        noted = {str(name): (int(entry["size"]), str(entry["sha256"])) for name, entry in manifest["files"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    if not noted:
        raise CheckpointError(f"{path} is damaged: it names no file")
    for name, (size, sha256) in noted.items():
        file = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute() or file.is_symlink():
            raise CheckpointError(f"{path} names {name!r}, which lies outside the folder")
        if not Path(name).match(files):
            continue
        if not file.is_file():
            raise CheckpointError(f"{folder} lacks {name}")
        if file.stat().st_size != size or (has_hashes and _sha256(file) != sha256):
            raise CheckpointError(f"{file} is damaged: its size or hash is not the manifest's")
    return manifest


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The tensors that a safetensors file names, each with dtype, shape and offsets, and where their bytes start.

    Raises OSError or ValueError for another file.
    """
    with file.open("rb") as opened:
        start = opened.read(8)
        if len(start) < 8:
            raise ValueError("it is cut short")
        (length,) = struct.unpack("<Q", start)
        if length > file.stat().st_size:
            raise ValueError("it is cut short")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    header.pop("__metadata__", None)
    return header, 8 + length


def digest_tensors(folder: Path) -> str:
    """Digest of the tensors in a folder's safetensors files: names, dtypes, shapes and values, in any number of files.

    Of a tensor of more than 64 KiB it covers 16 blocks, from first to last: other weights are seen, and a model of
    many GB costs no more than a small one. A single changed bit is for the hashes of a manifest.
    """
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        header, start = read_header(file)
        tensors |= {name: (file, start, entry) for name, entry in header.items()}
    digest = hashlib.sha256()
    for name, (file, start, entry) in sorted(tensors.items()):
        first, end = entry["data_offsets"]
        size = end - first
        digest.update(json.dumps([name, entry["dtype"], entry["shape"]]).encode())
        offsets = range(0, size, _BLOCK)
        if size > _BLOCK * _BLOCKS:
            offsets = [i * (size - _BLOCK) // (_BLOCKS - 1) for i in range(_BLOCKS)]
        with file.open("rb") as opened:
            for offset in offsets:
                opened.seek(start + first + offset)
                digest.update(opened.read(min(_BLOCK, size - offset)))
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
