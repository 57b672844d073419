"""Pictures of the report for the README: first screen, a head's details, and dark.

python benchmarks/make_pictures.py reports/pictures      (needs playwright and Chromium in PATH)
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from measuring import CAPTURES
from playwright.sync_api import sync_playwright

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.loading import load
from attn_diag.reports import html_document


def main(folder: Path) -> None:
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    program = shutil.which("chromium") or shutil.which("google-chrome")
    with TemporaryDirectory() as temporary, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        for name, capture, scheme, place in (
            ("first", "kernels_pair_T512", "light", None),
            ("details", "failing_step500_L2H7", "light", ".figures"),
            ("dark", "kernels_pair_T512", "dark", ".figures"),
        ):
            file = Path(temporary) / f"{name}.html"
            # From where the captures lie: the page names a capture as it was given.
            with contextlib.chdir(CAPTURES):
                diagnosis = inspect_captures([load(f"{capture}.safetensors")])
            file.write_text(html_document(diagnosis), encoding="utf-8")
            page = browser.new_page(viewport={"width": 1200, "height": 860})
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-ready=yes]", state="attached")
            if place:
                page.locator(place).first.evaluate("e => scrollTo(0, e.getBoundingClientRect().top + scrollY - 40)")
                page.wait_for_timeout(500)
            page.screenshot(path=folder / f"{name}.png")
            page.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
