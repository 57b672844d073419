"""What ``explain`` returns: one head's diagnosis in words."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from attn_diag.diagnosis import Label
from attn_diag.result import Result

if TYPE_CHECKING:
    from rich.console import RenderableType


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

    def renderables(self) -> Iterator[RenderableType]:
        """The explanation, piece by piece, for a rich console."""
        from attn_diag.reports.explanation import explanation_renderables

        yield from explanation_renderables(self)

    def __str__(self) -> str:
        # rich fills lines up with blanks.
        return "\n".join(line.rstrip() for line in self.report(width=80).splitlines())

    def __repr__(self) -> str:
        # At a prompt the words are what was asked for.
        return str(self)

    def _repr_html_(self) -> str:
        from attn_diag.reports.explanation import explanation_html

        return explanation_html(self)
