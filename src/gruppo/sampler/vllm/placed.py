"""PlacedServer: a vLLM server on a node of a Ray cluster, kept by an actor that has its GPUs."""

import os
import time
from typing import Any

from gruppo.errors import SamplerError
from gruppo.sampler.base import Poll
from gruppo.sampler.vllm.server import ServerProcess

PREFIX = "ray:"
"""Begins the address of a server that an actor keeps; the actor's name follows."""


class ServerKeeper:
    """Actor that runs one server on its node. Ray starts it again, on another node where this one is lost."""

    def __init__(self) -> None:
        self.server: ServerProcess | None = None

    def serve(self, arguments: dict[str, Any], anew: bool) -> tuple[str, str]:
        """Address and key of the server, which is started with these arguments unless it runs and need not be new."""
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        if self.server is None:
            self.server = ServerProcess(arguments, host=ray.util.get_node_ip_address())
        elif anew or not self.server.is_running:
            self.server.start()
        return self.server.address, self.server.key

    def check_alive(self) -> None:
        if self.server is None:
            raise SamplerError("the vLLM server was lost with its node")
        self.server.check_alive()


class PlacedServer:
    """The trainer's side of a ServerKeeper, with the methods of a ServerProcess that HttpEngine calls.

    Args:
        name: of the actor.
        deadline_s: how long the cluster may take to answer, and to find a place for the actor.
    """

    def __init__(self, name: str, arguments: dict[str, Any], *, deadline_s: float, poll: Poll) -> None:
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        self.name, self.arguments, self.deadline_s, self.poll = name, arguments, deadline_s, poll
        self._actor = ray.get_actor(name)
        self.address, self.key = self._ask("serve", arguments, False)

    def start(self) -> None:
        """Restart the server, maybe on another node and so at another address."""
        self.address, self.key = self._ask("serve", self.arguments, True)

    def check_alive(self) -> None:
        self._ask("check_alive")

    def close(self) -> None:
        """Leave the server to the launcher: the ranks may start again and use it."""

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray  # pyright: ignore[reportMissingImports]  # an extra
        from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]

        call, ends = getattr(self._actor, method).remote(*arguments), time.monotonic() + self.deadline_s
        while not ray.wait([call], timeout=0.2)[0]:
            self.poll()
            if time.monotonic() > ends:
                raise SamplerError(
                    f"the cluster has had no place for {self.name} for {self.deadline_s:g} s (sampler_deadline); add "
                    "a node with `ray start`, or lower --samplers"
                )
        try:
            return ray.get(call)
        except RayTaskError as error:
            raise error.cause from error
        except RayError as error:
            raise SamplerError(f"{self.name} cannot be reached: {error}") from error


def servers_of_launcher() -> tuple[str, ...]:
    """Addresses of the servers that a launcher has placed; () without any."""
    names = os.environ.get("GRUPPO_SERVERS", "")
    return tuple(PREFIX + name for name in names.split(",") if name)
