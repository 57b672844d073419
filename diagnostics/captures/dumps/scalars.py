"""Numbers and words that a dump states beside its tensors, whatever they turn out to be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attn_diag.errors import InputError

# Letters of a value in an error.
_LONGEST = 80


def scalar(key: str, value: object, name: str = "") -> Any:
    """What a dump states, as ``Metadata`` takes it; None stays None.

    Args:
        key: The field of ``Metadata``.
        value: Of the dump: a number, a word, a list, a tensor of one or two numbers, or anything else.
        name: What the dump calls it, for the error.

    Raises:
        InputError: It cannot be read; the error says as what.
    """
    if value is None:
        return None
    read, meant = _READ[key]
    try:
        return read(_bare(value))
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: types that torch cannot convert
        raise InputError(f"{name or key}={shown(value)} cannot be read as {meant}") from None


def shown(value: object) -> str:
    """A value in an error, in a few letters."""
    if isinstance(value, Tensor):
        return f"tensor {list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _bare(value: object) -> object:
    if not isinstance(value, Tensor):
        return value
    if value.numel() > 2:
        raise ValueError("more than two numbers")
    return value.item() if value.numel() == 1 else value.flatten().tolist()


def _whole(value: Any) -> int:
    """An integer, also from text. Raises ValueError for 4.5, which int() cuts off."""
    if isinstance(value, float) and not value.is_integer():
        raise ValueError("expected an integer")
    return int(value)


def _window(value: Any) -> tuple[int, int] | None:
    """(left, right) as FlashAttention has it; one number W is Hugging Face's: the last W keys."""
    if isinstance(value, list | tuple):
        left, right = (-1 if n is None else _whole(n) for n in value)
        return None if (left, right) == (-1, -1) else (left, right)
    return (_whole(value) - 1, -1)


def _left(value: Any) -> tuple[int, int] | None:
    """The window of FlashInfer's window_left: that many keys before the row's own, or all."""
    left = _whole(value)
    return (left, -1) if left >= 0 else None


def _flag(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError("expected true or false")
    return bool(value)


_READ: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scale": (float, "a number"),
    # 0 is how kernels say that there is none.
    "softcap": (lambda value: float(value) or None, "a number"),
    "window": (_window, "one or two integers"),
    "window_left": (_left, "an integer"),
    "flag": (_flag, "true or false"),
    # True says nothing of the alignment: see ``DumpedCall.readings``.
    "causal": (lambda value: value, "true, false or a word"),
    **dict.fromkeys(("layer", "step", "head_offset"), (_whole, "an integer")),
    **dict.fromkeys(("layout", "lse_base"), (str, "a word")),
}
