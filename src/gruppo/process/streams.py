"""Output: stdout and stderr that never end a run, and escaping of untrusted text."""

import io
import os
import shlex
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TextIO


class Output(io.TextIOBase):
    """Stream that writes to the file descriptor of another.

    Where the reader has left or the disk is full, it loses the text, and raises nothing.
    """

    def __init__(self, stream: TextIO) -> None:
        with suppress(OSError, ValueError):
            stream.flush()
        self._stream = stream
        self._descriptor = stream.fileno()

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
        left = memoryview(text.encode(self.encoding or "utf-8", "backslashreplace"))
        with suppress(OSError):
            while left:
                left = left[os.write(self._descriptor, left) :]
        return len(text)


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
def safe_streams() -> Iterator[None]:
    """Standard output and error as `Output`s. Streams that are no files, as in a notebook, stay."""
    with ExitStack() as redirected:
        for redirect, stream in ((redirect_stdout, sys.stdout), (redirect_stderr, sys.stderr)):
            if _is_file(stream):
                redirected.enter_context(redirect(Output(stream)))
        yield


def _is_file(stream: object) -> bool:
    with suppress(OSError, ValueError):  # it is in memory, or closed
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() >= 0
    return False
