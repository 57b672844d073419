"""Records of one dataclass as a table of columns, every key once: the heads of a diagnosis in a file.

A column is named by the path to it, such as "bias.delta.mean", and holds one cell a record:

- the list of the values; a number, text or truth value that is the same in all records stands alone instead;
- of an object that may be null a column with its own name says where it is there: true, or a list of true and false;
- of a list of objects with names (``quantities``) "quantities.dq.factor"; of one without, such as "top_rows.row", the
  cell lists that field of them all;
- of a dictionary "propagation.dq.shares.delta", null where the key is not there;
- a column that is not there is null, or empty, everywhere.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

# Lists whose objects are told apart by one of their fields.
_NAMED = {"quantities": "quantity", "sites": "site"}
# What is kept as it is: there are few, and they are deep.
_WHOLE = frozenset({"attribution", "microscope", "certificate"})
_ALONE = (int, float, str, bool)


def packed_table(cls: type, records: list[Any]) -> dict[str, Any]:
    """The columns of records that are JSON data of the dataclass ``cls``."""
    table: dict[str, Any] = {}
    for path, column, empty in _columns(cls, "", records):
        if all(value is None or value == empty for value in column):
            continue
        same = isinstance(column[0], _ALONE) and len(set(map(_key, column))) == 1
        table[path] = column[0] if same else column
    return table


def unpacked_table(cls: type, table: dict[str, Any], count: int) -> list[Any]:
    """The records that ``packed_table`` was given. Raises ValueError or TypeError for what it never wrote."""
    full = {path: cells if isinstance(cells, list) else [cells] * count for path, cells in table.items()}
    if wrong := [path for path, cells in full.items() if len(cells) != count]:
        raise ValueError(f"column {wrong[0]} has {len(full[wrong[0]])} cells, not {count}")
    if unknown := [path for path in full if not known_column(cls, path)]:
        raise ValueError(f"there is no column {unknown[0]}")
    return _objects(cls, "", full, count)


def known_column(cls: type, path: str) -> bool:
    """Whether a record of ``cls`` can have a column of this path."""
    name, _, rest = path.partition(".")
    found = _kinds(cls).get(name)
    if found is None:
        return False
    kind, inner, nullable = found
    if not rest:
        return kind in ("value", "whole", "named") or nullable
    if kind == "object":
        return known_column(inner, rest)
    if kind == "named":
        return known_column(inner, rest.partition(".")[2])
    return kind == "dict" or (kind == "list" and rest in _kinds(inner))


def column_schemas(cls: type, schema: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON Schemas of the columns of ``cls`` by name, and by pattern where keys are open.

    Args:
        cls: The dataclass.
        schema: The JSON Schema of a document that holds it, with its ``$defs``.
    """
    by_name: dict[str, Any] = {}
    by_pattern: dict[str, Any] = {}
    _column_schemas(cls, "", schema["$defs"], by_name, by_pattern)
    return by_name, by_pattern


def _column_schemas(
    cls: type, prefix: str, known: dict[str, Any], by_name: dict[str, Any], by_pattern: dict[str, Any]
) -> None:
    properties = known[cls.__name__]["properties"]
    for name, (kind, inner, nullable) in _kinds(cls).items():
        path, words = prefix + name, properties[name].get("description", "")
        if kind in ("object", "dict") and nullable:
            by_name[path] = _cells({"type": ["boolean", "null"]}, f"Where it is there, not null: {words}")
        if kind == "object":
            _column_schemas(inner, f"{path}.", known, by_name, by_pattern)
        elif kind == "named":
            by_name[path] = _cells({"type": ["array", "null"]}, f"In full, where names repeat: {words}")
            of_one: dict[str, Any] = {}
            _column_schemas(inner, "", known, of_one, {})
            for field, described in of_one.items():
                by_pattern[f"^{_literal(path)}\\.[^.]+\\.{_literal(field)}$"] = described
        elif kind == "list":
            for field, described in known[inner.__name__]["properties"].items():
                one = {key: value for key, value in described.items() if key not in ("description", "default")}
                lists = {"anyOf": [{"type": "array", "items": one}, {"type": "null"}]}
                by_name[f"{path}.{field}"] = _cells(lists, described.get("description", ""))
        elif kind == "dict":
            by_pattern[f"^{_literal(path)}\\.[^.]+$"] = _cells({}, words)
        else:
            one = {key: value for key, value in properties[name].items() if key not in ("description", "default")}
            by_name[path] = _cells({"anyOf": [one, {"type": "null"}]}, words)


def _cells(one: dict[str, Any], words: str) -> dict[str, Any]:
    alone = {"type": ["number", "string", "boolean"]}
    return {"anyOf": [{"type": "array", "items": one}, alone], "description": words}


def _literal(path: str) -> str:
    return path.replace(".", "\\.")


def _key(value: Any) -> tuple[type, Any]:
    """Tells values apart as JSON does: 1, 1.0 and true are three."""
    return type(value), value if isinstance(value, _ALONE) else repr(value)


@cache
def _kinds(cls: type) -> dict[str, tuple[str, Any, bool]]:
    """Field -> what becomes of it, the dataclass within (of a value: what is empty), and whether it may be null."""
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: _kind(f.name, hints[f.name]) for f in fields(cls)}


def _kind(name: str, hint: Any) -> tuple[str, Any, bool]:
    while get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    nullable = False
    if get_origin(hint) in (Union, types.UnionType):
        rest = [part for part in get_args(hint) if part is not type(None)]
        nullable = len(rest) < len(get_args(hint))
        if len(rest) > 1:
            return "value", None, nullable
        hint = rest[0]
    if name in _WHOLE:
        return "whole", None, nullable
    if is_dataclass(hint):
        return "object", hint, nullable
    inner = get_args(hint)[:1]
    if get_origin(hint) is tuple and inner and is_dataclass(inner[0]):
        return ("named" if name in _NAMED else "list"), inner[0], nullable
    if get_origin(hint) is dict:
        return "dict", None, nullable
    listed = get_origin(hint) is tuple or (isinstance(hint, type) and issubclass(hint, Sequence) and hint is not str)
    empty: Any = None if nullable else [] if listed else "" if hint is str else None
    return "value", empty, nullable


def _columns(cls: type, prefix: str, records: list[Any]) -> Iterator[tuple[str, list[Any], Any]]:
    """The columns of records, some of which may be null, each with what is empty in it."""
    for name, (kind, inner, nullable) in _kinds(cls).items():
        path, values = prefix + name, [None if record is None else record[name] for record in records]
        if kind in ("value", "whole"):
            yield path, values, inner
            continue
        there = [value is not None for value in values]
        if nullable and kind in ("object", "dict"):
            yield path, there if any(there) else [], None
        if kind == "object":
            yield from _columns(inner, f"{path}.", values) if any(there) else ()
        elif kind == "list":
            for field in _kinds(inner):
                yield f"{path}.{field}", [None if v is None else [item[field] for item in v] for v in values], []
        elif kind == "dict":
            for key in dict.fromkeys(key for value in values for key in value or ()):
                yield f"{path}.{key}", [(value or {}).get(key) for value in values], None
        else:
            yield from _named(inner, path, _NAMED[name], values)


def _named(cls: type, path: str, by: str, values: list[Any]) -> Iterator[tuple[str, list[Any], Any]]:
    names = sorted({item[by] for value in values for item in value or ()}, key=_place(cls, by))
    for value in values:
        given = [item[by] for item in value or ()]
        if given != [name for name in names if name in given] or any("." in name for name in given):
            # Repeated, or in an order of their own.
            yield path, values, []
            return
    for name in names:
        of_name = [next((item for item in value or () if item[by] == name), None) for value in values]
        yield from _columns(cls, f"{path}.{name}.", of_name)


def _place(cls: type, by: str) -> Any:
    """Sorts names as their type lists them."""
    order = get_args(get_type_hints(cls)[by])
    return lambda name: (order.index(name) if name in order else len(order), name)


def _objects(cls: type, prefix: str, table: dict[str, list[Any]], count: int) -> list[Any]:
    records: list[dict[str, Any]] = [{} for _ in range(count)]
    for name, (kind, inner, nullable) in _kinds(cls).items():
        path = prefix + name
        for record, value in zip(records, _values(kind, inner, path, table, count, nullable), strict=True):
            record[name] = value
    return records


def _values(
    kind: str, inner: Any, path: str, table: dict[str, list[Any]], count: int, nullable: bool
) -> list[Any]:  # fmt: skip
    given = table.get(path)
    if kind in ("value", "whole") or (kind == "named" and given is not None):
        return [inner if kind == "value" else None] * count if given is None else given
    below = {key: cells for key, cells in table.items() if key.startswith(f"{path}.")}
    if kind == "object":
        found = _objects(inner, f"{path}.", below, count)
    elif kind == "dict":
        keys = {key: key.removeprefix(f"{path}.") for key in below}
        found = [{name: below[key][i] for key, name in keys.items()} for i in range(count)]
    elif kind == "list":
        found = [_items(inner, path, below, i) for i in range(count)]
    else:
        found = _of_names(inner, path, _NAMED[path.rpartition(".")[2]], below, count)
    if kind in ("object", "dict") and nullable:
        return [value if given is not None and given[i] else None for i, value in enumerate(found)]
    return found


def _items(cls: type, path: str, below: dict[str, list[Any]], at: int) -> list[Any]:
    known = {field: below[f"{path}.{field}"][at] for field in _kinds(cls) if f"{path}.{field}" in below}
    known = {field: cell for field, cell in known.items() if cell is not None}
    length = max(map(len, known.values()), default=0)
    if any(len(cell) != length for cell in known.values()):
        raise ValueError(f"the columns of {path} list different numbers of things in record {at}")
    return [{field: known[field][i] if field in known else None for field in _kinds(cls)} for i in range(length)]


def _of_names(cls: type, path: str, by: str, below: dict[str, list[Any]], count: int) -> list[Any]:
    names = sorted({key.removeprefix(f"{path}.").partition(".")[0] for key in below}, key=_place(cls, by))
    found: list[list[Any]] = [[] for _ in range(count)]
    for name in names:
        for value, record in zip(found, _objects(cls, f"{path}.{name}.", below, count), strict=True):
            if record[by] is not None:
                value.append(record)
    return found
