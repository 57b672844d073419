"""FlexAttention inside compiled graphs: operators behind its nodes, forward and backward, that change nothing.

On a CPU inductor makes code of FlexAttention's forward alone. So training runs here what inductor would be given: the
graphs that it would lower, after our pass, with torch's own dense FlexAttention for the kernel (``lowered_as_is``).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds
from tiny_models import same, written
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config
from torch.nn.attention import flex_attention as flex
from torch.utils.checkpoint import checkpoint

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.watching.live import flex_graphs

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler
QUANTITIES = {"q", "k", "v", "o", "lse", "do", "dq", "dk", "dv"}
BATCH, LENGTH, HEADS, DIM = 2, 20, 4, 8
Lowered = Callable[[torch.fx.GraphModule, Any], Any]


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention refuses gradients on a CPU, though its dense code has them, and keeps no LSE there."""
    options = flex._apply_kernel_options

    def with_lse(*args: Any, **kwargs: Any) -> Any:
        return {**options(*args, **kwargs), "OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}

    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex, "_apply_kernel_options", with_lse)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    assert config.post_grad_custom_pre_pass is None


def graphs(seen: list[torch.fx.Graph]) -> Any:
    """A backend that does what inductor does until its own passes begin, and runs what it is then given."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compile_(module: torch.fx.GraphModule, inputs: Any) -> Any:  # noqa: ARG001 - what a compiler is given
        if (run := config.post_grad_custom_pre_pass) is not None:
            run(module.graph)
            module.recompile()
        seen.append(module.graph)
        return make_boxed_func(module)

    return aot_autograd(
        fw_compiler=compile_, decompositions=select_decomp_table, partition_fn=min_cut_rematerialization_partition
    )


class FlexSelfAttention(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.sizes = [HEADS * DIM, key_heads * DIM, key_heads * DIM]
        self.qkv = nn.Linear(HEADS * DIM, sum(self.sizes))

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, DIM)).transpose(1, 2) for t in self.qkv(x).split(self.sizes, -1))
        o = flex.flex_attention(q, k, v, enable_gqa=k.shape[1] != HEADS, **options)
        return x + o.transpose(1, 2).flatten(-2)


class Layers(nn.Module):
    def __init__(self, key_heads: int = HEADS, *, checkpointed: bool = False, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.ModuleDict({"blocks": nn.ModuleList(FlexSelfAttention(key_heads) for _ in range(layers))})
        self.checkpointed = checkpointed

    def forward(self, x: Tensor, options: dict[str, Any]) -> Tensor:
        for block in self.inner["blocks"]:
            x = checkpoint(block, x, options, use_reentrant=False) if self.checkpointed else block(x, options)
        return x


def near(_b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return (row >= key) & (row - key < 7)


DOCUMENTS = torch.arange(LENGTH) // 6


def in_a_document(b: Tensor, _h: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return (row >= key) & ((DOCUMENTS[row] == DOCUMENTS[key]) | (b == 1))


def alibi(score: Tensor, _b: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
    return score + (key - row) * torch.exp2(-(head.float() + 1))


def block_mask(of: Any, batch: int | None = None) -> Any:
    return flex.create_block_mask(of, batch, None, LENGTH, LENGTH, device="cpu")


def x_of(step: int, length: int = LENGTH) -> Tensor:
    return torch.randn(BATCH, length, HEADS * DIM, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, run: Any, options: dict[str, Any], watching: Any = None, steps: int = 4) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bits: list[Tensor] = []
    with watching or contextlib.nullcontext():
        for step in range(steps):
            optimizer.zero_grad()
            loss = run(x_of(step), options).square().mean()
            torch.autograd.backward(loss)
            optimizer.step()
            bits += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return bits


def masked(capture: Capture) -> Tensor | None:
    return capture.tensors["mask"][...] if "mask" in capture.tensors else None


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "scale": lambda: {"scale": 0.3},
    "block mask": lambda: {"block_mask": block_mask(near)},
    "captured mask": lambda: {"block_mask": block_mask(in_a_document, BATCH)},
    "score_mod": lambda: {"score_mod": alibi, "block_mask": block_mask(near)},
}


@pytest.mark.parametrize("key_heads", [HEADS, 2], ids=["", "grouped"])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_model_is_captured_and_trains_as_it_did(
    case: str, checkpointed: bool, key_heads: int, tmp_path: Path
) -> None:
    options = CASES[case]()
    alone = Layers(key_heads, checkpointed=checkpointed)
    expected = train(alone, torch.compile(alone, backend=graphs([]), fullgraph=True), options)
    torch._dynamo.reset()
    model = Layers(key_heads, checkpointed=checkpointed)
    seen: list[torch.fx.Graph] = []
    run = torch.compile(model, backend=graphs(seen), fullgraph=True)
    recorder = attn_diag.capture(model, tmp_path, steps={1, 3}, batch=None)
    assert same(train(model, run, options, recorder), expected)
    assert not counters["graph_break"]
    assert len(seen) == 2
    found = written(recorder)
    assert [(c.metadata.step, c.metadata.layer) for c in found] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for capture in found:
        assert capture.tensors.keys() >= QUANTITIES
        assert capture.metadata.extra["module"] == f"inner.blocks.{capture.metadata.layer}"
        assert capture.metadata.kernel == "torch FlexAttention"
        assert not capture.metadata.notes
        assert capture.scale == pytest.approx(options.get("scale", DIM**-0.5))
        assert holds(capture)
        dq = capture.tensors["dq"][...]
        q, k, v = (capture.tensors[name][...].double().requires_grad_() for name in "qkv")
        assert torch.allclose(dq.double(), exact_dq(q, k, v, capture), rtol=1e-4, atol=1e-5 * float(dq.abs().max()))
    if "block_mask" in options:
        given = options["block_mask"]
        seen_keys = flex.create_mask(given.mask_mod, *given.shape[:2], LENGTH, LENGTH, device="cpu")
        for capture in found:
            kept = masked(capture)
            assert kept is not None
            assert torch.equal(kept if kept.dtype == torch.bool else kept.isfinite(), seen_keys.expand(kept.shape))
    else:
        assert all(masked(capture) is None for capture in found)


def exact_dq(q: Tensor, k: Tensor, v: Tensor, capture: Capture) -> Tensor:
    do, lse = (capture.tensors[name][...].double() for name in ("do", "lse"))
    keys, values = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    scores = q @ keys.mT * capture.scale
    if (mask := masked(capture)) is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    # The LSE, in base e, is that of these scores.
    assert torch.allclose(scores.logsumexp(-1), lse, atol=1e-5)
    (dq,) = torch.autograd.grad(scores.softmax(-1) @ values, q, do)
    return dq
