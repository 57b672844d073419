"""Tensor parallelism and FSDP2, compiled or not, on two processes: merged, the captures are the unsharded model's."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from command_line import Programs
from tiny_models import Tiny, transformers_model
from torch import distributed

import attn_diag
from attn_diag.results.diagnosis import HeadDiagnosis

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("sharded"),
    pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore"),  # of the compiler
]
WAYS = ("tensor", "tensor_compiled", "fsdp_compiled")
STEPS = 2


def sharded(how: str, tiny: Tiny) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, mesh = tiny.model, init_device_mesh("cpu", (2,))
    if how == "fsdp_compiled":
        for name, block in model.named_modules():
            if name.startswith("model.layers.") and name.count(".") == 2:
                block.compile(backend="aot_eager", fullgraph=True)
                fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    plan: dict[str, Any] = {f"{at}.{n}_proj": ColwiseParallel() for at in tiny.attentions for n in "qkv"}
    plan |= {f"{at}.o_proj": RowwiseParallel() for at in tiny.attentions}
    parallelize_module(model, mesh, plan)
    return torch.compile(model, backend="aot_eager") if how == "tensor_compiled" else model


def train(tiny: Tiny, run: Any, around: contextlib.AbstractContextManager[Any]) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(tiny.model.parameters(), lr=0.1)
    losses = []
    with around:
        for _ in range(STEPS):
            loss = tiny.loss(run)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses + [getattr(p, "to_local", p.detach)().detach().clone() for p in tiny.model.parameters()]


def one_rank(folder: Path, ways: list[str]) -> None:
    distributed.init_process_group("gloo")
    for how in ways:
        bits = []
        arounds: list[Any] = [contextlib.nullcontext(), None]
        for around in arounds:
            torch._dynamo.reset()
            tiny = transformers_model("llama", "sdpa")
            run = sharded(how, tiny)
            around = around or attn_diag.capture(tiny.model, folder / how, batch=None, sums=how == "tensor")
            bits.append(train(tiny, run, around))
        assert all(map(torch.equal, *bits)), f"another run with {how}"
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs, request: pytest.FixtureRequest) -> Path:
    """What two processes captured, and one of the whole model; that no bit changed they have checked themselves.

    Of the ways that a test asks for: compiling each model four times takes most of the time.
    """
    folder = tmp_path_factory.mktemp("sharded")
    here = [item for item in request.session.items if item.path == request.path]
    asked = {"tensor"} | {item.callspec.params["how"] for item in here if hasattr(item, "callspec")}
    programs.ranks(__file__, folder, *(way for way in WAYS if way in asked))
    tiny = transformers_model("llama", "sdpa")
    train(tiny, tiny.model, attn_diag.capture(tiny.model, folder / "whole", batch=None, sums=True))
    return folder


def heads(folder: Path) -> dict[tuple[Any, int | None, int | None], HeadDiagnosis]:
    found = attn_diag.inspect_captures(map(attn_diag.load, sorted(folder.glob("*.safetensors"))))
    every = ((c.metadata["step"], h) for c in found.captures for h in c.observations[0].heads)
    return {(step, h.layer, h.head): h for step, h in every if h.head is not None}


@pytest.mark.parametrize("how", WAYS)
def test_merged_ranks_are_the_unsharded_model(how: str, folder: Path) -> None:
    whole, merged = heads(folder / "whole"), heads(folder / how)
    assert whole.keys() == merged.keys()
    assert {head for _, _, head in whole} == {0, 1, 2, 3}
    for key, one in whole.items():
        other = merged[key]
        # Under FSDP both ranks have the same sequences here.
        assert some(other.row_maxima.window).fraction == some(one.row_maxima.window).fraction, key
        assert other.conditioning == pytest.approx(one.conditioning, rel=1e-3), key
        for quantity in ("dq", "dw_q"):
            expected, found = (some(getattr(h.propagation, quantity)) for h in (one, other))
            assert some(found.relative_error) < 1e-5, (key, quantity)
            assert (found.coherence is None) == (expected.coherence is None)


@pytest.mark.parametrize("how", ["tensor", "tensor_compiled"])
def test_every_rank_numbers_its_heads_for_the_whole_model(how: str, folder: Path) -> None:
    found = {
        (c.metadata.rank, c.metadata.head_offset, c.q_heads, c.metadata.extra["module"])
        for c in map(attn_diag.load, (folder / how).glob("*.safetensors"))
    }
    assert found == {(rank, 2 * rank, 2, f"model.layers.{n}.self_attn") for rank in (0, 1) for n in (0, 1)}


def test_output_projections_are_added_up_in_fp32(folder: Path) -> None:
    found = attn_diag.mismatch(folder / "whole", folder / "tensor")
    assert not found.causes
    ways = {(s.run, s.layer, s.ranks, s.by, s.way) for s in found.sums}
    shared = {("rollout", n, (0, 1), "all-reduce by gloo", "in fp32, cast once") for n in (0, 1)}
    assert ways == shared | {("train", n, (0,), "", "") for n in (0, 1)}
    assert all(sum(part.share for part in one.parts) == pytest.approx(1) for one in found.outputs)


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]), sys.argv[2:])
