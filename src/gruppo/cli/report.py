"""`gruppo report` and `gruppo view`: a run as a page, in a file or live."""

import os
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

from gruppo.cli.arguments import Arguments, HomePath, Word, parse
from gruppo.errors import InputError
from gruppo.run.reader import RunReader

FILE = "report.html"


class ReportArguments(Arguments):
    """Write a run as one HTML file that needs no network: charts by question, the ledger of tokens, and its
    completions token by token. Several runs are overlaid, with the difference of their options.

    gruppo report runs/first
    gruppo report runs/first runs/second --output both.html"""

    runs: Annotated[tuple[HomePath, ...], Word("RUN", is_positional=True)] = ()
    """The run directories."""
    output: Annotated[HomePath | None, Word("FILE")] = None
    """The file. Without it: report.html in the run directory, or here for several runs."""


def report(arguments: Sequence[str]) -> int:
    given = parse(ReportArguments, arguments, "report")
    runs = readers(given.runs)
    print(f"report: {write_report(runs, given.output)}")
    return 0


def readers(paths: Sequence[Path]) -> list[RunReader]:
    """The runs at these paths, each checked."""
    if not paths:
        raise InputError("no run is named; give one or more run directories, as in: gruppo report runs/first")
    from gruppo.report.charts import MOST_RUNS

    if len(paths) > MOST_RUNS:
        raise InputError(f"{len(paths)} runs are named, and a page can tell {MOST_RUNS} apart; name fewer")
    runs = [RunReader(path) for path in paths]
    for run in runs:
        run.check()
    return runs


def write_report(runs: Sequence[RunReader], output: Path | None = None) -> str:
    """Write the page of the runs; returns the address with which a browser opens it."""
    from gruppo.doctor import summary
    from gruppo.report.page import report_page
    from gruppo.weights.files import replace_file

    path = output or (runs[0].path / FILE if len(runs) == 1 else Path(FILE))
    found = [summary(run) for run in runs]
    page = report_page(runs, states=[state for state, _ in found], findings=[findings for _, findings in found])
    try:
        if output is None:
            replace_file(path, page.encode())
        elif output.exists() and not output.is_file():  # such as /dev/stdout
            output.write_text(page, encoding="utf-8")
        else:  # a link that the user names is followed, one in a run directory is not
            replace_file(Path(os.path.realpath(output)), page.encode())
    except OSError as error:
        raise InputError(f"--output {path} cannot be written: {error}; name another file") from error
    return path.resolve().as_uri()


class ViewArguments(Arguments):
    """Serve the page of a run on this machine until Ctrl-C, also while the run is training. Steps load when you open
    them, so a run may have any size. The link has a secret: others on the machine cannot open it.

    gruppo view runs/first
    gruppo view runs/first runs/second --open"""

    runs: Annotated[tuple[HomePath, ...], Word("RUN", is_positional=True)] = ()
    """The run directories."""
    port: int = 0
    """The port on the loopback interface; 0: a free one."""
    open: bool = False
    """Open the link in a browser."""
    until_closed: bool = False
    """Serve until standard input ends, for a program that started this one."""


@contextmanager
def _opened(url: str) -> Iterator[None]:
    """A browser at an address. What a program is called with can be read by all users of a machine: the address, which
    has the secret, is in a file of this user's instead, which sends the browser on."""
    with tempfile.NamedTemporaryFile("w", prefix="gruppo-view-", suffix=".html") as file:  # of mode 600
        file.write(f'<script>location.replace("{url}")</script>\n')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield


def view(arguments: Sequence[str]) -> int:
    from gruppo.doctor import summary
    from gruppo.report.view_server import ViewServer

    given = parse(ViewArguments, arguments, "view")
    server = ViewServer(readers(given.runs), port=given.port, summary=summary)
    server.start()
    try:
        print(f"view: {server.url}", flush=True)
        with _opened(server.url) if given.open else nullcontext():
            if given.until_closed:
                sys.stdin.read()
            else:
                threading.Event().wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
    return 0
