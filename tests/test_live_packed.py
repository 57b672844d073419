"""Packed kernels of a running model: torch's varlen_attn and flash_attn's, captured and monitored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_varlen
import pytest
import torch
from builders import some
from tiny_models import only
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.head.read import read_head
from attn_diag.reference import reference_head
from attn_diag.watching.live.call import AttentionCall, CallPlace
from attn_diag.watching.monitoring.rows import measure_rows
from attn_diag.watching.monitoring.sample import Sample

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the compiler
PACKAGES = {"torch varlen_attn": foreign_varlen.torch_varlen, "flash_attn 2": foreign_varlen.flash_attn}
# torch 2.11's varlen_attn has none of these.
LATER = {"enable_gqa", "seqused_k"} - set(inspect.signature(varlen_attn).parameters)
HEADS, DIM, LENGTHS = 4, 16, (50, 7, 71)
ENDS = torch.tensor([0, 50, 57, 128], dtype=torch.int32)


def turned(q: Tensor) -> Tensor:
    """A rotary embedding whose positions begin again with every document."""
    at = torch.cat([torch.arange(n) for n in LENGTHS])[:, None]
    angles = at * 100.0 ** -(torch.arange(DIM // 2) / (DIM // 2))
    cos, sin = (t.repeat(1, 2)[:, None] for t in (angles.cos(), angles.sin()))
    half = torch.cat([-q[..., DIM // 2 :], q[..., : DIM // 2]], -1)
    return (q.float() * cos + half.float() * sin).to(q.dtype)


class Attention(nn.Module):
    """Projections around a kernel that takes [total, H, D]."""

    def __init__(self, function: Callable[..., Any], options: dict[str, Any], key_heads: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(32, HEADS * DIM)
        self.kv = nn.Linear(32, 2 * key_heads * DIM)
        self.out = nn.Linear(HEADS * DIM, 32)
        self.rotary = options.pop("rotary", False)
        self.function, self.options = function, options

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (-1, DIM))
        q = turned(q) if self.rotary else q
        k, v = (t.unflatten(-1, (-1, DIM)) for t in self.kv(x).chunk(2, -1))
        o: Tensor = self.function(q, k, v, ends, ends, 71, **self.options)
        return self.out(o.flatten(-2))  # type: ignore[no-any-return]


def made(function: Callable[..., Any], *, key_heads: int = HEADS, **options: Any) -> tuple[Attention, Tensor]:
    torch.manual_seed(0)
    return Attention(function, options, key_heads).bfloat16(), torch.randn(128, 32).bfloat16()


def step(run: Callable[..., Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    o = run(x, ENDS)
    weights = torch.randn(o.shape, generator=torch.Generator().manual_seed(9))
    torch.autograd.backward((o.float() * weights).sum())
    return [o.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "grouped": {"causal": True, "key_heads": 2},
    "window": {"window": (9, 0)},
    "rotary": {"causal": True, "rotary": True},
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PACKAGES)
def test_what_ran_is_captured(name: str, case: str, compiled: bool, tmp_path: Path) -> None:
    if name == "torch varlen_attn" and case == "grouped" and LATER:
        pytest.skip("this torch's varlen_attn has no grouped heads")
    torch._dynamo.reset()
    with PACKAGES[name]() as function:
        model, x = made(function, **CASES[case])
        assert model.rotary == (case == "rotary")
        # What inductor writes calls the same operators, and takes ten times as long to make.
        run = torch.compile(model, backend="inductor" if case == "rotary" else "aot_eager") if compiled else model
        expected = step(run, model, x)
        with attn_diag.capture(model, tmp_path) as recorder:
            found = step(run, model, x)
        capture = only(recorder)
    torch._dynamo.reset()
    assert all(map(torch.equal, found, expected))
    assert capture.metadata.kernel == name
    assert [capture.lengths(b) for b in range(capture.batch)] == [(n, n) for n in LENGTHS]
    assert {"lse", "do", "dq", "dk", "dv", "x", "w_q"} <= capture.tensors.keys()
    assert capture.metadata.causal == ("bottom-right" if "causal" in CASES[case] else "none")
    assert capture.metadata.window == (CASES[case].get("window"))
    diagnosis = attn_diag.inspect_captures([capture], device="cpu").captures[0]
    assert diagnosis.assumptions.ok
    labels = {h.verdict.labels for h in diagnosis.observations[0].heads if h.verdict is not None}
    assert labels <= {("clean",), ("undecided",)}, labels
    heads = diagnosis.observations[0].heads
    assert all(h.propagation.dw_q is not None for h in heads), heads[0].propagation.notes


@pytest.mark.parametrize("name", PACKAGES)
def test_pages_and_lengths_in_use_are_refused(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    q, k, v = (torch.randn(128, HEADS, DIM) for _ in range(3))
    used = torch.tensor([40, 7, 60])
    with PACKAGES[name](), attn_diag.capture(None, tmp_path) as recorder:
        if name == "flash_attn 2":
            torch.ops.flash_attn._flash_attn_varlen_forward(
                q, k, v, ENDS, ENDS, 71, 71, 0.0, 0.25, True, seqused_k=used
            )
        elif LATER:
            pytest.skip("this torch's varlen_attn has no lengths in use")
        else:
            varlen_attn(q, k, v, ENDS, ENDS, 71, 71, seqused_k=used)
    assert not recorder.written
    assert "packed or paged sequences are not captured yet (seqused_k)" in caplog.text


def test_a_monitor_sees_documents_apart() -> None:
    """Healthy: no alarm, and the figures are those of a batch with the documents as its items."""
    with foreign_varlen.torch_varlen() as function:
        model, x = made(function, causal=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with attn_diag.Monitor(model, every=1) as monitor:
            for _ in range(4):
                step(model, model, x)
                optimizer.step()
    assert len(monitor.history) == 4
    assert not monitor.alarms


def call(causal: str = "bottom-right", **more: Any) -> AttentionCall:
    g = torch.Generator().manual_seed(0)
    q, k, v, o, do = (torch.randn(1, 2, 12, 8, generator=g) for _ in range(5))
    return AttentionCall(CallPlace(0, 0, "", 0, True), "some", q=q, k=k, v=v, o=o, do=do, causal=causal, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [12, 5])
@pytest.mark.parametrize("window", [None, (2, 1)])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
def test_sampled_rows_see_their_own_document(causal: str, window: Any, rows: int) -> None:
    """Also where a document is empty, has more keys than rows, and where there is padding."""
    ends = torch.tensor([0, 4, 4, 9]), torch.tensor([0, 5, 5, 11])
    packed = call(causal, window=window, cu_seqlens_q=ends[0], cu_seqlens_k=ends[1])
    sample = Sample.of(packed, rows=rows)
    found = measure_rows(sample, 0, slice(0, 2))
    capture = packed.capture()
    assert isinstance(capture, Capture)
    expected = torch.full((2, 12), -torch.inf, dtype=torch.float64)
    for b, (start, stop) in enumerate(((0, 4), (4, 9))):
        for head in range(2):
            expected[head, start:stop] = reference_head(read_head(capture, b, head, torch.device("cpu")).head).lse
    picked = expected[:, (2 * torch.arange(rows) + 1) * 12 // (2 * rows)]
    assert torch.equal(found.sees_key, picked.isfinite())
    torch.testing.assert_close(found.lse[found.sees_key], picked[found.sees_key], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flex_attention"])
def test_a_llama_by_the_flattening_collator(implementation: str, tmp_path: Path) -> None:
    """transformers hides other documents by a mask then, which is captured; FlexAttention has no backward on a CPU."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    lengths = (30, 9, 57)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=implementation).bfloat16()
    ids = [{"input_ids": torch.randint(64, (n,)).tolist()} for n in lengths]
    batch = transformers.DataCollatorWithFlattening()(ids)
    learns = implementation != "flex_attention"
    with attn_diag.capture(model, tmp_path) as recorder, torch.set_grad_enabled(learns):
        loss = model(**batch, use_cache=False).loss
        if learns:
            loss.backward()
    capture = only(recorder)
    mask = capture.tensors["mask"][...]
    seen = mask if mask.dtype == torch.bool else mask > -1e4
    assert int(seen.sum()) == sum(n * (n + 1) // 2 for n in lengths)
    diagnosis = attn_diag.inspect_captures([capture], device="cpu").captures[0]
    assert diagnosis.assumptions.ok
    labels = {h.verdict.labels for h in diagnosis.observations[0].heads if h.verdict is not None}
    assert labels <= {("clean",), ("undecided",)}, labels
    # The same as documents: no other O, LSE or gradient is expected of them.
    ends = torch.tensor([0, 30, 39, 96])
    tensors = {n: t[...] for n, t in capture.tensors.items() if n != "mask"}
    apart = Capture.from_tensors({**tensors, "cu_seqlens": ends}, causal="top-left", scale=capture.metadata.scale)
    found = attn_diag.inspect_captures([apart], device="cpu").captures[0]
    assert found.assumptions.ok
    assert (found.shape["B"], found.observations[0].heads[0].rows_all) == (3, 96)
    dq = [c.observations[0].heads[0].propagation.dq for c in (diagnosis, found)]
    assert not learns or abs(some(some(dq[0]).relative_error) - some(some(dq[1]).relative_error)) < 1e-12


class Jagged(nn.Module):
    """Attention over jagged nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(32, HEADS * DIM) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (project(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2) for project in self.projections)
        return nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("fault", ["none", "scale", "gradient"])
def test_jagged_nested_tensors_are_packed(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    math = torch._scaled_dot_product_attention_math

    def other(*args: Any, scale: float | None = None) -> Any:
        o, probs = math(*args, scale=0.3 if fault == "scale" else scale)
        return (o.detach() + (o - o.detach()) * 0.5 if fault == "gradient" else o), probs

    if fault != "none":
        monkeypatch.setattr(torch, "_scaled_dot_product_attention_math", other)
    torch.manual_seed(0)
    model = Jagged().bfloat16()
    x = torch.nested.nested_tensor([torch.randn(n, 32).bfloat16() for n in LENGTHS], layout=torch.jagged)

    def trained() -> list[Tensor]:
        model.zero_grad()
        o = model(x).values()
        (o.float() * torch.linspace(-1, 1, o.numel()).sin().view_as(o)).sum().backward()
        return [o.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = trained()
    with attn_diag.capture(model, tmp_path) as recorder:
        found = trained()
    assert all(map(torch.equal, found, expected))
    capture = only(recorder)
    assert [capture.lengths(b) for b in range(capture.batch)] == [(n, n) for n in LENGTHS]
    assert {"do", "dq", "dk", "dv"} <= capture.tensors.keys()
    diagnosis = attn_diag.inspect_captures([capture], device="cpu").captures[0]
    assert diagnosis.assumptions.ok == (fault != "scale")
    labels = {label for h in diagnosis.observations[0].heads if h.verdict for label in h.verdict.labels}
    assert ("wrong" in labels) == (fault == "gradient"), labels
