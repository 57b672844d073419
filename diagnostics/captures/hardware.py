"""Where measured profiles are kept: one file for each GPU and pair of versions, in the user's cache folder.

Nothing here measures. A profile that is not there is None; a broken file is named in a warning and ignored.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from attn_diag.captures.files import write_atomically
from attn_diag.errors import InputError
from attn_diag.printing import printable
from attn_diag.results.hardware import HardwareProfile


def profile_path(gpu: str, torch_version: str, triton: str) -> Path:
    """hardware-<gpu>-<torch>-<triton>.json in $XDG_CACHE_HOME/attn-diag, or ~/.cache/attn-diag."""
    names = (re.sub(r"[^A-Za-z0-9.+]+", "_", name) for name in (gpu, torch_version, triton))
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: relative paths count as unset.
    folder = cache_home if cache_home.is_absolute() else Path.home() / ".cache"
    return folder / "attn-diag" / f"hardware-{'-'.join(names)}.json"


def save_profile(profile: HardwareProfile) -> Path:
    """Keep the profile, in place of an older one of the same GPU and versions; its path.

    Raises InputError where the cache folder cannot be written.
    """
    target = profile_path(profile.gpu, profile.torch, profile.triton)
    text = profile.to_json() + "\n"
    with contextlib.suppress(OSError):  # the writing says it better
        target.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(target, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))
    return target


def stored_profile(device: torch.device) -> HardwareProfile | None:
    """The profile of a CUDA device under the present versions, if one was stored."""
    if device.type != "cuda":
        return None
    return read_profile(torch.cuda.get_device_name(device), torch.__version__, package_version("triton") or "unknown")


def read_profile(gpu: str, torch_version: str, triton: str) -> HardwareProfile | None:
    """What was stored of this GPU and these versions; None for nothing, and, with a warning, for what is broken."""
    try:
        path = profile_path(gpu, torch_version, triton)
        changed = path.stat().st_mtime_ns
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    profile = _parsed(path, changed)
    if profile is None or (profile.gpu, profile.torch, profile.triton) != (gpu, torch_version, triton):
        return None
    return profile


def package_version(package: str) -> str | None:
    """The installed version of a package; None where there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _parsed(path: Path, changed: int) -> HardwareProfile | None:  # noqa: ARG001 - another file, read again
    try:
        return HardwareProfile.from_json(path.read_bytes())
    except (OSError, InputError):
        warnings.warn(
            printable(
                f"{path} is not a hardware profile and is ignored; `attn-diag selftest --hardware` makes a new one"
            ),
            stacklevel=2,
        )
        return None
