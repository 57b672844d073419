"""What produced the numbers: versions and device."""

from __future__ import annotations

import platform
from importlib.metadata import version

import torch

from attn_diag.captures.hardware import package_version, stored_profile
from attn_diag.errors import InputError
from attn_diag.results.diagnosis import Tool


def pick_device(name: str) -> torch.device:
    """'auto' (CUDA where there is one), 'cpu' or 'cuda'. Raises InputError for a device that is not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA device is available; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def describe_tool(device: torch.device) -> Tool:
    """Versions, the device on which the reference and emulations ran, and what was measured of it."""
    profile = stored_profile(device)
    return Tool(
        version=version("attn-diag"),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=package_version("triton"),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU",
        backend=backend_name(device),
        hardware=None if profile is None else profile.summary,
    )


def backend_name(device: torch.device) -> str:
    """'cpu', or 'sm90' and the like."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
