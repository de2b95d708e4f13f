"""Guard of a vLLM server: runs it in its own process group, and kills the group when the trainer's pipe closes.

It runs as a file and imports only the standard library, so it starts at once and uses little memory.
"""

import os
import signal
import subprocess
import sys
import threading
import time

PATIENCE_S = 3.0
"""Time for the server to end in order and free its shared memory; a busy one does not."""


def main(arguments: list[str]) -> None:
    # The module and not the `vllm` script: the script needs a distribution named vllm, which CPU builds are not.
    server = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments], stdin=subprocess.DEVNULL
    )
    threading.Thread(target=_end_with_the_pipe, args=(server,), daemon=True).start()
    server.wait()
    time.sleep(0.5)  # for the process that clears up after the server
    os.killpg(0, signal.SIGKILL)  # processes that the server left behind, and this one


def _end_with_the_pipe(server: "subprocess.Popen[bytes]") -> None:
    sys.stdin.buffer.read()
    server.terminate()
    time.sleep(PATIENCE_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
