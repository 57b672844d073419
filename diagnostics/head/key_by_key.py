"""A kernel that walks its keys one by one, and keeps O in the inputs' 16 bits between them (ggml's on a CPU).

    m' = max(m, S), where it grows: O = cast(exp(m - m') O);   O = cast(O + exp(S - m') V);   O / l behind the last key

S, P and l are in fp32. llama.cpp computes so where few rows ask (fewer than 64, as in decoding) of a cache in FP16;
``ggml_compute_forward_flash_attn_ext_f16_one_chunk``.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.reference import AttentionHead, FloatFormat, reference_rows, round_nearest_even

# Rows that are summed at once.
_ROWS = 1024
SUMMED = "key-by-key"
# A key is a step.
_MOST_KEYS = 512


def summed_ways(head: AttentionHead) -> tuple[str, ...]:
    """``SUMMED``; none of a head with dropout, or of many keys."""
    return (SUMMED,) if head.dropout is None and len(head.k) <= _MOST_KEYS else ()


def summed(head: AttentionHead, fmt: FloatFormat, out: FloatFormat) -> dict[str, Tensor]:
    """What such a kernel returns for one head.

    Args:
        head: The head.
        fmt: The format of O between keys.
        out: The format in which O is returned.

    Returns:
        o, float64.
    """
    block = reference_rows(replace(head, do=None), torch.arange(len(head.q), device=head.q.device))
    shifted, v = block.unnormalised_probs.log(), head.v[block.keys]
    largest = torch.full_like(block.row_max, -torch.inf)[:, None]
    o = v.new_zeros(len(shifted), v.shape[1])
    for key in range(len(v)):
        score = shifted[:, key, None]
        before, largest = largest, torch.maximum(largest, score)
        grown = largest > before
        if bool(grown.any()):
            o = torch.where(grown, round_nearest_even((before - largest).exp() * o, fmt), o)
        weight = (score - largest).exp().masked_fill(score == -torch.inf, 0.0)
        o = torch.where(weight > 0, round_nearest_even(o + weight * v[key], fmt), o)
    # Scores are shifted by the row's maximum, at which m ends; a sink joins behind the keys.
    return {"o": round_nearest_even(o * block.inverse_row_sum[:, None], out)}


def in_fp32(head: AttentionHead) -> Tensor:
    """O, float64, of sums in fp32 that take key by key, all else exact: terms too small beside the sum are lost."""
    found = []
    for rows in torch.split(torch.arange(len(head.q), device=head.q.device), _ROWS):
        block = reference_rows(replace(head, do=None), rows)
        probs, v = head.drop(block.unnormalised_probs, block.rows, block.keys).float(), head.v[block.keys].float()
        o = torch.zeros(len(rows), v.shape[1], device=v.device)
        for key in range(len(v)):
            o.addcmul_(probs[:, key, None], v[key])
        found.append((o.double() * block.inverse_row_sum[:, None]).float().double())
    return torch.cat(found)


def with_row_sum_in_fp32(head: AttentionHead, lanes: int) -> Tensor:
    """O, float64, of a row sum in fp32 that takes as many keys at once as a vector has lanes, all else exact."""
    found = []
    for rows in torch.split(torch.arange(len(head.q), device=head.q.device), _ROWS):
        block = reference_rows(replace(head, do=None), rows)
        powers = block.unnormalised_probs
        low = torch.zeros(len(rows), lanes, device=powers.device)
        for keys in torch.split(powers.float(), lanes, 1):
            low[:, : keys.shape[1]] += keys
        # A sink is in the row sum, and added to it exactly.
        lost = powers.sum(1) - low.cumsum(1)[:, -1].double()
        found.append(block.out / (1 - lost * block.inverse_row_sum)[:, None])
    return torch.cat(found)
