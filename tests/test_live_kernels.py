"""Attention kernels of other packages: met by their operators, or functions, in eager code and in compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import foreign_kernels
import pytest
import torch
from builders import holds
from foreign_kernels import RAN
from tiny_models import only
from torch import Tensor, nn

import attn_diag

pytestmark = pytest.mark.filterwarnings("ignore")  # of the compiler
DIM, HEADS, LENGTH = 16, 4, 256
KERNELS: dict[str, tuple[Callable[[], Any], str]] = {
    "flash_attn 2": (foreign_kernels.flash_attn_2, "flash_attn 2"),
    "flash_attn 3": (foreign_kernels.flash_attn_3, "flash_attn 3"),
    "flash_attn 3 of 2025": (partial(foreign_kernels.flash_attn_3, outer=False), "flash_attn 3"),
    "FlashAttention-4": (foreign_kernels.flash_attn_4, "FlashAttention-4"),
}
# Options of a call, key heads, keys, D.
CASES: dict[str, tuple[dict[str, Any], int, int, int]] = {
    "plain": ({}, HEADS, LENGTH, DIM),
    "causal": ({"causal": True}, HEADS, LENGTH, DIM),
    "grouped, more keys": ({"causal": True, "softmax_scale": 0.3}, 2, LENGTH + 17, DIM),
    "fewer keys": ({"causal": True}, HEADS, LENGTH - 20, DIM),
    "window": ({"window_size": (30, 20)}, HEADS, LENGTH + 5, DIM),
    "causal window, softcap": ({"causal": True, "window_size": (40, 0), "softcap": 2.0}, 2, LENGTH, DIM),
    "D of 20": ({}, HEADS, LENGTH, 20),
}


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    torch._dynamo.reset()
    RAN.forward.clear()
    RAN.backward.clear()
    package, name = KERNELS[request.param]
    with package() as function:
        yield request.param, name, function
    torch._dynamo.reset()


class Attention(nn.Module):
    """Projections around a kernel that takes [B, T, H, D]."""

    def __init__(
        self, function: Callable[..., Any], dim: int, key_heads: int, keys: int, options: dict[str, Any]
    ) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, HEADS * dim)
        self.kv = nn.Linear(32, 2 * key_heads * dim)
        self.function, self.dim, self.keys, self.options = function, dim, keys, options

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x[:, :LENGTH]).unflatten(-1, (-1, self.dim))
        k, v = (t.unflatten(-1, (-1, self.dim)) for t in self.kv(x[:, : self.keys]).chunk(2, -1))
        o: Tensor = self.function(q, k, v, **self.options)
        return o.flatten(-2)


def model(function: Callable[..., Any], case: str) -> tuple[nn.Module, Tensor]:
    options, key_heads, keys, dim = CASES[case]
    torch.manual_seed(0)
    made = Attention(function, dim, key_heads, keys, options).bfloat16()
    return made, torch.randn(2, LENGTH + 20, 32).bfloat16()


def step(run: Callable[[Tensor], Tensor], made: nn.Module, x: Tensor) -> list[Tensor]:
    made.zero_grad()
    o = run(x)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9))
    torch.autograd.backward((o.float() * weights).sum())
    return [o.detach().clone(), *(p.grad.clone() for p in made.parameters() if p.grad is not None)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
def test_what_ran_is_captured(
    case: str, compiled: bool, kernel: tuple[str, str, Callable[..., Any]], tmp_path: Path
) -> None:
    package, name, function = kernel
    if compiled and package == "flash_attn 3 of 2025":
        pytest.skip("torch cannot trace its operators")
    if case == "D of 20" and name != "flash_attn 2":
        pytest.skip("it pads no D outside its operators")
    made, x = model(function, case)
    run = made
    if compiled:
        run = torch.compile(made, fullgraph=name != "FlashAttention-4")
    expected = step(run, made, x)
    RAN.forward.clear()
    RAN.backward.clear()
    with attn_diag.capture(made, tmp_path, batch=None) as recorder:
        found = step(run, made, x)
    assert all(map(torch.equal, found, expected))
    capture = only(recorder)
    assert capture.metadata.kernel == name
    (ran,), (back,) = RAN.forward, RAN.backward
    for quantity, t in (ran | back).items():
        mine = t if quantity == "lse" else t.transpose(1, 2)
        assert torch.equal(capture.tensors[quantity][...], mine), quantity
    assert holds(capture)
    options = CASES[case][0]
    assert capture.metadata.causal == ("bottom-right" if options.get("causal") else "none")
    assert capture.metadata.softcap == (options.get("softcap"))
    assert ("w_q" in capture.tensors) == (not compiled and case != "D of 20")
    for head in attn_diag.inspect_captures([capture]).captures[0].observations[0].heads:
        assert head.verdict is not None
        assert head.verdict.labels == ("clean",), head.verdict.reasons
