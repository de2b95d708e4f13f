"""Server of `gruppo view`: the live page of a run, for this machine only.

It listens on the loopback interface and answers GET and HEAD, for the Host it was opened with and below a random token
in the path, which other users and web pages do not know. Nothing in a path is a file name.
"""

import hmac
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gruppo.doctor import Finding, State
from gruppo.errors import GruppoError, InputError
from gruppo.report.data import TokenTexts, step_data, step_rows
from gruppo.report.page import chart_data, ledger_data, live_page, page_data, to_json, vega_script
from gruppo.run.lock import is_owned
from gruppo.run.reader import RunReader

LOOPBACK = "127.0.0.1"
JSON, SCRIPT = "application/json", "text/javascript; charset=utf-8"


class ViewServer(ThreadingHTTPServer):
    """Server of the page of some runs, at `url`.

    Args:
        port: 0 for any free port.
        summary: returns the state and findings of a run, as `report_page` takes them.
    """

    daemon_threads = True

    def __init__(
        self,
        runs: Sequence[RunReader],
        *,
        port: int = 0,
        summary: Callable[[RunReader], tuple[State, Sequence[Finding]]] | None = None,
    ) -> None:
        self.runs = list(runs)
        self.token = secrets.token_urlsafe(24)
        self.texts = [TokenTexts(run) for run in self.runs]
        self.summary = summary
        self._summaries: tuple[str, list[State], list[Sequence[Finding]]] = ("", [], [])
        self._made: dict[str, tuple[str, str]] = {}
        """Responses shared by all browsers, each with the signature of the records behind it."""
        self._making = threading.Lock()
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except (OSError, OverflowError) as error:
            raise InputError(f"port {port} of {LOOPBACK} cannot be used: {error}; give another --port") from error
        self.hosts = {f"{name}:{self.server_port}" for name in (LOOPBACK, "localhost")}
        self.url = f"http://{LOOPBACK}:{self.server_port}/{self.token}/"

    def start(self) -> None:
        """Serve in threads until `close`."""
        threading.Thread(target=self.serve_forever, name="gruppo-view", daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def answer(self, path: str, query: str) -> tuple[str, str] | None:
        """Content type and text at a path below the token; None if there is nothing, or nothing new."""
        if path == "":
            return "text/html; charset=utf-8", live_page(f"{', '.join(run.path.name for run in self.runs)} · gruppo")
        if path == "vega.js":
            return SCRIPT, vega_script()
        if path == "data.json" and parse_qs(query).get("seen") == [self.signature()]:
            return None
        if path in ("data.json", "charts.json"):
            return JSON, self._shared(path, self._data if path == "data.json" else self._charts)
        found = re.fullmatch(r"(step|rows)/(\d{1,4})/(\d{1,9})\.json", path, re.ASCII)
        if found is None or int(found[2]) >= len(self.runs):
            raise LookupError
        run, step = self.runs[int(found[2])], int(found[3])
        if step not in run.completion_steps():
            raise LookupError
        content = step_data(run, step, self.texts[int(found[2])]) if found[1] == "step" else step_rows(run, step)
        return JSON, to_json(content)

    def _shared(self, path: str, make: Callable[[str], str]) -> str:
        """Result of `make` for the current records, computed once for all waiting browsers."""
        with self._making:
            seen = self.signature()
            if self._made.get(path, ("", ""))[0] != seen:
                self._made[path] = (seen, make(seen))
            return self._made[path][1]

    def _data(self, seen: str) -> str:
        _, states, findings = self._summed_up(seen)
        return to_json(page_data(self.runs, findings=findings, states=states) | {"live": True, "seen": seen})

    def _charts(self, seen: str) -> str:
        _, _, findings = self._summed_up(seen)
        return to_json(chart_data(self.runs, findings=findings) | {"ledgers": list(map(ledger_data, self.runs))})

    def _summed_up(self, signature: str) -> tuple[str, list[State], list[Sequence[Finding]]]:
        """States and findings of the runs, computed once per signature."""
        if self.summary is not None and self._summaries[0] != signature:
            states, findings = zip(*map(self.summary, self.runs), strict=True)
            self._summaries = (signature, list(states), list(findings))
        return self._summaries

    def signature(self) -> str:
        """Text that changes whenever the records of the runs do."""
        parts: list[Any] = []
        for run in self.runs:
            names = ("metrics.jsonl", "timings.jsonl", "events.jsonl", "status.json", "lock", "completions")
            for name in names:
                try:
                    found = (run.path / name).stat()
                    parts.append(f"{found.st_size:x}.{found.st_mtime_ns:x}")
                except OSError:
                    parts.append("-")
            parts.append(is_owned(run.path))  # a killed run leaves its files as they are
        return "_".join(map(str, parts))


class _Handler(BaseHTTPRequestHandler):
    server: ViewServer  # pyright: ignore[reportIncompatibleVariableOverride]  # what makes it
    server_version, sys_version = "gruppo", ""
    default_request_version = "HTTP/1.0"  # an unreadable request gets a status too
    timeout = 30

    def do_GET(self) -> None:
        if self.headers.get("Host") not in self.server.hosts:
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", "this server only answers on the loopback interface")
        try:
            parts = urlsplit(self.path)
        except ValueError as error:  # as of http://[
            return self._send(HTTPStatus.BAD_REQUEST, "text/plain", f"not an address: {error}")
        token, slash, path = parts.path.removeprefix("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "not found; open the full address that was printed")
        if not slash:  # links on the page are relative
            return self._send(HTTPStatus.MOVED_PERMANENTLY, "text/plain", "", Location=f"/{self.server.token}/")
        try:
            answer = self.server.answer(path, parts.query)
        except LookupError:
            return self._send(HTTPStatus.NOT_FOUND, "text/plain", "not found")
        except GruppoError as error:  # damaged, or still being written
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", str(error))
        if answer is None:
            return self._send(HTTPStatus.NO_CONTENT, "text/plain", "")
        self._send(HTTPStatus.OK, *answer)

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.close_connection = True  # the body is not read
        self._send(HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", "this server only shows a run", Allow="GET, HEAD")

    do_PUT = do_DELETE = do_PATCH = do_OPTIONS = do_POST

    def _send(self, status: HTTPStatus, kind: str, text: str, **more: str) -> None:
        content = text.encode("utf-8", "backslashreplace")
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            **more,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # the browser left
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: the terminal belongs to the run."""
