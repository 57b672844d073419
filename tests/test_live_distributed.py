"""Two processes: one file per rank, one run; and the same bits as without capture."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from builders import holds
from command_line import Programs
from tiny_models import nano_gpt, next_token_loss, tokens
from torch import distributed, nn

import attn_diag
from attn_diag.watching.monitoring.record import read_log

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")]


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


def one_rank(folder: Path) -> None:
    """All cases, each alone, with captures of both ranks, of one, and with a monitor."""
    distributed.init_process_group("gloo")
    for how in ("ddp", "fsdp", "fsdp_finely"):
        alone = train(how, None)
        only_one = folder / how / "alone" if distributed.get_rank() == 1 else None
        log = folder / f"{how}.jsonl"
        for watched in (train(how, folder / how / "both"), train(how, only_one), train(how, None, log)):
            assert len(alone) == len(watched) > 3
            assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True)), f"another run with {how}"
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """What two processes captured; that it changed no bit they have checked themselves."""
    folder = tmp_path_factory.mktemp("ranks")
    programs.ranks(__file__, folder)
    return folder


@pytest.mark.parametrize("how", ["ddp", "fsdp", "fsdp_finely"])
def test_ranks(how: str, folder: Path) -> None:
    captures = [attn_diag.load(path) for path in sorted((folder / how / "both").iterdir())]
    found = [(c.metadata.step, c.metadata.layer, c.metadata.rank) for c in captures]
    assert found == [(step, layer, rank) for step in range(3) for layer in range(2) for rank in range(2)]
    extras = [c.metadata.extra for c in captures]
    assert {extra["world_size"] for extra in extras} == {"2"}
    assert len({extra["run"] for extra in extras}) == 1
    assert [extra["module"] for extra in extras[:3]] == ["h.0.attn", "h.0.attn", "h.1.attn"]
    for capture in captures:
        assert {"do", "dq", "dk", "dv", "x", "dq_pre", "lse"} <= capture.tensors.keys()
        assert ("w_q" in capture.tensors) == (how != "fsdp_finely")
        assert ("sharded" in str(capture.metadata.notes)) == (how == "fsdp_finely")
        assert holds(capture)
    # Each rank has its own batch.
    assert not torch.equal(captures[0].tensors["q"][...], captures[1].tensors["q"][...])
    # One rank may capture alone: nobody waits for the others.
    alone = [attn_diag.load(path) for path in (folder / how / "alone").iterdir()]
    assert {c.metadata.rank for c in alone} == {1}
    assert {c.metadata.extra["run"] for c in alone}.isdisjoint(extra["run"] for extra in extras)


@pytest.mark.parametrize("how", ["fsdp", "fsdp_finely"])
def test_a_sharded_model_is_monitored_as_a_replicated_one(how: str, folder: Path) -> None:
    replicated, sharded = (list(read_log(folder / f"{kind}.jsonl")) for kind in ("ddp", how))
    assert [check.step for check in sharded] == [0, 1, 2]
    for one, other in zip(replicated, sharded, strict=True):
        for a, b in zip(one.layers, other.layers, strict=True):
            assert (a.layer, a.module) == (b.layer, b.module)
            for name, expected in a.values.items():
                # Where the weight is sharded again before attention runs, nothing is known of dW_Q.
                lost = how == "fsdp_finely" and (name.startswith(("dw_q", "w_q", "coherence")) or name == "past_z")
                if lost:
                    assert np.isnan(b.values[name]).all(), name
                else:
                    # The same weights: two ranks' gradients add up alike in either order.
                    np.testing.assert_allclose(b.values[name], expected, rtol=1e-12, atol=0, err_msg=name)


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
