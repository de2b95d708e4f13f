"""A reward that a server gives: what is sent, what is tried again, what ends the run. The servers are real."""

import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gruppo.errors import InputError, RewardError
from gruppo.reward import RewardScorer, load_reward
from gruppo.reward.remote import MAX_BYTES, RemoteReward
from gruppo.trainer import GRPOTrainer, TrainConfig
from gruppo.types import Group

Answer = tuple[int, Any]


class RewardServer:
    """A server that rewards completions of "1+1=" that are right; a test changes `answer`."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = self.right
        self.seen: list[dict[str, Any]] = []
        self.released = threading.Event()
        """Set when the test is over: an answer that hangs ends."""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, format: str, *args: Any) -> None: ...

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stub.seen.append(body | {"path": self.path})
                status, content = stub.answer(body)
                data = content if isinstance(content, bytes) else json.dumps(content).encode()
                with suppress(OSError):  # the client has left
                    self.send_response(status)
                    self.send_header("Content-Length", str(getattr(content, "claimed", len(data))))
                    self.end_headers()
                    self.wfile.write(data)

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = False
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @staticmethod
    def right(body: dict[str, Any]) -> Answer:
        pairs = zip(body["query"], body["prompts"], body["labels"], strict=True)
        return 200, {"rewards": [float(query == f"{prompt}{label}") for query, prompt, label in pairs]}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_port}/get_reward"

    def close(self) -> None:
        self.released.set()
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server() -> Iterator[RewardServer]:
    made = RewardServer()
    yield made
    made.close()


class Claimed(bytes):
    """A body that is said to be longer than it is."""

    claimed = 0


def claimed(data: bytes, size: int) -> bytes:
    body = Claimed(data)
    body.claimed = size
    return body


def in_turn(*answers: Answer | None) -> Callable[[dict[str, Any]], Answer]:
    """These answers, the last for ever; None: the right one."""
    rest = itertools.chain(answers, itertools.repeat(answers[-1]))
    return lambda body: next(rest) or RewardServer.right(body)


def score(url: str, texts: list[str], deadline_s: float = 10.0, **options: Any) -> Any:
    with RewardScorer([url], deadline_s=deadline_s, **options) as scorer:
        return scorer.score(["1+1="] * len(texts), texts, columns={"answer": ["2"] * len(texts)}, step=3)


def test_openrlhfs_form_is_sent_and_its_rewards_come_back_in_order(server: RewardServer) -> None:
    result = score(server.url, ["2", "3", "2"])
    assert result.values == {"get_reward": [1.0, 0.0, 1.0]}
    assert server.seen == [
        {"query": ["1+1=2", "1+1=3", "1+1=2"], "prompts": ["1+1="] * 3, "labels": ["2"] * 3, "path": "/get_reward"}
    ]


def test_a_query_is_the_prompt_as_the_model_saw_it(server: RewardServer) -> None:
    with RewardScorer([server.url]) as scorer:
        chat = [{"role": "user", "content": "1+1="}]
        scorer.score([chat], ["2"], columns={"answer": ["2"]}, prompt_texts=["<user>1+1=<assistant>"])
    assert server.seen[0]["prompts"] == ["<user>1+1=<assistant>"]
    assert server.seen[0]["query"] == ["<user>1+1=<assistant>2"]


def test_requests_are_of_a_size_and_no_more_run_at_once_than_asked_for(server: RewardServer) -> None:
    inside: list[int] = []
    most: list[int] = []
    both = threading.Barrier(2)  # broken if the requests came one after the other

    def answer(body: dict[str, Any]) -> Answer:
        inside.append(1)
        most.append(len(inside))
        both.wait(timeout=30)
        inside.pop()
        return RewardServer.right(body)

    server.answer = answer
    texts = [str(i % 4) for i in range(12)]
    result = score(f"{server.url}:batch_size=3,concurrency=2", texts)
    assert result.values["get_reward"] == [float(text == "2") for text in texts]
    assert [len(body["query"]) for body in server.seen] == [3, 3, 3, 3] and max(most) == 2


def test_logs_beside_the_rewards_are_metrics_and_columns(server: RewardServer) -> None:
    server.answer = lambda body: (
        200,
        {
            "rewards": [1.0] * len(body["query"]),
            "scores": [0],
            "extra_logs": {"short": [True, False][: len(body["query"])], "t": 5},
        },
    )
    result = score(f"{server.url}:batch_size=2", ["2", "3", "4"])
    assert result.extras == {"short": [True, False, True], "t": [5, 5, 5]}
    assert result.metrics["reward/get_reward/short"] == pytest.approx(2 / 3)
    assert result.metrics["reward/get_reward/t"] == 5.0


CUT = claimed(b'{"rewards": [1.0', 500)


@pytest.mark.parametrize(
    "first", [(429, {}), (500, {}), (503, b"busy"), (200, CUT), (200, b'{"rewards": [1.0'), (200, b"<html>")]
)
def test_what_passes_is_tried_again(server: RewardServer, first: Answer) -> None:
    server.answer = in_turn(first, first, None)
    assert score(server.url, ["2", "3"]).values["get_reward"] == [1.0, 0.0]
    assert len(server.seen) == 3


def test_a_server_that_is_not_up_yet_is_waited_for(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first connections are refused; then the port is taken by a server."""
    tried, real = threading.Event(), RemoteReward._try

    def watched(self: RemoteReward, *given: Any) -> Any:
        try:
            return real(self, *given)
        except Exception:
            tried.set()
            raise

    monkeypatch.setattr(RemoteReward, "_try", watched)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        port = taken.getsockname()[1]
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(score(f"http://127.0.0.1:{port}/a", ["2"], 30.0)))
        forward = ThreadingHTTPServer(("127.0.0.1", 0), server.http.RequestHandlerClass, bind_and_activate=False)
        forward.socket.close()
        forward.socket = taken
        forward.server_address, forward.server_name, forward.server_port = ("127.0.0.1", port), "localhost", port
        thread.start()
        assert tried.wait(30)
        forward.server_activate()
        forward.handle_request()
        thread.join()
        forward.server_close()
    assert found[0].values["a"] == [1.0]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            (500, {}),
            r"answered 500 Internal Server Error \(\d+ tries in 0\.5 s\); see to the server, or raise reward_dead",
        ),
        ((200, CUT), r"answered with what is not JSON or was cut off, 16 bytes \(\d+ tries in 0\.5 s\)"),
        ((404, b"no such\x1b[2J page"), r"answered 404 Not Found: no such\S+ page; name the address that answers 200"),
        ((307, b""), r"answered 307 Temporary Redirect; name the address that answers 200"),
        ((200, {"rewards": [1.0]}), r"gave 1 rewards for 2 completions; it must give one for each"),
        ((200, {"rewards": [1.0, "x"]}), r"gave the reward 'x'; each must be a number or null"),
        ((200, {"rewards": [[1.0], [0.0]]}), r"gave the reward \[1\.0\]; each must be a number or null"),
        ((200, {"score": [1.0, 0.0]}), r'answered without a list of "rewards"; it must send'),
        ((200, [1.0, 0.0]), r'answered without a list of "rewards"'),
        ((200, {"rewards": [1, 0], "extra_logs": {"a": [1]}}), r"gave 1 'a' for 2 completions"),
        (
            (200, claimed(b"{}", MAX_BYTES + 1)),
            r"answered with 16,777,217 bytes, limit 16,777,216; let it send rewards",
        ),
    ],
)
def test_what_does_not_pass_ends_the_run_with_one_sentence(server: RewardServer, answer: Answer, message: str) -> None:
    server.answer = in_turn(answer)
    with pytest.raises(RewardError) as error:
        score(f"{server.url}?key=hidden", ["2", "3"], deadline_s=0.5)
    assert re.match(re.escape(server.url) + " " + message, str(error.value)), str(error.value)
    assert "\n" not in str(error.value) and "hidden" not in str(error.value) and "\x1b" not in str(error.value)


def test_a_body_without_a_length_is_not_read_beyond_the_limit() -> None:
    """A socket that sends for ever."""
    sent = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.recv(65536)
                connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
                while True:
                    connection.sendall(b" " * 2**20)
                    sent.append(2**20)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RewardError, match="answered with more than 16,777,216 bytes"):
            score(f"http://127.0.0.1:{listener.getsockname()[1]}/", ["2"], deadline_s=60.0)
        thread.join()
    assert sum(sent) < 3 * MAX_BYTES


@pytest.mark.parametrize("trickles", [False, True])
def test_a_server_that_does_not_answer_costs_the_deadline(trickles: bool) -> None:
    """Also one that sends a byte now and then, which keeps a socket from its own timeout."""
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(b"HTTP/1.0 200 OK\r\nX: ")
                while not over.wait(0.1):
                    connection.sendall(b"x" if trickles else b"")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(RewardError, match=r"/slow (did not answer in time|had not answered after 0\.5 s)"):
            score(f"http://127.0.0.1:{listener.getsockname()[1]}/slow", ["2"], deadline_s=0.5)
        over.set()
        thread.join()


def test_a_signal_ends_the_wait_for_a_server(server: RewardServer) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        server.released.wait()
        return RewardServer.right(body)

    class Told(Exception): ...

    def poll() -> None:
        if server.seen:
            raise Told

    server.answer = answer
    with pytest.raises(Told):
        score(server.url, ["2"], deadline_s=300.0, poll=poll)


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("http://h:80/get_reward", "get_reward"),
        ("https://h/", "remote"),
        ("http://h", "remote"),
        ("http://h/a/b?c=d/e", "b"),
    ],
)
def test_the_reward_is_called_after_the_end_of_its_path(spec: str, name: str) -> None:
    assert load_reward(spec).name == name


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("http://", "reward 'http://' is not an address; write http://host:port/path"),
        ("http://h:99999/x", "is not an address"),
        ("http://h/x:batch_size=0", "batch_size and concurrency of reward 'http://h/x' must be at least 1"),
        ("http://h/x:retries=3", "reward 'x' has no option 'retries'"),
    ],
)
def test_a_wrong_address_or_option_is_refused(spec: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load_reward(spec)


@pytest.mark.parametrize("spec", ["http://me:s3cret@h:80/x", "https://s3cret@h", "http://me:s3cret=1@h/x:batch_size=3"])
def test_a_password_in_an_address_is_refused_and_shown_nowhere(
    spec: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from gruppo.cli.main import run

    (tmp_path / "run.yaml").write_text(json.dumps({"rewards": [spec], "loss": 3}))
    for refuse in (
        lambda: load_reward(spec),
        lambda: RewardScorer([spec]),
        lambda: TrainConfig(rewards=(spec,)),
        lambda: GRPOTrainer(TrainConfig(output=str(tmp_path / "run")), rewards=[spec]),
        lambda: run(["train", "--rewards", spec, "--output", str(tmp_path / "run")]),
        lambda: run(["train", "--config", str(tmp_path / "run.yaml")]),
    ):
        with pytest.raises(InputError) as error:
            refuse()
        assert "s3cret" not in str(error.value)
    assert run(["reward", "check", spec]) == 2
    captured = capsys.readouterr()
    assert "s3cret" not in captured.out + captured.err and "holds a user or a password" in captured.out
    assert not (tmp_path / "run").exists()


def digits(body: dict[str, Any]) -> Answer:
    return 200, {"rewards": [len(query) % 3 for query in body["query"]]}


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_a_run_is_rewarded_by_a_server(server: RewardServer, tmp_path: Path, max_staleness: int) -> None:
    server.answer = digits
    groups: list[Group] = []
    config = TrainConfig.read(
        {
            "rewards": [{f"{server.url}": {"batch_size": 5}}, "exact_match"],
            "correct_by": "exact_match",
            "steps": 2,
            "prompts_per_step": 4,
            "group_size": 4,
            "max_new_tokens": 4,
            "eval_prompts": 3,
            "max_staleness": max_staleness,
            "output": str(tmp_path / "run"),
        }
    )
    trainer = GRPOTrainer(config, callbacks=[lambda t, step, metrics: groups.extend(t.groups)], quiet=True)
    result = trainer.train()
    rollouts = [(g.prompt.text, r) for g in groups for r in g.rollouts]
    assert len(rollouts) == 32
    assert all(r.rewards["get_reward"] == len(text + r.trajectory.text) % 3 for text, r in rollouts)
    assert 0 <= result.metrics[-1]["reward/get_reward/mean"] <= 2
    assert max(len(body["query"]) for body in server.seen) == 5
    assert {body["path"] for body in server.seen} == {"/get_reward"}


def test_a_run_whose_server_is_gone_ends_saved_and_goes_on(server: RewardServer, tmp_path: Path) -> None:
    server.answer = digits
    config = TrainConfig(
        rewards=(server.url,),
        reward_deadline=0.5,
        steps=4,
        prompts_per_step=4,
        group_size=4,
        max_new_tokens=4,
        eval_prompts=0,
        output=str(tmp_path / "run"),
    )

    def break_after_two(trainer: GRPOTrainer, step: int, metrics: dict[str, float]) -> None:
        if step == 2:
            server.answer = in_turn((503, {}))

    with pytest.raises(RewardError, match=r"/get_reward answered 503 Service Unavailable \(\d+ tries in 0\.5 s\)"):
        GRPOTrainer(config, callbacks=[break_after_two], quiet=True).train()
    server.answer = digits
    again = GRPOTrainer(TrainConfig.of_run(tmp_path / "run"), resume=True, quiet=True)
    assert again.step_number == 2
    assert again.train().step == 4


def test_a_server_that_is_down_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/x"
        with pytest.raises(RewardError, match=re.escape(f"{url} cannot be asked: [Errno 111] Connection refused")):
            GRPOTrainer(TrainConfig(rewards=(url,), reward_deadline=0.5, output=str(tmp_path / "run")), quiet=True)
    assert not (tmp_path / "run").exists()


def test_reward_check_tries_a_server(server: RewardServer, capsys: pytest.CaptureFixture[str]) -> None:
    from gruppo.cli.main import run

    server.answer = lambda body: (200, {"rewards": [float(q.endswith("\n42")) for q in body["query"]]})
    assert run(["reward", "check", server.url, "--template", "So:\\n{answer}"]) == 0
    lines = {
        line.split("|")[1].strip(): line.split("|")[2].strip()
        for line in capsys.readouterr().out.splitlines()
        if "|" in line
    }
    assert (lines["good"], lines["bad"]) == ("1", "0")
