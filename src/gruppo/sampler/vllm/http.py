"""HttpEngine: vLLM behind HTTP, in a `vllm serve` that gruppo or the user started."""

import http.client
import json
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from operator import index
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gruppo.errors import InputError, SamplerError
from gruppo.process.streams import printable
from gruppo.sampler.base import Poll, SamplingParams
from gruppo.sampler.vllm.engine import Completion, Engine, EngineLost, Received, Request
from gruppo.sampler.vllm.placed import PlacedServer
from gruppo.sampler.vllm.server import ServerProcess
from gruppo.sampler.vllm.worker import EXTENSION

logger = logging.getLogger(__name__)

ADAPTER = "gruppo"
"""Name of the adapter in the server."""
FIRST_WORD_S = 3.0
"""Seconds of waiting for a server after which the log has a line, and then at twice that time, and so on."""
HEALTH_S = 5.0
"""Seconds for one answer of `/health`."""
BUSY_S = (0.1, 5.0)
"""First and longest pause in seconds before a request is sent again that the server was too busy for (429)."""
BUSY_WORD_S = 60.0
"""Seconds between two lines in the log on that."""
AT_ONCE = 64
"""Most requests to one server at a time."""
SMALL, TOKEN_BYTES = 2**20, 2**10
"""Most bytes of an answer without tokens, and of each token in an answer: id, text, place and log-prob as JSON."""
DEV_MODE = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
LORA = "start it with --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"


class Refused(SamplerError):
    """The server is reachable but rejected the request."""

    def __init__(self, text: str, status: int) -> None:
        super().__init__(text)
        self.status = status


class HttpEngine(Engine):
    """Client of one server.

    Args:
        address: `http://host:port`, or `unix://PATH` of a socket.
        process: the server, if gruppo started it: it is restarted when it dies.
    """

    is_remote = True

    def __init__(self, address: str, *, process: ServerProcess | PlacedServer | None = None) -> None:
        self._call(address)
        self.process = process
        self.poll: Poll = lambda: None
        self.model = ""
        """Name of the model to sample from, or of the adapter once one is loaded."""
        self.gives_receipts = True
        self._quiet_until = 0.0
        """Earliest time to log again that the server is busy."""

    def _call(self, address: str) -> None:
        """Send requests to this address."""
        self.socket = address.removeprefix("unix://") if address.startswith("unix://") else None
        """Path of the socket of a server on this machine."""
        try:
            parts = urlsplit("http://localhost" if self.socket else address)
            self.host, self.port = parts.hostname or "", parts.port or 80
            is_usable = parts.scheme == "http" and bool(self.host)
        except ValueError:  # a port that is none, a bracket that is not closed
            is_usable = False
        if not is_usable:
            raise InputError(f"a vLLM server's address looks like http://127.0.0.1:8000, got {address!r}")
        self.name = f"vLLM at {self.socket or f'{self.host}:{self.port}'}"

    def wait_until_ready(self) -> None:
        """Wait for the server to come up."""
        started = time.monotonic()
        ends, told = started + self.deadline_s, FIRST_WORD_S
        while True:
            with suppress(EngineLost):
                self._answers("/health", [None], seconds=min(HEALTH_S, max(ends - time.monotonic(), 0.1)))
                break
            waited = time.monotonic() - started
            if waited >= told:
                logger.warning("waiting for %s: no answer for %.0f s of %g s", self.name, waited, self.deadline_s)
                told = 2 * waited
            if self.process is not None:
                self.process.check_alive()
            if time.monotonic() > ends:
                raise SamplerError(
                    f"{self.name} did not answer within {self.deadline_s:g} s; is `vllm serve` running there? A model "
                    "that takes longer to load needs a longer sampler_deadline"
                )
            self.poll()
            time.sleep(0.25)
        answer = self._answers("/v1/models", [None])[0]
        try:
            self.model = str(answer["data"][0]["id"])
        except (KeyError, TypeError, IndexError) as error:
            raise SamplerError(
                f"{self.name} answered /v1/models without a model ({error!r}); is it a `vllm serve`?"
            ) from error

    def generate(self, requests: Sequence[Request], params: SamplingParams) -> list[list[Completion]]:
        bodies = [self._body(r.prompt.token_ids, r.options(params, self.stop_ids)) for r in requests]
        answers = self._answers("/v1/completions", bodies)
        return [self._completions(answer, r) for answer, r in zip(answers, requests, strict=True)]

    def logps_of(self, rows: Sequence[Sequence[int]]) -> list[list[float]]:
        options = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        answers = self._answers("/v1/completions", [self._body(row, options) for row in rows])
        try:
            return [
                [
                    _number(entry[str(token)]["logprob"])
                    for token, entry in zip(row[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True)
                ]
                for row, answer in zip(rows, answers, strict=True)
            ]
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            raise SamplerError(f"{self.name} gave no log-probs of the prompt: {error!r}") from error

    def load_weights(self, folder: Path) -> Received | None:
        with self._requests_halted():
            received = self._receipt("gruppo_load_weights", folder)
            if received is None:
                arguments = {"weights_path": str(folder)}
                self._command("/collective_rpc", {"method": "reload_weights", "kwargs": arguments}, DEV_MODE)
            self._reset_cache()
        return received

    def load_adapter(self, folder: Path) -> Received | None:
        # Not with load_inplace: vLLM keeps that with the adapter, and reads its files again before every forward.
        try:
            self._command("/v1/unload_lora_adapter", {"lora_name": ADAPTER}, LORA)
        except Refused as error:
            if error.status != 404:  # it has none yet
                raise
        self._command("/v1/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": str(folder)}, LORA)
        self.model = ADAPTER
        received = self._receipt("gruppo_count", folder)
        if self.gives_receipts:
            self._reset_cache()
        return received

    @contextmanager
    def _requests_halted(self) -> Iterator[None]:
        """Pause running requests, if there may be any."""
        if not self.has_other_requests:
            yield
            return
        self._command("/pause?mode=keep", {}, DEV_MODE)
        try:
            yield
        finally:
            self._command("/resume", {}, DEV_MODE)

    def _reset_cache(self) -> None:
        """Drop keys and values of other weights; those of running requests are recomputed."""
        of_requests = "?reset_running_requests=true" if self.has_other_requests else ""
        self._command(f"/reset_prefix_cache{of_requests}", {}, DEV_MODE)

    def revive(self) -> None:
        if self.process is not None:
            self.process.start()
            self._call(self.process.address)
        self.wait_until_ready()

    def close(self) -> None:
        if self.process is not None:
            self.process.close()

    def _body(self, prompt: Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
        """A sampling request. All fields are set, so that server-side defaults never apply."""
        return {
            "model": self.model,
            "prompt": list(prompt),
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": [],
            "stop_token_ids": [],
            "logprobs": 0,
            "return_token_ids": True,
        } | options

    def _completions(self, answer: Any, request: Request) -> list[Completion]:
        """The choices of an answer, in order. Raises SamplerError with the name of a missing field."""
        try:
            choices = sorted(answer["choices"], key=lambda c: _whole(c["index"]))
            prompts = {tuple(c["prompt_token_ids"]) for c in choices if c.get("prompt_token_ids") is not None}
            completions = [
                Completion(
                    tokens=tuple(map(_whole, c["token_ids"])),
                    logps=tuple(map(_number, c["logprobs"]["token_logprobs"])),
                    stop_reason="stop" if c["finish_reason"] == "stop" else "length",
                )
                for c in choices
            ]
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
            raise SamplerError(
                f"{self.name} answered without what was asked for ({error!r}); token ids need vLLM 0.11 or newer"
            ) from error
        if prompts - {request.prompt.token_ids}:
            raise SamplerError(
                f"{self.name} continued another prompt than it was given; is there a chat template in between?"
            )
        numbers = [c["index"] for c in choices]
        if len(numbers) == request.num_samples and numbers != list(range(len(numbers))):
            raise SamplerError(
                f"{self.name} numbered its {len(numbers)} completions {numbers[:8]} (index), not from 0 on: some of "
                "them may be one and the same"
            )
        return completions

    def _receipt(self, method: str, folder: Path) -> Received | None:
        """Call a method of SyncWorker that reads a folder and reports what it read; None if the server has none."""
        if not self.gives_receipts:
            return None
        body = {"method": method, "kwargs": {"folder": str(folder)}}
        try:
            answer = self._command("/collective_rpc", body, DEV_MODE)
        except Refused as error:
            is_shut = error.status == 404 and method == "gruppo_count"  # no dev mode, which adapters do not need
            if not is_shut and f"'{method}'" not in str(error):  # "no attribute '...'", "'...' is not implemented"
                raise
            logger.warning(
                "%s cannot report what it reads (start it with --worker-extension-cls %s); only the canary remains",
                self.name,
                EXTENSION,
            )
            self.gives_receipts = False
            return None
        try:
            found = answer["results"][0]
            return {name: index(found[name]) for name in ("tensors", "bytes")}
        except (KeyError, TypeError, IndexError) as error:
            raise SamplerError(f"{self.name} answered {method} without a count of what it read ({error!r})") from error

    def _command(self, path: str, body: dict[str, Any], remedy: str) -> Any:
        return self._answers(path, [body], remedy)[0]

    def _answers(
        self, path: str, bodies: Sequence[dict[str, Any] | None], remedy: str = "", *, seconds: float | None = None
    ) -> list[Any]:
        """Answers to a POST of each body, in order; None is a GET. However this ends, no request is left running.

        Args:
            remedy: what to do if the server does not have the path.
            seconds: limit for all of them; None: the engine's deadline.
        """
        seconds = self.deadline_s if seconds is None else seconds
        ends = time.monotonic() + seconds
        executor = ThreadPoolExecutor(min(len(bodies), AT_ONCE) or 1)
        is_open: set[socket.socket] = set()
        is_over = threading.Event()
        # The loop below keeps the deadline for all of them, however slowly bytes drip in; a connection's own timeout,
        # which is for one read, comes after it.
        futures = [
            executor.submit(self._exchange, path, seconds + 5, body, remedy, is_open, is_over) for body in bodies
        ]
        try:
            waiting = set(futures)
            while waiting:
                self.poll()
                done, waiting = wait(waiting, timeout=0.2, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()  # raises what the request raised
                if waiting and time.monotonic() > ends:
                    raise EngineLost(
                        f"{self.name} had not answered {len(waiting)} requests after {seconds:g} s "
                        f"({path}; sampler_deadline)"
                    )
            return [future.result() for future in futures]
        finally:
            is_over.set()
            executor.shutdown(wait=False, cancel_futures=True)
            _drop([future for future in futures if not future.cancelled()], is_open)

    def _connection(self, timeout: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.host, self.port, timeout=timeout)
        if self.socket is not None:
            connection.connect = lambda: _connect(connection, str(self.socket), timeout)
        return connection

    def _exchange(
        self,
        path: str,
        timeout: float,
        body: dict[str, Any] | None,
        remedy: str,
        is_open: set[socket.socket],
        is_over: threading.Event,
    ) -> Any:
        """The answer to a GET, or with a body to a POST, which is sent again while the server is busy (429)."""
        pause, longest = BUSY_S
        while True:
            status, content = self._sent(path, timeout, body, is_open)
            if status != 429 or is_over.wait(pause):
                return self._read(path, status, content.decode(errors="replace"), body, remedy)
            if (now := time.monotonic()) > self._quiet_until:
                self._quiet_until = now + BUSY_WORD_S  # first: other requests of this batch are turned away, too
                logger.warning("%s is too busy for %s (429); asking again until sampler_deadline", self.name, path)
            pause = min(2 * pause, longest)

    def _sent(
        self, path: str, timeout: float, body: dict[str, Any] | None, is_open: set[socket.socket]
    ) -> tuple[int, bytes]:
        """Status and content of an answer. The socket is in `is_open` as long as it is."""
        connection, opened = self._connection(timeout), None
        try:
            connection.connect()
            opened = connection.sock  # the connection forgets it where the answer has no length
            is_open.add(opened)
            verb, payload = ("GET", None) if body is None else ("POST", json.dumps(body))
            key = {} if self.process is None else {"Authorization": f"Bearer {self.process.key}"}
            connection.request(verb, path, payload, {"Content-Type": "application/json"} | key)
            response, limit = connection.getresponse(), _most_bytes(body)
            with closing(response):
                content = response.read(limit + 1)
            if len(content) > limit:
                raise SamplerError(
                    f"{self.name} answered {path} with more than {limit:,} bytes, which no answer of vLLM has; is it a "
                    "`vllm serve`?"
                )
            if response.length:  # with a limit, read() does not look whether all has come
                raise http.client.IncompleteRead(content, response.length)
        except (OSError, http.client.HTTPException) as error:
            raise EngineLost(f"{self.name} cannot be reached: {type(error).__name__}: {error}") from error
        finally:
            if opened is not None:
                is_open.discard(opened)
            connection.close()
        return response.status, content

    def _read(self, path: str, status: int, text: str, body: dict[str, Any] | None, remedy: str) -> Any:
        """Content of an answer; raises the error that its status stands for."""
        if status == 200:
            try:
                return json.loads(text or "{}")
            except (ValueError, RecursionError) as error:
                if text.startswith("{") and isinstance(error, json.JSONDecodeError):
                    raise EngineLost(f"{self.name} answered {path} with broken or cut JSON: {error}") from error
                return {}  # /v1/load_lora_adapter answers with a sentence
        answered = f"{self.name} answered {path} with {status}: {printable(text[:300])}"
        if status == 404 and body is not None and body.get("model") == ADAPTER:
            raise EngineLost(f"{self.name} does not know the adapter it was given")
        # 500 to a request: the engine has died and the server has yet to end. 500 to a command: the command failed.
        if status in (429, 502, 503, 504) or (status >= 500 and not remedy):
            raise EngineLost(answered)
        has_remedy = remedy and status in (403, 404, 405)
        raise Refused(f"{answered}; {remedy}" if has_remedy else answered, status)


def _drop(sent: Sequence[Future[Any]], is_open: set[socket.socket]) -> None:
    """Cut the connections that are still open: the server then drops their requests."""
    for _ in range(20):  # one that was only being opened is cut the next time round
        for opened in list(is_open):
            with suppress(OSError):  # closed already
                opened.shutdown(socket.SHUT_RDWR)  # close() would wait for the thread that reads from it
        if not wait(sent, timeout=0.1).not_done:
            return


def _connect(connection: http.client.HTTPConnection, path: str, timeout: float) -> None:
    """Open a connection through a socket in the file system."""
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.settimeout(timeout)
    connection.sock.connect(path)


def _most_bytes(body: dict[str, Any] | None) -> int:
    """Most bytes of the answer to a request."""
    if body is None or "prompt" not in body:
        return SMALL
    num_samples = body.get("n", 1)
    tokens = num_samples * body["max_tokens"] + (num_samples + 1) * len(body["prompt"])
    return SMALL + tokens * TOKEN_BYTES


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r:.40} is no whole number")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r:.40} is no number")
    return float(value)
