"""Decoding models: flash_attn_with_kvcache on pages, and transformers' generate, are captured and never wrong."""

from __future__ import annotations

import importlib
import sys
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any

import foreign_varlen
import pytest
import torch
from foreign_kernels import Given, operators
from planted_pages import KV_HEADS, Cache, D, drawn
from tiny_models import tokens, transformers_model, written
from torch import Tensor, nn

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.watching.live.paged_calls import without_pages
from attn_diag.watching.live.unseen import ENGINES


def flash_attn_with_kvcache(  # the signature of flash_attn 2.8: flash_attn/flash_attn_interface.py
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Any = None, rotary_sin: Any = None, cache_seqlens: Any = None, cache_batch_idx: Any = None,
    cache_leftpad: Any = None, block_table: Tensor | None = None, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    rotary_interleaved: bool = True, alibi_slopes: Any = None, num_splits: int = 0, return_softmax_lse: bool = False,
) -> Any:  # fmt: skip
    """Correctly rounded, with new keys put into the cache."""
    del rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad, window_size, softcap, rotary_interleaved
    del alibi_slopes, num_splits, softmax_scale
    assert causal
    assert block_table is not None
    size, lengths = k_cache.shape[1], cache_seqlens.tolist()
    if k is not None and v is not None:
        for b, n in enumerate(lengths):
            for i in range(k.shape[1]):
                page, at = divmod(n + i, size)
                k_cache[block_table[b, page], at], v_cache[block_table[b, page], at] = k[b, i], v[b, i]
            lengths[b] = n + k.shape[1]
    table = [row[: -(-n // size)].tolist() for row, n in zip(block_table, lengths, strict=True)]
    found = Cache(q.transpose(1, 2), k_cache, v_cache, table, lengths).outputs()
    o = found["o"].transpose(1, 2)
    return (o, found["lse"]) if return_softmax_lse else o


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    package, inner = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for module in (package, inner):
        vars(module)["flash_attn_with_kvcache"] = flash_attn_with_kvcache
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


class Decoder(nn.Module):
    """One layer that decodes by the package's function."""

    def __init__(self, package: ModuleType, cache: Cache, **options: Any) -> None:
        super().__init__()
        self.package, self.cache, self.options = package, cache, options

    def forward(self, q: Tensor) -> Any:
        t = self.cache.tensors()
        return self.package.flash_attn_with_kvcache(
            q, self.cache.k, self.cache.v, cache_seqlens=t["cache_seqlens"], block_table=t["page_table"], causal=True,
            **self.options,
        )  # fmt: skip


def captured(model: nn.Module, q: Tensor, folder: Path, **options: Any) -> list[Capture]:
    with attn_diag.capture(model, folder, batch=None, **options) as recorder, torch.no_grad():
        model(q)
    assert not recorder.dropped
    return written(recorder)


@pytest.mark.parametrize("new", [False, True])
def test_kvcache_is_captured_as_sequences_of_their_own(new: bool, flash_attn: ModuleType, tmp_path: Path) -> None:
    cache = drawn(rows=3, lengths=(37, 90, 5, 61))
    more: dict[str, Any] = {"return_softmax_lse": True}
    if new:
        g = torch.Generator().manual_seed(5)
        more |= {n: torch.randn(4, 2, KV_HEADS, D, generator=g).bfloat16() for n in ("k", "v")}
    (c,) = captured(Decoder(flash_attn, cache, **more), cache.q.transpose(1, 2), tmp_path)
    assert [c.lengths(b) for b in range(4)] == [(3, n + 2 * new) for n in (37, 90, 5, 61)]
    assert c.metadata.causal == "bottom-right"
    assert c.metadata.kernel == "flash_attn 2 kvcache"
    assert "lse" in c.tensors
    diagnosis = attn_diag.inspect_captures([c], device="cpu").captures[0]
    assert diagnosis.assumptions.ok
    for head in diagnosis.observations[0].heads:
        assert head.verdict is None or {"wrong", "lossy", "biased"}.isdisjoint(head.verdict.labels)


def test_heads_and_a_monitor(flash_attn: ModuleType, tmp_path: Path) -> None:
    cache = drawn(lengths=(37, 90, 5))
    model = Decoder(flash_attn, cache)
    (c,) = captured(model, cache.q.transpose(1, 2), tmp_path, heads=[2])
    assert (c.q_heads, c.kv_heads, c.batch) == (2, 1, 3)
    with attn_diag.Monitor(model, every=1) as monitor, torch.no_grad():
        for _ in range(3):
            model(cache.q.transpose(1, 2))
    assert monitor.metrics(wait=True)["attn/nonfinite_rate/max"] == 0
    assert not monitor.alarms


def test_what_is_not_captured_is_refused_by_name(flash_attn: ModuleType, tmp_path: Path) -> None:
    cache = drawn(lengths=(37, 90, 5))
    model = Decoder(flash_attn, cache, rotary_cos=torch.ones(1))
    with attn_diag.capture(model, tmp_path) as recorder, torch.no_grad():
        model(cache.q.transpose(1, 2))
    assert "a cache with rotary_cos is not captured" in str(recorder.dropped)


def test_the_words_of_flash_attn_3_and_vllm() -> None:
    cache = drawn(rows=2, lengths=(37, 90, 5))
    t = cache.tensors()
    given = {"q": t["q"].transpose(1, 2), "k": t["k"], "v": t["v"], "page_table": t["page_table"],
             "seqused_k": t["cache_seqlens"]}  # fmt: skip
    found = without_pages(given)
    assert found["cu_seqlens_k"].tolist() == [0, 37, 127, 132]
    assert found["cu_seqlens_q"].tolist() == [0, 2, 4, 6]
    keys = torch.cat([t["k"][pages].flatten(0, 1)[:n] for pages, n in zip(cache.table, cache.lengths, strict=True)])
    assert torch.equal(found["k"], keys)
    packed = {**given, "q": found["q"], "cu_seqlens_q": found["cu_seqlens_q"], "block_table": given["page_table"]}
    assert not without_pages(packed)["rows_apart"]
    bad = without_pages({**given, "page_table": torch.full((3, 7), -1)})
    assert "names pages that are not there" in bad["refused"]
    assert "seqused_q" in without_pages({**given, "seqused_q": t["cache_seqlens"]})["refused"]
    assert without_pages({"q": t["q"], "k": t["k"], "v": t["v"]}) == {}


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_of_transformers_is_captured_and_never_wrong(cache: str | None, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tiny = transformers_model("llama", "sdpa")
    model: Any = tiny.model.to(torch.bfloat16).eval()
    with attn_diag.capture(model, tmp_path, batch=None) as recorder, torch.no_grad():
        model.generate(tokens(), max_new_tokens=3, min_new_tokens=3, do_sample=False, cache_implementation=cache,
                       pad_token_id=0)  # fmt: skip
    captures = written(recorder)
    assert len(captures) == 6
    assert not recorder.dropped
    for diagnosis in attn_diag.inspect_captures(captures, device="cpu").captures:
        assert diagnosis.assumptions.ok
        for head in diagnosis.observations[0].heads:
            assert head.verdict is None or {"wrong", "lossy", "biased"}.isdisjoint(head.verdict.labels)


# sgl-kernel of SGLang: csrc/flash_extension.cc, without defaults.
SGLANG = (
    "(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "float? softmax_scale, bool is_causal, int window_size_left, int window_size_right, int attention_chunk, "
    "float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, "
    "int sm_margin, Tensor? sinks) -> (Tensor(a!), Tensor, Tensor, Tensor)"
)


def _decoded(a: Given) -> Any:
    """[total, Hq, D] and LSE [Hq, total] of rows that end with each cache's last keys; also chunks of a prefill."""
    ends, size = a["cu_seqlens_q"].tolist(), a["k"].shape[1]
    o, lse = torch.empty_like(a["q"]), torch.empty(a["q"].shape[1], len(a["q"]))
    for b, length in enumerate(a["seqused_k"].tolist()):
        own, pages = slice(ends[b], ends[b + 1]), a["page_table"][b, : -(-length // size)].tolist()
        q = a["q"][own].transpose(0, 1)[None]
        found = Cache(q, a["k"], a["v"], [pages], [length]).outputs()
        o[own], lse[:, own] = found["o"][0].transpose(0, 1), found["lse"][0]
    return o, lse, o.new_empty(0), o.new_empty(0)


def sglang(cache: Cache, chunks: list[int], **options: Any) -> Any:
    """As flash_attn_with_kvcache of sgl_kernel calls it: so many new rows of each sequence, one after the other."""
    t = cache.tensors()
    q = torch.cat([t["q"][b, :, -n:].transpose(0, 1) for b, n in enumerate(chunks)])
    given = {
        "cu_seqlens_q": torch.tensor([0, *accumulate(chunks)], dtype=torch.int32), "seqused_k": t["cache_seqlens"],
        "page_table": t["page_table"].clamp(0, len(t["k"]) - 1), "max_seqlen_q": max(chunks), "softmax_scale": D**-0.5,
        "is_causal": True, "window_size_left": -1, "window_size_right": -1, "attention_chunk": 0, "softcap": 0.0,
        "is_rotary_interleaved": False, "num_splits": 0, "sm_margin": 0,
    }  # fmt: skip
    names = [part.strip().split()[1] for part in SGLANG[1 : SGLANG.index(") ->")].split(",")]
    values = {"q": q, "k": t["k"], "v": t["v"], **given, **options}
    return torch.ops.sgl_kernel.fwd(*(values.get(name) for name in names))


@pytest.mark.parametrize("chunks", [[1, 1, 1], [7, 1, 12]], ids=["decode", "chunked prefill"])
def test_sglangs_flash_attn_3_is_met(chunks: list[int], tmp_path: Path) -> None:
    cache = drawn(rows=12, lengths=(37, 90, 15))
    there = operators("sgl_kernel", fwd=(SGLANG, _decoded, _decoded))
    with there, attn_diag.capture(None, tmp_path, batch=None) as recorder, torch.no_grad():
        sglang(cache, chunks)
    (c,) = written(recorder)
    assert c.metadata.kernel == "SGLang flash_attn 3"
    assert c.metadata.causal == "bottom-right"
    assert [c.lengths(b) for b in range(3)] == list(zip(chunks, (37, 90, 15), strict=True))
    diagnosis = attn_diag.inspect_captures([c], device="cpu").captures[0]
    assert diagnosis.assumptions.ok
    answers = {q.quantity: q.answer for q in diagnosis.observations[0].heads[0].quantities}
    assert answers["lse"] == "good"
    for head in diagnosis.observations[0].heads:
        assert head.verdict is None or {"wrong", "lossy", "biased"}.isdisjoint(head.verdict.labels)


REFUSED_OF_SGLANG: dict[str, tuple[dict[str, Any], str]] = {
    "sinks": ({"sinks": torch.zeros(4)}, "sinks of SGLang's flash_attn 3 not supported"),
    "q_v": ({"q_v": torch.zeros(3, 4, D)}, "q_v not supported"),
    "descale": ({"k_descale": torch.ones(3, KV_HEADS)}, "k_descale not supported"),
    "chunks": ({"attention_chunk": 64}, "attention_chunk not supported"),
}


@pytest.mark.parametrize("case", REFUSED_OF_SGLANG)
def test_what_sglang_may_ask_for_is_refused_by_name(case: str, tmp_path: Path) -> None:
    options, words = REFUSED_OF_SGLANG[case]
    there = operators("sgl_kernel", fwd=(SGLANG, _decoded, _decoded))
    with there, attn_diag.capture(None, tmp_path) as recorder, torch.no_grad():
        sglang(drawn(lengths=(37, 90, 15)), [1, 1, 1], **options)
    assert words in str(recorder.dropped)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_whose_calls_are_not_met_is_named(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, ModuleType(name))
    with attn_diag.capture(nn.Linear(3, 3), tmp_path):
        pass
    assert ENGINES[name] in caplog.text


def test_a_shared_prefix_is_two_calls_each_right_by_itself(tmp_path: Path) -> None:
    """Cascade attention: every row over the prefix, all keys seen, and its own keys, merged by LSE afterwards."""
    importlib.import_module("torch.nn.attention.varlen")  # which registers its operator
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, n, D, generator=g).bfloat16() for n in (6, 90, 90))
    watching = attn_diag.capture(None, tmp_path, batch=None, calls=None)
    with foreign_varlen.torch_varlen() as attend, watching as recorder:
        rows = q[0].transpose(0, 1)
        for keys, causal in ((slice(0, 64), False), (slice(64, 90), True)):
            ends = [torch.tensor([0, n], dtype=torch.int32) for n in (6, keys.stop - keys.start)]
            own = (t[0, :, keys].transpose(0, 1).contiguous() for t in (k, v))
            attend(rows, *own, *ends, 64, causal=causal)
    prefix, suffix = written(recorder)
    assert (prefix.metadata.causal, prefix.lengths(0)) == ("none", (6, 64))
    assert (suffix.metadata.causal, suffix.lengths(0)) == ("bottom-right", (6, 26))
    for diagnosis in attn_diag.inspect_captures([prefix, suffix], device="cpu").captures:
        assert diagnosis.assumptions.ok
        for head in diagnosis.observations[0].heads:
            assert head.verdict is None or "wrong" not in head.verdict.labels
