"""Two GPUs with NCCL: tensor parallelism, compiled FSDP2, torch's context_parallel; merged, the unsharded model."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import some
from torch import Tensor, distributed, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.results.diagnosis import HeadDiagnosis

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore"),
]
BATCH, LENGTH, HEADS, DIM, LAYERS, STEPS = 2, 512, 4, 64, 2, 2
WIDTH = HEADS * DIM
RINGS = ("ring, balanced", "ring, in order", "ring, keys by all-to-all")
WAYS = ("tensor", "fsdp_compiled", *RINGS)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        parts = (layer(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = parts
        o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = x + self.o_proj(o.transpose(1, 2).flatten(2))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.to("cuda", torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def batch() -> tuple[Tensor, Tensor]:
    x, target = torch.randn(2, BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3)).to(
        "cuda", torch.bfloat16
    )
    return x, target


Inside = Callable[[list[Tensor]], contextlib.AbstractContextManager[Any]]


def train(
    model: nn.Module, items: slice, inside: Inside, around: contextlib.AbstractContextManager[Any]
) -> list[Tensor]:
    """``inside`` is where forward and backward run; the losses, and what is left of the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    with around:
        for _ in range(STEPS):
            x, target = (t[items].contiguous() for t in batch())
            with inside([x, target]), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
                loss = (model(x) - target).float().square().sum()
                torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
    return losses + [getattr(p, "to_local", p.detach)().detach().clone() for p in model.parameters()]


def alone(buffers: list[Tensor]) -> contextlib.AbstractContextManager[None]:  # noqa: ARG001 - as with a ring
    return contextlib.nullcontext()


def sharded(how: str, model: Model) -> tuple[slice, Inside]:
    """Shard the model; which items of the batch this rank has, and where its steps run."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import experimental
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh, rank = init_device_mesh("cuda", (2,)), distributed.get_rank()
    if how == "tensor":
        plan: dict[str, Any] = {f"layers.*.{n}_proj": ColwiseParallel() for n in "qkv"}
        parallelize_module(model, mesh, plan | {"layers.*.o_proj": RowwiseParallel()})
        return slice(None), alone
    if how == "fsdp_compiled":
        for layer in model.layers:
            layer.compile(fullgraph=True)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return slice(rank, rank + 1), alone
    _attention._cp_options.enable_load_balance = how != "ring, in order"
    _attention.set_rotate_method("alltoall" if how == "ring, keys by all-to-all" else "allgather")

    @contextlib.contextmanager
    def ring(buffers: list[Tensor]) -> Iterator[None]:
        with experimental.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers)):
            yield

    return slice(None), ring


def bits_of(how: str, folder: Path) -> list[bool]:
    """Whether a run repeats itself, and whether one that is captured is another."""
    bits = []
    for watched in (False, False, True):
        torch._dynamo.reset()
        model = Model()
        items, inside = sharded(how, model)
        around: Any = contextlib.nullcontext()
        if watched:
            around = attn_diag.capture(model, folder / how, batch=None, calls=None)
        bits.append(train(model, items, inside, around))
    return [all(map(torch.equal, bits[0], others)) for others in bits[1:]]


def one_rank(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.use_deterministic_algorithms(True)  # with warn_only=True SDPA's backwards are not
    distributed.init_process_group("nccl", device_id=torch.device("cuda", rank))
    for how in WAYS:
        try:
            found: Any = bits_of(how, folder)
        except Exception as error:
            found = repr(error)
        (folder / f"{how}, rank {rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes captured, and one of the whole model; and whether bits changed."""
    folder = tmp_path_factory.mktemp("two_gpus")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    shared["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    line = [sys.executable, __file__, str(folder)]
    processes = [
        subprocess.Popen(line, env=os.environ | shared | {"RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    errors = [process.communicate(timeout=400)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    model = Model()
    train(model, slice(None), alone, attn_diag.capture(model, folder / "whole", batch=None))
    return folder


def captures(folder: Path) -> list[Capture]:
    """Of the first step: what the optimizer makes of gradients that a rounding tells apart is another matter."""
    return [attn_diag.load(path) for path in sorted(folder.glob("step000000*.safetensors"))]


def heads(those: list[Capture]) -> dict[tuple[int | None, int | None], HeadDiagnosis]:
    found = attn_diag.inspect_captures(those)
    assert not found.summary.warnings
    assert all(c.assumptions.ok for c in found.captures)
    every = (h for c in found.captures for h in c.observations[0].heads)
    return {(h.layer, h.head): h for h in every if h.head is not None}


@pytest.mark.parametrize("how", WAYS)
def test_bits_stay(how: str, folder: Path) -> None:
    for rank in "01":
        found = json.loads((folder / f"{how}, rank {rank}.json").read_text())
        assert found == [True, True], "whether the run repeats itself, and whether a captured one is the same"


@pytest.mark.parametrize("how", WAYS)
def test_merged_ranks_are_the_unsharded_model(how: str, folder: Path) -> None:
    expected, found = heads(captures(folder / "whole")), heads(captures(folder / how))
    assert expected.keys() == found.keys()
    assert len(expected) == LAYERS * HEADS
    for key, one in expected.items():
        other = found[key]
        assert (other.rows_all, other.not_judged) == (one.rows_all, one.not_judged)
        # Inputs of the second layer are some BF16 roundings (2**-9) apart.
        assert other.conditioning == pytest.approx(one.conditioning, rel=16 * 2.0**-9), key
        for quantity in ("dq", "dk", "dv"):
            mine, yours = (some(some(getattr(h.propagation, quantity)).relative_error) for h in (other, one))
            # A ring rounds what it merges to BF16 once more.
            assert mine < 2 * yours, (key, quantity)
            assert mine > yours / 2, (key, quantity)


@pytest.mark.parametrize("how", RINGS)
def test_a_rank_of_a_ring_alone_is_judged_with_all_keys(how: str, folder: Path) -> None:
    those = captures(folder / how)
    assert len(those) == 2 * LAYERS
    for capture in those:
        assert capture.metadata.extra["sequence_ranks"] == "0,1"
        assert "torch SDPA flash" in str(capture.metadata.kernel)
        for head in heads([capture]).values():
            assert head.propagation.dq is not None
            assert any("dK (summed over the rows of other ranks" in words for words in head.not_judged)


def test_heads_are_numbered_for_the_whole_model(folder: Path) -> None:
    for capture in captures(folder / "tensor"):
        assert (capture.metadata.head_offset, capture.q_heads) == (some(capture.metadata.rank) * HEADS // 2, HEADS // 2)


if __name__ == "__main__":
    one_rank(Path(sys.argv[1]))
