"""Captures in an object store: read part by part, written whole, and what is said where that does not work."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Run
from tiny_models import nano_gpt, steps
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import find_captures, load
from attn_diag.captures.places import is_remote, place
from attn_diag.errors import InputError

moto_server = pytest.importorskip("moto.server")
BYTES_OF_A_HEADER = 4096


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """The S3 file system of a server on this machine, with one bucket; what it was asked is in ``asked``."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("AWS_ACCESS_KEY_ID", "key")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
        files: Any = place("s3://bucket")
        files.fs.mkdir("bucket")
        yield files.fs
    server.stop()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A capture on this machine."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 64, 16, generator=generator).bfloat16() for _ in range(3))
    o = scaled_dot_product_attention(q, k, v, is_causal=True)
    capture = Capture.from_tensors({"q": q, "k": k, "v": v, "o": o}, causal="top-left")
    return capture.save(tmp_path_factory.mktemp("here") / "layer0.safetensors")


@pytest.fixture
def stored(store: Any, file: Path, request: pytest.FixtureRequest) -> str:
    """The URL of a folder with the capture, and one below it."""
    url = f"s3://bucket/{request.node.name}"
    assert store.exists("bucket")
    saved = load(file).save(f"{url}/layer0.safetensors")
    load(file).save(f"{url}/rank1/layer0.safetensors")
    assert is_remote(saved)
    return url


def test_a_capture_is_what_it_was_on_disk(stored: str, file: Path) -> None:
    here, there = load(file), load(f"{stored}/layer0.safetensors")
    assert there.metadata == here.metadata
    assert set(there.tensors) == set(here.tensors)
    for name, tensor in here.tensors.items():
        assert torch.equal(there.tensors[name][...], tensor[...])
        assert torch.equal(there.tensors[name][0, 1], tensor[0, 1])


def test_what_is_looked_at_alone_travels(stored: str, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    whole = store.cat_file

    def counted(path: str, start: int, end: int) -> bytes:
        asked.append(end - start)
        content: bytes = whole(path, start=start, end=end)
        return content

    files: Any = place(stored)
    monkeypatch.setattr(files.fs, "cat_file", counted)
    capture = load(f"{stored}/layer0.safetensors")
    assert sum(asked) < 2 * BYTES_OF_A_HEADER
    asked.clear()
    head = capture.tensors["q"][0, 1]
    assert sum(asked) == head.nbytes


def test_folders_are_searched_and_commands_read_them(stored: str, file: Path, run: Run) -> None:
    assert [str(path) for path in find_captures([stored])] == [
        f"{stored}/layer0.safetensors",
        f"{stored}/rank1/layer0.safetensors",
    ]
    assert run("inspect", stored).code == 0
    assert run("diff", f"{stored}/layer0.safetensors", file).out.startswith("OK")
    assert isinstance(attn_diag.inspect(f"{stored}/rank1/layer0.safetensors"), attn_diag.Diagnosis)


def test_another_object_under_the_name_is_noticed(stored: str, store: Any) -> None:
    url = f"{stored}/layer0.safetensors"
    capture = load(url)
    content = bytearray(store.cat_file(url))
    content[-1] ^= 1
    store.pipe_file(url, bytes(content))
    with pytest.raises(InputError, match="overwritten since it was opened"):
        capture.tensors["q"][0, 0]
    store.rm(url)
    with pytest.raises(InputError, match="removed since it was opened"):
        capture.tensors["q"][0, 0]


@pytest.mark.parametrize("kept", [0, 4, 900, -1])
def test_half_an_object_is_refused(stored: str, store: Any, kept: int) -> None:
    url = f"{stored}/layer0.safetensors"
    store.pipe_file(url, store.cat_file(url)[:kept])
    with pytest.raises(InputError, match=r"layer0\.safetensors: (truncated or damaged|the file is empty)"):
        load(url)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("s3://bucket/nothing", "no such file or directory"),
        ("s3://nobucket/x.safetensors", "no such file or directory"),
        ("s3://bucket/notes.txt", "not a capture; expected a file ending in"),
        ("s3://bucket/dump.pt", "only .safetensors is read from a store"),
        ("nosuch://host/x.safetensors", "nosuch"),
    ],
)
def test_what_cannot_be_read_is_said(store: Any, run: Run, url: str, said: str) -> None:
    for name in ("notes.txt", "dump.pt"):
        store.pipe_file(f"bucket/{name}", b"something")
    done = run("inspect", url)
    assert done.code == 2
    assert f"attn-diag: {url}: " in done.err
    assert said in done.err


@pytest.mark.usefixtures("store")
def test_a_store_that_does_not_answer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise RuntimeError("Could not connect\nto the endpoint URL")

    files: Any = place("s3://bucket")
    monkeypatch.setattr(files.fs, "info", unreachable)
    done = run("inspect", "s3://bucket/folder")
    assert done.code == 2
    assert "s3://bucket/folder: cannot be reached: Could not connect to the endpoint URL; check its name" in done.err


def test_without_the_library(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setitem(sys.modules, "upath", None)
    done = run("inspect", "s3://bucket/x.safetensors")
    assert done.code == 2
    assert "install attn-diag[remote]" in done.err


@pytest.mark.usefixtures("store")
def test_a_model_is_captured_into_a_store() -> None:
    tiny, url = nano_gpt(), "s3://bucket/training"
    with attn_diag.capture(tiny.model, url, layers=[0]) as recorder:
        steps(tiny, 2)
        with pytest.raises(InputError, match="is another run's"):
            attn_diag.capture(tiny.model, url).start()
    assert not recorder.dropped
    assert [path.name for path in find_captures([url])] == [path.name for path in recorder.written]
    assert len(recorder.written) == 2
    assert load(str(recorder.written[0])).tensors["dq"][...].any()
    with pytest.raises(InputError, match="holds captures of an earlier run"):
        attn_diag.capture(tiny.model, url).start()
    with attn_diag.capture(tiny.model, url, if_taken="another") as second:
        assert str(second.folder) == f"{url}-2"
