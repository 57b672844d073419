"""The JSON Schema of a dataclass with a description for every field, taken from the fields' docstrings."""

from __future__ import annotations

import ast
import inspect
import sys
from collections.abc import Iterable
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema


class _AllFields(GenerateJsonSchema):
    """What is written has every field, those with a default too."""

    def field_is_required(self, field: Any, total: bool) -> bool:  # noqa: ARG002
        """Whether a document must have ``field``."""
        return True


def described_schema(adapter: TypeAdapter[Any], modules: Iterable[str]) -> dict[str, Any]:
    """The schema (draft 2020-12) of what ``adapter`` writes; ``modules``: where its classes are defined.

    pydantic's ``use_attribute_docstrings`` would do it too, but where dataclasses nest it asks for one configuration
    of all of them, and takes a second to read the sources whenever a document is read or written.
    """
    schema = adapter.json_schema(mode="serialization", schema_generator=_AllFields)
    found: dict[str, dict[str, str]] = {}
    for module in modules:
        found |= _field_docstrings(inspect.getsource(sys.modules[module]))
    for name, definition in {**schema.get("$defs", {}), schema.get("title", ""): schema}.items():
        for field, properties in definition.get("properties", {}).items():
            if field in found.get(name, {}):
                properties["description"] = found[name][field]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


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
