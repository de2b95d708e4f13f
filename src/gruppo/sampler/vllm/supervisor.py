"""Supervisor: restarts an engine that is lost, loads its weights again, and proves them after each batch."""

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, TypeVar

from gruppo.errors import SamplerError
from gruppo.sampler.base import Poll, Samples, SamplingParams
from gruppo.sampler.vllm.engine import Completion, Engine, EngineLost, Received, Request, response
from gruppo.types import Prompt
from gruppo.weights.canary import CanaryCheck, Rows, Verdict
from gruppo.weights.store import NotTaken, Published, WrongWeights

logger = logging.getLogger(__name__)

T = TypeVar("T")

RESTARTS = 3
"""Restarts of an engine in a row before the run stops."""


class Supervisor:
    """Runs the tasks of one engine, one after the other, or with `at_once` several batches at the same time.

    A remote engine has threads for them. One in this process works in the thread of the caller.

    Args:
        bound: largest gap of the canary.
        poll: cancellation hook, called while the engine works; raise to abort.
        at_once: batches that are answered at the same time. With more than one, weights are loaded while they are.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        bound: float,
        tokenizer: Any,
        vocabulary: int,
        poll: Poll = lambda: None,
        at_once: int = 1,
    ) -> None:
        self.engine = engine
        self._reading = {"tokenizer": tokenizer, "end_ids": engine.stop_ids, "vocabulary": vocabulary}
        """Tokenizer and limits for reading answers."""
        self.loaded: Published | None = None
        """The weights that the engine is to have; None: those of its start."""
        self._check = CanaryCheck(bound)
        self._losses = 0
        """Since the last good answer."""
        self._caller_poll = poll
        self._batch = threading.local()
        """`futures` of the batch that a thread answers."""
        self._is_closed = False
        self._weights = threading.RLock()
        """Held while weights are loaded, proven or brought back."""
        self._lives = 0
        """Times that the engine was brought back."""
        self._overlaps = engine.has_other_requests = at_once > 1
        threads = at_once + 1 if self._overlaps else 1  # one for `load`
        self._thread = ThreadPoolExecutor(threads, thread_name_prefix="gruppo-vllm") if engine.is_remote else None
        engine.poll = self._poll

    def run(self, task: Callable[..., T], *args: Any) -> Future[T]:
        """Run a method after those given before it. An engine without a thread runs it now, and errors are raised."""
        if self._is_closed:
            raise SamplerError(f"{self.engine.name} was closed")
        if self._thread is not None:
            return self._thread.submit(task, *args)
        future: Future[T] = Future()
        future.set_result(task(*args))
        return future

    def close(self) -> None:
        """Abort running requests, and stop the engine if it was started here."""
        self._is_closed = True
        if self._thread is not None:
            self._thread.shutdown()
        self.engine.close()

    # --- tasks ----------------------------------------------------------------------------------------------------

    def start(self, rows: Rows) -> None:
        """Wait for the engine. At temperature 2 the log-prob of a drawn token must not be the one at temperature 1."""
        engine = self.engine
        engine.wait_until_ready()
        hot = SamplingParams(temperature=2.0, max_new_tokens=1)
        prompts = [row[:-1] for row in rows]
        requests = [Request(prompt=Prompt(token_ids=prompt), num_samples=1, seed=0) for prompt in prompts]
        answers = zip(requests, engine.generate(requests, hot), strict=True)
        drawn = [response(r, found, hot, versions=(0, 0), **self._reading)[0] for r, found in answers]
        cold = engine.logps_of([(*p, c.tokens[0]) for p, c in zip(prompts, drawn, strict=True)])
        if all(abs(c.logps[0] - row[-1]) < 1e-6 for c, row in zip(drawn, cold, strict=True) if c.logps):
            raise SamplerError(
                f"{engine.name} reports log-probs at temperature 1, whatever the temperature; start it with "
                "--logprobs-mode processed_logprobs"
            )

    def answer(self, batch: Sequence[Request], params: SamplingParams) -> None:
        """Complete the futures of a batch. In a thread they get the error if there is one; else it is raised."""
        self._batch.futures = [request.future for request in batch]
        try:
            self._poll()  # the batch may have been cancelled while it waited for others
            answers, versions = self._ask(batch, params)
            self.engine.sleep()
        except BaseException as error:
            if self._thread is None:
                raise
            for request in batch:
                _settle(request.future, error)
            return
        finally:
            self._batch.futures = ()
        for request, completions in zip(batch, answers, strict=True):
            try:
                outcome = response(request, completions, params, versions=versions, **self._reading)
            except SamplerError as error:
                outcome = error
            _settle(request.future, outcome)

    def load(self, published: Published) -> Verdict:
        """Load weights and prove that they arrived, else raise NotTaken.

        The caller sets `loaded` when all engines have them. Batches that run meanwhile need it immediately.
        """
        with self._weights:
            verdict = self._load_proven(published)
            if self._overlaps:
                self.loaded = published
            return verdict

    def _load_proven(self, published: Published) -> Verdict:
        name, canary = self.engine.name, published.canary
        try:
            received = self._load(published)
            answered = self.engine.logps_of(canary.rows)
        except EngineLost as error:
            lost = str(error)
        except SamplerError as error:
            raise NotTaken(str(error)) from error
        else:
            tensors, size = len(published.contents), published.bytes
            if received not in (None, {"tensors": tensors, "bytes": size}):
                read = f"{received['tensors']} tensors and {received['bytes']:,} bytes"
                raise NotTaken(f"{name} read {read} of {tensors} and {size:,}")
            verdict = self._check.judge(canary.logps, answered)
            if verdict.fault is not None:
                raise WrongWeights(f"{name}: {verdict.fault}")
            return verdict
        self._bring_back(lost)  # outside of `except`, as in `_ask`
        raise NotTaken(lost)

    # --- inside ---------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        self._caller_poll()
        if self._is_closed:
            raise SamplerError(f"{self.engine.name} was closed")
        futures = getattr(self._batch, "futures", ())
        if futures and all(future.cancelled() for future in futures):
            raise CancelledError

    @property
    def _version(self) -> int:
        return 0 if self.loaded is None else self.loaded.version

    def _ask(
        self, requests: Sequence[Request], params: SamplingParams
    ) -> tuple[list[list[Completion]], tuple[int, int]]:
        """The engine's answers, repeated after each loss of the engine; the same seeds give the same completions.

        With them the versions of the weights at their start and at their end.
        """
        while True:
            lives, oldest = self._lives, self._version
            try:
                answers = self.engine.generate(requests, params)
                if len(answers) != len(requests):
                    raise SamplerError(f"{self.engine.name} answered {len(answers)} of {len(requests)} requests")
                with self._weights:
                    fault, newest = self._fault(), self._version
                    if fault is None and lives == self._lives:  # else another batch has seen the loss
                        self._losses = 0
                        return answers, (oldest, newest)
                # A server restarted without gruppo's knowledge is back on its initial weights, and only this shows it.
                reason = f"{self.engine.name} no longer has the weights it was given: {fault}"
            except EngineLost as error:
                reason = str(error)
            # Outside of `except`: the error holds frames that would keep a dead engine in memory.
            with self._weights:
                if lives == self._lives:
                    self._bring_back(reason)

    def _fault(self) -> str | None:
        """The canary's objection to the engine's weights; None: there is none, or no weights were loaded yet."""
        if self.loaded is None:
            return None
        canary = self.loaded.canary
        return self._check.judge(canary.logps, self.engine.logps_of(canary.rows)).fault

    def _bring_back(self, reason: str) -> None:
        """Restart the engine and load its weights; a failure on the way counts as another consecutive loss."""
        name = self.engine.name
        self._lives += 1
        while True:
            self._losses += 1
            if self._losses > RESTARTS:
                raise SamplerError(f"{name} was lost {self._losses} times in a row: {reason}")
            logger.warning("%s; bringing it back, try %d of %d", reason, self._losses, RESTARTS)
            self._check.forget()
            try:
                self.engine.revive()
                if self.loaded is not None:
                    self._load(self.loaded)
                fault = self._fault()
            except EngineLost as error:
                reason = str(error)
                continue
            if fault is None:
                return
            raise SamplerError(f"{name} came back without the weights of version {self._version}: {fault}")

    def _load(self, published: Published) -> Received | None:
        load = self.engine.load_adapter if published.is_adapter else self.engine.load_weights
        return load(published.folder)


def _settle(future: Future[Samples], outcome: Samples | BaseException) -> None:
    """Complete a future, unless it was cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    if isinstance(outcome, BaseException):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
