"""ServerProcess: a `vllm serve` as a child process. `guard.py` runs between and kills it if the trainer dies."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from gruppo.errors import SamplerError, require
from gruppo.output import printable
from gruppo.sampler.vllm.engine import platform_settings
from gruppo.sampler.vllm.guard import PATIENCE_S

SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, by which weights are loaded; the server listens on localhost
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class ServerProcess:
    """A server at a free port of this machine, started when it is made with `engine_arguments`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = {name: value for name, value in arguments.items() if name != "enable_sleep_mode"}
        self.log = Path(tempfile.mkdtemp(prefix="gruppo-vllm-")) / "server.log"
        self.process: subprocess.Popen[bytes] | None = None
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.address = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Start or restart it, at the same address."""
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:  # or a folder of that name; the child's error is less clear
            raise require("vllm", "vllm", "sampler=vllm:start")
        self.close()
        guard = str(Path(__file__).with_name("guard.py"))
        flags = _flags(self.arguments | {"host": "127.0.0.1", "port": self.port})
        command = [sys.executable, "-P", guard, *flags]
        environment = SETTINGS | platform_settings() | dict(os.environ)
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # an engine inside this process may have set it
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def check_alive(self) -> None:
        """Raise with the end of the log if the server has ended."""
        if self.process is None or self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
            telling = [line for line in lines if "Error" in line] or lines
            ending = printable(" | ".join(telling[-3:]))
            raise SamplerError(f"the vLLM server ended: {ending}; all of it is in {self.log}")

    def close(self) -> None:
        if self.process is None:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=PATIENCE_S + 2)
        with suppress(ProcessLookupError):  # normally the guard has done it
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False or value == [] or value == ():
            continue
        values = [] if value is True else value if isinstance(value, list | tuple) else [value]
        flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags
