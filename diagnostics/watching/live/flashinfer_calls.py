"""FlashInfer's calls in our words: its functions, and the wrappers that know their sequences by an earlier ``plan()``.

Followed: the signatures, and what ``plan()`` leaves on a wrapper, in ``flashinfer/prefill.py`` and ``decode.py`` of
flashinfer-ai/flashinfer (0.2 to 0.7). q and O are [total, Hq, D], a batch's sequences one after the other; pages are
[pages, page size, Hk, D] ("NHD") or [pages, Hk, page size, D] ("HND"), k and v in two tensors or one; causal masks are
aligned bottom-right; the LSE is [total, Hq], with base 2 unless the call says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Given = Mapping[str, Any]
# What changes the result in a way that a capture of q, k and v does not state, where it is given.
_OTHERWISE = (
    "q_scale", "k_scale", "v_scale", "scale_q", "scale_k", "scale_v", "o_scale", "kv_cache_sf", "packed_custom_mask",
    "skip_softmax_threshold_scale_factor",
)  # fmt: skip
# Read here, or where results are written to: nobody else is to take these for arguments of the kernel.
_SILENT = ("self", "paged_kv_cache", "out", "lse", "return_lse", "lse_base", "lse_layout", "kv_layout", "causal",
           "logits_soft_cap", "window_left", "custom_mask")  # fmt: skip


def of_pages(given: Given) -> dict[str, Any]:
    """``run`` of the wrappers of a cache in pages.

    Args:
        given: Its arguments, "self" the wrapper.

    Returns:
        Them in our words, as for ``without_pages``; ``refused``, in words, where we have none.
    """
    wrapper, kv = given["self"], given["paged_kv_cache"]
    k, v = kv if isinstance(kv, (tuple, list)) else kv.unbind(1)
    if getattr(wrapper, "_kv_layout", "NHD") == "HND":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    found = _planned(wrapper, given) | {"k": k, "v": v}
    names = ("_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf", "_qo_indptr_buf")
    indptr, indices, last, rows = (getattr(wrapper, name, None) for name in names)
    if not isinstance(indptr, Tensor) or not isinstance(indices, Tensor) or not isinstance(last, Tensor):
        return found | {"refused": found["refused"] or "a wrapper that has not planned its pages is not captured"}
    q, count = given["q"], len(indptr) - 1
    if "Decode" in type(wrapper).__name__ or not isinstance(rows, Tensor):  # each sequence has as many new rows
        rows = torch.arange(count + 1, dtype=torch.int32, device=q.device) * (len(q) // count)
        found["is_causal"] = "bottom-right"
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return found | {"refused": "a paged call in a CUDA graph is not captured"}
    at, last = indptr.cpu().long(), last.cpu().long()
    pages = at.diff()
    numbers = torch.split(indices.cpu()[: int(at[-1])], pages.tolist())
    table = torch.nn.utils.rnn.pad_sequence(list(numbers), batch_first=True)
    lengths = torch.where(pages > 0, (pages - 1) * k.shape[1] + last[:count], 0)
    return found | {"cu_seqlens_q": rows[: count + 1].int(), "page_table": table, "cache_seqlens": lengths}


def of_ragged(given: Given) -> dict[str, Any]:
    """``run`` of the wrapper of packed sequences, likewise."""
    wrapper = given["self"]
    found = _planned(wrapper, given)
    rows, keys = (getattr(wrapper, name, None) for name in ("_qo_indptr_buf", "_kv_indptr_buf"))
    if not isinstance(rows, Tensor) or not isinstance(keys, Tensor):
        return found | {"refused": found["refused"] or "a wrapper that has not planned its sequences is not captured"}
    return found | {"cu_seqlens_q": rows.int(), "cu_seqlens_k": keys.int()}


def of_one(given: Given) -> dict[str, Any]:
    """The functions of one sequence: q [T, Hq, D], or [Hq, D] of one that is decoded."""
    q, k, v, mask = given["q"], given["k"], given["v"], given.get("custom_mask")
    if given.get("kv_layout", "NHD") == "HND":
        k, v = k.transpose(0, 1), v.transpose(0, 1)
    q = q[None] if q.dim() == 2 else q
    found = _stated(given, given) | {"q": q, "k": k, "v": v}
    if mask is not None:
        found |= {"mask": mask.reshape(len(q), len(k)).bool()[None, None], "is_causal": "none"}
    return found


def results(returned: Sequence[Any], kwargs: Given) -> Sequence[Any]:
    """O, and the LSE as natural logarithms [Hq, total].

    Args:
        returned: What a call returned, O and the LSE where it was asked for; [H, D] and [H] of a decoded sequence.
        kwargs: What it was given by name.
    """
    o = returned[0][None] if returned[0].dim() == 2 else returned[0]
    if len(returned) < 2 or kwargs.get("sinks") is not None:
        return (o,)
    lse = returned[1][None] if returned[1].dim() == 1 else returned[1]
    lse = lse if kwargs.get("lse_layout") == "HN" else lse.T
    return o, lse if kwargs.get("lse_base") == "ln" else lse * math.log(2.0)


def _planned(wrapper: object, given: Given) -> dict[str, Any]:
    """What a wrapper was planned with, by the names of the functions' arguments, and a call's own window."""
    names = ("causal", "window_left", "logits_soft_cap", "sm_scale", "pos_encoding_mode")
    plan = {name: getattr(wrapper, f"_{name}", None) for name in names}
    if given.get("window_left") is not None:
        plan["window_left"] = given["window_left"]
    found = _stated(plan, given)
    if getattr(wrapper, "_jit_module", None) is not None:
        found["refused"] = "a kernel of the caller's own: nothing says which attention it computes"
    if getattr(wrapper, "_custom_mask_buf", None) is not None:
        found["refused"] = "a wrapper's custom mask is not captured"
    return found


def _stated(plan: Given, given: Given) -> dict[str, Any]:
    odd = [name for name in _OTHERWISE if given.get(name) is not None and not _is_one(given[name])]
    if plan.get("pos_encoding_mode") not in (None, "NONE"):
        odd.append(f"pos_encoding_mode {plan['pos_encoding_mode']}")
    window = plan.get("window_left")
    return dict.fromkeys(_SILENT) | {
        "is_causal": bool(plan.get("causal")),
        "left": -1 if window is None else window,
        "right": -1,
        "scale": plan.get("sm_scale"),
        "softcap": plan.get("logits_soft_cap"),
        "refused": f"{', '.join(odd)} not supported" if odd else None,
    }


def _is_one(scale: object) -> bool:
    return isinstance(scale, (int, float)) and scale == 1
