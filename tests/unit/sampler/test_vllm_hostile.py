"""HttpEngine against a hostile server: answers that drip, never end, are huge, or are JSON of another form."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from gruppo.errors import SamplerError
from gruppo.sampler import SamplingParams
from gruppo.sampler.vllm.engine import EngineLost, Request
from gruppo.sampler.vllm.http import HttpEngine
from gruppo.types import Prompt

Behaviour = Callable[[socket.socket], None]


class RawServer:
    """A real socket that accepts, reads a request and lets `behaviours` answer it, by path."""

    def __init__(self) -> None:
        self.behaviours: dict[str, Behaviour] = {"/health": says({}), "/v1/models": says({"data": [{"id": "m"}]})}
        self.sent = 0
        """Bytes that clients have taken."""
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.threads = [threading.Thread(target=self._accept, daemon=True)]
        self.threads[0].start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.listening.getsockname()[1]}"

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self.listening.accept()
                self.threads.append(threading.Thread(target=self._answer, args=(connection,), daemon=True))
                self.threads[-1].start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):  # the client has left
            connection.settimeout(5)
            with connection.makefile("rb") as request:  # all of it: a close before that would reset the connection
                path = request.readline().split()[1].decode()
                headers = http.client.parse_headers(request)
                request.read(int(headers.get("Content-Length", 0)))
            self.behaviours[path](Counted(connection, self))  # type: ignore[arg-type]

    def close(self) -> None:
        self.listening.close()
        for thread in self.threads[1:]:
            thread.join(5)
            assert not thread.is_alive(), "the client has not left"


class Counted:
    def __init__(self, connection: socket.socket, server: RawServer) -> None:
        self.connection, self.server = connection, server

    def sendall(self, content: bytes) -> None:
        self.connection.sendall(content)
        self.server.sent += len(content)


@pytest.fixture
def server() -> Iterator[RawServer]:
    made = RawServer()
    yield made
    made.close()


@pytest.fixture
def engine(server: RawServer) -> HttpEngine:
    made = HttpEngine(server.address)
    made.deadline_s = 0.5
    return made


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


def says(answer: object) -> Behaviour:
    return gives(json.dumps(answer).encode())


def gives(content: bytes) -> Behaviour:
    return lambda s: s.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(content) + content)


def drips(head: bytes, part: bytes) -> Behaviour:
    """A few bytes every twentieth of a second, for ever: no read of a socket waits for long."""

    def behave(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(part)
            time.sleep(0.05)

    return behave


def floods(head: bytes, part: bytes) -> Behaviour:
    """As fast as the client takes it, for ever."""

    def behave(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(part)

    return behave


DRIPPING = {
    "a body": drips(HEAD + b"Content-Length: 100000\r\n\r\n", b" "),
    "a body without length": drips(HEAD + b"\r\n", b" "),
    "chunks": drips(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "a header": drips(HEAD + b"X-Slow: ", b"x"),
    "the first line": drips(b"", b"H"),
    "continues": drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "nothing": lambda connection: time.sleep(1),
}
BLOCK = b" " * 2**16
ENDLESS = {
    "a body without length": floods(HEAD + b"\r\n", BLOCK),
    "a body of 10 GB": floods(HEAD + b"Content-Length: 10000000000\r\n\r\n", BLOCK),
    "chunks": floods(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + BLOCK + b"\r\n"),
    "one chunk of 1 TB": floods(HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffff\r\n", BLOCK),
}


@pytest.mark.parametrize("name", DRIPPING)
@pytest.mark.row("R-37", "a server whose health drips in byte by byte")
def test_a_server_that_drips_is_given_up_at_the_deadline_and_stops_are_seen_meanwhile(
    name: str, server: RawServer, engine: HttpEngine
) -> None:
    server.behaviours["/health"] = DRIPPING[name]
    polls: list[None] = []
    engine.poll = lambda: polls.append(None)
    with pytest.raises(SamplerError, match=r"did not answer within 0\.5 s"):
        engine.wait_until_ready()
    assert len(polls) >= 3


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
@pytest.mark.parametrize("name", ENDLESS)
@pytest.mark.row("R-37", "a server whose answer never ends")
def test_an_answer_that_never_ends_is_cut_off(name: str, path: str, server: RawServer, engine: HttpEngine) -> None:
    engine.deadline_s = 30.0
    server.behaviours[path] = ENDLESS[name]
    with pytest.raises(SamplerError, match=rf"{path} with more than 1,048,576 bytes"):
        engine.wait_until_ready()
    assert server.sent < 16 * 2**20  # what was read, and what sockets hold


@pytest.mark.row("R-37", "a server whose answer never ends")
def test_the_limit_of_an_answer_grows_with_what_was_asked_for(server: RawServer, engine: HttpEngine) -> None:
    engine.deadline_s = 30.0
    server.behaviours["/v1/completions"] = ENDLESS["a body of 10 GB"]
    request = Request(prompt=Prompt(token_ids=(4,) * 100), num_samples=8, seed=0)
    # 1 MiB, and 1 KiB for each of 8 x 1000 new tokens and 9 x 100 of the prompt
    with pytest.raises(SamplerError, match=r"/v1/completions with more than 10,162,176 bytes"):
        engine.generate([request], SamplingParams(max_new_tokens=1000))
    assert server.sent < 32 * 2**20


@pytest.mark.row("R-37", "a server that leaves in the middle of its answer")
def test_half_an_answer_is_a_lost_server_and_no_wrong_answer(server: RawServer, engine: HttpEngine) -> None:
    server.behaviours["/v1/completions"] = lambda s: s.sendall(HEAD + b'Content-Length: 500\r\n\r\n{"choices": [')
    request = Request(prompt=Prompt(token_ids=(4,)), num_samples=1, seed=0)
    with pytest.raises(EngineLost, match=r"cannot be reached: IncompleteRead"):
        engine.generate([request], SamplingParams(max_new_tokens=4))


ODD = [b"", b"{}", b"[]", b"5", b"null", b'{"data": []}', b'{"data": 5}', b'{"data": [[]]}', b'{"data": [{"id": []}']
ODD += [b"[" * 100_000 + b"]" * 100_000, b"9" * 5000, b"\xff\xfe", b"<html>"]


@pytest.mark.parametrize("content", ODD, ids=lambda content: content[:12].decode(errors="replace"))
@pytest.mark.row("R-37", "answers of a wrong form to every question")
def test_json_of_another_form_is_an_error_of_the_sampler(
    content: bytes, server: RawServer, engine: HttpEngine, tmp_path: Path
) -> None:
    engine.deadline_s = 10.0
    questions = {
        "/v1/models": engine.wait_until_ready,
        "/collective_rpc": lambda: engine.load_weights(tmp_path),
        "/v1/completions": lambda: engine.logps_of([(4, 5)]),
    }
    for path, ask in questions.items():
        server.behaviours[path] = gives(content)
        with pytest.raises(SamplerError, match=r"vLLM at 127\.0\.0\.1"):
            ask()
