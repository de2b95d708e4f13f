"""ClusterRun: ranks and samplers of a run as actors of a Ray cluster. What is lost is started again.

Ray places and watches. A rank is the program that torchrun would start, as a child process of its actor, with the same
variables; it does not depend on Ray. The driver is the process of the command: it shows what the first rank prints,
hands signals on, and starts all ranks again from the newest checkpoint when one of them, or a node, is lost.
"""

import ctypes
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

# An extra; this module is imported with --ray alone.
import ray  # pyright: ignore[reportMissingImports]
from ray.exceptions import (  # pyright: ignore[reportMissingImports]
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.placement_group import placement_group  # pyright: ignore[reportMissingImports]
from ray.util.scheduling_strategies import (  # pyright: ignore[reportMissingImports]
    PlacementGroupSchedulingStrategy,
)

from gruppo.errors import InputError, RankError
from gruppo.output import shell_word
from gruppo.run.reader import numbered
from gruppo.run.signals import STOPPED, StopFlag

if TYPE_CHECKING:
    from gruppo.cli.ray import RayOptions

LOOK_S = 0.5
"""Longest time between two answers of an actor."""
NODE_S = 3.0
"""How long a node has to take a connection."""
PLACE_S = 300.0
"""How long the cluster may be too small for the run."""
KILL_S = 10.0
"""How long an actor has to kill its rank."""
TOLD_S = 5.0
"""How long a placement may take before a line says what it waits for."""
END_S = 60.0
"""How long the other ranks have once one has ended."""
STORE_BYTES = 200 * 2**20
"""Memory of a cluster that is started here for messages: completions of a few prompts each."""


# --- actors -------------------------------------------------------------------------------------------------------


class RankProcess:
    """Actor of one rank: its program as a child process, which ends when the actor does."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.pipes = selectors.DefaultSelector()

    def place(self) -> tuple[str, str, int]:
        """Id and address of the node, and a free port of it."""
        with socket.socket() as found:
            found.bind(("", 0))
            port = found.getsockname()[1]
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), port

    def start(self, words: list[str], variables: dict[str, str], folder: str) -> tuple[int, str]:
        """Start `gruppo` with these words; its process id and host."""
        # The program connects to Ray as itself, with the settings of this cluster and not as this worker.
        own = {name: value for name, value in os.environ.items() if name not in ("RAY_JOB_ID", "RAY_RAYLET_PID")}
        command = [sys.executable, "-m", "gruppo", *words]
        end_with_parent = ctypes.CDLL(None).prctl if sys.platform == "linux" else None

        def prepare() -> None:
            if end_with_parent is not None:
                end_with_parent(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # Ray's workers block it

        process = subprocess.Popen(
            command,
            cwd=folder,
            env=own | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=prepare,
        )
        for number, pipe in enumerate((process.stdout, process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self.pipes.register(pipe.fileno(), selectors.EVENT_READ, number)
        self.process = process
        return process.pid, socket.gethostname()

    def look(self) -> tuple[int | None, bytes, bytes]:
        """Exit code, None while it runs, and what it has written. Returns on news, or after a while."""
        assert self.process is not None
        if self.pipes.get_map():
            self.pipes.select(LOOK_S)
        else:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(LOOK_S)
        code, written = self.process.poll(), [b"", b""]
        for key in list(self.pipes.get_map().values()):
            with suppress(BlockingIOError):
                while chunk := os.read(key.fd, 65536):
                    written[key.data] += chunk
                self.pipes.unregister(key.fd)
        return code, *written  # type: ignore[return-value]

    def signal(self, number: int) -> None:
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Kill the program with all its processes."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@dataclass(slots=True, eq=False)
class Member:
    """A rank or a sampler, as the driver sees it."""

    name: str
    bundle: int
    actor: Any
    node: str = ""
    address: str = ""
    seen: float = field(default_factory=time.monotonic)
    """When it answered last."""
    pending: Any = None
    """Its next answer."""
    code: int | None = None
    """Exit code of a rank that has ended."""
    rest: bytes = b""
    """Begin of a line that it has not written to its end."""
    decoders: list[Any] = field(
        default_factory=lambda: [getincrementaldecoder("utf-8")("replace").decode for _ in range(2)]
    )
    """Of its output and its errors."""


class Lost(Exception):
    """A rank or a node is lost: all ranks start again."""

    def __init__(self, text: str, *, takes_node: bool = False) -> None:
        super().__init__(text)
        self.takes_node = takes_node
        """Whether the node is lost, and with it the placement group."""


# --- the driver ---------------------------------------------------------------------------------------------------


class ClusterRun:
    """Ranks and samplers of one run, started, watched and started again.

    Args:
        words: the command of a rank, without `gruppo`.
        folder: the run directory.
    """

    def __init__(self, options: "RayOptions", words: Sequence[str], folder: Path, stop: StopFlag, gcs: str) -> None:
        self.options, self.words, self.folder, self.stop, self.gcs = options, list(words), folder, stop, gcs
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0
        self.needs = {"CPU": 1.0} | ({"GPU": 1.0} if has_gpus else {})
        """What a rank or a sampler needs of its node."""
        self.namespace = f"gruppo-{os.getpid()}-{time.time_ns()}"
        self.group: Any = None
        self.ranks: list[Member] = []
        self.samplers: list[Member] = []
        self.losses = 0
        self.lives = 0
        """Samplers that were started so far."""
        self._has_stopped = False

    def run(self) -> int:
        """The exit code of the first rank."""
        while True:
            try:
                if self.group is None:
                    self._place()
                self._start_ranks()
                return self._watch()
            except Lost as lost:
                nodes = {member.node for member in self.ranks + self.samplers if member.node}
                self._end_ranks()
                if lost.takes_node or nodes - answering_nodes().keys():
                    self._remove_group()
                step = self.newest_step()
                begins = "from the beginning" if step is None else f"after step {step}"
                self._count(str(lost), f"all ranks start again {begins}")

    def newest_step(self) -> int | None:
        """Step of the newest checkpoint; None if there is none."""
        return max(numbered(self.folder / "checkpoints"), default=None)

    def close(self) -> None:
        self._end_ranks()
        self._remove_group()

    def _place(self) -> None:
        self.group = place(self.options, self.needs, self.stop)
        for i in range(self.options.samplers):
            self.samplers.append(Member(f"sampler {i}", self.options.ranks + i, None))
            self._start_sampler(self.samplers[-1])

    def _actor(self, kind: type, bundle: int, **options: Any) -> Any:
        where = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        needs = {"num_cpus": self.needs["CPU"], "num_gpus": self.needs.get("GPU", 0)}
        return ray.remote(kind).options(**needs, scheduling_strategy=where, max_restarts=0, **options).remote()

    def _start_ranks(self) -> None:
        ranks = self.options.ranks
        self.ranks = [Member(f"rank {i}", i, self._actor(RankProcess, i)) for i in range(ranks)]
        places = self._answers("place")
        for member, (node, address, _) in zip(self.ranks, places, strict=True):
            member.node, member.address = node, address
        rendezvous = {"MASTER_ADDR": places[0][1], "MASTER_PORT": str(places[0][2])}
        shared = {"WORLD_SIZE": str(ranks), "LOCAL_RANK": "0", "RAY_USAGE_STATS_ENABLED": "0"} | rendezvous
        shared |= {"TORCHELASTIC_RESTART_COUNT": str(self.losses), "GRUPPO_LAUNCH": self.namespace}
        shared |= {name: os.environ[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS") if name in os.environ}
        if self.samplers:
            facts = {"address": self.gcs, "namespace": self.namespace, "names": [m.name for m in self.samplers]}
            shared["GRUPPO_REPLICAS"] = json.dumps(facts)
        own = [(self.words, shared | {"RANK": str(i)}, os.getcwd()) for i in range(ranks)]
        self._answers("start", own)
        for member in self.ranks:
            member.pending = member.actor.look.remote()

    def _start_sampler(self, member: Member) -> None:
        from gruppo.sampler.replica import Replica

        self.lives += 1  # Ray keeps the name of an actor that has ended as long as a process has a handle of it
        named = {"name": f"{member.name}, {self.lives}", "namespace": self.namespace, "max_concurrency": 3}
        member.actor = self._actor(Replica, member.bundle, **named)
        member.pending, member.seen = member.actor.look.remote(), time.monotonic()

    def _answers(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None) -> list[Any]:
        """What all ranks answer; signals are seen meanwhile."""
        arguments = arguments or [()] * len(self.ranks)
        calls = [getattr(m.actor, method).remote(*own) for m, own in zip(self.ranks, arguments, strict=True)]
        while len(ray.wait(calls, num_returns=len(calls), timeout=LOOK_S)[0]) < len(calls):
            self.stop.poll()
        answers = []
        for member, call in zip(self.ranks, calls, strict=True):
            try:
                answers.append(ray.get(call))
                member.seen = time.monotonic()
            except RayActorError as error:
                raise self._lost(member, error) from error
            except RayTaskError as error:
                raise InputError(f"{member.name} cannot be started on {member.address}: {error.cause}") from error
        return answers

    def _watch(self) -> int:
        """Look at all actors until the ranks have ended; the exit code of the first."""
        ended = None
        while any(member.code is None for member in self.ranks):
            if self.stop.signal is not None and not self._has_stopped:
                self._has_stopped = True
                for member in self.ranks:
                    member.actor.signal.remote(signal.SIGTERM)
            waiting = {member.pending: member for member in self.ranks + self.samplers if member.pending is not None}
            ray.wait(list(waiting), timeout=LOOK_S)
            for ready in ray.wait(list(waiting), num_returns=len(waiting), timeout=0)[0]:
                self._hear(waiting[ready])
            if any(member.code is not None for member in self.ranks):
                ended = ended or time.monotonic()
                if time.monotonic() - ended > END_S:
                    break
        codes = [member.code for member in self.ranks if member.code is not None]
        failed = [code for code in codes if code not in (0, STOPPED, RankError.exit_code)]
        code = self.ranks[0].code if self.ranks[0].code is not None else (failed or codes)[0]
        return code if code >= 0 else 128 - code

    def _hear(self, member: Member) -> None:
        """Take an answer, and ask for the next one."""
        pending, member.pending = member.pending, None
        try:
            answer = ray.get(pending)
        except RayActorError as error:
            lost = self._lost(member, error)
            if member in self.ranks or lost.takes_node:
                raise lost from error
            others = "the others take over its work" if len(self.samplers) > 1 else "the run waits for it"
            self._count(str(lost), f"{others} until it is started again")
            self._start_sampler(member)
            return
        now, before = time.monotonic(), member.seen
        member.seen = now
        if member in self.samplers:
            member.node, member.address = answer
            member.pending = member.actor.look.remote()
            return
        code, *written = answer
        self._show(member, *written, is_last=code is not None)
        if code is None:
            member.pending = member.actor.look.remote()
            return
        member.code = code
        is_lost = code < 0 or code == RankError.exit_code
        if is_lost and not self._has_stopped and not self._has_failed():
            how = f"killed by signal {-code}" if code < 0 else "it lost the others"
            raise Lost(f"{member.name} is lost ({how}; noticed within {now - before:.1f} s)")

    def _has_failed(self) -> bool:
        """Whether a rank has ended with an error of its own, which would come again."""
        return any((m.code or 0) > 0 and m.code not in (STOPPED, RankError.exit_code) for m in self.ranks)

    def _lost(self, member: Member, error: Exception) -> Lost:
        """What is lost with an actor: its process, or its node."""
        silent = time.monotonic() - member.seen
        if not member.node:
            reason = str(error).strip().splitlines()[-1][:300]
            return Lost(f"{member.name} is lost before it has begun ({reason})", takes_node=True)
        if member.node not in answering_nodes():
            there = ", ".join(m.name for m in self.ranks + self.samplers if m.node == member.node)
            text = f"the node {member.address} with {there} is lost (noticed after {silent:.1f} s)"
            return Lost(text, takes_node=True)
        return Lost(f"{member.name} is lost (its actor ended; noticed after {silent:.1f} s)")

    def _count(self, what: str, then: str) -> None:
        self.losses += 1
        most = self.options.max_restarts
        if self.losses > most:
            raise RankError(
                f"{what}, and --max-restarts {most} are used up; look for the cause, then go on with: gruppo resume "
                f"{shell_word(self.folder)} --ray {self.options.ray} --ranks {self.options.ranks} "
                f"--samplers {self.options.samplers}"
            )
        print(f"ray: {what}; {then} (restart {self.losses} of {most})", file=sys.stderr, flush=True)

    def _show(self, member: Member, output: bytes, errors: bytes, *, is_last: bool) -> None:
        """Write what the first rank has written; lines of the others with their names, to stderr."""
        if member is self.ranks[0]:
            for stream, decode, text in zip((sys.stdout, sys.stderr), member.decoders, (output, errors), strict=True):
                if text:
                    stream.write(decode(text))
                    stream.flush()
            return
        *lines, member.rest = (member.rest + output + errors).split(b"\n")
        for line in [*lines, *([member.rest] if is_last and member.rest else [])]:
            print(f"{member.name}: {line.decode(errors='replace')}", file=sys.stderr, flush=True)

    def _end_ranks(self) -> None:
        ends = [member.actor.end.remote() for member in self.ranks]
        for member, end in zip(self.ranks, ends, strict=True):
            with suppress(RayError):  # it is the one that is lost
                ray.get(end, timeout=KILL_S)
            ray.kill(member.actor)
        self.ranks = []

    def _remove_group(self) -> None:
        for member in self.samplers:
            ray.kill(member.actor)
        self.samplers = []
        if self.group is not None:
            ray.util.remove_placement_group(self.group)
            self.group = None


def answering_nodes() -> dict[str, dict[str, float]]:
    """What each node that answers has to give, by its id. Ray itself counts a lost one for up to half a minute."""
    found = {}
    for node in ray.nodes():
        with suppress(OSError):
            if node["Alive"]:
                address = node["NodeManagerAddress"], node["NodeManagerPort"]
                socket.create_connection(address, timeout=NODE_S).close()
                found[node["NodeID"]] = node["Resources"]
    return found


def place(options: "RayOptions", needs: Mapping[str, float], stop: StopFlag, patience_s: float = PLACE_S) -> Any:
    """A placement group on the nodes that there are, a bundle for each rank and sampler.

    Raises InputError if the nodes stay too few.
    """
    num = options.ranks + options.samplers
    group = placement_group([dict(needs)] * num, strategy="PACK")
    ready, started, is_told = group.ready(), time.monotonic(), False
    while not ray.wait([ready], timeout=LOOK_S)[0]:
        stop.poll()
        waited = time.monotonic() - started
        if waited < min(TOLD_S, patience_s) or (is_told and waited < patience_s):
            continue
        nodes = answering_nodes()
        found = [
            f"{sum(node.get(name, 0) for node in nodes.values()):g} of {number * num:g} {name}s"
            for name, number in needs.items()
        ]
        text = f"{options.ranks} ranks and {options.samplers} samplers need a place each; the cluster of {len(nodes)} "
        text += f"nodes has {' and '.join(found)}, if they are free"
        if waited > patience_s:
            ray.util.remove_placement_group(group)
            raise InputError(f"{text}, after {waited:.0f} s; add nodes (`ray start`), or lower --ranks or --samplers")
        is_told = True
        print(f"ray: {text}; waiting for more, at most {patience_s:.0f} s", file=sys.stderr, flush=True)
    return group


def _check_address(address: str) -> None:
    """Refuse `host:port` where nothing listens: Ray would try it for many minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address != "auto":
        socket.create_connection((host, int(port)), timeout=NODE_S).close()


@contextmanager
def connected(options: "RayOptions") -> Iterator[str]:
    """A connection to the cluster, and its address; a cluster that is started here ends with it."""
    usual: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    assert options.ray is not None
    try:
        _check_address(options.ray)
        ray.init(address=options.ray, **usual)
    except (OSError, ValueError) as error:
        if options.ray == "auto" and not isinstance(error, ConnectionError):
            raise
        if options.ray != "auto":
            raise InputError(
                f"--ray {options.ray}: no cluster answers there ({str(error)[:200]}); give the address that `ray "
                "start` prints, or auto"
            ) from error
        # CPUs here are places for actors; a machine with few cores may run more ranks than it has of them.
        places = max(os.cpu_count() or 1, options.ranks + options.samplers)
        ray.init(num_cpus=places, object_store_memory=STORE_BYTES, **usual)
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
