"""StopFlag: on Ctrl-C, SIGTERM, SIGHUP (closed terminal) or SIGUSR1 (Slurm's warning), the run finishes its critical
section, saves and exits. Ctrl-C after another signal, and a second SIGTERM, exit at once."""

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType

from gruppo.process.streams import printable

STOPPED = 75
"""Exit code of a run that a signal stopped and that was saved: queue it again and resume."""


def stop_signals() -> list[signal.Signals]:
    """Signals that stop a run, besides Ctrl-C. Not SIGHUP where it is ignored (nohup): a run outlives its terminal."""
    outlives = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGUSR1] if outlives else [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP]


class Interrupted(Exception):
    """Raised at a safe point after a signal: the weights are those of the last finished step."""


class StopFlag:
    """Set by a signal, polled wherever the run waits or loops."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.parting: Callable[[], str] = lambda: "left at once"
        """Text printed when a signal ends the process at once."""
        self._is_told = False
        """True if a signal asked the run to stop, rather than warned it."""

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
            # A terminal that closes sends several, and a queue SIGTERM after its warning: the save must come to its
            # end. A save that hangs is left by Ctrl-C or a second SIGTERM.
            if number == signal.SIGINT or (number == signal.SIGTERM and self._is_told):
                self._leave(128 + number)
        else:
            self.signal = number
        self._is_told |= number in (signal.SIGINT, signal.SIGTERM)

    def _leave(self, code: int) -> None:
        """Exit at once, with a message if standard error accepts one without blocking."""
        with suppress(Exception):
            if select.select([], [2], [], 0)[1]:
                os.write(2, f"\n{printable(self.parting())}\n".encode())
        os._exit(code)

    def listening(self) -> AbstractContextManager[None]:
        """Handle the signals while inside."""
        return handling(self._handle, signal.SIGINT, *stop_signals())


@contextmanager
def handling(handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals) -> Iterator[None]:
    """Handle these signals while inside; only the main thread can, elsewhere they keep their meaning."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)
