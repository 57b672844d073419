"""Shared set-up: provenance in the header, GPU tests skipped without a GPU, the stored captures."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch

# Without a GPU the kernels run interpreted; Triton reads this when it is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# Workers side by side share the cores: with a thread for every core each, small operations take five times as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parent.parent

# With the repository root on sys.path a bare ``import kernels`` would find our folder, not Hugging Face's package.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

# Test modules are imported by path; what several of them share, and the studies that they run small, by name.
sys.path += [str(ROOT / folder) for folder in ("tests", "benchmarks", "benchmarks/failing_run")]

from browsers import browser, open_page, show  # noqa: E402 - found by the line above
from command_line import Done, Programs, Run  # noqa: E402 - likewise
from forked_workers import Parent  # noqa: E402 - likewise
from made_once import FOLDER  # noqa: E402 - likewise

# One browser a process: another beside it cannot start.
__all__ = ["browser", "open_page", "show"]


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"torch {torch.__version__}, numpy {numpy.__version__}, {device}, {torch.get_num_threads()} threads"


def pytest_configure(config: pytest.Config) -> None:
    """Processes of one run share what is made once, in the folder that holds a folder for each of them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ[FOLDER] = str(Path(config.option.basetemp).parent)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_long(items, whole_files=not any("::" in argument for argument in config.args))
    for item in items:
        # What a module makes once is made in one process.
        if not isinstance(item, pytest.Function) or item.get_closest_marker("xdist_group") is not None:
            continue
        made = item._fixtureinfo.name2fixturedefs.items()
        shared = [name for name, found in made if found[-1].scope == "module" and name != "_small_heap"]
        if "wheel" in item.fixturenames:  # which takes three seconds to make
            item.add_marker(pytest.mark.xdist_group("wheel"))
        elif shared or _keeps(item.module):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@cache
def _keeps(module: ModuleType) -> bool:
    """Whether it has a function of its own whose results are kept."""
    return any(hasattr(f, "cache_info") and f.__module__ == module.__name__ for f in vars(module).values())


def _mark_long(items: list[pytest.Item], *, whole_files: bool) -> None:
    """Mark what ``long.txt`` names; of whole files it may name nothing that is not there."""
    lines = (ROOT / "tests" / "long.txt").read_text().splitlines()
    by_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    for name in (line for line in lines if not line.startswith("#")):
        begins, _, more = name.partition("*")
        of_file = by_file.get(begins.partition("::")[0], [])
        found = [i for i in of_file if i.nodeid.startswith(begins) and more in i.nodeid[len(begins) :]]
        if whole_files and not found and of_file:
            raise pytest.UsageError(f"tests/long.txt names {name}, and no test begins so: correct the line")
        for item in found:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.long)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests of a group run in one process, where pytest and pytest-xdist go together; else CI would take far longer."""
    if not getattr(session.config.option, "loadgroup", False):
        return
    apart = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
    if apart:
        raise pytest.UsageError(f"xdist_group has no effect ({apart[0]}): install what constraints.txt names")


@pytest.fixture(scope="session")
def captures() -> Path:
    """Folder of real captures (NVIDIA H200, torch 2.11)."""
    return ROOT / "tests" / "captures"


@pytest.fixture(scope="session")
def device() -> str:
    """Where the Triton kernels run: compiled on a GPU, else interpreted on the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy of its files."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("diagnostics", "kernels", "packaging", "reference", "reports"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    options = ["--quiet", "--no-deps", "--no-build-isolation", "-w", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, str(source)], check=True)
    return next(target.glob("*.whl"))


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Every torch.empty comes filled with NaN (or the largest integer), so that nothing unwritten goes unseen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    # On by default, with deterministic algorithms.
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU gives the same bits again, where it can."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """The garbage collector looks at this module's objects alone: all that came before cost a fifth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_heap() -> Iterator[None]:
    """For the garbage collector nothing is there that other tests have left behind."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """The command line, in this process and outside of GitHub."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def call(*arguments: object, **environment: str) -> Done:
        from attn_diag.cli import main

        with monkeypatch.context() as changed:
            changed.setattr(sys, "argv", ["attn-diag", *map(str, arguments)])
            for name, value in environment.items():
                changed.setenv(name, value)
            before = sys.argv[:], sys.path[:], sys.modules["__main__"]
            with pytest.raises(SystemExit) as stopped:
                main()
            assert (sys.argv, sys.path, sys.modules["__main__"]) == before
        captured = capsys.readouterr()
        return Done(int(stopped.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def programs() -> Iterator[Programs]:
    """Python programs that need not import torch again."""
    found = Programs()
    yield found
    found.close()


@pytest.fixture(scope="session")
def _parent_of_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parent]:
    found = Parent(tmp_path_factory.mktemp("workers"))
    yield found
    found.close()


@pytest.fixture
def forked_workers(_parent_of_workers: Parent, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels' processes of ``replay`` and hunts need not import torch again."""
    for module in ("hunting.workers", "replaying.processes"):
        monkeypatch.setattr(f"attn_diag.testing.{module}.subprocess", _parent_of_workers.subprocess())
