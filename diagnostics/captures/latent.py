"""The latent of absorbed MLA, which is k and, in its first features, v: its gradient counts both uses once.

dKV = dK + [dV, 0]        [Tk, D]: D = 576 and Dv = 512 in DeepSeek's
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from attn_diag.captures.sources import CACHE, TensorSource
from attn_diag.errors import InputError

GRADIENT = "dkv"


def require_latent(tensors: Mapping[str, TensorSource]) -> None:
    """Raise InputError where a gradient of a shared latent does not fit the capture.

    Args:
        tensors: By name.
    """
    name = next((n for n in tensors if n.rpartition(".")[2] == GRADIENT), None)
    if name is None:
        return
    d, dv = (tensors[n].shape[3] for n in "kv")
    if dv > d:
        raise InputError(
            f"{name} is the gradient of a latent that is k, and v in its first features; v has {dv}, k {d}; give dk "
            "and dv"
        )
    if any(n in tensors for n in CACHE):
        raise InputError(f"{name}: gradients of a cache are not supported; leave {name} out")


def of_latent(dk: Tensor, dv: Tensor) -> Tensor:
    """What both uses make of the latent's gradient, [..., D].

    Args:
        dk: [..., D].
        dv: [..., Dv].
    """
    return dk + torch.nn.functional.pad(dv, (0, dk.shape[-1] - dv.shape[-1]))
