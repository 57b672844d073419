"""A layer's weight, what became of it and its inputs, from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.machine import pick_device
from attn_diag.kernels.quantizers import Quantizer, parse_field
from attn_diag.testing.quantizing.functions import quantizer


@dataclass(frozen=True)
class Layer:
    """What ``quant`` is given."""

    w: Tensor
    """[out, in]."""
    observed: Tensor | None
    """What became of it."""
    x: Tensor | None
    """The layer's inputs, [..., in]."""
    dy: Tensor | None
    """The gradient of its outputs, [..., out]."""
    engine: Tensor | None
    """What an engine makes of the weight, [out, in]."""
    amax: Tensor | None
    """What the declared quantiser's scales are made of, one for each block."""
    by: Quantizer | None
    """What the quantiser should be."""


def read_layer(path: Path, weight: str, name: str | None, changes: Sequence[str], device: str) -> Layer:
    """A layer from a safetensors file.

    Args:
        path: The file.
        weight: The weight's name in it; beside it may be ``observed``, ``x``, ``dy``, ``engine`` and ``amax``.
        name: The declared quantiser's; None for none.
        changes: "field=value" each, of the declared quantiser.
        device: auto, cpu or cuda.

    Raises:
        InputError: A file that cannot be read, a name that is not in it, or a quantiser that cannot be.
    """
    if name is None and changes:
        raise InputError("--set changes a declared quantizer; name it with --quantizer")
    try:
        by = None if name is None else quantizer(name, **dict(map(parse_field, changes)))
    except ValueError as error:
        raise InputError(f"--set: {error}") from None
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from error
    if weight not in tensors:
        raise InputError(
            f"{path} has no tensor {weight!r}, but {', '.join(sorted(tensors)) or 'none'}; name it by --weight"
        )
    target = pick_device(device)
    names = (weight, "observed", "x", "dy", "engine", "amax")
    w, observed, x, dy, engine, amax = (None if n not in tensors else tensors[n].to(target) for n in names)
    assert w is not None
    return Layer(w, observed, x, dy, engine, amax, by)
