"""Mutated inputs by their seeds, and what becomes of each: shared by the tests and by ``benchmarks/fuzz.py``.

A mutation knows what it changes: a field of a safetensors header, an opcode of a pickle, a member of a zip archive, the
header of an .npy array, a key or value of JSON (in a page, too), a line of ``metadata.jsonl``; or it changes bytes.
Every outcome is success or an InputError that does not speak of memory; anything else is raised as it comes.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import pickletools
import random
import re
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from attn_diag import InputError, convert, diff, inspect_captures, load
from attn_diag.analyses.comparison.read import read_diagnosis
from attn_diag.captures.capture import Capture
from attn_diag.reports.renderers import page
from attn_diag.results.baseline import BaselineCase, BaselineEntry, BaselineFile, BaselineSize, SequenceMean
from attn_diag.testing.regression.baseline import nearest, read

NUMBERS = (0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**30)
TEXTS = ("", ".", ".o", "o.", "a.b.o", "NaN", "-Infinity", "inf", "1e999", "-0", "9" * 400, "\n::error ::x", "\x1b[31m",
         "BTHD", "bottom-right", "2", "5,-1", "q", "None", "{}")  # fmt: skip
GLOBALS = ("builtins eval", "os system", "builtins bytearray", "collections OrderedDict", "collections Counter",
           "torch Size", "torch Tensor", "_codecs encode", "torch._utils _rebuild_tensor_v2",
           "torch._utils _rebuild_sparse_tensor", "torch._utils _rebuild_parameter", "torch FloatStorage",
           "torch.storage UntypedStorage", "torch float8_e4m3fn")  # fmt: skip
DTYPES = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2", "BOOL", "I64", "I32", "U8", "U64", "C64", "F4")
Files = dict[str, bytes]
"""A case's files by their names."""


def tensors(rows: int = 18, heads: int = 1, keys: int = 18, width: int = 8) -> dict[str, Tensor]:
    """A small call with all that is captured, [1, heads, rows, width]; GQA where there are more heads than 1."""
    generator = torch.Generator().manual_seed(rows)
    shapes = {"q": (heads, rows), "k": (1, keys), "v": (1, keys), "do": (heads, rows)}
    found = {n: torch.randn(1, *shape, width, generator=generator).bfloat16() for n, shape in shapes.items()}
    q, k, v = (found[n].double().requires_grad_() for n in "qkv")
    scores = width**-0.5 * q @ k.mT
    o = scores.softmax(-1) @ v
    grads = torch.autograd.grad(o, (q, k, v), found["do"].double())
    found |= {"o": o.detach().bfloat16(), "lse": scores.logsumexp(-1).detach().float()}
    return found | {n: g.bfloat16().contiguous() for n, g in zip(("dq", "dk", "dv"), grads, strict=True)}


def saved(content: object, *, old: bool = False) -> bytes:
    """What torch.save writes."""
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=not old)
    return buffer.getvalue()


@cache
def diagnosis() -> str:
    """The JSON of a diagnosis of two observations."""
    given = tensors()
    both = given | {"flash.o": given["o"] * 1.01}
    return inspect_captures([Capture.from_tensors(both, layer=3, step=7)], device="cpu", details=1).to_json()


@cache
def corpus(target: str) -> tuple[Files, ...]:
    """What is mutated."""
    given = tensors()
    bare = {n: t for n, t in given.items() if n in ("q", "k", "v", "o", "lse")}
    tokens = {n: t[0].transpose(0, 1).contiguous() for n, t in given.items() if n in ("q", "k", "v", "o")}
    if target == "inspect":
        arrays = io.BytesIO()
        np.savez_compressed(arrays, **{n: t.float().numpy() for n, t in bare.items()}, scale=np.float64(0.35))  # type: ignore[arg-type]
        stated = {"format": "attn-diag-capture", "format_version": "1", "scale": "0.35", "window": "9,0", "layer": "2"}
        more = tensors(heads=2) | {"mask": torch.ones(18, 18, dtype=torch.bool), "x": torch.ones(1, 18, 4).bfloat16(),
                        "w_q": torch.ones(16, 4).bfloat16()}  # fmt: skip
        return (
            {"a.safetensors": save(bare)},
            {"a.safetensors": save(more, stated)},
            {"a.pt": saved(bare | {"metadata": {"scale": 0.35, "window": (9, 0)}})},
            {"a.pt": saved(bare, old=True)},
            {"a.npz": arrays.getvalue()},
        )
    if target == "convert":
        record = {"function_name": "single_prefill_with_kv_cache", "execution_status": "completed", "versions":
                  {"torch": "2.11", "flashinfer": "0.6"}, "function_signature": "(q, k, v, scale_q=None, causal=False,"
                  " kv_layout='NHD', sm_scale=None, window_left=-1)", "input_metadata": {"kwarg_causal": False},
                  "tensor_details": {"arg_0": {"device": "cuda:0"}}}  # fmt: skip
        inputs = {f"arg_{i}": tokens[n] for i, n in enumerate("qkv")}
        lines = "\n".join(json.dumps(record | {"execution_status": s}) for s in ("inputs_saved", "completed"))
        layered = {"layers": [{"attn": {"q": given["q"], "k": given["k"], "v": given["v"], "out": given["o"]},
                               "cfg": {"scale": 0.35, "causal": False, "window": [4, -1]}}] * 2}  # fmt: skip
        named = {f"step=0___rank=0___dump_index={i}___name=attn_{n}___layer_id=2.pt":
                 saved({"value": t, "meta": {"world_size": 2}}) for i, (n, t) in enumerate(tokens.items())}  # fmt: skip
        return (
            {"d/call_1/metadata.jsonl": lines.encode(), "d/call_1/inputs.pt": saved(inputs),
             "d/call_1/outputs.pt": saved({"result": tokens["o"]})},
            {"d/a.pt": saved(layered)},
            {"d/a.pt": saved(bare | {"scale": 0.35, "causal": True}, old=True)},
            {f"d/{name}": data for name, data in named.items()},
        )  # fmt: skip
    if target == "baseline":
        mean = SequenceMean(0.1, 0.02, 7.0)
        case = BaselineCase("a", "b", ("o",), True, {"delta": mean}, {"o": BaselineSize(1.0, 1.0, mean)})
        entry = BaselineEntry("k", "cpu", "torch", 0, True, "fa2", 0.9, {"normal": case})
        return ({"a.json": BaselineFile({entry.key: entry}).to_json().encode()},)
    text = diagnosis()
    found = read_text(text)
    shown = page(found)
    script = re.search(_SCRIPT, shown, re.DOTALL)
    assert script is not None
    packed = {"gzip": base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()}
    zipped = shown[: script.start(2)] + json.dumps(packed) + shown[script.end(2) :]
    return {"a.json": text.encode()}, {"a.html": shown.encode()}, {"a.html": zipped.encode()}


_SCRIPT = r'(<script[^>]*id="attn-diag-diagnosis"[^>]*>)(.*?)(</script>)'


def read_text(text: str) -> Any:
    """A diagnosis from its JSON."""
    from attn_diag import Diagnosis

    return Diagnosis.from_json(text)


def mutated(target: str, seed: int) -> tuple[random.Random, Files]:
    """The files of a case, and the numbers that decide what is done with them."""
    rng = random.Random(f"{target} {seed}")
    files = dict(rng.choice(corpus(target)))
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        name = rng.choice(sorted(files))
        change = _BY_SUFFIX[name.rpartition(".")[2]] if rng.random() < 0.85 else in_bytes
        files[name] = change(rng, files[name])
    return rng, files


def in_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bytes flipped, cut off, left out, repeated, or written over."""
    if not data:
        return bytes([rng.randrange(256)])
    at, length = rng.randrange(len(data)), rng.choice((1, 2, 4, 8, 64, 1024))
    match rng.randrange(6):
        case 0:
            return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[at + length :]
        case 3:
            other = rng.randrange(len(data))
            return data[:at] + data[other : other + length] + data[at:]
        case 4:
            special = struct.pack("<Q", rng.choice(NUMBERS) % 2**64)[: rng.choice((1, 2, 4, 8))]
            return data[:at] + special + data[at + len(special) :]
        case _:
            # Of numbers: the smallest subnormal, the largest, infinity, NaN, zero; of BF16 and of fp32.
            word = rng.choice((b"\1\0", b"\x7f\x7f", b"\x80\x7f", b"\xc0\xff", b"\0\0", b"\1\0\0\0", b"\0\0\x80\x7f"))
            filled = (word * length)[: len(data) - at]
            return data[:at] + filled + data[at + len(filled) :]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Something that may not be expected in JSON."""
    match rng.randrange(9 if depth < 3 else 6):
        case 0:
            return rng.choice(NUMBERS)
        case 1:
            return rng.choice((1e-320, 1e308, -1e308, 0.5, float("nan"), float("inf")))
        case 2:
            return rng.choice(TEXTS)
        case 3:
            return rng.choice((None, True, False))
        case 4:
            return rng.choice(([], {}, ""))
        case 5:
            deep: Any = []
            for _ in range(rng.choice((5, 300, 900))):
                deep = [deep]
            return deep
        case 6:
            return {rng.choice(TEXTS): value(rng, depth + 1)}
        case _:
            return [value(rng, depth + 1) for _ in range(rng.randrange(1, 5))]


def in_value(rng: random.Random, root: Any) -> Any:
    """One place of a document changed: left out, replaced, renamed, repeated, or moved."""
    at = root
    while isinstance(at, dict | list) and at:
        keys = sorted(at) if isinstance(at, dict) else range(len(at))
        key: Any = rng.choice(keys)
        if isinstance(at[key], dict | list) and at[key] and rng.random() < 0.93:
            at = at[key]
            continue
        match rng.randrange(6):
            case 0:
                del at[key]
            case 1 if isinstance(at, dict):
                at[rng.choice(TEXTS)] = at.pop(key)
            case 1 | 2 if isinstance(at, list):
                at.insert(key, at[key])
            case 3 if isinstance(at[key], int | float):
                at[key] = rng.choice((-1, 0, 2, 1e300, 1e-300)) * at[key]
            case 4:
                at[key] = at[rng.choice(keys)]
            case _:
                at[key] = value(rng)
        return root
    return value(rng)


def in_json(rng: random.Random, data: bytes) -> bytes:
    """JSON (or each line of it) with one place changed; bytes, where it is none."""
    lines = data.split(b"\n{")
    at = rng.randrange(len(lines))
    try:
        root = json.loads(lines[at] if at == 0 else b"{" + lines[at])
        lines[at] = json.dumps(in_value(rng, root)).encode()[0 if at == 0 else 1 :]
    except (ValueError, RecursionError):
        return in_bytes(rng, data)
    return b"\n{".join(lines)


def in_page(rng: random.Random, data: bytes) -> bytes:
    """A page whose embedded diagnosis is changed, packed as it was."""
    found = re.search(_SCRIPT.encode(), data, re.DOTALL)
    if found is None:
        return in_bytes(rng, data)
    inside = found[2]
    if inside.lstrip().startswith(b'{"gzip"') and rng.random() < 0.8:
        try:
            text = gzip.decompress(base64.b64decode(json.loads(inside)["gzip"]))
        except (ValueError, OSError, EOFError, TypeError, zlib.error):
            return in_bytes(rng, data)
        packed = gzip.compress(rng.choice((in_json, in_json, in_bytes))(rng, text), mtime=0)
        packed = in_bytes(rng, packed) if rng.random() < 0.1 else packed
        inside = json.dumps({"gzip": base64.b64encode(packed).decode()}).encode()
    else:
        inside = rng.choice((in_json, in_json, in_bytes))(rng, inside)
    return data[: found.start(2)] + inside + data[found.end(2) :]


def in_safetensors(rng: random.Random, data: bytes) -> bytes:
    """A tensor's shape, dtype or name changed so that its bytes still fit, any place of the header, or the data."""
    try:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        body = data[8 + length :]
        names = sorted(n for n in header if n != "__metadata__")
        name = rng.choice(names)
        match rng.randrange(6):
            case 0:
                rng.shuffle(header[name]["shape"])
            case 1:
                header[name]["dtype"] = rng.choice(DTYPES)
            case 2:
                header[rng.choice((*TEXTS, "q", "mask", "do", "delta", "x.o", "sinks", "q_descale"))] = header.pop(name)
            case 3:
                stated = header.setdefault("__metadata__", {})
                key = rng.choice(("scale", "window", "softcap", "layout", "causal", "layer", "head_offset", "lse_base"))
                stated[key] = rng.choice((*TEXTS, *map(str, NUMBERS), "1e-160", "0,0", "-1,3"))
            case 4:
                body = in_bytes(rng, body)
            case _:
                in_value(rng, header)
        text = json.dumps(header).encode()
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return in_bytes(rng, data)
    return len(text).to_bytes(8, "little") + text + body


def in_pickle(rng: random.Random, data: bytes) -> bytes:
    """A pickle of opcodes left out, repeated, swapped, or with other arguments."""
    try:
        places = [(opcode, argument, at) for opcode, argument, at in pickletools.genops(data) if at is not None]
    except Exception:  # whatever a mutated pickle makes pickletools raise
        return in_bytes(rng, data)
    ends = [at for _, _, at in places[1:]]
    parts = [data[at:end] for (_, _, at), end in zip(places, [*ends, places[-1][2] + 1], strict=True)]
    rest = data[places[-1][2] + 1 :]
    at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
    name = places[at][0].name
    match rng.randrange(7):
        case 0:
            parts[at] = b""
        case 1:
            parts.insert(at, parts[other])
        case 2:
            parts[at], parts[other] = parts[other], parts[at]
        case 3:
            parts[at] += rng.choice(
                (b"h\0", b"h\1", b"0", b"2", b"(", b"}", b"]", b")", b"R", b"Q", b"b", b"s", b"\x85", b"\x86")
            )
        case 4:
            parts[at] += f"c{rng.choice(GLOBALS).replace(' ', chr(10))}\n".encode() + rng.choice(
                (b"", b")R", b"]\x85R")
            )
        case _ if "BINUNICODE" in name:
            text = rng.choice((*TEXTS, "q", "scale", "window", "metadata")).encode()
            parts[at] = b"X" + len(text).to_bytes(4, "little") + text
        case _ if "INT" in name or "LONG" in name:
            number = rng.choice(NUMBERS)
            parts[at] = b"\x8a" + bytes([14]) + number.to_bytes(14, "little", signed=True)
        case _:
            parts[at] = in_bytes(rng, parts[at])
    return b"".join(parts) + rest


def in_npy(rng: random.Random, data: bytes) -> bytes:
    """An array whose header says another shape, type or order; or other bytes."""
    if rng.random() < 0.4 or len(data) < 12:
        return in_bytes(rng, data)
    length = int.from_bytes(data[8:10], "little")
    text = data[10 : 10 + length].decode("latin-1")
    numbers = list(re.finditer(r"\d+", text))
    if not numbers:
        return in_bytes(rng, data)
    old = rng.choice(numbers)
    text = text[: old.start()] + str(rng.choice(NUMBERS)) + text[old.end() :]
    if rng.random() < 0.4:
        text = re.sub(
            r"'[<>|=][a-zA-Z]\d+'", repr(rng.choice(("<u2", "|V2", "|O", "<U9", ">f4", "<f8", "|b1", "<c8"))), text
        )
    raw = text.encode("latin-1")
    return data[:8] + len(raw).to_bytes(2, "little") + raw + data[10 + length :]


def in_zip(rng: random.Random, data: bytes) -> bytes:
    """An archive with a member changed, left out, renamed, repeated, or compressed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            parts = [(m.filename, archive.read(m), m.compress_type) for m in archive.infolist()]
    except Exception:  # whatever a mutated archive makes zipfile raise
        return in_pickle(rng, data) if data[:2] == b"\x80\x02" else in_bytes(rng, data)
    if not parts:  # the mutation before has left it empty
        return in_bytes(rng, data)
    at = rng.randrange(len(parts))
    if (pickled := [i for i, part in enumerate(parts) if part[0].endswith(".pkl")]) and rng.random() < 0.7:
        at = pickled[0]
    name, content, kind = parts[at]
    match rng.randrange(8):
        case 0:
            del parts[at]
        case 1:
            parts[at] = (rng.choice((*TEXTS[2:], "archive/data/0", "q.npy", "mask.npy")) or "x", content, kind)
        case 2:
            parts.insert(at, (f"{name}2", content, kind))
        case 3:
            parts[at] = (name, content, zipfile.ZIP_DEFLATED)
        case _:
            change = in_pickle if name.endswith(".pkl") else in_npy if name.endswith(".npy") else in_bytes
            parts[at] = (name, change(rng, content), kind)
    buffer = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "w") as archive:
        warnings.simplefilter("ignore")  # two members of one name are meant
        for part, content, kind in parts:
            archive.writestr(part, content, kind)
    return buffer.getvalue()


_BY_SUFFIX: dict[str, Callable[[random.Random, bytes], bytes]] = {
    "safetensors": in_safetensors, "pt": in_zip, "npz": in_zip, "json": in_json, "jsonl": in_json, "html": in_page,
}  # fmt: skip
MEMORY = re.compile(r"MemoryError|allocate memory|out of memory|Unable to allocate", re.IGNORECASE)


def attempt(target: str, seed: int, folder: Path) -> str:
    """Run the case: "success", or "refused" for an InputError. Whatever else is raised is a hole.

    Args:
        target: One of ``TARGETS``.
        seed: Of the mutation.
        folder: Where its files are written, empty.
    """
    rng, files = mutated(target, seed)
    for name, data in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            TARGETS[target](rng, folder, folder / next(iter(files)))
    except InputError as error:
        if MEMORY.search(str(error)):
            raise MemoryError(str(error)) from error
        return "refused"
    finally:
        shutil.rmtree(folder)
        folder.mkdir()
    return "success"


def _inspect(rng: random.Random, _: Path, file: Path) -> None:
    found = inspect_captures([load(file)], device="cpu", details=rng.random() < 0.05)
    found.to_json()
    if rng.random() < 0.3:
        found.report()


def _report(rng: random.Random, _: Path, file: Path) -> None:
    found = read_diagnosis(file)
    found.report()
    if rng.random() < 0.3:
        page(found)


def _diff(rng: random.Random, folder: Path, file: Path) -> None:
    good = folder / "good.json"
    good.write_text(diagnosis())
    first, second = (good, file) if rng.random() < 0.5 else (file, good)
    diff(first, second).report()


def _baseline(_: random.Random, __: Path, file: Path) -> None:
    found = read(file)
    nearest(found, "k", "cpu", "torch")
    found.to_json()


def _convert(_: random.Random, folder: Path, __: Path) -> None:
    for written in convert(folder / "d", folder / "out"):
        load(written)


TARGETS: dict[str, Callable[[random.Random, Path, Path], None]] = {
    "inspect": _inspect, "report": _report, "diff": _diff, "baseline": _baseline, "convert": _convert,
}  # fmt: skip
