"""Fixtures of tests in a real browser: one for all of them, pages opened in it, and no error or request unnoticed.

Needs playwright and a Chromium in PATH; skipped without, unless ATTN_DIAG_BROWSER=required.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

REQUIRED = os.environ.get("ATTN_DIAG_BROWSER") == "required"
Open = Callable[..., "Page"]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        program = None
    if program is None:
        why = "needs playwright and Chromium in PATH"
        if REQUIRED:
            pytest.fail(f"{why}, and ATTN_DIAG_BROWSER=required")
        pytest.skip(why)
    with sync_playwright() as playwright:
        # The sandbox needs privileges that containers lack; the only pages opened are our own.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens a file; at the end the test fails for any error in the console or the page, and any other request."""
    contexts, faults = [], []

    def opened(file: Path, *, width: int = 1280, fragment: str = "", **options: Any) -> Page:
        options.setdefault("reduced_motion", "reduce")
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("console", lambda m: faults.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: faults.append(f"page: {error}"))
        page.on("request", lambda r: faults.append(f"request: {r.url[:80]}") if not own(r.url, file) else None)
        page.on("dialog", lambda dialog: faults.append(f"dialog: {dialog.message}"))
        page.goto(f"{file.as_uri()}{fragment}")
        page.wait_for_selector("html[data-ready=yes]", state="attached")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not faults, "; ".join(faults)


@pytest.fixture
def show(tmp_path: Path, open_page: Open) -> Open:
    """Opens a page of this text."""

    def shown(text: str, **options: Any) -> Page:
        file = tmp_path / "page.html"
        file.write_text(text, encoding="utf-8", newline="")
        return open_page(file, **options)

    return shown


def own(url: str, file: Path) -> bool:
    # A saved file's address is one of the page's own memory.
    return url.partition("#")[0] == file.as_uri() or url.startswith("blob:")
