"""The server of `gruppo view`, over a real socket: who may read what, and what it answers."""

import http.client
import io
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partialmethod
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import pytest
from processes import wait_until
from written_runs import metrics_of, rollout, run_directory

from gruppo.cli.report import view
from gruppo.errors import InputError
from gruppo.report import view_server as report_server
from gruppo.report.view_server import ViewServer
from gruppo.run.directory import RunDirectory
from gruppo.types import Group, Prompt


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    draw = random.Random(1)
    with run_directory(tmp_path / "run", 2) as made:
        for step in (1, 2):
            made.log_metrics(step, metrics_of(step, draw))
        prompt = Prompt(token_ids=(3,), text="1+1=", columns={"answer": "2"}, index=7)
        made.write_completions(2, [Group(prompt=prompt, rollouts=tuple(rollout(prompt, draw, 4) for _ in range(3)))])
        made.set_status("running", 2)
    return made


@pytest.fixture(autouse=True)
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server looks every half second whether it is to end, for which each test would wait."""
    monkeypatch.setattr(ViewServer, "serve_forever", partialmethod(ThreadingHTTPServer.serve_forever, 0.01))


@pytest.fixture
def server(run: RunDirectory) -> Iterator[ViewServer]:
    made = ViewServer([run])
    made.start()
    yield made
    made.close()


def ask(
    server: ViewServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


def own(server: ViewServer, path: str = "") -> str:
    return urlsplit(server.url).path + path


@pytest.mark.row("R-50", "the viewer by another address of this machine")
def test_it_listens_on_the_loopback_interface_alone(server: ViewServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    found = {a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET}
    for outer in found - {"127.0.0.1"}:  # 127.0.0.2 and its like are no address of an interface
        with pytest.raises(OSError):
            socket.create_connection((outer, server.server_port), timeout=2)


def test_the_page_comes_with_headers_that_keep_it_in(server: ViewServer) -> None:
    status, headers, body = ask(server, own(server))
    assert status == 200 and body.startswith(b"<!doctype html>") and len(body) < 100_000
    assert headers["Cache-Control"] == "no-store" and headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY" and headers["Referrer-Policy"] == "no-referrer"
    assert "Access-Control-Allow-Origin" not in headers
    assert ask(server, own(server), method="HEAD")[2] == b""


@pytest.mark.row("R-50", "the viewer without its token")
@pytest.mark.parametrize("path", ["/", "/data.json", "/x/", "/../", "/%2e%2e/", "//", "/%C3%A4/"])
def test_without_the_token_there_is_nothing(server: ViewServer, path: str) -> None:
    assert ask(server, path)[0] == 404


def test_a_token_that_begins_right_is_wrong(server: ViewServer) -> None:
    assert ask(server, f"/{server.token[:-1]}/data.json")[0] == 404
    assert ask(server, f"/{server.token}x/data.json")[0] == 404
    assert len(server.token) >= 32


@pytest.mark.row("R-50", "the viewer under a name of the web")
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "localhost", "127.0.0.1:1", ""])
def test_another_host_is_refused_so_that_no_name_of_the_web_can_stand_for_this_machine(server, host) -> None:
    assert ask(server, own(server), host=host)[0] == 403


def test_localhost_with_the_port_is_a_host(server: ViewServer) -> None:
    assert ask(server, own(server), host=f"localhost:{server.server_port}")[0] == 200


@pytest.mark.row("R-50", "other methods than GET to the viewer")
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_is_answered(server: ViewServer, method: str) -> None:
    status, headers, _ = ask(server, own(server, "data.json"), method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


FILES = ("../config.yaml", "step/0/../../config.yaml", "step/0/%2e%2e/config.yaml", "config.yaml", "metrics.jsonl")
ABSENT = ("step/1/2.json", "step/0/3.json", "step/-1/2.json", "step/0/2.json/", "rows/0/%D9%A2.json", "step/0/2")


@pytest.mark.parametrize("path", [*FILES, *ABSENT])
def test_a_path_is_never_a_file_name(server: ViewServer, path: str) -> None:
    assert ask(server, own(server, path))[0] == 404


MALFORMED = [
    *(f"GET {path} HTTP/1.0".encode() for path in ("http://[", "http://[x]/", "http://a]b/", "http://[::1")),
    b"GET",
    b"GET / FTP",
    b"GET / HTTP/x",
    b"GET / HTTP/-1.0",
    b"GET / HTTP/1.0 and more",
    b"\x00\x01\x02",
    b"\x16\x03\x01\x02\x00\x01\x00",  # a browser that tries https
    b"GET / HTTP/1.0" + b"\r\na: b" * 200,
    b"TRACE / HTTP/1.0",
    b"PRI * HTTP/2.0",
]


@pytest.mark.parametrize("line", MALFORMED, ids=lambda line: repr(line[:30]))
def test_a_malformed_request_is_answered_and_nothing_is_printed(server, capfd, line: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(line + f"\r\nHost: 127.0.0.1:{server.server_port}\r\n\r\n".encode())
        connection.shutdown(socket.SHUT_WR)
        answer = connection.makefile("rb").read()
    assert re.match(rb"HTTP/1.0 (400|431|501|505) ", answer)
    assert ask(server, own(server))[0] == 200
    assert capfd.readouterr() == ("", "")


def test_steps_come_with_their_tokens_and_rows_without(server: ViewServer, run: RunDirectory) -> None:
    step = json.loads(ask(server, own(server, "step/0/2.json"))[2])
    expected = run.completions(2).to_pylist()
    (group,) = step["groups"]
    assert (group["index"], group["prompt"], json.loads(group["columns"])) == (7, "1+1=", {"answer": "2"})
    for row, made in zip(expected, group["rollouts"], strict=True):
        assert made["ids"] == row["tokens"] and made["old"] == pytest.approx(row["old_logps"], abs=5e-7)
        assert "".join(step["texts"][str(i)] for i in made["ids"]).isdigit()
    rows = json.loads(ask(server, own(server, "rows/0/2.json"))[2])
    assert [row[4] for row in rows] == [row["completion"] for row in expected]


def test_data_that_were_seen_come_again_only_once_they_have_changed(server: ViewServer, run: RunDirectory) -> None:
    status, _, body = ask(server, own(server, "data.json"))
    seen = json.loads(body)["seen"]
    assert status == 200 and json.loads(body)["runs"][0]["step"] == 2
    assert ask(server, own(server, f"data.json?seen={seen}"))[0] == 204
    run.log_metrics(3, {"reward/mean": 0.5})
    status, _, body = ask(server, own(server, f"data.json?seen={seen}"))
    assert status == 200 and json.loads(body)["runs"][0]["step"] == 3


def test_browsers_that_ask_at_once_share_what_is_made_of_the_records(
    server: ViewServer, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    together = threading.Barrier(8)
    for name in ("chart_data", "page_data"):
        make = getattr(report_server, name)

        def counted(*given: Any, name: str = name, make: Callable[..., Any] = make, **more: Any) -> Any:
            made.append(name)
            return make(*given, **more)

        monkeypatch.setattr(report_server, name, counted)

    def browser(number: int) -> tuple[int, bytes]:
        together.wait()
        status, _, body = ask(server, own(server, ("charts.json", "data.json")[number % 2]))
        return status, body

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(browser, range(8)))
    assert {status for status, _ in answers} == {200}
    assert [len({body for _, body in answers[kind::2]}) for kind in (0, 1)] == [1, 1]
    assert sorted(made) == ["chart_data", "page_data"]
    run.log_metrics(3, {"reward/mean": 0.5})
    body = ask(server, own(server, "data.json"))[2]
    assert json.loads(body)["runs"][0]["step"] == 3
    assert sorted(made) == ["chart_data", "page_data", "page_data"]


OWNER = """
import signal, sys
from gruppo.run.directory import RunDirectory
run = RunDirectory.reopen(sys.argv[1])
print("owned", flush=True)
signal.pause()
"""


def test_the_page_shows_that_a_run_was_killed(server: ViewServer, run: RunDirectory) -> None:
    """Its files stay as they were; only its process is gone."""
    with subprocess.Popen([sys.executable, "-c", OWNER, run.path], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == b"owned\n"
        first = json.loads(ask(server, own(server, "data.json"))[2])
        assert first["runs"][0]["status"] == "running"
        owner.kill()
    body = ask(server, own(server, f"data.json?seen={first['seen']}"))[2]
    assert json.loads(body)["runs"][0]["status"] == "killed"


def test_the_address_without_its_last_slash_leads_to_the_page(server: ViewServer) -> None:
    status, headers, _ = ask(server, own(server).removesuffix("/"))
    assert (status, headers["Location"]) == (301, own(server))
    status, headers, _ = ask(server, "/" + "x" * len(server.token))
    assert status == 404 and "Location" not in headers


@pytest.mark.slow
@pytest.mark.row("R-50", "arguments of the browser, which all users can read")
def test_the_browser_is_not_given_the_secret_as_an_argument(run: RunDirectory, tmp_path: Path) -> None:
    note = tmp_path / "note.json"
    browser = tmp_path / "browser"
    browser.write_text(
        f"#!{sys.executable}\nimport json, os, sys, urllib.parse\n"
        "path = urllib.parse.urlsplit(sys.argv[1]).path\n"
        "facts = [sys.argv[1:], os.stat(path).st_mode & 0o777, open(path).read(), path]\n"
        f"open({str(note) + '.new'!r}, 'w').write(json.dumps(facts))\n"
        f"os.rename({str(note) + '.new'!r}, {str(note)!r})\n"
    )
    browser.chmod(0o755)
    command = [sys.executable, "-m", "gruppo", "view", str(run.path), "--open", "--until-closed"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = os.environ | {"BROWSER": str(browser)}
    with subprocess.Popen(command, env=environment, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdin is not None and process.stdout is not None
        address = process.stdout.readline().removeprefix("view: ").strip()
        token = urlsplit(address).path.strip("/")
        wait_until(note.exists, 60)
        arguments, mode, page, path = json.loads(note.read_text())
        assert token and token not in " ".join(arguments)
        assert mode == 0o600 and f'location.replace("{address}")' in page
        process.stdin.close()
    assert process.returncode == 0 and not Path(path).exists()


def test_a_damaged_step_is_an_answer_and_not_the_end(server: ViewServer, run: RunDirectory) -> None:
    (run.path / "completions" / "step-000003.parquet").write_bytes(b"PAR1 and no more")
    status, _, body = ask(server, own(server, "step/0/3.json"))
    assert status == 500 and b"cannot be read" in body
    assert ask(server, own(server, "step/0/2.json"))[0] == 200


def test_the_charts_come_without_a_step_that_is_damaged(server: ViewServer, run: RunDirectory) -> None:
    (run.path / "completions" / "step-000003.parquet").write_bytes(b"PAR1 and no more")
    status, _, body = ask(server, own(server, "charts.json"))
    assert status == 200
    (found,) = json.loads(body)["ledgers"]
    assert found["generated"] > 0 and "step-000003.parquet cannot be read and is left out" in found["note"]


def test_a_port_in_use_is_an_error_with_a_remedy(server: ViewServer, run: RunDirectory) -> None:
    with pytest.raises(InputError, match="give another --port"):
        ViewServer([run], port=server.server_port)


class _CtrlC(io.StringIO):
    """A terminal at which Ctrl-C is pressed as soon as something is shown."""

    def flush(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_as_soon_as_the_link_is_there_ends_the_command_well(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = _CtrlC()
    monkeypatch.setattr(sys, "stdout", terminal)
    # Ignored where the tests run under nohup or in the background of a shell
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert view([str(run.path)]) == 0
    except KeyboardInterrupt:
        pytest.fail("Ctrl-C went through")
    finally:
        signal.signal(signal.SIGINT, before)
    address = urlsplit(terminal.getvalue().removeprefix("view: "))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", address.port or 0), timeout=5)
