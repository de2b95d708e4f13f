"""Writes the pictures of the report of a demo run, in Chromium: light, dark and narrow. `make screenshots` runs it."""

import shutil
import sys
import tempfile
from pathlib import Path

from gruppo.cli.main import run

FOLDER = Path(__file__).parent
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
DEMO = "--epochs-per-batch 2 --beta 0.01 --clip-range 0.05 0.05 --no-tensorboard --output"
VIEW = "document.getElementById('v-legend').scrollIntoView()"

SHOTS = {
    "report_light": ("light", (1280, 940), "scrollTo(0, 0)"),
    "report_dark": ("dark", (1280, 940), VIEW),
    "report_narrow": ("light", (400, 820), VIEW),
}


def main() -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        output = Path(folder) / "demo"
        if run(["demo", *DEMO.split(), str(output)]):
            sys.exit("the demo did not end well")
        browser = playwright.chromium.launch(executable_path=next(filter(None, map(shutil.which, NAMES)), None))
        for name, (scheme, (width, height), scroll) in SHOTS.items():
            page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height})
            page.goto((output / "report.html").as_uri())
            page.wait_for_selector("html[data-ready]")
            page.wait_for_selector(".plot[data-drawn]")
            page.evaluate("viewer.go(30).then(() => document.querySelectorAll('.strip')[6].firstChild.focus())")
            page.wait_for_timeout(1000)
            page.evaluate(scroll)
            page.wait_for_timeout(500)
            page.screenshot(path=FOLDER / f"{name}.png")
            print(f"docs/figures/{name}.png")
        browser.close()


if __name__ == "__main__":
    main()
