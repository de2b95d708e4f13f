"""A `vllm serve` of our own that cannot outlive us.

A small guard process stands between: it starts the server in a process group of its own and reads from a pipe that we
hold open. When the pipe closes, because we closed it or because we are dead, it kills the group, server, engine and
workers alike.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

from gruppo.errors import SamplerError, require
from gruppo.sampler.vllm_inside import next_rank, platform_arguments
from gruppo.sampler.vllm_worker import EXTENSION

SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, by which weights are loaded; the server listens on localhost
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class ServerProcess:
    """Starts a server at a free port of this machine."""

    def __init__(
        self,
        model: str,
        *,
        dtype: str,
        max_model_len: int,
        lora_rank: int | None = None,
        lora_targets: tuple[str, ...] = (),
        options: dict[str, Any] | None = None,
        log: str | Path | None = None,
    ) -> None:
        arguments: dict[str, Any] = {
            "model": model,
            "dtype": dtype,
            "max-model-len": max_model_len,
            "logprobs-mode": "processed_logprobs",
            "generation-config": "vllm",
            "worker-extension-cls": EXTENSION,
            "disable-log-stats": True,
        }
        if lora_rank is not None:
            arguments |= {"enable-lora": True, "max-loras": 1, "max-lora-rank": next_rank(lora_rank)}
            arguments["lora-target-modules"] = list(lora_targets)
        given = platform_arguments() | (options or {})
        given.pop("enable_sleep_mode", None)
        self.arguments = arguments | {name.replace("_", "-"): value for name, value in given.items()}
        self.log = Path(log) if log is not None else Path(tempfile.mkdtemp(prefix="gruppo-vllm-")) / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.port = _free_port()
        self.start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, again if it was started before, at the same address."""
        try:
            import vllm  # noqa: F401  # pyright: ignore[reportMissingImports]  # the child would fail less clearly
        except ImportError:
            raise require("vllm", "vllm", "sampler=vllm:start") from None
        self.close()
        command = [sys.executable, "-m", __name__, *_flags(self.arguments), "--host", "127.0.0.1"]
        command += ["--port", str(self.port)]
        environment = SETTINGS | dict(os.environ)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def check_alive(self) -> None:
        """Raise with the end of the log if the server has ended."""
        if self.process is None or self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
            telling = [line for line in lines if "Error" in line] or lines
            raise SamplerError(f"the vLLM server ended: {' | '.join(telling[-3:])}; all of it is in {self.log}")

    def close(self) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        if value is True:
            flags.append(f"--{name}")
        elif isinstance(value, list | tuple):
            flags += [f"--{name}", *map(str, value)] if value else []
        elif value is not False and value is not None:
            flags += [f"--{name}", str(value)]
    return flags


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def guard(arguments: list[str], pipe: IO[bytes]) -> int:
    """Run the server until it ends or the pipe does; then nothing of the process group is left."""
    # The module and not the `vllm` script: the script wants a distribution named vllm, which CPU builds are not.
    server = subprocess.Popen([sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments])

    def wait_for_the_end_of_the_pipe() -> None:
        pipe.read()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait_for_the_end_of_the_pipe, daemon=True).start()
    server.wait()
    os.killpg(0, signal.SIGKILL)  # what the server left behind, and ourselves
    return 1


if __name__ == "__main__":
    sys.exit(guard(sys.argv[1:], sys.stdin.buffer))
