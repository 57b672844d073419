"""Answers about heads under one face: one head's answer as a list of one, and the answers about several captures."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, overload

from attn_diag.results.rows import Row, data_frame
from attn_diag.results.wording import plural

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import RenderableType


class OneHead:
    """An answer about one head."""

    @property
    def heads(self) -> tuple[Self, ...]:
        """The one head that it is about, as results about several have them."""
        return (self,)


class AboutHeads(Protocol):
    """An answer about some heads."""

    @property
    def heads(self) -> Sequence[Any]:
        """An entry a head."""
        ...

    @property
    def findings(self) -> Sequence[Any]:
        """What was found."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """As plain values."""
        ...

    def to_rows(self) -> list[Row]:
        """A row a head."""
        ...

    def to_json(self) -> str:
        """As JSON."""
        ...

    def report(self, width: int = 100) -> str:
        """As text."""
        ...

    def renderables(self) -> Iterator[RenderableType]:
        """For a rich console."""
        ...


R = TypeVar("R", bound=AboutHeads)


@dataclass(frozen=True, repr=False)
class Several(Sequence[R], Generic[R]):
    """The answers about several captures, in their order: a sequence that has what one answer has."""

    results: tuple[R, ...]
    """One answer a capture."""

    @overload
    def __getitem__(self, index: int) -> R: ...
    @overload
    def __getitem__(self, index: slice) -> Several[R]: ...
    def __getitem__(self, index: int | slice) -> R | Several[R]:
        return Several(self.results[index]) if isinstance(index, slice) else self.results[index]

    def __len__(self) -> int:
        return len(self.results)

    @property
    def heads(self) -> tuple[Any, ...]:
        """The heads of all of them."""
        return tuple(chain.from_iterable(one.heads for one in self.results))

    @property
    def findings(self) -> tuple[Any, ...]:
        """The findings of all of them."""
        return tuple(chain.from_iterable(one.findings for one in self.results))

    def to_dict(self) -> dict[str, Any]:
        """All as plain values, under "results"."""
        return {"results": [one.to_dict() for one in self.results]}

    def to_rows(self) -> list[Row]:
        """A row a head, of all of them."""
        return [row for one in self.results for row in one.to_rows()]

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a pandas data frame. Raises InputError where pandas is not installed."""
        return data_frame(self.to_rows())

    def to_json(self) -> str:
        """A JSON list of the results' documents."""
        return f"[{','.join(one.to_json() for one in self.results)}]"

    def report(self, width: int = 100) -> str:
        """The reports, one below the other, as plain text ``width`` columns wide."""
        return "\n".join(one.report(width) for one in self.results)

    def __repr__(self) -> str:
        kind = type(self.results[0]).__name__ if self.results else "result"
        return f"<{plural(len(self), kind)}: print(r.report()) shows them; r[0], r.heads, r.to_dataframe()>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.report())}</pre>"
