"""Which probabilities torch's fused kernels kept under dropout: they return the state of the random numbers they drew.

Each takes the numbers of a sequence by its place in the batch, so that the first sequences can be asked for alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def kept_by_flash(given: Mapping[str, Any], results: Sequence[Any], sequences: int) -> Tensor | None:
    """By FlashAttention-2 (``_scaled_dot_product_flash_attention``), called again with the same state.

    Args:
        given: What the call was given, by our names.
        results: What it returned.
        sequences: Of how many of its sequences, the first.

    Returns:
        bool [sequences, Hq, Tq, Tk]; None where the second call returned another O, so that its mask is another too.

    Source: ``S_dmask`` of flash_attn, negative where a probability was dropped.
    """
    q, k, v = (given[name].detach()[:sequences].transpose(1, 2) for name in "qkv")
    rows, keys = q.shape[1], k.shape[1]
    seed, offset = (int(number) for number in results[6].tolist())
    with torch.random.fork_rng([q.device]), torch.no_grad():
        generator = torch.cuda.default_generators[q.device.index]
        generator.manual_seed(seed)
        generator.set_offset(offset)
        options = {"scale": given.get("scale")}
        o, *_, signed = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, rows, keys, given["dropout_p"], bool(given.get("is_causal")), True, **options
        )
    if not torch.equal(o.transpose(1, 2), results[0].detach()[:sequences]):
        return None
    kept: Tensor = (signed >= 0)[:, :, :rows, :keys]
    return kept


def kept_by_efficient(given: Mapping[str, Any], results: Sequence[Any], sequences: int) -> Tensor:
    """By the memory-efficient kernel (``_scaled_dot_product_efficient_attention``); as ``kept_by_flash``.

    Source: ``_fill_mem_eff_dropout_mask_`` of torch draws the kernel's numbers, uniform in (0, 1]: above p is kept.
    """
    q, k, p = given["q"], given["k"], given["dropout_p"]
    seed, offset = (int(state) for state in results[2:4])
    numbers = q.new_empty(sequences, q.shape[1], q.shape[2], k.shape[2], dtype=torch.float32)
    kept: Tensor = torch.ops.aten._fill_mem_eff_dropout_mask_(numbers, p, seed, offset) > p
    return kept
