"""Child processes of a run: signals to the job do not reach them, and they end with their parent."""

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import sys

from gruppo.output import Output, printable

STACK_SIGNAL = signal.SIGUSR2
"""Makes a child write its Python stack to stderr, even in the middle of a C call."""

_PR_SET_PDEATHSIG = 1


class _Prints(Output):
    """What a child prints, which may quote a model: without control characters."""

    def write(self, text: str, /) -> int:
        super().write(printable(text))
        return len(text)


def isolate() -> None:
    """Own session, no terminal, stdout to stderr: prints and signals of a child stay away from the trainer."""
    if os.getsid(0) != os.getpid():
        os.setsid()
    try:
        os.fstat(2)
    except OSError:  # a daemon without stderr
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    if sys.stderr is not None:
        sys.stderr = _Prints(sys.stderr)  # a print that nobody reads must not cost a reward its deadline
    sys.stdout = sys.stderr
    # The trainer decides what a signal to the whole job means. A handler rather than SIG_IGN, because an ignored
    # signal stays ignored in programs that a reward function starts.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    faulthandler.register(STACK_SIGNAL, file=2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a crash is expected here and needs no core file


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process with its parent, in the middle of whatever call. Linux alone can.

    The parent is the thread that started it: the kernel does the same when that thread ends.
    """
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def ending(code: int) -> str:
    """How a child ended, by its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {next((known.name for known in signal.Signals if known == -code), f'signal {-code}')}"
