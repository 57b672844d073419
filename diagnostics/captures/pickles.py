"""What ``torch.save`` wrote, built here of tensors and plain values alone: nothing in a pickle can run, or grow.

Followed: ``_save``, ``_legacy_save`` and ``_load`` of torch/serialization.py, and the opcodes that
torch/_weights_only_unpickler.py knows. That unpickler runs no foreign code either, but a few hundred bytes make it
fill memory (``bytearray(2**40)``, bytes encoded as hex thirty times) or hash a key for hours (a tuple of a tuple, both
shared). Here every number in a file is compared with the file's size before it is followed.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from attn_diag.errors import InputError

_MAGIC = 0x1950A86A20F9469CFC6C  # what _legacy_save begins with
_PIECE = 2**24
# Lists in lists: what calls itself for each is far from Python's limit of 1,000.
_DEEPEST = 100
# How many times a list or a text may be there, through sharing, for one time that it is stored: 32 layers that share
# their settings keep to it, because each layer's own entry is longer than a reference.
_SHARED = 16
# The longest tuple that is a key.
_KEY = 8
# How many elements a tensor may show of one stored byte: a padding mask [B, 1, 1, T] that is expanded to
# [B, H, T, T] shows T * H / 2 of its own bytes, but q, k and v lie in the same file.
_EXPANDED = 1024

# Types by the names that their storages have in a file.
_STORAGES = {
    "UntypedStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ByteStorage": torch.uint8,
    "CharStorage": torch.int8,
    "ShortStorage": torch.int16,
    "IntStorage": torch.int32,
    "LongStorage": torch.int64,
    "BFloat16Storage": torch.bfloat16,
    "HalfStorage": torch.float16,
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}

Reader = Callable[[str, int, int], Tensor]
"""Given a storage's key, its bytes and the bytes of an element: the bytes."""


@dataclass(frozen=True)
class _Name:
    """A class or function that a pickle names: never looked up."""

    name: str


@dataclass(frozen=True)
class Odd:
    """A value that is there, but is neither a tensor in full nor plain: sparse, nested, without data."""

    kind: str


class _Ordered(dict[Any, Any]):
    """An OrderedDict, whose attributes (those of a state_dict) are left out."""


def unpickle(path: Path) -> Any:
    """What ``torch.save`` wrote, on the CPU.

    Raises:
        InputError: Reading it would run code, or it is not what torch.save writes, or says that it is larger than the
            file can be.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) == b"PK\3\4":
            with zipfile.ZipFile(file) as archive:
                return _of_zip(archive, size)
        file.seek(0)
        return _of_stream(file, size)


def _of_zip(archive: zipfile.ZipFile, size: int) -> Any:
    members = archive.infolist()
    # zipfile makes room for both sizes that a member claims, whatever the file has.
    if max(sum(m.file_size for m in members), sum(m.compress_size for m in members)) > size:
        raise InputError("its parts are compressed, or overlap, which torch.save never writes; save it anew")
    top = archive.namelist()[0].partition("/")[0]
    swapped = f"{top}/byteorder" in archive.NameToInfo and archive.read(f"{top}/byteorder") == b"big"

    def stored(key: str, length: int, width: int) -> Tensor:
        with archive.open(f"{top}/data/{key}") as part:
            found = _filled(torch.empty(length, dtype=torch.uint8), part)
        return found.view(-1, width).flip(1).flatten() if swapped else found

    with archive.open(f"{top}/data.pkl") as pickled:
        return _Machine(size, stored).run(pickled)


def _of_stream(file: IO[bytes], size: int) -> Any:
    """As torch 1.5 and older wrote it, one pickle after another and the storages behind them."""
    storages: dict[str, tuple[Tensor, int]] = {}

    def stored(key: str, length: int, width: int) -> Tensor:
        storages[key] = torch.empty(length, dtype=torch.uint8), width
        return storages[key][0]

    if _Machine(size, stored).run(file) != _MAGIC:
        raise InputError("expected what torch.save writes")
    for _ in ("the format's version", "the machine that wrote it"):
        _Machine(size, stored).run(file)
    content = _Machine(size, stored).run(file)
    for key in _Machine(size, stored).run(file):
        found, width = storages[key]
        if int.from_bytes(file.read(8), "little") * width != len(found):
            raise InputError(f"storage {key} is not as long as the file says")
        _filled(found, file)
    return content


def _filled(target: Tensor, source: IO[bytes]) -> Tensor:
    """``target`` with the next bytes of ``source``."""
    view = target.numpy().data
    for start in range(0, len(view), _PIECE):
        piece = view[start : start + _PIECE]
        if (got := source.read(len(piece))) and len(got) == len(piece):
            piece[:] = got
        else:
            raise InputError("it ends before its tensors do")
    return target


@dataclass(frozen=True)
class _Bounded:
    """A file that is never asked for more than it has: Python would make room for all that a pickle claims."""

    file: IO[bytes]
    size: int

    def read(self, count: int) -> bytes:
        return self.file.read(min(count, self.size - self.file.tell()))

    def readline(self) -> bytes:
        return self.file.readline()

    def tell(self) -> int:
        return self.file.tell()


@dataclass
class _Machine:
    """Runs one pickle's opcodes on values that are built here."""

    size: int
    """Bytes of the file."""
    stored: Reader
    """Reads a storage."""
    storages: dict[str, Tensor] = field(default_factory=dict)
    """Those read, as bytes."""

    def run(self, file: IO[bytes]) -> Any:
        """The value of the pickle at the file's position. Raises InputError as ``unpickle`` does."""
        start = file.tell()
        stack: list[Any] = []
        below: list[list[Any]] = []
        memo: dict[int, Any] = {}
        for opcode, given, _ in pickletools.genops(_Bounded(file, self.size)):  # type: ignore[arg-type]
            argument: Any = given
            match opcode.name:
                case "PROTO":
                    pass
                case "STOP":
                    content = stack.pop()
                    _require_small(content, _SHARED * (file.tell() - start))
                    return content
                case "NONE":
                    stack.append(None)
                case "NEWTRUE" | "NEWFALSE":
                    stack.append(opcode.name == "NEWTRUE")
                case "BININT" | "BININT1" | "BININT2" | "LONG1" | "BINFLOAT" | "BINUNICODE" | "SHORT_BINSTRING":
                    stack.append(argument)
                case "EMPTY_LIST" | "EMPTY_DICT" | "EMPTY_TUPLE":
                    stack.append({"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_TUPLE": tuple}[opcode.name]())
                case "MARK":
                    below.append(stack)
                    stack = []
                case "TUPLE":
                    items, stack = tuple(stack), below.pop()
                    stack.append(items)
                case "TUPLE1" | "TUPLE2" | "TUPLE3":
                    count = int(opcode.name[-1])
                    stack[-count:] = [tuple(stack[-count:])]
                case "APPEND" | "APPENDS" | "SETITEM" | "SETITEMS":
                    if opcode.name.endswith("S"):
                        items, stack = tuple(stack), below.pop()
                    else:
                        count = 1 if opcode.name == "APPEND" else 2
                        items = tuple(stack[-count:])
                        del stack[-count:]
                    _put(stack[-1], items)
                case "BINPUT" | "LONG_BINPUT":
                    memo[argument] = stack[-1]
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "GLOBAL":
                    stack.append(_Name(argument.replace(" ", ".")))
                case "REDUCE":
                    arguments = stack.pop()
                    stack[-1] = self._called(stack[-1], arguments)
                case "BUILD":  # attributes, which nothing here has
                    stack.pop()
                case "BINPERSID":
                    stack[-1] = self._storage(*stack[-1])
                case _:
                    raise _more_than_tensors(opcode.name)
        raise InputError("the pickle in it ends too early")

    def _called(self, function: object, arguments: Any) -> Any:
        """What a function that torch.save names returns for these arguments."""
        name = function.name if isinstance(function, _Name) else str(type(function))
        match name, arguments:
            case "collections.OrderedDict", ():
                return _Ordered()
            case "collections.Counter", (dict() as counts,):
                return counts
            case "builtins.set", (list() as items,):
                return items
            case "_codecs.encode" | "builtins.bytearray", (str() as text, "latin1" | "latin-1"):
                return text.encode("latin-1")
            case "builtins.complex" | "torch.Size" | "torch.device" | "torch.serialization._get_layout", _:
                return arguments
            case "torch._utils._rebuild_tensor" | "torch._utils._rebuild_tensor_v2", (storage, at, size, strides, *_):
                return self._strided(storage, at, size, strides)
            case "torch._utils._rebuild_tensor_v3", (storage, at, size, strides, _, _, dtype, *_):
                return self._strided(storage.view(torch.uint8).view(_dtype(dtype)), at, size, strides)
            case "torch._utils._rebuild_parameter" | "torch._utils._rebuild_parameter_with_state", (Tensor() as t, *_):
                return t
            case "torch._tensor._rebuild_from_type_v2", (inner, _, tuple() as given, *_):
                return self._called(inner, given)
        if name.startswith(("torch._utils._rebuild_", "torch._tensor._rebuild_")):
            return Odd(name.rpartition("_rebuild_")[2])
        raise _more_than_tensors(name)

    def _storage(self, kind: str, dtype: _Name, key: str, _: str, length: int, *view: object) -> Tensor:
        """A storage, [length] of its dtype."""
        if kind != "storage" or view not in ((), (None,)):
            raise _more_than_tensors(f"a {kind} that is a view")
        stored = _dtype(dtype)
        if not isinstance(key, str) or not isinstance(length, int):
            raise InputError("the pickle in it is damaged")
        if key not in self.storages:
            held = sum(len(other) for other in self.storages.values())
            if not 0 <= length * stored.itemsize <= self.size - held:
                raise InputError(f"storage {key} would be {length} elements, more than the file holds")
            self.storages[key] = self.stored(key, length * stored.itemsize, stored.itemsize)
        return self.storages[key].view(stored)

    def _strided(self, storage: Tensor, at: int, size: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        if not all(isinstance(n, int) for n in size):
            raise InputError("the pickle in it is damaged")
        if math.prod(size) > _EXPANDED * self.size:
            raise InputError(
                f"a tensor of {math.prod(size):.3g} elements in a file of {self.size} bytes repeats its values; "
                "save it with .contiguous()"
            )
        return torch.as_strided(storage, size, strides, at)


def _dtype(named: _Name) -> torch.dtype:
    """The dtype of torch.float32, or of torch.FloatStorage."""
    last = named.name.rpartition(".")[2]
    found = _STORAGES.get(last) or getattr(torch, last, None)
    if not isinstance(found, torch.dtype) or last.startswith("q"):
        raise _more_than_tensors(named.name)
    return found


def _put(target: Any, items: tuple[Any, ...]) -> None:
    """Append to a list, or set the keys of a dict."""
    if isinstance(target, list):
        target.extend(items)
        return
    if not isinstance(target, dict) or len(items) % 2:
        raise InputError("the pickle in it is damaged")
    for key, value in zip(items[::2], items[1::2], strict=True):
        # The hash of a tuple is that of all it holds, each time anew.
        parts = key if isinstance(key, tuple) and len(key) <= _KEY else (key,)
        if not all(isinstance(part, str | bytes | int | float | None | _Name) for part in parts):
            raise _more_than_tensors(f"a key that is a {type(key).__name__}")
        target[key] = value


def _require_small(content: object, most: int) -> None:
    """Raise InputError where ``content``, all that is shared written out, has more than ``most`` nodes and letters."""
    known: dict[int, tuple[int, int]] = {}

    def measure(value: object, depth: int) -> tuple[int, int]:
        """Nodes and letters of a value, and how deep lists lie in it."""
        if isinstance(value, str | bytes):
            return 1 + len(value), 0
        if not isinstance(value, dict | list | tuple):
            return 1, 0
        if id(value) not in known and depth <= _DEEPEST:
            inside = (*value, *value.values()) if isinstance(value, dict) else value
            found = [measure(item, depth + 1) for item in inside]
            known[id(value)] = 1 + sum(n for n, _ in found), 1 + max((height for _, height in found), default=0)
        nodes, height = known.get(id(value), (0, 0))
        if depth + height > _DEEPEST:
            raise InputError(f"more than {_DEEPEST} lists or dicts lie in each other; save a plain dict of tensors")
        return nodes, height

    if measure(content, 0)[0] > most:
        raise InputError(f"it unfolds to more than {most} values through sharing; save a plain dict of tensors")


def _more_than_tensors(what: str) -> InputError:
    return InputError(
        f"this pickle holds more than tensors and was not executed ({what}); save a plain dict of tensors with "
        "torch.save, or a safetensors file"
    )
