"""Writes pictures of pages, in Chromium: the report of a demo run, light, dark and narrow, and a replayed step.

`make screenshots` runs it.
"""

import shutil
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gruppo.cli.main import run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

FOLDER = Path(__file__).parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DEMO = "--epochs-per-batch 2 --beta 0.01 --clip-range 0.05 0.05 --no-tensorboard --output"
TRAIN = "--minibatches 4 --epochs-per-batch 2 --max-new-tokens 4 --lr 3e-4 --steps 1 --no-tensorboard --output"
VIEW = "document.getElementById('v-legend').scrollIntoView()"

SHOTS: dict[str, tuple[Literal["light", "dark"], tuple[int, int], str]] = {
    "report_light": ("light", (1280, 940), "scrollTo(0, 0)"),
    "report_dark": ("dark", (1280, 940), VIEW),
    "report_narrow": ("light", (400, 820), VIEW),
}


def main() -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        demo, first, replayed = (Path(folder) / name for name in ("demo", "first", "replay.html"))
        _run("demo", *DEMO.split(), str(demo))
        _run("train", *TRAIN.split(), str(first))
        _run("replay", str(first), "--step", "1", "--loss", "gspo", "--page", str(replayed))
        browser = playwright.chromium.launch(executable_path=next(filter(None, map(shutil.which, NAMES)), None))
        for name, (scheme, (width, height), scroll) in SHOTS.items():
            page = _opened(browser, demo / "report.html", scheme, width, height)
            page.wait_for_selector(".plot[data-drawn]")
            page.evaluate("viewer.go(30).then(() => document.querySelectorAll('.strip')[6].firstChild.focus())")
            page.wait_for_timeout(1000)
            page.evaluate(scroll)
            _shoot(page, name)
        page = _opened(browser, replayed, "light", 1180, 1130)
        page.click(".top-tokens a")
        page.wait_for_timeout(500)
        page.evaluate("document.getElementById('replay').scrollIntoView()")
        _shoot(page, "replay")
        browser.close()


def _run(*words: str) -> None:
    if run(list(words)):
        sys.exit(f"gruppo {words[0]} did not end well")


def _opened(browser: "Browser", file: Path, scheme: Literal["light", "dark"], width: int, height: int) -> "Page":
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready]")
    return page


def _shoot(page: "Page", name: str) -> None:
    page.wait_for_timeout(500)
    page.screenshot(path=FOLDER / f"{name}.png")
    print(f"docs/figures/{name}.png")


if __name__ == "__main__":
    main()
