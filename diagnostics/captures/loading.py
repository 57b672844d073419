"""Reading captures from safetensors, .pt and .npz files, lazily where the format allows it."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from torch import Tensor

from attn_diag.captures.arrays import Read, read_npz
from attn_diag.captures.capture import Capture
from attn_diag.captures.files import CAPTURE_SUFFIXES, PARTIAL, named_errors
from attn_diag.captures.metadata import KEYS, Metadata, refuse_unsupported
from attn_diag.captures.pickles import Odd, unpickle
from attn_diag.captures.places import is_remote, place, reached
from attn_diag.captures.sources import TensorSource
from attn_diag.captures.stored import read_header
from attn_diag.errors import InputError

_EXAMPLE = Path(str(files("attn_diag.data"))) / "gpt2_step731_L2H4_rows.safetensors"
_HALF_WRITTEN = re.compile(rf"\.(.+({'|'.join(map(re.escape, CAPTURE_SUFFIXES))}))\.[^.]+{re.escape(PARTIAL)}")
# Query rows, or keys, of which no more need be in a file than it has bytes.
_ROWS = 2**14
_STATED_BY_DEFAULT = ("layout", "causal", "scale")


def load_example() -> Capture:
    """The capture that ships with the package, opened."""
    return replace(load(_EXAMPLE), source=f"example {_EXAMPLE.name}")


def find_captures(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The capture files among ``paths``; a directory stands for all of those below it, in order of their names.

    Args:
        paths: Paths, and URLs of an object store (``places.place``), of which .safetensors files alone are captures.

    Raises:
        InputError: A path does not exist or cannot be reached, or a directory holds no captures.
    """
    found: list[Path] = []
    for path in map(place, paths):
        if not stat.S_ISDIR(_mode(path)):
            found.append(path)
            continue
        with reached(path, "listed"):
            inside = sorted(p for p in path.rglob("*") if p.suffix in CAPTURE_SUFFIXES and not p.name.startswith("."))
            inside = [p for p in inside if not p.is_dir()]
        if not inside:
            partial = next((f"; {error}" for error in half_written([path])), "")
            raise InputError(
                f"{path}: no captures in this directory (looked for {', '.join(CAPTURE_SUFFIXES)}){partial}"
            )
        found += inside
    return found


def half_written(paths: Iterable[str | Path]) -> list[InputError]:
    """A complaint for every capture below the directories among ``paths`` that was never completed.

    A capture is written as ".<name>.<random>.partial" and renamed when it is complete (``files.write_atomically``).
    One that was completed later under the same name is no longer missed.
    """
    complaints = []
    here = [path for path in map(place, paths) if not is_remote(path)]  # a store has whole objects alone
    for file in sorted({f for path in here if path.is_dir() for f in path.rglob(f".*{PARTIAL}")}):
        named = _HALF_WRITTEN.fullmatch(file.name)
        if named is not None and not _was_completed(file.with_name(named[1]), file):
            complaints.append(
                InputError(
                    f"{file}: {named[1]} was being written when the process died (or still is: look again then); "
                    "this capture is lost, the other files are complete"
                )
            )
    return complaints


def _was_completed(file: Path, partial: Path) -> bool:
    """Whether ``file`` was completed after ``partial`` was last written to; a live writer may rename it meanwhile."""
    try:
        return file.stat().st_mtime_ns >= partial.stat().st_mtime_ns
    except FileNotFoundError:
        return not partial.exists()


def load(path: str | Path, **options: Any) -> Capture:
    """Open a capture file. Tensors of safetensors files are read head by head, when they are needed.

    A pickle that would run code is refused and never executed. A pipe is never opened.

    Args:
        path: A .safetensors, .pt, .pth or .npz file, or the URL of a .safetensors file.
        **options: Metadata to put in place of what the file says (``layout``, ``causal``, ``scale``, …).

    Raises:
        InputError: The file is missing, empty, truncated or of another kind, or its tensors do not fit each other.
    """
    path = place(path)
    reader = _reader(path)
    with named_errors(path):
        tensors, text, notes = reader(path)
        if text.get("kind", "").strip().lower() == "linear":
            raise InputError(
                "a capture of linear attention (kind=linear): `attn-diag inspect`, identify, attribute, what-if, "
                "diff and replay read it (in Python inspect_linear and so on); this reads captures of softmax attention"
            )
        # A scale or window kept as an array is metadata all the same, and must not be overlooked.
        for name in KEYS & tensors.keys():
            if name == "softmax_offset" and math.prod(tensors[name].shape) != 1:
                continue  # one logit a head: the sinks
            text[name] = _as_text(_numbers(tensors.pop(name), name))
        given = {name: value for name, value in options.items() if value is not None}
        metadata = Metadata.parse(text).override(**given)
        assumed = [
            f"{name}={'1/sqrt(D)' if name == 'scale' else getattr(metadata, name)} (default)"
            for name in _STATED_BY_DEFAULT
            if name not in text and name not in given
        ]
        capture = Capture(tensors, metadata, str(path), (*assumed, *notes))
        require_held(capture, path.stat().st_size)
        return capture


def read_file(path: Path) -> tuple[dict[str, TensorSource], dict[str, str]]:
    """The tensors and metadata of a capture's file, whatever kind of capture it is. Raises InputError, naming it."""
    reader = _reader(path)
    with named_errors(path):
        tensors, text, _ = reader(path)
        return tensors, text


def _reader(path: Path) -> Callable[[Path], Read]:
    """What reads a file of this name. Raises InputError where it is no capture."""
    require_regular_file(path)
    if path.suffix not in CAPTURE_SUFFIXES:
        raise InputError(f"{path}: not a capture; expected a file ending in {', '.join(CAPTURE_SUFFIXES)}")
    if is_remote(path) and path.suffix != ".safetensors":
        raise InputError(
            f"{path}: only .safetensors is read from a store, part by part; download this file and name it"
        )
    if path.stat().st_size == 0:
        raise InputError(f"{path}: the file is empty")
    return {".safetensors": _read_safetensors, ".npz": read_npz}.get(path.suffix, _read_pt)


def require_held(capture: Capture, size: int) -> None:
    """Raise InputError where more rows or keys are to be looked at than ``size`` bytes, those of its file, can hold.

    Expanded tensors (of stride 0) and compressed zeros say that they are of any length; attention's work is its square.
    """
    q, k = (capture.tensors[name].shape for name in "qk")
    rows, keys = math.prod(q[:3]), math.prod(k[:3]) // (k[0] * capture.kv_heads)
    if max(rows, keys) > max(_ROWS, size):
        raise InputError(
            f"{rows} query rows and {keys} keys in {size} bytes: q or k repeats one value all along; expected tensors "
            "with values of their own"
        )


def load_each(
    paths: Collection[Path], progress: Callable[[int, int], object] | None = None, **options: Any
) -> tuple[list[Capture], list[InputError]]:
    """Those captures that can be opened, and what is wrong with the others; ``options`` as for ``load``."""
    captures: list[Capture] = []
    failures: list[InputError] = []
    for number, path in enumerate(paths):
        if progress is not None:
            progress(number, len(paths))
        try:
            captures.append(load(path, **options))
        except InputError as error:
            failures.append(error)
    return captures, failures


_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def _mode(path: Path) -> int:
    """What ``path`` leads to, as st_mode. Raises InputError where it leads nowhere."""
    try:
        with reached(path, "reached"):
            return path.stat().st_mode
    except FileNotFoundError:
        raise InputError(f"{path}: no such file or directory") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be opened: {error.strerror or error}") from None


def require_regular_file(path: Path) -> None:
    """Raise InputError for what is not there, is no regular file (a pipe, a folder), or may not be read."""
    # Opening a pipe without a writer would wait for one for ever.
    mode = _mode(path)
    if not stat.S_ISREG(mode):
        kind = next((words for is_kind, words in _KINDS if is_kind(mode)), "something else")
        raise InputError(f"{path}: expected a regular file, this is {kind}; save the capture to a file and name that")
    if not is_remote(path) and not os.access(path, os.R_OK):
        raise InputError(f"{path}: cannot be opened: no permission to read it")


def _read_safetensors(path: Path) -> Read:
    tensors, text = read_header(path)
    return dict(tensors), text, []


def dense(value: Tensor | Odd, name: str) -> Tensor:
    """``value``. Raises InputError, naming it, for what is no plain array of numbers."""
    if isinstance(value, Odd):
        raise InputError(f"{name} is sparse, nested or without data ({value.kind}); expected a dense tensor: save one")
    return value


def _read_pt(path: Path) -> Read:
    content = unpickle(path)
    if not isinstance(content, dict):
        raise InputError(f"expected a dict of tensors, got {type(content).__name__}")
    tensors: dict[str, TensorSource] = {}
    text: dict[str, str] = {}
    for name, value in content.items():
        if isinstance(value, Tensor | Odd):
            tensors[str(name)] = dense(value, str(name))
        elif name == "metadata" and isinstance(value, dict):
            text |= {str(key): _as_text(_plain(item, str(key))) for key, item in value.items() if item is not None}
        elif isinstance(value, str | int | float) or (name in KEYS and value is not None):
            text[str(name)] = _as_text(value)
        elif value is not None:
            refuse_unsupported(str(name))
    return tensors, text, []


def _plain(value: object, name: str) -> object:
    """A metadata value; that of a tensor of one or two numbers are these."""
    return _numbers(dense(value, name), name) if isinstance(value, Tensor | Odd) else value


def _numbers(value: TensorSource, name: str) -> list[Any]:
    """The one or two numbers of a tensor that is metadata."""
    if not 1 <= math.prod(value.shape) <= 2:
        raise InputError(f"{name} is metadata, one number (two for window), got a tensor {list(value.shape)}")
    return value[...].flatten().tolist()


def _as_text(value: object) -> str:
    """A metadata value as a safetensors file would state it."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
