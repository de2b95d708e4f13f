"""ReplicaSampler: rollouts from copies of the model in other processes, which are actors of a Ray cluster.

A replica has no state that a new one would lack: a message names the weights, the requests and the numbers that decide
their draws. So a replica that is lost is replaced, what it was working on goes to another, and the completions are the
same, whichever replica drew them.
"""

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

from gruppo.errors import GruppoError, SamplerError
from gruppo.sampler.base import Poll, Sampler, SampleRequest, Samples, SamplingParams
from gruppo.sampler.torch_sampler import TorchSampler
from gruppo.types import Prompt, Trajectory
from gruppo.weights import Published, WeightStore, source
from gruppo.weights.canary import BOUNDS, Canary, CanaryCheck, TrainedModel, canary_rows
from gruppo.weights.store import WrongWeights

if TYPE_CHECKING:
    from gruppo.model import TransformersModel

LOOK_S = 0.5
"""Longest time between two answers of a replica to the driver."""
START_S = 600.0
"""How long a replica has to take the place of one that was lost."""
PART = 8
"""Prompts that a replica decodes together. Fixed: neither the number of replicas nor a loss changes the shapes of the
products, and with them the last bits of a log-prob."""
COLUMNS = ("tokens", "logps", "entropies", "text", "stop_reason", "versions")


def replicas_of_launcher() -> dict[str, Any] | None:
    """The replicas that a launcher has started: address of the cluster, namespace and names; None without any."""
    given = os.environ.get("GRUPPO_REPLICAS")
    return json.loads(given) if given else None


# --- in the replica's process -------------------------------------------------------------------------------------


class Replica:
    """Actor that samples, with the weights that a message names."""

    def __init__(self) -> None:
        import gruppo.model  # noqa: F401  # takes seconds, and the first message is waited for

        self._sampler: TorchSampler | None = None
        self._canary: list[float] = []
        self._lock = threading.Lock()

    def look(self) -> tuple[str, str]:
        """Id and address of the node, after a while: the driver sees that the replica lives."""
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        time.sleep(LOOK_S)
        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def load(self, message: bytes) -> list[float]:
        """Take the weights that a message names; their log-probs of the canary."""
        with self._lock:
            self._load(json.loads(message))
            return self._canary

    def sample(self, message: bytes) -> bytes:
        """The completions of a message's requests, and the log-probs of the canary."""
        given = json.loads(message)
        with self._lock:
            sampler = self._load(given)
            params = SamplingParams(**given["params"] | {"stop": tuple(given["params"]["stop"])})
            futures = sampler.submit([_request(facts) for facts in given["requests"]], params)
            samples = [[{n: getattr(t, n) for n in COLUMNS} for t in future.result()] for future in futures]
            return json.dumps({"canary": self._canary, "samples": samples}).encode()

    def _load(self, given: Mapping[str, Any]) -> TorchSampler:
        import torch

        from gruppo.model import LoraSpec, TransformersModel
        from gruppo.model.checkpoint import read_weights

        if given["threads"]:
            torch.set_num_threads(given["threads"])  # of this thread: Ray calls from several
        if self._sampler is None:
            os.chdir(given["cwd"])  # a model may be named by a path
            lora = None if given["lora"] is None else LoraSpec(**given["lora"])
            model = TransformersModel(given["model"], lora=lora, dtype=given["dtype"], compile=False)
            if model.device.type == "cuda":
                torch.set_float32_matmul_precision("high")  # as the trainer's
            model.version = -1
            self._sampler = TorchSampler(model)
        model: Any = self._sampler.model
        if model.version != given["version"]:
            model.version = -1  # half of it may be there when this fails
            read_weights(model.model, Path(given["folder"]))
            self._canary = list(Canary.score(tuple(map(tuple, given["rows"])), model).logps)
            model.version = given["version"]
        return self._sampler


def _request(facts: dict[str, Any]) -> SampleRequest:
    ids = tuple(facts.pop("ids"))
    return SampleRequest(prompt=Prompt(token_ids=ids), **facts)


# --- in the trainer's process -------------------------------------------------------------------------------------


class ReplicaLost(Exception):
    """A replica has ended, or does not answer."""


@dataclass(slots=True, eq=False)
class Part:
    """Requests that are decoded together, with what becomes of them."""

    requests: Sequence[SampleRequest]
    message: bytes
    canary: Canary
    futures: list[Future[Samples]]
    since: float = field(default_factory=time.monotonic)

    def fail(self, error: BaseException) -> None:
        for future in self.futures:
            with suppress(InvalidStateError):  # it was cancelled
                future.set_exception(error)


class ReplicaSampler(Sampler):
    """Samples from replicas, each of which takes the next part of the requests when it is free.

    Args:
        model_id: what the replicas load before the first weights are handed over.
        model: the trainer's; its weights are handed over as files, which the replicas must see under the same path.
        replicas: address of the cluster, namespace and names.
        threads: of each replica; 0: as its environment has it.
        deadline_s: for one part. A replica that takes longer is ended, for the driver to start it again.
        poll: cancellation hook, called while waiting, in threads of the sampler; raise to abort.
    """

    is_exact = True

    def __init__(
        self,
        model_id: str,
        model: "TransformersModel",
        replicas: Mapping[str, Any],
        *,
        threads: int = 0,
        deadline_s: float = 600.0,
        poll: Poll = lambda: None,
    ) -> None:
        length = source.context_length(model_id) or 13
        vocabulary = source.load_config(model_id).get_text_config().vocab_size
        super().__init__(model.tokenizer, vocabulary)
        self.canary_rows = canary_rows(vocabulary, length=min(12, length - 1))
        """Tokens for the canary of a WeightStore."""
        dtype = str(model.dtype).removeprefix("torch.")
        lora = None if model.lora is None or source.holds_adapter(model_id) else asdict(model.lora)
        self._model = {"model": model_id, "dtype": dtype, "lora": lora, "threads": threads, "cwd": os.getcwd()}
        self._bound, self._deadline_s, self._poll = BOUNDS[dtype], deadline_s, poll
        self._names: list[str] = replicas["names"]
        self._waiting: Queue[Part] = Queue()
        self._actors: dict[str, Any] = {}
        """The replicas by name, as long as they answer."""
        self._starting: dict[str, tuple[Any, Any]] = {}
        """Replicas that have not answered yet, each with its first answer."""
        self._closed = threading.Event()
        self._answered = 0.0
        """When a replica has answered last."""
        self._store: WeightStore | None = None
        _connect(replicas["address"], replicas["namespace"])
        self._threads = [threading.Thread(target=self._work, args=(name,), daemon=True) for name in self._names]
        for thread in self._threads:
            thread.start()

    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Future[Samples]]:
        """Start the completions; one future per request, in order. The replicas answer in threads."""
        assert self.loaded is not None, "weights are loaded before anything is sampled"
        parts = []
        for start in range(0, len(requests), PART):
            chosen = requests[start : start + PART]
            facts = [
                {n: getattr(r, n) for n in ("num_samples", "seed", "step", "number", "first")}
                | {"ids": r.prompt.token_ids}
                for r in chosen
            ]
            message = self._message(self.loaded, params=asdict(params), requests=facts)
            parts.append(Part(chosen, message, self.loaded.canary, [Future() for _ in chosen]))
        for part in parts:
            self._waiting.put(part)
        return [future for part in parts for future in part.futures]

    def load(self, published: Published) -> dict[str, float]:
        """Load published weights into the replicas that are there, and compare the canary.

        One that comes later loads them with the first part that it is given.
        """
        message, gaps = self._message(published), []
        with ThreadPoolExecutor(len(self._names)) as pool:
            asked = {name: pool.submit(self._ask, name, "load", message) for name in list(self._actors)}
        for name, answer in asked.items():
            with suppress(ReplicaLost):
                gaps.append(self._gap(name, published.canary, answer.result()))
        self.loaded = published
        sizes = {"sync/tensors": float(len(published.contents)), "sync/bytes": float(published.bytes)}
        return sizes | ({"sync/canary_gap": max(gaps)} if gaps else {})

    def sync(self, model: TrainedModel) -> dict[str, float]:
        """Publish a model's weights and load them, in one call."""
        if self._store is None:
            self._store = WeightStore(None, self.canary_rows)
        return self._store.hand_over(model, self)

    def close(self) -> None:
        """End the connection; the replicas are the driver's."""
        import ray  # pyright: ignore[reportMissingImports]  # an extra

        self._closed.set()
        for thread in self._threads:
            thread.join()
        if self._store is not None:
            self._store.close()
        ray.shutdown()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _message(self, published: Published, **more: Any) -> bytes:
        weights = {"version": published.version, "folder": str(published.folder), "rows": published.canary.rows}
        return json.dumps(self._model | weights | more).encode()

    def _work(self, name: str) -> None:
        """Hand one part after the other to a replica, once it is there."""
        while not self._closed.is_set():
            is_there = name in self._actors or self._find(name)
            try:
                part = self._waiting.get(timeout=0.2)
            except Empty:
                continue
            try:
                if not is_there:
                    self._poll()
                    raise ReplicaLost(f"{name} is not there")
                answer = json.loads(self._ask(name, "sample", part.message))
                self._gap(name, part.canary, answer["canary"])
            except ReplicaLost as lost:
                silent = time.monotonic() - max(part.since, self._answered)
                if silent > self._deadline_s + START_S:
                    part.fail(SamplerError(f"no sampler has answered for {silent:.0f} s (sampler_deadline); {lost}"))
                    continue
                self._waiting.put(part)  # for another, or for the one that takes its place
                self._closed.wait(0.1)
            except BaseException as error:
                part.fail(error)
            else:
                for request, future, drawn in zip(part.requests, part.futures, answer["samples"], strict=True):
                    if future.set_running_or_notify_cancel():
                        future.set_result(tuple(_trajectory(request.prompt, facts) for facts in drawn))

    def _ask(self, name: str, method: str, message: bytes) -> Any:
        """The answer of a replica. Raises ReplicaLost if there is none, and what the replica raised."""
        import ray  # pyright: ignore[reportMissingImports]  # an extra
        from ray.exceptions import RayError, RayTaskError  # pyright: ignore[reportMissingImports]

        ends = time.monotonic() + self._deadline_s
        try:
            replica = self._actors.get(name)
            if replica is None:
                raise ReplicaLost(f"{name} has ended")
            call = getattr(replica, method).remote(message)
            while not ray.wait([call], timeout=0.2)[0]:
                self._poll()
                if self._closed.is_set():
                    raise SamplerError(f"{name} was closed")
                if time.monotonic() > ends:
                    ray.kill(replica)
                    self._actors.pop(name, None)
                    raise ReplicaLost(f"{name} had not answered after {self._deadline_s:g} s and was ended")
            answer = ray.get(call)
        except RayTaskError as error:
            if isinstance(error.cause, GruppoError):
                raise error.cause from error
            raise SamplerError(f"{name} failed: {error}") from error
        except RayError as error:
            self._actors.pop(name, None)
            raise ReplicaLost(f"{name}: {str(error).splitlines()[0]}") from error
        self._answered = time.monotonic()
        return answer

    def _find(self, name: str) -> bool:
        """Look for the actor that has this name now: one that was lost has a successor, of a higher number.

        It is there when it has answered: while it starts, the others have the work.
        """
        import ray  # pyright: ignore[reportMissingImports]  # an extra
        from ray.exceptions import RayError  # pyright: ignore[reportMissingImports]

        try:
            if name not in self._starting:
                own = [each for each in ray.util.list_named_actors() if each.startswith(f"{name}, ")]
                newest = max(own, key=lambda each: int(each.rpartition(" ")[2]))
                actor = ray.get_actor(newest)
                self._starting[name] = actor, actor.look.remote()
            actor, call = self._starting[name]
            if not ray.wait([call], timeout=0.2)[0]:
                return False
            del self._starting[name]
            ray.get(call)
        except (RayError, ValueError):  # there is none, or it has ended
            self._starting.pop(name, None)
            return False
        self._actors[name] = actor
        return True

    def _gap(self, name: str, canary: Canary, answered: list[float]) -> float:
        """How far a replica's log-probs of the canary are from the trainer's."""
        verdict = CanaryCheck(self._bound).judge(canary.logps, [answered])
        if verdict.fault is not None:
            raise WrongWeights(f"{name}: {verdict.fault}")
        return verdict.gap


def _trajectory(prompt: Prompt, facts: dict[str, Any]) -> Trajectory:
    made: dict[str, Any] = {n: tuple(value) if isinstance(value, list) else value for n, value in facts.items()}
    return Trajectory(prompt=prompt, **made)


def _connect(address: str, namespace: str) -> None:
    """Join the cluster. Ray puts a handler of its own for SIGTERM, which a run needs for itself."""
    import ray  # pyright: ignore[reportMissingImports]  # an extra

    before = signal.getsignal(signal.SIGTERM)
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    ray.init(address=address, namespace=namespace, **quiet)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)
