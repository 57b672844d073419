"""The JSON of a Diagnosis: its documented schema, and what is read back, in this version and older ones."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from builders import SHARED, first_head, inspected, some

import attn_diag
from attn_diag.reports import html_document
from attn_diag.results.embedded import embedded_diagnosis
from attn_diag.results.publish import kinds, schema_text, schemas

ROOT = Path(__file__).parent.parent
VERSION_1 = sorted((ROOT / "tests" / "data").glob("diagnosis_v1_*.json"))
KINDS = kinds()
SCHEMAS = schemas()
REGENERATE = "python -m attn_diag.results.publish reports/schema"


def shipped(version: int) -> dict[str, Any]:
    """The schema as the package ships it."""
    schema: dict[str, Any] = json.loads(shipped_text(f"diagnosis-{version}"))
    return schema


def shipped_text(kind: str) -> str:
    return (resources.files("attn_diag.reports") / "schema" / f"{kind}.schema.json").read_text(encoding="utf-8")


def errors(document: Any, version: int) -> list[str]:
    """Where a document breaks a schema."""
    validator = jsonschema.Draft202012Validator(shipped(version))
    return [error.json_path for error in validator.iter_errors(document)]


def written(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(inspected(name, details=1).to_json())
    return document


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_kind_of_document_has_its_schema_shipped(kind: str) -> None:
    assert shipped_text(kind) == schema_text(SCHEMAS[kind]), f"the schema has changed; write it again: {REGENERATE}"
    jsonschema.Draft202012Validator.check_schema(json.loads(shipped_text(kind)))


def test_every_kind_of_document_is_known_and_none_else_is_shipped() -> None:
    folder = Path(str(resources.files("attn_diag.reports") / "schema"))
    assert {path.name.removesuffix(".schema.json") for path in folder.glob("*.json")} == {
        *SCHEMAS,
        "diagnosis-1",
        "diagnosis-2",
    }
    assert len(KINDS) == 28
    assert SCHEMAS.keys() == {*KINDS, "diagnosis-4"}
    assert attn_diag.json_schema() == shipped(3)


def undescribed(schema: dict[str, Any]) -> list[str]:
    return [
        f"{name}.{field}"
        for name, definition in {**schema.get("$defs", {}), schema["title"]: schema}.items()
        for field, properties in {"": definition, **definition["properties"]}.items()
        if not properties.get("description")
    ]


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_field_is_described(kind: str) -> None:
    assert undescribed(json.loads(shipped_text(kind))) == []


def test_what_is_not_described_is_found() -> None:
    """Version 1 of the diagnosis described its classes alone."""
    assert "BiasEstimate.mean" in undescribed(shipped(1))


@pytest.mark.parametrize("name", SHARED)
def test_every_shared_capture_fits_the_schema(name: str) -> None:
    document = written(name)
    assert errors(document, 3) == []
    head = attn_diag.Diagnosis.from_json(json.dumps(document)).ranked()[0][2]
    assert None not in (head.attribution, head.microscope)


def head_of(document: dict[str, Any]) -> dict[str, Any]:
    head: dict[str, Any] = document["captures"][0]["observations"][0]["heads"][0]
    return head


BREAKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a figure is lost": lambda d: head_of(d).pop("figures"),
    "a text for a number": lambda d: head_of(d).update(noise_factor="large"),
    "counts that are no integers": lambda d: head_of(d)["figures"]["strip"].update(exact=[1.5]),
    "another version": lambda d: d.update(schema_version=4),
    "no verdict of that name": lambda d: head_of(d)["verdict"].update(labels=["fine"]),
    "a microscope without its row": lambda d: head_of(d)["microscope"].pop("row"),
}


@pytest.mark.parametrize("change", BREAKS)
def test_the_schema_rejects(change: str) -> None:
    document = written("gpt2_step637_L2H6")
    assert errors(document, 3) == []
    BREAKS[change](document)
    assert errors(document, 3) != []


def test_lists_that_stand_side_by_side_have_one_length() -> None:
    document = written("gpt2_step637_L2H6")
    head_of(document)["figures"]["strip"].update(unit=[])
    with pytest.raises(attn_diag.InputError, match="side by side must have one length"):
        attn_diag.Diagnosis.from_json(json.dumps(document))


@pytest.mark.parametrize("file", VERSION_1, ids=lambda file: file.stem)
def test_version_1_is_read_and_shown(file: Path) -> None:
    text = file.read_text()
    assert file.stat().st_size <= 61_440
    assert errors(json.loads(text), 1) == []
    found = attn_diag.Diagnosis.from_json(text)
    assert found.schema_version == 1
    for capture, observation, head in found.entries():
        assert (head.figures, head.attribution, head.microscope, head.details_note) == (None, None, None, None)
        assert capture.source in found.report()
        assert observation.pooled.figures is None
    shown, page = found.report().replace("\n", " "), html_document(found)
    assert "noise floor" in shown
    assert "noise floor" in page
    assert shown.startswith("PASS: no mean error of the kernel's own in ")
    read = attn_diag.Diagnosis.from_json(embedded_diagnosis(page))
    assert [head.noise_factor for *_, head in read.entries()] == [head.noise_factor for *_, head in found.entries()]
    assert attn_diag.Diagnosis.from_json(found.to_json()) == found
    assert errors(json.loads(found.to_json()), 1) == []


def test_there_are_version_1_documents_of_many_heads_and_with_dw_q() -> None:
    found = [attn_diag.Diagnosis.from_json(file.read_bytes()) for file in VERSION_1]
    assert max(len(list(diagnosis.entries())) for diagnosis in found) > 2
    assert any(head.propagation.dw_q is not None for diagnosis in found for _, _, head in diagnosis.entries())


def test_version_2_is_read_and_shown() -> None:
    text = (ROOT / "tests" / "data" / "diagnosis_v2_paper_T40.json").read_text()
    assert errors(json.loads(text), 2) == []
    found = attn_diag.Diagnosis.from_json(text)
    head = first_head(found)
    assert (found.schema_version, head.quantities, head.not_judged) == (2, (), ())
    assert None not in (head.attribution, head.microscope)
    assert found.report().startswith("LOSSY: head 0.")
    assert "delta's error is 6.13 times what one correct rounding of O makes" in " ".join(found.report().split())
    assert attn_diag.Diagnosis.from_json(embedded_diagnosis(html_document(found))).labels == {"lossy"}
    assert errors(json.loads(found.to_json()), 2) == []


@pytest.mark.parametrize("count", [0, 1, 3])
def test_in_parts_it_is_the_same(count: int) -> None:
    """A capture at a time, whatever stands in names and however long the summary is."""
    found = inspected("gpt2_step637_L2H6")
    hostile = 'a"captures":[]'
    captures = tuple(replace(found.captures[0], source=f"{hostile}{number}") for number in range(count))
    summary = replace(found.summary, sentence=hostile, warnings=(hostile,) * 3)
    found = replace(found, captures=captures, summary=summary, tool=replace(found.tool, device=hostile))
    parts = list(found.json_parts())
    assert b"".join(parts) == found.to_json_bytes(indent=None)
    assert count < 3 or max(map(len, parts)) < len(found.to_json_bytes(indent=None)) / 2


@pytest.mark.parametrize("place", ["figures", "attribution", "microscope", "bias"])
@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_finite_are_strings(place: str, word: str) -> None:
    document = written("gpt2_step637_L2H6")
    head = head_of(document)
    changed = {
        "figures": lambda: head["figures"]["dq"]["observed"].__setitem__(0, word),
        "attribution": lambda: head["attribution"]["totals"]["o"].update(captured=word),
        "microscope": lambda: head["microscope"].update(error=word),
        "bias": lambda: head["bias"]["delta"].update(mean=word),
    }
    changed[place]()
    assert errors(document, 3) == []
    found = attn_diag.Diagnosis.from_json(json.dumps(document))
    again = json.loads(found.to_json())
    assert again == document
    if place == "figures":
        dq = some(some(first_head(found).figures).dq)
        value = some(dq.observed)[0]
        assert math.isnan(value) if word == "NaN" else value == float(word)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON, or is cut off"),
        ("<html>", "not JSON.*name what"),
        ("[1]", "expected a document .* got a JSON list"),
        ("null", "got a JSON NoneType"),
        ("{}", "got no schema"),
        ('{"schema": "attn-diag-attribution", "schema_version": 1}', "'attn-diag-attribution', the result of another"),
        ('{"schema": "attn-diag-diagnosis"}', "expected schema_version 1 or 2 or 3 or 4, got None"),
        (
            '{"schema": "attn-diag-diagnosis", "schema_version": 5}',
            "schema_version 1 or 2 or 3 or 4, got 5: .*upgrade attn-diag.*newer",
        ),
        ('{"schema": "attn-diag-diagnosis", "schema_version": 4}', r"damaged or was edited \('captures'\)"),
        ('{"schema": "attn-diag-diagnosis", "schema_version": true}', "got True"),
        ('{"schema": "attn-diag-diagnosis", "schema_version": [1]}', r"got \[1\]"),
        ('{"schema": "attn-diag-diagnosis", "schema_version": 2}', "4 wrong or missing fields, the first at tool"),
    ],
)
def test_what_is_no_diagnosis_is_refused_in_words(text: str, message: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(attn_diag.InputError, match=message):
            attn_diag.Diagnosis.from_json(form)


def test_bytes_that_are_no_text_are_refused_in_words() -> None:
    with pytest.raises(attn_diag.InputError, match="not JSON"):
        attn_diag.Diagnosis.from_json(b"\xff\xfe\x00")


def test_a_broken_document_names_the_place() -> None:
    document = json.loads(VERSION_1[0].read_text())
    broken = copy.deepcopy(document)
    broken["captures"][0]["observations"][0]["heads"][1]["bias"]["o"]["mean"] = "much"
    with pytest.raises(attn_diag.InputError, match=r"captures\.0\.observations\.0\.heads\.1\.bias\.o\.mean"):
        attn_diag.Diagnosis.from_json(json.dumps(broken))
    attn_diag.Diagnosis.from_json(json.dumps(document))
