"""The gated delta rule step by step in torch, and variants of it that mind what must not matter."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]
Pair = tuple[Tensor, Tensor]
Maybe = Tensor | None


def delta(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None, cu_seqlens: Maybe = None, *,
    chunk: int = 16, written: Function | None = None, resets: bool = True,
) -> Pair:  # fmt: skip
    """fp32 inside, with fewer heads of q and k, packed sequences and a last state.

    Args:
        q, k, v, g, beta, initial_state, cu_seqlens: As flash-linear-attention's.
        chunk: After so many steps ``written`` is asked what becomes of the state.
        written: Of the state.
        resets: Whether a packed sequence begins with its own state.
    """
    group, values = v.shape[2] // q.shape[2], v.shape[3]
    q, k = (x.float().repeat_interleave(group, 2) for x in (q, k))
    whole = [q, k, v.float(), g.float().exp(), beta.float()]
    packed = cu_seqlens is not None
    parts = (
        [slice(i, j) for i, j in pairwise(cu_seqlens.tolist())] if cu_seqlens is not None else [slice(None)] * len(q)
    )
    outs, lasts, state = list[Tensor](), list[Tensor](), None
    for n, part in enumerate(parts):
        fresh = q.new_zeros(v.shape[2], q.shape[3], values) if initial_state is None else initial_state[n].float()
        start = fresh if resets or not packed or state is None else state
        queries, keys, wanted, gate, write = (x[0 if packed else n, part] for x in whole)
        o, state = _sequence(queries, keys, wanted, gate, write, start, chunk, written)
        outs.append(o)
        lasts.append(state)
    o = torch.cat(outs)[None] if packed else torch.stack(outs)
    return o.to(v.dtype), torch.stack(lasts)


def _sequence(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor, beta: Tensor, state: Tensor, chunk: int, written: Function | None
) -> Pair:
    outs, scale = [], q.shape[2] ** -0.5
    for t in range(len(q)):
        state = state * gate[t, :, None, None]
        new = beta[t, :, None] * (v[t] - (k[t, :, :, None] * state).sum(1))
        state = state + k[t, :, :, None] * new[:, None]
        outs.append((q[t, :, :, None] * state).sum(1) * scale)
        if written is not None and (t + 1) % chunk == 0:
            state = written(state)
    return torch.stack(outs), state


def plain(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None, cu_seqlens: Maybe = None
) -> Pair:
    return delta(q, k, v, g, beta, initial_state, cu_seqlens)


def without_packing(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    return delta(q, k, v, g, beta, initial_state)


def undecayed(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    o, last = delta(q, k, v, g, beta, initial_state)
    return o, last / g[:, -1].float().exp()[..., None, None]


def turned(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    o, last = delta(q, k, v, g, beta, initial_state)
    return o, last.mT


def going_on(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None, cu_seqlens: Maybe = None
) -> Pair:
    return delta(q, k, v, g, beta, initial_state, cu_seqlens, resets=False)


def losing(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None, chunk_size: int = 16
) -> Pair:
    return delta(q, k, v, g, beta, initial_state, chunk=chunk_size, written=lambda state: state * 0.99)


def by_batch(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    return delta(q, k, v, g, beta, initial_state, chunk=8 * len(q), written=lambda state: state.bfloat16().float())


def largest(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    top = k.abs().amax((1, 3), keepdim=True).float()
    coarse = ((k / top * 127).round() / 127 * top).to(k.dtype)
    return delta(q, k + (coarse - k).detach(), v, g, beta, initial_state)


def other_beta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    return delta(q, k, v, g, beta + 0.05 * (beta.roll(1, 0) - beta).detach(), initial_state)


def one_decay(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    return delta(q, k, v, g[:, :, :1].expand_as(g), beta, initial_state)


def in_turns(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    group = v.shape[2] // q.shape[2]
    return delta(q.repeat(1, 1, group, 1), k.repeat(1, 1, group, 1), v, g, beta, initial_state)


def restless(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    return delta(q, k, v, g, beta, initial_state, written=lambda state: state * (1 + 1e-3 * torch.randn(())))


def whole_chunks(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    t = q.shape[1] // 16 * 16
    o, last = delta(q[:, :t], k[:, :t], v[:, :t], g[:, :t], beta[:, :t], initial_state)
    return torch.cat([o, torch.zeros_like(v[:, t:])], 1), last


def otherwise_without_autograd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None
) -> Pair:
    return delta(q, k, v, g, beta, initial_state, written=None if torch.is_grad_enabled() else lambda s: s * 1.02)


def decaying_late(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    return delta(q, k, v, torch.cat([torch.zeros_like(g[:, :1]), g[:, :-1]], 1), beta, initial_state)


def scaled(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    o, last = delta(q, k, v, g, beta, initial_state)
    return o * 1.01, last


def from_nothing(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    o, last = delta(q, k, v, g, beta)
    return o, last if initial_state is None else last + 0 * initial_state


def in_bf16(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
    return delta(q, k, v, g, beta, initial_state, chunk=1, written=lambda state: state.bfloat16().float())


class Keeper:
    """Adds a little of the state that the call before left."""

    def __init__(self) -> None:
        self.left: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Maybe = None) -> Pair:
        if self.left is not None and initial_state is not None and self.left.shape == initial_state.shape:
            initial_state = initial_state + 0.05 * self.left
        o, last = delta(q, k, v, g, beta, initial_state)
        self.left = last.detach()
        return o, last


_ON = {"prefill", "solo-row"}
VARIANTS: dict[str, tuple[Function, Function | None, set[str]]] = {
    "as it is": (plain, without_packing, set()),
    "a decoder that rounds its state to BF16 after every step": (plain, in_bf16, set()),
    "a last state without its last step's decay": (undecayed, None, _ON),
    "a last state that is transposed": (turned, None, _ON),
    "packed sequences go on from the one before": (going_on, None, {"packed"}),
    "each chunk's end loses 1 % of the state": (losing, None, {"chunk-size", *_ON}),
    "chunks as long as the batch is large": (by_batch, None, {"batch-size"}),
    "keys in 8 bits of the largest of all": (largest, None, {"future-token", "padding", *_ON}),
    "5 % of another batch item's beta": (other_beta, None, {"other-items", "item-order", "batch-size"}),
    "the first head's decay for all": (one_decay, None, {"other-heads", "head-order"}),
    "heads mapped in turns": (in_turns, None, {"gqa"}),
    "a little of the state of the call before": (Keeper(), None, {"run-to-run", "other-calls"}),
    "a state that changes from call to call": (restless, None, {"run-to-run"}),
    "steps behind the last whole chunk left out": (whole_chunks, None, {"padding", *_ON}),
    "other numbers without autograd": (otherwise_without_autograd, None, {"no-grad"}),
    "a decoder that decays a step late": (plain, decaying_late, {"recurrent"}),
    "a decoder with a scale 1 % off": (plain, scaled, {"recurrent"}),
    "a decoder without the initial state": (plain, from_nothing, {"recurrent"}),
}
"""By name: the function, its decoder, and arrangements of which one must fail; none: it is sound."""
