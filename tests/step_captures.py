"""Captures of several steps with planted errors: what the tests of ``attn_diag.paper_figures`` draw figures of."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import attn_diag
from attn_diag import Capture

T, D, C = 40, 16, 24
SCALE = D**-0.5


@dataclass(frozen=True)
class Plant:
    """``bias``: the mean of delta's error, in units of its noise. ``alike``: rows of P K and x share one direction.

    ``batch``, ``heads``: sizes; ``ties``: so many pairs of equal keys, which tie wherever they are the maximum.
    """

    bias: float = 0.0
    alike: bool = True
    batch: int = 1
    heads: int = 1
    ties: int = 0
    step_seed: int = 0


def planted(step: int | None, plant: Plant, **metadata: Any) -> Capture:
    """A capture whose O is the float64 reference plus an error along dO, so that delta's error is what was drawn.

    Inputs are BF16 and O float64. Without ``alike`` every row sees its own key alone: P K = K has random directions.
    """
    generator = torch.Generator().manual_seed(1000 * plant.step_seed + (step or 0))
    fixed = torch.Generator().manual_seed(7)
    b, h = plant.batch, plant.heads

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, w_q = draw(b, T, C), torch.randn(h * D, C, generator=fixed)
    k = draw(b, h, T, D)
    if plant.alike:
        x = 0.1 * x + torch.randn(C, generator=fixed)
        k = 0.1 * k + torch.randn(D, generator=fixed)
    if plant.ties:
        k[:, :, 1 : 2 * plant.ties : 2] = k[:, :, 0 : 2 * plant.ties : 2]
    x, w_q = x.bfloat16(), w_q.bfloat16()
    q = (x.float() @ w_q.float().T).bfloat16().view(b, T, h, D).transpose(1, 2).contiguous()
    k, v, do = k.bfloat16(), draw(b, h, T, D).bfloat16(), draw(b, h, T, D).bfloat16()
    window = None if plant.alike else (0, 0)
    error = 1e-4 * (plant.bias + draw(b, h, T).double())
    o = true_probs(q, k, window) @ v.double()
    o = o + error[..., None] * do.double() / do.double().square().sum(-1, keepdim=True)
    tensors = {"q": q, "k": k, "v": v, "do": do, "o": o, "x": x, "w_q": w_q}
    return Capture.from_tensors(tensors, causal="top-left", scale=SCALE, window=window, step=step, **metadata)


def series(steps: int, plant: Plant = Plant(), **metadata: Any) -> list[Capture]:
    """Steps 10, 11, …; each a batch of its own."""
    return [
        planted(10 + i, replace(plant, step_seed=plant.step_seed * steps + i + 1), **metadata) for i in range(steps)
    ]


def true_probs(q: Tensor, k: Tensor, window: tuple[int, int] | None = None) -> Tensor:
    """P of causal attention in float64, written down directly; [B, H, T, T]."""
    scores = SCALE * (q.double() @ k.double().mT)
    row, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    hidden = key > row if window is None else (key > row) | (key < row - window[0])
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)


def true_delta_error(c: Capture) -> Tensor:
    """[B, H, T] in float64, written down directly."""
    q, k, v, do, o = (c.tensors[name][...].double() for name in ("q", "k", "v", "do", "o"))
    return (do * (o - true_probs(q, k, c.metadata.window) @ v)).sum(-1)


def trained(folder: Any, steps: int = 4) -> list[Tensor]:
    """Captures of a tiny model in training, BF16 autocast, a batch of its own at every step; W_Q of layer 0 at each."""
    from tiny_models import WIDTH, nano_gpt, next_token_loss, tokens

    tiny = nano_gpt()
    optimizer = torch.optim.AdamW(tiny.model.parameters(), lr=1e-2)
    weights = []
    with attn_diag.capture(tiny.model, folder, batch=None):
        for step in range(steps):
            optimizer.zero_grad()
            weight: Tensor = tiny.model.h[0].attn.c_attn.weight  # type: ignore[index, union-attr]
            weights.append(weight[:WIDTH].detach().clone())
            with torch.autocast("cpu", torch.bfloat16):
                loss = next_token_loss(tiny.model, tokens(step))
            torch.autograd.backward(loss)
            optimizer.step()
    return weights
