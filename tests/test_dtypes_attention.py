"""Which calls a trace of dtypes takes for attention, and ``check_qkv``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from autocast_models import BF16, FP32, TimeMix, halves
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention.flex_attention import flex_attention

from attn_diag import InputError, check_qkv, trace_dtypes
from attn_diag.watching.drift.calls import is_attention


@pytest.fixture
def model() -> TimeMix:
    torch.manual_seed(0)
    return TimeMix()


@pytest.mark.filterwarnings("ignore")
def test_eager_and_compiled_flex_attention() -> None:
    q, k, v = (torch.randn(1, 1, 128, 16) for _ in range(3))
    plain = flex_attention(q, k, v)
    with trace_dtypes() as trace:
        assert torch.equal(flex_attention(q, k, v), plain)
        assert trace.result().compiled == ()
        assert torch.equal(torch.compile(flex_attention, backend="eager")(q, k, v), plain)
        assert trace.result().attention_calls == 2
        flex_attention(q, k * torch.ones(16, dtype=torch.float64), v)
    (call,) = trace.result().calls
    assert call.differing == ("k",)


@torch.library.custom_op("attn_diag_test::_flash_attn_forward", mutates_args=())
def flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return q * scale + k + v, q.sum(-1)


class Flash(torch.autograd.Function):
    """As FlashAttention's: no torch function, with an operator inside."""

    @staticmethod
    def forward(_ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch.ops.attn_diag_test._flash_attn_forward(q, k, v, 1.0)[0]


class Chunk(torch.autograd.Function):
    """As the Triton kernels of flash-linear-attention: an assertion inside, and nothing that a trace could see."""

    @staticmethod
    def forward(_ctx: Any, r: Tensor, k: Tensor, v: Tensor) -> Any:
        assert r.dtype == k.dtype == v.dtype, "r, k and v should have one dtype"
        return v.clone()


def test_an_operator_behind_an_autograd_function() -> None:
    q, k, v = halves()
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        Flash.apply(q, k * torch.ones(16), v)  # type: ignore[no-untyped-call]
    (call,) = trace.result().mixed_calls
    assert (call.differing, call.outcome) == (("k",), "accepted")
    assert "_flash_attn_forward" in call.operation
    assert call.causes["k"][0].operation == "Tensor.mul"


@torch.library.custom_op("attn_diag_test::paged_attention", mutates_args={"out"})
def paged_attention(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> None:
    out.copy_(q + k + v)


@pytest.mark.parametrize(
    "attend",
    [paged_attention, torch.ops.attn_diag_test.paged_attention, torch.ops.attn_diag_test.paged_attention.default],
    ids=["custom_op", "packet", "overload"],
)
def test_an_operator_that_writes_what_it_makes_into_an_argument(attend: Any) -> None:
    q, k, v = (torch.randn(1, 2, 4, 8, dtype=d) for d in (BF16, FP32, BF16))
    with trace_dtypes() as trace:
        attend(torch.empty_like(q), q, k, v)
        attend(k=k, q=q, v=v, out=torch.empty_like(q))
    found = trace.result()
    assert found.attention_calls == 2
    # Not q, which stands where k would without the output before them.
    assert [call.differing for call in found.calls] == [("k",), ("k",)]


def test_a_kernel_that_asserts_is_found_by_its_traceback() -> None:
    q, k, v = halves()
    with pytest.raises(AssertionError), torch.autocast("cpu", BF16), trace_dtypes() as trace:
        Chunk.apply(q, k * torch.ones(16), v)  # type: ignore[no-untyped-call]
    (call,) = trace.result().mixed_calls
    assert (call.differing, call.outcome, call.operation) == (("k",), "raised", "Chunk.forward")
    assert call.causes["k"][0].operation == "Tensor.mul"
    assert "AssertionError" in str(trace.result().error)
    with pytest.raises(ZeroDivisionError), trace_dtypes() as trace:
        Chunk.apply(q, k, 1 / 0)  # type: ignore[no-untyped-call]
    assert trace.result().calls == ()


class Recurrence(torch.autograd.Function):
    """As RWKV's kernels: no name of attention, the receptance behind the decay, and nothing that a trace could see."""

    @staticmethod
    def forward(ctx: Any, w: Tensor, r: Tensor, k: Tensor, v: Tensor) -> Any:
        ctx.save_for_backward(w, r, k, v)
        return v.clone()

    @staticmethod
    def backward(ctx: Any, *_gradients: Any) -> Any:
        return ctx.saved_tensors


class Cast(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=BF16)  # type: ignore[untyped-decorator]
    def forward(_ctx: Any, Q: Tensor, K: Tensor, V: Tensor) -> Any:
        return Q * K * V


bound_before: Any = Recurrence.apply


def test_a_forward_of_q_k_and_v_is_attention_whatever_its_name() -> None:
    q, k, v = halves()
    before = vars(Recurrence)["forward"]
    with torch.autocast("cpu", BF16), trace_dtypes() as outer, trace_dtypes() as trace:

        class Late(torch.autograd.Function):
            @staticmethod
            def forward(_ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Any:
                return query * key * value

        wide = k * torch.ones(16)
        bound_before(wide, q, wide, v)
        bound_before(wide, q, k, v)
        Late.apply(wide, k, v)  # type: ignore[no-untyped-call]
        Cast.apply(q, wide, v)  # type: ignore[no-untyped-call]
    assert vars(Recurrence)["forward"] is before
    assert Late.forward(None, q, k, v) is not None
    for found in outer.result(), trace.result():
        assert found.attention_calls == 3
        assert [(c.operation.split(".")[-2], c.differing, c.outcome) for c in found.calls] == [
            ("Recurrence", ("k",), "accepted"),
            ("Late", ("q",), "accepted"),
        ]
        assert found.calls[0].causes["k"][0].operation == "Tensor.mul"
    Late.apply(wide, k, v)  # type: ignore[no-untyped-call]
    assert trace.result().attention_calls == 3


def test_gradients_of_a_forward_that_is_met_are_its_own() -> None:
    given = [torch.randn(2, 3).requires_grad_() for _ in range(4)]
    with trace_dtypes():
        made = torch.autograd.grad(bound_before(*given).sum(), given)
    assert all(torch.equal(g, x) for g, x in zip(made, given, strict=True))


def test_a_call_that_raises_is_noted_once() -> None:
    """Seen as it is called, it is not found a second time in the traceback, where q, k and v are variables too."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v)

    q, k, v = halves()
    with pytest.raises(RuntimeError, match="dtype"), trace_dtypes() as trace:
        attend(q, k * torch.ones(16), v)
    assert [(c.differing, c.outcome, c.count) for c in trace.result().calls] == [(("k",), "raised", 1)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("scaled_dot_product_attention", True),
        ("_flash_attn_varlen_forward", True),
        ("sdpa_kernel_forward", True),
        ("_scaled_dot_product_flash_attention_backward", False),
        ("multi_head_attention_forward", False),
        ("softmax", False),
    ],
)
def test_names_of_attention(name: str, expected: bool) -> None:
    def func() -> None: ...

    func.__name__ = name
    assert is_attention(func) is expected


@pytest.mark.parametrize("cache", [False, True], ids=["without cache", "with cache"])
def test_transformers_attention_is_followed(cache: bool) -> None:
    """A Llama under autocast: fp32 cos and sin promote q and k. An empty fp32 cache promotes v too, so none differs."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama

    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation="sdpa",
    )  # fmt: skip
    llama, tokens = transformers.LlamaForCausalLM(config).eval(), torch.arange(8)[None]
    with torch.no_grad(), torch.autocast("cpu", BF16), trace_dtypes() as trace:
        llama(tokens, use_cache=cache)
    found = trace.result()
    assert found.attention_calls == 2
    (call,) = found.calls
    assert call.count == 2
    assert call.differing == (() if cache else ("q", "k"))
    for name, by in (("q", ["q", "cos", None, "sin"]), ("k", ["k", "cos", None, "sin"])):
        causes = call.causes[name]
        assert [o.name for c in causes for o in c.operands] == by
        for cause in causes:
            assert (cause.operation, cause.kind) == ("Tensor.mul", "widened")
            assert cause.source is not None
            assert cause.source.file == modeling_llama.__file__
            assert cause.source.function == "apply_rotary_pos_emb"
    assert [c.operation for c in call.causes["v"]] == (["cat"] if cache else ["linear"])
    assert "cos.to(q.dtype)" in call.fix


def test_check_qkv_without_a_trace() -> None:
    q, k, v = (torch.ones(1, 1, 2, 4, dtype=d) for d in (torch.float16, FP32, torch.float16))
    with pytest.raises(InputError, match=r"got q: float16, k: float32, v: float16\. Cast k \(k.to\(q.dtype\)\)"):
        check_qkv(q, k, v)
    with pytest.raises(InputError, match=r"Cast q and k \(q.to\(v.dtype\), k.to\(v.dtype\)\)"):
        check_qkv(k, k, v)
    check_qkv(q, q, v)
    with pytest.raises(InputError, match="floating-point"):
        check_qkv(q.long(), k, v)
    with pytest.raises(InputError, match="one device, got q: cpu, k: meta"):
        check_qkv(q, q.to("meta"), v)


def test_check_qkv_knows_the_trace_around_it(model: TimeMix) -> None:
    with torch.autocast("cpu", BF16), trace_dtypes() as trace:
        q, k, v = model(torch.randn(2, 8, 64))
        with pytest.raises(InputError, match=r"(?s)Tensor.addcmul.*k = k.addcmul.*self.k_a.to\(k.dtype\)"):
            check_qkv(q, k, v)
    (call,) = trace.result().mixed_calls
    assert (call.operation, call.outcome, call.differing) == ("check_qkv", "raised", ("k",))


def test_check_qkv_breaks_no_graph() -> None:
    @torch.compile(backend="eager", fullgraph=True)
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        check_qkv(q, k, v)
        return F.scaled_dot_product_attention(q, k, v)

    q, k, v = halves()
    assert torch.equal(attend(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_what_torchscript_made_is_not_said_to_be_older_than_the_trace() -> None:
    def widen(x: Tensor) -> Tensor:
        return x.float() * 2

    scripted: Any = torch.jit.script(widen)
    x = torch.ones(1, 4, 8, dtype=torch.bfloat16)
    with trace_dtypes() as trace, pytest.raises(InputError):
        check_qkv(x, scripted(x), x)
    assert "k is float32, and was so before the trace began, or was made where it cannot see" in trace.report(200)
    assert "TorchScript" in trace.report(200)
