"""Linear attention on a GPU: inspect, check and replay say what they say on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from linear_kernels import observed
from test_linear_check import DELTA

import attn_diag
from attn_diag import LinearCapture
from attn_diag.kernels import linear_products as products
from attn_diag.kernels.linear_recipe import LinearFormat
from attn_diag.testing.linear.cases import draw, with_outputs
from attn_diag.testing.linear.function import LinearFunction
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("operator", ["rwkv7", "gated_delta_rule", "kda", "gla"])
@pytest.mark.parametrize("defect", [None, "state_bf16", "no_inter_chunk"])
def test_inspect_judges_alike_on_both(operator: str, defect: str | None) -> None:
    given = rounded(linear_inputs(operator, (1, 96, 1, 32, 32), 0, kind=LONG))
    do = torch.randn(given["v"].shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    scale = 1.0 if operator == "rwkv7" else 32**-0.5
    made = observed(given, do, scale=scale, defect=defect)
    capture = LinearCapture.from_tensors(operator, {**given, "do": do, **made})
    cpu, cuda = (attn_diag.inspect_linear(capture, device=device).heads[0].quantities for device in ("cpu", "cuda"))
    assert [(q.quantity, q.answer, q.cause) for q in cpu] == [(q.quantity, q.answer, q.cause) for q in cuda]
    for one, other in zip(cpu, cuda, strict=True):
        assert one.factor == pytest.approx(other.factor, rel=0.02)


def test_check_passes_the_recipe() -> None:
    found = attn_diag.check_linear("recipe:16", DELTA, cases=["normal", "packed"], device="cuda")
    assert found.passed, found.report()


def test_replay_runs_functions_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    inputs = draw("initial-state", DELTA, 3, dtype=torch.bfloat16, shape=(1, 130, 2, 16))
    outputs, _ = LinearFunction.of("recipe", DELTA, device=torch.device("cpu")).run(inputs)
    (found,) = attn_diag.replay_linear(
        with_outputs(inputs, outputs), against=["recipe:16", "replayed_linear:no_state"], device="cuda"
    ).captures
    assert (found.cause, found.culprits) == ("kernel", ("replayed_linear:no_state",)), found.words
    assert [k.outcome for k in found.kernels] == ["captured", "ran", "ran"]


@triton.jit  # type: ignore[untyped-decorator]
def _tile_sums(state, gradient, out, K: tl.constexpr, V: tl.constexpr, WHOLE: tl.constexpr):  # type: ignore[no-untyped-def]
    tile, of_k = tl.program_id(0), tl.arange(0, K)
    at = tile * K * V + tl.arange(0, V)[:, None] + of_k[None, :] * V
    products = tl.load(state + at) * tl.load(gradient + at)
    if WHOLE:
        tl.store(out + tile, tl.sum(products).to(tl.float32))
    else:
        tl.store(out + tile * K + of_k, tl.sum(products, axis=0).to(tl.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("whole", [True, False])
def test_sums_of_16_bit_tiles_have_the_bits_of_tritons(dtype: torch.dtype, whole: bool) -> None:
    """As the decay's gradient of flash-linear-attention has them: tl.sum(b_h * b_dh) of a [V, K] tile."""
    make = torch.Generator().manual_seed(1)
    state, gradient = (torch.randn(64, 64, 64, generator=make).to(dtype) for _ in range(2))
    out = torch.empty((64,) if whole else (64, 64), device="cuda")
    _tile_sums[(64,)](state.cuda(), gradient.cuda(), out, 64, 64, whole, num_warps=4)
    decay = torch.ones(64, 1 if whole else 64, 1, requires_grad=True)
    fmt: LinearFormat = "bf16" if dtype == torch.bfloat16 else "fp16"
    products.decayed_state(state.float(), decay, fmt, fmt).backward(gradient.float())  # type: ignore[no-untyped-call]
    assert decay.grad is not None
    same = (out.cpu().reshape(decay.shape) == decay.grad).double().mean()
    assert float(same) == 1.0
