"""Pictures of the report for the README (first screen, a head's details, dark) and for docs/concepts.md.

python benchmarks/make_pictures.py reports/pictures      (needs playwright and Chromium in PATH)
"""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from measuring import CAPTURES
from playwright.sync_api import Browser, sync_playwright

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.loading import load
from attn_diag.reports import html_document

# Figures of a head's details, by their titles; a section, where there is none.
CONCEPTS = {
    "signed-error": ("failing_step500_L2H7", "Error of O, in ulp"),
    "noise-floor": ("gpt2_step637_L2H6", "Cumulative error of delta"),
    "counterfactual": ("failing_step500_L2H7", "Is it as good as a well-rounded kernel?"),
    "fragile": ("gpt2_step731_L2H4", "Error of dQ, observed and predicted"),
    "maxima": ("kernels_pair_T512", "Multiplicity of the row maximum"),
    "delta": ("failing_step500_L2H7", "Error of dQ, observed and predicted"),
    "coherence": ("failing_step500_L2H7", "Cumulative error of delta"),
    "rounding": ("failing_step500_L2H7", "Which rounding makes the error"),
}


def page_of(capture: str, folder: Path) -> Path:
    """The report's page of a stored capture."""
    file = folder / f"{capture}.html"
    if not file.exists():
        # From where the captures lie: the page names a capture as it was given.
        with contextlib.chdir(CAPTURES):
            diagnosis = inspect_captures([load(f"{capture}.safetensors")], details=1)
        file.write_text(html_document(diagnosis), encoding="utf-8")
    return file


def concepts(browser: Browser, folder: Path, pages: Path) -> None:
    """Each concept's figure, light and dark."""
    for scheme in ("light", "dark"):
        for name, (capture, title) in CONCEPTS.items():
            page = browser.new_page(viewport={"width": 760, "height": 900}, device_scale_factor=1.5)
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light", reduced_motion="reduce")
            page.goto(page_of(capture, pages).as_uri())
            page.wait_for_selector("html[data-ready=yes]", state="attached")
            heading = page.get_by_role("heading", name=title, exact=True).first
            place = heading.locator("xpath=(ancestor::figure | self::h2/..)[last()]")
            place.scroll_into_view_if_needed()
            page.wait_for_timeout(500)
            place.screenshot(path=folder / f"{name}-{scheme}.png")
            page.close()


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
            file = page_of(capture, Path(temporary))
            page = browser.new_page(viewport={"width": 1200, "height": 860})
            page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
            page.goto(file.as_uri())
            page.wait_for_selector("html[data-ready=yes]", state="attached")
            if place:
                page.locator(place).first.evaluate("e => scrollTo(0, e.getBoundingClientRect().top + scrollY - 40)")
                page.wait_for_timeout(500)
            page.screenshot(path=folder / f"{name}.png")
            page.close()
        (folder / "concepts").mkdir(exist_ok=True)
        concepts(browser, folder / "concepts", Path(temporary))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
