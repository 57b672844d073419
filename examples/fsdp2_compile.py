"""FSDP2 with torch.compile, captured and inspected. On CPUs here; on GPUs it is the same with NCCL.

    torchrun --nproc-per-node 2 examples/fsdp2_compile.py

Each rank writes its own files; ``inspect`` merges those of one step and layer. The blocks are compiled with the backend
"aot_eager", which needs no compiler; leave ``backend=`` out for inductor.
"""

import shutil
import tempfile
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
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


def main() -> None:
    """Two steps on every rank, and the report on the first."""
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).bfloat16()
    for block in model:
        block.compile(backend="aot_eager", fullgraph=True)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    folder = Path(tempfile.gettempdir()) / "attn-diag-fsdp2"
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
    distributed.barrier()
    own = torch.Generator().manual_seed(rank)  # every rank has its own data
    with attn_diag.capture(model, folder, steps={1}):
        for _ in range(2):
            x = torch.randn(2, 128, 64, generator=own).bfloat16()
            functional.mse_loss(model(x).float(), x.roll(1, 1).float()).backward()
            optimizer.step()
            optimizer.zero_grad()
    distributed.barrier()
    if rank == 0:
        files = sorted(folder.glob("*.safetensors"))
        found = attn_diag.inspect_captures([attn_diag.load(file) for file in files])
        print(f"{len(files)} files of {ranks} ranks")
        for capture in found.captures:
            print(f"layer {capture.metadata['layer']}: {capture.shape['B']} sequences of {capture.shape['Tq']} rows")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
