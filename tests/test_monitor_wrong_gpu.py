"""On a GPU: a fused kernel that is wrong alarms within steps, eager, compiled and replayed; a sound one does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_operators import replaced
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import attn_diag
from attn_diag import Monitor

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # of the compiler, and of what overrides
WIDTH, HEADS, LENGTH = 256, 4, 320
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
FAULTS = {
    "dQ negated": "dQ is 200 % off",
    "dK of a head zero": "dK is 100 % off",
    "O a tenth too large": "all rows are 1.1 times",
    "no delta": "d",
    "dV transposed": "dV is",
}
COMPILED: dict[str, Any] = {"eager": None, "compiled": {}, "CUDA graphs": {"mode": "reduce-overhead"}}


@pytest.fixture(autouse=True)
def without_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached graph has the backend of whoever made it."""
    import torch._inductor.config as inductor

    monkeypatch.setattr(inductor, "force_disable_caches", True)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        o = self.attend(q, k, v)
        y: Tensor = x + self.out(o.transpose(1, 2).flatten(2))
        return y

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class Flex(Attention):
    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda _b, _h, row, key: row >= key, None, None, LENGTH, LENGTH, device="cuda")
        o: Any = flex_attention(q, k, v, block_mask=mask)
        return o  # type: ignore[no-any-return]


def trained(mode: str, kind: type[Attention] = Attention, steps: int = 12, **options: Any) -> Monitor:
    """A monitor of so many steps; the graphs are made after it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(model, every=4, **options) as monitor:
        run: Any = model if COMPILED[mode] is None else torch.compile(model, **COMPILED[mode])
        for step in range(steps):
            generator = torch.Generator("cuda").manual_seed(step)
            x = torch.randn(2, LENGTH, WIDTH, device="cuda", generator=generator)
            with torch.autocast("cuda", torch.bfloat16):
                loss = (run(x) - x.roll(1, 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            torch.cuda.synchronize()
    return monitor


@pytest.mark.parametrize("mode", COMPILED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sound_kernel_is_not_accused(backend: str, mode: str) -> None:
    with sdpa_kernel(BACKENDS[backend]):
        for rows in (1024, 64):
            monitor = trained(mode, rows=rows)
            assert not monitor.alarms
            newest = [check for check in monitor.history if not check.again][-1]
            factors = {
                name: max(float(layer.values[f"{name}_factor"].max()) for layer in newest.layers)
                for name in ("o", "dq", "dk", "dv")
            }
            print(backend, mode, rows, {n: round(f, 2) for n, f in factors.items()}, len(monitor.history))
            assert max(factors.values()) < 2.5, factors
            assert min(factors.values()) > 0.05, factors


@pytest.mark.parametrize(
    ("mode", "fault"),
    [(mode, fault) for mode in COMPILED for fault in list(FAULTS)[: None if mode == "eager" else 3]],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_wrong_kernel_is_accused(backend: str, mode: str, fault: str) -> None:
    with sdpa_kernel(BACKENDS[backend]), replaced(fault, backend):
        monitor = trained(mode)
    wrong = [alarm for alarm in monitor.alarms if alarm.kind == "wrong"]
    assert {alarm.layer for alarm in wrong} == {0, 1}, [str(a) for a in monitor.alarms]
    print(backend, mode, fault, wrong[0])
    assert min(alarm.step for alarm in wrong) <= 3
    assert FAULTS[fault] in wrong[0].reason


def test_flex_attention_in_a_graph_is_measured_and_not_accused() -> None:
    monitor = trained("compiled", Flex)
    newest = [check for check in monitor.history if not check.again][-1]
    factors = {n: float(newest.layers[0].values[f"{n}_factor"].max()) for n in ("o", "dq", "dk", "dv")}
    print("flex", {n: round(f, 2) for n, f in factors.items()})
    assert not monitor.alarms
    assert min(factors.values()) > 0.05
    assert max(factors.values()) < 2.5


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_a_check_makes_nobody_wait() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Attention(), Attention()).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(2, LENGTH, WIDTH, device="cuda")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    for rows in (1024, 64):
        with Monitor(model, every=1, rows=rows) as monitor:
            step()  # finds the projections, draws the signs
            step()
            torch.cuda.set_sync_debug_mode("error")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert len(monitor.history) == 3


def test_its_operator_is_measured_too() -> None:
    class Ours(Attention):
        def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            o: Tensor = attn_diag.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), causal="top-left")
            return o

    monitor = trained("eager", Ours, steps=6)
    assert not monitor.alarms
    assert max(float(layer.values["dq_factor"].max()) for layer in monitor.history[0].layers) < 2.5
