"""Context parallelism on two processes: a rank's rows are judged with all keys, merged ranks as the unsharded model."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from command_line import Programs
from torch import Tensor, distributed, nn
from torch.nn import functional

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.results.diagnosis import HeadDiagnosis
from attn_diag.watching.live.rings import positions

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore"),
]
BATCH, LENGTH, HEADS, DIM, LAYERS, STEPS = 2, 24, 4, 8, 2, 2
WIDTH = HEADS * DIM
# What a run is called -> whether it is causal, and in which order the ranks have the rows.
RINGS = {
    "contiguous": (True, "contiguous"),
    "zigzag": (True, "zigzag"),
    "everything": (False, "contiguous"),
}  # fmt: skip


class TorchRing(torch.autograd.Function):
    """torch's own ring, with the operators of the CPU, for which its dispatcher has no entry."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        o, lse = _attention._templated_ring_attention(
            distributed.group.WORLD, 2, operator, q, k, v, is_causal=causal, dropout_p=0.0, scale=None
        )
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.causal = causal
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        from torch.distributed.tensor.experimental._context_parallel import _attention

        q, k, v, o, lse = ctx.saved_tensors
        operator: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = _attention._templated_ring_attention_backward(
            distributed.group.WORLD, 2, operator, grad_out=do, grad_out_name="grad_out", query=q, key=k, value=v,
            out=o, logsumexp=lse, is_causal=ctx.causal, dropout_p=0.0, scale=None,
        )  # fmt: skip
        return *found, None


class Attention(nn.Module):
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.qkv, self.out, self.run = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH), run

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        result: Tensor = self.out(self.run(q, k, v).transpose(1, 2).flatten(2))
        return result


class Model(nn.Module):
    """Attention that is sure to move things: its rows and keys differ much."""

    def __init__(self, run: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(run) for _ in range(LAYERS))
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, target = torch.randn(2, BATCH, LENGTH, WIDTH, generator=generator)
    return x, target


def train(model: nn.Module, rows: Tensor, around: contextlib.AbstractContextManager[Any]) -> list[Tensor]:
    """``rows`` of the batch, and what is left afterwards; the gradients of the ranks are added up."""
    x, target = (t[:, rows] for t in batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    with around:
        for _ in range(STEPS):
            loss = (model(x) - target).square().sum() / BATCH
            torch.autograd.backward(loss)
            for p in model.parameters():
                if distributed.is_initialized():
                    distributed.all_reduce(p.grad)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses + [p.detach().clone() for p in model.parameters()]


def whole(causal: bool) -> Any:
    return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def one_rank(folder: Path) -> None:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for how, (causal, order) in RINGS.items():
        _attention._cp_options.enable_load_balance = order == "zigzag"
        rows = positions(order, rank, ranks, LENGTH // ranks)  # type: ignore[arg-type]
        bits = []
        for watched in (False, True):
            model = Model(lambda q, k, v: TorchRing.apply(q, k, v, causal))  # noqa: B023
            around = attn_diag.capture(model, folder / how, batch=None) if watched else contextlib.nullcontext()
            bits.append(train(model, rows, around))
        assert all(map(torch.equal, *bits)), f"another run with {how}"
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    """What two processes captured, and one of the whole model; that no bit changed they have checked themselves."""
    folder = tmp_path_factory.mktemp("context_parallel")
    programs.ranks(__file__, folder)
    for causal in (True, False):
        model = Model(whole(causal))
        train(model, torch.arange(LENGTH), attn_diag.capture(model, folder / f"whole {causal}", batch=None))
    return folder


def captures(folder: Path) -> list[Capture]:
    return [attn_diag.load(path) for path in sorted(folder.glob("*.safetensors"))]


def heads(those: list[Capture]) -> dict[tuple[Any, int | None, int | None], HeadDiagnosis]:
    found = attn_diag.inspect_captures(those)
    every = ((c.metadata["step"], h) for c in found.captures for h in c.observations[0].heads)
    return {(step, h.layer, h.head): h for step, h in every if h.head is not None}


@pytest.mark.parametrize("how", RINGS)
def test_merged_ranks_are_the_unsharded_model(how: str, folder: Path) -> None:
    expected, found = heads(captures(folder / f"whole {RINGS[how][0]}")), heads(captures(folder / how))
    assert expected.keys() == found.keys()
    assert len(expected) == STEPS * LAYERS * HEADS
    for key, one in expected.items():
        other = found[key]
        assert other.rows == one.rows
        print(key, one.quantities, other.quantities, one.not_judged, other.not_judged)
        assert other.not_judged == one.not_judged


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
