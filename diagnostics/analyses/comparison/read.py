"""Diagnoses from files: the JSON that ``--json`` wrote, or the HTML report that holds it."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from attn_diag.captures.files import CAPTURE_SUFFIXES
from attn_diag.errors import InputError
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.embedded import embedded_diagnosis

# A diagnosis takes about 30 kB a head: no model has as many heads as this holds.
_LARGEST = 2**30
_MAKE = "attn-diag inspect CAPTURE --json FILE writes one"


def read_diagnosis(path: str | PathLike[str]) -> Diagnosis:
    """The diagnosis in a file written by ``attn-diag inspect --json`` (any version) or ``--html``.

    Args:
        path: The file.

    Returns:
        The diagnosis, as ``inspect`` returned it.

    Raises:
        InputError: It is no such file (a directory, a capture, an empty, damaged or oversized file, another command's
            result, a later version); the file is named.
    """
    file = Path(path)
    text = _text(file)
    if text.lstrip()[:1] == "<":
        try:
            text = embedded_diagnosis(text)
        except InputError as error:
            raise InputError(f"{file}: an HTML page, but {error}") from None
    try:
        return Diagnosis.from_json(text)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None


def _text(file: Path) -> str:
    if file.is_dir():
        raise InputError(f"{file}: is a directory; expected one diagnosis (JSON or HTML): {_MAKE}")
    if file.suffix in CAPTURE_SUFFIXES:
        raise InputError(f"{file}: is a capture, expected a diagnosis (JSON or HTML): {_MAKE}")
    try:
        size = file.stat().st_size
        if size > _LARGEST:
            raise InputError(f"{file}: {size / 2**30:.1f} GiB is more than any diagnosis takes (1 GiB); {_MAKE}")
        data = file.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{file}: no such file or directory") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    if not data.strip():
        raise InputError(f"{file}: the file is empty; {_MAKE}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{file}: is neither JSON nor HTML (its bytes are no text); {_MAKE}") from None
