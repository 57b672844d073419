"""Kernels of linear attention to be judged: recurrent or chunked in torch, whole or with a planted defect.

They share nothing with the emulation under test but the operators' definitions; gradients are autograd's. The recurrent
one computes in float64 and returns the inputs' format; a defect is planted in it by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

DEFECTS = (
    "state_bf16", "decay_bf16", "boundary", "no_inter_chunk", "no_initial_state", "no_decay_gradient",
)  # fmt: skip


def bf16(x: Tensor) -> Tensor:
    """Rounded to BF16, gradients as they are."""
    return x + (x.detach().to(torch.bfloat16).double() - x.detach())


def recurrent(
    tensors: Mapping[str, Tensor], *, scale: float, defect: str | None = None, chunk: int = 32
) -> tuple[Tensor, Tensor]:
    """o [B, T, H, V] and the last state, float64, of kda, gated_delta_rule, gla, simple_gla or rwkv7.

    Args:
        tensors: The operator's arguments, [B, T, H, D].
        scale: Of o.
        defect: One of ``DEFECTS``.
        chunk: Of the defects that are about chunks.
    """
    x = {name: t.double() for name, t in tensors.items()}
    q, k, v = x["q"], x["k"], x["v"]
    steps = q.shape[1]
    g = x["g"] if x["g"].ndim == 4 else x["g"][..., None]
    if defect == "no_decay_gradient":
        g = g.detach()
    state = q.new_zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    if "initial_state" in x and defect != "no_initial_state":
        state = state + x["initial_state"]
    outs, own, last_write = [], torch.zeros_like(state), torch.zeros_like(state)
    for t in range(steps):
        if t % chunk == 0:
            if defect == "boundary":
                state = state - last_write
            own = torch.zeros_like(state)
        w = g[:, t].exp()
        if defect == "decay_bf16":
            w = bf16(w)
        decayed = state * w[..., None]
        key = k[:, t]
        if "beta" in x:
            new = x["beta"][:, t, :, None] * (v[:, t] - (key[..., None] * decayed).sum(2))
            write = key[..., None] * new[:, :, None]
        else:
            write = key[..., None] * v[:, t, :, None]
            if "a" in x:
                low = (x["a"][:, t, :, :, None] * state).sum(2)
                write = write + x["b"][:, t, :, :, None] * low[:, :, None]
        last_write, state = write, decayed + write
        own = own * w[..., None] + write
        if defect == "state_bf16":
            state = bf16(state)
        seen = own if defect == "no_inter_chunk" else state
        outs.append((q[:, t, :, :, None] * seen).sum(2) * scale)
    return torch.stack(outs, 1), state


def observed(
    tensors: Mapping[str, Tensor], do: Tensor, *, scale: float, defect: str | None = None, chunk: int = 32
) -> dict[str, Tensor]:
    """What such a kernel returns in its inputs' formats: o, final_state and every gradient."""
    leaves = {name: t.detach().clone().requires_grad_() for name, t in tensors.items()}
    o, state = recurrent(leaves, scale=scale, defect=defect, chunk=chunk)
    found = torch.autograd.grad(
        (o * do.double()).sum(), list(leaves.values()), allow_unused=True, materialize_grads=True
    )
    gradients = {f"d{name}": g for name, g in zip(leaves, found, strict=True)}
    return {"o": o.detach().to(tensors["v"].dtype), "final_state": state.detach().float(), **gradients}


def one_configuration(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have Triton's kernels run in one configuration, without timing any.

    It is the one nearest to four warps with the fewest stages, so that other processes find it in Triton's cache.

    Args:
        patch: Sets an attribute.
    """
    tuner: Any = import_module("triton.runtime.autotuner").Autotuner

    def rank(self: Any, *args: Any, config: Any, **meta: Any) -> list[float]:
        del self, args, meta
        return [abs(config.num_warps - 4) * 100.0 + config.num_stages] * 3

    patch(tuner, "_bench", rank)
