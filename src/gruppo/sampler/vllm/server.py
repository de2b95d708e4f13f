"""ServerProcess: a `vllm serve` as a child process. `guard.py` runs between and kills it if the trainer dies."""

import importlib.util
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from gruppo.errors import SamplerError, require
from gruppo.process.streams import printable
from gruppo.sampler.vllm.engine import platform_settings
from gruppo.sampler.vllm.guard import PATIENCE_S

SOCKET = "server.sock"
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, by which weights are loaded and which no key protects
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


class ServerProcess:
    """A server on a socket in a folder that only this user can open; created with `engine_arguments`, it starts at
    once.

    Whoever reaches it can load other weights: a port is open to every user of the machine and every web page.

    Args:
        host: listen on a free port of this address instead, for a trainer on another machine.
    """

    def __init__(self, arguments: dict[str, Any], *, host: str | None = None) -> None:
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:  # or a folder of that name; the child's error is less clear
            raise require("vllm", "vllm", "sampler=vllm:start")
        self.arguments = {name: value for name, value in arguments.items() if name != "enable_sleep_mode"}
        self.folder = _private_folder()
        self.log = self.folder / "server.log"
        port = 0 if host is None else _free_port(host)
        self.address = f"http://{host}:{port}" if port else f"unix://{self.folder / SOCKET}"
        self.key = secrets.token_hex(16)
        """Key sent with every request; vLLM requires it below /v1."""
        self.listens: dict[str, Any] = {"host": host, "port": port} if port else {"uds": self.folder / SOCKET}
        self.process: subprocess.Popen[bytes] | None = None
        self._has_failed = False
        self.start()

    def start(self) -> None:
        """Start or restart it, at the same address."""
        self._end()
        guard = str(Path(__file__).with_name("guard.py"))
        (self.folder / SOCKET).unlink(missing_ok=True)
        command = [sys.executable, "-P", guard, *_flags(self.arguments | self.listens)]
        environment = SETTINGS | platform_settings() | dict(os.environ)
        environment |= {"VLLM_API_KEY": self.key} if self.key else {}
        for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_ALLOW_INSECURE_SERIALIZATION"):
            environment.pop(name, None)  # of an engine inside this process; pickles in requests
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def check_alive(self) -> None:
        """Raise with the end of the log if the server has ended."""
        if not self.is_running:
            self._has_failed = True  # the log stays to be read
            lines = self.log.read_text(errors="replace").splitlines() if self.log.is_file() else []
            telling = [line for line in lines if "Error" in line] or lines
            ending = printable(" | ".join(telling[-3:]))
            raise SamplerError(f"the vLLM server ended: {ending}; all of it is in {self.log}")

    def close(self) -> None:
        """End it and remove its folder, unless the server failed: then its log stays."""
        self._end()
        if not self._has_failed:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _end(self) -> None:
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


def _private_folder() -> Path:
    """A temporary folder for this user only. A socket's path has at most 107 bytes."""
    folder = tempfile.mkdtemp(prefix="gruppo-vllm-")
    if len(os.fsencode(folder)) + len(SOCKET) > 100:
        os.rmdir(folder)
        folder = tempfile.mkdtemp(prefix="gruppo-vllm-", dir="/tmp")
    return Path(folder)


def _free_port(host: str) -> int:
    with socket.socket() as found:
        found.bind((host, 0))
        return found.getsockname()[1]


def _flags(arguments: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False or value == [] or value == ():
            continue
        values = [] if value is True else value if isinstance(value, list | tuple) else [value]
        flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags
