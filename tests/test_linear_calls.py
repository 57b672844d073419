"""Calls of flash-linear-attention met by name: stand-ins with its names and arguments, and on a GPU its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from linear_kernels import recurrent
from torch import Tensor

import attn_diag
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded
from attn_diag.watching.live.linear_calls import capture_linear


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As fla's, recurrent in float64."""
    del use_qk_l2norm_in_kernel, use_gate_in_kernel, cu_seqlens, kwargs
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    given |= {} if initial_state is None else {"initial_state": initial_state}
    o, state = recurrent(given, scale=q.shape[3] ** -0.5 if scale is None else scale)
    return o.to(v.dtype), state.float() if output_final_state else None


def fused_recurrent_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float | None = 1.0,
    initial_state: Tensor | None = None, output_final_state: bool = True, cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As fla's."""
    del initial_state, output_final_state, cu_seqlens
    o, state = recurrent({"q": r, "k": k, "v": v, "g": w, "a": a, "b": b}, scale=scale or 1.0)
    return o.to(v.dtype), state.float()


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loaded modules as flash-linear-attention's, and one of a model that imports from it."""
    ops, layer = ModuleType("fla.ops.kda"), ModuleType("somebodys_model")
    both: dict[str, Any] = {"chunk_kda": chunk_kda, "fused_recurrent_rwkv7": fused_recurrent_rwkv7}
    vars(ops).update(both)
    vars(layer).update(both)
    monkeypatch.setitem(sys.modules, "fla.ops.kda", ops)
    monkeypatch.setitem(sys.modules, "somebodys_model", layer)
    yield layer
    assert vars(layer)["chunk_kda"] is chunk_kda


def inputs(operator: str) -> dict[str, Tensor]:
    return {
        n: t.requires_grad_() for n, t in rounded(linear_inputs(operator, (1, 96, 2, 16, 16), 0, kind=LONG)).items()
    }


def test_calls_are_met_where_a_model_has_them(fla: Any, tmp_path: Path) -> None:
    x, y = inputs("kda"), inputs("rwkv7")
    with capture_linear(tmp_path) as calls:
        o, _ = fla.chunk_kda(**x, output_final_state=True)
        # What else uses k is no part of this call's dK.
        (o.float().square().sum() + x["k"].float().pow(3).sum()).backward()
        with torch.no_grad():
            fla.fused_recurrent_rwkv7(y["q"], y["g"], y["k"], y["v"], a=y["a"], b=y["b"])
        assert not calls
    assert [c.operator for c in calls] == ["kda", "rwkv7"]
    assert {"o", "do", "dq", "dk", "dv", "dg", "dbeta", "final_state"} <= set(calls[0].tensors)
    found = attn_diag.inspect_linear(tmp_path)
    assert found.labels == {"clean"}, found.sentence
    assert {c.metadata["kernel"] for c in found.captures} == {"chunk_kda", "fused_recurrent_rwkv7"}


def test_what_a_capture_cannot_say_is_refused_and_the_model_goes_on(
    fla: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with capture_linear() as calls:
        fla.chunk_kda(**inputs("kda"), use_gate_in_kernel=True)
        with pytest.raises(TypeError, match="beta"):
            fla.chunk_kda(*[inputs("kda")[n] for n in "qkvg"])
    assert not calls
    assert "gate made in the kernel" in capsys.readouterr().err
    assert sum(calls.refused.values()) == 1


def test_another_function_is_met_by_its_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return chunk_kda(q, k, v, g, beta)[0]

    here = sys.modules[__name__]
    monkeypatch.setattr(here, "mine", mine, raising=False)
    with capture_linear(functions={"kda": mine}) as calls:
        vars(here)["mine"](**inputs("kda"))
    assert [c.operator for c in calls] == ["kda"]
    with pytest.raises(attn_diag.InputError, match="operator must be"), capture_linear(functions={"softmax": mine}):
        pass


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["rwkv7", "kda", "gla"])
def test_released_kernels_are_not_wrong(operator: str) -> None:
    ops = pytest.importorskip(f"fla.ops.{operator}")
    x = {n: t.detach().cuda().requires_grad_() for n, t in linear_gpu(operator).items()}
    names = {"q": "r", "g": "w"} if operator == "rwkv7" else {}
    with capture_linear() as calls:
        o, _ = getattr(ops, f"chunk_{operator}")(**{names.get(n, n): t for n, t in x.items()}, output_final_state=True)
        o.float().square().sum().backward()
    found = attn_diag.inspect_linear(list(calls))
    assert not found.labels & {"wrong", "nonfinite"}, found.sentence


def linear_gpu(operator: str) -> dict[str, Tensor]:
    return rounded(linear_inputs(operator, (1, 512, 2, 64, 64), 0, kind=LONG))
