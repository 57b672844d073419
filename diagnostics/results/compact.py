"""A diagnosis in as few bytes as a folder of hundreds of heads allows: version 4 of its JSON.

It is version 3 with its heads taken out of the observations and put into two tables (``results/table.py``), "heads" and
"kv_heads"; an observation says how many of them are its own, in order. Left out are running sums and figures, and the
95 % interval of a mean, which follows from its standard error and degrees of freedom. Numbers have six digits.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from attn_diag.results.estimates import Bias, BiasEstimate, Drift, RoundingBias
from attn_diag.results.figures import HeadFigures, RowRuns, RowStrip, UnitPositions
from attn_diag.results.heads import CaptureDiagnosis, HeadDiagnosis, KvBias, KvHeadDiagnosis
from attn_diag.results.table import column_schemas, packed_table, unpacked_table

VERSION = 4
LEFT_OUT = "running sums and figures"
"""Of a diagnosis in this form: what nothing that is there tells."""
WHOLE = 3
"""The version that has everything, which ``expanded`` gives back."""
_DIGITS = ".6g"
_TABLES: dict[str, type] = {"heads": HeadDiagnosis, "kv_heads": KvHeadDiagnosis}


def folded(text: bytes) -> Iterator[bytes]:
    """The document of version 4 for one of version 3, a column a line, so that tools that show lines can show it."""
    document = json.loads(text, parse_float=lambda number: float(format(float(number), _DIGITS)))
    document["schema_version"] = VERSION
    records: dict[str, list[Any]] = {kind: [] for kind in _TABLES}
    for capture in document["captures"]:
        for observation in capture["observations"]:
            for kind, found in records.items():
                found += observation[kind]
                observation[kind] = len(observation[kind])
    for kind, cls in _TABLES.items():
        document[kind] = packed_table(cls, records[kind])
    start = b"{"
    for key, value in document.items():
        yield start + bare_json(key) + b":"
        yield from _lines(value) if key in ("captures", *_TABLES) else [bare_json(value)]
        start = b",\n"
    yield b"}"


def expanded(document: Any) -> dict[str, Any]:
    """The document of version 3 that one of version 4 stands for.

    Raises ValueError, KeyError or TypeError for what ``folded`` never wrote.
    """
    rest: dict[str, Iterator[Any]] = {}
    for kind, cls in _TABLES.items():
        count = sum(o[kind] for capture in document["captures"] for o in capture["observations"])
        rest[kind] = iter(unpacked_table(cls, document[kind], count))
    captures = [
        {
            **capture,
            "observations": [
                {**o, **{kind: [next(found) for _ in range(o[kind])] for kind, found in rest.items()}}
                for o in capture["observations"]
            ],
        }
        for capture in document["captures"]
    ]
    whole = {key: value for key, value in document.items() if key not in _TABLES}
    return {**whole, "schema_version": WHOLE, "captures": captures}


def is_folded(document: Any) -> bool:
    """Whether JSON data is a diagnosis of this form."""
    return isinstance(document, dict) and type(v := document.get("schema_version")) is int and v == VERSION


def folded_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of ``folded`` documents, from that of version 3."""
    words = "A diagnosis with its heads in tables: a column is named by the path to it in a head of version 3."
    schema = {**copy.deepcopy(schema), "description": words}
    known = schema["$defs"]
    schema["properties"]["schema_version"] = {"const": VERSION, "description": "Version of its schema."}
    for kind, cls in _TABLES.items():
        by_name, by_pattern = column_schemas(cls, schema)
        words = "Columns of all entries, observation by observation; a value alone is that of all."
        schema["properties"][kind] = {
            "type": "object",
            "properties": by_name,
            "patternProperties": by_pattern,
            "additionalProperties": False,
            "description": words,
        }
        known["ObservationDiagnosis"]["properties"][kind] = {
            "type": "integer",
            "minimum": 0,
            "description": f"How many entries of the table {kind} are its own, after those of the observations before.",
        }
    schema["required"] = [*schema["required"], *_TABLES]
    return _reachable(schema)


def _reachable(schema: dict[str, Any]) -> dict[str, Any]:
    """Without the definitions that nothing refers to any more."""
    rest = {key: value for key, value in schema.items() if key != "$defs"}
    used: set[str] = set()
    todo = [rest]
    while todo:
        text = json.dumps(todo.pop())
        for name, definition in schema["$defs"].items():
            if name not in used and f'"#/$defs/{name}"' in text:
                used.add(name)
                todo.append(definition)
    return {**rest, "$defs": {name: d for name, d in schema["$defs"].items() if name in used}}


def without_details(captures: Iterable[CaptureDiagnosis]) -> tuple[CaptureDiagnosis, ...]:
    """Without running sums, figures, and what follows from the rest."""
    found = []
    for capture in captures:
        thin = [
            replace(o, heads=tuple(map(_head, o.heads)), kv_heads=tuple(map(_kv_head, o.kv_heads)))
            for o in capture.observations
        ]
        found.append(replace(capture, observations=tuple(thin)))
    return tuple(found)


def _head(head: HeadDiagnosis) -> HeadDiagnosis:
    bias = Bias(**{f.name: _estimate(getattr(head.bias, f.name)) for f in fields(Bias)})
    rounding = RoundingBias(_estimate(head.rounding_bias.o), _estimate(head.rounding_bias.delta))
    figures = None if head.figures is None else without_curves(head.figures)
    return replace(head, bias=bias, rounding_bias=rounding, figures=figures)


def _kv_head(head: KvHeadDiagnosis) -> KvHeadDiagnosis:
    return replace(head, bias=KvBias(_estimate(head.bias.dk), _estimate(head.bias.dv)))


def _estimate(estimate: BiasEstimate | None) -> BiasEstimate | None:
    if estimate is None:
        return None
    return replace(estimate, drift=Drift(), cumulative_sum=None, drift_band99=None, ci95=None)


def without_curves(figures: HeadFigures) -> HeadFigures:
    """The numbers that stand beside the figures, and no figure."""
    runs, unit = figures.rows, figures.unit_positions
    return HeadFigures(
        RowRuns((), (), (), runs.rows, runs.total), RowStrip((), (), ()), UnitPositions((), (), unit.total),
        o_error=None, alignment=None, dq=None, dw_q=None, max_logit=figures.max_logit,
    )  # fmt: skip


def _lines(value: Any) -> Iterator[bytes]:
    """A list or an object, an item a line."""
    if not value:
        yield bare_json(value)
        return
    items = (
        [(b"", v) for v in value] if isinstance(value, list) else [(bare_json(k) + b":", v) for k, v in value.items()]
    )
    opened, closed = (b"[", b"]") if isinstance(value, list) else (b"{", b"}")
    yield opened
    for number, (key, item) in enumerate(items):
        yield (b",\n" if number else b"\n") + key + bare_json(item)
    yield b"\n" + closed


def bare_json(value: Any) -> bytes:
    """JSON without blanks."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
