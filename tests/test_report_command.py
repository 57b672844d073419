"""Saved diagnoses shown again: what is read, what is refused with which words, and without torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from builders import rounded_inputs
from command_line import Run, command, loaded_by

import attn_diag
from attn_diag.analyses.comparison import read
from attn_diag.analyses.comparison.read import read_diagnosis
from attn_diag.results.diagnosis import Diagnosis


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    given: dict[str, Any] = {**rounded_inputs(rows=32)}
    return attn_diag.inspect(**given, causal=True, device="cpu")


def page(text: str) -> str:
    """What an HTML report is, as far as reading back goes."""
    inside = text.replace("<", "\\u003c")
    return f'<!doctype html><script type="application/json" id="attn-diag-diagnosis">{inside}</script><p>2 < 3'


@pytest.mark.parametrize("kind", ["json", "json-with-mark", "html"])
def test_round_trip(kind: str, diagnosis: Diagnosis, tmp_path: Path) -> None:
    path, text = tmp_path / "saved", diagnosis.to_json()
    path.write_text(
        page(text) if kind == "html" else text, encoding="utf-8-sig" if kind == "json-with-mark" else "utf-8"
    )
    assert read_diagnosis(path) == diagnosis
    assert read_diagnosis(str(path)).report(80) == diagnosis.report(80)


def edited(change: Callable[[dict[str, object]], object]) -> Callable[[str], bytes]:
    def make(text: str) -> bytes:
        document = json.loads(text)
        change(document)
        return json.dumps(document).encode()

    return make


BAD: dict[str, tuple[Callable[[str], bytes], str]] = {
    "empty": (lambda _: b"", "the file is empty"),
    "blank": (lambda _: b" \n\n", "the file is empty"),
    "garbage": (lambda _: b"\x93NUMPY\x01\x00\xff\xfe", "neither JSON nor HTML"),
    "prose": (lambda _: b"dear reader", "got text that is not JSON"),
    "cut-off": (lambda text: text[: len(text) // 2].encode(), "or is cut off"),
    "list": (lambda _: b"[1, 2]", "got a JSON list; name what `attn-diag inspect CAPTURE --json FILE` (or --html)"),
    "deep": (lambda _: b"[" * 100_000, "got text that is not JSON"),
    "attribution": (
        lambda _: b'{"schema": "attn-diag-attribution", "schema_version": 1}',
        "got schema 'attn-diag-attribution', the result of another command; name what `attn-diag inspect CAPTURE",
    ),
    "foreign": (lambda _: b'{"schema": "openapi"}', "got schema 'openapi'; "),
    "newer": (edited(lambda d: d.update(schema_version=99)), "upgrade attn-diag"),
    "version-word": (edited(lambda d: d.update(schema_version="1")), "schema_version 1 or 2 or 3 or 4, got '1'"),
    "version-float": (edited(lambda d: d.update(schema_version=2.0)), "schema_version 1 or 2 or 3 or 4, got 2.0"),
    "version-long": (
        edited(lambda d: d.update(schema_version=["1"] * 1000)),
        "schema_version 1 or 2 or 3 or 4, got ['1'",
    ),
    "foreign-long": (lambda _: b'{"schema": "' + b"x" * 1000 + b'"}', "got schema 'xxx"),
    "missing-part": (edited(lambda d: d.pop("family")), "family"),
    "wrong-part": (edited(lambda d: d.update(captures="none")), "captures"),
    "other-page": (lambda _: b"<html><body>hello</body></html>", "an HTML page, but expected"),
    "page-of-garbage": (lambda _: page("{{{").encode(), ": "),
}


@pytest.mark.parametrize("case", BAD)
def test_refused(case: str, diagnosis: Diagnosis, tmp_path: Path) -> None:
    make, message = BAD[case]
    path = tmp_path / "saved.json"
    path.write_bytes(make(diagnosis.to_json()))
    with pytest.raises(attn_diag.InputError) as refused:
        read_diagnosis(path)
    assert message in str(refused.value)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < 500


def test_refused_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, diagnosis: Diagnosis) -> None:
    with pytest.raises(attn_diag.InputError, match="is a directory"):
        read_diagnosis(tmp_path)
    with pytest.raises(attn_diag.InputError, match="no such file"):
        read_diagnosis(tmp_path / "nothing.json")
    with pytest.raises(attn_diag.InputError, match=r"is a capture, expected a diagnosis .* attn-diag inspect CAPTURE"):
        read_diagnosis(tmp_path / "x.safetensors")
    path = tmp_path / "big.json"
    path.write_text(diagnosis.to_json())
    monkeypatch.setattr(read, "_LARGEST", 100)
    with pytest.raises(attn_diag.InputError, match="more than any diagnosis takes"):
        read_diagnosis(path)


def test_command(diagnosis: Diagnosis, tmp_path: Path, run: Run) -> None:
    saved, html = tmp_path / "saved.json", tmp_path / "page.html"
    saved.write_text(diagnosis.to_json())
    done = run("report", saved, COLUMNS="80")
    assert (done.code, done.err) == (0, "")
    assert done.out == diagnosis.report(80)
    done = run("report", saved, "--html", html, "--json", tmp_path / "again.json", "--json-full")
    assert (done.code, done.out, done.err) == (0, "", "")
    assert html.read_text().startswith("<!doctype html>")
    assert Diagnosis.from_json((tmp_path / "again.json").read_text()) == diagnosis
    plain = run("report", saved, "--plain")
    assert plain.out.startswith("verdict      ")
    assert json.loads(run("report", saved, "--json", "-").out)["schema"] == "attn-diag-diagnosis"
    done = run("report", saved, "--html", saved)
    assert done.code == 2
    assert "is the diagnosis to be shown and would be overwritten" in done.err
    (tmp_path / "empty.json").touch()
    done = run("report", tmp_path / "empty.json")
    assert (done.code, done.out) == (2, "")
    assert len(done.err.splitlines()) == 1


def test_neither_report_nor_diff_loads_torch(diagnosis: Diagnosis, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    saved.write_text(diagnosis.to_json())
    shown = [command("report", saved), command("report", saved, "--html", tmp_path / "page.html")]
    assert loaded_by("\n".join([*shown, command("diff", saved, saved)]), "torch", "pydantic") == {"pydantic"}
