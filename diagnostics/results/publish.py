"""Every kind of document, and the schema files that ship.

python -m attn_diag.results.publish reports/schema      # writes every kind's present schema there
"""

from __future__ import annotations

import json
import pkgutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from attn_diag.results import compact
from attn_diag.results.base import Result, schema_name, schema_versions


def kinds() -> dict[str, type[Result]]:
    """Every kind of document, by its name and the version that is written, such as "probe-1"."""
    room = import_module("attn_diag.results")
    for module in pkgutil.iter_modules(room.__path__):
        import_module(f"{room.__name__}.{module.name}")
    ours = [c for c in Result.__subclasses__() if c.__module__.startswith(room.__name__)]
    return {f"{str(schema_name(c)).removeprefix('attn-diag-')}-{schema_versions(c)[-1]}": c for c in ours}


def schemas() -> dict[str, dict[str, Any]]:
    """The schema of every kind of document, and of the form in which commands save a diagnosis."""
    found = {name: kind.json_schema() for name, kind in kinds().items()}
    folded = f"diagnosis-{compact.VERSION}"
    return {**found, folded: compact.folded_schema(found[f"diagnosis-{compact.WHOLE}"])}


def schema_text(schema: dict[str, Any]) -> str:
    """The file that ships for a schema."""
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, schema in schemas().items():
        (Path(sys.argv[1]) / f"{name}.schema.json").write_text(schema_text(schema), encoding="utf-8")
