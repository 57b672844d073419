"""The gradient of an additive mask: which tensor it is of, and what sums it is."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from attn_diag.captures.sources import TensorSource
from attn_diag.errors import InputError

GRADIENT = "dmask"


def require_mask_gradient(tensors: Mapping[str, TensorSource]) -> None:
    """Raise InputError where the gradient of a mask does not fit the capture.

    Args:
        tensors: By name.
    """
    mask = tensors.get("mask")
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] != GRADIENT:
            continue
        if mask is None or mask.dtype == torch.bool:
            raise InputError(f"{name} is there but no additive 'mask' that it would be the gradient of")
        if tuple(tensor.shape) != tuple(mask.shape):
            raise InputError(
                f"{name} must have the shape of mask, {list(mask.shape)}, summed where that is broadcast, got "
                f"{list(tensor.shape)}"
            )
        if "do" not in tensors:
            raise InputError(f"{name} is there but 'do' is missing: the reference backward needs dO")
