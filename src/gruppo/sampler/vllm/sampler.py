"""vLLMSampler: rollouts from vLLM, in this process or behind `vllm serve`, with proof of whose weights they are."""

import math
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

import numpy as np

from gruppo.errors import InputError
from gruppo.process.streams import shell_word
from gruppo.random import row_keys
from gruppo.sampler.base import Poll, Sampler, SampleRequest, Samples, SamplingParams
from gruppo.sampler.vllm.engine import Engine, Request, engine_arguments
from gruppo.sampler.vllm.http import HttpEngine
from gruppo.sampler.vllm.inprocess import InProcessEngine
from gruppo.sampler.vllm.placed import PREFIX, PlacedServer
from gruppo.sampler.vllm.server import ServerProcess
from gruppo.sampler.vllm.supervisor import Supervisor
from gruppo.weights import Published, WeightStore, source
from gruppo.weights.canary import BOUNDS, TrainedModel, canary_rows


class vLLMSampler(Sampler):
    """Samples from vLLM.

        sampler = vLLMSampler("org/model")
        responses = sampler.sample(["1+1="], num_samples=4)
        sampler.sync(actor)                       # from now on: the actor's weights, proven

    Engines behind HTTP work at the same time, each on its share of the requests. Requests that were submitted before
    `load` are answered with the weights before it, unless `at_once` is more than 1.

    Args:
        model_id: the weights to start from: a folder, `hf://…`, `ms://…`, a hub id, `builtin` or
            `builtin-chat`.
        servers: addresses of running `vllm serve`s; () for an engine in this process; ("start",) for a server that is
            started here and ends with this process; `ray:NAME` for one that a ServerKeeper of that name runs.
        dtype: of the weights in an engine that is started here.
        max_model_len: longest prompt and completion together; None: the model's own.
        lora: the adapter that will be loaded, with its rank and targets (`gruppo.model.LoraSpec`); None: all weights.
        options: further arguments of `vllm.LLM`, or of the server that is started here.
        sync_folder: where `sync` writes weights; a server must see it under the same path. None: a temporary one.
        canary_bound: largest gap between the two sides' log-probs of fixed tokens; None: by dtype.
        deadline_s: for each call of an engine.
        poll: cancellation hook, called while waiting, in threads of the sampler too; raise to abort.
        at_once: calls of `submit` that a server answers at the same time. With more than 1, `load` does not wait for
            them: what runs goes on with the new weights, and its trajectories have the versions of both.
        tokenizer: reads prompts and writes the texts of completions; None: the model's own.
    """

    reads_files = True

    def __init__(
        self,
        model_id: str,
        *,
        servers: Sequence[str] = (),
        dtype: str = "float32",
        max_model_len: int | None = None,
        lora: Any = None,
        options: dict[str, Any] | None = None,
        sync_folder: str | Path | None = None,
        canary_bound: float | None = None,
        deadline_s: float = 600.0,
        poll: Poll = lambda: None,
        at_once: int = 1,
        tokenizer: Any = None,
    ) -> None:
        folder = source.resolve(model_id)
        if source.holds_adapter(model_id):
            raise InputError(
                f"model {model_id!r} is an adapter, which vLLM cannot start from; fold it into its base first: "
                f"gruppo export {shell_word(model_id)} FOLDER --merge"
            )
        if lora is not None and at_once > 1:
            raise InputError(
                f"at_once={at_once} (streaming) cannot go with an adapter: for requests that still run, vLLM reads the "
                "adapter before again, in the place of the new one. Use at_once=1, or train all weights"
            )
        length = max_model_len or source.context_length(model_id)
        if length is None:
            raise InputError(f"max_model_len is needed: the config of {model_id!r} does not tell the model's own")
        vocabulary = source.load_config(model_id).get_text_config().vocab_size
        super().__init__(tokenizer or source.load_tokenizer(model_id), vocabulary)
        self.length = length
        self.lora = lora
        self.canary_rows = canary_rows(vocabulary, length=min(12, length - 1))
        """Tokens for the canary of a WeightStore: they fit into the engines' context."""
        self.sync_folder = sync_folder
        self.store: WeightStore | None = None
        """Of `sync`; made at its first call."""
        self.supervisors: list[Supervisor] = []
        # A load and the requests after it come one after the other in every engine.
        self._lock = threading.Lock()
        self._overlaps = at_once > 1
        self._turn = 0
        """The engine that gets the first request of a batch."""
        arguments = engine_arguments(model=folder, dtype=dtype, max_model_len=length, lora=lora, options=options)
        stop_ids = sorted(source.end_tokens(model_id, self.tokenizer))
        bound = BOUNDS[dtype] if canary_bound is None else canary_bound
        try:
            for address in servers or (None,):
                engine = _start_engine(address, arguments, options, deadline_s, poll)
                engine.deadline_s, engine.stop_ids = deadline_s, stop_ids
                reading: dict[str, Any] = {"tokenizer": self.tokenizer, "vocabulary": vocabulary}
                self.supervisors.append(Supervisor(engine, bound=bound, poll=poll, at_once=at_once, **reading))
            for supervisor in self.supervisors:
                supervisor.start(self.canary_rows)  # several servers start at the same time
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """Optimizer steps that the engines' weights have seen."""
        return 0 if self.loaded is None else self.loaded.version

    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Future[Samples]]:
        """Start the completions; one future per request, in order.

        An engine in this process has answered when this returns; servers answer in threads.
        """
        if params.filters:
            raise InputError(
                "top_k, top_p and min_p are refused with vLLM: its log-probs are then over the tokens that were kept, "
                "the trainer's over all of them, and their ratio would be wrong. Use top_k=0, top_p=1, min_p=0, or "
                "sampler=torch, which reports log-probs over all tokens"
            )
        batch = [self._request(i, request, params) for i, request in enumerate(requests)]
        with self._lock:
            for i, supervisor in enumerate(self.supervisors):
                share = batch[(i - self._turn) % len(self.supervisors) :: len(self.supervisors)]
                if share:
                    supervisor.run(supervisor.answer, share, params)
            if self._overlaps:  # batches of one request must not all go to one engine
                self._turn += len(batch)
        return [request.future for request in batch]

    def load(self, published: Published) -> dict[str, float]:
        """Load published weights into all engines and prove that they arrived. Raises NotTaken if they did not."""
        if published.is_adapter != (self.lora is not None):
            kinds = ("all weights", "an adapter") if published.is_adapter else ("an adapter", "all weights")
            raise InputError(
                f"the sampler was made to load {kinds[0]}, and version {published.version} is {kinds[1]}; "
                "make it with the model's own lora: vLLMSampler(..., lora=model.lora)"
            )
        with self._lock:
            futures = [s.run(s.load, published) for s in self.supervisors]
            wait(futures)
            verdicts = [future.result() for future in futures]
            for supervisor in self.supervisors:  # only now: until all have them, the weights before are the right ones
                supervisor.loaded = published
            self.loaded = published
        moved = verdicts[-1].moved
        return {
            "sync/tensors": float(len(published.contents)),
            "sync/bytes": float(published.bytes),
            "sync/canary_gap": max(verdict.gap for verdict in verdicts),
        } | ({} if math.isnan(moved) else {"sync/canary_moved": moved})

    def sync(self, model: TrainedModel) -> dict[str, float]:
        """Publish a model's weights and load them, in one call; does nothing when the engines have them."""
        if self.store is None:
            self.store = WeightStore(self.sync_folder, self.canary_rows)
        return self.store.hand_over(model, self)

    def close(self) -> None:
        """End the engines that were started here and delete what `sync` published."""
        for supervisor in self.supervisors:
            supervisor.close()
        if self.store is not None:
            self.store.close()

    def _request(self, position: int, request: SampleRequest, params: SamplingParams) -> Request:
        ids, limit = request.prompt.token_ids, request.limit(params)
        if len(ids) + limit > self.length:
            raise InputError(
                f"prompt {position} has {len(ids)} tokens; with max_new_tokens={limit} that is more than "
                f"max_model_len={self.length}"
            )
        place = np.array([request.position])
        (key,) = row_keys(request.seed, request.step, np.array([request.number]), place).tolist()
        # vLLM refuses several greedy completions of a prompt: they are the same.
        drawn, copies = (1, request.num_samples) if params.temperature == 0 else (request.num_samples, 1)
        return Request(
            prompt=request.prompt,
            num_samples=drawn,
            seed=(key >> 2) + request.first,
            max_new_tokens=limit,
            copies=copies,
        )


def _start_engine(
    address: str | None, arguments: dict[str, Any], options: dict[str, Any] | None, deadline_s: float, poll: Poll
) -> Engine:
    """The engine behind an address, None for one in this process; `arguments` are for those that are started here."""
    if address is None:
        return InProcessEngine(arguments)
    if address == "start":
        process = ServerProcess(arguments)
        return HttpEngine(process.address, process=process)
    if address.startswith(PREFIX):  # on GPUs of its own: all of their memory, but for what vLLM leaves free
        own = {name: value for name, value in arguments.items() if name != "gpu_memory_utilization"} | (options or {})
        placed = PlacedServer(address.removeprefix(PREFIX), own, deadline_s=deadline_s, poll=poll)
        return HttpEngine(placed.address, process=placed)
    if options:
        raise InputError(f"options {sorted(options)} are for an engine started here, not for {address}")
    return HttpEngine(address)
