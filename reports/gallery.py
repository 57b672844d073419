"""A page of charts: the paper's figures, in the report's own look."""

from __future__ import annotations

from dataclasses import asdict

from attn_diag.reports.charts import Gallery
from attn_diag.reports.page import json_element, page

ELEMENT = "attn-diag-gallery"
# Cells of so many characters are sentences, not numbers.
_LONG = 30


def gallery_document(gallery: Gallery) -> str:
    """A complete page that needs no network; every chart can be saved as SVG and CSV. All texts are escaped.

    Raises ValueError for a value that is NaN or infinite: what a chart cannot show is None.
    """
    charts = [[asdict(chart) for chart in section.charts] for section in gallery.sections]
    return page(
        "gallery.html.j2",
        kind="gallery",
        gallery=gallery,
        data=json_element(ELEMENT, charts),
        text_columns=text_columns,
    )


def text_columns(table: tuple[tuple[str, ...], ...]) -> set[int]:
    """Columns to be set flush left, as they hold a long text."""
    return {i for line in table[1:] for i, cell in enumerate(line) if len(cell) >= _LONG}
