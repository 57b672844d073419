"""Writing files so that nothing half-written stays behind, and reading them so that what is wrong is named."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from attn_diag.captures.places import is_remote, reached, upload
from attn_diag.errors import InputError

# Of files that captures are read from.
CAPTURE_SUFFIXES = (".safetensors", ".pt", ".pth", ".npz")
# What ends the name of a file that is still being written: ".<final name>.<random>.partial".
PARTIAL = ".partial"


def require_writable(target: Path) -> None:
    """Raise InputError now, before hours of work, if ``target`` could not be written; a store is asked only then."""
    if is_remote(target):
        return
    try:
        kept = _destination(target)
        usable = not kept.is_dir() and kept.parent.is_dir() and os.access(kept.parent, os.W_OK)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror}; choose another name") from None
    if not usable:
        raise InputError(f"cannot write {target}: choose a file in a folder that exists and is writable")


def _destination(target: Path) -> Path:
    """Where what is written to ``target`` ends up: a link is written through, never replaced."""
    return target.resolve() if target.is_symlink() and not _is_special(target) else target


def _is_special(target: Path) -> bool:
    """Whether ``target`` is a device or a pipe, as /dev/null and /dev/stdout are."""
    return target.exists() and not target.is_file() and not target.is_dir()


def write_atomically(target: Path, write: Callable[[str], object]) -> None:
    """Call ``write`` with a temporary path beside ``target``, then rename: no reader ever sees half a file.

    A process that is killed meanwhile leaves its temporary file behind, hidden: ".<target's name>.<random>.partial".
    A file that is replaced keeps its mode; a new one has that of the umask.
    A device or a pipe is written to directly: a rename would put a file in its place, for root even in /dev.
    What goes to a URL is written here first and then put there whole.
    """
    if is_remote(target):
        with tempfile.TemporaryDirectory(prefix="attn-diag-") as folder:
            write(file := str(Path(folder) / target.name))
            with reached(target, "written"):
                upload(file, target)
        return
    if _is_special(target):
        try:
            write(str(target))
        except OSError as error:
            raise InputError(f"cannot write {target}: {error.strerror or error}") from None
        return
    target = _destination(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}{PARTIAL}")
    try:
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        # The system applies the umask: to ask for it is to change it, for the files of other threads too.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if mode is None else 0o600))
    except OSError as error:
        raise InputError(
            f"cannot write {target}: {error.strerror}; choose a folder that exists and is writable"
        ) from None
    try:
        write(str(temporary))
        if mode is not None:
            temporary.chmod(mode)
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            temporary.unlink()


@contextlib.contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Name the file in every complaint, and turn whatever a parser raises on untrusted bytes into an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    except Exception as error:
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{path}: truncated or damaged, or not a {path.suffix} file ({detail})").with_traceback(
            error.__traceback__  # where it was raised; its own words would be shown as they are
        ) from None
