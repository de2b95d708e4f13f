"""vLLMSampler: rollouts from vLLM, inside this process or behind `vllm serve`, with proof of whose weights they are."""

import logging
import math
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from gruppo.errors import InputError, SamplerError
from gruppo.model.lora import LoraSpec
from gruppo.model.transformers_model import TransformersModel
from gruppo.sampler import handover
from gruppo.sampler.base import Poll, Sampler, SampleRequest
from gruppo.sampler.params import SamplingParams
from gruppo.sampler.proof import BOUNDS, Canary
from gruppo.sampler.randomness import row_keys
from gruppo.sampler.vllm.engine import Completion, Engine, EngineLost, EngineSpec, Request, check_answer, response
from gruppo.types import Prompt, SampleResponse
from gruppo.weights import source

logger = logging.getLogger(__name__)

RESTARTS = 3
"""How often in a row an engine is brought back before the run stops."""


class vLLMSampler(Sampler):
    """Samples from vLLM.

        sampler = vLLMSampler("org/model")
        responses = sampler.sample(["1+1="], num_samples=4)
        sampler.sync(actor)                       # from now on: the actor's weights, proven

    Args:
        model_id: the weights to start from: a folder, `hf://…`, `ms://…`, a hub id, or `builtin`.
        servers: addresses of running `vllm serve`s; () for an engine in this process; ("start",) for a server of our
            own that ends with us.
        dtype: of the weights in an engine that is started here.
        max_model_len: longest prompt and completion together; None: the model's own.
        lora: the adapter that `sync` will bring; None: `sync` brings all weights.
        options: further arguments of `vllm.LLM`, or of the server that is started here.
        sync_folder: where weights are handed over; a server must see it under the same path. None: a temporary one.
        canary_bound: largest gap between the two sides' log-probs of fixed tokens; None: by dtype.
        deadline_s: for each call of an engine.
        poll: called wherever the sampler waits; may raise to leave.
    """

    def __init__(
        self,
        model_id: str,
        *,
        servers: Sequence[str] = (),
        dtype: str = "float32",
        max_model_len: int | None = None,
        lora: LoraSpec | None = None,
        options: dict[str, Any] | None = None,
        sync_folder: str | Path | None = None,
        canary_bound: float | None = None,
        deadline_s: float = 600.0,
        poll: Poll = lambda: None,
    ) -> None:
        folder = source.resolve(model_id)
        if (Path(folder) / "adapter_config.json").is_file():
            raise InputError(
                f"model {model_id!r} is an adapter, which vLLM cannot start from; fold it into its base first: "
                f"gruppo export {model_id} FOLDER --merge"
            )
        length = max_model_len or source.context_length(model_id)
        if length is None:
            raise InputError(f"max_model_len is needed: the config of {model_id!r} does not tell the model's own")
        super().__init__(source.load_tokenizer(model_id))
        self.vocabulary = source.load_config(model_id).get_text_config().vocab_size
        self.stop_ids = sorted(source.end_tokens(model_id, self.tokenizer))
        self.length = length
        self.lora = lora
        self.deadline_s = deadline_s
        self.poll = poll
        self.version = 0
        """Of the weights that the engines have: how many optimizer steps they have seen."""
        self.canary = Canary.draw(
            self.vocabulary, length=min(12, length - 1), bound=BOUNDS[dtype] if canary_bound is None else canary_bound
        )
        self._own_folder = None if sync_folder is not None else tempfile.TemporaryDirectory(prefix="gruppo-sync-")
        self.sync_folder = Path(sync_folder or self._own_folder.name)  # type: ignore[union-attr]  # one of the two
        self._handed_over: Path | None = None
        self._expected: np.ndarray | None = None
        self._restarts: dict[str, int] = {}
        self.engines: list[Engine] = []
        spec = EngineSpec(
            model=folder,
            dtype=dtype,
            max_model_len=length,
            options=options or {},
            **_adapter_options(model_id, lora),
        )
        try:
            for engine in _start_engines(servers, spec):
                engine.poll = poll
                self.engines.append(engine)
            for engine in self.engines:
                engine.wait_until_ready(deadline_s)  # several start at the same time
                self._check_temperature(engine)
        except BaseException:
            self.close()
            raise

    def submit(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Future[SampleResponse]]:
        """Ask the engines; the futures are complete."""
        asked = self._requests(requests, params)
        if not asked:
            return []
        shares = [asked[i :: len(self.engines)] for i in range(len(self.engines))]
        with ThreadPoolExecutor(len(self.engines)) as pool:  # an engine inside the process works in this thread
            others = zip(self.engines[1:], shares[1:], strict=True)
            later = [pool.submit(self._ask, engine, share, params) for engine, share in others if share]
            answers = [self._ask(self.engines[0], shares[0], params), *(f.result() for f in later)]
        for engine in self.engines:
            engine.sleep()
        futures: list[Future[SampleResponse]] = [Future() for _ in requests]
        for i, future in enumerate(futures):
            completions = answers[i % len(self.engines)][i // len(self.engines)]
            check_answer(asked[i], completions, params, self.vocabulary)
            copies = requests[i].num_samples // len(completions)
            future.set_result(response(asked[i], completions, copies=copies, version=self.version))
        return futures

    def sync(self, model: TransformersModel) -> dict[str, float]:
        """Hand the model's weights over and prove that they arrived; does nothing when the engines have them.

        A proof that fails is followed by one more hand-over, then by SamplerError with the names of the tensors.
        """
        if self._handed_over is not None and model.version == self.version:
            return {}
        expected = self.canary.score(model)
        folder = self.sync_folder / f"version-{model.version}"
        fault = None
        for _ in range(2):
            gap, moved, fault = self._hand_over(model, folder, expected)
            if fault is None:
                break
            logger.warning("hand-over of version %d failed: %s", model.version, fault)
        else:
            raise SamplerError(
                f"the weights of version {model.version} did not reach the sampler, tried twice: {fault}. Nothing was "
                f"sampled from them; the files are in {folder}"
            )
        for other in self.sync_folder.glob("version-*"):  # also what a killed run left
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
        self._handed_over, self._expected, self.version = folder, expected, model.version
        size = handover.stored(folder)
        return {
            "sync/tensors": float(len(size.tensors)),
            "sync/bytes": float(size.bytes),
            "sync/canary_gap": gap,
        } | ({} if math.isnan(moved) else {"sync/canary_moved": moved})

    def close(self) -> None:
        """End the engines that were started here and delete what was handed over."""
        for engine in self.engines:
            engine.close()
        if self._handed_over is not None:
            shutil.rmtree(self._handed_over, ignore_errors=True)
        with suppress(OSError):  # somebody else has put something there
            self.sync_folder.rmdir()
        if self._own_folder is not None:
            self._own_folder.cleanup()

    def _check_temperature(self, engine: Engine) -> None:
        """At temperature 2 the log-prob of a drawn token must not be the one at temperature 1."""
        hot = SamplingParams(temperature=2.0, max_new_tokens=1)
        prompts = [row[:-1] for row in self.canary.rows]
        requests = [Request(prompt=Prompt(token_ids=prompt), num_samples=1, seed=0) for prompt in prompts]
        drawn = [completions[0] for completions in engine.generate(requests, hot, (), self.deadline_s)]
        cold = engine.logps_of([(*p, c.tokens[0]) for p, c in zip(prompts, drawn, strict=True)], self.deadline_s)
        if all(abs(c.logps[0] - row[-1]) < 1e-6 for c, row in zip(drawn, cold, strict=True)):
            raise SamplerError(
                f"{engine.name} reports log-probs at temperature 1, whatever the temperature; start it with "
                "--logprobs-mode processed_logprobs"
            )

    # --- asking ---------------------------------------------------------------------------------------------------

    def _requests(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Request]:
        if params.filters:
            raise InputError(
                "top_k, top_p and min_p are refused with vLLM: its log-probs are then over the tokens that were kept, "
                "the trainer's over all of them, and their ratio would be wrong. Use top_k=0, top_p=1, min_p=0, or "
                "sampler=torch, which reports log-probs over all tokens"
            )
        asked = []
        for i, request in enumerate(requests):
            ids = request.prompt.token_ids
            if len(ids) + params.max_new_tokens > self.length:
                raise InputError(
                    f"prompt {i} has {len(ids)} tokens; with max_new_tokens={params.max_new_tokens} that is more than "
                    f"max_model_len={self.length}"
                )
            key = row_keys(request.seed, request.step, np.array([request.number]), np.zeros(1, np.int64))[0]
            drawn = 1 if params.temperature == 0 else request.num_samples  # several greedy ones are the same
            asked.append(Request(prompt=request.prompt, num_samples=drawn, seed=(int(key) >> 2) + request.first))
        return asked

    def _ask(self, engine: Engine, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        """One engine's share, again after each loss of the engine; the same seeds give what it would have given."""
        while True:
            try:
                answers = engine.generate(requests, params, self.stop_ids, self.deadline_s)
                if len(answers) != len(requests):
                    raise SamplerError(f"{engine.name} answered {len(answers)} of {len(requests)} requests")
                fault = self._fault(engine)
                if fault is None:
                    self._restarts[engine.name] = 0
                    return answers
                # A server that was restarted behind our back has the weights of its start: nothing else would show it.
                reason = f"{engine.name} no longer has the weights it was given: {fault}"
            except EngineLost as error:
                reason = str(error)
            self._bring_back(engine, reason)  # the error is gone by now, and with it what it held of the dead engine

    def _fault(self, engine: Engine) -> str | None:
        """What the canary has against the weights that an engine was given last; None: nothing."""
        if self._expected is None:
            return None
        answered = engine.logps_of(self.canary.rows, self.deadline_s)
        return self.canary.judge(engine.name, self._expected, answered).fault

    def _bring_back(self, engine: Engine, reason: str) -> None:
        """Start it again and give it the weights that it had; a loss on the way is the next loss in the row."""
        while True:
            count = self._restarts[engine.name] = self._restarts.get(engine.name, 0) + 1
            if count > RESTARTS:
                raise SamplerError(f"{engine.name} was lost {count} times in a row: {reason}")
            logger.warning("%s; bringing it back, try %d of %d", reason, count, RESTARTS)
            self.canary.forget(engine.name)
            try:
                engine.revive(self.deadline_s)
                if self._handed_over is not None:
                    self._load(engine, self._handed_over)
                fault = self._fault(engine)
            except EngineLost as error:
                reason = str(error)
                continue
            if fault is None:
                return
            raise SamplerError(f"{engine.name} came back without the weights of version {self.version}: {fault}")

    # --- handing over ---------------------------------------------------------------------------------------------

    def _hand_over(
        self, model: TransformersModel, folder: Path, expected: np.ndarray
    ) -> tuple[float, float, str | None]:
        """Write, load, prove: the largest gap, the largest move, and what is wrong, if anything."""
        handover.write(model, folder)
        problem = handover.compare(model, folder)
        if problem is not None:
            return math.nan, math.nan, problem
        size = handover.stored(folder)
        gap, moved = 0.0, math.nan
        for engine in self.engines:
            received, answered, is_lost = None, [], False
            try:
                received = self._load(engine, folder)
                answered = engine.logps_of(self.canary.rows, self.deadline_s)
            except SamplerError as error:
                problem, is_lost = str(error), isinstance(error, EngineLost)
            if problem is not None:
                if is_lost:
                    self._bring_back(engine, problem)
                return math.nan, math.nan, problem
            if received is not None and (received.tensors, received.bytes) != (len(size.tensors), size.bytes):
                read = f"{received.tensors} tensors and {received.bytes:,} bytes"
                there = f"{len(size.tensors)} and {size.bytes:,}"
                return math.nan, math.nan, f"{engine.name} read {read} of {there}"
            verdict = self.canary.judge(engine.name, expected, answered)
            if verdict.fault is not None:
                differ = handover.differing(model, folder)
                where = f"the file differs from the model in {handover.few(differ)}" if differ else (
                    "the file holds the model's weights, so the engine did not take them"
                )  # fmt: skip
                return verdict.gap, verdict.moved, f"{engine.name}: {verdict.fault}; {where}"
            gap, moved = max(gap, verdict.gap), verdict.moved
        return gap, moved, None

    def _load(self, engine: Engine, folder: Path) -> Any:
        if self.lora is not None:
            return engine.load_adapter(folder, self.deadline_s)
        return engine.load_weights(folder, self.deadline_s)


def _start_engines(servers: Sequence[str], spec: EngineSpec) -> Iterator[Engine]:
    """The engines one by one, each started; `spec` is for those that are started here."""
    if not servers:
        from gruppo.sampler.vllm.inprocess import InProcessEngine

        yield InProcessEngine(spec)
    from gruppo.sampler.vllm.http import HttpEngine
    from gruppo.sampler.vllm.server import ServerProcess

    for address in servers:
        if address == "start":
            process = ServerProcess(spec)
            yield HttpEngine(process.address, process=process)
        elif spec.options:
            raise InputError(f"options {sorted(spec.options)} are for an engine started here, not for {address}")
        else:
            yield HttpEngine(address)


def _adapter_options(model_id: str, lora: LoraSpec | None) -> dict[str, Any]:
    """Rank and layers of the adapters that will be loaded: an engine needs them at its start."""
    if lora is None:
        return {}
    targets = source.linear_layers(model_id) if lora.targets == "all-linear" else lora.targets
    # vLLM goes by the last part of a name; PEFT also knows layers by their whole one.
    names = {name.rpartition(".")[2] for name in ([targets] if isinstance(targets, str) else targets)}
    return {"lora_rank": lora.rank, "lora_targets": tuple(sorted(names))}
