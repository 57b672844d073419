"""Telling people: terminal, HTML and JSON renderings of a Diagnosis. No statistics, no kernels, no files."""

from attn_diag.reports.brief import brief
from attn_diag.reports.gallery import gallery_document
from attn_diag.reports.html import html_document, html_fragment
from attn_diag.reports.terminal import terminal_renderables

__all__ = [
    "brief",
    "gallery_document",
    "html_document",
    "html_fragment",
    "terminal_renderables",
]
