"""Calls of vLLM's and SGLang's Triton attention in our words: keys in pages, and O written into an argument.

Followed: the signatures and the masks of ``unified_attention`` in vllm/v1/attention/ops/triton_unified_attention.py
(vllm/attention/ops before) of vllm-project/vllm, and of ``decode_attention.py``, ``extend_attention.py`` and
``unified_attention.py`` in python/sglang/srt/layers/attention/triton_ops (sglang.kernels.ops.attention since 0.5.18) of
sgl-project/sglang. A window's left end is how many keys before its own a row sees; causal masks are aligned
bottom-right; a sink is a logit in the denominator. An argument that is not known here is refused by its name where it
has a value that may switch something on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Given = Mapping[str, Any]
# Ours, by which the rest of the package reads a call.
_OURS = frozenset(
    {"q", "k", "v", "o", "scale", "is_causal", "left", "right", "softcap", "sinks", "alibi_slopes", "cu_seqlens_q",
     "cu_seqlens_k", "block_table", "seqused_k"}
)  # fmt: skip
# Read here, or of no consequence for O: sizes, scratch memory, where results go, what only custom masks or caches of
# one byte an element look at.
_KNOWN = _OURS | {
    "out", "softmax_scale", "sm_scale", "sm_scale_withk", "causal", "window_size", "logit_cap", "sliding_window_size",
    "max_seqlen_q", "max_seqlen_k", "max_len_extend", "seq_threshold_3D", "num_par_softmax_segments",
    "softmax_segm_output", "softmax_segm_max", "softmax_segm_expsum", "use_td", "attn_logits", "attn_lse",
    "num_kv_splits", "max_kv_splits", "page_size", "use_pdl", "has_mla", "aux_tensors", "output_lse",
    "enable_deterministic", "q_extend", "k_extend", "v_extend", "o_extend", "k_buffer", "v_buffer", "qo_indptr",
    "kv_indptr", "kv_indices", "prefix_lens", "mask_indptr", "skip_prefix_custom_mask", "window_kv_offsets",
    "window_start_pos", "rswa_window", "q_descale", "k_descale", "v_descale", "k_scale", "v_scale",
}  # fmt: skip
_CAPTURED = "a paged call in a CUDA graph is not captured"


def of_vllm(given: Given) -> dict[str, Any]:
    """``unified_attention`` of vLLM.

    Args:
        given: Its arguments; k and v [pages, page size, Hk, D].

    Returns:
        Them in our words, as for ``without_pages``; ``refused``, in words, where we have none.
    """
    causal, (left, right) = bool(given.get("causal", True)), given.get("window_size") or (-1, -1)
    found = _stated(given, causal, left)
    if not causal and right >= 0:
        found["refused"] = found["refused"] or "a window without causality is not captured"
    borders, lengths = given.get("cu_seqlens_q"), given.get("seqused_k")
    if not isinstance(borders, Tensor) or not isinstance(lengths, Tensor) or given.get("block_table") is None:
        return found | {"refused": found["refused"] or "a version without borders, lengths and pages is not captured"}
    if _is_captured(given["q"]):
        return found | {"refused": _CAPTURED}
    why = _of_borders(given["q"], borders) or (None if len(lengths) == len(borders) - 1 else "seqused_k of other calls")
    slopes = {} if given.get("alibi_slopes") is None else {"alibi_origin": "row"}
    kept = {name: given.get(name) for name in ("cu_seqlens_q", "block_table", "seqused_k", "alibi_slopes")}
    return found | kept | slopes | {"refused": found["refused"] or why}


def of_sglang(given: Given) -> dict[str, Any]:
    """SGLang's functions on k and v [slots, Hk, D], or [pages, page size, Hk, D] of which ``kv_indices`` count slots.

    Args:
        given: Their arguments; without ``qo_indptr`` each sequence has one row, with ``k_extend`` its last keys are
            those, and ``kv_indices`` are of the keys before.

    Returns:
        Them in our words, packed; ``refused``, in words, where we have none.
    """
    extends = given.get("k_extend") is not None
    k, v = (given.get(f"{name}_buffer", given.get(name)) for name in "kv")
    q = given["q_extend"] if extends else given["q"]
    window = given.get("sliding_window_size")
    found = _stated(given, bool(given.get("is_causal", True)), window if window is not None and window > 0 else -1)
    found |= {"q": q, "k": k, "v": v}
    borders, indptr, indices = (given.get(name) for name in ("qo_indptr", "kv_indptr", "kv_indices"))
    if not isinstance(indptr, Tensor) or not isinstance(indices, Tensor):
        return found | {"refused": found["refused"] or "a version without kv_indptr and kv_indices is not captured"}
    if _is_captured(q):
        return found | {"refused": _CAPTURED}
    if borders is None:  # a batch may be padded
        borders = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        indptr = indptr[: len(borders)]
    scales = [name for name in ("k_scale", "v_scale") if not _is_one(given.get(name))]
    why = f"{', '.join(scales)} not supported" if scales else _of_borders(q, borders)
    if why is None and len(indptr) != len(borders):
        why = "kv_indptr of other sequences"
    rows, keys = borders.cpu().long().diff(), indptr.cpu().long().diff()
    before = given.get("prefix_lens")
    if why is None and before is not None and not torch.equal(before.cpu().long(), keys - rows):
        why = "prefix_lens that are not all keys before the new ones"
    slots = k.shape[0] if k.dim() == 3 else k.shape[0] * k.shape[1]
    where = indices[int(indptr[0]) : int(indptr[-1])].to(k.device).long()
    if why is None and len(where) and (int(where.min()) < 0 or int(where.max()) >= slots):
        why = "kv_indices name slots that are not there"
    if found["refused"] or why:
        return found | {"refused": found["refused"] or why}
    k, v = (t[where] if t.dim() == 3 else t[where // t.shape[1], where % t.shape[1]] for t in (k, v))
    if extends:
        k, v = (_after(*pair, keys, rows) for pair in ((k, given["k_extend"]), (v, given["v_extend"])))
        keys = keys + rows
    at = torch.cat([keys.new_zeros(1), keys.cumsum(0)]).int().to(k.device)
    return found | {"k": k, "v": v, "cu_seqlens_q": borders.int(), "cu_seqlens_k": at}


def _stated(given: Given, causal: bool, left: int) -> dict[str, Any]:
    """What both say, and nothing of any other name."""
    odd = [name for name, value in given.items() if name not in _KNOWN and _is_on(value)]
    caches = [given[n] for n in ("q", "k", "v", "k_buffer", "v_buffer") if isinstance(given.get(n), Tensor)]
    odd += [f"{t.dtype} in the cache" for t in caches if t.element_size() == 1][:1]
    names = ("q", "k", "v", "sinks")
    cap = given.get("softcap") or given.get("logit_cap")
    scale = given.get("scale") or given.get("sm_scale_withk")
    if not causal and left >= 0:
        odd.append("a window without causality")
    return {
        **dict.fromkeys(given),
        **{name: given.get(name) for name in names},
        "is_causal": "bottom-right" if causal else "none",
        "left": left,
        "right": -1,
        "scale": scale or None,
        "softcap": cap if cap and cap > 0 else None,
        "refused": f"{', '.join(odd)} not supported" if odd else None,
    }


def _is_on(value: Any) -> bool:
    """Whether a value of an argument that is not known may switch something on: not None, False, 0 or -1."""
    value = getattr(value, "value", value)  # of an enumeration
    return not (value is None or (isinstance(value, (bool, int, float)) and value in (0, -1)))


def _is_one(scale: Any) -> bool:
    return scale is None or bool((torch.as_tensor(scale) == 1).all())


def _is_captured(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


def _of_borders(q: Tensor, borders: Tensor) -> str | None:
    """Why rows of q are not those between the borders."""
    return None if int(borders[0]) == 0 and int(borders[-1]) == len(q) else "rows of q that no sequence has"


def _after(cached: Tensor, new: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
    """Each sequence's cached keys, then its new ones."""
    parts = zip(torch.split(cached, keys.tolist()), torch.split(new, rows.tolist()), strict=True)
    return torch.cat([t for pair in parts for t in pair])


_VLLM = ("vllm.v1.attention.ops", "vllm.attention.ops")
_SGLANG = ("sglang.kernels.ops.attention", "sglang.srt.layers.attention.triton_ops")
# Module, function, what reports call it, the argument that it writes O into, and who reads its arguments. Of SGLang's
# decode functions the last two run inside the first, which its backend keeps on itself before anybody can stand in.
FUNCTIONS: tuple[tuple[str, str, str, str, Callable[[Given], Given]], ...] = (
    *(
        (f"{home}.triton_unified_attention", "unified_attention", "vLLM Triton unified_attention", "out", of_vllm)
        for home in _VLLM
    ),
    *(
        (f"{home}.{module}", name, f"SGLang Triton {name}", written, of_sglang)
        for home in _SGLANG
        for module, name, written in (
            ("unified_attention", "unified_attention", "out"),
            ("extend_attention", "extend_attention_fwd", "o_extend"),
            ("extend_attention", "extend_attention_fwd_unified", "o"),
            ("decode_attention", "decode_attention_fwd", "o"),
            ("decode_attention", "decode_attention_fwd_normal", "o"),
            ("decode_attention", "decode_attention_fwd_grouped", "o"),
        )
    ),
)
