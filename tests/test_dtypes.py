"""Dtype drift: the line at which a tensor became wider, and the attention calls whose q, k and v differ by it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from autocast_models import BF16, FP32, TimeMix, halves
from builders import some
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from attn_diag import DtypeDrift, InputError, check_qkv, trace_dtypes
from attn_diag.watching.drift.trace import DtypeTrace

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture
def model() -> TimeMix:
    torch.manual_seed(0)
    return TimeMix()


# The RWKV-7 case.


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_line_that_promotes_k(model: TimeMix, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype), trace_dtypes() as trace:
        q, k, v = model(torch.randn(2, 8, 64))
        F.scaled_dot_product_attention(q, k, v)
    (event,) = trace.findings
    assert (event.kind, event.severity, event.reaches) == ("widened", "mixed", ("k",))
    assert (event.operation, event.result) == ("Tensor.addcmul", "float32")
    assert event.source is not None
    lines, start = inspect.getsourcelines(TimeMix)
    (line,) = (number for number, text in enumerate(lines, start) if "# the line" in text)
    assert (event.source.file, event.source.line) == (inspect.getsourcefile(TimeMix), line)
    assert [o.name for o in event.operands] == ["k", None, "self.k_a"]
    half = str(dtype).removeprefix("torch.")
    assert event.fix == f"Cast to {half} first: self.k_a.to(k.dtype)."
    assert trace.cause(k) == event
    assert trace.cause(q) != event

    (call,) = trace.result().mixed_calls
    assert call.dtypes == {"q": half, "k": "float32", "v": half}
    assert (call.differing, call.expected, call.outcome, call.regime) == (("k",), half, "autocast", half)
    assert [step.operation for step in call.paths["k"]] == ["Tensor.addcmul", "Tensor.view", "Tensor.transpose"]
    assert trace.path(k) == call.paths["k"]
    assert call.causes["k"] == (event,)
    assert "self.k_a.to(k.dtype)" in call.fix
    assert "k = k.to(q.dtype)" in call.fix
    with pytest.raises(InputError, match=r"(?s)k: float32.*Tensor.addcmul.*autocast_models.py:.*Cast to .*self.k_a"):
        check_qkv(q, k, v, trace)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_fix_leaves_nothing_to_find(model: TimeMix, dtype: torch.dtype) -> None:
    model.cast = True
    with torch.autocast("cpu", dtype), trace_dtypes() as trace:
        q, k, v = model(torch.randn(2, 8, 64))
        check_qkv(q, k, v)
        F.scaled_dot_product_attention(q, k, v)
    found = trace.result()
    assert (found.findings, found.calls, found.labels, found.attention_calls) == ((), (), frozenset(), 2)
    assert found.summary == ("q, k and v share one dtype in each of 2 attention calls.",)


# Other ways in which q, k and v come to differ. Each changes them and says: severity, kind, operation, what it reaches.

Change = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def qk_norm_of_q(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return normed(q.float()), k, v


def qk_norm_with_fp32_weight(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.ones(16) * normed(q.float()).to(q.dtype), k, v


def rotary(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    angle = torch.arange(8.0)[:, None] * torch.logspace(0, -1, 16)
    cos, sin = angle.cos(), angle.sin()

    def turned(x: Tensor) -> Tensor:
        half = torch.cat([-x[..., 8:], x[..., :8]], -1)
        return x * cos + half * sin

    return turned(q), turned(k), v


def wide_cache(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cache = torch.zeros(1, 2, 4, 16)
    return q, torch.cat([cache, k], 2), torch.cat([cache, v], 2)


def complex_rotary(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    turn = torch.polar(torch.ones(8, 8), torch.randn(8, 8))
    return torch.view_as_real(torch.view_as_complex(q.float().view(1, 2, 8, 8, 2)) * turn).flatten(-2), k, v


CASES: dict[str, tuple[Change, str, str, tuple[str, ...]]] = {
    "QK-norm of q": (qk_norm_of_q, "cast", "Tensor.float", ("q",)),
    "QK-norm with an fp32 weight": (qk_norm_with_fp32_weight, "widened", "Tensor.mul", ("q",)),
    "rotary": (rotary, "widened", "Tensor.mul", ("q", "k")),
    "one-element buffer": (lambda q, k, v: (q * torch.tensor([0.125]), k, v), "widened", "Tensor.mul", ("q",)),
    "asked for": (lambda q, k, v: (q, k, v.float()), "cast", "Tensor.float", ("v",)),
    "by policy": (lambda q, k, v: (F.avg_pool3d(q, 1), k, v), "policy", "avg_pool3d", ("q",)),
    "where": (lambda q, k, v: (q, torch.where(k > 0, k, torch.zeros(16)), v), "widened", "where", ("k",)),
    "wide cache": (wide_cache, "widened", "cat", ("k", "v")),
    "complex rotary": (complex_rotary, "cast", "Tensor.float", ("q",)),
}


@pytest.mark.parametrize("case", CASES)
def test_what_mixes_q_k_and_v(case: str) -> None:
    """``differing`` are those that changed, also where they are two of three; and none, once they are cast back."""
    change, kind, operation, reaches = CASES[case]
    q, k, v = halves()
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        F.scaled_dot_product_attention(*change(q, k, v))
    (call,) = trace.result().mixed_calls
    assert call.differing == reaches
    for name in reaches:
        cause = call.causes[name][0]
        assert (cause.kind, cause.operation, cause.severity) == (kind, operation, "mixed")
        lines, start = inspect.getsourcelines(change)
        assert some(cause.source).line in range(start, start + len(lines))
        assert call.paths[name][0].operation == operation
    # A rotary embedding promotes twice: by cos, and by sin.
    assert all(len(call.causes[name]) == (2 if change is rotary else 1) for name in reaches)
    assert {e.severity for e in trace.findings} == {"mixed"}
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        q, k, v = (x.to(BF16) for x in change(q, k, v))
        F.scaled_dot_product_attention(q, k, v)
    # Promoted all the same, where nothing was asked for, it reaches nothing.
    assert trace.result().labels == ({"elsewhere"} if kind == "widened" else set())


def test_a_cache_in_another_dtype_that_is_written_in_place() -> None:
    """The cache keeps its dtype: nothing is promoted, but q differs from it; where the cache was made is named."""
    q, k, v = halves()
    with trace_dtypes() as trace:
        cache = torch.zeros(2, 1, 2, 8, 16, dtype=torch.float16)
        cache[0, :, :, :8], cache[1, :, :, :8] = k, v
        with pytest.raises(RuntimeError, match="dtype"):
            F.scaled_dot_product_attention(q, cache[0], cache[1])
    (call,) = trace.result().calls
    assert (call.dtypes["q"], call.dtypes["k"], call.outcome) == ("bfloat16", "float16", "raised")
    assert call.paths["k"][0].operation == "zeros"
    assert trace.findings == ()


def test_a_rotary_embedding_applied_to_all_three_is_no_mix_but_wide() -> None:
    q, k, v = halves()
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        cos = torch.ones(16)
        F.scaled_dot_product_attention(q * cos, k * cos, v * cos)
    found = trace.result()
    assert found.labels == {"alike"}
    assert [e.reaches for e in found.findings] == [("q",), ("k",), ("v",)]
    (call,) = found.calls
    assert (call.differing, call.expected) == ((), "bfloat16")


def test_an_fp32_model_without_autocast_is_clean() -> None:
    q, k, v = halves(FP32)
    with trace_dtypes() as trace:
        F.scaled_dot_product_attention(q * 2, k, v)
    assert trace.result().labels == frozenset()
    assert trace.result().attention_calls == 1


def test_residuals_are_told_from_what_reaches_attention(model: TimeMix) -> None:
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        x = torch.randn(2, 8, 64)
        x = x + model.r(x)
        q, k, v = model(x)
        F.scaled_dot_product_attention(q, k, v)
    assert [(e.operation, e.severity, e.reaches) for e in trace.findings] == [
        ("Tensor.addcmul", "mixed", ("k",)),
        ("Tensor.add", "elsewhere", ()),
    ]


# What is no finding.


def quiet(work: Callable[[Tensor, Tensor], object]) -> DtypeDrift:
    half, wide = torch.ones(4, 4, dtype=BF16), torch.ones(4, 4)
    with trace_dtypes() as trace:
        work(half, wide)
    assert trace._history.operations
    return trace.result()


Work = Callable[[Tensor, Tensor], object]
KEEPING: dict[str, Work] = {
    "0-dimensional": lambda half, _: half * torch.tensor(2.0),
    "number": lambda half, _: half * 2.5,
    "infinity": lambda half, _: half.masked_fill(half > 0, float("-inf")),
    "in place": lambda half, wide: (half.add_(half), half.mul_(torch.tensor(0.5)), wide.add_(half)),
    "copy_": lambda half, wide: wide.copy_(half),
    "setitem": lambda half, _: half.__setitem__(0, half[0]) or half + half,  # type: ignore[func-returns-value]
    "compared in place": lambda half, wide: half.gt_(wide),
    "out=": lambda half, wide: torch.add(half, half, out=wide),
    "integers": lambda half, _: half * torch.arange(4),
    "bools": lambda half, _: half * torch.ones(4, dtype=torch.bool),
    "index": lambda half, _: half[torch.arange(2)],
    "lists": lambda half, _: torch.stack([half, half]).chunk(2),
    "casts to the same": lambda half, wide: (half.to(BF16), wide.float()),
}
PROMOTING: dict[str, Work] = {
    "mul": lambda half, wide: half * wide,
    "cat": lambda half, wide: torch.cat([half, wide]),
    "stack": lambda half, wide: torch.stack([half, wide]),
    "where": lambda half, wide: torch.where(half > 0, half, wide),
    "lerp": lambda half, wide: torch.lerp(half.float(), wide, 0.5) + half,
    "two halves": lambda half, _: half + half.half(),
    "one element": lambda half, _: half * torch.tensor([2.0]),
    "views": lambda half, wide: half[:, :2].T * wide[:2],
}


@pytest.mark.parametrize("work", KEEPING.values(), ids=KEEPING)
def test_what_changes_no_dtype_is_no_event(work: Work) -> None:
    found = quiet(work)
    assert found.findings == found.by_design == ()


@pytest.mark.parametrize("work", PROMOTING.values(), ids=PROMOTING)
def test_promotion_is_one_finding(work: Work) -> None:
    """With promotion in each call: the test above can fail."""
    (event,) = quiet(work).findings
    assert (event.kind, event.result, event.count) == ("widened", "float32", 1)
    assert event.fix


def test_regions_without_autocast_have_no_regime() -> None:
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        x = torch.randn(4, 8)
        narrow = F.linear(x, torch.randn(8, 8))
        with torch.autocast("cpu", enabled=False):
            F.linear(x, torch.randn(8, 8))
            narrow * x[:, :8]
        narrow * x[:, :8]
    assert [e.regime for e in trace.findings] == [None, "bfloat16"]
    assert [(e.operation, e.kind, e.regime) for e in trace.result().by_design] == [("linear", "policy", "bfloat16")]


def test_numbers_and_tensors_at_one_line() -> None:
    """What one call of a line showed is not taken for another's whose operands are 0-dimensional."""
    with trace_dtypes() as trace:
        for half in (torch.ones((), dtype=BF16), torch.ones(4, dtype=BF16)):
            assert (half * torch.ones(4)).dtype == FP32
    assert [e.count for e in trace.findings] == [1]


def test_devices_without_autocast_are_followed() -> None:
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        on_meta = torch.ones(4, device="meta", dtype=BF16) * torch.ones(4, device="meta")
        on_cpu = torch.ones(4, dtype=BF16) * torch.ones(4)
    assert on_meta.dtype == on_cpu.dtype == FP32
    assert [e.regime for e in trace.findings] == [None, "bfloat16"]


def test_named_where_the_user_sees_them(model: TimeMix) -> None:
    """A variable, else an attribute of one, also of a module inside a module."""
    outer, parameter = nn.Sequential(nn.Identity(), model), model.k_a
    with trace_dtypes() as trace:
        half = torch.ones(64, dtype=BF16)
        half * parameter
        del parameter
        half * model.k_a
        del model
        half * outer[1].get_parameter("k_a")
    assert [e.operands[0].name for e in trace.findings] == ["half", "half", "half"]
    assert [e.operands[1].name for e in trace.findings] == ["parameter", "model.k_a", "outer.1.k_a"]
    made = some(trace.findings[0].operands[0].made)
    assert made.text.startswith("half = torch.ones")


def test_equal_code_in_two_files() -> None:
    """Code objects compare equal whatever file they come from; their lines must not be taken for one another's."""
    code = "def promote(x, y):\n    return x * y"
    half, wide = torch.ones(4, dtype=BF16), torch.ones(4)
    with trace_dtypes() as trace:
        for file in ("one.py", "two.py"):
            names: dict[str, Any] = {}
            exec(compile(code, file, "exec"), names)
            names["promote"](half, wide)
    assert [e.source.file for e in trace.findings if e.source] == ["one.py", "two.py"]


def test_compiled_functions_run_eagerly_and_are_named() -> None:
    """Under the trace a compiled model is seen, and said to be; after it, it runs compiled as before."""

    @torch.compile(backend="eager", fullgraph=True)
    def drifting(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k * torch.ones(16), v)

    q, k, v = halves()
    with torch.autocast("cpu", BF16):
        compiled = drifting(q, k, v)
        with trace_dtypes() as trace:
            drifting(q, k, v)
        frames = torch._dynamo.utils.counters["frames"]["ok"]
        assert torch.equal(drifting(q, k, v), compiled)
        assert torch._dynamo.utils.counters["frames"]["ok"] == frames, "compiled again"
    found = trace.result()
    assert [name.split(".")[-1] for name in found.compiled] == ["drifting"]
    assert any("run eagerly" in sentence for sentence in found.summary)
    assert found.mixed_calls[0].causes["k"][0].operation == "Tensor.mul"


def test_what_is_kept_from_the_compiler_is_not_said_to_be_compiled() -> None:
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def kernel(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    @torch.compile(backend="eager")
    def around(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result: Tensor = kernel(q, k, v)
        return result

    q, k, v = halves()
    with trace_dtypes() as trace:
        kernel(q, k, v)
    assert trace.result().compiled == ()
    with trace_dtypes() as trace:
        around(q, k, v)
    assert [name.split(".")[-1] for name in trace.result().compiled] == ["around"]


def test_compiled_modules_are_named(model: TimeMix) -> None:
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        torch.compile(model, backend="eager")(torch.randn(2, 8, 64))
    assert trace.result().compiled == ("TimeMix.forward",)
    assert [e.operation for e in trace.findings] == ["Tensor.addcmul"]


def test_repeated_calls_are_counted_and_read_back(model: TimeMix) -> None:
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        for _ in range(3):
            F.scaled_dot_product_attention(*model(torch.randn(2, 8, 64)))
    found = trace.result()
    assert [e.count for e in found.findings] == [c.count for c in found.calls] == [3]
    assert DtypeDrift.from_json(found.to_json()) == found
    assert "addcmul" in trace._repr_html_()
    assert "0 operations" in repr(DtypeTrace())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_on_a_gpu(model: TimeMix, dtype: torch.dtype) -> None:
    """The addcmul line; and layer_norm, which autocast computes in fp32 there: a QK-norm of q alone is a mixed call."""
    model, x = model.cuda(), torch.randn(2, 8, 64, device="cuda")

    def forward(norm: bool) -> Tensor:
        q, k, v = model(x)
        k = k if not norm else k.to(q.dtype)
        return F.scaled_dot_product_attention(F.layer_norm(q, (16,)) if norm else q, k, v)

    with torch.autocast("cuda", dtype):
        plain = forward(norm=False)
        with trace_dtypes() as trace:
            assert torch.equal(forward(norm=False), plain)
        (call,) = trace.result().mixed_calls
        assert (call.differing, call.causes["k"][0].operation) == (("k",), "Tensor.addcmul")
        with trace_dtypes() as trace:
            forward(norm=True)
        (call,) = trace.result().mixed_calls
        assert call.differing == ("q",)
        assert [(c.operation, c.kind) for c in call.causes["q"]] == [("layer_norm", "policy")]
