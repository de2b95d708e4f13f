"""InProcessEngine: vLLM in this process (colocated), driven step by step, so that it can be stopped at any token."""

import gc
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gruppo.errors import InputError, SamplerError, require
from gruppo.sampler.base import Poll, SamplingParams
from gruppo.sampler.vllm.engine import Completion, Engine, EngineLost, Received, Request, platform_settings

# Read by vLLM when it is imported. The engine runs in this process; variables the user has set take precedence.
SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


class InProcessEngine(Engine):
    """`vllm.LLM` with weights that change; made with `engine_arguments`."""

    name = "vLLM in this process"
    is_remote = False

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.arguments = {"use_tqdm_on_load": False} | arguments
        self.poll: Poll = lambda: None
        self.adapter: Any = None
        self.counter = 0
        self.llm: Any = None
        self._start()

    def _start(self) -> None:
        for name, value in (SETTINGS | platform_settings()).items():
            os.environ.setdefault(name, value)
        try:
            from vllm import LLM  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]  # an extra; not this package
        except ImportError:
            raise require("vllm", "vllm", "sampler=vllm") from None
        import torch

        self.is_asleep = False
        # vLLM seeds torch's global generator, and uses names of torch that are deprecated
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)
            try:
                self.llm = LLM(**self.arguments)
            except (ValueError, TypeError) as error:
                raise InputError(f"vLLM does not take this model or these options: {error}") from error

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        asked = [(r.prompt.token_ids, r.options(params, self.stop_ids)) for r in requests]
        return [[_completion(c) for c in output.outputs] for output in self._run(asked)]

    def logps_of(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        options = {"max_tokens": 1, "prompt_logprobs": 0, "detokenize": False}
        outputs = self._run([(row, options) for row in rows])
        return [
            [entry[token].logprob for token, entry in zip(row[1:], output.prompt_logprobs[1:], strict=True)]
            for row, output in zip(rows, outputs, strict=True)
        ]

    def load_weights(self, folder: Path) -> Received | None:
        return self._receive("gruppo_load_weights", folder)

    def load_adapter(self, folder: Path) -> Received | None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        received = self._receive("gruppo_count", folder)
        # Loaded before any request needs it, so that an adapter that fails to load fails alone.
        try:
            self.llm.llm_engine.add_lora(LoRARequest("policy", 1, str(folder), load_inplace=True))
        except Exception as error:  # vLLM raises whatever the file made it raise
            raise SamplerError(f"vLLM could not load {folder}: {type(error).__name__}: {error}") from error
        self.adapter = LoRARequest("policy", 1, str(folder))
        return received

    def sleep(self) -> None:
        if self.arguments.get("enable_sleep_mode") and not self.is_asleep:
            self.llm.sleep(level=1)
            self.is_asleep = True

    def revive(self) -> None:
        self.close()
        self._start()

    def close(self) -> None:
        self.llm = self.adapter = None
        gc.collect()

    def _receive(self, method: str, folder: Path) -> Received:
        self._wake()
        try:
            counted, *_ = self.llm.collective_rpc(method, kwargs={"folder": str(folder)})  # each worker reads it all
        except Exception as error:  # vLLM raises whatever the file made it raise
            raise SamplerError(f"vLLM could not read {folder}: {type(error).__name__}: {error}") from error
        self.llm.reset_prefix_cache()
        return counted

    def _run(self, asked: Sequence[tuple[Sequence[int], dict[str, Any]]]) -> list[Any]:
        """Drive the engine until all prompts are done. However this ends, none of them stays in the engine."""
        from vllm import SamplingParams as VllmParams  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        self._wake()
        engine = self.llm.llm_engine
        ends = time.monotonic() + self.deadline_s
        waiting: dict[str, int] = {}
        outputs: list[Any] = [None] * len(asked)
        try:
            for i, (prompt, options) in enumerate(asked):
                self.counter += 1
                name = str(self.counter)
                try:
                    params = VllmParams(**options, output_kind=RequestOutputKind.FINAL_ONLY)
                    engine.add_request(name, {"prompt_token_ids": list(prompt)}, params, lora_request=self.adapter)
                except ValueError as error:  # vLLM's error for a request it does not take
                    raise SamplerError(f"{self.name} refuses a request: {error}") from error
                waiting[name] = i
            while waiting:
                self.poll()
                if time.monotonic() > ends:
                    raise EngineLost(
                        f"{self.name} had not finished {len(waiting)} requests after {self.deadline_s:g} s "
                        "(sampler_deadline)"
                    )
                try:
                    stepped = engine.step()
                except Exception as error:  # an engine whose model failed in the middle of a step is of no use again
                    raise EngineLost(f"{self.name} failed: {type(error).__name__}: {error}") from error
                for output in stepped:
                    if output.finished:
                        outputs[waiting.pop(output.request_id)] = output
        finally:
            if waiting:
                engine.abort_request(list(waiting))
        return outputs

    def _wake(self) -> None:
        if self.is_asleep:
            self.llm.wake_up()
            self.is_asleep = False


def _completion(output: Any) -> Completion:
    tokens = tuple(output.token_ids)
    logps = tuple(entry[token].logprob for token, entry in zip(tokens, output.logprobs or (), strict=False))
    return Completion(tokens=tokens, logps=logps, stop_reason="stop" if output.finish_reason == "stop" else "length")
