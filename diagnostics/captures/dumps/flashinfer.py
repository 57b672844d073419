"""FlashInfer's flight recorder: the dumps of ``FLASHINFER_LOGLEVEL=10``.

Followed: ``flashinfer/api_logging.py`` (``_dump_function_inputs``, ``_dump_function_outputs``,
``flush_graph_dumps``) of flashinfer-ai/flashinfer, 2026, and the signatures in ``flashinfer/prefill.py`` and
``decode.py``. One folder a call, ``<time>_pid<pid>_<function>_call<number>``, holds

- ``metadata.jsonl``, whose last record is the most complete: ``function_name``, ``function_signature``,
  ``input_metadata`` (arguments that are no tensors), ``execution_status``, ``tensor_details``, ``versions``;
- ``inputs.pt`` (or ``.safetensors``): tensors named ``arg_0``, … by position and ``kwarg_<name>`` by keyword;
- ``outputs.pt``: ``result``, or ``result_0`` (O) and ``result_1`` (LSE) where the LSE was asked for;
- under CUDA graphs ``graph_flushes/flush_0001/…``, one such folder a replay; its parent repeats the last of them.

O is [T, H, D] and LSE [T, H] whatever ``kv_layout`` is, which is that of k and v only (NHD: [T, H, D]); causal masks
are aligned bottom-right; ``window_left`` is inclusive; the LSE has base 2 (flashinfer issue 2113).
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from attn_diag.captures.dumps.call import DumpedCall
from attn_diag.captures.dumps.scalars import scalar, shown
from attn_diag.captures.files import named_errors
from attn_diag.captures.loading import require_regular_file
from attn_diag.captures.pickles import unpickle
from attn_diag.captures.sources import FP8
from attn_diag.errors import InputError

METADATA = "metadata.jsonl"
_SUPPORTED = ("single_prefill_with_kv_cache", "single_decode_with_kv_cache")
_ATTENTION = re.compile(r"prefill|decode|attention|mla|xqa|fmha|cascade", re.IGNORECASE)
# Of a function's name and signature, in letters.
_LONGEST = 10_000
# Calls that compute no attention, though their names say it.
_NO_CALL = re.compile(r"\.(__init__|plan|begin_forward|end_forward|reset\w*)$|merge_state|append_paged|rope|cache_buf")
_WHY = (
    ("jit_module", "a kernel of the caller's own: nothing says which variant of attention it computes"),
    ("Paged|batch_decode|batch_context|xqa|mla|MLA|cudnn", "a paged KV cache: the dump holds pages, not one sequence"),
    ("Ragged|ragged|cascade|Cascade|Pod|POD", "packed (varlen) sequences"),
)


def call_folders(path: Path) -> list[Path]:
    """The folders of dumped calls at or below ``path``: those of replays instead of their parent's repetition."""
    path = path.parent if path.is_file() else path
    folders = sorted(file.parent for file in path.rglob(METADATA))
    return [f for f in folders if not any(other.parent.parent == f for other in folders if other != f)]


def is_attention(folder: Path) -> bool:
    """Whether the dumped call computes attention, supported or not; one whose metadata are lost may."""
    try:
        function = str(_record(folder).get("function_name", ""))
    except InputError:
        return True
    return _ATTENTION.search(function) is not None and _NO_CALL.search(function) is None


def read_call(folder: Path) -> DumpedCall:
    """The call dumped in ``folder``. Raises InputError, with the reason, for calls that are not supported."""
    record = _record(folder)
    function = str(record.get("function_name", ""))[:_LONGEST]
    if function not in _SUPPORTED:
        why = next((why for pattern, why in _WHY if re.search(pattern, function)), "not a call on q, k and v alone")
        raise InputError(f"{folder}: {function} is not supported: {why}; supported: {', '.join(_SUPPORTED)}")
    inputs = _tensors(folder, "inputs")
    if inputs is None:
        raise InputError(f"{folder}: no inputs.pt or inputs.safetensors: the process died before they were written")
    outputs = _tensors(folder, "outputs") or {}
    with named_errors(folder / METADATA):
        arguments = _arguments(record, inputs)
        tensors, stated = _call(function, arguments, outputs)
        stated |= _provenance(record, function, arguments)
        notes = [
            f"converted from FlashInfer's dump {folder.name} ({function}, flashinfer {_version(record, 'flashinfer')})"
        ]
    if not outputs:
        notes.append(f"no output: execution_status is {record.get('execution_status', 'not stated')}")
    if arguments.get("use_fp16_qk_reduction"):
        notes.append("use_fp16_qk_reduction was on")
    replay = folder.parent.name == "graph_flushes"
    return DumpedCall(
        name=f"{folder.parent.parent.name}_{folder.name}" if replay else folder.name,
        source=str(folder),
        tensors=tensors,
        stated=stated,
        layouts=("BTHD",),
        causals=(stated.pop("causal"),),
        lse_bases=("2",) if "lse" in tensors else ("e",),
        notes=(*notes, *(["lse_base=2: FlashInfer's convention"] if "lse" in tensors else [])),
    )


def _provenance(record: Mapping[str, Any], function: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Kernel, device and torch, as metadata."""
    details = _object(record, "tensor_details")
    devices = [_object(details, key).get("device") for key in ("arg_0", "kwarg_q") if key in details]
    backend = arguments.get("backend", "auto")
    kernel = f"flashinfer.{function} ({backend if isinstance(backend, str) else shown(backend)})"
    device = next((device for device in devices if isinstance(device, str)), None)
    return {"kernel": kernel, "device": device, "torch": _version(record, "torch")}


def _version(record: Mapping[str, Any], package: str) -> str | None:
    version = _object(record, "versions").get(package)
    return version if isinstance(version, str) else None


def _object(record: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """What a record says under ``key``, if anything. Raises InputError where that is no JSON object."""
    found = record.get(key)
    if found is not None and not isinstance(found, dict):
        raise InputError(f"{key} must be a JSON object, got {shown(found)}")
    return found or {}


def _record(folder: Path) -> dict[str, Any]:
    """The last complete record of a call's metadata: a killed process may leave half a line."""
    path = folder / METADATA
    require_regular_file(path)
    for line in reversed(path.read_text(encoding="utf-8", errors="replace").splitlines()):
        # Half a line, lists in lists without end, numbers of 5,000 digits: no record.
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(read := json.loads(line), dict):
                return read
    raise InputError(f"{path}: no complete record in it")


def _tensors(folder: Path, kind: str) -> dict[str, Tensor] | None:
    pickled, plain = folder / f"{kind}.pt", folder / f"{kind}.safetensors"
    for path, read in ((pickled, unpickle), (plain, load_file)):
        if path.is_file():
            with named_errors(path):
                content = read(path)
                if not isinstance(content, dict) or not all(isinstance(t, Tensor) for t in content.values()):
                    raise InputError("expected a dict of tensors, as FlashInfer writes")
                return content
    return None


def _arguments(record: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """What the function was called with, by the names of its parameters; defaults as its signature states them."""
    names, arguments = _parameters(str(record.get("function_signature", "")))
    given = {**_object(record, "input_metadata"), **tensors}
    for key, value in given.items():
        kind, _, name = key.partition("_")
        if kind == "kwarg" and "__" not in name:
            arguments[name] = value
        elif kind == "arg" and name.isdecimal():
            if int(name) >= len(names):
                raise InputError(f"the function's signature does not say what argument {name} is")
            arguments[names[int(name)]] = value
    return arguments


def _parameters(signature: str) -> tuple[list[str], dict[str, Any]]:
    """Names of the positional parameters, and the defaults that are literals; q, k, v where nothing can be read."""
    try:
        parsed = ast.parse(f"def f{signature[:_LONGEST]}: ...").body[0]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ["q", "k", "v"], {}
    assert isinstance(parsed, ast.FunctionDef)
    positional = [*parsed.args.posonlyargs, *parsed.args.args]
    pairs = list(zip(positional[len(positional) - len(parsed.args.defaults) :], parsed.args.defaults, strict=True))
    pairs += [(a, d) for a, d in zip(parsed.args.kwonlyargs, parsed.args.kw_defaults, strict=True) if d is not None]
    return [a.arg for a in positional], {a.arg: d.value for a, d in pairs if isinstance(d, ast.Constant)}


def _call(
    function: str, arguments: Mapping[str, Any], outputs: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors with the axes of layout BTHD, and metadata."""
    for name in ("q", "k", "v"):
        if not isinstance(arguments.get(name), Tensor):
            raise InputError(f"the dump has no tensor {name}")
    if (rotary := arguments.get("pos_encoding_mode")) not in (None, "NONE"):
        raise InputError(
            f"pos_encoding_mode={shown(rotary)}: the kernel itself rotates q and k (or adds ALiBi), so the dump does "
            "not hold what was multiplied; dump a call with NONE"
        )
    if arguments.get("packed_custom_mask") is not None:
        raise InputError("packed_custom_mask is not supported; dump a call with custom_mask (bool [qo_len, kv_len])")
    decode = function == "single_decode_with_kv_cache"
    q, k, v = (arguments[name] for name in ("q", "k", "v"))
    for name, tensor, axes in (("q", q, "HD" if decode else "THD"), ("k", k, "THD"), ("v", v, "THD")):
        _require_axes(name, tensor, axes)
    layout = arguments.get("kv_layout", "NHD")
    if not isinstance(layout, str) or layout not in ("NHD", "HND"):
        raise InputError(f"kv_layout must be NHD or HND, got {shown(layout)}")
    if layout == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    if q.dtype not in FP8:
        # Exact: BF16 and FP16 hold every FP8 number. The factors come below.
        k, v = (t.to(q.dtype) if t.dtype in FP8 else t for t in (k, v))
    q = q[None] if decode else q  # one row
    tensors = {"q": q[None], "k": k[None], "v": v[None]}
    o, lse = outputs.get("result", outputs.get("result_0")), outputs.get("result_1")
    if o is not None:
        tensors["o"] = (o[None] if decode else o)[None]
    if lse is not None:
        _require_axes("the LSE", lse, "H" if decode else "TH")
        tensors["lse"] = (lse[None] if decode else lse).T[None]
    for name in ("q", "k", "v"):
        factor = arguments.get(f"scale_{name}", arguments.get(f"{name}_scale"))
        if factor is None and tensors[name].dtype in FP8:
            factor = 1.0
        if factor is not None:
            factor = _factors(name, factor)
            tensors[f"{name}_descale"] = factor if factor.numel() == 1 else factor[None]
    causal = "bottom-right" if scalar("flag", arguments.get("causal"), "causal") else "none"
    if (mask := arguments.get("custom_mask")) is not None:
        tensors["mask"], causal = _mask(mask, q.shape[0], k.shape[0]), "none"
    return tensors, {
        "causal": causal,
        "scale": scalar("scale", arguments.get("sm_scale"), "sm_scale"),
        "softcap": scalar("softcap", arguments.get("logits_soft_cap"), "logits_soft_cap"),
        "window": scalar("window_left", arguments.get("window_left")),
    }


def _require_axes(name: str, tensor: Tensor, axes: str) -> None:
    if tensor.ndim != len(axes):
        raise InputError(f"{name} must have shape [{', '.join(axes)}], got {list(tensor.shape)}")


def _factors(name: str, factor: object) -> Tensor:
    """The factors of FP8 values, float32."""
    try:
        return torch.as_tensor(factor, dtype=torch.float32).flatten()
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise InputError(f"the scale of {name}, {shown(factor)}, cannot be read as numbers") from None


def _mask(mask: object, rows: int, keys: int) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype not in (torch.bool, torch.uint8) or mask.numel() != rows * keys:
        raise InputError(f"custom_mask must be a bool tensor [{rows}, {keys}], got {shown(mask)}")
    return mask.bool().reshape(rows, keys)
