"""Heads measured side by side are what each of them is alone: figures, verdicts, and every sentence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from builders import some
from test_fused_inspect import differences
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from attn_diag.analyses.inspection import groups, joint, pooling
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.head import head_stack, key_gradients, signed_errors
from attn_diag.head.measure import measure_heads
from attn_diag.head.quality import QuantitySample, samples
from attn_diag.reference import certificate
from attn_diag.results.diagnosis import BiasEstimate, Diagnosis
from attn_diag.statistics.means import BiasCase, estimate_biases

HEADS = 5


def taken(seed: int, spoil: Callable[[dict[str, Tensor]], object], *, batch: int = 1, dtype: torch.dtype) -> Capture:
    """Heads of different kinds: N(0,1), peaked, nearly uniform, a repeated maximum, V of one sign."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(batch, HEADS, 40, 16, generator=generator) for _ in range(4))
    q[:, 1], q[:, 2], k[:, 3, 9] = 8 * q[:, 1], q[:, 2] / 50, k[:, 3, 5]
    v[:, 4], v[:, 2] = v[:, 4].abs(), v[:, 2] + 1
    inputs = {"q": q, "k": k, "v": v, "do": do}
    tensors = {name: t.to(dtype) for name, t in inputs.items()}
    spoil(tensors)
    exact = [tensors[name].double().requires_grad_() for name in "qkv"]
    out = scaled_dot_product_attention(exact[0], exact[1], exact[2], is_causal=True)
    dq, dk, dv = torch.autograd.grad(out, exact, tensors["do"].double())
    outputs = {"o": out.detach(), "dq": dq, "dk": dk, "dv": dv}
    tensors |= {name: t.to(dtype) for name, t in outputs.items()}
    scores = exact[0].detach() @ exact[1].detach().mT / 4
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1)
    tensors["lse"] = scores.masked_fill(hidden, -torch.inf).logsumexp(-1).float()
    return Capture.from_tensors(tensors, causal="top-left", scale=0.25)


def without_gradients(tensors: dict[str, Tensor]) -> None:
    tensors["do"][0, 1, 20:] = 0
    tensors["do"][0, 3] = 0


def shared_prompt(tensors: dict[str, Tensor]) -> None:
    for name in "qkv":
        tensors[name][1, :, :25] = tensors[name][0, :, :25]


def wrong_in_some() -> Capture:
    found = taken(3, lambda _: None, dtype=torch.bfloat16)
    o, dq, lse = (found.tensors[name][:].clone() for name in ("o", "dq", "lse"))
    o[0, 1, 7] *= 1.5
    o[0, 2, 3, 4] = torch.nan
    dq[0, 4, :, 3] = 0
    dq[0, 0] *= 1.02
    lse[0, 3, 11] += 1
    return Capture.from_tensors({**found.tensors, "o": o, "dq": dq, "lse": lse}, causal="top-left", scale=0.25)


CAPTURES: dict[str, Callable[[], Capture]] = {
    "healthy": lambda: taken(0, lambda _: None, dtype=torch.bfloat16),
    "fp16": lambda: taken(1, lambda _: None, dtype=torch.float16),
    "fp32": lambda: taken(2, lambda _: None, dtype=torch.float32),
    "wrong in some": wrong_in_some,
    "rows without a gradient": lambda: taken(4, without_gradients, dtype=torch.bfloat16),
    "a shared prompt": lambda: taken(5, shared_prompt, batch=2, dtype=torch.bfloat16),
    "nan in some": lambda: taken(6, lambda t: t["q"][0, 1, 3].fill_(torch.nan), dtype=torch.bfloat16),
}


def inspected(capture: Capture, at_once: int, monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    monkeypatch.setattr(groups, "_heads_at_once", lambda *_: at_once)
    monkeypatch.setattr(joint, "key_heads_at_once", lambda *_: at_once)
    return inspect_captures([capture], device="cpu")


@pytest.mark.parametrize("name", CAPTURES)
def test_heads_side_by_side_are_what_they_are_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = CAPTURES[name]()
    alone = inspected(capture, 1, monkeypatch)
    assert not differences(alone, inspected(capture, 2 * HEADS, monkeypatch), 1e-10, drawn=False)


def of_the_next(values: Tensor) -> Tensor:
    return values.roll(1, 0)


def of_the_next_key_head(*arguments: Any, **options: Any) -> list[QuantitySample]:
    found = samples(*arguments, **options)
    return found[1:] + found[:1]


MIXED_UP: dict[str, tuple[object, str, Callable[..., object]]] = {
    "sums of squares": (signed_errors, "inner", lambda a, b: of_the_next((a * b).flatten(1).sum(1))),
    "rows": (head_stack, "stacked", lambda tensors: of_the_next(torch.stack(list(tensors)))),
    "keys": (key_gradients, "samples", of_the_next_key_head),
    "bounds": (certificate, "upper_norm", lambda x, dim: of_the_next(torch.linalg.vector_norm(x, dim=dim))),
}


@pytest.mark.parametrize("name", MIXED_UP)
def test_heads_that_are_mixed_up_show(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    capture = CAPTURES["healthy"]()
    alone = inspected(capture, 1, monkeypatch)
    monkeypatch.setattr(*MIXED_UP[name])
    found = inspected(capture, HEADS, monkeypatch).to_json(), alone.to_json()
    assert found[0] != found[1]


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def test_more_heads_take_hardly_more_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU's host takes about as long for an operation on one head as for one on all: those of one head alone, as its
    comparison with other kernels where rows are few, are not to be most of them."""
    found = taken(5, lambda _: None, dtype=torch.bfloat16)
    kept = {name: t for name, t in found.tensors.items() if name not in ("dk", "dv")}
    counts: list[int] = []

    def counted(*arguments: Any) -> Any:
        with Counted() as operations:
            result = measure_heads(*arguments)
        counts.append(operations.count)
        return result

    monkeypatch.setattr(joint, "measure_heads", counted)
    monkeypatch.setattr(groups, "_heads_at_once", lambda *_: HEADS)
    for heads in ([0, 1], range(HEADS)):
        some = {name: t[:, list(heads)] for name, t in kept.items()}
        inspect_captures([replace(found, tensors=some)], device="cpu")
    two, five = counts
    assert five < 1.5 * two


@pytest.mark.parametrize(("free", "cached", "expected"), [(80, 0, 256), (10, 0, 119), (8, 2, 119), (0.1, 0, 16)])
def test_as_many_heads_at_once_as_half_of_the_free_memory_of_a_gpu_holds(
    free: float, cached: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.zeros(1, 1, 1024, 64, dtype=torch.bfloat16)
    one = Capture.from_tensors({"q": q, "k": q, "v": q, "o": q}, causal="top-left")
    sizes = {"mem_get_info": (int(free * 1e9), 0), "memory_reserved": int(1e9 + cached * 1e9)}
    for name, size in (sizes | {"memory_allocated": int(1e9)}).items():
        monkeypatch.setattr(torch.cuda, name, lambda _, size=size: size)
    assert groups.jobs_at_once(one, torch.device("cuda")) == expected


def test_means_of_key_heads_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = list[int]()

    def counted(cases: Sequence[BiasCase], level: float) -> list[BiasEstimate]:
        sizes.append(len(cases))
        return estimate_biases(cases, level)

    monkeypatch.setattr(pooling, "estimate_biases", counted)
    found = inspect_captures([taken(5, lambda _: None, dtype=torch.bfloat16)], device="cpu").captures[0].observations[0]
    assert sizes == [2 * HEADS]
    means = {some(estimate).mean for head in found.kv_heads for estimate in (head.bias.dk, head.bias.dv)}
    assert len(means) == 2 * HEADS
