"""xformers as it is seen from Python, with its operators' own schemas; plain torch inside."""

from __future__ import annotations

import contextlib
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
)
# The same, ops/fmha/flash3.py
FLASH_3_FORWARD = (
    "(Tensor query, Tensor key, Tensor value, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
    "Tensor? leftpad_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float p, float softmax_scale, bool is_causal, "
    "Tensor? descale_q=None, Tensor? descale_k=None, Tensor? descale_v=None, Tensor? block_table=None, "
    "bool use_kvsplit=False, SymInt window_left=-1, SymInt window_right=-1) -> (Tensor, Tensor)"
)
FLASH_3_BACKWARD = (
    "(bool grads_share_storage, Tensor dout, Tensor query, Tensor key, Tensor value, Tensor out, Tensor softmax_lse, "
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, "
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
    def backward(ctx: Any, do: Tensor) -> Any:
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
