"""Telling people: results in a terminal, a log, a notebook and HTML. No statistics, no kernels, no files."""

from attn_diag.reports.brief import brief
from attn_diag.reports.html import gallery_document, html_document, html_fragment
from attn_diag.reports.terminal import terminal_renderables

__all__ = ["brief", "gallery_document", "html_document", "html_fragment", "terminal_renderables"]
