"""Whether the shapes of a capture's tensors fit each other, told before any of them is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from attn_diag.captures.alibi import require_slopes
from attn_diag.captures.dropout import require_dropout
from attn_diag.captures.latent import require_latent
from attn_diag.captures.mask_gradient import require_mask_gradient
from attn_diag.captures.metadata import Metadata
from attn_diag.captures.sinks import require_sinks
from attn_diag.captures.sources import PACKING, TensorSource
from attn_diag.errors import InputError

Tensors = Mapping[str, TensorSource]


@dataclass(frozen=True)
class _Shaped:
    """Tensors with the sizes that q, k and v give the axes; of packed ones B is 1, and T counts all documents."""

    tensors: Tensors
    metadata: Metadata

    def size(self, name: str, axis: str) -> int:
        return self.tensors[name].shape[self.metadata.layout.index(axis)]

    @property
    def batch(self) -> int:
        return self.size("q", "B")

    @property
    def q_heads(self) -> int:
        return self.size("q", "H")

    @property
    def kv_heads(self) -> int:
        return self.size("k", "H")

    @property
    def q_length(self) -> int:
        return self.size("q", "T")

    @property
    def k_length(self) -> int:
        return self.size("k", "T")

    @property
    def head_dim(self) -> int:
        return self.size("q", "D")


def require_fitting(tensors: Tensors, metadata: Metadata) -> None:
    """Raise InputError where the tensors' shapes contradict each other.

    Args:
        tensors: By name; q, k and v have four axes.
        metadata: What is said of them.
    """
    shaped = _Shaped(tensors, metadata)
    if all(name in tensors for name in PACKING):
        if shaped.batch != 1:
            raise InputError(
                f"packed sequences lie one after the other along T of a batch of 1, got q {list(tensors['q'].shape)}; "
                "leave cu_seqlens out where every sequence has its own place in the batch"
            )
        if odd := [n for n in ("own_dk", "own_dv") if n in tensors]:
            raise InputError(f"{odd[0]}: rows that several ranks share cannot be packed sequences")
    _check_inputs(shaped)
    require_sinks(tensors, metadata, shaped.q_heads)
    require_slopes(tensors, metadata, shaped.q_heads, shaped.batch)
    require_dropout(tensors, metadata, (shaped.batch, shaped.q_heads, shaped.q_length, shaped.k_length))
    require_mask_gradient(tensors)
    require_latent(tensors)
    _check_outputs(shaped)


def _check_inputs(c: _Shaped) -> None:
    _expect(c, "k", [c.batch, c.kv_heads, c.k_length, c.head_dim], "the B and D of q")
    _expect(c, "v", [c.batch, c.kv_heads, c.k_length, c.tensors["v"].shape[3]], "the B, H and T of k")
    if c.q_heads % c.kv_heads:
        raise InputError(f"q has {c.q_heads} heads and k has {c.kv_heads}: the first must be a multiple of the second")
    _expect(c, "do", [c.batch, c.q_heads, c.q_length, c.tensors["v"].shape[3]], "that of o")
    x = c.tensors.get("x")
    if x is not None and (len(x.shape) != 3 or tuple(x.shape[:2]) != (c.batch, c.q_length)):
        raise InputError(f"x must have shape [B, T, C] = [{c.batch}, {c.q_length}, C], got {list(x.shape)}")
    _check_w_q(c, None if x is None else x.shape[2])
    if (positions := c.tensors.get("q_positions")) is not None and tuple(positions.shape) != (c.q_length,):
        raise InputError(f"q_positions must have shape [{c.q_length}], one per query row, got {list(positions.shape)}")
    if (mask := c.tensors.get("mask")) is not None:
        full = (c.batch, c.q_heads, c.q_length, c.k_length)
        broadcasts = all(n in (1, m) for n, m in zip(mask.shape[::-1], full[::-1], strict=False))
        if not 2 <= len(mask.shape) <= 4 or not broadcasts:
            of_keys = "; of [B, Tk] give mask[:, None, None]" if tuple(mask.shape) == (c.batch, c.k_length) else ""
            raise InputError(f"mask must broadcast to [B, H, Tq, Tk] = {list(full)}, got {list(mask.shape)}{of_keys}")
    for name in ("q", "k", "v"):
        if (factor := c.tensors.get(f"{name}_descale")) is not None:
            heads = c.q_heads if name == "q" else c.kv_heads
            items = {c.batch}
            if PACKING[0] in c.tensors:
                items.add(c.tensors[PACKING[0]].shape[0] - 1)
            if tuple(factor.shape) not in ((), (1,), *((count, heads) for count in items)):
                raise InputError(
                    f"{name}_descale must be one number or [{max(items)}, {heads}], got {list(factor.shape)}"
                )


def _check_w_q(c: _Shaped, channels: int | None) -> None:
    w_q = c.tensors.get("w_q")
    if w_q is None:
        return
    if len(w_q.shape) != 2 or w_q.shape[0] % c.head_dim or (channels and w_q.shape[1] != channels):
        raise InputError(f"w_q must have shape [D * heads, C] with D = {c.head_dim}, got {list(w_q.shape)}")
    own, whole = c.q_heads * c.head_dim, (c.metadata.head_offset + c.q_heads) * c.head_dim
    if w_q.shape[0] != own and w_q.shape[0] < whole:
        raise InputError(
            f"w_q must have D * heads = {own} rows for this capture's {c.q_heads} heads, or those of the whole "
            f"model (at least {whole} with head_offset {c.metadata.head_offset}), got {w_q.shape[0]}; "
            "correct it or leave it out"
        )


def _check_outputs(c: _Shaped) -> None:
    dv = c.tensors["v"].shape[3]
    shapes = {
        "o": [c.batch, c.q_heads, c.q_length, dv],
        "dq": [c.batch, c.q_heads, c.q_length, c.head_dim],
        "dq_pre": [c.batch, c.q_heads, c.q_length, c.head_dim],
        "dk": [c.batch, c.kv_heads, c.k_length, c.head_dim],
        "dv": [c.batch, c.kv_heads, c.k_length, dv],
        "dkv": [c.batch, c.kv_heads, c.k_length, c.head_dim],
    }
    rows = [c.batch, c.q_heads, c.q_length]
    for name, tensor in c.tensors.items():
        output = name.rpartition(".")[2]
        if output in ("lse", "delta"):
            if list(tensor.shape) != rows:
                raise InputError(f"{name} must have shape [B, H, T] = {rows}, got {list(tensor.shape)}")
        elif output in shapes:
            _expect(c, name, shapes[output], "that of q, or of k for dk and dv")
    gradients = {name.rpartition(".")[2] for name in c.tensors} & {"dq", "dk", "dv", "dkv"}
    if gradients and "do" not in c.tensors:
        raise InputError("gradients (dq, dk, dv or dkv) are there but 'do' is missing: the reference backward needs dO")


def _expect(c: _Shaped, name: str, bhtd: list[int], why: str) -> None:
    if name not in c.tensors:
        return
    layout = c.metadata.layout
    expected = bhtd if layout == "BHTD" else [bhtd[0], bhtd[2], bhtd[1], bhtd[3]]
    if list(c.tensors[name].shape) != expected:
        raise InputError(
            f"{name} must have shape [{', '.join(layout)}] = {expected} ({why}), got {list(c.tensors[name].shape)}"
        )
