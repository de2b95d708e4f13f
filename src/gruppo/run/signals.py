"""StopFlag: on Ctrl-C or SIGTERM the run finishes the current critical section, saves and exits; a second one exits
immediately. SIGHUP (a terminal that is closed) and SIGUSR1 (a warning of Slurm) save and exit, too."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOPPED = 75
"""Exit code of a run that a signal stopped and that was saved: queue it again and resume."""


class Interrupted(Exception):
    """Raised at a safe point after a signal: the weights are those of the last finished step."""


class StopFlag:
    """Set by a signal, polled wherever the run waits or loops."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def poll(self) -> None:
        if self.signal is not None:
            raise Interrupted(signal.Signals(self.signal).name)

    def share(self, seen: int) -> int:
        """Take a signal that another rank got, unless there is one already; the signal of this rank, 0 for none."""
        if seen and self.signal is None:
            self.signal = seen
        return self.signal or 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if number in (signal.SIGHUP, signal.SIGUSR1):  # a terminal sends more than one when it closes
                return
            os._exit(128 + number)
        self.signal = number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while inside; only the main thread can, elsewhere they keep their meaning."""
        try:
            stops = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1]
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup: the run outlives its terminal
                stops.append(signal.SIGHUP)
            previous = {n: signal.signal(n, self._handle) for n in stops}
        except ValueError:
            yield
            return
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
