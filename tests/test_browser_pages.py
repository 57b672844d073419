"""Every kind of page in a real browser, at 1280 and 400 pixels, light and dark; and what a first screen tells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsers import Open
from planted_folders import FOLDERS, capture, healthy, write
from synthetic_reports import planted_run
from test_browser_verdicts import OUTSIDE, contrast

from attn_diag.analyses.comparison.diff import compare
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.analyses.paper.figures import paper_figures
from attn_diag.captures.loading import load
from attn_diag.reports import html_document, html_fragment
from attn_diag.reports.head_labels import LETTERS
from attn_diag.reports.renderers import page as page_of
from attn_diag.results.diagnosis import Diagnosis

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]

HEIGHT = 860
# What a finding is asked: what, since when, how sure, how much it matters, what to do next.
ASKED = ("Measured", "Since when", "How sure", "For training", "Next")
# Each finding's questions with the lower end of their answers; and where its heading ends.
ANSWERS = """() => [...document.querySelectorAll(".finding")].map((card) => [
    card.querySelector("h2").getBoundingClientRect().bottom,
    Object.fromEntries([...card.querySelectorAll("dl > div")].map((line) =>
        [line.querySelector("dt").innerText, line.querySelector("dd").getBoundingClientRect().bottom]))])"""
# Whatever stands on a colour of a label: its kind, its colour and what is written on it.
LABELLED = """(kinds) => [...document.querySelectorAll(".chip, .swatch, .when td[class]:not(.few)")]
    .map((e) => [[...kinds, "none"].find((kind) => e.classList.contains(kind)), e.querySelector(":scope > a") ?? e, e])
    .map(([kind, text, ground]) => [kind, getComputedStyle(text).color, getComputedStyle(ground).backgroundColor])"""
MAP_FILLS = """() => [...document.querySelectorAll("#map svg path[fill^=rgb]")].map((e) => e.getAttribute("fill"))"""
LETTERS_OF_CHIPS = """() => [...document.querySelectorAll(".chip[data-letter]")]
    .map((e) => getComputedStyle(e, "::before").content.replaceAll('"', ""))"""
# How red-, green- and blue-blind readers see linear RGB (Machado, Oliveira & Fernandes 2009, severity 1).
BLIND = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}

Pages = Callable[[str], Path]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """The file of a page by its kind, each made once."""
    folder = tmp_path_factory.mktemp("pages")

    @cache
    def found(name: str) -> Diagnosis:
        return inspect_captures([load(f) for f in sorted(write(folder, name).glob("*.safetensors"))], device="cpu")

    def text(kind: str) -> str:
        if kind == "paper":
            found("two_findings")
            return page_of(paper_figures([load(f) for f in sorted((folder / "two_findings").glob("*.safetensors"))]))
        if kind == "comparison":
            before = [capture(healthy, layer=layer, step=step) for layer in (1, 3) for step in (100, 200, 300)]
            return page_of(compare(inspect_captures(before, device="cpu"), found("one_finding")))
        if kind == "notebook":
            diagnosis = found("two_findings")
            body = html_fragment(diagnosis)
            return f'<html data-ready="yes"><meta name="viewport" content="width=device-width"><main>{body}</main>'
        return html_document(found(kind))

    @cache
    def made(kind: str) -> Path:
        if kind == "gallery":
            return Path(__file__).parent.parent / "reports" / "gallery" / "failing_run.html"
        file = folder / f"{kind}.html"
        file.write_text(text(kind), encoding="utf-8")
        return file

    return made


def opened(open_page: Open, file: Path, **options: Any) -> Any:
    page = open_page(file, **options)
    page.set_viewport_size({"width": options.get("width", 1280), "height": HEIGHT})
    return page


@pytest.mark.parametrize("kind", [*FOLDERS, "paper", "gallery", "notebook", "comparison"])
def test_nothing_is_cut_off_or_pale(kind: str, pages: Pages, open_page: Open) -> None:
    # What fits does so in any colours.
    for width, scheme in ((1280, "dark"), (400, "light")):
        page = opened(open_page, pages(kind), width=width, color_scheme=scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, (width, scheme)
        assert not page.evaluate(OUTSIDE), (width, scheme)
        assert "[object" not in page.locator("main").inner_text()
        labelled = page.evaluate(LABELLED, list(LETTERS))
        assert bool(labelled) == (kind in FOLDERS or kind == "comparison")
        assert all(contrast([text, ground]) >= 4.5 for _, text, ground in labelled), (width, scheme, labelled)


@pytest.mark.parametrize("kind", FOLDERS)
def test_the_first_screen_tells_it_all(kind: str, pages: Pages, open_page: Open) -> None:
    page = opened(open_page, pages(kind))
    cards = page.evaluate(ANSWERS)
    assert 1 <= len(cards) <= 2
    chips = page.locator(".finding .chips").count()
    nothing = kind in ("clean", "undecided", "emulated")
    for heading, answers in cards:
        assert heading < HEIGHT
        if nothing:
            assert {"Next"} <= set(answers)
        else:
            assert set(ASKED) <= set(answers)
        assert max(answers.values()) <= HEIGHT, answers
    assert chips == (0 if kind == "emulated" else len(cards))
    # Where it lies is there too: the table over steps or the map.
    first = page.locator("#when, #overview").first.bounding_box()
    assert first["y"] + min(first["height"], 160) <= HEIGHT


@pytest.mark.parametrize("steps", [(100,), (100, 200, 300, 400, 500)], ids=["one step", "720 heads"])
def test_two_findings_of_a_large_model_are_on_the_first_screen(steps: tuple[int, ...], show: Open) -> None:
    page = show(html_document(planted_run(12, 12, steps, {3: (100, "lossy"), 7: (steps[-1], "biased")})))
    page.set_viewport_size({"width": 1280, "height": HEIGHT})
    cards = page.evaluate(ANSWERS)
    assert len(cards) == 2
    assert all(set(ASKED) <= set(answers) and max(answers.values()) <= HEIGHT for _, answers in cards)


def test_the_first_screen_is_checked(pages: Pages, open_page: Open) -> None:
    """Stacked, as they were, two findings do not fit."""
    page = opened(open_page, pages("two_findings"))
    page.locator(".opening").evaluate("e => e.classList.remove('several')")
    assert max(bottom for _, answers in page.evaluate(ANSWERS) for bottom in answers.values()) > HEIGHT


@pytest.mark.parametrize("kind", [k for k in FOLDERS if k not in ("clean", "undecided", "emulated")])
def test_the_panel_opens_on_the_first_findings_worst_head(kind: str, pages: Pages, open_page: Open) -> None:
    page = opened(open_page, pages(kind))
    wanted = page.locator(".finding .look a").first.get_attribute("href")
    assert page.locator(".which a:not(.term)").get_attribute("href") == wanted
    assert page.locator("#heads tr.chosen th a").get_attribute("href") == wanted
    # Under the same label everywhere.
    label = page.locator(".finding .chip").first.inner_text()
    assert label in page.locator(".which .chip").all_inner_texts()
    assert label in page.locator("#head h2 .chip").all_inner_texts()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_label_has_one_colour_and_its_letter(scheme: str, pages: Pages, open_page: Open) -> None:
    seen: dict[str, set[str]] = {}
    for kind in ("two_findings", "growing", "wrong_mask", "nan_at_a_step", "ill_conditioned"):
        page = opened(open_page, pages(kind), color_scheme=scheme)
        here: dict[str, set[str]] = {}
        for label, _, ground in page.evaluate(LABELLED, list(LETTERS)):
            here.setdefault(label, set()).add(ground)
        # The map's cells have them too.
        assert set(page.evaluate(MAP_FILLS)) <= set().union(*here.values()) | {ground_of(page)}
        letters = page.evaluate(LETTERS_OF_CHIPS)
        assert letters
        assert set(letters) <= set(LETTERS.values())
        for label, grounds in here.items():
            seen.setdefault(label, set()).update(grounds)
    assert {*seen} >= {*LETTERS}
    assert all(len(grounds) == 1 for grounds in seen.values()), seen
    assert len(set(LETTERS.values())) == len(LETTERS)
    rgb = {label: colour_of(grounds.pop()) for label, grounds in seen.items() if label != "none"}
    for blindness, least in (("protan", 15.0), ("deutan", 15.0), ("tritan", 10.0)):
        apart = {
            (a, b): float(np.linalg.norm(lab(rgb[a], blindness) - lab(rgb[b], blindness)))
            for a, b in itertools.combinations(rgb, 2)
        }
        # A just noticeable difference is about 2.3 (Mahy et al. 1994).
        assert min(apart.values()) >= least, (blindness, min(apart, key=lambda pair: apart[pair]))


def ground_of(page: Any) -> str:
    return str(page.evaluate("getComputedStyle(document.querySelector('#overview')).backgroundColor"))


def colour_of(text: str) -> np.ndarray:
    return np.array([int(part) / 255 for part in text[4:-1].split(",")])


def lab(rgb: np.ndarray, blindness: str) -> np.ndarray:
    """CIE 1976 L*a*b* of an sRGB colour as it is seen."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(BLIND[blindness]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_ranks_and_open_heads_are_in_the_cells(pages: Pages, open_page: Open) -> None:
    def drawn(kind: str) -> list[str]:
        return list(opened(open_page, pages(kind)).locator("#map svg text").all_text_contents())

    assert drawn("one_rank").count("L rank 2") == 4
    held = drawn("one_tensor_rank")
    assert held.count("L r2") == 2
    assert held.count("· r0") == held.count("· r1") == held.count("· r3") == 2
    assert "rank" not in "".join(drawn("two_findings"))
    page = opened(open_page, pages("two_findings"))
    few = page.locator("table.when td.few.undecided")
    assert [text.split()[0] for text in few.all_inner_texts()] == ["?", "?"]
    assert "undecided" in page.locator("#when .legend").inner_text()


def test_a_comparison_shows_both_in_one_map(pages: Pages, open_page: Open) -> None:
    page = opened(open_page, pages("comparison"))
    tables = page.locator("table.when")
    letters = [tables.nth(i).locator("tbody td [aria-hidden]").all_inner_texts() for i in (0, 1)]
    assert [[at for at, letter in enumerate(side) if letter == "L"] for side in letters] == [[], [4, 5]]
    assert page.locator(".beside h3").all_inner_texts() == ["A", "B"]
    boxes = [tables.nth(i).bounding_box() for i in (0, 1)]
    assert boxes[0]["y"] == boxes[1]["y"] < HEIGHT / 2
    # A cell is told in words, and leads to its row.
    tables.nth(1).locator("td.lossy a").first.hover()
    assert page.locator(".when-words").inner_text() == "layer 3, step 200: 4 of 4 heads lossy."
    tables.nth(1).locator("td.lossy a").first.click()
    assert page.locator("tr:target td").first.inner_text().startswith("L3H")
    # The same colours: both legends have the same ends.
    shown = {c.get_attribute("data-chart"): c for c in page.locator("figure").all()}
    assert {name[:-2] for name in shown} == {name[:-2] for name in shown if name.endswith("-b")}
    for figure in shown.values():
        figure.scroll_into_view_if_needed()
        figure.locator("svg").wait_for()
    for name in {name[:-2] for name in shown}:
        ends = [shown[f"{name}-{side}"].locator("svg text").all_text_contents()[-2:] for side in "ab"]
        assert ends[0] == ends[1], name
