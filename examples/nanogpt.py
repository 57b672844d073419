"""attn-diag in nanoGPT's train.py: the lines between the markers, and where they go. The rest is a stand-in.

Written against nanoGPT at 3adf61e (12 November 2025): the names are its train.py's, the loop is one of its kind,
with accumulated micro-batches, evaluation in between, clipping and a loss scaler, small enough for a CPU:

    python examples/nanogpt.py

In train.py itself run with ``--compile=False``, or see docs/watching.md for what is seen of a compiled model.
With DDP all processes make the monitor, and get the same figures; the one that is master logs them.
"""

import torch
from torch import nn
from torch.nn import functional

# attn-diag: 1, at the top
import attn_diag

# end

max_iters, eval_interval, log_interval, gradient_accumulation_steps = 6, 3, 1, 2
batch_size, block_size, n_layer, n_head, n_embd = 2, 16, 2, 2, 32
wandb_log, master_process, ddp, iter_num = False, True, False, 0


class Attention(nn.Module):
    """Causal, as nanoGPT's with flash."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, C]."""
        heads = (part.unflatten(2, (n_head, -1)).transpose(1, 2) for part in self.c_attn(x).split(n_embd, dim=2))
        y: torch.Tensor = self.c_proj(
            functional.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)
        )
        return y


class GPT(nn.Module):
    """Returns the logits and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.lm_head = nn.Embedding(65, n_embd), nn.Linear(n_embd, 65)
        self.h = nn.ModuleList(Attention() for _ in range(n_layer))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, T] each."""
        hidden = self.wte(x)
        for block in self.h:
            hidden = hidden + block(hidden)
        logits = self.lm_head(hidden)
        return logits, functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def get_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that follow each other."""
    x = (torch.randint(65, (batch_size, 1)) + torch.arange(block_size + 1)) % 65
    return x[:, :-1], x[:, 1:]


torch.manual_seed(1337)
model = GPT()
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
raw_model = model
X, Y = get_batch()

# attn-diag: 2, before the training loop, behind "raw_model = …"
monitor, checked = attn_diag.Monitor(raw_model, every=2, first_step=iter_num), None  # every=50 in earnest
# end

while True:
    if iter_num % eval_interval == 0 and master_process:
        with torch.no_grad():
            model.eval()
            print(f"step {iter_num}: val loss {model(*get_batch())[1]:.4f}")
            model.train()
    for _ in range(gradient_accumulation_steps):
        logits, loss = model(X, Y)
        X, Y = get_batch()
        scaler.scale(loss / gradient_accumulation_steps).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    # attn-diag: 3, behind "optimizer.zero_grad(…)"
    # On a GPU a check is there some steps later; nothing waits for it.
    if master_process and monitor.history and monitor.history[-1].step != checked:
        checked = monitor.history[-1].step
        print(monitor.table())
        if wandb_log:
            import wandb

            wandb.log({"iter": iter_num, **monitor.metrics()})
            if monitor.metrics()["attn/alarm"] and wandb.run is not None:
                wandb.run.alert(title="attention alarm", text=monitor.table(), level="WARN")
    # end

    if iter_num % log_interval == 0 and master_process:
        print(f"iter {iter_num}: loss {loss.item():.4f}")
    iter_num += 1
    if iter_num > max_iters:
        break
