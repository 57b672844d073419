"""Attention with sinks as a well-rounded kernel computes it, and with a mistake in its sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from planted_calls import Inputs, gaussian
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.kernels import EmulatedHead, Recipe, emulate_head, preset
from attn_diag.reference import AttentionHead, Masking

Sinks = Tensor | None
Heads = Callable[[Tensor], Sinks]


@dataclass(frozen=True)
class Call(Inputs):
    """With what is planted."""

    sinks: Tensor
    """[Hq]."""


def drawn(seed: int = 0, *, spread: float = 1.0, **sizes: int) -> Call:
    """Gaussian inputs in BF16 and logits between -1 and 4; ``sizes`` as of ``gaussian``."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, do = gaussian(g, **sizes)
    return Call(spread * q, k, v, do, 5 * torch.rand(q.shape[1], generator=g) - 1)


def computed(call: Call, forward: Sinks, backward: Sinks, masking: Masking, **options: Any) -> dict[str, Tensor]:
    """What fa2's recipe returns with these sinks, dsinks included; ``backward``: those that P is made with again."""
    batch, heads, rows, d = call.q.shape
    group, found = heads // call.k.shape[1], dict[str, Tensor]()
    o, dq = torch.empty_like(call.q), torch.empty_like(call.q)
    lse, delta = torch.empty(batch, heads, rows), torch.empty(batch, heads, rows)
    dk, dv, dsinks = torch.zeros(call.k.shape), torch.zeros(call.v.shape), torch.zeros(heads)
    recipe = preset("fa2", "bf16", d)
    for b in range(batch):
        for h in range(heads):
            kv = h // group
            plain = AttentionHead(
                call.q[b, h].double(), call.k[b, kv].double(), call.v[b, kv].double(), call.do[b, h].double(),
                d**-0.5, masking, options.get("softcap"),
            )  # fmt: skip
            one = _with(plain, forward, h)
            out = emulate_head(recipe, one)
            assert out.delta is not None
            back = out if forward is backward else _backward(recipe, _with(plain, backward, h), out.delta)
            assert back.dq is not None
            assert back.dk is not None
            assert back.dv is not None
            o[b, h], lse[b, h], delta[b, h], dq[b, h] = out.o, out.lse, out.delta, back.dq
            dk[b, kv] += back.dk.float()
            dv[b, kv] += back.dv.float()
            if backward is not None:
                dsinks[h] -= float(((backward[h] - out.lse).exp() * out.delta).sum())
    found |= {"o": o, "lse": lse, "dq": dq, "dk": dk.bfloat16(), "dv": dv.bfloat16(), "dsinks": dsinks}
    return found


def _with(head: AttentionHead, sinks: Sinks, index: int) -> AttentionHead:
    return head if sinks is None else replace(head, sink=float(sinks[index]))


def _backward(recipe: Recipe, head: AttentionHead, delta: Tensor) -> EmulatedHead:
    """P made again with another sink, delta of the O that was returned."""
    own = emulate_head(recipe, head)
    return replace(own, **_written_out(head, delta.double(), own.lse.double()))


def _written_out(head: AttentionHead, delta: Tensor, lse: Tensor) -> dict[str, Tensor]:
    assert head.do is not None
    scores = head.q @ head.k.T * head.scale
    slope = torch.ones_like(scores)
    if head.softcap is not None:
        bounded = (scores / head.softcap).tanh()
        scores, slope = head.softcap * bounded, 1 - bounded.square()
    head.apply_mask(scores, slice(0, len(head.q)), slice(0, len(head.k)))
    probs = (scores - lse[:, None]).exp()
    dscores = (probs * (head.do @ head.v.T - delta[:, None]) * slope).bfloat16().double()
    return {
        "dq": (dscores @ head.k * head.scale).bfloat16(),
        "dk": (dscores.T @ head.q * head.scale).bfloat16(),
        "dv": (probs.bfloat16().double().T @ head.do).bfloat16(),
    }


def captured(
    call: Call, outputs: dict[str, Tensor], *, causal: str = "top-left", sinks: bool = True, **metadata: Any
) -> Capture:
    """A capture of the call."""
    tensors = {"q": call.q, "k": call.k, "v": call.v, "do": call.do, **outputs}
    if sinks:
        tensors["sinks"] = call.sinks
    else:
        tensors.pop("dsinks", None)
    return Capture.from_tensors(tensors, causal=causal, **metadata)
