"""Child processes: signals to the job do not reach them, and they end with their parent, as ranks do.

Import nothing heavy here: it delays the start of every child.
"""

import contextlib
import ctypes
import faulthandler
import os
import resource
import signal
import socket
import struct
import sys
import threading
import time

from gruppo.process.streams import Output, printable

STACK_SIGNAL = signal.SIGUSR2
"""Makes a child write its Python stack to stderr, even in the middle of a C call."""

_PR_SET_PDEATHSIG = 1
_PARENT_CHECK_S = 2.0


class _Prints(Output):
    """What a child prints, which may quote a model: without control characters."""

    def write(self, text: str, /) -> int:
        super().write(printable(text))
        return len(text)


def limit_waits(end: socket.socket, seconds: int) -> None:
    """Have a call to a socket raise BlockingIOError after this many seconds; 0 for no limit."""
    limit = struct.pack("ll", seconds, 0)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


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
        sys.stderr = _Prints(sys.stderr)
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


def stop_with_launcher() -> None:
    """Have this process get SIGUSR1, which stops and saves a run, once the process that started it has ended.

    Not SIGTERM: the launcher may have sent that one before it was killed, and a second one cuts the save off.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(_PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=watch, name="gruppo-launcher", daemon=True).start()


def ending(code: int) -> str:
    """How a child ended, by its exit code."""
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was killed by {next((known.name for known in signal.Signals if known == -code), f'signal {-code}')}"
