"""The JSON Schema of a result, with a description for every field, taken from the fields' docstrings."""

from __future__ import annotations

import ast
import inspect
import sys
from dataclasses import is_dataclass
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema


class _AllFields(GenerateJsonSchema):
    """What is written has every field, those with a default too."""

    def field_is_required(self, field: Any, total: bool) -> bool:  # noqa: ARG002
        """Whether a document must have ``field``."""
        return True


def described_schema(cls: type, adapter: TypeAdapter[Any]) -> dict[str, Any]:
    """The schema (draft 2020-12) of what ``adapter`` writes of the dataclass ``cls``.

    pydantic's ``use_attribute_docstrings`` would do it too, but where dataclasses nest it asks for one configuration
    of all of them, and takes a second to read the sources whenever a document is read or written.
    """
    schema = adapter.json_schema(mode="serialization", schema_generator=_AllFields)
    lineages = [[c for c in reversed(part.__mro__) if c is not object] for part in parts_of(cls)]
    found: dict[str, dict[str, str]] = {}
    for module in sorted({c.__module__ for lineage in lineages for c in lineage}):
        found |= _field_docstrings(inspect.getsource(sys.modules[module]))
    for lineage in lineages:
        # A field that a class repeats without a word has the words of the class that it derives from.
        found[lineage[-1].__name__] = {k: words for c in lineage for k, words in found.get(c.__name__, {}).items()}
    for name, definition in {**schema.get("$defs", {}), schema.get("title", ""): schema}.items():
        for field, properties in definition.get("properties", {}).items():
            if field in found.get(name, {}):
                properties["description"] = found[name][field]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def parts_of(cls: type) -> set[type]:
    """``cls`` and every dataclass that its fields can hold, at any depth."""
    found: set[type] = set()
    open_types: list[Any] = [cls]
    while open_types:
        item = open_types.pop()
        if isinstance(item, type) and is_dataclass(item):
            if item not in found:
                found.add(item)
                open_types += get_type_hints(item).values()
        else:
            open_types += get_args(item)
    return found


def _field_docstrings(source: str) -> dict[str, dict[str, str]]:
    """class -> field -> the string that follows it."""
    result: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = result.setdefault(node.name, {})
        for field, after in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                fields[field.target.id] = inspect.cleandoc(after.value.value)
    return result
