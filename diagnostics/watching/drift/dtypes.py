"""What an operation did to dtypes, told from what it was given and what came back, not from a list of operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from attn_diag.results.dtypes import Kind

# Complex numbers count as their parts: rotary embeddings pass through complex64 without a change of precision.
PRECISION = {
    dtype: dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
    )
} | {torch.complex128: torch.float64, torch.complex64: torch.float32, torch.complex32: torch.float16}

_CASTS = frozenset({"to", "type", "type_as", "float", "double", "half", "bfloat16", "cfloat", "cdouble", "chalf"})


def kind_of_change(
    func: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    given: Iterable[Tensor],
    result: Tensor,
    regime: torch.dtype | None,
) -> Kind | None:
    """None where nothing changed. A 0-dimensional tensor does not promote others, so it does not count beside them."""
    after = PRECISION[result.dtype]
    before = {PRECISION[x.dtype] for x in given if x.ndim or result.ndim == 0}
    if before <= {after}:
        return None
    if getattr(func, "__name__", "") in _CASTS or torch.dtype in map(type, (*args, *kwargs.values())):
        return "cast"
    if len(before) == 1 or after == regime:
        return "policy"
    if after.itemsize >= max(d.itemsize for d in before):
        return "widened"
    return "policy" if regime is None or after.itemsize >= regime.itemsize else "narrowed"


def autocast_dtype(device: str) -> torch.dtype | None:
    """Autocast's dtype on that type of device; None where it is off, or where the device has none (meta)."""
    try:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    except RuntimeError:
        return None


def expected_dtype(dtypes: Sequence[torch.dtype], regime: torch.dtype | None) -> torch.dtype:
    """What q, k and v should have: autocast's dtype where one of them has it, else the narrowest, then the commonest.

    Not the majority: a rotary embedding with fp32 cos and sin promotes two of the three.
    """
    if regime is not None and regime in dtypes:
        return regime
    return min(dtypes, key=lambda d: (d.itemsize, -dtypes.count(d)))


def short(dtype: torch.dtype) -> str:
    """Without "torch."."""
    return str(dtype).removeprefix("torch.")


def short_or_none(dtype: torch.dtype | None) -> str | None:
    """The same, of a regime that may be off."""
    return None if dtype is None else short(dtype)
