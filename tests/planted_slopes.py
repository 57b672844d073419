"""Attention with ALiBi as a well-rounded kernel computes it, and with a mistake in its slopes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from planted_calls import Inputs, gaussian
from planted_sinks import _written_out
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import Alibi, AttentionHead, Masking
from attn_diag.reference.masking import AlibiOrigin

Slopes = Tensor | None
Change = Callable[[Tensor], Slopes]


@dataclass(frozen=True)
class Call(Inputs):
    """With what is planted."""

    slopes: Tensor
    """[B, Hq]."""


def drawn(seed: int = 0, **sizes: int) -> Call:
    """Gaussian inputs in BF16, and the usual slopes of as many heads; ``sizes`` as of ``gaussian``."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, do = gaussian(g, **sizes)
    batch, heads = q.shape[:2]
    return Call(q, k, v, do, (2.0 ** (-8 * (torch.arange(heads) + 1) / heads)).expand(batch, -1))


def computed(
    call: Call,
    forward: Slopes,
    backward: Slopes,
    masking: Masking,
    *,
    origin: AlibiOrigin = "row",
    recipe: str = "fa2",
) -> dict[str, Tensor]:
    """What a recipe returns with these slopes; ``backward``: those with which P is made again from the forward's L."""
    batch, heads, _, d = call.q.shape
    group = heads // call.k.shape[1]
    o, dq = torch.empty_like(call.q), torch.empty_like(call.q)
    lse = torch.empty(call.q.shape[:3])
    dk, dv = torch.zeros(call.k.shape), torch.zeros(call.v.shape)
    made = preset(recipe, "bf16", d)
    for b in range(batch):
        for h in range(heads):
            kv = h // group
            plain = AttentionHead(
                call.q[b, h].double(), call.k[b, kv].double(), call.v[b, kv].double(), call.do[b, h].double(),
                d**-0.5, masking,
            )  # fmt: skip
            one = _with(plain, forward, b, h, origin)
            out = emulate_head(made, one)
            back: dict[str, Any] = {n: getattr(out, n) for n in ("dq", "dk", "dv")}
            if forward is not backward:
                assert out.delta is not None
                back = _written_out(_with(plain, backward, b, h, origin), out.delta.double(), out.lse.double())
            o[b, h], lse[b, h], dq[b, h] = out.o, out.lse, back["dq"]
            dk[b, kv] += back["dk"].float()
            dv[b, kv] += back["dv"].float()
    return {"o": o, "lse": lse, "dq": dq, "dk": dk.bfloat16(), "dv": dv.bfloat16()}


def _with(head: AttentionHead, slopes: Slopes, batch: int, index: int, origin: AlibiOrigin) -> AttentionHead:
    if slopes is None or not float(slopes[batch, index]):
        return head
    return replace(head, masking=replace(head.masking, alibi=Alibi(float(slopes[batch, index]), origin)))


def captured(call: Call, outputs: dict[str, Tensor], *, slopes: bool = True, **metadata: Any) -> Capture:
    """A capture of the call, its slopes [Hq] where all sequences have the same ones."""
    tensors = {"q": call.q, "k": call.k, "v": call.v, "do": call.do, **outputs}
    if slopes:
        same = bool((call.slopes == call.slopes[0]).all())
        tensors["alibi_slopes"] = call.slopes[0].clone() if same else call.slopes.contiguous()
    return Capture.from_tensors(tensors, **metadata)
