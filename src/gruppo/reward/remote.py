"""RemoteReward: rewards that a server gives over HTTP, in the form of OpenRLHF's remote reward (docs/rewards.md)."""

import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import urlsplit

from gruppo.errors import InputError, RewardError
from gruppo.process.by_name import is_address
from gruppo.process.streams import printable
from gruppo.reward.call import log_parts
from gruppo.reward.verifiers import completion_texts

MAX_BYTES = 16 * 2**20
"""Of an answer."""
_MAX_SHOWN = 200
_POLL_S = 0.5
_LONGEST_PAUSE_S = 2.0


class _Transient(Exception):
    """A try that failed as the next one may not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteReward:
    """A server that is sent `{"query": [...], "prompts": [...], "labels": [...]}` and answers `{"rewards": [...]}`.

    A query is the prompt as the model saw it with the completion after it, a label the row's answer. A connection that
    fails, 429, 5xx and an answer that is cut off are tried again until the deadline.
    """

    url: str
    batch_size: int = 64
    """Completions of one request, at most."""
    concurrency: int = 8
    """Requests at a time, at most."""
    deadline: float | None = None
    """Seconds for one request with all its tries. None: the scorer's, which is `reward_deadline` of a run."""

    isolated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is none, a bracket that is not closed
            is_usable = False
        if not is_address(self.url) or not is_usable:
            raise InputError(f"reward {self.url!r} is not an address; write http://host:port/path")
        if min(self.batch_size, self.concurrency) < 1 or not (self.deadline is None or self.deadline > 0):
            raise InputError(
                f"batch_size and concurrency of reward {self.url!r} must be at least 1 and deadline positive, got "
                f"{self.batch_size}, {self.concurrency} and {self.deadline}"
            )

    @property
    def address(self) -> str:
        """The address for messages, without a query."""
        parts = urlsplit(self.url)
        return f"{parts.scheme}://{parts.netloc}{parts.path}"

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        log_extra: Callable[[str, Sequence[Any]], None],
        log_metric: Callable[[str, float], None],
        answer: Sequence[Any] | None = None,
        prompt_texts: Sequence[str] | None = None,
    ) -> list[float | None]:
        texts = list(map(_text, prompts)) if prompt_texts is None else prompt_texts
        queries = [text + completion for text, completion in zip(texts, completion_texts(completions), strict=True)]
        labels = [None] * len(queries) if answer is None else answer
        parts = [slice(start, start + self.batch_size) for start in range(0, len(queries), self.batch_size)]
        bodies = [{"query": queries[part], "prompts": texts[part], "labels": labels[part]} for part in parts]
        rewards: list[float | None] = []
        logged: dict[str, list[Any]] = {}
        for part, answered in zip(parts, self._post_all(bodies), strict=True):
            num = len(queries[part])
            for key, values in _extra_logs(self.address, answered, num).items():
                logged.setdefault(key, [None] * len(queries))[part] = values
            rewards += _rewards(self.address, answered, num)
        log_parts(logged, log_extra, log_metric)
        return rewards

    def _post_all(self, bodies: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The answers to all requests. A thread that gets none is left behind: it ends by its own deadlines."""
        seconds = self.deadline or 10.0
        todo, came = queue.SimpleQueue[int](), queue.SimpleQueue[tuple[int, Any]]()
        began: dict[int, float] = {}
        is_over = threading.Event()
        for number in range(len(bodies)):
            todo.put(number)

        def work() -> None:
            while not is_over.is_set():
                try:
                    number = todo.get_nowait()
                except queue.Empty:
                    return
                began[number] = time.monotonic()
                try:
                    came.put((number, self._ask(bodies[number], seconds, is_over)))
                except BaseException as error:
                    came.put((number, error))

        for _ in range(min(self.concurrency, len(bodies))):
            threading.Thread(target=work, name=f"reward {self.address}", daemon=True).start()
        answers: dict[int, Any] = {}
        try:
            while len(answers) < len(bodies):
                try:
                    number, answered = came.get(timeout=_POLL_S)
                except queue.Empty:
                    # The time that a socket waits is counted anew for each part that trickles in.
                    waiting = [
                        time.monotonic() - begun for number, begun in list(began.items()) if number not in answers
                    ]
                    if max(waiting, default=0.0) > seconds + _POLL_S:
                        raise RewardError(f"{self.address} had not answered after {seconds:g} s{_REMEDY}") from None
                    continue
                if isinstance(answered, BaseException):
                    raise answered
                answers[number] = answered
        finally:
            is_over.set()
        return [answers[number] for number in range(len(bodies))]

    def _ask(self, body: Mapping[str, Any], seconds: float, is_over: threading.Event) -> Any:
        """The answer to a request, tried until it comes or the time is over."""
        sent = json.dumps(body, default=str).encode()
        ends, tries = time.monotonic() + seconds, 0
        while True:
            tries += 1
            try:
                return self._try(sent, max(ends - time.monotonic(), 0.01))
            except _Transient as failure:
                pause = min(0.1 * 2 ** (tries - 1), _LONGEST_PAUSE_S)
                if time.monotonic() + pause >= ends or is_over.wait(pause):
                    times = "1 try" if tries == 1 else f"{tries} tries"
                    raise RewardError(f"{self.address} {failure} ({times} in {seconds:g} s){_REMEDY}") from None

    def _try(self, sent: bytes, seconds: float) -> Any:
        # Not urllib.request, which goes through proxies and follows redirects to other hosts.
        from http.client import HTTPConnection, HTTPException, HTTPSConnection

        parts = urlsplit(self.url)
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        connection = kind(parts.hostname or "", parts.port, timeout=seconds)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            connection.request("POST", target, sent, {"Content-Type": "application/json"})
            with connection.getresponse() as response:
                if (response.length or 0) > MAX_BYTES:
                    raise self._too_large(response.length)
                read = response.read(MAX_BYTES + 1)
        except TimeoutError as error:
            raise _Transient("did not answer in time") from error
        except (OSError, HTTPException) as error:
            raise _Transient(
                f"cannot be asked: {printable(str(error) or type(error).__name__)[:_MAX_SHOWN]}"
            ) from error
        finally:
            connection.close()
        if len(read) > MAX_BYTES:
            raise self._too_large(None)
        status = f"answered {response.status} {printable(response.reason)[:_MAX_SHOWN]}"
        if response.status == 429 or response.status >= 500:
            raise _Transient(status)
        if response.status != 200:
            said = printable(read.decode(errors="replace"))[:_MAX_SHOWN]
            raise RewardError(
                f"{self.address} {status}{f': {said}' if said else ''}; name the address that answers 200"
            )
        try:
            return json.loads(read)
        except (ValueError, RecursionError) as error:
            raise _Transient(f"answered with what is not JSON or was cut off, {len(read):,} bytes") from error

    def _too_large(self, size: int | None) -> RewardError:
        given = f"more than {MAX_BYTES:,}" if size is None else f"{size:,}"
        return RewardError(
            f"{self.address} answered with {given} bytes, limit {MAX_BYTES:,}; let it send rewards only, or lower "
            "batch_size"
        )


_REMEDY = "; see to the server, or raise reward_deadline"


def _rewards(address: str, answered: Any, num: int) -> list[float | None]:
    rewards = answered.get("rewards") if isinstance(answered, Mapping) else None
    if not isinstance(rewards, list):
        raise RewardError(f'{address} answered without a list of "rewards"; it must send {{"rewards": [...]}}')
    if len(rewards) != num:
        raise RewardError(f"{address} gave {len(rewards)} rewards for {num} completions; it must give one for each")
    wrong = next((value for value in rewards if not isinstance(value, int | float | None)), None)
    if wrong is not None:
        raise RewardError(f"{address} gave the reward {wrong!r:.80}; each must be a number or null")
    return rewards


def _extra_logs(address: str, answered: Any, num: int) -> dict[str, list[Any]]:
    """OpenRLHF's logs beside the rewards: one value per completion, or one for all of them."""
    logs = (answered.get("extra_logs") if isinstance(answered, Mapping) else None) or {}
    if not isinstance(logs, Mapping):
        raise RewardError(f'{address} gave "extra_logs" that are no object; it must send {{"name": [...]}}')
    columns = {str(key): value if isinstance(value, list) else [value] * num for key, value in logs.items()}
    for key, values in columns.items():
        if len(values) != num:
            raise RewardError(f"{address} gave {len(values)} {key!r} for {num} completions; give one for each, or one")
    return columns


def _text(prompt: Any) -> str:
    """A prompt whose rendered text is not known."""
    return prompt if isinstance(prompt, str) else "".join(f"{turn['role']}: {turn['content']}\n" for turn in prompt)
