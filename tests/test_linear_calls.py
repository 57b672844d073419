"""Calls of flash-linear-attention met by name: stand-ins with its names and arguments, and on a GPU its own."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from linear_kernels import one_configuration, recurrent
from linear_watchers import ended_in_either_order
from torch import Tensor

import attn_diag
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded
from attn_diag.watching.live.linear_calls import capture_linear, replace_functions


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None = None,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False, use_beta_sigmoid_in_kernel: bool = False, state_v_first: bool = False,
    cu_seqlens: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As fla's, recurrent in float64."""
    del use_qk_l2norm_in_kernel, cu_seqlens
    if use_gate_in_kernel:
        rate, bias = kwargs["A_log"].double().exp()[:, None], kwargs["dt_bias"].double().view(g.shape[2:])
        g = -rate * torch.nn.functional.softplus(g.double() + bias)
    beta = beta.double().sigmoid() if use_beta_sigmoid_in_kernel else beta
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    if initial_state is not None:
        given["initial_state"] = initial_state.mT if state_v_first else initial_state
    o, state = recurrent(given, scale=q.shape[3] ** -0.5 if scale is None else scale)
    state = state.mT if state_v_first else state
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
        fla.chunk_kda(**inputs("kda"), reverse=True)
        with pytest.raises(TypeError, match="beta"):
            fla.chunk_kda(*[inputs("kda")[n] for n in "qkvg"])
    assert not calls
    assert "a reversed sequence" in capsys.readouterr().err
    assert sum(calls.refused.values()) == 1


def test_gates_that_a_kernel_makes_are_made_for_the_capture(fla: Any) -> None:
    x, make = inputs("kda"), torch.Generator().manual_seed(0)
    x["g"] = torch.randn(x["g"].shape, generator=make).bfloat16().requires_grad_()
    x["beta"] = torch.randn(x["beta"].shape, generator=make).bfloat16().requires_grad_()
    given = {"A_log": torch.rand(2, generator=make) - 4, "dt_bias": torch.randn(32, generator=make) - 2}
    state = (torch.randn(1, 2, 16, 16, generator=make) * 0.3).requires_grad_()
    switches = dict.fromkeys(("use_gate_in_kernel", "use_beta_sigmoid_in_kernel", "state_v_first"), True)
    with capture_linear() as calls:
        o, last = fla.chunk_kda(**x, **given, **switches, initial_state=state, output_final_state=True)
        (o.float().square().sum() + last.square().sum()).backward()
    (call,) = calls
    assert {"dq", "dk", "dv", "dinitial_state", "final_state"} <= set(call.tensors)
    # What autograd has is the gradient of what went into the gates.
    assert not {"dg", "dbeta"} & set(call.tensors)
    found = attn_diag.inspect_linear(call)
    assert found.labels == {"clean"}, found.report()


@pytest.mark.parametrize("in_16_bits", [True, False])
def test_mamba2_of_transformers_is_met_with_its_skip_and_its_steps(
    in_16_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    scan, make = inspect.unwrap(module.mamba2_chunk_scan), torch.Generator().manual_seed(0)

    @functools.wraps(scan)
    def whole(x: Tensor, dt: Tensor, *rest: Any, **kwargs: Any) -> Any:
        """As a kernel, which makes dt in fp32."""
        return scan(x, dt.float(), *rest, **kwargs)

    monkeypatch.setattr(module, "mamba2_chunk_scan", scan if in_16_bits else whole)
    x, b, c = (torch.randn(1, 96, h, 16, generator=make).bfloat16().requires_grad_() for h in (4, 2, 2))
    dt, bias = (torch.randn(1, 96, 4, generator=make) - 2).bfloat16().requires_grad_(), torch.randn(4, generator=make)
    with capture_linear() as calls:
        o, last = module.mamba2_chunk_scan(
            x,
            dt,
            -torch.rand(4, generator=make),
            b,
            c,
            32,
            D=torch.ones(4),
            dt_bias=bias,
            dt_softplus=True,
            dt_limit=(0.0, 0.5),
            return_final_states=True,
        )
        (o.square().sum() + last.square().sum()).backward()
    (call,) = calls
    assert {"D", "dq", "dk", "dv", "final_state", "dfinal_state"} <= set(call.tensors)
    assert "ddt" not in call.tensors
    assert call.tensors["dt"].max() == 0.5
    found = attn_diag.inspect_linear(call)
    assert found.labels <= {"clean", "undecided"}, found.report()
    # In fp32 to the last digits, with either dt: the right one was taken.
    forward = [q for head in found.heads for q in head.quantities if not q.quantity.startswith("d")]
    assert all(q.relative_error is not None and q.relative_error < 1e-6 for q in forward)


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


def test_a_state_that_the_call_writes_into_is_captured_as_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def mine(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor) -> tuple[Tensor, Tensor]:
        x = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
        o, state = recurrent(x, scale=q.shape[3] ** -0.5)
        return o.to(v.dtype), initial_state.copy_(state)

    here = sys.modules[__name__]
    monkeypatch.setattr(here, "mine", mine, raising=False)
    given = {n: t.detach() for n, t in inputs("kda").items()}
    with torch.no_grad(), capture_linear(functions={"kda": mine}) as calls:
        vars(here)["mine"](**given, initial_state=torch.randn(1, 2, 16, 16, generator=torch.Generator().manual_seed(0)))
    assert attn_diag.inspect_linear(calls[0]).labels == {"clean"}


def test_two_that_watch_end_in_any_order(fla: Any) -> None:
    function = fla.chunk_kda
    for going, recorded in ended_in_either_order(replace_functions, lambda: fla.chunk_kda(**inputs("kda"))):
        assert recorded == going
        assert (fla.chunk_kda is function) == (not going)


def test_a_call_that_a_cuda_graph_records_has_no_numbers_yet(fla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attn_diag.watching.live.linear_records.in_cuda_graph", lambda: True)
    with capture_linear() as calls:
        fla.chunk_kda(**inputs("kda"))
    assert not calls


@pytest.mark.parametrize("used", [True, False])
def test_the_gradient_of_a_state_that_o_is_made_of_is_that_of_what_follows(
    used: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mine(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        o, state = recurrent({"q": q, "k": k, "v": v, "g": g, "beta": beta}, scale=q.shape[3] ** -0.5)
        return o.to(v.dtype), state

    here = sys.modules[__name__]
    monkeypatch.setattr(here, "mine", mine, raising=False)
    with capture_linear(functions={"kda": mine}) as calls:
        o, state = vars(here)["mine"](**inputs("kda"))
        (o.square().sum() + state.sum() if used else o.square().sum()).backward()
    assert ("dfinal_state" in calls[0].tensors) == used
    assert attn_diag.inspect_linear(calls[0]).labels == {"clean"}


@pytest.mark.gpu
@pytest.mark.parametrize("operator", ["rwkv7", "kda", "gla"])
def test_released_kernels_are_not_wrong(operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_configuration(monkeypatch.setattr)
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
