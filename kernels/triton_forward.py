"""Attention forward in Triton, driven by a recipe: what is rounded, when, and in which order the keys come.

    for each key range, in the schedule's order:
        S = alpha Q K^T                                    rounded to ``scores``
        m' = max(m, rowmax S)                              rounded to ``row_max``; softmax rule
        P_bar = exp(S - m')                                S - m' rounded to ``difference``
        l = exp(m - m') l + rowsum P_bar                   rounded to ``row_sum``
        O_bar = exp(m - m') O_bar + cast(P_bar) V          rounded to ``accumulator``, P_bar to ``probs``,
                                                           P_bar V to ``range_pv``
    with a sink s: l = l + exp(s - m)                      after the last range, rounded to ``row_sum``
    O = O_bar (1 / l), rounded once to ``out``;  L = m + ln l

A range of one tile of keys is walked once, as production kernels do (``_walk_tiles``); a wider one twice, for its
maximum first (``_walk_ranges``). On Hopper absorbed MLA and long plain calls of more than 64 features have kernels of
their own, with the same bits (``triton_latent``, ``triton_warpgroups``). Source of the algorithm: Dao,
"FlashAttention-2", arXiv 2307.08691, algorithm 1.

What differs between a GPU and Triton's interpreter, given the same inputs; the rounding sites are bit for bit the same:

| operation | GPU (sm_90) | interpreter |
|---|---|---|
| sums of products | tensor core: 16 at a time, aligned, truncated | fp32, numpy's order |
| exp2 | ex2.approx: 2 ulp, subnormals flushed | numpy: 1 ulp |
| log | 1 ulp | numpy |
| sums over a row | tree over registers and lanes | numpy's pairwise sum |

``R``, ``G``, ``view``, ``task`` and the sources of tiles are as in ``triton_tiles``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_diag.kernels.backend import COMPILED, DTYPES, fits_descriptor, has_hopper_products, has_tensor_memory
from attn_diag.kernels.geometry import Geometry, Level, Visibility, anonymous, forward_geometry
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.split_keys import merge_splits
from attn_diag.kernels.triton_forward_kernel import forward_kernel
from attn_diag.kernels.triton_low_bit import check_low_bit, in_codes, low_bit_sites
from attn_diag.kernels.triton_sequences import DENSE, Sequences
from attn_diag.kernels.triton_tiles import begin_alike, described


class ForwardOutputs(NamedTuple):
    """What ``forward`` returns; what was not asked for is empty."""

    o: Tensor
    """[B, Hq, Tq, Dv], in the recipe's format."""
    unrounded: Tensor
    """O in fp32, before its last rounding."""
    lse: Tensor
    """[B, Hq, Tq] fp32."""
    rows: Tensor
    """[5, B, Hq, Tq] fp32: m, l, near, sum of the cast P_bar, sum over features of O's rounding error."""
    scores: Tensor
    """[slots, Tk]."""
    probs: Tensor
    """[slots, Tk]."""
    tile_max: Tensor
    """[slots, tiles]."""


def forward(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, visibility: Visibility, *, scale: float, softcap: float | None,
    level: Level = "none", slots: Tensor | None = None, n_slots: int = 0, unrounded: bool = False,
    sinks: Tensor | None = None, sequences: Sequences = DENSE, wanted: Tensor | None = None,
) -> ForwardOutputs:  # fmt: skip
    """Launch the forward kernel on q [B, Hq, Tq, D], k [B, Hk, Tk, D] and v [B, Hk, Tk, Dv] (in pages: see
    ``triton_sequences``), any strides.

    ``slots`` [B, Hq, Tq] int32: where the dump of level "tiles" puts a row, -1 for nowhere; ``n_slots`` of them in all.
    Level "full" puts every row where its number is.
    ``unrounded``: keep O in fp32 too. ``sinks`` [Hq] fp32: logits in the softmax's denominator; L has them in it.
    ``wanted``: of dense sequences, int64 [R], the only rows that are sure to be written.
    """
    (batch, heads, q_length, head_dim), k_heads, k_length = q.shape, k.shape[1], sequences.most_keys(k)
    fast = has_tensor_memory(q.device)
    tma = fast and all(fits_descriptor(t) for t in (q, k, v))
    geometry = forward_geometry(
        recipe, head_dim, visibility, softcap=softcap is not None, level=level, tma=tma, packed=fast,
        value_dim=v.shape[3], alike=begin_alike(k, v) and not low_bit_sites(recipe),
    )  # fmt: skip
    splits = -(-k_length // recipe.schedule.split_keys) if recipe.schedule.split_keys else 1
    geometry = replace(
        sequences.extended(geometry, recipe, visibility, k, v),
        split=splits > 1,
        unrounded=unrounded and splits == 1,
        sink=sinks is not None and splits == 1,
    )
    group = heads // k_heads
    geometry = _with_group(geometry, q, k, recipe, sequences)
    if wanted is not None and geometry.group == 1 and not sequences.packed:
        geometry = replace(geometry, listed=True)
        sequences = replace(sequences, listed=torch.unique(wanted // geometry.block_m).int())
    on_cpu = q.device.type == "cpu"
    scales, shift = q, None
    if low_bit_sites(recipe):
        plain = level == "none" and not sequences.packed
        biased = any(x is not None for x in (softcap, sinks, sequences.slopes))
        check_low_bit(recipe, head_dim, plain=plain, biased=biased)
        geometry, q, k, v, scales, shift = in_codes(geometry, q, k, v, recipe, scale)
    out_format = DTYPES[recipe.out] if splits == 1 else torch.float32
    if on_cpu:
        # The interpreter's own BF16 is wrong: it gets BF16 numbers in fp32.
        q, k, v = q.float(), k.float(), v.float()

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=torch.float32 if on_cpu and dtype.is_floating_point else dtype, device=q.device)

    tiles = -(-k_length // geometry.block_n)
    o = new(splits * batch, heads, q_length, v.shape[3], dtype=out_format)
    full_o = new(*o.shape) if geometry.unrounded else new(0)
    lse = new(splits, batch, heads, q_length)
    rows = new(5, splits, batch, heads, q_length) if geometry.rows else new(0)
    n_slots = n_slots if geometry.dump else 0
    scores = new(n_slots, k_length, dtype=_kept_scores(recipe, sequences))
    probs = new(n_slots, k_length, dtype=DTYPES.get(recipe.probs, torch.float32))
    tile_max = new(n_slots, tiles)
    if _runs_in_gluon(geometry, recipe, q, k_length):
        options: Any = {"scale": scale, "softcap": softcap, "sinks": sinks, "sequences": sequences}
        # Triton's Gluon is experimental: it is imported where it is used.
        if geometry.latent:
            from attn_diag.kernels.triton_latent import latent_forward

            latent_forward(q, k, o, lse[0], recipe, visibility, geometry, **options)
        else:
            from attn_diag.kernels.triton_warpgroups import warpgroups_forward

            warpgroups_forward(q, k, v, o, lse[0], recipe, visibility, geometry, **options)
        return ForwardOutputs(o, full_o, lse[0], rows, scores, probs, tile_max)
    arguments = (
        *described(geometry, q, k, v),
        q, k, v, o, full_o, lse, rows, scores, probs, tile_max, slots if slots is not None else lse,
        lse if sinks is None else sinks.contiguous(), scales, *q.stride(), *k.stride(), *v.stride(), *o.stride()[:3],
        heads, group, *sequences.arguments(recipe, visibility, q, k, scale=scale, softcap=softcap),
        *sequences.pages(k), recipe.schedule.split_keys or 0, k_length, tiles, scale, softcap or 0.0,
    )  # fmt: skip
    inner = replace(recipe, out="fp32") if splits > 1 else recipe
    blocks = sequences.blocks(q_length * geometry.group, geometry.block_m)
    grid = (blocks, batch * heads // geometry.group, splits)
    forward_kernel[grid](
        *arguments, R=anonymous(inner), G=geometry, num_warps=geometry.warps, num_stages=geometry.stages, **COMPILED
    )
    if geometry.rows and not geometry.track_near:
        rows[2] = 2.0  # nobody watched: every row may repeat its maximum
    if splits > 1:
        factor = scale if recipe.alpha == "in-exponent" and softcap is None else 1.0
        o, lse, rows = merge_splits(o.view(splits, batch, *o.shape[1:]), lse, rows, factor, DTYPES[recipe.out], sinks)
        full_o = o if unrounded else full_o
    else:
        lse, rows = lse[0], rows[:, 0] if geometry.rows else rows
    return ForwardOutputs(
        o.to(DTYPES[recipe.out]),
        full_o,
        lse if shift is None else lse + shift,
        rows,
        scores.to(_kept_scores(recipe, sequences)),
        probs.to(DTYPES.get(recipe.probs, torch.float32)),
        tile_max,
    )


def _with_group(geometry: Geometry, q: Tensor, k: Tensor, recipe: Recipe, sequences: Sequences) -> Geometry:
    """Tiles with the rows of all heads of a group, where those of one head fill half a tile at most, on average over
    the documents (decoding)."""
    (_, heads, q_length, _), k_heads = q.shape, k.shape[1]
    group, rows = heads // k_heads, q_length // sequences.documents
    # ptxas of Triton 3.6 may crash on such a kernel for a single key.
    whole = bool(low_bit_sites(recipe)) or recipe.schedule.order == "diagonal-first"
    if whole or 2 * rows > geometry.block_m or sequences.most_keys(k) == 1:
        return geometry
    stages, width = geometry.stages, max(geometry.block_d, geometry.block_dv)
    if width <= 64:  # few blocks, so that one has a core's shared memory: it loads two tiles ahead
        stages = max(stages, 3)
    elif width <= 128 and geometry.page_size and not geometry.tma and q.is_cuda:
        cores = torch.cuda.get_device_properties(q.device).multi_processor_count
        if sequences.blocks(q_length * group, geometry.block_m) * k_heads <= cores:
            stages = 4  # nor does another block hide the latency of small pages
    return replace(geometry, group=group, stages=stages)


def _runs_in_gluon(geometry: Geometry, recipe: Recipe, q: Tensor, k_length: int) -> bool:
    """Whether ``triton_latent`` or ``triton_warpgroups`` runs this call."""
    sites = (recipe.row_sum_clamp, recipe.range_pv, recipe.accumulator, recipe.probs, recipe.pv_levels)
    latent = geometry.absorbed and (geometry.block_m, geometry.block_n) == (64, 64)
    return (
        (latent or (geometry.in_warpgroups and _is_long(geometry, q.shape[2], k_length)))
        and sites == (None, "fp32", "fp32", recipe.input, "one")
        and recipe.softmax.kind != "stabilised"
        and recipe.schedule.order != "diagonal-first"
        and has_hopper_products(q.device)
    )


def _is_long(geometry: Geometry, q_length: int, k_length: int) -> bool:
    """Whether a block's rows meet enough tiles of keys for ``triton_warpgroups`` to be faster, as timed on an H200."""
    least = 512 if geometry.block_n == 128 else 1024 if geometry.block_dv == 256 else 2048
    return q_length >= least and k_length >= least and not geometry.left


def _kept_scores(recipe: Recipe, sequences: Sequences) -> torch.dtype:
    """What holds S exactly: a bias comes after its rounding."""
    return DTYPES[recipe.scores] if sequences.slopes is None else torch.float32


def forward_like(
    q: Tensor, k: Tensor, v: Tensor, recipe: Recipe, visibility: Visibility, *, softcap: float | None, level: Level,
    n_slots: int, unrounded: bool, sequences: Sequences = DENSE,
) -> ForwardOutputs:  # fmt: skip
    """Empty tensors with the shapes and formats of ``forward``'s outputs."""
    geometry = forward_geometry(
        recipe, q.shape[-1], visibility, softcap=softcap is not None, level=level, value_dim=v.shape[3]
    )
    k_length, n_slots = sequences.most_keys(k), n_slots if geometry.dump else 0
    rows = q.shape[:3]

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return q.new_empty(shape, dtype=dtype)

    return ForwardOutputs(
        new(*rows, v.shape[3], dtype=DTYPES[recipe.out]),
        new(*rows, v.shape[3]) if unrounded else new(0),
        new(*rows),
        new(5, *rows) if geometry.rows else new(0),
        new(n_slots, k_length, dtype=_kept_scores(recipe, sequences)),
        new(n_slots, k_length, dtype=DTYPES.get(recipe.probs, torch.float32)),
        new(n_slots, -(-k_length // geometry.block_n)),
    )
