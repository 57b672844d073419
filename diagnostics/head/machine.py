"""What produced the numbers: versions and device."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version

import torch

from attn_diag.captures.hardware import package_version, stored_profile
from attn_diag.errors import InputError
from attn_diag.reference.fused_inputs import dealt_over
from attn_diag.results.diagnosis import Tool


def pick_device(name: str) -> torch.device:
    """'auto' (CUDA where there is one), 'cpu' or 'cuda'. Raises InputError for a device that is not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("no CUDA device is available; use --device cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def pick_devices(name: str) -> list[torch.device]:
    """As ``pick_device``; or GPUs by number, as in 'cuda:0,cuda:1', or all that are as the first, 'cuda:all'.

    Raises:
        InputError: One of them is not there, is named twice, or is of another kind than the first.
    """
    if not name.startswith("cuda:"):
        return [pick_device(name)]
    known = {f"cuda:{i}": torch.device("cuda", i) for i in range(torch.cuda.device_count())}
    if not known:
        raise InputError("no CUDA device is available; use --device cpu")
    names = list(known) if name == "cuda:all" else [part.strip() for part in name.split(",")]
    if not set(names) <= known.keys() or len(set(names)) < len(names):
        raise InputError(f"device {name!r}: expected GPUs as in cuda:0,cuda:1, each once; here: {', '.join(known)}")
    kinds = [torch.cuda.get_device_capability(known[one]) for one in names]
    if name == "cuda:all":
        names = [one for one, kind in zip(names, kinds, strict=True) if kind == kinds[0]]
    elif len(set(kinds)) > 1:
        raise InputError(
            f"device {name!r}: expected GPUs of one kind, got sm_{', sm_'.join(f'{a}{b}' for a, b in kinds)}"
        )
    return [known[one] for one in names]


@contextmanager
def working_on(devices: Sequence[torch.device]) -> Iterator[None]:
    """The first of these is torch's current one, and long launches of the reference are dealt out over all of them."""
    first, *others = devices
    with torch.cuda.device(first) if first.type == "cuda" else nullcontext(), dealt_over(others):
        yield


def describe_tool(device: torch.device, beside: int = 0) -> Tool:
    """Versions, the device on which the reference and emulations ran, and what was measured of it.

    Args:
        device: The device.
        beside: How many others took part.
    """
    profile, also = stored_profile(device), f" and {beside} more" if beside else ""
    return Tool(
        version=version("attn-diag"),
        python=platform.python_version(),
        torch=torch.__version__,
        triton=package_version("triton"),
        device=torch.cuda.get_device_name(device) + also if device.type == "cuda" else f"{platform.machine()} CPU",
        backend=backend_name(device),
        hardware=None if profile is None else profile.summary,
    )


def backend_name(device: torch.device) -> str:
    """'cpu', or 'sm90' and the like."""
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"
