"""Output: a stream for a terminal, a pipe or a log file that neither ends nor delays the run that writes to it;
and text that is safe to write there."""

import io
import os
import shlex
import sys
import threading
import unicodedata
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

HELD = 2**20
"""Most bytes that wait for a reader; text beyond them is dropped."""
PROMPT_S = 0.05
"""Seconds in which a reader takes a text. After a slower one, `write` does not wait until it has caught up."""
LAST_WORDS_S = 2.0
"""Seconds that the end of a command waits for a reader."""


class Output(io.TextIOBase):
    """Writes to the file descriptor of another stream in a thread.

    A reader that has left, a full disk or a pipe that nobody reads cost text and nothing else.
    """

    def __init__(self, stream: TextIO) -> None:
        with suppress(OSError, ValueError):
            stream.flush()
        self._stream = stream
        self._descriptor = stream.fileno()
        self._waiting: deque[bytes] = deque()
        self._size = 0
        self._is_slow = False
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="gruppo-output", daemon=True).start()

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]  # a plain attribute there
        return self._stream.encoding

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return self._stream.isatty()

    def write(self, text: str, /) -> int:
        data = text.encode(self.encoding or "utf-8", "backslashreplace")
        with self._changed:
            if self._size + len(data) <= HELD:
                self._waiting.append(data)
                self._size += len(data)
                self._changed.notify_all()
                # Written before what another writer, or a crash, brings next.
                if not self._is_slow:
                    self._is_slow = not self._changed.wait_for(lambda: not self._size, PROMPT_S)
        return len(text)

    def flush(self) -> None:
        """Nothing: the thread writes as fast as the reader reads."""

    def drain(self, seconds: float) -> None:
        """Wait until all is written, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._size, seconds)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            left = memoryview(data)
            with suppress(OSError):  # the reader has left, or the disk is full: what follows may fare better
                while left:
                    left = left[os.write(self._descriptor, left) :]
            with self._changed:
                self._size -= len(data)
                self._is_slow = self._is_slow and bool(self._size)
                self._changed.notify_all()


def printable(text: str, keep: str = "\n\t") -> str:
    r"""Text that is safe on a terminal: control, format and unassigned characters as escapes, but for those in `keep`.

    >>> print(printable("\x1b[2J Caf\u00e9\u202e"))
    \x1b[2J Café\u202e
    """
    return "".join(
        # A space of another width is not printable to Python, and harmless.
        c if c.isprintable() or c in keep or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def shell_word(path: object) -> str:
    """A path or a name as one word of a command that is printed, so that a shell and gruppo read it as it is.

    >>> print(shell_word("runs/first"), shell_word("my run"), shell_word("-dash"))
    runs/first 'my run' ./-dash
    """
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


@contextmanager
def unhindered() -> Iterator[None]:
    """Standard output and error as `Output`s. Streams that are no files, as in a notebook, stay."""
    names = [name for name in ("stdout", "stderr") if _is_file(getattr(sys, name))]
    before = {name: getattr(sys, name) for name in names}
    made = {name: Output(stream) for name, stream in before.items()}
    for name, output in made.items():
        setattr(sys, name, output)
    try:
        yield
    finally:
        for name, output in made.items():
            output.drain(LAST_WORDS_S)
            if getattr(sys, name) is output:
                setattr(sys, name, before[name])


def _is_file(stream: object) -> bool:
    return isinstance(stream, io.TextIOWrapper) and not stream.closed and _has_descriptor(stream)


def _has_descriptor(stream: TextIO) -> bool:
    try:
        stream.fileno()
    except (OSError, ValueError):
        return False
    return True
