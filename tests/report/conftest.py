"""A browser for tests of pages, and a run of the demo that they look at."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import Open, Opened

from gruppo.cli.main import run as run_command
from gruppo.run.reader import RunReader

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.browser)
            if not re.search("browser|clock", config.option.markexpr):
                item.add_marker(pytest.mark.skip(reason="takes minutes; `make test-browser` runs it"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install 'gruppo[dev]'")
    with sync_api.sync_playwright() as playwright:
        found = next(filter(None, map(shutil.which, NAMES)), playwright.chromium.executable_path)
        if not Path(found).exists():
            pytest.skip("needs Chromium: install one, or run `playwright install chromium`")
        browser = playwright.chromium.launch(executable_path=found)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens an address and waits until the page is ready."""
    contexts = []

    def opened(address: str, *, ready: bool = True, **options: Any) -> Opened:
        context = browser.new_context(**({"viewport": {"width": 1280, "height": 900}} | options))
        contexts.append(context)
        made = Opened(context.new_page())
        made.page.on("console", lambda m: made.errors.append(m.text) if m.type in ("error", "warning") else None)
        made.page.on("pageerror", lambda error: made.errors.append(str(error)))
        made.page.on("request", lambda request: made.requests.append(request.url))
        made.page.goto(address)
        if ready:
            made.page.wait_for_selector("html[data-ready]", timeout=20_000)
        return made

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> RunReader:
    """A demo of thirty steps, of two updates each, so that ratios are not 1."""
    output = tmp_path_factory.mktemp("demo") / "first"
    options = "--steps 30 --prompts-per-step 8 --group-size 4 --epochs-per-batch 2 --beta 0.01 --clip-range 0.01 0.01"
    small = "--eval-prompts 32 --eval-every 10 --completions-every 10 --no-tensorboard --threads 1"
    assert run_command(["demo", *options.split(), *small.split(), "--output", str(output)]) == 0
    return RunReader(output)


@pytest.fixture(scope="session")
def demo_report(demo_run: RunReader) -> str:
    """The address of the report that the demo wrote."""
    return (demo_run.path / "report.html").resolve().as_uri()
