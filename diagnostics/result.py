"""What every command but ``inspect`` returns: a frozen dataclass with JSON and a report."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import ConfigDict, TypeAdapter

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult


class Result:
    """JSON and display of a result; its subclasses are frozen dataclasses of plain values, None where unknown.

    ``print(result.report())`` shows it; ``result.to_json()`` exports it. A notebook shows the report too.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    def to_json(self, *, indent: int | None = 2) -> str:
        """As JSON text; NaN and infinities are the strings "NaN", "Infinity", "-Infinity"."""
        return _adapter(type(self)).dump_json(self, indent=indent).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what ``to_json`` wrote. Raises pydantic.ValidationError where it is not such a document."""
        result: Self = _adapter(cls).validate_json(text)
        return result

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of ``to_json`` (draft 2020-12)."""
        return _adapter(cls).json_schema(mode="serialization")

    def renderables(self) -> Iterator[RenderableType]:
        """The report, piece by piece, for a rich console."""
        raise NotImplementedError

    def report(self, width: int = 100) -> str:
        """The terminal report as plain text, ``width`` columns wide."""
        from rich.console import Console

        buffer = io.StringIO()
        console = Console(file=buffer, width=width, color_system=None, legacy_windows=False)
        for renderable in self.renderables():
            console.print(renderable)
        return buffer.getvalue()

    def __repr__(self) -> str:
        source = getattr(self, "source", None)
        what = "" if source is None else f" of {source}"
        return f"<{type(self).__name__}{what}: print(r.report()) shows it; r.to_json() exports it>"

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(self.report())}</pre>"

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.renderables()


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(cls: type) -> TypeAdapter[Any]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]
