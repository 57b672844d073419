"""More packages of attention kernels: xformers, SageAttention and Transformer Engine, with plain torch inside."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from foreign_kernels import Given, backward, forward, modules, operators
from torch import Tensor

# xformers 0.0.35: ops/fmha/flash.py
FLASH_FORWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, SymInt window_left, "
    "SymInt window_right, bool return_softmax, Tensor? block_tables) -> (Tensor, Tensor, Tensor)"
)
FLASH_BACKWARD = (
    "(bool grads_share_storage, Tensor grad, Tensor query, Tensor key, Tensor value, Tensor out, Tensor lse, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, "
    "bool is_causal, SymInt window_left, SymInt window_right, Tensor rng_state) -> (Tensor, Tensor, Tensor)"
).replace("Tensor cu_seqlens", "Tensor? cu_seqlens")
# The same, ops/fmha/flash3.py
FLASH_3_FORWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? leftpad_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, "
    "Tensor? descale_q=None, Tensor? descale_k=None, Tensor? descale_v=None, Tensor? block_table=None, "
    "bool use_kvsplit=False, SymInt window_left=-1, SymInt window_right=-1) -> (Tensor, Tensor)"
)
FLASH_3_BACKWARD = (
    "(bool grads_share_storage, Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor softmax_lse, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
    "bool is_causal, SymInt window_left, SymInt window_right) -> (Tensor, Tensor, Tensor)"
)
# torch 2.13's own, which xformers calls; those of xformers before 0.0.31 have the same arguments.
CUTLASS_FORWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "SymInt? max_seqlen_q, SymInt? max_seqlen_k, float dropout_p, int custom_mask_type, bool compute_log_sumexp=False, "
    "*, float? scale=None, Tensor? seqlen_k=None, int? window_size=None) -> "
    "(Tensor, Tensor, Tensor, Tensor, SymInt, SymInt)"
)
CUTLASS_BACKWARD = (
    "(Tensor grad_out_, Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor logsumexp, float dropout_p, "
    "Tensor philox_seed, Tensor philox_offset, int custom_mask_type, bool bias_requires_grad, *, float? scale=None, "
    "int? num_splits_key=None, int? window_size=None, bool shared_storage_dqdkdv=False) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def _qkv(a: Given) -> tuple[Tensor, Tensor, Tensor]:
    return a["query"], a["key"], a["value"]


def _of_flash(a: Given) -> Given:
    causality = "bottom-right" if a["is_causal"] else "none"
    window = {"left": a["window_left"], "right": a["window_right"]}
    return {"scale": a["softmax_scale"], "causal": causality, "softcap": 0.0, **window}


def _of_cutlass(a: Given) -> Given:
    causality = ("none", "top-left", "bottom-right")[a["custom_mask_type"]]
    left = a["window_size"] - 1 if a["window_size"] else -1
    scale = a["scale"] or a["query"].shape[-1] ** -0.5
    return {"scale": scale, "causal": causality, "left": left, "right": -1, "softcap": 0.0, "bias": a["bias"]}


def _fake(a: Given) -> tuple[Tensor, Tensor]:
    q = a["query"]
    return torch.empty_like(q), q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)


def _fake_gradients(a: Given) -> Any:
    return tuple(map(torch.empty_like, _qkv(a)))


def _flash(a: Given) -> Any:
    return *forward(*_qkv(a), **_of_flash(a)), torch.zeros(2, dtype=torch.int64)


def _flash_backward(a: Given) -> Any:
    do, lse = (a["grad"], a["lse"]) if "grad" in a else (a["dout"], a["softmax_lse"])
    return backward(do, *_qkv(a), a["out"], lse, **_of_flash(a))


def _cutlass(a: Given) -> Any:
    """Its LSE is padded to whole blocks of 32 rows."""
    o, lse = forward(*_qkv(a), **_of_cutlass(a))
    padded = torch.nn.functional.pad(lse, [0, -lse.shape[-1] % 32], value=torch.inf)
    return (
        o,
        padded,
        torch.zeros(1, dtype=torch.int64),
        torch.zeros(1, dtype=torch.int64),
        o.shape[1],
        a["key"].shape[1],
    )


def _cutlass_backward(a: Given) -> Any:
    lse = a["logsumexp"][..., : a["query"].shape[1]]
    return *backward(a["grad_out_"], *_qkv(a), a["out"], lse, **_of_cutlass(a)), torch.empty(0)


class MemoryEfficient(torch.autograd.Function):
    """Chooses the operator by its name, and takes [B, T, H, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kind: str, options: Given) -> Any:
        scale = q.shape[-1] ** -0.5 if options["scale"] is None else options["scale"]
        ctx.kind, ctx.options, ops = kind, {**options, "scale": scale}, torch.ops
        left, right = options["window"]
        lengths, causal = (q.shape[1], k.shape[1]), options["causal"]
        if kind == "flash":
            o, lse, _ = ops.xformers_flash.flash_fwd(
                q, k, v, None, None, None, *lengths, 0.0, scale, causal, left, right, False, None
            )
        elif kind == "flash3":
            o, lse = ops.xformers_flash3.flash_fwd(
                q, k, v, None, None, None, None, *lengths, 0.0, scale, causal, window_left=left, window_right=right
            )
        else:
            run = ops.aten._efficient_attention_forward
            if kind == "own cutlass":
                run = ops.xformers.efficient_attention_forward_cutlass
            o, lse, *_ = run(
                query=q, key=k, value=v, bias=options["bias"], cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=-1,
                max_seqlen_k=-1, dropout_p=0.0, compute_log_sumexp=True, custom_mask_type=2 if causal else 0,
                scale=scale, seqlen_k=None, window_size=left + 1 if left >= 0 else None,
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, o, lse)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
        q, k, v, o, lse = ctx.saved_tensors
        options, ops = ctx.options, torch.ops
        scale, causal, (left, right) = options["scale"], options["causal"], options["window"]
        lengths, none = (q.shape[1], k.shape[1]), torch.zeros(2, dtype=torch.int64)
        if ctx.kind == "flash":
            grads = ops.xformers_flash.flash_bwd(
                False, do, q, k, v, o, lse, None, None, *lengths, 0.0, scale, causal, left, right, none
            )
        elif ctx.kind == "flash3":
            grads = ops.xformers_flash3.flash_bwd(
                False, do, q, k, v, o, lse, None, None, *lengths, scale, causal, left, right
            )
        else:
            run = ops.aten._efficient_attention_backward
            if ctx.kind == "own cutlass":
                run = ops.xformers.efficient_attention_backward_cutlass
            grads = run(
                do, q, k, v, bias=options["bias"], bias_requires_grad=False, cu_seqlens_q=None, cu_seqlens_k=None,
                max_seqlen_q=-1, max_seqlen_k=-1, logsumexp=lse, out=o, dropout_p=0.0, philox_seed=none,
                philox_offset=none, custom_mask_type=2 if causal else 0, scale=scale, num_splits_key=None,
                window_size=left + 1 if left >= 0 else None,
            )[:3]  # fmt: skip
        return *grads, None, None


@contextlib.contextmanager
def xformers(kind: str) -> Iterator[Callable[..., Any]]:
    """``memory_efficient_attention`` with one of the operators, and options in our words."""

    def attention(
        q: Tensor, k: Tensor, v: Tensor, softmax_scale: Any = None, causal: bool = False,
        window_size: tuple[int, int] = (-1, -1), bias: Any = None,
    ) -> Any:  # fmt: skip
        options = {"scale": softmax_scale, "causal": causal, "window": window_size, "bias": bias}
        return MemoryEfficient.apply(q, k, v, kind, options)  # type: ignore[no-untyped-call]

    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        enter(modules(xformers={}))
        enter(
            operators(
                "xformers_flash",
                flash_fwd=(FLASH_FORWARD, _flash, lambda a: (*_fake(a), torch.empty(2, dtype=torch.int64))),
                flash_bwd=(FLASH_BACKWARD, _flash_backward, _fake_gradients),
            )
        )
        enter(
            operators(
                "xformers_flash3",
                flash_fwd=(FLASH_3_FORWARD, lambda a: _flash(a)[:2], _fake),
                flash_bwd=(FLASH_3_BACKWARD, _flash_backward, _fake_gradients),
            )
        )
        if kind == "cutlass":
            enter(
                operators(
                    "aten",
                    _efficient_attention_forward=(CUTLASS_FORWARD, _cutlass, _cutlass),
                    _efficient_attention_backward=(CUTLASS_BACKWARD, _cutlass_backward, _cutlass),
                )
            )
        if kind == "own cutlass":
            enter(
                operators(
                    "xformers",
                    efficient_attention_forward_cutlass=(CUTLASS_FORWARD, _cutlass, _cutlass),
                    efficient_attention_backward_cutlass=(CUTLASS_BACKWARD, _cutlass_backward, _cutlass),
                )
            )
        yield attention


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
    options = {"left": -1, "right": -1, "softcap": 0.0, "causal": "top-left" if is_causal else "none", "bias": bias}
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
    given = (_tokens(t, qkv_layout) for t in (d_o, q, k, v, o))
    return [_tokens(t, qkv_layout) for t in backward(*given, aux_ctx_tensors[0].squeeze(-1), **options)]


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
    def backward(ctx: Any, do: Tensor) -> Any:  # type: ignore[override]
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
