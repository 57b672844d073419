"""Packed kernels as they are seen from Python, with their operators' own schemas; plain torch inside, by document."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from foreign_kernels import FA2_PACKED, Given, attend, backward, modules, operators
from torch import Tensor

# flash_attn 2.7.0 to 2.8.4: flash_attn/flash_attn_interface.py
FA2_PACKED_BACKWARD = (
    "(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(a6!)? dq, Tensor(a7!)? dk, "
    "Tensor(a8!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left, SymInt window_size_right, "
    "float softcap, Tensor? alibi_slopes, bool deterministic, Tensor? rng_state=None, bool zero_tensors=False) "
    "-> Tensor"
)


def documents(ends_q: Tensor, ends_k: Tensor) -> Iterator[tuple[slice, slice]]:
    for i in range(len(ends_q) - 1):
        rows, keys = (slice(int(ends[i]), int(ends[i + 1])) for ends in (ends_q, ends_k))
        if rows.stop > rows.start and keys.stop > keys.start:
            yield rows, keys


def packed_forward(q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, **options: Any) -> Any:
    """O [T, H, D] and LSE [H, T] of documents [T, H, D]; padding is NaN, as what nobody writes may be."""
    o, lse = torch.full_like(q, torch.nan), q.new_full((q.shape[1], q.shape[0]), torch.nan, dtype=torch.float32)
    for rows, keys in documents(ends_q, ends_k):
        out, log, _, _ = attend(q[None, rows], k[None, keys], v[None, keys], **_own(options, rows, ends_q))
        o[rows], lse[:, rows] = out[0], log[0]
    return o, lse


def packed_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, ends_q: Tensor, ends_k: Tensor, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.zeros_like(t) for t in (q, k, v))
    for rows, keys in documents(ends_q, ends_k):
        own = _own(options, rows, ends_q)
        found = backward(
            do[None, rows], q[None, rows], k[None, keys], v[None, keys], o[None, rows], lse[None, :, rows], **own
        )
        dq[rows], dk[keys], dv[keys] = (t[0] for t in found)
    return dq, dk, dv


def _own(options: Given, rows: slice, ends: Tensor) -> Given:
    """With the slopes of one document, where each has its own."""
    slopes = options.get("slopes")
    if slopes is None or slopes.dim() == 1:
        return options
    return {**options, "slopes": slopes[int((ends[:-1] == rows.start).nonzero()[-1])]}


def _options(a: Given, causal: bool) -> Given:
    scale = a.get("softmax_scale") or a.get("scale") or a["q" if "q" in a else "query"].shape[-1] ** -0.5
    left, right = (-1 if a[f"window_size_{side}"] is None else a[f"window_size_{side}"] for side in ("left", "right"))
    return {
        "scale": scale,
        "causal": "bottom-right" if causal else "none",
        "softcap": a.get("softcap", 0.0),
        "left": left,
        "right": right,
        "slopes": a.get("alibi_slopes"),
    }


def _fa2_forward(a: Given) -> Any:
    ends = a["cu_seqlens_q"], a["cu_seqlens_k"]
    o, lse = packed_forward(a["q"], a["k"], a["v"], *ends, **_options(a, a["causal"]))
    return o, lse, o.new_empty(0), torch.zeros(2, dtype=torch.int64)


def _fa2_backward(a: Given) -> Tensor:
    given = [a[n] for n in ("dout", "q", "k", "v", "out", "softmax_lse", "cu_seqlens_q", "cu_seqlens_k")]
    for name, grad in zip(("dq", "dk", "dv"), packed_backward(*given, **_options(a, a["causal"])), strict=True):
        a[name].copy_(grad)
    return torch.zeros_like(a["softmax_lse"])


def _fake(a: Given) -> Any:
    q = a["q"]
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(0), q.new_empty(2, dtype=torch.int64)


class FlashAttnVarlen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends_q: Tensor, ends_k: Tensor, *options: Any) -> Any:
        ctx.options = options
        longest, causal, window, slopes = options
        o, lse, _, _ = torch.ops.flash_attn._flash_attn_varlen_forward(
            q, k, v, ends_q, ends_k, longest, longest, 0.0, q.shape[-1] ** -0.5, causal, *window, alibi_slopes=slopes
        )
        ctx.save_for_backward(q, k, v, o, lse, ends_q, ends_k)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        q, k, v, o, lse, ends_q, ends_k = ctx.saved_tensors
        longest, causal, window, slopes = ctx.options
        grads = [torch.empty_like(t) for t in (q, k, v)]
        torch.ops.flash_attn._flash_attn_varlen_backward(
            do, q, k, v, o, lse, *grads, ends_q, ends_k, longest, longest, 0.0, q.shape[-1] ** -0.5, causal, *window,
            0.0, slopes, False,
        )  # fmt: skip
        return *grads, *(None,) * 6


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, longest: int, *,
    causal: bool = False, window: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
) -> Any:  # fmt: skip
    return FlashAttnVarlen.apply(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, causal, window, alibi_slopes)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def flash_attn() -> Iterator[Callable[..., Any]]:
    defined = {
        "_flash_attn_varlen_forward": (FA2_PACKED, _fa2_forward, _fake),
        "_flash_attn_varlen_backward": (
            FA2_PACKED_BACKWARD,
            _fa2_backward,
            lambda a: torch.empty_like(a["softmax_lse"]),
        ),
    }
    content = {"flash_attn_varlen_func": flash_attn_varlen_func}
    with operators("flash_attn", **defined), modules(flash_attn={}, flash_attn__flash_attn_interface=content):
        yield flash_attn_varlen_func


def _torch_forward(a: Given) -> Any:
    given = [a[n] for n in ("query", "key", "value", "cum_seq_q", "cum_seq_k")]
    o, lse = packed_forward(*given, **_options(a, a["is_causal"]))
    return o, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros(0, dtype=torch.uint64), o.new_empty(0)


def _torch_backward(a: Given) -> Any:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k")
    return packed_backward(*(a[n] for n in names), **_options(a, a["is_causal"]))


def _varlen_attn(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, longest: int, *,
    causal: bool = False, window: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    window = (-1, 0) if causal and window == (-1, -1) else window
    grouped: dict[str, Any] = {} if q.shape[1] == k.shape[1] else {"enable_gqa": True}
    return varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_k, longest, longest, window_size=window, **grouped)


@contextlib.contextmanager
def torch_varlen() -> Iterator[Callable[..., Any]]:
    """torch's own function and operator, around a kernel of the CPU where it has one for GPUs alone."""
    schemas = {
        name: str(torch._C._get_schema(f"aten::{name}", "")).removeprefix(f"aten::{name}")
        for name in ("_flash_attention_forward", "_flash_attention_backward")
    }
    kernels = {"_flash_attention_forward": _torch_forward, "_flash_attention_backward": _torch_backward}
    with operators("aten", **{name: (schemas[name], kernels[name], kernels[name]) for name in kernels}):
        yield _varlen_attn
