"""Writing files so that nothing half-written stays behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from attn_diag.errors import InputError


def require_writable(target: Path) -> None:
    """Raise InputError now, before hours of work, if ``target`` could not be written."""
    if target.is_dir() or not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise InputError(f"cannot write {target}: choose a file in a folder that exists and is writable")


def write_atomically(target: Path, write: Callable[[str], object]) -> None:
    """Call ``write`` with a temporary path beside ``target``, then rename: no reader ever sees half a file."""
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        os.close(handle)
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror}; choose a folder that exists and is writable"
        ) from None
    try:
        write(temporary)
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)
