"""Where captures are: a path of this machine, or a URL of an object store (s3://, gs://, hf://, …) through fsspec."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from attn_diag.errors import InputError

if TYPE_CHECKING:
    from upath import UPath

_URL = re.compile(r"[a-z][a-z0-9+.-]+://")


def place(name: str | os.PathLike[str] | UPath) -> Path:
    """What ``name`` stands for.

    Args:
        name: A path, or a URL whose scheme fsspec knows. Keys, regions and endpoints come from where fsspec's
            file systems look for them (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``~/.config/fsspec``, …).

    Returns:
        A path; for a URL universal_pathlib's, which has a Path's methods without being one (``is_remote``).

    Raises:
        InputError: A URL, and what reads it is not installed, or knows no such scheme.
    """
    if not isinstance(name, str | os.PathLike):
        return cast(Path, name)  # universal_pathlib's, of a URL
    if not _URL.match(url := str(name)):
        return Path(name)
    try:
        from upath import UPath
    except ImportError:
        raise InputError(f"{url}: URLs need universal_pathlib; install attn-diag[remote]") from None
    try:
        found = UPath(url, use_listings_cache=False)  # what a list said may have changed since
        _ = found.fs  # its library is imported now
    except (ImportError, ValueError) as error:
        raise InputError(f"{url}: {error}") from None
    return cast(Path, found)


def is_remote(path: Path) -> bool:
    """Whether a place is an object of a store, so that it has no descriptor, lock, mode or rename."""
    return not isinstance(path, Path)


@contextmanager
def reached(path: Path, doing: str) -> Iterator[None]:
    """Turn what a store's client raises into an InputError: ``<path>: cannot be <doing>: <why>``."""
    try:
        yield
    except (InputError, FileNotFoundError):
        raise
    except Exception as error:
        if not is_remote(path):
            raise
        words = " ".join(str(error).split()) or type(error).__name__
        raise InputError(f"{path}: cannot be {doing}: {words}; check its name, the keys and the endpoint") from error


def identity(path: Path) -> str:
    """What a store says of the object that is there now: its size and its tag or time of change."""
    store = cast(Any, path)
    return str(store.fs.ukey(store.path))


def read_range(path: Path, start: int, count: int) -> bytes:
    """Bytes ``start`` to ``start + count`` of an object; fewer where it ends before."""
    store = cast(Any, path)
    return bytes(store.fs.cat_file(store.path, start=start, end=start + count))


def upload(file: str, path: Path) -> None:
    """Put a local file into a store, whole: no reader sees half of it."""
    store = cast(Any, path)
    store.fs.put_file(file, store.path)
