"""The README's figure: gradient norm and loss of the failing, the healthy and a cured run, with alarm and departure."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from page_cure import control_of, cures, fate
from page_outcomes import ON
from page_record import Record
from page_series import FAILING_TONE, HEALTHY_TONE, LOSS, NORM, STEP, curve, events

from attn_diag.reports import gallery_document
from attn_diag.reports.charts import Axis, Chart, Gallery, Section, Series

# Shown large enough to be read in a README column of about 880 pixels.
_WIDTH, _SCALE = 800, 1.5
# Of the cures that train on, the first of these that is there.
_SHOWN = ("fp32-scores", "fp32-throughout", "fa2", "same-scores")


def picture(record: Record) -> Gallery:
    """A page with the figure alone. Raises ValueError without a run of arm A."""
    run = record.first("A")
    if run is None:
        raise ValueError(f"{record.folder.name} has no run of arm A: there is nothing to draw")
    control = control_of(record, run)
    cured = {fork.change: fork for fork in cures(record, run) if fate(fork, control) == ON}
    cure = next((cured[name] for name in (*_SHOWN, *cured) if name in cured), None)
    last = cure.end - 1 if cure else run.end + 100

    def lines(axis: Axis) -> tuple[Series, ...]:
        # Until the failure all are much alike: the healthy run is the ground on which the others lie.
        found = [curve("healthy", r, axis, last=last, tone=HEALTHY_TONE, look="broad") for r in record.healthy[:1]]
        found.append(curve("scores rounded to BF16", run, axis, last=last, tone=FAILING_TONE))
        if cure:
            found.append(curve(f"cured from the alarm on: {cure.change}", cure, axis, last=last, tone="good"))
        return tuple(found)

    charts = tuple(
        Chart(f"failing-run-{axis.label[:4]}", axis.label, "", STEP, axis, lines(axis), marks=events(run))
        for axis in (NORM, LOSS)
    )
    return Gallery("The failing run", "", tuple(Section("", charts=(chart,)) for chart in charts))


def take(page: Gallery, file: Path) -> None:
    """A PNG of the page's charts, 1,200 pixels wide. Raises RuntimeError without a Chromium."""
    from playwright.sync_api import sync_playwright

    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        raise RuntimeError("no Chromium in PATH: it draws the picture")
    file.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as folder, sync_playwright() as playwright:
        source = Path(folder) / "page.html"
        source.write_text(gallery_document(page), encoding="utf-8")
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        shown = browser.new_page(viewport={"width": _WIDTH, "height": 900}, device_scale_factor=_SCALE, bypass_csp=True)
        shown.goto(source.as_uri())
        shown.wait_for_selector("html[data-ready=yes]", state="attached")
        # The charts alone, one under the other.
        shown.add_style_tag(content=_STYLE)
        shown.wait_for_function(
            "document.querySelectorAll('figure svg').length === document.querySelectorAll('figure').length"
        )
        # One axis of steps for both: their plots begin and end at the same places.
        shown.evaluate(_ALIGN)
        shown.locator("main").screenshot(path=file)
        browser.close()


_ALIGN = """document.querySelectorAll(".chart").forEach((place) =>
    echarts.getInstanceByDom(place).setOption({ grid: { left: 48, bottom: 44, containLabel: false } }))"""
_STYLE = """
.bar, .lead, h2, footer, figcaption, .figure-head { display: none !important; }
main { padding: 14px 18px 6px !important; max-width: none !important; background: #fff; }
.gallery-section { margin: 0 !important; }
"""
