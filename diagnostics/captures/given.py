"""What a function of heads is given: a call's tensors, a capture, a file, a folder, or several of these."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypedDict, TypeGuard, get_type_hints

import numpy as np
import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.joined import equal_bits
from attn_diag.captures.linear import LinearCapture
from attn_diag.captures.loading import find_captures, load
from attn_diag.captures.places import place
from attn_diag.captures.sources import CACHE, PACKING
from attn_diag.captures.tensors import as_tensor
from attn_diag.errors import InputError


class Array(Protocol):
    """A tensor of torch, NumPy, JAX, or of another library that shares its memory (DLPack)."""

    @property
    def shape(self) -> Any:
        """Sizes of all axes."""
        ...

    @property
    def dtype(self) -> Any:
        """Type of the values."""
        ...


class CallTensors(TypedDict, total=False):
    """What an attention call had and returned besides q, k and v; see ``attn_diag.inspect``."""

    o: Array | None
    lse: Array | None
    delta: Array | None
    do: Array | None
    dq: Array | None
    dk: Array | None
    dv: Array | None
    dkv: Array | None
    x: Array | None
    w_q: Array | None
    dq_pre: Array | None
    mask: Array | None
    dmask: Array | None
    cu_seqlens_q: Array | None
    cu_seqlens_k: Array | None
    position_ids: Array | None
    page_table: Array | None
    cache_seqlens: Array | None
    k_descale: Array | None
    v_descale: Array | None
    sinks: Array | None
    dsinks: Array | None
    alibi_slopes: Array | None
    dropout_mask: Array | None
    causal: bool | str
    scale: float | None
    window: tuple[int, int] | None
    softcap: float | None
    softmax_offset: float | None
    alibi_origin: str | None
    dropout_p: float | None
    declared: str | None
    layout: str


Named = str | os.PathLike[str]
"""A capture's file, or a folder of them."""
One = Capture | Array
"""A capture, or q of a call."""
Source = One | Named | Sequence[Capture | Named]
"""What a function of heads takes."""

_OPTIONS = ("causal", "scale", "window", "softcap", "softmax_offset", "alibi_origin", "dropout_p", "declared", "layout")


def is_array(value: object) -> TypeGuard[Array]:
    """Whether this is some library's tensor."""
    return isinstance(value, Tensor | np.ndarray) or (hasattr(value, "shape") and hasattr(value, "dtype"))


def is_several(source: object) -> bool:
    """Whether an answer about this is a list of answers: of a list, or of a folder."""
    if isinstance(source, str | os.PathLike):
        return place(source).is_dir()
    return not isinstance(source, Capture) and not is_array(source)


def captures_of(source: Source, k: Array | None, v: Array | None, call: CallTensors, *, function: str) -> list[Capture]:
    """The captures that ``source`` stands for.

    Args:
        source: q of a call; or a Capture, a capture's file, a folder of them, or a list of these.
        k, v: Of the call.
        call: What else it had; of captures only options (causal, scale, …), in place of what they state.
        function: Whose arguments these are, for errors.

    Raises:
        InputError: There are none, one cannot be read, tensors do not fit each other or are of no kind that is known,
            or tensors are given beside captures.
    """
    if unknown := sorted(call.keys() - get_type_hints(CallTensors).keys()):
        known = ", ".join(get_type_hints(CallTensors))
        raise InputError(f"{function}() has no argument {unknown[0]!r}; of a call it takes {known}")
    if is_array(source) and not isinstance(source, Capture):
        return [_of_call(source, k, v, call, function)]
    beside = {"k": k, "v": v, **{name: call.get(name) for name in call if name not in _OPTIONS}}
    if given := [name for name, value in beside.items() if value is not None]:
        raise InputError(
            f"{function}() was given {', '.join(given)} beside {_kind(source)}, which brings its own tensors; expected "
            f"{function}(q, k, v, o=…) or {function}(capture)"
        )
    options: dict[str, Any] = {name: value for name, value in call.items() if name in _OPTIONS}
    if "causal" in options:
        options["causal"] = _alignment(options["causal"], square=False)
    return _opened(source, options, function)


def require_captures(captures: Iterable[Capture], function: str) -> list[Capture]:
    """What ``function``_captures was given. Raises InputError for what is no capture, such as the path of a folder."""
    several = isinstance(captures, Iterable) and not isinstance(captures, str | Capture)
    given: list[Any] = list(captures) if several else [captures]
    for one in given:
        if not isinstance(one, Capture):
            raise InputError(
                f"{function}_captures() takes captures that are loaded, got {_kind(one)}; {function}() takes files and "
                "folders too"
            )
    return given


def _of_call(q: Array, k: Array | None, v: Array | None, call: CallTensors, function: str) -> Capture:
    for name, value in (("k", k), ("v", v)):
        if value is None:
            raise InputError(f"{function}() needs {name} beside q: {function}(q, k, v, o=…), each [B, H, T, D]")
    options: dict[str, Any] = {name: value for name, value in call.items() if name in _OPTIONS}
    arrays: dict[str, Any] = {name: value for name, value in call.items() if name not in _OPTIONS}
    tensors = {
        name: as_tensor(name, value)
        for name, value in {"q": q, "k": k, "v": v, **arrays}.items()
        if value is not None
    }  # fmt: skip
    layout = options.get("layout")
    square = _same_lengths(tensors, layout)
    options["causal"] = _alignment(options.get("causal", False), square=square, hint=_layout_hint(tensors, layout))
    return Capture.from_tensors(tensors, **options)


def _same_lengths(tensors: dict[str, Tensor], layout: str | None) -> bool:
    """Whether every sequence has as many keys as query rows, so that both alignments of a causal mask are one."""
    q, k = tensors["q"], tensors["k"]
    if any(name in tensors for name in CACHE):
        return False
    borders = [tensors.get(name) for name in PACKING]
    if borders[0] is not None:
        return borders[1] is None or equal_bits(*(b.to("cpu", torch.int64) for b in borders if b is not None))
    if "position_ids" in tensors and q.dim() == 3:
        return q.shape[0] == k.shape[0]
    axis = 1 if layout == "BTHD" else 2
    # Of other axes there are no lengths, and the shapes are refused.
    return q.dim() != 4 or k.dim() != 4 or q.shape[axis] == k.shape[axis]


def _layout_hint(tensors: dict[str, Tensor], layout: str | None) -> str:
    """What may be meant where lengths differ: [B, T, H, D], whose heads are read as rows."""
    q, k = tensors["q"], tensors["k"]
    if layout is None and q.dim() == k.dim() == 4 and q.shape[1] == k.shape[1]:
        return f"; q {list(q.shape)} and k {list(k.shape)} were read as [B, H, T, D]: of [B, T, H, D] say layout='BTHD'"
    return ""


def _alignment(causal: bool | str, *, square: bool, hint: str = "") -> str:
    """What a capture states of a causal mask. Raises InputError where True may mean either alignment."""
    if causal is True and not square:
        raise InputError(
            f"causal=True is ambiguous where Tq and Tk differ: say 'top-left' (SDPA) or 'bottom-right'{hint}"
        )
    return causal if isinstance(causal, str) else ("top-left" if causal else "none")


def _opened(source: object, options: dict[str, Any], function: str) -> list[Capture]:
    if isinstance(source, Capture):
        changed = {name: value for name, value in options.items() if value is not None}
        return [replace(source, metadata=source.metadata.override(**changed)) if changed else source]
    if isinstance(source, str | os.PathLike):
        return [load(path, **options) for path in find_captures([source])]
    if isinstance(source, Iterable) and not isinstance(source, bytes | dict):
        found = [capture for item in source for capture in _opened_item(item, options, function)]
        if not found:
            raise InputError(f"{function}() was given no capture: an empty list")
        return found
    if isinstance(source, LinearCapture):
        known = "inspect_linear, identify_linear, attribute_linear, what_if_linear, diff_linear or replay_linear"
        raise InputError(f"{function}() looks at softmax attention; of linear attention use {known}")
    raise InputError(
        f"{function}() takes q, k and v, a Capture, a capture's file, a folder of them, or a list of these; got "
        f"{_kind(source)}"
    )


def _opened_item(item: object, options: dict[str, Any], function: str) -> list[Capture]:
    if isinstance(item, Capture | str | os.PathLike):
        return _opened(item, options, function)
    raise InputError(
        f"{function}() takes a list of captures or of their files, got one of {_kind(item)}; "
        f"tensors are given as {function}(q, k, v, o=…)"
    )


def _kind(value: object) -> str:
    if isinstance(value, Capture):
        return "a capture"
    if isinstance(value, str | os.PathLike):
        return f"the path {os.fspath(value)!r}"
    kind = type(value)
    return f"{kind.__module__}.{kind.__qualname__}" if kind.__module__ != "builtins" else kind.__qualname__
