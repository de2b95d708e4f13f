"""Stands between us and a `vllm serve` of our own, so that nothing of it can outlive us.

Leads a process group of its own, runs the server in it, and reads from a pipe that we hold open. When the pipe ends,
because we closed it or because we are dead, it kills the group: server, engine and workers alike. It is run as a file
and with the standard library alone: it is there at once, and weighs nothing while the server runs.
"""

import os
import signal
import subprocess
import sys
import threading
import time

PATIENCE_S = 3.0
"""For the server to end in order, so that it gives its shared memory back; one that is at work does not."""


def main(arguments: list[str]) -> None:
    # The module and not the `vllm` script: the script wants a distribution named vllm, which CPU builds are not.
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments], stdin=subprocess.DEVNULL
    )
    threading.Thread(target=_end_with_the_pipe, args=(server,), daemon=True).start()
    server.wait()
    time.sleep(0.5)  # for the process that clears up after the server
    os.killpg(0, signal.SIGKILL)  # what the server left behind, and ourselves


def _end_with_the_pipe(server: "subprocess.Popen[bytes]") -> None:
    sys.stdin.buffer.read()
    server.terminate()
    time.sleep(PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
