"""Pipeline stages on two processes: micro-batches are calls, and together the stages are the unsplit model."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from command_line import Programs
from tiny_models import WIDTH, CausalSelfAttention
from torch import Tensor, distributed, nn

import attn_diag
from attn_diag.captures.capture import Capture

pytest.importorskip("torch.distributed.pipelining")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed"),
    pytest.mark.filterwarnings("ignore"),
]
LAYERS, STEPS, BATCH, LENGTH = 4, 2, 3, 12
# The names of the whole model, as who deletes the other layers keeps them; a list of the stage's own layers.
WAYS = ("named", "renumbered")


class Layers(nn.Module):
    def __init__(self, numbers: list[int], *, named: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        every = [CausalSelfAttention() for _ in range(LAYERS)]
        chosen = {str(number if named else place): every[number] for place, number in enumerate(numbers)}
        self.layers = nn.ModuleDict(chosen)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = x + layer(x)
        return x


def batch() -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))
    return x, target


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def one_rank(folder: Path) -> None:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    distributed.init_process_group("gloo")
    rank, (x, target) = distributed.get_rank(), batch()
    numbers = [2 * rank, 2 * rank + 1]
    inputs: Any = [] if rank else [x]
    targets: Any = {"target": target} if rank else {}
    for how in WAYS:
        bits = []
        arounds: list[Any] = [contextlib.nullcontext(), None]
        for around in arounds:
            model = Layers(numbers, named=how == "named")
            stage = PipelineStage(model, rank, 2, torch.device("cpu"))
            schedule, optimizer = Schedule1F1B(stage, BATCH, loss_fn=loss_of), optimizer_of(model)
            with around or attn_diag.capture(model, folder / how, calls=None):
                for _ in range(STEPS):
                    schedule.step(*inputs, **targets)
                    optimizer.step()
                    optimizer.zero_grad()
            bits.append([p.detach().clone() for p in model.parameters()])
        assert all(map(torch.equal, *bits)), f"another run with {how}"
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, programs: Programs) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    programs.ranks(__file__, folder)
    model = Layers(list(range(LAYERS)), named=True)
    optimizer = optimizer_of(model)
    with attn_diag.capture(model, folder / "whole", calls=None):
        for _ in range(STEPS):
            for x, target in zip(*batch(), strict=True):
                torch.autograd.backward(loss_of(model(x[None]), target[None]))
            for p in model.parameters():
                some(p.grad).div_(BATCH)
            optimizer.step()
            optimizer.zero_grad()
    return folder


def captures(folder: Path) -> list[Capture]:
    return [attn_diag.load(path) for path in sorted(folder.glob("*.safetensors"))]


def test_the_stages_files_together_are_those_of_the_unsplit_model(folder: Path) -> None:
    # 16 fp32 roundings (2**-24), and what they do to the steps that follow.
    near: Any = {"rel": 1e-6, "abs": 16 * 2.0**-24}
    whole, stages = captures(folder / "whole"), captures(folder / "named")
    places = [
        {(c.metadata.step, c.metadata.layer, c.metadata.extra["call"]): c for c in those} for those in (whole, stages)
    ]
    assert places[0].keys() == places[1].keys()
    assert len(whole) == STEPS * LAYERS * BATCH
    for place, one in places[0].items():
        other = places[1][place]
        assert other.metadata.extra["module"] == one.metadata.extra["module"]
        for name, tensor in one.tensors.items():
            assert other.tensors[name][...] == pytest.approx(tensor[...], **near), (place, name)
    first = [c for c in stages if c.metadata.step == 0 and c.metadata.extra["call"] == "0"]
    found = attn_diag.inspect_captures(first)
    assert [c.metadata["layer"] for c in found.captures] == [str(n) for n in range(LAYERS)]
    assert not found.summary.warnings
    # That each layer is one rank's is no loss.
    assert not any("alone" in words for c in found.captures for words in c.assumptions.defaults)


def test_layers_that_each_stage_numbers_anew_are_not_taken_for_one(folder: Path) -> None:
    found = captures(folder / "renumbered")
    assert {(c.metadata.rank, c.metadata.layer, c.metadata.extra["stage"]) for c in found} == {
        (rank, layer, f"{rank + 1} of 2") for rank in (0, 1) for layer in (0, 1)
    }
    first = [c for c in found if c.metadata.step == 0 and c.metadata.extra["call"] == "0"]
    assert len(attn_diag.inspect_captures(first).captures) == len(first) == LAYERS


def test_no_call_is_of_the_rehearsal(folder: Path) -> None:
    for how in WAYS:
        calls = {c.metadata.extra["call"] for c in captures(folder / how)}
        assert calls == {str(n) for n in range(BATCH)}


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
