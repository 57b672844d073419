"""A diagnosis in as few bytes as a folder of hundreds of heads allows: version 4 of its JSON.

It is version 3 with its heads taken out of the observations and put into two tables (``results/table.py``), "heads" and
"kv_heads"; an observation says how many of them are its own, in order. Left out are running sums and figures, and what
follows from what is there: see ``LEFT_OUT``. Numbers have six digits. ``Diagnosis.to_json`` writes everything.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from attn_diag.results.diagnosis import (
    Bias,
    BiasEstimate,
    CaptureDiagnosis,
    Diagnosis,
    Drift,
    HeadDiagnosis,
    KvBias,
    KvHeadDiagnosis,
    RoundingBias,
)
from attn_diag.results.figures import HeadFigures, RowRuns, RowStrip, UnitPositions
from attn_diag.results.table import column_schemas, packed_table, unpacked_table

VERSION = 4
LEFT_OUT = "running sums and figures"
"""Of a diagnosis in this form, what nothing that is there tells."""
_DIGITS = 6
_TABLES: dict[str, type] = {"heads": HeadDiagnosis, "kv_heads": KvHeadDiagnosis}
# What follows from the mean, its standard error and degrees of freedom, or belongs to a running sum.
_OF_ESTIMATE = {"t": None, "ci95": None, "cumulative_sum": None, "drift_band99": None, "positive_fraction": None}


def compact_json(diagnosis: Diagnosis) -> Iterator[bytes]:
    """The document, in parts: a column a line, so that tools that show lines can show it."""
    document = json.loads(
        bare(diagnosis).to_json_bytes(indent=None),
        parse_float=lambda number: float(f"{float(number):.{_DIGITS}g}"),
    )
    document |= {"schema_version": VERSION, "left_out": LEFT_OUT}
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
        yield start + _text(key) + b":"
        yield from _lines(value) if key in ("captures", *_TABLES) else [_text(value)]
        start = b",\n"
    yield b"}"


def expanded(document: Any) -> dict[str, Any]:
    """The document of version 3 that one of version 4 stands for.

    Raises ValueError, KeyError or TypeError for what ``compact_json`` never wrote.
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
    return {**whole, "schema_version": VERSION - 1, "captures": captures}


def is_compact(document: Any) -> bool:
    """Whether JSON data is a diagnosis of this form."""
    return isinstance(document, dict) and type(v := document.get("schema_version")) is int and v == VERSION


def compact_schema() -> dict[str, Any]:
    """The JSON Schema of ``compact_json`` (draft 2020-12)."""
    schema = Diagnosis.json_schema()
    schema["description"] = "A diagnosis, its heads in tables of columns; see results/compact.py and results/table.py."
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


def bare(diagnosis: Diagnosis) -> Diagnosis:
    """Without running sums, figures, and what follows from the rest."""
    captures = []
    for capture in diagnosis.captures:
        thin = [
            replace(
                o,
                heads=tuple(_head(head) for head in o.heads),
                kv_heads=tuple(
                    replace(kv, bias=KvBias(_estimate(kv.bias.dk), _estimate(kv.bias.dv))) for kv in o.kv_heads
                ),
            )
            for o in capture.observations
        ]
        captures.append(replace(capture, observations=tuple(thin)))
    return replace(diagnosis, captures=tuple[CaptureDiagnosis, ...](captures))


def _head(head: HeadDiagnosis) -> HeadDiagnosis:
    bias = Bias(**{f.name: _estimate(getattr(head.bias, f.name)) for f in fields(Bias)})
    rounding = RoundingBias(_estimate(head.rounding_bias.o), _estimate(head.rounding_bias.delta))
    # A verdict that is no finding says nothing that the numbers beside it do not.
    quantities = tuple(replace(q, words="") if q.answer == "good" else q for q in head.quantities)
    figures = None if head.figures is None else without_curves(head.figures)
    return replace(head, bias=bias, rounding_bias=rounding, quantities=quantities, figures=figures)


def _estimate(estimate: BiasEstimate | None) -> BiasEstimate | None:
    return None if estimate is None else replace(estimate, drift=Drift(), **_OF_ESTIMATE)


def without_curves(figures: HeadFigures) -> HeadFigures:
    """The numbers that stand beside the figures, and no figure."""
    runs = figures.rows
    return HeadFigures(
        RowRuns((), (), (), runs.rows, runs.total), RowStrip((), (), ()), UnitPositions((), (), figures.unit_positions.total),
        o_error=None, alignment=None, dq=None, dw_q=None, max_logit=figures.max_logit,
    )  # fmt: skip


def _lines(value: Any) -> Iterator[bytes]:
    """A list or an object, an item a line."""
    if not value:
        yield _text(value)
        return
    items = [(b"", v) for v in value] if isinstance(value, list) else [(_text(k) + b":", v) for k, v in value.items()]
    opened, closed = (b"[", b"]") if isinstance(value, list) else (b"{", b"}")
    yield opened
    for number, (key, item) in enumerate(items):
        yield (b",\n" if number else b"\n") + key + _text(item)
    yield b"\n" + closed


def _text(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
