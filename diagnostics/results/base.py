"""What every result is: a frozen dataclass of plain values, with its JSON and its report. Imports nothing heavy."""

from __future__ import annotations

import html
import io
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError, WithJsonSchema
from pydantic_core import PydanticSerializationError, SchemaValidator, from_json

from attn_diag.errors import InputError
from attn_diag.printing import inert_json, made_printable, printable
from attn_diag.results.rows import Row, data_frame, row_of

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console, ConsoleOptions, RenderableType, RenderResult

# The one place that knows where results are shown. Found by name: a result is read without its report.
_RENDERERS = "attn_diag.reports.renderers"

Number = Annotated[
    float,
    WithJsonSchema({"anyOf": [{"type": "number"}, {"enum": ["NaN", "Infinity", "-Infinity"]}]}),
]
"""A float; where it is not finite it is a string in JSON."""


class SideBySide:
    """A dataclass whose tuples stand side by side: those that are known have one length."""

    def __post_init__(self) -> None:
        lengths = {name: len(value) for name, value in vars(self).items() if isinstance(value, tuple)}
        if len(set(lengths.values())) > 1:
            found = ", ".join(f"{name}: {length}" for name, length in lengths.items())
            raise ValueError(f"lists that stand side by side must have one length, got {found}")


@dataclass(frozen=True)
class Tool:
    """What produced the numbers."""

    version: str
    """Version of attn-diag."""
    python: str
    """Version of Python."""
    torch: str
    """Version of torch."""
    triton: str | None
    """Version of triton; null where it is not installed."""
    device: str
    """The device on which the float64 reference and the emulations ran."""
    backend: str
    """cpu, or the GPU's compute capability, such as sm90."""
    hardware: str | None = None
    """What ``selftest --hardware`` once measured on this device, in a line; null: it was never run there."""


class Result:
    """JSON and display of a result; its subclasses are frozen dataclasses of plain values, None where unknown.

    A subclass names its kind of document in the field ``schema`` and the versions that it reads in
    ``schema_version``. ``print(result.report())`` shows it; ``result.to_json()`` exports it. A notebook shows the
    report too.
    """

    schema: str
    """Which kind of document this is."""
    schema_version: int
    """Version of its schema."""
    made_by: ClassVar[str] = "a command's --json, or to_json(),"
    """What writes such documents, in words for an error."""
    folded_versions: ClassVar[tuple[int, ...]] = ()
    """Versions of its schema that ``unfolded`` brings into the form of another."""
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="strings")

    def to_json(self, *, indent: int | None = 2) -> str:
        """As JSON text; NaN and infinities are the strings "NaN", "Infinity", "-Infinity".

        What a terminal would not show, or a CI system would obey, is written as an escape.
        """
        return inert_json(self.to_json_bytes(indent=indent).decode())

    def to_json_bytes(self, *, indent: int | None = 2) -> bytes:
        """The same in UTF-8 for a file, with all names as they are: of thousands of heads every copy counts."""
        try:
            return _adapter(type(self)).dump_json(self, indent=indent)
        except PydanticSerializationError:  # a file's name that has no UTF-8
            return _adapter(type(self)).dump_json(made_printable(self), indent=indent)

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain dicts, tuples, texts and numbers; those that are not finite are floats here."""
        found: dict[str, Any] = _adapter(type(self)).dump_python(self)
        return found

    def to_rows(self) -> list[Row]:
        """A row of plain values for every head that it is about; see ``attn_diag.results.rows``."""
        source = {"source": getattr(self, "source", None), "observation": getattr(self, "observation", None)}
        return [row_of(head, source) for head in getattr(self, "heads", (self,))]

    def to_dataframe(self) -> pd.DataFrame:
        """The rows as a pandas data frame. Raises InputError where pandas is not installed."""
        return data_frame(self.to_rows())

    def saved_parts(self, *, full: bool = False) -> Iterator[bytes]:  # noqa: ARG002 - of kinds that have a short form
        """The JSON that a command writes, in parts that need not be in memory together.

        Args:
            full: Write everything where that is long, and is left out else.
        """
        yield self.to_json_bytes()

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """Read what ``to_json`` wrote, in this version of the schema or an older one.

        Raises:
            InputError: for text that is not JSON, another schema or version, and a document with missing or wrong
                fields; it says which.
        """
        try:
            result: Self = _validator(cls).validate_json(text)
        except ValidationError as error:
            if (whole := cls.unfolded(text)) is not None:
                return cls.from_json(whole)
            raise InputError(_refusal(cls, text, error)) from None
        return result

    @classmethod
    def unfolded(cls, text: str | bytes) -> bytes | None:  # noqa: ARG003 - of kinds that have another form
        """The document that ``from_json`` reads, for one in another form of it; None for any other text."""
        return None

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON Schema of ``to_json`` (draft 2020-12), every described field with its description.

        The package ships it as ``attn_diag/reports/schema/<kind>-<version>.schema.json``.
        """
        from attn_diag.results.schema import described_schema

        return described_schema(cls, _adapter(cls))

    def renderables(self) -> Iterator[RenderableType]:
        """The report, piece by piece, for a rich console."""
        yield from _renderers().renderables(self)

    def report(self, width: int = 100) -> str:
        """The terminal report as plain text, ``width`` columns wide."""
        from rich.console import Console

        buffer = io.StringIO()
        # In a notebook rich would display each piece, and leave the buffer empty.
        console = Console(
            file=buffer, width=width, color_system=None, legacy_windows=False, emoji=False, force_jupyter=False
        )
        for renderable in self.renderables():
            console.print(renderable)
        return buffer.getvalue()

    def __repr__(self) -> str:
        if (shown := shown_at_prompt(self)) is not None:
            return shown
        source = getattr(self, "source", None)
        what = "" if source is None else f" of {printable(source)}"
        return f"<{type(self).__name__}{what}: print(r.report()) shows it; r.to_json() exports it>"

    def _repr_html_(self) -> str:
        shown = _renderers().notebook(self)
        return f"<pre>{html.escape(self.report())}</pre>" if shown is None else str(shown)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.renderables()


def schema_name(cls: type) -> str | None:
    """The kind of document that a result's class writes, such as "attn-diag-probe"; None where it names none."""
    return next((str(f.default) for f in fields(cls) if f.name == "schema"), None)


def schema_versions(cls: type) -> tuple[int, ...]:
    """The versions of its schema that a result's class reads, the one that it writes last."""
    return get_args(get_type_hints(cls)["schema_version"])


def shown_at_prompt(result: object) -> str | None:
    """What a debugger's prompt shows of a result or a finding; None where its kind has nothing of its own."""
    text: str | None = _renderers().prompt(result)
    return text


def _renderers() -> Any:
    return import_module(_RENDERERS)


def _refusal(cls: type[Result], text: str | bytes, error: ValidationError) -> str:
    """Why ``text`` is no document that ``cls`` reads: not JSON, something else, another version, or broken."""
    expected = f"a document with schema {schema_name(cls)!r}" if schema_name(cls) else f"the JSON of {cls.__name__}"
    name_it = f"name what {cls.made_by} wrote"
    try:
        document = from_json(text)
    except ValueError as reason:
        return f"expected {expected}, got text that is not JSON, or is cut off ({reason}); {name_it}"
    if schema_name(cls):
        schema = document.get("schema") if isinstance(document, dict) else None
        if schema != schema_name(cls):
            got = f"schema {str(schema)[:60]!r}" if schema is not None else "no schema"
            got = got if isinstance(document, dict) else f"a JSON {type(document).__name__}"
            other = isinstance(schema, str) and schema.startswith("attn-diag-")
            return f"expected {expected}, got {got}{', the result of another command' * other}; {name_it}"
        version, versions = document.get("schema_version"), (*schema_versions(cls), *cls.folded_versions)
        if type(version) is not int or version not in versions:
            return (
                f"expected schema_version {' or '.join(map(str, versions))}, got {repr(version)[:60]}: this attn-diag "
                "does not know it; upgrade attn-diag to the one that wrote it (or a newer one), or make it again"
            )
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return (
        f"expected {expected} as attn-diag writes it, got one with {error.error_count()} wrong or missing fields, the "
        f"first at {place}: {first['msg']}; it is damaged or was edited: make it again"
    )


_VALIDATORS: dict[type, SchemaValidator] = {}


def _validator(cls: type) -> SchemaValidator:
    """Stops at the first wrong item of a list: a megabyte of empty heads is two million errors, in 2 GB."""
    if cls not in _VALIDATORS:
        _VALIDATORS[cls] = SchemaValidator(_failing_fast(_adapter(cls).core_schema))
    return _VALIDATORS[cls]


def _failing_fast(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_failing_fast(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    known = {name: _failing_fast(part) for name, part in schema.items()}
    return known | ({"fail_fast": True} if schema.get("type") in ("list", "tuple", "dict") else {})


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(cls: type) -> TypeAdapter[Any]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]
