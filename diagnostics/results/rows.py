"""Results as rows of plain values, one a head: for data frames, CSV and Parquet, of people who plot themselves.

A column is named by the path to its value, such as "bias.delta.mean", "quantities.dq.factor" or
"noise_factor_ci95.low". Lists of other things than names, texts and intervals have no column; running sums, figures
and the microscope of a head of a diagnosis have none either, and of its attribution the guilty sites alone have.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from attn_diag.errors import InputError
from attn_diag.printing import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pandas as pd

Cell = str | int | float | bool | None
Row = dict[str, Cell]

# By which field of theirs objects in a list are told apart.
_NAMES = ("quantity", "site", "name")
_NO_COLUMNS = frozenset(
    {"attribution", "microscope", "figures.rows", "figures.strip", "tool", "schema", "schema_version"}
)
# What a spreadsheet would take for the beginning of a formula.
_FORMULA = ("=", "+", "-", "@")


def row_of(value: Any, before: Mapping[str, Cell] | None = None) -> Row:
    """One row: ``before``, then the cells of a dataclass that are not there yet."""
    row: Row = dict(before or {})
    for path, cell in _cells("", value):
        row.setdefault(path, cell)
    return row


def _cells(path: str, value: Any) -> Iterator[tuple[str, Cell]]:
    if path == "attribution" and value is not None:
        yield from _cells("attribution.guilty", value.guilty)
    if path in _NO_COLUMNS:
        return
    if value is None or isinstance(value, str | int | float | bool):
        yield path, value
    elif is_dataclass(value):
        for f in fields(value):
            yield from _cells(_below(path, f.name), getattr(value, f.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _cells(_below(path, str(key)), item)
    elif isinstance(value, tuple):
        yield from _of_list(path, value)


def _of_list(path: str, items: tuple[Any, ...]) -> Iterator[tuple[str, Cell]]:
    if path.endswith("ci95") and len(items) == 2:
        yield from zip((f"{path}.low", f"{path}.high"), items, strict=True)
    elif items and all(isinstance(item, str) for item in items):
        yield path, (",".join if path.endswith("labels") else "; ".join)(items)
    elif items and all(is_dataclass(item) for item in items):
        by = next((name for name in _NAMES if hasattr(items[0], name)), None)
        for item in items if by else ():
            yield from _cells(_below(path, str(getattr(item, str(by)))), item)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def column_names(rows: Iterable[Row]) -> list[str]:
    """The columns of all rows, in the order in which they are met."""
    return list(dict.fromkeys(name for row in rows for name in row))


def data_frame(rows: Sequence[Row]) -> pd.DataFrame:
    """The rows as a pandas data frame. Raises InputError where pandas is not installed."""
    if find_spec("pandas") is None:
        raise InputError(
            "to_dataframe() needs pandas, which is not installed: pip install pandas; without it to_rows() is the same "
            "as a list of dicts, and attn-diag inspect --csv FILE writes a table"
        )
    import pandas as pd

    return pd.DataFrame(list(rows), columns=column_names(rows))


def csv_text(rows: Sequence[Row]) -> str:
    """The rows as CSV with a line of names; what is not known is empty, and no text begins a formula."""
    file = io.StringIO()
    names = column_names(rows)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([_csv_cell(row.get(name)) for name in names] for row in rows)
    return file.getvalue()


def _csv_cell(cell: Cell) -> Cell:
    if not isinstance(cell, str):
        return cell
    text = printable(cell)
    return f"'{text}" if text.startswith(_FORMULA) else text


def require_parquet() -> None:
    """Raise InputError where Parquet cannot be written."""
    if find_spec("pyarrow") is None:
        raise InputError("--parquet needs pyarrow, which is not installed: pip install pyarrow; --csv needs nothing")


def write_parquet(rows: Sequence[Row], path: str) -> None:
    """The rows as a Parquet file. Raises InputError where pyarrow is not installed."""
    require_parquet()
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({name: [row.get(name) for row in rows] for name in column_names(rows)}), path)
