"""The paper's figures as charts, in a terminal, and by the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from builders import some
from command_line import Run
from rich.cells import cell_len
from step_captures import Plant, planted, series

from attn_diag import PaperFigures, paper_figures
from attn_diag.reports.charts import Chart, Gallery
from attn_diag.reports.layout import ASCII, bar_line
from attn_diag.reports.paper import paper_gallery
from attn_diag.reports.renderers import PLAIN_WIDTH, plain_text


@pytest.fixture(scope="module")
def found() -> PaperFigures:
    return paper_figures(series(4, Plant(heads=2, ties=6), layer=3), device="cpu")


@pytest.fixture(scope="module")
def gallery(found: PaperFigures) -> Gallery:
    return paper_gallery(found)


def charts(gallery: Gallery) -> dict[str, Chart]:
    return {chart.name: chart for section in gallery.sections for chart in section.charts}


def faults(chart: Chart) -> Iterator[str]:
    """What a page could not draw, or a reader not understand."""
    if not chart.series and chart.map is None:
        yield "neither series nor map"
    for s in chart.series:
        if len(s.x) != len(s.y):
            yield f"{s.name}: x and y differ in length"
        if any(v is not None and v != v for v in s.y):
            yield f"{s.name}: NaN"
    if chart.map is not None:
        if len(chart.map.values) != len(chart.y.names):
            yield "rows of the map are not named"
        if any(len(row) != len(chart.x.names) for row in chart.map.values):
            yield "columns of the map are not named"
    if not chart.caption.endswith((".", ")")):
        yield "caption breaks off"
    if not chart.x.label or not chart.y.label:
        yield "axis without a label"


def test_charts_can_be_drawn(gallery: Gallery) -> None:
    drawn = charts(gallery)
    assert len(drawn) == sum(len(s.charts) for s in gallery.sections), "names of files must differ"
    for chart in drawn.values():
        assert not list(faults(chart)), chart.name
    # The page opens on what the figures show, and says whose they are.
    assert gallery.title.startswith(("OK: ", "FOUND: ", "UNKNOWN: "))
    assert "2510.04212" in gallery.lead
    broken = drawn["figure-13-head"]
    assert list(faults(replace(broken, series=(replace(broken.series[0], y=(1.0,)),), caption="no end")))
    assert list(faults(replace(drawn["figure-4-pk"], x=replace(broken.x, names=("one",)))))


@pytest.mark.parametrize("figure", ["3", "4", "5a", "5bc", "6", "13"])
def test_every_figure_cites_the_paper(figure: str, gallery: Gallery) -> None:
    captions = [c.caption for c in charts(gallery).values() if c.name.startswith(f"figure-{figure}")]
    number = figure.replace("bc", "b-c")
    assert any(f"{number} of Qiu & Yao, arXiv 2510.04212" in caption for caption in captions)


def test_charts_show_the_numbers(found: PaperFigures, gallery: Gallery) -> None:
    drawn = charts(gallery)
    steps, chart = some(found.delta_steps), drawn["figure-5a-total"]
    assert (chart.series[0].x, chart.series[0].y) == (steps.steps, steps.total.sums)
    assert (chart.bands[0].low, chart.bands[0].high) == (-steps.total.band99, steps.total.band99)
    cells = some(drawn["figure-5a-heads"].map)
    assert cells.values == (tuple(h.extreme for h in steps.heads),)
    assert [s.y for s in drawn["figure-13-layer"].series] == [
        getattr(some(found.triggers).layer, name) for name in ("exact", "window", "unit")
    ]
    marks = [v for v in drawn["figure-6"].series[2].y if v is not None]
    assert len(marks) == sum(some(found.prefix).unit) > 0
    assert drawn["figure-5bc-product"].series[0].y == some(found.features).product
    assert found.spectral_norms is not None
    assert {s.name for s in drawn["figure-3-steps"].series} == {"L3H0", "L3H1"}


def test_captions_say_what_is_so() -> None:
    """In the band and out of it, the words differ."""
    inside = paper_figures(series(4), device="cpu")
    outside = paper_figures(series(8, Plant(bias=0.7)), device="cpu")
    assert "stays inside: no bias beyond chance" in charts(paper_gallery(inside))["figure-5a-total"].caption
    assert "leaves the band" in charts(paper_gallery(outside))["figure-5a-total"].caption
    assert "stays inside the 99 % band" in inside.report(200)
    assert "leaves the 99 % band" in outside.report(200)


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_report_fits(width: int, found: PaperFigures) -> None:
    lines = found.report(width).splitlines()
    assert max(map(cell_len, lines)) <= width
    assert sum(any(bar in line for bar in "▁█") for line in lines) >= 5
    for figure in ("Figure 3", "Figure 4", "Figure 5a", "Figures 5b-c", "Figure 6", "Figure 13"):
        assert any(line.startswith(figure) for line in lines), figure


def test_missing_figures_are_listed_with_the_reason() -> None:
    one = paper_figures(planted(None, Plant()), device="cpu")
    assert "Figure 13: needs two steps or more" in one.report(200)
    (section,) = (s for s in paper_gallery(one).sections if s.title == "Not drawn")
    assert len(section.table) == 1 + len(one.missing) == 3


def test_sparklines() -> None:
    assert bar_line([0.0, 1.0]).startswith("▁█")
    assert bar_line([1.0, 2.0], zero=True).startswith("▅█")
    assert bar_line([float("nan")]) == "·"
    assert len(bar_line(range(1000)).split()[0]) == 56
    assert bar_line([0.0, float("nan"), 1.0], bars=ASCII, gap=" ").startswith("_ #")


def test_the_plain_report_is_ascii_with_its_bars(found: PaperFigures) -> None:
    lines = plain_text(found).splitlines()
    assert all(line.isascii() for line in lines)
    drawn = [line for line in found.report(PLAIN_WIDTH).splitlines() if any(bar in line for bar in "▁█")]
    bars = [line for line in lines if set(line.split("  ")[0]) <= set(ASCII) | {" "} and "  " in line.lstrip()]
    assert len(bars) == len(drawn) >= 5


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "captures").mkdir()
    for i, capture in enumerate(series(3, layer=1)):
        capture.save(tmp_path / "captures" / f"step{i}.safetensors")
    return tmp_path / "captures"


def test_the_command(folder: Path, tmp_path: Path, run: Run) -> None:
    target = tmp_path / "figures.json"
    done = run("figures", folder, "--layer", 1, "--head", 0, "--json", target, "--device", "cpu")
    assert done.code == 0
    assert "Figures after Qiu & Yao" in done.out
    stored = PaperFigures.from_json(target.read_text())
    assert stored.chosen.steps == (10, 11, 12)
    assert stored.chosen.reason.startswith("as asked for")
    assert json.loads(target.read_text())["schema"] == "attn-diag-paper-figures"
    assert run("figures", folder, "--layer", "1", "--head", "0", "--plain", "--device", "cpu").out == plain_text(stored)
    page = tmp_path / "figures.html"
    done = run("figures", folder, "--json", "-", "--html", page, "--device", "cpu")
    assert done.code == 0
    assert all(f'"{name}"' in page.read_text(encoding="utf-8") for name in charts(paper_gallery(stored)))
    assert json.loads(done.out)["schema_version"] == 1


def test_the_command_refuses_what_is_not_there(folder: Path, run: Run) -> None:
    code, _, err = run("figures", folder, "--head", 7)
    assert (code, "no head 7" in err) == (2, True)
    for arguments in ((folder, "--layer", 5), (folder, "--observation", "flash"), ()):
        assert run("figures", *arguments).code == 2
