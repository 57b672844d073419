"""A stand-in for FlashInfer 0.7: the signatures of prefill.py and decode.py, and what plan() leaves on a wrapper."""

# ruff: noqa: ARG001, ARG002 - what a signature has, not all of which is looked at

from __future__ import annotations

import math
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Results = Tensor | tuple[Tensor, Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, plan: Any) -> tuple[Tensor, Tensor]:
    """O [T, Hq, D], rounded once, and the LSE [T, Hq] with base 2, of one sequence."""
    group = q.shape[1] // k.shape[1]
    a, b, c = (t.double().transpose(0, 1) for t in (q, *(t.repeat_interleave(group, 1) for t in (k, v))))
    s = a @ b.mT * (plan._sm_scale or q.shape[2] ** -0.5)
    s = plan._logits_soft_cap * torch.tanh(s / plan._logits_soft_cap) if plan._logits_soft_cap else s
    position, key = torch.arange(s.shape[1])[:, None] + s.shape[2] - s.shape[1], torch.arange(s.shape[2])
    if plan._causal:
        s = s.masked_fill(key > position, -math.inf)
    if plan._window_left >= 0:
        s = s.masked_fill(key < position - plan._window_left, -math.inf)
    o = (s.softmax(-1) @ c).transpose(0, 1).to(q.dtype)
    return o, (torch.logsumexp(s, -1) / math.log(2)).float().T


class _Wrapper:
    _kv_layout, _jit_module, _custom_mask_buf = "NHD", None, None
    _causal, _window_left, _pos_encoding_mode = False, -1, "NONE"
    _logits_soft_cap: float | None = None
    _sm_scale: float | None = None
    _qo_indptr_buf: Any = None
    _kv_indptr_buf: Any = None

    def __init__(self, layout: str = "NHD") -> None:
        self._kv_layout = layout

    def _run(self, q: Tensor, rows: Tensor, keys: list[tuple[Tensor, Tensor]], **options: Any) -> Results:
        parts = [attend(q[a:b], *kv, self) for (a, b), kv in zip(pairwise(rows.tolist()), keys, strict=True)]
        o, lse = (torch.cat(part) for part in zip(*parts, strict=True))
        lse = lse * math.log(2) if options.get("lse_base") == "ln" else lse
        lse = lse.T.contiguous() if options.get("lse_layout") == "HN" else lse
        return (o, lse) if options["return_lse"] else o

    def _keys(self, cache: Any) -> list[tuple[Tensor, Tensor]]:
        k, v = cache if isinstance(cache, tuple) else cache.unbind(1)
        if self._kv_layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
        found = []
        for (a, b), last in zip(pairwise(self._paged_kv_indptr_buf), self._paged_kv_last_page_len_buf, strict=True):
            pages = self._paged_kv_indices_buf[a:b].long()
            n = (len(pages) - 1) * k.shape[1] + int(last)
            found.append((k[pages].flatten(0, 1)[:n], v[pages].flatten(0, 1)[:n]))
        return found

    def plan(self, indptr: Tensor, indices: Tensor, last: Tensor, rows: Tensor | None = None, **options: Any) -> None:
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = indptr, indices
        self._paged_kv_last_page_len_buf, self._qo_indptr_buf = last, rows
        for name, value in options.items():
            setattr(self, f"_{name}", value)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def run(
        self, q: Tensor, paged_kv_cache: Any, *args: Any, q_scale: Any = None, k_scale: Any = None,
        v_scale: Any = None, out: Any = None, lse: Any = None, return_lse: bool = False, lse_base: str = "log2",
        lse_layout: str = "NH", window_left: int | None = None, sinks: Any = None, kv_cache_sf: Any = None,
    ) -> Results:  # fmt: skip
        keys = self._keys(paged_kv_cache)
        return self._run(q, self._qo_indptr_buf, keys, return_lse=return_lse, lse_base=lse_base, lse_layout=lse_layout)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def run(
        self, q: Tensor, paged_kv_cache: Any, *args: Any, q_scale: Any = None, k_scale: Any = None,
        v_scale: Any = None, out: Any = None, lse: Any = None, return_lse: bool = False,
        window_left: int | None = None, sinks: Any = None, q_len_per_req: int | None = None,
    ) -> Results:  # fmt: skip
        keys = self._keys(paged_kv_cache)
        return self._run(q, torch.arange(len(keys) + 1), keys, return_lse=return_lse)


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *args: Any, q_scale: Any = None, k_scale: Any = None,
        v_scale: Any = None, out: Any = None, lse: Any = None, return_lse: bool = False, lse_base: str = "log2",
        lse_layout: str = "NH",
    ) -> Results:  # fmt: skip
        keys = [(k[a:b], v[a:b]) for a, b in pairwise(self._kv_indptr_buf.tolist())]
        return self._run(q, self._qo_indptr_buf, keys, return_lse=return_lse, lse_base=lse_base, lse_layout=lse_layout)


def single_prefill_with_kv_cache(
    q: Tensor, k: Tensor, v: Tensor, scale_q: Any = None, scale_k: Any = None, scale_v: Any = None,
    custom_mask: Any = None, packed_custom_mask: Any = None, causal: bool = False, kv_layout: str = "NHD",
    pos_encoding_mode: str = "NONE", sm_scale: float | None = None, window_left: int = -1,
    logits_soft_cap: float | None = None, return_lse: bool = False,
) -> Results:  # fmt: skip
    plan = _Wrapper()
    plan._causal, plan._window_left, plan._logits_soft_cap, plan._sm_scale = (
        causal,
        window_left,
        logits_soft_cap,
        sm_scale,
    )
    k, v = (t.transpose(0, 1) if kv_layout == "HND" else t for t in (k, v))
    o, lse = attend(q, k, v, plan)
    return (o, lse) if return_lse else o


def single_decode_with_kv_cache(q: Tensor, k: Tensor, v: Tensor, kv_layout: str = "NHD", **options: Any) -> Results:
    o = single_prefill_with_kv_cache(q[None], k, v, kv_layout=kv_layout, **options)
    return (o[0][0], o[1][0]) if isinstance(o, tuple) else o[0]


def installed(monkeypatch: Any) -> ModuleType:
    """The package as sys.modules has it, with everything under its own name in ``flashinfer`` too."""
    package = ModuleType("flashinfer")
    for name in ("prefill", "decode"):
        module = ModuleType(f"flashinfer.{name}")
        for thing in (
            BatchPrefillWithPagedKVCacheWrapper,
            BatchDecodeWithPagedKVCacheWrapper,
            BatchPrefillWithRaggedKVCacheWrapper,
            single_prefill_with_kv_cache,
            single_decode_with_kv_cache,
        ):
            if name in thing.__name__.lower():
                vars(module)[thing.__name__] = vars(package)[thing.__name__] = thing
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    return package
