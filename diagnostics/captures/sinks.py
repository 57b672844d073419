"""Attention sinks: a learned logit a head in the softmax's denominator, whatever a dump calls it.

A sink is one more key that every row sees, with a fixed logit and the value zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from attn_diag.captures.metadata import Metadata
from attn_diag.captures.sources import TensorSource
from attn_diag.errors import InputError

# gpt-oss in transformers, FlashAttention-4, Transformer Engine, others' kernels.
ALIASES = ("s_aux", "learnable_sink", "softmax_offset", "attention_sinks", "attn_sink", "sink_bias")
GRADIENTS = ("ds_aux", "dsink", "dlearnable_sink", "d_learnable_sink", "dsoftmax_offset", "d_sinks")
OF_HEADS = ("sinks", "dsinks")
"""Tensors that have one number a head and no batch: their names in capture format 1.1."""


def with_sinks(tensors: Mapping[str, TensorSource]) -> Mapping[str, TensorSource]:
    """The tensors with ``sinks``, and observations' ``dsinks``, under these names and with one axis.

    Args:
        tensors: By name; ``s_aux``, ``learnable_sink`` and others stand for ``sinks``; of shape [Hq] or [1, Hq, 1, 1].

    Returns:
        The tensors by name.

    Raises:
        InputError: Two tensors stand for one.
    """
    found: dict[str, TensorSource] = {}
    for name, tensor in tensors.items():
        observation, dot, base = name.rpartition(".")
        role = "sinks" if base in ALIASES and not dot else "dsinks" if base in GRADIENTS else base
        called = f"{observation}{dot}{role}"
        if called != name and called in tensors:
            raise InputError(f"{name!r} and {called!r} are one thing; expected one of them")
        if called in found:
            raise InputError(f"two tensors stand for {called!r}, {name!r} among them; expected one of them")
        if role in OF_HEADS and len(tensor.shape) > 1 and max(tensor.shape) == math.prod(tensor.shape):
            tensor = tensor[...].flatten()
        found[called] = tensor
    return found if found.keys() != tensors.keys() or any(found[n] is not tensors[n] for n in found) else tensors


def require_sinks(tensors: Mapping[str, TensorSource], metadata: Metadata, heads: int) -> None:
    """Raise InputError where sinks, or their gradients, do not fit the capture.

    Args:
        tensors: By name.
        metadata: What is said of them.
        heads: Hq.
    """
    for name, tensor in tensors.items():
        if name.rpartition(".")[2] in OF_HEADS and tuple(tensor.shape) != (heads,):
            raise InputError(f"{name} must have shape [{heads}], one number a query head, got {list(tensor.shape)}")
    has_sinks = "sinks" in tensors or metadata.softmax_offset is not None
    if "sinks" in tensors and metadata.softmax_offset is not None:
        raise InputError("sinks and softmax_offset both state the sink's logit; expected one of them")
    for name in tensors:
        if name.rpartition(".")[2] == "dsinks":
            if not has_sinks:
                raise InputError(f"{name} is there but 'sinks' are missing: add them, [{heads}]")
            if "do" not in tensors:
                raise InputError(f"{name} is there but 'do' is missing: the reference backward needs dO")
    if metadata.lse_sink == "excluded" and not has_sinks:
        raise InputError("lse_sink=excluded says that LSE leaves the sink out, but there are no sinks; add them")


def summed(sources: Sequence[TensorSource]) -> torch.Tensor:
    """The gradients of ranks that each hold a part of what a sink sees, added up.

    Args:
        sources: Of every rank, [Hq].

    Returns:
        [Hq], in the ranks' type.
    """
    total = torch.stack([source[...].double() for source in sources]).sum(0)
    return total.to(sources[0].dtype)
