"""Kernels of packages that are imported while a run is watched are seen from their first call on."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pickle
import subprocess
import sys
import threading
import zipfile
import zipimport
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import attn_diag
from attn_diag.captures.loading import load
from attn_diag.watching.live import intercept
from attn_diag.watching.live.imports import ImportWatch

SAGE = """
import torch
def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False):
    k -= k.mean(dim=2, keepdim=True)
    return (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype) @ v
"""
# flash_attn 2 registers its operator as its module is run; torch imports its jagged attention with a first such tensor.
LAZY = """
import sys, torch, attn_diag
from pathlib import Path
from attn_diag.captures.loading import load

folder = Path(sys.argv[1])
assert not {"torch.nested._internal.ops", "flash_attn.flash_attn_interface"} & sys.modules.keys()
with attn_diag.capture(None, folder / "out", batch=None, calls=None) as recorder:
    n = torch.nested.nested_tensor(
        [torch.randn(i, 2, 32) for i in (5, 9)], layout=torch.jagged, dtype=torch.bfloat16
    ).transpose(1, 2)
    torch.nn.functional.scaled_dot_product_attention(n, n, n)
    from flash_attn import flash_attn_interface
    flash_attn_interface.run(*(torch.randn(1, 8, 2, 32, dtype=torch.bfloat16) for _ in range(3)))
print(*((c.metadata.kernel, "cu_seqlens_q" in c.tensors) for c in map(load, recorder.written)))
"""
REGISTERS = """
import torch
from torch import Tensor

@torch.library.custom_op("flash_attn::_flash_attn_forward", mutates_args=(), device_types=("cpu", "cuda"))
def _flash_attn_forward(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float, causal: bool, window_size_left: int = -1,
    window_size_right: int = -1, softcap: float = 0.0, alibi_slopes: Tensor | None = None, return_softmax: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    scores = q @ k.mT * softmax_scale
    out = (scores.softmax(-1) @ v).transpose(1, 2).bfloat16()
    return out, scores.logsumexp(-1), scores.new_zeros(0), scores.new_zeros(0)

def run(q, k, v):
    return torch.ops.flash_attn._flash_attn_forward(q, k, v, 0.0, 0.1, False)
"""


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 32, 16, generator=generator).bfloat16() for _ in range(3)]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package as SageAttention's, which is not loaded."""
    assert "sageattention" not in sys.modules
    folder = tmp_path / "packages" / "sageattention"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from .core import sageattn\n")
    (folder / "core.py").write_text(SAGE)
    monkeypatch.syspath_prepend(folder.parent)
    yield "sageattention"
    for name in [name for name in sys.modules if name.partition(".")[0] == "sageattention"]:
        del sys.modules[name]


def test_the_first_call_is_seen(package: str, tmp_path: Path) -> None:
    with attn_diag.capture(None, tmp_path / "out", batch=None) as recorder:
        loaded: Any = importlib.import_module(package)
        q, k, v = tensors()
        given = k.clone()
        o = loaded.sageattn(q, k, v)
    (path,) = recorder.written
    capture = load(path)
    assert capture.metadata.kernel == "SageAttention sageattn"
    assert torch.equal(capture.tensors["o"][...], o)
    assert torch.equal(capture.tensors["k"][...], given)  # which it writes into
    assert not torch.equal(given, k)
    # All is as it was, and the module as if nobody had been there.
    assert not any(isinstance(finder, ImportWatch) for finder in sys.meta_path)
    assert loaded.sageattn is loaded.core.sageattn
    assert loaded.sageattn.__code__.co_filename == loaded.core.__file__
    assert vars(loaded.core.__loader__).keys() == {"name", "path"}
    assert "def sageattn" in inspect.getsource(loaded.core)


def test_a_module_that_fails_fails_as_ever(package: str, tmp_path: Path) -> None:
    (tmp_path / "packages" / "sageattention" / "core.py").write_text("raise OSError('no such kernel')")
    with (
        attn_diag.capture(None, tmp_path / "out", batch=None, calls=None),
        pytest.raises(OSError, match="no such kernel"),
    ):
        importlib.import_module(package)


def test_an_import_does_not_wait_for_another_thread(package: str, tmp_path: Path) -> None:
    """Which may wait for that very import."""
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        with intercept._lock:
            held.set()
            over.wait(10)

    with attn_diag.capture(None, tmp_path / "out", batch=None) as recorder:
        other = threading.Thread(target=hold)
        other.start()
        held.wait(10)
        importing = threading.Thread(target=importlib.import_module, args=(package,))
        importing.start()
        importing.join(5)
        assert not importing.is_alive()
        over.set()
        other.join()
        recorder.end_step()  # from the next step on it is seen
        importlib.import_module(package).sageattn(*tensors())
    assert len(recorder.written) == 1


def test_operators_that_are_registered_and_what_torch_imports_late_are_seen(tmp_path: Path) -> None:
    folder = tmp_path / "flash_attn"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "flash_attn_interface.py").write_text(REGISTERS)
    (tmp_path / "lazy.py").write_text(LAZY)
    line = [sys.executable, str(tmp_path / "lazy.py"), str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.splitlines()[-1] == "('torch SDPA math', True) ('flash_attn 2', False)", done.stderr


def zipped(package: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same in a zip file, all modules of which have one loader."""
    with zipfile.ZipFile(folder / "packages.zip", "w") as file:
        for path in (folder / "packages" / package).iterdir():
            file.write(path, f"{package}/{path.name}")
    monkeypatch.syspath_prepend(folder / "packages.zip")


def test_modules_that_have_one_loader(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which some are looked for and not imported: the import failed, in the capture and behind it."""
    zipped(package, tmp_path, monkeypatch)
    with attn_diag.capture(None, tmp_path / "out", batch=None) as recorder:
        for _ in range(2):
            found = importlib.util.find_spec(package)
        loaded: Any = importlib.import_module(package)
        loaded.sageattn(*tensors())
    assert len(recorder.written) == 1
    assert found is not None
    assert type(pickle.loads(pickle.dumps(found.loader))) is zipimport.zipimporter
    assert "exec_module" not in vars(loaded.__loader__)


def test_a_module_that_is_imported_once_more(package: str, tmp_path: Path) -> None:
    """There are no more modules than before then."""
    with attn_diag.capture(None, tmp_path / "out", batch=None, calls=None) as recorder:
        loaded: Any = importlib.import_module(package)
        for again in (loaded.core, loaded):
            importlib.reload(again)
        loaded.sageattn(*tensors())
        for name in (package, f"{package}.core"):
            del sys.modules[name]
        loaded = importlib.import_module(package)
        loaded.sageattn(*tensors())
    assert len(recorder.written) == 2


class Slotted:
    """A loader that takes no attributes, and its finder."""

    __slots__ = ()

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == "flash_attn_interface" else None  # type: ignore[arg-type]

    def create_module(self, *_: object) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.there = True


def test_other_finders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of old, without ``find_spec``, and one whose loader takes no attributes: the import failed."""
    monkeypatch.setattr(sys, "meta_path", [object(), Slotted(), *sys.meta_path])
    with attn_diag.capture(None, tmp_path / "out"):
        try:
            loaded: Any = importlib.import_module("flash_attn_interface")
            assert isinstance(loaded.__loader__, Slotted)
            assert isinstance(loaded.__spec__.loader, Slotted)
        finally:
            sys.modules.pop("flash_attn_interface", None)


def test_a_failure_of_the_watch_is_not_the_imports(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with attn_diag.capture(None, tmp_path / "out"), monkeypatch.context() as patch:
        patch.setattr(intercept, "_replace", lambda: 1 / 0)
        importlib.import_module(package)
    assert "ZeroDivisionError" in caplog.text


def test_another_thread_that_looks_for_a_module_misses_no_finder(tmp_path: Path) -> None:
    watched = attn_diag.capture(None, tmp_path / "out")
    watched.__enter__()
    seen = []
    for finder in sys.meta_path:
        seen.append(finder)
        if len(seen) == 2:
            watched.__exit__(None, None, None)
    assert all(finder in seen for finder in sys.meta_path)
