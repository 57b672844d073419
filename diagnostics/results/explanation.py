"""What ``explain`` returns: one head's diagnosis in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from attn_diag.results.base import Result
from attn_diag.results.diagnosis import Label


@dataclass(frozen=True)
class Paragraph:
    """A question and the answer to it, in whole sentences."""

    title: str
    text: str


@dataclass(frozen=True, repr=False)
class Explanation(Result):
    """One head of one observation, explained. ``print(explanation)`` shows it; a notebook shows it by itself.

    ``head`` and ``layer`` are the model's numbers. ``labels``: the verdict's, None without a verdict. ``others``: how
    many entries of the diagnosis were asked for as well (this head in other captures or observations); this one is the
    worst of them.
    """

    source: str
    observation: str
    layer: int | None
    batch: int | None
    head: int
    labels: tuple[Label, ...] | None
    others: int
    paragraphs: tuple[Paragraph, ...]
    schema: Literal["attn-diag-explanation"] = "attn-diag-explanation"
    schema_version: Literal[1] = 1
