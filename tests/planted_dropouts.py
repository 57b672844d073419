"""Attention with dropout as a well-rounded kernel computes it, and with a mistake in its dropout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from planted_calls import Inputs, gaussian
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Dropout, Masking

Change = Callable[[Dropout], Dropout | None]


@dataclass(frozen=True)
class Call(Inputs):
    """With what is planted."""

    kept: Tensor
    """bool [B, Hq, Tq, Tk]."""
    p: float


def drawn(seed: int = 0, *, p: float = 0.1, **sizes: int) -> Call:
    """Gaussian inputs in BF16; ``sizes`` as of ``gaussian``."""
    g = torch.Generator().manual_seed(seed)
    q, k, v, do = gaussian(g, **sizes)
    return Call(q, k, v, do, torch.rand(*q.shape[:3], k.shape[2], generator=g) >= p, p)


def computed(
    call: Call,
    masking: Masking,
    forward: Change = lambda d: d,
    backward: Change | None = None,
    *,
    off: int = 0,
    recipe: str = "fa2",
    parts: tuple[str, ...] = ("dq", "dk", "dv"),
) -> dict[str, Tensor]:
    """What a recipe returns with these dropouts.

    Args:
        call: The inputs.
        masking: Which keys are seen.
        forward: What the kernel makes of a head's dropout.
        backward: Likewise in the backward, which is fed with the forward's O and LSE; None: as the forward.
        off: Whose dropout each head has: that of so many heads before it.
        recipe: Its name.
        parts: The gradients that have ``backward``; others are the forward's.
    """
    batch, heads, _, d = call.q.shape
    group = heads // call.k.shape[1]
    o, dq = torch.empty_like(call.q), torch.empty_like(call.q)
    lse = torch.empty(call.q.shape[:3])
    dk, dv = torch.zeros(call.k.shape), torch.zeros(call.v.shape)
    made = preset(recipe, "bf16", d)
    for b in range(batch):
        for h in range(heads):
            kv = h // group
            dropout = Dropout(call.kept[b, h], call.p)
            other = Dropout(call.kept[b, (h - off) % heads], call.p)
            one = AttentionHead(
                call.q[b, h].double(), call.k[b, kv].double(), call.v[b, kv].double(), call.do[b, h].double(),
                d**-0.5, masking, dropout=forward(other if backward is None else dropout),
            )  # fmt: skip
            out = emulate_head(made, one)
            back: dict[str, Any] = {n: getattr(out, n) for n in ("dq", "dk", "dv")}
            if backward is not None:
                assert out.delta is not None
                again = _written_out(replace(one, dropout=backward(other)), out.delta.double(), out.lse.double())
                back |= {n: again[n] for n in parts}
            o[b, h], lse[b, h], dq[b, h] = out.o, out.lse, back["dq"]
            dk[b, kv] += back["dk"].float()
            dv[b, kv] += back["dv"].float()
    return {"o": o, "lse": lse, "dq": dq, "dk": dk.bfloat16(), "dv": dv.bfloat16()}


def memory_efficient(call: Call, *, causal: bool) -> dict[str, Tensor]:
    """As torch's memory-efficient kernel, as many query as key heads: P times a BF16 1 / (1 - p), in 64-key tiles.

    Source: ``mem_eff_attention/kernel_forward.h`` and ``kernel_backward.h`` of torch; sums are float64 here.
    """

    def cast(x: Tensor) -> Tensor:
        return x.bfloat16().double()

    q, k, v, do = (x.double() for x in (call.q, call.k, call.v, call.do))
    factor, scale = float(cast(torch.tensor(1 / (1 - call.p)))), q.shape[3] ** -0.5
    scores = q @ k.mT * scale
    if causal:
        hidden = torch.ones(scores.shape[2:], dtype=torch.bool).triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    row_max = torch.full_like(scores[..., :1], -torch.inf)
    out = torch.zeros_like(q)
    for tile in torch.split(torch.arange(k.shape[2]), 64):
        seen = scores[..., tile]
        top = torch.maximum(row_max, seen.amax(-1, keepdim=True))
        probs = cast(cast((seen - top).exp()) * factor) * call.kept[..., tile]
        out, row_max = out * (row_max - top).exp() + probs @ v[:, :, tile], top
    lse = scores.logsumexp(-1, keepdim=True)
    o = cast(out * (row_max - lse).exp())
    probs = cast((scores - lse).exp())
    dprobs = (do @ v.mT) * (call.kept * factor)
    dscores = cast(probs * (dprobs - (o * do).sum(-1, keepdim=True)) * scale)
    found = {"o": o, "dq": dscores @ k, "dk": dscores.mT @ q, "dv": cast(probs * (call.kept * factor)).mT @ do}
    return {name: t.bfloat16() for name, t in found.items()} | {"lse": lse.squeeze(-1).float()}


def _written_out(head: AttentionHead, delta: Tensor, lse: Tensor) -> dict[str, Tensor]:
    assert head.do is not None
    every = slice(0, len(head.q)), slice(0, len(head.k))
    scores = head.q @ head.k.T * head.scale
    head.apply_mask(scores, *every)
    probs = (scores - lse[:, None]).exp()
    dprobs = head.drop(head.do @ head.v.T, *every)
    dscores = (probs * (dprobs - delta[:, None])).bfloat16().double()
    return {
        "dq": (dscores @ head.k * head.scale).bfloat16(),
        "dk": (dscores.T @ head.q * head.scale).bfloat16(),
        "dv": (head.drop(probs.bfloat16().double(), *every).T @ head.do).bfloat16(),
    }


def with_lost_keys(call: Call, part: slice, *, pv: float = 0.0, row_sum: float = 0.0) -> Tensor:
    """O in fp32, rounded once, of a kernel that counts a part of the keys otherwise than once in P V or in l.

    Args:
        call: The inputs.
        part: The keys.
        pv: How often it counts them in P V.
        row_sum: Likewise in l.
    """
    group = call.q.shape[1] // call.k.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (call.k, call.v))
    scores = call.q.float() @ k.mT * call.q.shape[3] ** -0.5
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    in_pv, in_sum = (torch.ones(k.shape[2]) for _ in range(2))
    in_pv[part], in_sum[part] = pv, row_sum
    row_sum_of = (probs * in_sum).sum(-1, keepdim=True)
    o: Tensor = ((probs * call.kept * in_pv / (1 - call.p)) @ v / row_sum_of).bfloat16()
    return o


def captured(call: Call, outputs: dict[str, Tensor], **metadata: Any) -> Capture:
    """A capture of the call."""
    tensors = {"q": call.q, "k": call.k, "v": call.v, "do": call.do, "dropout_mask": call.kept, **outputs}
    return Capture.from_tensors(tensors, dropout_p=call.p, **metadata)
