"""Lock of a run directory: the file that names the process which owns it, and whether that process still runs."""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gruppo.errors import InputError
from gruppo.run.reader import MAX_JSON_BYTES, read_file

NAME = "lock"
GUARD_S = 5.0
"""Seconds that the guard of a lock is waited for. gruppo has it for milliseconds; anyone who can read the directory can
take it, and keep it."""
LOCKS = Path("/proc/locks")


def take_lock(folder: Path) -> None:
    """Own the directory, unless a living process does."""
    lock = folder / NAME
    try:
        with _guarded(folder) as is_guarded:
            # A lock is written under the guard: what is not JSON was written by a process that died of it.
            if is_owned(folder) and not (is_guarded and _is_cut(lock)):
                owner = _owner(lock)
                raise InputError(
                    f"{folder} is in use by process {owner.get('pid')} on {owner.get('host')}; stop it first "
                    f"(or delete {lock} if it no longer runs)"
                )
            lock.unlink(missing_ok=True)
            text = json.dumps(_me() | {"path": str(folder.absolute())}).encode()
            descriptor = os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            try:
                os.write(descriptor, text)
            except OSError:
                lock.unlink(missing_ok=True)  # an empty one would be nobody's
                raise
            finally:
                os.close(descriptor)
    except BlockingIOError as error:
        raise InputError(
            f"{folder} cannot be taken: {_holder(folder)} has held a lock (flock) on it for {GUARD_S:.0f} seconds; end "
            "that process, or wait for it, and start again"
        ) from error
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error}; free some space or make it writable, or choose another"
        ) from error


def give_back_lock(folder: Path) -> None:
    """Delete the lock, if it is this process's. A signal may have come before its text was written."""
    lock = folder / NAME
    with suppress(OSError, InputError):
        if _me().items() <= _owner(lock).items():  # nobody takes it from a living process: this needs no guard
            lock.unlink()
        elif lock.exists():
            with _guarded(folder) as is_guarded:
                if is_guarded and _is_cut(lock):
                    lock.unlink()


def drop_lock(folder: Path, pid: int, host: str) -> None:
    """Delete the lock of a process that is known to have ended, on whichever machine."""
    with suppress(OSError), _guarded(folder):
        owner = _owner(folder / NAME)
        if (owner.get("pid"), owner.get("host")) == (pid, host):
            (folder / NAME).unlink()


def is_owned(folder: Path) -> bool:
    """Whether a process owns the directory, as far as can be told from this machine."""
    lock = folder / NAME
    owner = _owner(lock)
    return lock.exists() and not _is_gone(owner) and not _is_copy(lock, owner)


@contextmanager
def _guarded(folder: Path) -> Iterator[bool]:
    """One process at a time looks at a lock and takes it; False on a file system that cannot do this.

    Raises BlockingIOError where another keeps it.
    """
    from gruppo.weights.files import take_flock  # here: who only asks who owns a run starts without it

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield take_flock(descriptor, GUARD_S)
    finally:
        os.close(descriptor)


def _holder(folder: Path) -> str:
    """Who holds the guard, as far as the kernel says: only processes that can be seen from here have a number."""
    found = folder.stat()
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    with suppress(OSError):
        for line in LOCKS.read_text().splitlines():
            words = line.split()  # 1: FLOCK ADVISORY WRITE pid place 0 EOF
            if len(words) > 5 and words[1] == "FLOCK" and words[5] == place and int(words[4]) > 0:
                return f"process {words[4]}"
    return "another process (lslocks may name it)"


def _me() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "started": started(os.getpid())}


def _owner(lock: Path) -> dict[str, Any]:
    """What a lock names; {} if it names nothing."""
    try:
        owner = json.loads(read_file(lock, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_cut(lock: Path) -> bool:
    """Whether a lock was never written to its end."""
    try:
        json.loads(read_file(lock, MAX_JSON_BYTES))
    except InputError:  # a ValueError
        raise
    except (ValueError, RecursionError):
        return True
    return False


def _is_copy(lock: Path, owner: dict[str, Any]) -> bool:
    """Whether a lock was copied together with a directory that is in use and still lies where its owner has it."""
    path = owner.get("path")
    if owner.get("host") != socket.gethostname() or not isinstance(path, str):
        return False
    try:
        return not os.path.samefile(path, lock.parent) and _owner(Path(path) / NAME) == owner
    except (OSError, ValueError):
        return False


def _is_gone(owner: dict[str, Any]) -> bool:
    """Whether the owner is a process of this machine that has ended. Ids are used again, in containers soon."""
    pid, then = owner.get("pid"), owner.get("started")
    if owner.get("host") != socket.gethostname() or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        return False
    return then is not None and then != started(pid)


def started(pid: int) -> str | None:
    """Start of a process, as the kernel counts: boot and tick. None if it has ended, and where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # The name in parentheses may hold anything; the state follows it, the start is the 20th field.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else f"{boot}-{fields[19]}"
    except (OSError, IndexError):
        return None
