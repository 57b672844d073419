"""Every kind of document, and the schema files that ship.

python -m attn_diag.results.publish reports/schema      # writes every kind's present schema there
"""

from __future__ import annotations

import json
import pkgutil
import sys
from importlib import import_module
from pathlib import Path

from attn_diag.results.base import Result, schema_name, schema_versions


def kinds() -> dict[str, type[Result]]:
    """Every kind of document, by its name and the version that is written, such as "probe-1"."""
    room = import_module("attn_diag.results")
    for module in pkgutil.iter_modules(room.__path__):
        import_module(f"{room.__name__}.{module.name}")
    ours = [c for c in Result.__subclasses__() if c.__module__.startswith(room.__name__)]
    return {f"{str(schema_name(c)).removeprefix('attn-diag-')}-{schema_versions(c)[-1]}": c for c in ours}


def schema_text(cls: type[Result]) -> str:
    """The file that ships for a kind of document."""
    return json.dumps(cls.json_schema(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    for name, kind in kinds().items():
        (Path(sys.argv[1]) / f"{name}.schema.json").write_text(schema_text(kind), encoding="utf-8")
