"""Stand-ins for vLLM's and SGLang's Triton attention: their signatures, with a correctly rounded O."""

# ruff: noqa: ARG001 - what a signature has, not all of which is looked at

from __future__ import annotations

import math
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

VLLM = "vllm.v1.attention.ops.triton_unified_attention"
SGLANG = "sglang.srt.layers.attention.triton_ops"
# How many places further than it should a kernel looks for its keys: a planted fault.
shifted = 0


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, left: int, cap: float, sinks: Any, slopes: Any) -> Tensor:
    """O [T, Hq, Dv] of one sequence, causal."""
    group = q.shape[1] // k.shape[1]
    a, b, c = (t.double().transpose(0, 1) for t in (q, *(t.repeat_interleave(group, 1) for t in (k, v))))
    s = a @ b.mT * scale
    s = cap * torch.tanh(s / cap) if cap else s
    row, key = torch.arange(s.shape[1])[:, None] + s.shape[2] - s.shape[1], torch.arange(s.shape[2])
    s = s if slopes is None else s + slopes.double()[:, None, None] * (key - (s.shape[2] - s.shape[1]))
    hidden = (key > row) | ((key < row - left) if left >= 0 else torch.tensor(False))
    s = s.masked_fill(hidden, -math.inf)
    if sinks is not None:
        s = torch.cat([s, sinks.double()[:, None, None].expand(-1, s.shape[1], 1)], -1)
    return (s.softmax(-1)[..., : len(key)] @ c).transpose(0, 1).to(q.dtype)


def unified_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, seqused_k: Tensor,
    max_seqlen_k: int, softmax_scale: float, causal: bool, window_size: tuple[int, int], block_table: Tensor,
    softcap: float, q_descale: Any, k_descale: Any, v_descale: Any, seq_threshold_3D: Any = None,
    num_par_softmax_segments: Any = None, softmax_segm_output: Any = None, softmax_segm_max: Any = None,
    softmax_segm_expsum: Any = None, alibi_slopes: Any = None, output_scale: Any = None, qq_bias: Any = None,
    sinks: Any = None, mm_prefix_range: Any = None, use_alibi_sqrt: bool = False, kv_quant_mode: Any = 0,
    k_scale_cache: Any = None, v_scale_cache: Any = None, chunk_lookback: int = -1, use_td: bool = False,
) -> None:  # fmt: skip
    """vLLM's."""
    assert causal
    for b, (start, stop) in enumerate(pairwise(cu_seqlens_q.tolist())):
        pages = block_table[b].roll(shifted).long()
        keys, values = (t[pages].flatten(0, 1)[: int(seqused_k[b])] for t in (k, v))
        out[start:stop] = attend(
            q[start:stop], keys, values, softmax_scale, window_size[0], softcap, sinks, alibi_slopes
        )


def extend_attention_fwd_unified(
    q: Tensor, o: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float, v_scale: float, qo_indptr: Tensor,
    kv_indptr: Tensor, kv_indices: Tensor, prefix_lens: Tensor, max_len_extend: int, custom_mask: Any = None,
    mask_indptr: Any = None, sm_scale: Any = None, logit_cap: float = 0.0, is_causal: bool = True,
    sliding_window_size: int = -1, sinks: Any = None, window_start_pos: Any = None, xai_temperature_len: int = -1,
) -> None:  # fmt: skip
    """SGLang's on the whole cache."""
    kv_indices = kv_indices.roll(shifted).long()
    for rows, keys in zip(pairwise(qo_indptr.tolist()), pairwise(kv_indptr.tolist()), strict=True):
        at = kv_indices[slice(*keys)]
        o[slice(*rows)] = attend(
            q[slice(*rows)], k_buffer[at], v_buffer[at], sm_scale or q.shape[2] ** -0.5, sliding_window_size,
            logit_cap, sinks, None,
        )  # fmt: skip


def extend_attention_fwd(
    q_extend: Tensor, k_extend: Tensor, v_extend: Tensor, o_extend: Tensor, k_buffer: Tensor, v_buffer: Tensor,
    qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, custom_mask: Any, is_causal: bool, mask_indptr: Any,
    max_len_extend: int, k_scale: float, v_scale: float, sm_scale: Any = None, logit_cap: float = 0.0,
    skip_prefix_custom_mask: bool = True, sliding_window_size: int = -1, sinks: Any = None,
    window_kv_offsets: Any = None, xai_temperature_len: int = -1,
) -> None:  # fmt: skip
    """SGLang's on what was cached and the new keys."""
    kv_indices = kv_indices.roll(shifted).long()
    for rows, keys in zip(pairwise(qo_indptr.tolist()), pairwise(kv_indptr.tolist()), strict=True):
        at = kv_indices[slice(*keys)]
        k, v = (torch.cat([t[at], new[slice(*rows)]]) for t, new in ((k_buffer, k_extend), (v_buffer, v_extend)))
        q = q_extend[slice(*rows)]
        scale = sm_scale or q.shape[2] ** -0.5
        o_extend[slice(*rows)] = attend(q, k, v, scale, sliding_window_size, logit_cap, sinks, None)


def decode_attention_fwd_grouped(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, o: Tensor, kv_indptr: Tensor, kv_indices: Tensor, attn_logits: Any,
    attn_lse: Any, num_kv_splits: Any, max_kv_splits: int, sm_scale_withk: float, v_scale: float,
    logit_cap: float = 0.0, sinks: Any = None, xai_temperature_len: int = -1,
) -> None:  # fmt: skip
    """SGLang's, one row of each sequence."""
    kv_indices = kv_indices.roll(shifted).long()
    for b in range(len(q)):
        at = kv_indices[int(kv_indptr[b]) : int(kv_indptr[b + 1])]
        o[b : b + 1] = attend(q[b : b + 1], k_buffer[at], v_buffer[at], sm_scale_withk, -1, logit_cap, sinks, None)


def decode_attention_fwd(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, o: Tensor, kv_indptr: Tensor, kv_indices: Tensor, attn_logits: Any,
    attn_lse: Any, num_kv_splits: Any, max_kv_splits: int, sm_scale: float, k_scale: float, v_scale: float,
    logit_cap: float = 0.0, sinks: Any = None, xai_temperature_len: int = -1,
) -> None:  # fmt: skip
    """The function that SGLang's backend keeps on itself."""
    sys.modules[f"{SGLANG}.decode_attention"].decode_attention_fwd_grouped(
        q, k_buffer, v_buffer, o, kv_indptr, kv_indices, attn_logits, attn_lse, num_kv_splits, max_kv_splits,
        sm_scale * k_scale, v_scale, logit_cap=logit_cap, sinks=sinks, xai_temperature_len=xai_temperature_len,
    )  # fmt: skip


def installed(monkeypatch: Any) -> ModuleType:
    """The modules as sys.modules has them, and one that imported the functions by name."""
    user = ModuleType("a_backend")
    for home, functions in (
        (VLLM, (unified_attention,)),
        (f"{SGLANG}.extend_attention", (extend_attention_fwd, extend_attention_fwd_unified)),
        (f"{SGLANG}.decode_attention", (decode_attention_fwd, decode_attention_fwd_grouped)),
    ):
        module = ModuleType(home)
        for function in functions:
            vars(module)[function.__name__] = vars(user)[function.__name__] = function
        monkeypatch.setitem(sys.modules, home, module)
    monkeypatch.setitem(sys.modules, "a_backend", user)
    return user
