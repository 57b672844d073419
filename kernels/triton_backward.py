"""Attention backward in Triton, driven by a recipe: delta, then dQ, then dK and dV, each deterministic.

    delta = rowsum(dO o O), from the rounded O or the unrounded one, or rowsum(P o dP)
                                                                  rounded to ``delta``, dO o O to ``delta_products``
    P = exp(S - L), S in fp32 or rounded as in the forward
    dP = dO V^T                                                   rounded to ``dprobs``
    dS = P o (dP - delta), of P or of cast(P)                     rounded to ``dscores``   (softcap: times 1 - (S/c)^2)
    dQ = alpha dS K,  dK = alpha dS^T Q                           rounded to ``dq`` at the end
    dV = cast(P)^T dO                                             P rounded to ``backward_probs``

Where the recipe rounds between ranges (``gradient_accumulator``), dQ is rounded after every key range, dK and dV after
every block of query rows.

S and dP are computed twice, for dQ and for dK and dV: two more products than a kernel that adds dQ atomically, and
the same bits in every run. What differs between a GPU and the interpreter is as in ``triton_forward``; ``R``, ``G``,
``view``, ``task`` and the sources of tiles are as in ``triton_tiles``. Absorbed MLA has kernels of its own on Hopper,
with the same bits (``triton_latent_gradients``).

Source: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attn_diag.kernels.backend import COMPILED, DTYPES, fits_descriptor, has_hopper_products, has_tensor_memory
from attn_diag.kernels.geometry import Geometry, Level, Visibility, anonymous, dkdv_geometry, dq_geometry
from attn_diag.kernels.recipe import Recipe
from attn_diag.kernels.triton_backward_keys import dkdv_kernel
from attn_diag.kernels.triton_backward_rows import delta_kernel, dq_kernel
from attn_diag.kernels.triton_gradients import statistics_kernel
from attn_diag.kernels.triton_sequences import DENSE, Sequences
from attn_diag.kernels.triton_tiles import begin_alike, described


class BackwardOutputs(NamedTuple):
    """What ``backward`` returns; what was not asked for is empty."""

    dq: Tensor
    """[B, Hq, Tq, D], in the recipe's format."""
    dk: Tensor
    """[B, Hk, Tk, D], likewise."""
    dv: Tensor
    """[B, Hk, Tk, Dv], likewise."""
    delta: Tensor
    """[B, Hq, Tq] fp32."""
    dprobs: Tensor
    """dP, [slots, Tk] fp32."""
    dscores: Tensor
    """dS in the recipe's format, [slots, Tk]."""


def backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, recipe: Recipe, visibility: Visibility, *,
    scale: float, softcap: float | None, level: Level = "none", slots: Tensor | None = None, n_slots: int = 0,
    sequences: Sequences = DENSE,
) -> BackwardOutputs:  # fmt: skip
    """Launch delta, dQ and dK/dV. ``o`` is what delta is taken from, rounded or fp32; lse [B, Hq, Tq] fp32, contiguous.

    Tensors, ``slots``, ``n_slots`` and ``sequences`` as for ``attn_diag.kernels.triton_forward.forward``.
    """
    (batch, heads, q_length, head_dim), (_, k_heads, k_length, _) = q.shape, k.shape
    device, on_cpu = q.device, q.device.type == "cpu"
    alike = begin_alike(k, v)
    if on_cpu:
        q, k, v, do, o = (t.float() for t in (q, k, v, do, o))
    tma = has_tensor_memory(device) and all(fits_descriptor(t) for t in (q, k, v, do))
    shape: dict[str, Any] = {"softcap": softcap is not None, "tma": tma, "value_dim": v.shape[3], "alike": alike}
    rows = sequences.extended(dq_geometry(recipe, head_dim, visibility, level=level, **shape), recipe, visibility)
    columns = sequences.extended(dkdv_geometry(recipe, head_dim, visibility, **shape), recipe, visibility)
    seen = sequences.arguments(recipe, visibility, q, k, scale=scale, softcap=softcap)

    def new(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(size, dtype=torch.float32 if on_cpu else dtype, device=device)

    grad_dtype = DTYPES[recipe.dq]
    delta = new(batch, heads, q_length)
    dq = new(batch, heads, q_length, head_dim, dtype=grad_dtype)
    dk, dv = (new(batch, k_heads, k_length, t.shape[3], dtype=grad_dtype) for t in (k, v))
    n_slots = n_slots if rows.dump else 0
    dprobs, dscores = new(n_slots, k_length), new(n_slots, k_length, dtype=DTYPES[recipe.dscores])
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    bare = anonymous(recipe)

    def launch_rows(want: str, out: Tensor, out_strides: tuple[int, ...], geometry: Geometry) -> None:
        dq_kernel[(sequences.blocks(q_length, geometry.block_m), batch * heads)](
            *described(geometry, q, k, v, do), q, k, v, do, lse, delta, out, dprobs, dscores,
            slots if slots is not None else lse, *strides, *out_strides, heads, heads // k_heads, *seen, k_length,
            scale, softcap or 0.0,
            WANT=want, R=bare, G=geometry, num_warps=geometry.warps, num_stages=geometry.stages, **COMPILED,
        )  # fmt: skip

    if recipe.delta_from == "dp":
        launch_rows("delta", delta, (0, 0, 0), replace(rows, dump=False))
    else:
        delta_kernel[(-(-q_length // rows.block_m), batch * heads)](
            o, do, delta, *o.stride(), *do.stride(), heads, q_length, R=bare, G=rows,
            num_warps=8 if rows.block_dv > 256 else 4, **COMPILED,
        )  # fmt: skip
    gluon = _runs_in_gluon(rows, columns, recipe, q)
    if not gluon:
        launch_rows("dq", dq, dq.stride()[:3], rows)
    blocks = sequences.blocks(q_length, columns.block_m)
    statistics = new(batch, heads, blocks, columns.block_m, 2)
    statistics_kernel[(blocks, batch * heads)](
        lse, delta, statistics, heads, q_length, k_length, *seen[5:], scale, R=bare, G=columns, **COMPILED
    )
    # Sums of both would not fit into the registers where they are that wide.
    fit = columns.block_d + columns.rest_d + columns.block_dv <= 512
    apart = [columns] if fit else [replace(columns, wanted="dk"), replace(columns, wanted="dv")]
    if gluon:
        # Triton's Gluon is experimental: it is imported where it is used.
        from attn_diag.kernels.triton_latent_gradients import latent_gradients

        latent_gradients(q, k, do, (dq, dk, dv), (lse, delta, statistics), bare, rows, columns, seen,
                         scale=scale, softcap=softcap)  # fmt: skip
        apart = []
    for geometry in apart:
        dkdv_kernel[(sequences.blocks(k_length, columns.block_n), batch * k_heads)](
            *described(columns, q, k, v, do), q, k, v, do, statistics, dk, dv, *strides,
            *dk.stride()[:3], *dv.stride()[:3], k_heads, heads // k_heads, *seen, blocks, scale, softcap or 0.0,
            R=bare, G=geometry, num_warps=columns.warps, num_stages=columns.stages, **COMPILED,
        )  # fmt: skip
    dq, dk, dv = (t.to(grad_dtype) for t in (dq, dk, dv))
    return BackwardOutputs(dq, dk, dv, delta, dprobs, dscores.to(DTYPES[recipe.dscores]))


def _runs_in_gluon(rows: Geometry, columns: Geometry, recipe: Recipe, q: Tensor) -> bool:
    """Whether ``triton_latent_gradients`` sums the gradients of this call.

    Not under a softcap, where its bits are not always those of Triton's kernels: on an H200 up to 0.05 % of dQ's and
    dK's numbers were others in about one of ten calls.
    """
    tiles = (rows.block_m, rows.block_n, columns.block_m, columns.block_n)
    sites = (recipe.gradient_accumulator, recipe.backward_probs, recipe.dscores)
    return (
        rows.absorbed
        and columns.absorbed
        and not rows.softcap
        and tiles == (64, 32, 32, 64)
        and sites == ("fp32", recipe.input, recipe.input)
        and has_hopper_products(q.device)
    )


def backward_like(
    q: Tensor, k: Tensor, v: Tensor, lse: Tensor, recipe: Recipe, *, level: Level, n_slots: int
) -> BackwardOutputs:
    """Empty tensors with the shapes and formats of ``backward``'s outputs."""
    n_slots = n_slots if level in ("tiles", "full") else 0
    dq, dk, dv = (q.new_empty(t.shape, dtype=DTYPES[recipe.dq]) for t in (q, k, v))
    dprobs = lse.new_empty(n_slots, k.shape[2])
    dscores = dprobs.new_empty(dprobs.shape, dtype=DTYPES[recipe.dscores])
    return BackwardOutputs(dq, dk, dv, torch.empty_like(lse), dprobs, dscores)
