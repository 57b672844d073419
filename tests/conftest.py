"""Shared set-up: provenance in the header, GPU tests skipped without a GPU, the stored captures."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy
import pytest
import torch

ROOT = Path(__file__).parent.parent

# With the repository root on sys.path a bare ``import kernels`` would find our folder, not Hugging Face's package.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"torch {torch.__version__}, numpy {numpy.__version__}, {device}, {torch.get_num_threads()} threads"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def captures() -> Path:
    """Folder of real captures (NVIDIA H200, torch 2.11)."""
    return ROOT / "tests" / "captures"
