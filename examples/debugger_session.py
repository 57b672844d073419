"""A training run whose attention is coarse: the debugger opens behind the first such call.

    python examples/debugger_session.py

At the prompt ``x`` and ``model`` are yours; ``attn_diag.last_finding()`` says what was found, ``c`` goes on,
``q`` ends the run.
"""

import torch
from torch import nn

import attn_diag


@attn_diag.observe(causal=True)
def my_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """[B, H, T, D], causal, with BF16 scores."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).float()
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype) @ v


class Attention(nn.Module):
    """Four causal heads of 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, 64] to [B, T, 64]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        o = my_attention(q, k, v)
        return x + self.out(o.transpose(1, 2).flatten(2))


torch.manual_seed(0)
model = nn.Sequential(Attention(), Attention()).bfloat16()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
with attn_diag.break_if(nonfinite=True, wrong=True, lossy=True, model=model):
    for _ in range(3):
        x = 3 * torch.randn(1, 512, 64).bfloat16()
        (model(x) - x.roll(1, 1)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
print("trained")
