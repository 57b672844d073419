"""Whether the tensors of a capture have names, types and axes that they may have, told before any of them is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

import torch

from attn_diag.captures.alibi import SLOPES
from attn_diag.captures.dropout import KEPT
from attn_diag.captures.hops import is_of_hop
from attn_diag.captures.metadata import Metadata, refuse_unsupported
from attn_diag.captures.sinks import OF_HEADS
from attn_diag.captures.sources import CACHE, DEFAULT_OBSERVATION, FLOATS, FP8, INPUTS, OBSERVED, PACKING, TensorSource
from attn_diag.captures.sums import without_sums
from attn_diag.errors import InputError
from attn_diag.reference import format_of
from attn_diag.results.wording import listed

Tensors = Mapping[str, TensorSource]
# What captures hold besides: sums over a rank's own keys, and position_ids that do not begin again.
_BESIDES = ("own_dk", "own_dv", "position_ids")
# So many tensors that are not used are named.
_NAMED = 4


def require_inputs(tensors: Tensors, metadata: Metadata) -> None:
    """Raise InputError where q, k or v is missing, or a tensor has a name, type or number of axes that none may have.

    Args:
        tensors: By name.
        metadata: What is said of them.
    """
    for name in tensors:
        observation, dot, output = name.rpartition(".")
        if output not in (*PACKING, *OF_HEADS) and name not in (SLOPES, KEPT):
            refuse_unsupported(output)
        if (
            output in OBSERVED
            and dot
            and (not observation or (observation == DEFAULT_OBSERVATION and output in tensors))
        ):
            raise InputError(f"{name!r} names no observation of its own; call it 'flash.{output}', or {output!r} alone")
    for name in ("q", "k", "v"):
        if name not in tensors:
            have = ", ".join(sorted(tensors)) or "no tensors"
            raise InputError(f"tensor '{name}' is missing: a capture needs q, k and v; this one has {have}")
    for name, tensor in tensors.items():
        _check_dtype(name, tensor.dtype)
    _check_input_dtypes(tensors)
    for name in ("q", "k", "v"):
        shape = tuple(tensors[name].shape)
        if len(shape) != 4:
            axes = {3: ": of one sequence q[None]", 2: ": of one head q[None, None]"}.get(len(shape), "")
            raise InputError(
                f"{name} must have shape [{', '.join(metadata.layout)}], got {list(shape)}; add the missing axes{axes}"
            )
        if 0 in shape:
            raise InputError(f"{name} is empty: shape {list(shape)}")


def unused_words(tensors: Tensors) -> str | None:
    """Which tensors are not used because of their names, in words, with the known name that is next; None: none."""
    known = (*INPUTS, *OBSERVED, *_BESIDES)
    unused = [n for n in without_sums(tensors) if not (is_of_hop(n) or n in known or n.rpartition(".")[2] in OBSERVED)]
    if not unused:
        return None
    meant = {name: _meant(name, known) for name in unused}
    named = [f"{name!r} (meant for {near!r}?)" if near else repr(name) for name, near in meant.items()]
    said = f"not used, as no such name is known: {listed(named, _NAMED)}"
    if all(meant.values()):
        return said
    return (
        f"{said}; known are {', '.join(INPUTS)}, and of outputs {', '.join(OBSERVED)}, also with an observation's name "
        "before them, such as flash.o"
    )


def _meant(name: str, known: Iterable[str]) -> str | None:
    """The known name that a tensor's may be meant for; None where none is near."""
    observation, dot, output = name.rpartition(".")
    near = get_close_matches(output.strip().lower(), OBSERVED if dot else known, 1)
    return f"{observation}{dot}{near[0]}" if near else None


def _check_dtype(name: str, dtype: torch.dtype) -> None:
    base = name.rpartition(".")[2]
    if base == "q_positions":
        if dtype.is_floating_point or dtype == torch.bool:
            raise InputError(f"q_positions must be integers, got {short(dtype)}")
    elif (
        base in INPUTS + OBSERVED
        and base not in (*PACKING, *CACHE, KEPT)
        and dtype not in FLOATS
        and not (base == "mask" and dtype == torch.bool)
    ):
        floats = f"floating point ({', '.join(map(short, FLOATS))})"
        expected = f"bool (True: attend) or, to be added, {floats}" if base == "mask" else floats
        raise InputError(f"{name} has dtype {short(dtype)}; expected {expected}")


def _check_input_dtypes(tensors: Tensors) -> None:
    dtypes = {name: tensors[name].dtype for name in ("q", "k", "v")}
    # A cache may be narrower than q.
    cached = dtypes["q"] in FLOATS and dtypes["k"] in FP8 and dtypes["v"] in FP8
    if len(set(dtypes.values())) > 1 and not cached and not all(dtype in FP8 for dtype in dtypes.values()):
        listed = ", ".join(f"{name} {short(dtype)}" for name, dtype in dtypes.items())
        common = max(set(dtypes.values()), key=list(dtypes.values()).count)
        odd = [name for name, dtype in dtypes.items() if dtype != common]
        # BF16 beside FP16 is neither's promotion: an operation on both gives FP32.
        wider = len(odd) == 1 and {common, dtypes[odd[0]]} != {torch.bfloat16, torch.float16}
        wider = wider and format_of(dtypes[odd[0]]).precision > format_of(common).precision
        hint = (
            f": {odd[0]} was silently promoted, look at the last operation that made it; where the kernel does take it "
            "so (llama.cpp's q in FP32 beside a cache in FP16), give all three in its dtype, which changes no number"
            if wider
            else ""
        )
        raise InputError(f"q, k and v must have one dtype, got {listed}{hint}")
    for name, dtype in dtypes.items():
        if dtype in FP8 and f"{name}_descale" not in tensors:
            raise InputError(
                f"{name} is {short(dtype)} without descale factors: add '{name}_descale' ([B, heads] or one number)"
            )


def short(dtype: torch.dtype) -> str:
    """A dtype's name as people write it."""
    return str(dtype).removeprefix("torch.")
