"""StopFlag: on Ctrl-C or SIGTERM the run finishes the current critical section, saves and exits; a second signal exits
immediately."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(Exception):
    """Raised at a safe point after a signal: the weights are those of the last finished step."""


class StopFlag:
    """Set by a signal, polled wherever the run waits or loops."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def poll(self) -> None:
        if self.signal is not None:
            raise Interrupted(signal.Signals(self.signal).name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while inside; only the main thread can, elsewhere they keep their meaning."""
        try:
            previous = {n: signal.signal(n, self._handle) for n in (signal.SIGINT, signal.SIGTERM)}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
