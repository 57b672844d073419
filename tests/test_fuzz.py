"""Small files that ask for much, and mutated ones of every kind: refused in bounded time and memory, or read."""

from __future__ import annotations

import base64
import gzip
import io
import json
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from fuzzing import TARGETS, attempt, corpus, diagnosis, saved, tensors

from attn_diag import InputError, convert, inspect_captures, load
from attn_diag.analyses.comparison.diff import as_diagnosis
from attn_diag.analyses.comparison.read import read_diagnosis
from attn_diag.captures.capture import Capture
from attn_diag.captures.pickles import unpickle

pytestmark = pytest.mark.slow

# Of CPU time, for each kind of input: with making what is mutated the whole stays below a minute.
SECONDS = 6


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_inputs_are_read_or_refused(target: str, tmp_path: Path) -> None:
    corpus(target), diagnosis()
    start, seen = time.process_time(), set[str]()
    for seed in range(400):
        seen.add(attempt(target, seed, tmp_path))
        if time.process_time() - start > SECONDS:
            break
    # Mutations that are all refused, or all harmless, reach nothing.
    assert seen == {"success", "refused"}


def test_a_hole_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(_: Path) -> Capture:
        raise KeyError

    monkeypatch.setattr("fuzzing.load", forgetful)
    with pytest.raises(KeyError):
        attempt("inspect", 0, tmp_path)


def nested(kind: type, width: int = 10) -> object:
    """Containers of 10**20 values, if what is shared counts each time."""
    found: object = "a"
    for _ in range(20):
        found = [found] * width if kind is list else dict.fromkeys(map(str, range(width)), found)
    return found


def endless() -> object:
    found: list[object] = []
    found.append(found)
    return found


def archive(*members: tuple[str, bytes], kind: int = zipfile.ZIP_STORED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", kind) as file:
        for name, data in members:
            file.writestr(name, data)
    return buffer.getvalue()


def pickled(opcodes: bytes) -> bytes:
    return archive(("archive/data.pkl", b"\x80\x02" + opcodes + b"."))


def with_more(**more: object) -> bytes:
    return saved({n: t for n, t in tensors().items() if n in "qkvo"} | more)


def repacked(data: bytes) -> bytes:
    """A .pt as zip writes it."""
    with zipfile.ZipFile(io.BytesIO(data)) as file:
        return archive(*((m.filename, file.read(m)) for m in file.infolist()), kind=zipfile.ZIP_DEFLATED)


def claiming(data: bytes, field: int) -> bytes:
    """An archive whose last member says in the directory that it is 2 GB long: ``field`` 20 packed, 24 unpacked."""
    place = data.rindex(b"PK\1\2") + field
    return data[:place] + (2**31 - 1).to_bytes(4, "little") + data[place + 4 :]


def plain_arrays() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **{n: tensors()[n].float().numpy() for n in "qkvo"})  # type: ignore[arg-type]
    return buffer.getvalue()


def zeros(*shape: int) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **{n: np.zeros(shape, np.float16) for n in "qkvo"})  # type: ignore[arg-type]
    return buffer.getvalue()


def page(size: int) -> bytes:
    packed = base64.b64encode(gzip.compress(b"[" * size, 1)).decode()
    return f'<script id="attn-diag-diagnosis">{json.dumps({"gzip": packed})}</script>'.encode()


DOUBLED = b"".join(b"q" + bytes([i, ord("h"), i]) + b"\x86" for i in range(40))
BOMBS: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "lists": ("a.pt", lambda: with_more(extra=nested(list)), "unfolds to more than"),
    "dicts": ("a.pt", lambda: with_more(extra=nested(dict)), "unfolds to more than"),
    "lists-in-metadata": ("a.pt", lambda: with_more(metadata={"notes": nested(list)}), "unfolds to more than"),
    "lists-as-scale": ("a.pt", lambda: with_more(scale=nested(list)), "unfolds to more than"),
    "cycle": ("a.pt", lambda: with_more(extra=endless()), "lie in each other"),
    "hash": ("a.pt", lambda: pickled(b"}K\x01\x85" + DOUBLED + b"K\x01s"), "a key that is a tuple"),
    "bytearray": ("a.pt", lambda: pickled(b"cbuiltins\nbytearray\nJ\xff\xff\xff\x7f\x85R"), "builtins.bytearray"),
    "hex": ("a.pt", lambda: pickled(b"c_codecs\nencode\nX\1\0\0\0aX\3\0\0\0hex\x86R"), "_codecs.encode"),
    "stride-0": ("a.pt", lambda: with_more(q=torch.zeros(1).bfloat16().expand(1, 1, 2**30, 16)), "repeats its values"),
    "stride-0-rows": ("a.pt", lambda: saved({n: torch.zeros(1).expand(1, 1, 2**20, 1) for n in "qkv"}), "query rows"),
    "deflated": ("a.pt", lambda: repacked(with_more(more=torch.zeros(2**22))), "compressed"),
    "packed-size": ("a.pt", lambda: claiming(with_more(), 20), "compressed, or overlap"),
    "unpacked-size": ("a.pt", lambda: claiming(with_more(), 24), "compressed, or overlap"),
    "packed-array": ("a.npz", lambda: claiming(plain_arrays(), 20), "longer than the file can hold"),
    "unpacked-array": ("a.npz", lambda: claiming(plain_arrays(), 24), "longer than the file can hold"),
    "zeros": ("a.npz", lambda: zeros(1, 1, 2**20, 2), "query rows"),
    "errors": (
        "a.json",
        lambda: diagnosis().replace('"captures": [', f'"captures": [{"{}," * 2**17}').encode(),
        "captures.0",
    ),
    "page": ("a.html", lambda: page(2**28), "unpacks to more than"),
}


@pytest.mark.parametrize("case", BOMBS)
def test_bombs_are_refused_before_they_go_off(case: str, tmp_path: Path) -> None:
    name, make, words = BOMBS[case]
    path = tmp_path / name
    path.write_bytes(make())
    readers: list[Callable[[], object]] = (
        [lambda: read_diagnosis(path)] if name in ("a.html", "a.json") else [lambda: load(path)]
    )
    if name == "a.pt":
        readers.append(lambda: convert(path, tmp_path / "out"))
    for read in readers:
        start = time.process_time()
        tracemalloc.start()
        with pytest.raises(InputError, match=words):
            read()
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert time.process_time() - start < 5
        assert peak < 2**27


def test_unused_arrays_stay_packed(tmp_path: Path) -> None:
    given = {n: t.float().numpy() for n, t in tensors().items() if n in "qkvo"}
    np.savez_compressed(tmp_path / "a.npz", **given, unused=np.zeros(2**26))  # type: ignore[arg-type]
    tracemalloc.start()
    inspect_captures([load(tmp_path / "a.npz")], device="cpu")
    assert tracemalloc.get_traced_memory()[1] < 2**28
    tracemalloc.stop()


def test_what_torch_save_writes_comes_back(tmp_path: Path) -> None:
    content = {
        "f8": torch.randn(3).to(torch.float8_e4m3fn),
        "view": torch.arange(12).reshape(3, 4).T[1:],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "empty": torch.empty(0, 3, dtype=torch.bool),
        "complex": torch.ones(2, dtype=torch.complex64),
        "plain": {"a": [1, 2.5, None, True, "x"], (1, "b"): -(2**70)},
    }
    for old in (False, True):
        # The old format knows no FP8.
        kept = {n: v for n, v in content.items() if n != "f8" or not old}
        (tmp_path / "a.pt").write_bytes(saved(kept, old=old))
        found = unpickle(tmp_path / "a.pt")
        assert found["plain"] == content["plain"]
        for name, value in kept.items():
            if isinstance(value, torch.Tensor):
                # FP8 numbers are compared by torch as bytes alone.
                bits = torch.uint8 if name == "f8" else value.dtype
                assert found[name].dtype == value.dtype
                assert torch.equal(found[name].view(bits), value.detach().view(bits))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_inputs_of_the_smallest_subnormal(dtype: torch.dtype) -> None:
    least = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    given = {name: least.expand(1, 1, 20, 8).clone() for name in ("q", "k", "v", "o", "do", "dq", "dk", "dv")}
    assert inspect_captures([Capture.from_tensors(given)], device="cpu").labels


@pytest.mark.parametrize("name", [".o", "observed.o"])
def test_names_without_an_observation_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="names no observation of its own"):
        Capture.from_tensors(tensors() | {name: tensors()["o"]})


@pytest.mark.parametrize("part", ["begin", "measure", "errors", "pool"])
def test_one_bad_capture_does_not_lose_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    from attn_diag.analyses.inspection.capture_job import CaptureJob

    for layer, name in enumerate(("good", "breaks", "other")):
        Capture.from_tensors(tensors(), layer=layer).save(tmp_path / f"{name}.safetensors")
    (tmp_path / "damaged.safetensors").write_bytes(b"\0" * 9)
    work = getattr(CaptureJob, part)

    def broken(self: CaptureJob) -> object:
        if "breaks" in self.capture.source:
            raise ZeroDivisionError
        return work(self)

    monkeypatch.setattr(CaptureJob, part, broken)
    said: list[InputError] = []
    found = as_diagnosis(tmp_path, level=0.01, device="cpu", progress=None, skip=said.append)
    assert [Path(c.source).stem for c in found.captures] == ["good", "other"]
    assert ["damaged" in str(said[0]), "ZeroDivisionError" in str(said[1])] == [True, True]
    assert len(found.summary.unreadable) == 2
