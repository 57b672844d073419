"""Saved diagnoses shown again: what is read, what is refused with which words, and without torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import attn_diag
from attn_diag.analyses.comparison import read
from attn_diag.analyses.comparison.read import read_diagnosis
from attn_diag.results.diagnosis import Diagnosis


@pytest.fixture(scope="module")
def diagnosis() -> Diagnosis:
    generator = torch.Generator().manual_seed(0)
    q, k, v, o, do = (torch.randn(1, 2, 32, 16, generator=generator).bfloat16() for _ in range(5))
    scores = (q.double() @ k.double().mT / 4).masked_fill(torch.ones(32, 32, dtype=torch.bool).triu(1), -torch.inf)
    o = (scores.softmax(-1) @ v.double()).bfloat16()
    return attn_diag.inspect(q, k, v, o=o, do=do, causal=True, device="cpu")


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
    "number": (lambda _: b"7", "got a JSON int"),
    "deep": (lambda _: b"[" * 100_000, "got text that is not JSON"),
    "no-schema": (lambda _: b"{}", "got no schema"),
    "attribution": (
        lambda _: b'{"schema": "attn-diag-attribution", "schema_version": 1}',
        "got schema 'attn-diag-attribution', the result of another command; name what `attn-diag inspect CAPTURE",
    ),
    "foreign": (lambda _: b'{"schema": "openapi"}', "got schema 'openapi'; "),
    "newer": (edited(lambda d: d.update(schema_version=99)), "expected schema_version 1 or 2, got 99"),
    "newer-what-to-do": (edited(lambda d: d.update(schema_version=99)), "upgrade attn-diag"),
    "version-word": (edited(lambda d: d.update(schema_version="1")), "schema_version 1 or 2, got '1'"),
    "version-true": (edited(lambda d: d.update(schema_version=True)), "schema_version 1 or 2, got True"),
    "version-float": (edited(lambda d: d.update(schema_version=2.0)), "schema_version 1 or 2, got 2.0"),
    "version-long": (edited(lambda d: d.update(schema_version=["1"] * 1000)), "schema_version 1 or 2, got ['1'"),
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


def command(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "attn_diag", "report", *map(str, arguments)]
    return subprocess.run(line, check=False, capture_output=True, text=True, env=os.environ | environment)


def test_command(diagnosis: Diagnosis, tmp_path: Path) -> None:
    saved, html = tmp_path / "saved.json", tmp_path / "page.html"
    saved.write_text(diagnosis.to_json())
    done = command(saved, COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == diagnosis.report(80)
    done = command(saved, "--html", html, "--json", tmp_path / "again.json")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert html.read_text().startswith("<!doctype html>")
    assert Diagnosis.from_json((tmp_path / "again.json").read_text()) == diagnosis
    plain = command(saved, "--plain")
    assert plain.stdout.startswith("verdict      ")
    assert json.loads(command(saved, "--json", "-").stdout)["schema"] == "attn-diag-diagnosis"
    done = command(saved, "--html", saved)
    assert done.returncode == 2
    assert "is the diagnosis to be shown and would be overwritten" in done.stderr
    (tmp_path / "empty.json").touch()
    done = command(tmp_path / "empty.json")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("how", ["report", "report --html", "diff", "inspect"])
def test_without_torch(how: str, diagnosis: Diagnosis, tmp_path: Path, captures: Path) -> None:
    """``inspect`` does import torch: the check can fail."""
    saved = tmp_path / "saved.json"
    saved.write_text(diagnosis.to_json())
    arguments = {
        "report": ["report", saved],
        "report --html": ["report", saved, "--html", tmp_path / "page.html"],
        "diff": ["diff", saved, saved],
        "inspect": ["inspect", captures / "gqa_T200.safetensors", "--head", "0"],
    }[how]
    code = (
        "import sys\nfrom attn_diag.cli import main\n"
        f"sys.argv = ['attn-diag', *{[str(a) for a in arguments]!r}]\n"
        "try:\n    main()\nexcept SystemExit as stopped:\n    assert not stopped.code, stopped.code\n"
        "print('torch loaded:', 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.rstrip().endswith(f"torch loaded: {how == 'inspect'}")
