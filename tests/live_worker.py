"""One rank of a run that test_live_distributed starts: python live_worker.py FOLDER."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
from tiny_models import nano_gpt, next_token_loss, tokens
from torch import distributed, nn

import attn_diag


def wrapped(how: str, model: nn.Module) -> nn.Module:
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for block in model.get_submodule("h").children():
        if how == "fsdp_finely":
            # Sharded again before attention runs.
            fully_shard(block.get_submodule("attn.c_attn"), mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(how: str, folder: Path | None, log: Path | None = None) -> list[torch.Tensor]:
    rank = distributed.get_rank()
    model = wrapped(how, nano_gpt().model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with contextlib.ExitStack() as watching:
        if folder is not None:
            watching.enter_context(attn_diag.capture(model, folder, batch=None))
        if log is not None:
            watching.enter_context(attn_diag.Monitor(model, every=1, log=log))
        for step in range(3):
            loss = next_token_loss(model, tokens(10 * step + rank))
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses + [getattr(p, "to_local", p.detach)().detach().clone() for p in model.parameters()]


def main() -> None:
    folder = Path(sys.argv[1])
    distributed.init_process_group("gloo")
    for how in ("ddp", "fsdp", "fsdp_finely"):
        alone = train(how, None)
        only_one = folder / how / "alone" if distributed.get_rank() == 1 else None
        log = folder / f"{how}.jsonl"
        for watched in (train(how, folder / how / "both"), train(how, only_one), train(how, None, log)):
            assert len(alone) == len(watched) > 3
            assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True)), f"another run with {how}"
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
