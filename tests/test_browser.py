"""The reports in a real browser: every click, key and file, without a console error or a network request.

Needs playwright and a Chromium in PATH; skipped without, unless ATTN_DIAG_BROWSER=required.
"""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import browsers
import pytest
from browsers import Open
from builders import SHARED, inspected, some, stored
from hostile import NAMES, hostile_diagnosis
from synthetic_reports import synthetic

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.reports import gallery_document, html_document
from attn_diag.reports.charts import Axis, Band, Chart, Gallery, Map, Mark, Section, Series, Tone
from attn_diag.reports.embedding import Detail
from attn_diag.reports.story import headline
from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("browser")]


@pytest.fixture
def draw(show: Open) -> Open:
    """Opens a gallery of these charts, all of them drawn."""

    def drawn(*charts: Chart, **options: Any) -> Page:
        page = show(gallery_document(Gallery("t", "l", (Section("s", charts=charts),))), **options)
        scroll_through(page)
        return page

    return drawn


@pytest.fixture(scope="session")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Diagnosis, Path]]:
    """A diagnosis by name and the page made of it, each made once."""
    folder, made = tmp_path_factory.mktemp("reports"), dict[str, tuple[Diagnosis, Path]]()

    def report(name: str) -> tuple[Diagnosis, Path]:
        if name not in made:
            found = synthetic() if name == "144" else inspected(name)
            file = folder / f"{name}.html"
            file.write_text(html_document(found), encoding="utf-8")
            made[name] = found, file
        return made[name]

    return report


Reports = Callable[[str], tuple[Diagnosis, Path]]


def head_at(diagnosis: Diagnosis, place: str) -> HeadDiagnosis:
    capture, rest = place[1:].split("o")
    observation, head = rest.split("h")
    return diagnosis.captures[int(capture)].observations[int(observation)].heads[int(head)]


def title(page: Page) -> str:
    return page.locator("#head > h2").inner_text()


def until(page: Page, condition: str, arg: Any = None) -> None:
    """Waits until it holds. Playwright's own waiting evaluates a string in the page, which its policy forbids."""
    for _ in range(200):
        if page.evaluate(condition, arg):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"not within 10 s: {condition}")


def scroll_through(page: Page) -> None:
    """Brings every figure near the screen, so that it is drawn."""
    height = page.evaluate("document.documentElement.scrollHeight")
    for y in range(0, height, 700):
        page.evaluate("y => scrollTo(0, y)", y)
        page.wait_for_timeout(30)
    # A busy machine may not have drawn one while it was near.
    left = "[...document.querySelectorAll('figure .chart')].find(c => !c.querySelector('svg'))"
    until(page, f"(() => {{ const one = {left}; one?.scrollIntoView(); return !one }})()")


def saved(page: Page, chart: str, kind: str, folder: Path) -> Path:
    with page.expect_download() as download:
        page.locator(f"figure[data-chart$='{chart}']").get_by_role("button", name=kind).click()
    target = folder / download.value.suggested_filename
    download.value.save_as(target)
    return target


def numbers(page: Page, chart: str, folder: Path) -> list[list[str]]:
    """The rows of a chart's CSV file."""
    return list(csv.reader(saved(page, chart, "CSV", folder).read_text().splitlines()))


@pytest.mark.parametrize("name", [*SHARED, "144"])
def test_every_report_opens_and_every_figure_draws(name: str, reports: Reports, open_page: Open) -> None:
    diagnosis, file = reports(name)
    page = open_page(file)
    assert page.locator("h1").inner_text() == headline(diagnosis)
    assert page.locator("#map svg").count() == 1
    scroll_through(page)
    assert page.locator("figure .chart svg").count() >= 6
    assert page.locator("#heads tbody tr").count() == len(list(diagnosis.entries()))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_long_table_is_written_by_the_page_as_by_python(show: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    # With every digit: what is shortened twice may differ in its last one.
    monkeypatch.setattr("attn_diag.reports.embedding._DETAILS", (Detail(4, 17, compressed=False),))
    found, rows = synthetic(30, 16), {}
    for listed, more in ((400, 480), (20, 420)):
        monkeypatch.setattr("attn_diag.reports.html._LISTED", listed)
        page = show(html_document(found))
        table = page.locator("#heads tbody tr")
        assert table.count() == listed
        page.locator("#more").click()
        assert table.count() == more
        page.locator("#heads thead button").first.click()
        texts = table.evaluate_all("rows => rows.map((row) => [...row.cells].map((cell) => cell.innerText))")
        # A fraction of 1,024 rows may be a tie in its last digit, which Python writes as the even one, a browser not.
        ties = page.locator("#heads thead th").all_inner_texts().index("repeated maxima")
        rows[listed] = [(*cells[:ties], *cells[ties + 1 :]) for cells in texts]
    assert rows[20] == rows[400]
    assert len(set(rows[20])) == 400


def test_figures_are_unpacked_for_the_head_that_is_asked_for(show: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    found = synthetic(5, 12)
    monkeypatch.setattr("attn_diag.reports.html._LIMIT", 0)
    bare = html_document(found)
    monkeypatch.setattr("attn_diag.reports.html._LIMIT", len(bare.encode()) + 40_000)
    page = show(html_document(found))
    links = page.locator("#heads tbody tr a")
    first, last = title(page), links.last.inner_text()
    assert page.locator("#head figure").count() >= 6
    links.last.click()
    page.locator("#head > h2", has_text=last).wait_for()
    assert page.locator("#head .missing", has_text="This page of 60 heads holds the figures of the worst").count() == 1
    assert page.locator("#head figure").count() == 0
    page.go_back()
    until(page, "name => document.querySelector('#head > h2').innerText === name", first)
    scroll_through(page)


def test_a_console_error_fails_a_test(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(
        "<html data-ready=yes><script>console.error('x'); fetch('http://127.0.0.1:9/x').catch(() => 0)</script>"
    )
    opening = browsers.open_page.__wrapped__(browser)  # type: ignore[attr-defined]
    next(opening)(file).wait_for_timeout(100)
    with pytest.raises(AssertionError, match=r"console: x.*request: http"):
        next(opening)


def test_a_click_opens_a_head_and_back_returns(reports: Reports, open_page: Open) -> None:
    diagnosis, file = reports("144")
    page = open_page(file)
    first = title(page)
    # Below the findings, as there are several.
    page.locator("#map .grid").scroll_into_view_if_needed()
    box = page.locator("#map .grid svg").bounding_box()
    assert box
    # Layer 5, head 7: within the grid of 12 x 12.
    place = page.evaluate(
        """() => { const c = echarts.getInstanceByDom(document.querySelector('#map .grid'));
        return c.convertToPixel({seriesIndex: 0}, [7, 5]); }"""
    )
    page.mouse.click(box["x"] + place[0], box["y"] + place[1])
    page.wait_for_url("**#c5o0h7")
    page.locator("#head > h2", has_text="L5H7").wait_for()
    head = head_at(diagnosis, "c5o0h7")
    assert f"{some(head.noise_factor):.3g}" in page.locator(".keys").inner_text()
    page.go_back()
    until(page, "text => document.querySelector('#head > h2').innerText === text", arg=first)
    page.go_forward()
    until(page, "document.querySelector('#head > h2').innerText.startsWith('L5H7')")


def test_an_address_opens_its_head(reports: Reports, open_page: Open) -> None:
    _, file = reports("144")
    assert title(open_page(file, fragment="#c3o0h2")).startswith("L3H2")
    # Nonsense opens the worst.
    assert title(open_page(file, fragment="#<script>")) == title(open_page(file))


def test_keyboard_alone(reports: Reports, open_page: Open) -> None:
    _, file = reports("144")
    page = open_page(file)
    # Words that are explained are stops too.
    for _ in range(90):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.classList.contains('grid')"):
            break
    else:
        pytest.fail("the map cannot be reached by the Tab key")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    for key in ("Home", "ArrowDown", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    page.locator("#map [aria-live]", has_text="L1H2").wait_for(state="attached")
    page.keyboard.press("Enter")
    page.wait_for_url("**#c1o0h2")
    # The head is drawn after the address has changed.
    page.locator("#head > h2", has_text="L1H2").wait_for()
    until(page, "document.activeElement.id === 'head'")
    page.locator("#metrics button", has_text="Bias").focus()
    page.keyboard.press("Enter")
    assert page.locator("#metrics button[aria-pressed=true]").inner_text() == "Bias"


def test_metrics_recolour_the_map(reports: Reports, open_page: Open) -> None:
    page = open_page(reports("144")[1])
    seen = set()
    # The heads of this page were not compared with a well-rounded kernel.
    for button in page.locator("#metrics button:enabled").all():
        button.click()
        assert button.get_attribute("aria-pressed") == "true"
        seen.add(page.evaluate("document.querySelector('#map svg').outerHTML"))
    assert len(seen) >= 6


def test_observations_can_be_compared_and_chosen(reports: Reports, open_page: Open) -> None:
    page = open_page(reports("kernels_pair_T512")[1])
    assert all(name in page.locator("#map").inner_text() for name in ("flash", "flex", "paper", "stable"))
    page.locator("#heads tr", has_text="flash").locator("a").first.click()
    page.locator("#head > h2", has_text="flash").wait_for()


def test_several_observations_and_layers_have_a_chooser(show: Open) -> None:
    page = show(html_document(synthetic(2, 2, observations=2)))
    page.locator("#choosers select").select_option("recipe 1")
    page.locator("#map .grid").focus()
    page.keyboard.press("Home")
    assert "recipe 1" in page.locator("#map [aria-live]").inner_text()


def test_captures_with_different_observations_and_outputs(show: Open) -> None:
    """The map always shows what there is: another capture may have other observations, and no dW_Q."""
    captures = [stored(name) for name in ("failing_step500_L2H7", "gqa_T200", "pair_T256")]
    page = show(html_document(inspect_captures(captures)))
    assert page.locator("#metrics [aria-pressed=true]").inner_text() == "Verdict"
    page.locator("#metrics button", has_text="dW_Q error").click()
    chooser = page.locator("#choosers select").first
    for value in chooser.locator("option").evaluate_all("options => options.map(o => o.value)"):
        chooser.select_option(value)
        assert page.locator("#metrics [aria-pressed=true]").is_enabled()
        page.locator("#map .grid").focus()
        page.keyboard.press("Home")
        page.keyboard.press("Enter")
        spoken = page.locator("#map [aria-live]").inner_text()
        assert "dW_Q error" in spoken or "Verdict" in spoken
        # The head is drawn after the address has changed.
        head = re.compile(rf"^{spoken.partition(',')[0]}\b")
        page.locator("#head > h2", has_text=head).wait_for()


def test_the_theme_switch_wins(reports: Reports, open_page: Open) -> None:
    page = open_page(reports("144")[1], color_scheme="dark")
    paper = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(paper)
    assert sum(map(int, dark[4:-1].split(", "))) < 150
    # Figures are below the verdicts, and drawn when they come near.
    page.locator("figure").first.scroll_into_view_if_needed()
    page.locator("figure svg").first.wait_for()
    drawn = page.evaluate("document.querySelector('figure svg').outerHTML")
    page.get_by_role("button", name="Switch to light colours").click()
    light = page.evaluate(paper)
    assert sum(map(int, light[4:-1].split(", "))) > 700
    assert page.evaluate("document.querySelector('figure svg').outerHTML") != drawn
    page.reload()
    page.wait_for_selector("html[data-ready=yes]", state="attached")
    assert page.evaluate(paper) == light


def test_csv_holds_the_numbers_of_the_diagnosis(reports: Reports, open_page: Open, tmp_path: Path) -> None:
    diagnosis, file = reports("gpt2_step731_L2H4")
    page = open_page(file)
    [(_, _, head)] = list(diagnosis.entries())
    delta = some(head.bias.delta)
    text = saved(page, "cumulative-delta", "CSV", tmp_path).read_bytes().decode()
    assert text.count("\r\n") == text.count("\n")
    rows = list(csv.reader(text.splitlines()))
    assert rows[0] == ["row", "sum", "99 % band, low", "99 % band, high"]
    assert [(int(r[0]), float(r[1])) for r in rows[1:]] == [(p["row"], p["sum"]) for p in delta.drift]
    assert float(rows[1][3]) == delta.drift_band99
    histogram = some(some(head.figures).o_error)
    assert [int(r[1]) for r in numbers(page, "o-error", tmp_path)[1:]] == list(histogram.counts)


def test_svg_is_a_picture_of_the_chart(reports: Reports, open_page: Open, tmp_path: Path) -> None:
    page = open_page(reports("gpt2_step731_L2H4")[1])
    # Drawn only when asked for: it lies far below the screen.
    root = ElementTree.parse(saved(page, "alignment", "SVG", tmp_path)).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {"".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"feature", "99 % by chance"} <= texts
    assert len(list(root.iter("{http://www.w3.org/2000/svg}path"))) > 64


def test_formulas_and_quotes_are_harmless_in_csv(reports: Reports, open_page: Open) -> None:
    page = open_page(reports("144")[1])
    cells = ["=1+1", "+1", "-1", "@a", "\tb", 'say "x", y', "a\nb", -1.5, 1e-300, 0.1, None]
    found = page.evaluate("row => attnDiag.export.csv([row])", cells)
    assert next(csv.reader([found], strict=True)) if "\n" not in found[:-2] else True
    assert found == '\'=1+1,\'+1,\'-1,\'@a,\'\tb,"say ""x"", y","a\nb",-1.5,1e-300,0.1,\r\n'


def test_the_table_sorts(reports: Reports, open_page: Open) -> None:
    page = open_page(reports("144")[1])
    column = page.locator("#heads thead button", has_text="noise factor")
    keys = "() => [...document.querySelectorAll('#heads tbody tr')].map(r => Number(r.cells[5].dataset.key))"
    column.click()
    found = page.evaluate(keys)
    assert found == sorted(found, reverse=True)
    column.click()
    assert page.evaluate(keys) == sorted(found)


@pytest.mark.parametrize("name", ["144", "kernels_pair_T512", "gpt2_step731_L2H4"])
def test_phone(name: str, reports: Reports, open_page: Open) -> None:
    page = open_page(reports(name)[1], width=390)
    scroll_through(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_print_is_light_and_whole(reports: Reports, open_page: Open) -> None:
    page = open_page(reports("144")[1], color_scheme="dark")
    page.emulate_media(media="print")
    # A busy machine may not have drawn one while it was near.
    left = "[...document.querySelectorAll('figure .chart')].find(c => !c.querySelector('svg'))"
    until(page, f"(() => {{ const one = {left}; one?.scrollIntoView(); return !one }})()")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert not page.locator("#theme").is_visible()
    # Charts in dark colours would be pale on paper.
    assert "#a3abb5" not in page.evaluate("document.querySelector('figure svg').outerHTML").lower()
    assert page.locator("#heads tbody tr").last.is_visible()
    heights = page.evaluate("[...document.querySelectorAll('figure .chart, #map .grid')].map(c => c.clientHeight)")
    assert len(heights) > 5
    assert min(heights) > 100


def test_without_scripts_there_is_the_table(reports: Reports, browser: Browser) -> None:
    diagnosis, file = reports("144")
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.locator("#heads tbody tr").count() == len(list(diagnosis.entries()))
    assert page.locator(".suggestions li").first.is_visible()
    context.close()


def test_failed_assumptions_show_no_figures(show: Open) -> None:
    page = show(html_document(hostile_diagnosis("O does not fit")), fragment="#c1o0h0")
    assert "O does not fit" in page.locator("#head").inner_text()
    assert page.locator("#head .chip").inner_text() == "mask or scale not as stated"
    assert page.locator("figure").count() == 0


@pytest.mark.parametrize("name", NAMES, ids=[repr(n)[:24] for n in NAMES])
def test_hostile_texts_are_inert_and_visible(name: str, show: Open) -> None:
    page = show(html_document(hostile_diagnosis(name)))
    scroll_through(page)
    page.locator("#map .grid").hover(position={"x": 60, "y": 20})
    page.locator("figure .chart").first.hover()
    page.wait_for_timeout(50)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('script').length") == 3
    assert page.evaluate("document.querySelectorAll('img, iframe, object, embed, [onerror], [onload]').length") == 0
    shown = " ".join(page.locator(".reasons li").first.text_content().split())  # type: ignore[union-attr]
    assert shown == " ".join(name.split())


def test_the_hostile_check_can_fail(show: Open) -> None:
    # Without the policy and the escaping of one place, the first name runs.
    text = html_document(hostile_diagnosis("quiet")).replace('http-equiv="Content-Security-Policy"', "", 1)
    page = show(text.replace("</main>", "<script>window.hacked=1</script></main>", 1))
    assert page.evaluate("window.hacked") == 1


def test_the_policy_stops_what_escaping_would_miss(tmp_path: Path, browser: Browser) -> None:
    file = tmp_path / "page.html"
    file.write_text(html_document(synthetic(1, 1)).replace("</main>", "<script>window.hacked=1</script></main>", 1))
    context = browser.new_context()
    page = context.new_page()
    page.goto(file.as_uri())
    assert page.evaluate("window.hacked") is None
    context.close()


def test_gallery(tmp_path: Path, show: Open) -> None:
    walk = Series("a <b>", tuple(float(i) for i in range(9)), (0.0, 1.0, None, 2.0, 3.0, 2.0, 1.0, 0.5, 0.25))
    charts = (
        Chart("one", "<i>one</i>", "c", Axis("step"), Axis("y"), (walk,), (Band("99 % band", -1, 1),)),
        Chart("two", "two", "c", Axis("step"), Axis("y", log=True), (walk, walk)),
        Chart("three", "three", "c", Axis("head"), Axis("layer"), map=Map("norm", ((1.0, None), (-2.0, 3.0)), True)),
    )
    table = (("=a", "b"), ("1", "<u>2</u>"))
    page = show(gallery_document(Gallery("<b>t</b>", "lead", (Section("s", ("p",), table, charts),), "foot")))
    scroll_through(page)
    assert page.locator("figure svg").count() == 3
    assert page.locator("h3").first.inner_text() == "<i>one</i>"
    cells = [["0", "0", "1"], ["0", "1", ""], ["1", "0", "-2"], ["1", "1", "3"]]
    assert numbers(page, "three", tmp_path) == [["layer", "head", "norm"], *cells]
    assert numbers(page, "one", tmp_path)[3] == ["2", "", "-1", "1"]


def crowded() -> Chart:
    """More series than colours, with long names, and marks side by side and at both ends."""
    x = tuple(float(i) for i in range(0, 1000, 10))
    series = tuple(Series(f"a run with change {i}", x, tuple(i + v / 1000 for v in x)) for i in range(9))
    places = {0: "from the start", 500: "alarm at 500", 520: "changed at 520", 990: "fails at 990"}
    marks = tuple(Mark(x, text) for x, text in places.items())
    return Chart("crowded", "crowded", "c", Axis("step"), Axis("y of some length"), series, marks=marks)


# The boxes of all texts of a drawing: [left, top, right, bottom, text].
BOXES = """svg => [...svg.querySelectorAll("text")].map((t) => [t.getBoundingClientRect(), t.textContent])
    .map(([b, t]) => [b.left, b.top, b.right, b.bottom, t])"""
# The colour and style of every line of a chart.
LINES = "e => echarts.getInstanceByDom(e).getOption().series.map((s) => ({ color: s.color, line: s.lineStyle }))"
# As if the place were very wide: one row of legend, all marks' labels in one row.
WIDE = """([place, i]) => echarts.getInstanceByDom(place).setOption(
    attnDiag.options.of(JSON.parse(document.getElementById("attn-diag-gallery").textContent)[0][i], 1e4), true)"""


def overlapping(page: Page, name: str) -> list[tuple[str, str]]:
    """Texts of a figure that lie on one another, by more than a pixel."""
    boxes = page.locator(f"figure[data-chart={name}] svg").evaluate(BOXES)
    return [
        (a[4], b[4])
        for i, a in enumerate(boxes)
        for b in boxes[:i]
        if min(a[2], b[2]) - max(a[0], b[0]) > 1 and min(a[3], b[3]) - max(a[1], b[1]) > 1
    ]


def cut_off(page: Page, name: str) -> list[str]:
    """Texts that leave the figure's sides."""
    svg = page.locator(f"figure[data-chart={name}] svg")
    left, _, right, _ = svg.evaluate("e => (b => [b.left, b.top, b.right, b.bottom])(e.getBoundingClientRect())")
    return [box[4] for box in svg.evaluate(BOXES) if box[0] < left - 1 or box[2] > right + 1]


@pytest.mark.parametrize("width", [390, 800, 1280])
def test_marks_and_legends_have_their_room(draw: Open, width: int) -> None:
    page = draw(crowded(), width=width)
    texts = page.locator("figure svg text").all_text_contents()
    assert {"from the start", "alarm at 500", "changed at 520", "fails at 990", "a run with change 8"} <= set(texts)
    assert not overlapping(page, "crowded")
    assert not cut_off(page, "crowded")
    page.evaluate(WIDE, [page.locator(".chart").element_handle(), 0])
    assert overlapping(page, "crowded"), "the check can fail"


def test_a_high_bands_name_is_not_on_a_marks_label(draw: Open) -> None:
    line = Series("a", (0.0, 1000.0), (1.0, 100.0))
    marks = (Mark(900, "NaN predicted 900"), Mark(985, "NaN came 985"))
    chart = Chart(
        "high", "high", "c", Axis("step"), Axis("y", log=True), (line,), (Band("limit 98", 98, 98),), marks=marks
    )
    page = draw(chart, width=800)
    assert "limit 98" in page.locator("figure svg text").all_text_contents()
    assert not overlapping(page, "high")
    page.evaluate(
        """place => { const chart = echarts.getInstanceByDom(place); const [series] = chart.getOption().series;
        series.markLine.data.forEach((line) => { if (line.yAxis) line.label.position = "insideEndTop"; });
        chart.setOption({ series: [series] }); }""",
        page.locator(".chart").element_handle(),
    )
    assert overlapping(page, "high"), "the check can fail"


def test_the_legend_finds_its_room_again_when_the_page_narrows(draw: Open) -> None:
    page = draw(crowded())
    wide = page.locator(".chart").evaluate("e => e.clientHeight")
    page.set_viewport_size({"width": 390, "height": 900})
    until(page, "h => document.querySelector('.chart').clientHeight > h", arg=wide)
    until(page, "document.querySelector('svg').clientWidth < 390")
    assert not overlapping(page, "crowded")


def test_marks_are_saved_with_the_numbers(tmp_path: Path, draw: Open) -> None:
    walk = Series("a", (0.0, 1.0), (1.0, 2.0))
    chart = Chart(
        "one", "one", "c", Axis("step"), Axis("y"), (walk, walk), (Band("b", 0, 3),), marks=(Mark(5, "=alarm"),)
    )
    page = draw(chart, replace(chart, name="two", marks=()))
    rows = numbers(page, "one", tmp_path)
    assert rows[0] == ["series", "step", "y", "b, low", "b, high"]
    assert rows[1] == ["a", "0", "1", "0", "3"]
    assert rows[-1] == ["mark: =alarm", "5", "", "0", "3"]
    assert len(rows) == 6
    assert len(numbers(page, "two", tmp_path)) == 3
    # A mark beyond the data is still on the axis.
    svg = saved(page, "one", "SVG", tmp_path).read_text()
    assert "=alarm" in svg
    assert "=alarm" not in saved(page, "two", "SVG", tmp_path).read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_tones_are_colours_that_can_be_told_apart(draw: Open, scheme: str) -> None:
    tones: tuple[Tone, ...] = ("accent", "second", "third", "good", "fourth", "fifth", "sixth")
    lines = [Series(tone, (0.0, 1.0), (float(i), i + 1.0), tone=tone) for i, tone in enumerate(tones)]
    # The one without a tone gets one that no other has, or begins again, dashed.
    shown = {
        "all": (*lines, Series("next", (0.0, 1.0), (9.0, 9.0))),
        "rest": (*lines[1:], replace(lines[0], name="next", tone=None)),
        "faint": (lines[0], replace(lines[1], look="faint"), replace(lines[2], look="broad")),
    }
    charts = (Chart(name, name, "c", Axis("x"), Axis("y"), series) for name, series in shown.items())
    page = draw(*charts, color_scheme=scheme)

    def drawn(name: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = page.locator(f"figure[data-chart={name}] .chart").evaluate(LINES)
        return found

    everything = drawn("all")
    colours = [s["color"] for s in everything]
    assert len(set(colours[:7])) == 7
    assert colours[7] in colours[:7]
    assert [s["line"]["type"] for s in everything] == ["solid"] * 7 + ["dashed"]
    assert drawn("rest")[-1] == {"color": colours[0], "line": everything[0]["line"]}
    plain, faint, broad = (s["line"] for s in drawn("faint"))
    assert faint["opacity"] < 1
    assert broad["opacity"] < 1
    assert faint["width"] < plain["width"] < broad["width"]
    # As different as ink on paper needs for a line: WCAG 2's contrast of 3 against the page's own ground.
    ground = page.evaluate("attnDiag.theme.color('paper')")
    assert all(contrast(colour, ground) >= 3 for colour in colours)
    assert contrast(ground, ground) < 3


def contrast(a: str, b: str) -> float:
    """WCAG 2's, of two hexadecimal colours."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(a), luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_an_axis_that_fits_leaves_out_zero(draw: Open) -> None:
    line = Series("a", (0.0, 1.0), (100.0, 101.0))
    charts = tuple(Chart(n, n, "c", Axis("x"), Axis("y", fit=n == "fitted"), (line,)) for n in ("fitted", "whole"))
    page = draw(*charts)
    shown = {n: page.locator(f"figure[data-chart={n}] svg text").all_text_contents() for n in ("fitted", "whole")}
    assert "100" in shown["fitted"]
    assert shown["fitted"].count("0") == 1, "x's alone"
    assert shown["whole"].count("0") == 2


def test_long_texts_of_a_table_are_flush_left(show: Open) -> None:
    table = (("name", "number", "text"), ("a", "1.5", "-"), ("b", "2.5", "a sentence that goes on for some words"))
    page = show(gallery_document(Gallery("t", "l", (Section("s", (), table),))))
    for part in ("tbody", "thead"):
        row = page.locator(f"{part} tr").first
        aligned = row.evaluate("r => [...r.cells].map((c) => getComputedStyle(c).textAlign)")
        assert aligned == ["left", "right", "left"], part
