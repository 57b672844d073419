"""Packages whose attention kernels are Python functions, with their own signatures; plain torch inside."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from foreign_kernels import Given, backward, forward, modules
from torch import Tensor


# FlashAttention-4 4.0.0b36 (flash_attn/cute/interface.py): Python functions, which torch cannot trace.
def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, qv: Any = None, cu_seqlens_q: Any = None, softmax_scale: float | None = None,
    causal: bool = False, softcap: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None, learnable_sink: Any = None, score_mod: Any = None, return_lse: bool = False,
    out: Any = None, lse: Any = None,
) -> Any:  # fmt: skip
    del qv, score_mod, return_lse, out
    torch._dynamo.graph_break()
    if cu_seqlens_q is not None:
        return torch.zeros_like(q), None, None, None, None
    o, lse = forward(q, k, v, **_cute(q, softmax_scale, causal, softcap, window_size_left, window_size_right))
    if learnable_sink is not None:  # its LSE has the sink in it
        keys, lse = lse, torch.logaddexp(lse, learnable_sink.float()[:, None])
        o = (o.float() * (keys - lse).exp().transpose(1, 2)[..., None]).to(o.dtype)
    return o, lse, None, None, None


def _flash_attn_bwd(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor, softmax_scale: float | None = None,
    causal: bool = False, softcap: float = 0.0, window_size_left: int | None = None,
    window_size_right: int | None = None, dq: Any = None, dk: Any = None, dv: Any = None, dlse: Any = None,
    learnable_sink: Any = None,
) -> Any:  # fmt: skip
    del dq, dk, dv, dlse, learnable_sink
    torch._dynamo.graph_break()
    options = _cute(q, softmax_scale, causal, softcap, window_size_left, window_size_right)
    return backward(dout, q, k, v, out, lse, **options)


def _cute(q: Tensor, scale: float | None, causal: bool, softcap: float | None, *window: int | None) -> Given:
    left, right = (-1 if end is None else end for end in window)
    options = {"scale": scale or q.shape[-1] ** -0.5, "causal": "bottom-right" if causal else "none"}
    return {**options, "left": left, "right": right, "softcap": softcap or 0.0}


class FlashAttn4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, options: Given) -> Any:
        interface = sys.modules["flash_attn.cute.interface"]
        o, lse, *_ = interface._flash_attn_fwd(q, k, v, return_lse=return_lse, **options)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options, ctx.return_lse = options, return_lse
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Any) -> Any:
        q, k, v, o, lse = ctx.saved_tensors
        interface = sys.modules["flash_attn.cute.interface"]
        dlse = dlse if ctx.return_lse else None
        grads = interface._flash_attn_bwd(q, k, v, o, do, lse, dlse=dlse, **ctx.options)
        return *grads, None, None


def flash_attn_4_func(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, return_lse: bool = False, **more: Any,
) -> Any:  # fmt: skip
    ends = [None if end < 0 else end for end in window_size]
    options = {"softmax_scale": softmax_scale, "causal": causal, "softcap": softcap, **more}
    options |= {"window_size_left": ends[0], "window_size_right": ends[1]}
    o, lse = FlashAttn4.apply(q, k, v, return_lse, options)  # type: ignore[no-untyped-call]
    return (o, lse) if return_lse else o


@contextlib.contextmanager
def flash_attn_4() -> Iterator[Callable[..., Any]]:
    content = {"_flash_attn_fwd": _flash_attn_fwd, "_flash_attn_bwd": _flash_attn_bwd}
    with modules(flash_attn={}, flash_attn__cute={}, flash_attn__cute__interface=content):
        yield flash_attn_4_func


# SageAttention 1.0.6 and 2.2: sageattention/core.py
def sageattn(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", is_causal: bool = False,
    sm_scale: float | None = None, return_lse: bool = False, **kwargs: Any,
) -> Any:  # fmt: skip
    """Chooses an implementation, and hands it no mask."""
    del kwargs
    core: Any = sys.modules["sageattention.core"]
    return core.sageattn_qk_int8_pv_fp16_triton(
        q, k, v, tensor_layout=tensor_layout, is_causal=is_causal, sm_scale=sm_scale, return_lse=return_lse
    )


def sageattn_qk_int8_pv_fp16_triton(
    q: Tensor, k: Tensor, v: Tensor, tensor_layout: str = "HND", quantization_backend: str = "triton",
    is_causal: bool = False, attn_mask: Any = None, sm_scale: float | None = None, return_lse: bool = False,
) -> Any:  # fmt: skip
    del quantization_backend
    torch._dynamo.graph_break()
    tokens = [t if tensor_layout == "NHD" else t.transpose(1, 2) for t in (q, k, v)]
    bias = torch.zeros(attn_mask.shape).masked_fill(~attn_mask, -torch.inf) if attn_mask is not None else None
    options: Given = {
        "left": -1,
        "right": -1,
        "softcap": 0.0,
        "causal": "top-left" if is_causal else "none",
        "bias": bias,
    }
    o, lse = forward(*tokens, scale=sm_scale or q.shape[-1] ** -0.5, **options)
    o = o if tensor_layout == "NHD" else o.transpose(1, 2)
    return (o, lse) if return_lse else o


def sageattn_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
) -> Tensor:  # fmt: skip
    del k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return torch.zeros_like(q)


@contextlib.contextmanager
def sage() -> Iterator[Callable[..., Any]]:
    functions = (sageattn, sageattn_qk_int8_pv_fp16_triton, sageattn_varlen)
    content = {function.__name__: function for function in functions}
    with modules(sageattention=content, sageattention__core=content):
        yield lambda *args, **options: sys.modules["sageattention"].sageattn(*args, **options)


# Transformer Engine of August 2026: pytorch/cpp_extensions/fused_attn.py
def fused_attn_fwd(
    is_training: bool, max_seqlen_q: int, max_seqlen_kv: int, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, q: Tensor,
    k: Tensor, v: Tensor, fake_dtype: torch.dtype, fused_attention_backend: int, attn_bias: Any = None,
    s_quantizer: Any = None, attn_scale: float | None = None, dropout: float = 0.0, qkv_layout: str = "sbh3d",
    o_format: str = "sbhd", attn_bias_type: str = "no_bias", attn_mask_type: str = "padding",
    softmax_type: str = "vanilla", window_size: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    del max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, fake_dtype, fused_attention_backend, s_quantizer
    del dropout, o_format, attn_bias_type, softmax_type
    torch._dynamo.graph_break()  # an extension's function, which torch cannot trace
    if "padding" in attn_mask_type:
        return torch.zeros_like(q), []
    options = _of_te(q, attn_scale, attn_mask_type, window_size, attn_bias)
    o, lse = forward(*(_tokens(t, qkv_layout) for t in (q, k, v)), **options)
    aux = [lse[..., None], torch.zeros(2, dtype=torch.int64)] if is_training else []
    return _tokens(o, qkv_layout).contiguous(), aux


def fused_attn_bwd(
    max_seqlen_q: int, max_seqlen_kv: int, cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, q: Tensor, k: Tensor, v: Tensor,
    o: Tensor, d_o: Tensor, fake_dtype: torch.dtype, aux_ctx_tensors: list[Tensor], fused_attention_backend: int,
    attn_scale: float | None = None, dropout: float = 0.0, qkv_layout: str = "sbh3d", o_format: str = "sbhd",
    do_format: str = "sbhd", dqkv_layout: str = "sbh3d", attn_bias_type: str = "no_bias",
    attn_mask_type: str = "padding", softmax_type: str = "vanilla", window_size: tuple[int, int] = (-1, -1),
) -> Any:  # fmt: skip
    del max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, fake_dtype, fused_attention_backend, dropout
    del o_format, do_format, dqkv_layout, attn_bias_type, softmax_type
    torch._dynamo.graph_break()
    options = _of_te(q, attn_scale, attn_mask_type, window_size, None)
    do, q, k, v, o = (_tokens(t, qkv_layout) for t in (d_o, q, k, v, o))
    return [_tokens(t, qkv_layout) for t in backward(do, q, k, v, o, aux_ctx_tensors[0].squeeze(-1), **options)]


def _tokens(t: Tensor, layout: str) -> Tensor:
    """[B, T, H, D] of Transformer Engine's, and its of that."""
    return t.transpose(0, 1) if layout.startswith("s") else t


def _of_te(q: Tensor, scale: float | None, masking: str, window: tuple[int, int], bias: Any) -> Given:
    causal = {"causal": "top-left", "causal_bottom_right": "bottom-right"}.get(masking, "none")
    options = {"scale": scale or q.shape[-1] ** -0.5, "causal": causal, "softcap": 0.0, "bias": bias}
    return {**options, "left": window[0], "right": -1 if causal != "none" else window[1]}


class FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: str, options: Given) -> Any:
        module: Any = sys.modules["transformer_engine.pytorch.attention.backends"]
        lengths = [t.shape[0 if layout[0] == "s" else 1] for t in (q, k)]
        ctx.first = *lengths, torch.tensor([0, lengths[0]]), torch.tensor([0, lengths[1]])
        ctx.options = {**options, "qkv_layout": layout, "o_format": "sbhd" if layout[0] == "s" else "bshd"}
        o, aux = module.fused_attn_fwd(True, *ctx.first, q, k, v, q.dtype, 1, **ctx.options)
        ctx.save_for_backward(q, k, v, o, *aux)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        module: Any = sys.modules["transformer_engine.pytorch.attention.backends"]
        layouts = {"do_format": ctx.options["o_format"], "dqkv_layout": ctx.options["qkv_layout"]}
        dq, dk, dv, *_ = module.fused_attn_bwd(
            *ctx.first, *ctx.saved_tensors[:4], do, do.dtype, list(ctx.saved_tensors[4:]), 1, **ctx.options, **layouts
        )
        return dq, dk, dv, None, None


@contextlib.contextmanager
def transformer_engine(layout: str) -> Iterator[Callable[..., Any]]:
    """What ``DotProductAttention`` does, with q, k and v in this layout."""
    content = {"fused_attn_fwd": fused_attn_fwd, "fused_attn_bwd": fused_attn_bwd}

    def attention(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), **more: Any,
    ) -> Tensor:  # fmt: skip
        masking = "causal_bottom_right" if causal else "no_mask"
        options = {"attn_scale": softmax_scale, "attn_mask_type": masking, "window_size": window_size, **more}
        turned = [_tokens(t, layout).contiguous() for t in (q, k, v)]
        o: Tensor = FusedAttention.apply(*turned, layout, options)  # type: ignore[no-untyped-call]
        return _tokens(o, layout)

    with modules(
        transformer_engine={},
        transformer_engine__pytorch__cpp_extensions__fused_attn=content,
        transformer_engine__pytorch__attention__backends=content,
    ):
        yield attention
