"""Calls on a cache in pages, as calls of packed sequences: their keys are gathered when a call is looked at.

Where the keys lie has to be known on the host: a look waits for the device. A CUDA graph that is being recorded cannot
wait, and its paged calls are refused.

Sources: Dao-AILab/flash-attention, flash_attn_with_kvcache of flash_attn/flash_attn_interface.py and
_flash_attn_forward of hopper/flash_attn_interface.py; vllm-project/flash-attention, csrc/flash_attn/flash_api.cpp.
vLLM's unified_attention_with_output (vllm/model_executor/layers/attention/attention.py) is given the new keys alone:
what it calls is met instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

Given = Mapping[str, Any]
_TABLES, _LENGTHS = ("page_table", "block_table"), ("seqused_k", "cache_seqlens")
# Where one of these is given other keys are seen, or q and k are turned inside.
_OTHERWISE = ("leftpad_k", "cache_leftpad", "rotary_cos", "rotary_sin", "cu_seqlens_k_new", "seqused_q", "qv")


def without_pages(given: Given) -> dict[str, Any]:
    """What to put in place of a call's arguments so that its keys are contiguous; nothing where they are.

    Args:
        given: The arguments by our names; k and v [pages, page size, Hk, D] or [B, T, Hk, D], q [B, Tq, Hq, D] or
            [total, Hq, D] with ``cu_seqlens_q``; ``k_new`` and ``v_new`` have been put into the cache.

    Returns:
        q, k and v [total, H, D] with their borders, and ``rows_apart`` where q had a batch; or ``refused``, in words.
    """
    q, k, v = (given.get(name) for name in "qkv")
    table = next((given[name] for name in _TABLES if given.get(name) is not None), None)
    lengths = next((given[name] for name in _LENGTHS if given.get(name) is not None), None)
    if lengths is None or not all(isinstance(t, Tensor) for t in (q, k, v)):
        return {}
    assert isinstance(q, Tensor)
    assert isinstance(k, Tensor)
    assert isinstance(v, Tensor)
    borders = given.get("cu_seqlens_q")
    if k.dim() != 4 or q.dim() != (4 if borders is None else 3):
        return {}
    if odd := [name for name in _OTHERWISE if given.get(name) is not None]:
        return {"refused": f"a cache with {', '.join(odd)} is not captured"}
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        return {"refused": "a paged call in a CUDA graph is not captured"}
    count = len(q) if borders is None else len(borders) - 1
    rows = lengths.cpu().long() if isinstance(lengths, Tensor) else torch.full((count,), int(lengths))
    new = given.get("k_new")
    rows = rows + (new.shape[1] if isinstance(new, Tensor) else 0)
    chosen = given.get("kv_batch_idx", given.get("cache_batch_idx"))
    if table is None:
        table = torch.arange(count)[:, None] if chosen is None else chosen[:, None]
    elif chosen is not None:
        return {"refused": "a page table beside indices of batch items is not captured"}
    where = _positions(table.cpu().long(), rows, k.shape[0], k.shape[1])
    if where is None:
        return {"refused": "the page table names pages that are not there, or too few"}
    where = where.to(k.device)
    found: dict[str, Any] = dict.fromkeys((*_TABLES, *_LENGTHS, "kv_batch_idx", "cache_batch_idx", "k_new", "v_new"))
    found |= {"k_cache": None, "v_cache": None, "rows_apart": borders is None}
    found |= {name: t.flatten(0, 1)[where] for name, t in (("k", k), ("v", v))}
    found["cu_seqlens_k"] = torch.tensor([0, *accumulate(rows.tolist())], dtype=torch.int32, device=k.device)
    if borders is None:
        found["q"] = q.flatten(0, 1)
        found["cu_seqlens_q"] = torch.arange(count + 1, dtype=torch.int32, device=k.device) * q.shape[1]
    return found


def _positions(table: Tensor, lengths: Tensor, pages: int, size: int) -> Tensor | None:
    """Where each key of each sequence lies among all places of the cache; None where one lies nowhere."""
    if len(table) != len(lengths) or int(lengths.max()) > table.shape[1] * size or int(lengths.min()) < 0:
        return None
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    at = torch.cat([torch.arange(n) for n in lengths.tolist()])
    page = table[sequence, at // size]
    if bool(((page < 0) | (page >= pages)).any()):
        return None
    return page * size + at % size


def of_kvcache(given: Given) -> dict[str, Any]:
    """What the arguments of ``flash_attn_with_kvcache`` say in our words: its k and v are new keys.

    Args:
        given: Its arguments.
    """
    left, right = given.get("window_size") or (-1, -1)
    new = {"k_new": given.get("k"), "v_new": given.get("v"), "k": given["k_cache"], "v": given["v_cache"]}
    lengths = given.get("cache_seqlens")
    whole = given["k_cache"].shape[1] if lengths is None else lengths
    return {**new, "cache_seqlens": whole, "left": left, "right": right, "k_cache": None, "v_cache": None}
