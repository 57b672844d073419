"""The baseline file: JSON (schema "attn-diag-baseline" 1), one entry for every subject, device and set of versions.

Entries of several devices lie side by side. Keys are sorted and numbers written in full, so that git shows what
changed. Writers take turns (a lock on the folder): each reads the file again before it writes, so that all entries
survive; readers never see half a file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
from collections.abc import Iterator
from dataclasses import replace as replace_fields
from importlib.metadata import version
from pathlib import Path

import torch

from attn_diag.captures.files import write_atomically
from attn_diag.captures.hardware import package_version
from attn_diag.errors import InputError
from attn_diag.head.machine import backend_name
from attn_diag.results.baseline import BaselineCase, BaselineEntry, BaselineFile, BaselineSize
from attn_diag.testing.target import RECIPE_DTYPES

# Numbers are written in full; sums have their own rounding.
_WRITTEN = 1e-9


def read(path: Path) -> BaselineFile:
    """The file. Raises InputError where it is missing, unreadable, not a baseline, or of another version."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path}: no such baseline; make it with --save (save=True)") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read: {error}") from None
    try:
        result = BaselineFile.from_json(text)
    except InputError as error:
        hint = " (left by a git merge? keep one side, then --update)" if "<<<<<<<" in text else ""
        raise InputError(f"{path}: not a baseline that this attn-diag reads: {error}{hint}") from None
    if wrong := [key for key, entry in result.entries.items() if entry.key != key]:
        raise InputError(f"{path}: a damaged baseline: entry {wrong[0]!r} is not of that key; save it anew")
    for key, entry in result.entries.items():
        if case := next((name for name, case in entry.cases.items() if _is_impossible(case)), None):
            raise InputError(
                f"{path}: a damaged baseline: case {case!r} of entry {key!r} has an error or a standard error below 0, "
                "or no degrees of freedom; it was edited: save it anew"
            )
        for name, kept in entry.cases.items():
            for quantity, size in kept.sizes.items():
                if _contradicts_itself(size):
                    raise InputError(
                        f"{path}: a damaged baseline: in case {name!r} of entry {key!r} the error of {quantity} is "
                        f"{size.error:.3g} beside a yardstick's of {size.yardstick:.3g}, which give no log_ratio of "
                        f"{size.log_ratio.mean:.3g}; it was edited: save it anew"
                    )
    return result


def _contradicts_itself(size: BaselineSize) -> bool:
    """Whether no errors of single sequences have these sizes and this mean log ratio.

    Let E and Y be error and yardstick, both with the same h^2 >= 0 added to their squares, and r_i a sequence's log
    ratio. E^2 / Y^2 is a mean of exp(2 r_i), so that ln(E / Y) lies between the least r_i and the largest one: within
    (n - 1) standard errors of their mean (Samuelson 1968). And h moves it towards 0 alone.
    """
    ratio, reach = size.log_ratio, _WRITTEN
    numbers = [size.error, size.yardstick, ratio.mean]
    if ratio.standard_error is not None and ratio.degrees_of_freedom is not None:
        numbers.append(reach := reach + ratio.standard_error * ratio.degrees_of_freedom)
    if not all(map(math.isfinite, numbers)):
        return False
    error, yardstick = (math.log(x) if x > 0 else -math.inf for x in (size.error, size.yardstick))
    whole = 0.0 if error == yardstick else error - yardstick
    return not min(whole, 0.0) - reach <= ratio.mean <= max(whole, 0.0) + reach


def _is_impossible(case: BaselineCase) -> bool:
    """Whether it holds numbers that no measurement gives, and that would hide a fault."""
    means = [*case.biases.values(), *(size.log_ratio for size in case.sizes.values())]
    return (
        any(size.error < 0 or size.yardstick < 0 for size in case.sizes.values())
        or any((mean.standard_error or 0.0) < 0 for mean in means)
        or any(mean.degrees_of_freedom is not None and mean.degrees_of_freedom <= 0 for mean in means)
    )


def nearest(file: BaselineFile, subject: str, device: str, versions: str) -> BaselineEntry | None:
    """The entry of this key, else one of this subject: on the same device, else on any. The last by name of several."""
    same = [e for _, e in sorted(file.entries.items(), reverse=True) if e.subject == subject]
    return max(same, key=lambda e: (e.device == device, e.versions == versions), default=None)


def which_words(path: Path, subject: str, key: str, entry: BaselineEntry | None) -> list[str]:
    """Notes for the report where the entry that is compared with is not that of ``key``."""
    if entry is None:
        return [
            f"{path} has no entry for {subject}: errors are held to a published recipe's instead; add it with --save"
        ]
    if entry.key != key:
        return [f"{path} has no entry for {key}: compared with that of {entry.key}, without bits"]
    return []


def require_consistent(
    baseline: Path | str | None, dtype: torch.dtype, head_dim: int, *, save: bool, update: bool, exact: bool
) -> None:
    """Raise InputError for options of a check that contradict each other, and for inputs that no case has."""
    if (save or update) and baseline is None:
        raise InputError("save and update need the baseline file to write to")
    if exact and baseline is None:
        raise InputError("exact compares with the bits of a baseline: name its file")
    if save and update:
        raise InputError("save adds an entry and update replaces one: ask for one of them")
    if head_dim < 8:
        raise InputError(f"head_dim must be at least 8, got {head_dim}")
    if dtype not in RECIPE_DTYPES:
        known = ", ".join(str(d).removeprefix("torch.") for d in RECIPE_DTYPES)
        raise InputError(f"dtype must be one of {known}, got {dtype}: errors are held to kernels known for these")


def opened(
    path: Path | None, subject: str, where: torch.device, *, save: bool, update: bool
) -> tuple[str, BaselineEntry | None]:
    """A run's key, and the entry that it is compared with: none without a file, or where it writes one of its own.

    Raises InputError where the file cannot be read, or already has the entry that is to be added.
    """
    key = " | ".join((subject, device_words(where), versions()))
    if path is None or update:
        return key, None
    if save:
        refuse_to_overwrite(path, key)
        return key, None
    return key, nearest(read(path), subject, device_words(where), versions())


def refuse_to_overwrite(path: Path, key: str) -> None:
    """Raise InputError where the file already has an entry of this key."""
    if path.exists() and key in read(path).entries:
        raise InputError(f"{path} already has an entry for {key}; use --update (update=True) to replace it")


def store(path: Path, entry: BaselineEntry, *, replace: bool) -> bool:
    """Add an entry to the file, which is made (with its folder) where there is none; whether one was replaced.

    Raises InputError where the key has an entry and ``replace`` is not set, and where the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose another folder") from None
    with _turn(path):
        if not replace:
            refuse_to_overwrite(path, entry.key)
        file = read(path) if path.exists() else BaselineFile()
        before = file.entries.get(entry.key)
        if before is not None:
            # An update of some cases leaves the others as they were accepted.
            entry = replace_fields(entry, cases={**before.cases, **entry.cases})
        text = dump(BaselineFile({**file.entries, entry.key: entry}))
        write_atomically(path, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))
    return before is not None


def dump(file: BaselineFile) -> str:
    """The file's text."""
    return json.dumps(json.loads(file.to_json()), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def device_words(device: torch.device) -> str:
    """The part of a key that bits depend on: the GPU, or the CPU with its vector instructions.

    The number of threads is no part of it: torch's SDPA and the emulation return the same bits on 1 and 2 threads.
    """
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} {backend_name(device)}"
    return f"{platform.machine()} CPU {torch.backends.cpu.get_cpu_capability()}"


def versions() -> str:
    """The part of a key that says which versions bits depend on."""
    triton = package_version("triton")
    return f"torch {torch.__version__}, {f'triton {triton}, ' if triton else ''}attn-diag {version('attn-diag')}"


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Alone among writers to files of this folder, where the system can lock a folder (not on Windows)."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; choose a folder that exists") from None
    try:
        # Where locks are not supported (some network file systems) writers are on their own.
        with contextlib.suppress(OSError):
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)
