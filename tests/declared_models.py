"""A plain torch kernel below 16 bits with a backward of its own, and a small language model whose layers call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from linear_models import VOCABULARY, walks
from study_declared import HEADS, Plan, run
from torch import Tensor, nn
from torch.nn import functional

import attn_diag

DIM = 32


def kernel(plan: Plan) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """It shares no code with the recipes."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            ctx.save_for_backward(q, k, v)
            found = run(plan, q, k, v, torch.zeros_like(v))
            return found["o"], found["lse"]

        @staticmethod
        def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            q, k, v = ctx.saved_tensors
            found = run(plan, q, k, v, do)
            return found["dq"], found["dk"], found["dv"]

    return lambda q, k, v: Attention.apply(q, k, v)  # type: ignore[no-untyped-call]


class Layer(nn.Module):
    """Attention by the kernel of ``plan``, which may be changed as it trains."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan, width = plan, HEADS * DIM
        self.norm = nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

        @attn_diag.observe(causal=True)
        def attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            return kernel(self.plan)(q, k, v)

        self.attention = attention

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] as well."""
        q, k, v = (t.transpose(1, 2) for t in self.qkv(self.norm(x)).unflatten(2, (3, HEADS, DIM)).unbind(2))
        made: Tensor = self.out(self.attention(q.bfloat16(), k.bfloat16(), v.bfloat16())[0].transpose(1, 2).flatten(2))
        return x + made


class DeclaredModel(nn.Module):
    """Predicts the next token."""

    def __init__(self, plan: Plan, layers: int = 2) -> None:
        super().__init__()
        width = HEADS * DIM
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList([Layer(plan) for _ in range(layers)])
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False))

    def change(self, layer: int, plan: Plan) -> None:
        """Have a layer's kernel be another one from now on."""
        changed = self.layers[layer]
        assert isinstance(changed, Layer)
        changed.plan = plan

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of ids [B, T]."""
        with torch.autocast("cpu", torch.bfloat16):
            x = self.embedding(ids[:, :-1])
            for layer in self.layers:
                x = layer(x)
            logits = self.head(x)
        return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def train(model: DeclaredModel, steps: int, length: int = 192, at: Callable[[int], Any] = id) -> float:
    """Train it on two sequences a step, and return the last loss; ``at`` is called before each step."""
    optimizer, loss = torch.optim.AdamW(model.parameters(), lr=3e-3), torch.zeros(())
    for step in range(steps):
        at(step)
        loss = model(walks(2, length, step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())
