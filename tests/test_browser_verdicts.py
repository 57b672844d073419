"""What a page opens on, in a real browser: the table of verdicts, the map, the words, at 1280 and 400 pixels."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browsers import Open
from synthetic_reports import planted_run
from test_browser import contrast as wcag
from test_browser import until

from attn_diag.reports import glossary, html_document

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

# What lies outside the page's sides, though it is seen.
OUTSIDE = """() => [...document.querySelectorAll("main *, .word-tip")]
    .filter((e) => e.checkVisibility() && !e.closest(".scroll, svg, .spoken"))
    .map((e) => [e.getBoundingClientRect(), e.outerHTML.slice(0, 120)])
    .filter(([b]) => b.width && !(b.left > -1 && b.right < innerWidth + 1)).map(([, text]) => text)"""
# Words of the glossary that stand in a text but explain themselves nowhere; texts as a reader sees them.
UNEXPLAINED = """(words) => {
    const texts = document.querySelector("main").innerText.split("What the words mean")[0];
    const explained = new Set([...document.querySelectorAll("[data-term]")].map((e) => e.dataset.term));
    const said = (text) => new RegExp(`(?<![\\\\p{L}_-])${text}(?![\\\\p{L}\\\\p{M}_-])`, "u").test(texts);
    return words.filter(([key, text]) => !explained.has(key) && said(text)).map(([, text]) => text);
}"""
# The colours of every letter in the table and its legend, and of the ground below it.
COLOURS = """() => [...document.querySelectorAll("table.when td[class] a, .swatch")]
    .map((e) => [getComputedStyle(e).color, getComputedStyle(e.matches("a") ? e.parentElement : e).backgroundColor])"""
# The left and right of every label of a column.
LABELS = """all => all.map((e) => { const range = document.createRange(); range.selectNodeContents(e); return range; })
    .map((range) => range.getBoundingClientRect()).filter((b) => b.width).map((b) => [b.left, b.right])"""


def contrast(pair: list[str]) -> float:
    """WCAG 2's, of two colours as a browser tells them."""
    colours = [[int(part) for part in re.findall(r"\d+", colour)[:3]] for colour in pair]
    return wcag(*("#" + "".join(f"{part:02x}" for part in colour) for colour in colours))


@pytest.fixture(scope="module")
def text() -> str:
    return html_document(planted_run(9, 4, (100, 200, 300, 400), {3: (200, "lossy"), 7: (300, "biased")}))


def tip(page: Page) -> str | None:
    found = page.locator(".word-tip:visible")
    return found.inner_text() if found.count() else None


def test_a_page_opens_on_its_verdicts(text: str, show: Open) -> None:
    page = show(text)
    tops = [
        page.locator(part).first.bounding_box() for part in ("h1", "#when", ".finding", "#overview", "#head figure")
    ]
    heights = [box["y"] for box in tops if box]
    assert len(heights) == 5
    assert heights == sorted(heights)
    assert heights[2] < 400, "no finding on the first screen"
    # The map shows the verdicts, not an error in which one of them is invisible.
    assert page.locator("#metrics [aria-pressed=true]").inner_text() == "Verdict"
    assert page.locator("#metric-words .swatch").all_inner_texts() == ["L", "B", "·"]


def test_a_cell_opens_its_head_and_the_map_follows(text: str, show: Open) -> None:
    page = show(text)
    page.locator("table.when tbody tr", has_text="L7").locator("td").nth(2).click()
    page.locator("#head > h2", has_text="L7H").wait_for()
    assert page.locator("#choosers select").first.input_value() == "step 300"
    letters = page.locator("#map svg text").all_text_contents()
    assert letters.count("L") == letters.count("B") == 4


def test_the_table_by_keyboard(text: str, show: Open) -> None:
    page = show(text)
    page.locator("table.when a[tabindex='-1']").first.wait_for(state="attached")
    usual = page.locator(".when-words").inner_text()
    page.locator("table.when a:not([tabindex='-1'])").focus()
    # Layers in which nothing was found stand together.
    for key in ("ArrowDown",) * 3 + ("ArrowRight",) * 9:
        page.keyboard.press(key)
    assert page.locator(".when-words").inner_text() == "layer 7, step 400: 4 of 4 heads biased."
    focused = "getComputedStyle(document.activeElement)"
    assert page.evaluate(f"{focused}.outlineStyle") == "solid"
    assert page.evaluate(f"parseFloat({focused}.outlineWidth)") >= 2
    # One stop of the Tab key.
    page.keyboard.press("Tab")
    assert not page.evaluate("Boolean(document.activeElement.closest('table.when'))")
    assert page.locator(".when-words").inner_text() == usual
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    page.locator("#head > h2", has_text="L7H").wait_for()


def test_words_explain_themselves(text: str, show: Open) -> None:
    page = show(text)
    words = {word.key: word for word in glossary.TERMS}
    lossy = page.locator(".finding .term", has_text="lossy").first
    lossy.hover()
    assert tip(page) == f"{words['lossy'].name} {words['lossy'].words}"
    # The pointer may go into the explanation, and away.
    page.locator(".word-tip").hover()
    page.wait_for_timeout(400)
    assert tip(page)
    page.mouse.move(5, 5)
    until(page, "document.querySelector('.word-tip').hidden")
    lossy.focus()
    assert tip(page)
    page.keyboard.press("Escape")
    assert tip(page) is None
    address = page.url
    lossy.click()
    assert tip(page)
    assert page.url == address
    # The heading of a column stays a button.
    column = page.locator("#heads thead button", has_text="conditioning")
    column.focus()
    assert tip(page) == f"conditioning {words['conditioning'].words}"
    column.click()
    assert page.locator("#heads th[aria-sort=descending]").inner_text().startswith("conditioning")


def test_a_tap_explains(text: str, show: Open) -> None:
    page = show(text, width=400, has_touch=True)
    page.locator(".finding .term").first.tap()
    assert tip(page)
    assert not page.evaluate(OUTSIDE)


def test_no_word_is_left_unexplained(text: str, show: Open) -> None:
    page = show(text)
    words = [[f"word-{word.key}", spelled] for word in glossary.TERMS for spelled in word.spellings]
    assert page.evaluate(UNEXPLAINED, words) == []
    page.evaluate("document.querySelectorAll('[data-term]').forEach((e) => e.removeAttribute('data-term'))")
    assert {"delta", "dQ", "lossy", "noise factor"} <= set(page.evaluate(UNEXPLAINED, words)), "the check can fail"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_nothing_leaves_the_page(text: str, show: Open, width: int, scheme: str) -> None:
    page = show(text, width=width, color_scheme=scheme)
    for term in page.locator(".finding .term, .lead .term").all():
        term.hover()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert not page.evaluate(OUTSIDE)
    # WCAG 2's contrast of a text.
    found = [contrast(pair) for pair in page.evaluate(COLOURS)]
    assert len(found) > 20
    assert min(found) >= 4.5


def test_a_long_run_fits_a_phone(show: Open) -> None:
    page = show(html_document(planted_run(3, 1, tuple(range(0, 6000, 50)), {1: (2500, "wrong")})), width=400)
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    assert not page.evaluate(OUTSIDE)
    boxes = page.locator("table.when thead span").evaluate_all(LABELS)
    assert len(boxes) >= 2
    assert all(a[1] < b[0] for a, b in pairwise(boxes)), "labels of steps overlap"


def test_without_scripts_the_verdicts_and_the_words_are_there(text: str, browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(text, encoding="utf-8")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator(".finding h2").all_inner_texts() == [
        "Layer 3, all 4 heads, from step 200 on",
        "Layer 7, all 4 heads, from step 300 on",
    ]
    assert page.locator("table.when td.lossy").count() == 3
    assert page.locator("#words dt:visible").count() == len(glossary.TERMS)
    context.close()
