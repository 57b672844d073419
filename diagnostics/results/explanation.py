"""What ``explain`` returns: one head's diagnosis in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.estimates import Label


@dataclass(frozen=True)
class Paragraph:
    """A question about the head, and the answer."""

    title: str
    """The question."""
    text: str
    """The answer, in whole sentences."""


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """The result of ``attn_diag.explain``: one head of one observation. ``print(explanation)`` shows it."""

    source: str
    """The capture."""
    observation: str
    """The observation's name."""
    layer: int | None
    """The model's number of the layer; null where it is not stated."""
    batch: int | None
    """The one batch item looked at; null if several are pooled."""
    head: int
    """The model's number of the head."""
    labels: tuple[Label, ...] | None
    """The verdict's labels; null without a verdict."""
    others: int
    """How many more entries of the diagnosis fit what was asked for; this one is the worst of them."""
    paragraphs: tuple[Paragraph, ...]
    """The explanation."""
    schema: Literal["attn-diag-explanation"] = "attn-diag-explanation"
    schema_version: Literal[1] = 1
