"""A Lightning Trainer, watched: one callback. A tiny model on random numbers, so that it runs on a CPU in seconds.

    python examples/lightning_module.py

The callback checks every 2nd step here (50 in a real run) and logs ``attn/…`` to whatever the trainer logs to. With
``capture=`` the calls of the chosen steps are kept as files, for ``attn-diag inspect``.
"""

import logging
import tempfile
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.nn import functional

import attn_diag


class Attention(nn.Module):
    """Four causal heads of 16 features."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, 64] to [B, T, 64]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(o.transpose(1, 2).flatten(2))


class Model(lightning.LightningModule):
    """Learns the number before."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Attention(), Attention())

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        """The loss of one batch [B, T, 64]."""
        return functional.mse_loss(self.blocks(batch), batch.roll(1, 1))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.manual_seed(0)
data = torch.utils.data.DataLoader(list(torch.randn(16, 128, 64)), batch_size=2)
with tempfile.TemporaryDirectory() as folder:
    watch = attn_diag.lightning_monitor(every=2, capture=f"{folder}/captures")
    trainer = lightning.Trainer(
        max_steps=6, precision="bf16-mixed", accelerator="cpu", callbacks=[watch], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(Model(), data)
    print(watch.monitor.table())
    print(f"{len(watch.monitor.alarms)} alarms, {len(list(Path(folder, 'captures').glob('*.safetensors')))} captures")
