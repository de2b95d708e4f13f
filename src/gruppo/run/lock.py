"""RunLock: an flock on a file of the run directory. The kernel releases it when the process ends, however it ends."""

import fcntl
import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path

from gruppo.errors import InputError

logger = logging.getLogger(__name__)

NAME = "lock"
WAIT_S = 1.0
"""Seconds to wait for a lock, because `is_owned` in another process, or the exit of a killed one, takes a moment."""


class RunLock:
    """Lock of a run directory, held by this process.

    The file names the process, for error messages alone: only the lock on it counts.

    Raises InputError where another process has it, and OSError where the file cannot be made.
    """

    _file = -1

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        try:
            self._take()
        except BaseException:
            self._close()
            raise

    def _take(self) -> None:
        from gruppo.weights.files import take_flock  # here: who only asks about a run starts without it

        while True:
            self._close()
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            try:
                is_locked = take_flock(self._file, WAIT_S)
            except BlockingIOError as error:
                raise InputError(f"{self._path.parent} is in use by {self._owner()}; stop it first") from error
            if not is_locked:
                logger.warning("%s cannot be locked: a second process on this run would not be refused", self._path)
            if self._is_in_place():
                break  # else its last owner has removed it meanwhile
        with suppress(OSError):  # a full disk
            os.truncate(self._file, 0)
            os.write(self._file, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    def give_back(self) -> None:
        """Remove the file, and with it the lock."""
        with suppress(OSError):
            if self._is_in_place():
                self._path.unlink()
        self._close()

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
        self._file = -1

    __del__ = _close

    def _is_in_place(self) -> bool:
        """True if the open file is the one that others find."""
        return self._path.exists() and os.path.samestat(os.fstat(self._file), self._path.lstat())

    def _owner(self) -> str:
        try:
            owner = json.loads(os.read(self._file, 1000))
            return f"process {owner['pid']:d} on {owner['host']!s:.100}"
        except (ValueError, KeyError, TypeError):
            return "another process"


def is_owned(folder: Path) -> bool:
    """True if a process holds the lock of a run directory, as far as this can be known."""
    try:
        file = os.open(folder / NAME, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError:  # held, or on a file system without locks
        return True
    finally:
        os.close(file)
