"""Small language models of linear attention: two layers of one operator, whose kernels are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attn_diag.kernels.linear_chunked import run_linear
from attn_diag.kernels.linear_heads import LinearHeads
from attn_diag.kernels.linear_recipe import LinearRecipe

VOCABULARY, WIDTH, HEADS, DIM = 64, 64, 2, 32
OPERATORS = ("rwkv7", "gated_delta_rule", "kda", "gla", "mamba2")
Call = Callable[[dict[str, Tensor]], Tensor]
"""From an operator's arguments, [B, T, H, D], to o."""


class Mixer(nn.Module):
    """Projections, gates and one call of an operator."""

    def __init__(self, operator: str, call: Call) -> None:
        super().__init__()
        self.operator, self.call = operator, call
        channels = DIM if operator in ("rwkv7", "kda", "gla") else 1
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * DIM, bias=False)
        self.gate = nn.Linear(WIDTH, HEADS * channels)
        self.write = nn.Linear(WIDTH, HEADS * (DIM if operator == "rwkv7" else 1))
        self.log_a = nn.Parameter(torch.zeros(HEADS))
        self.out = nn.Linear(HEADS * DIM, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] as well."""
        h = self.norm(x)
        q, k, v = self.qkv(h).unflatten(2, (3, HEADS, DIM)).unbind(2)
        gate = self.gate(h).float().unflatten(2, (HEADS, -1))
        write = self.write(h).unflatten(2, (HEADS, -1)).sigmoid()
        if self.operator in ("rwkv7", "gated_delta_rule", "kda"):
            k = functional.normalize(k.float(), dim=3).to(k.dtype)
        found = {"q": q, "k": k, "v": v}
        if self.operator == "mamba2":
            found |= {"dt": functional.softplus(gate[..., 0] - 3), "A": -self.log_a.exp()}
        elif self.operator == "rwkv7":
            found |= {"g": -0.6065 * (gate - 3).sigmoid(), "a": -k, "b": k * write}
        elif self.operator == "gla":
            found["g"] = functional.logsigmoid(gate + 3)
        else:
            g = functional.logsigmoid(gate + 4)
            found |= {"beta": write[..., 0], "g": g if self.operator == "kda" else g[..., 0]}
        made: Tensor = self.out(self.call(found).to(h.dtype).flatten(2))
        return x + made


class LinearModel(nn.Module):
    """Predicts the next token."""

    def __init__(self, operator: str, calls: list[Call]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Mixer(operator, call) for call in calls])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False))

    def forward(self, ids: Tensor) -> Tensor:
        """The mean loss of ids [B, T]."""
        with torch.autocast("cpu", torch.bfloat16):
            x = self.embedding(ids[:, :-1])
            for layer in self.layers:
                x = layer(x)
            logits = self.head(x)
        return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def walks(batch: int, steps: int, seed: int) -> Tensor:
    """Ids [batch, steps + 1]: each token follows from the one before by 5 t + 3, but for one in ten at random."""
    make = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (batch, steps + 1), generator=make)
    stray = torch.rand(batch, steps + 1, generator=make) < 0.1
    for t in range(1, steps + 1):
        ids[:, t] = torch.where(stray[:, t], ids[:, t], (5 * ids[:, t - 1] + 3) % VOCABULARY)
    return ids


def chunked(
    operator: str, x: dict[str, Tensor], recipe: LinearRecipe, *, drop: bool = False, coarse: bool = False
) -> Tensor:
    """o of an emulated chunked kernel.

    Args:
        operator: Whose arguments x are.
        x: [B, T, H, D].
        recipe: What is rounded.
        drop: Without the decay's gradient.
        coarse: With each step's decay in BF16.
    """
    outs = []
    for b in range(len(x["q"])):
        one = {name: (t if name == "A" else t[b].transpose(0, 1)).float() for name, t in x.items()}
        q, v, g = one["q"], one["v"], one.get("g")
        if operator == "mamba2":
            dt = one["dt"][..., None]
            v, g = v * dt, dt * one["A"][:, None, None]
        assert g is not None
        g = g if g.ndim == 3 else g[..., None]
        g = g.detach() if drop else g
        g = g + (g.detach().exp().bfloat16().float().log() - g.detach()) if coarse else g
        beta = one["beta"][..., None] if "beta" in one else None
        scale = 1.0 if operator in ("rwkv7", "mamba2") else q.shape[2] ** -0.5
        initial = q.new_zeros(len(v), q.shape[2], v.shape[2])
        heads = LinearHeads(q, one["k"], v, g, beta, one.get("a"), one.get("b"), initial, scale)
        with torch.autocast("cpu", enabled=False):  # as a kernel's, its products are its own
            outs.append(run_linear(heads, recipe)[0].transpose(0, 1))
    return torch.stack(outs).to(x["v"].dtype)


def train(model: LinearModel, steps: int, *, batch: int = 2, length: int = 96, at: Callable[[int], Any] = id) -> float:
    """Train it; ``at`` is called before each step.

    Returns:
        The last loss.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for step in range(steps):
        at(step)
        optimizer.zero_grad()
        loss = model(walks(batch, length, step))
        loss.backward()
        optimizer.step()
    return float(loss.detach())
