"""L as a backward reads it, found again in its dV or dQ, and whether it is in the inputs' 16 bits.

With P of the true L and L' in its place, f = exp(L - L') - 1 of every query row:

    dV = PT (1 + f) dO, dQ = (1 + f) dQ(L)

Both are linear in f, whose least squares tell L' to a fraction of a 16-bit spacing: a gradient's rounding is finer than
what a rounded L does to it. Where most rows' L' lie on the grid of the format, L was stored there, whatever the forward
made it of. Of scores that the backward rounds P is made of these.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_diag.head.from_lse import from_lse, scores_of
from attn_diag.head.unfused_scores import finite
from attn_diag.reference import AttentionHead, FloatFormat, round_nearest_even, ulp
from attn_diag.reference.rounding import BF16

WAYS = ("from-l:fused:low", "from-l:stored:low", "from-l:compiled:low", "from-l:steps:low")
"""Of ``from_lse``'s, and one that stores S and L: which scores P is made of."""
# Rows whose L' is known to a sixteenth of a spacing count. By chance a quarter of them lies within an eighth of the
# grid, and up to 54 % where other scores were stored (192 rows); of an L in 16 bits 74 to 100 %.
_SURE, _NEAR, _MOST, _ROWS = 1 / 16, 1 / 8, 0.7, 24
# Of ways whose part on the grid is that much smaller than the largest no gradients are made.
_AS_NEAR = 0.1
# The mean of its errors, in spacings, was 0.07 at most in 192 such L of loops in 16 bits, and 0.45 to 0.54 where L was
# cut off instead.
_CENTRED = 0.25
# So many spacings of the largest of scores and L it may be off; those 192 were 1.13 at most.
_FURTHEST = 2.0
# The grid leaves that much less of L' than a factor that all rows share does: of rows whose L is one number both leave
# as much, as any wrong factor may.
_LESS = 0.5
# Of a sum of products in fp32, relative to that of their sizes.
_FP32 = 2.0**-23


def backwards_of_read_lse(
    heads: Sequence[AttentionHead],
    fmt: FloatFormat,
    o: Sequence[Tensor],
    *,
    dq: Tensor | None = None,
    dv: Tensor | None = None,
    ways: Sequence[str] = WAYS,
) -> list[dict[str, dict[str, Tensor]]]:
    """Gradients from an L in 16 bits that dV shows, or dQ, by the ways of ``from_lse``.

    Args:
        heads: The query heads of one key head, with dO; without dropout, a softcap or a sink.
        fmt: The inputs' format.
        o: Their captured O, [Tq, Dv] float64 each.
        dq: The captured dQ, [Tq, D] float64, of a single head; looked at where there is no dV.
        dv: The captured dV, [Tk, Dv] float64, of all query heads of its key head.
        ways: Those of ``WAYS`` that are tried.

    Returns:
        Of each head as ``tiled_loops.backwards``, "" from the true L; empty where no way's L' lies on the grid.
    """
    lse = [scores_of(head, fmt, "fused").logsumexp(1) for head in heads]
    read = dict[str, tuple[float, Tensor]]()
    for way in ways:
        scores = torch.cat([scores_of(head, fmt, way.split(":")[1]) for head in heads])
        if (known := _read(heads, fmt, scores, torch.cat(lse), o, dq, dv)) is not None:
            read[way] = known
    least = max((share for share, _ in read.values()), default=0.0) - _AS_NEAR
    nearest = {
        way: values.split_with_sizes([len(h.q) for h in heads])
        for way, (share, values) in read.items()
        if share >= least
    }
    found = []
    for i, (head, out) in enumerate(zip(heads, o, strict=True)):
        # In steps S - L is cast; else L as it is read.
        made = {
            way: from_lse(head, fmt, way if "steps" in way else way.replace("low", "fp32"), (out, of[i]))
            for way, of in nearest.items()
        }
        found.append(made | {"": from_lse(head, fmt, "from-l:fused:fp32", (out, lse[i]))} if made else made)
    return found


def _read(
    heads: Sequence[AttentionHead],
    fmt: FloatFormat,
    scores: Tensor,
    lse: Tensor,
    o: Sequence[Tensor],
    dq: Tensor | None,
    dv: Tensor | None,
) -> tuple[float, Tensor] | None:
    """Which part of L' lies on the grid, and L' of all heads' rows.

    It is the number on the grid, what is read where a row does not tell which number there, and the true L where no
    rounding makes what is read; None: most are not on the grid.
    """
    probs, do = (scores - finite(lse)[:, None]).exp(), torch.cat([head.do for head in heads if head.do is not None])
    spacing, relative = ulp(finite(lse), fmt), 2.0 ** (-2 * fmt.precision) / 24
    matrix, right = torch.diag(spacing.square().reciprocal()), torch.zeros_like(spacing)
    if dv is not None:
        true = probs.T @ do
        noise = probs.square().T @ do.square() * relative + ulp(true, fmt).square() / 12
        by_key = probs / noise.mean(1)
        matrix += (by_key @ probs.T) * (do @ do.T)
        right += ((by_key @ (dv - true)) * do).sum(1)
    elif dq is not None:
        products, k, v = do * o[0], heads[0].k, heads[0].v
        dscores = probs * (do @ v.T - products.sum(1, keepdim=True))
        cancelled = probs * (do.abs() @ v.abs().T + products.abs().sum(1, keepdim=True)) * _FP32
        true = dscores @ k * heads[0].scale
        noise = (dscores.square() * relative + cancelled.square()) @ k.square() * heads[0].scale ** 2
        noise += ulp(true, fmt).square() / 12
        matrix += torch.diag((true.square() / noise).sum(1))
        right += (true * (dq - true) / noise).sum(1)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if failed or not factor.isfinite().all():
        return None
    inverse = torch.cholesky_inverse(factor)
    read = finite(lse) - (inverse @ right).clamp(min=-0.9).log1p()
    nearest = round_nearest_even(read, fmt)
    largest = torch.maximum(finite(lse).abs(), scores.masked_fill(scores.isinf(), 0.0).abs().amax(1))
    possible = lse.isfinite() & ((nearest - lse).abs() <= _FURTHEST * ulp(largest, fmt))
    sure = possible & (inverse.diagonal().clamp(min=0).sqrt() < _SURE * spacing)
    near = (read - nearest).abs() <= _NEAR * ulp(read, fmt)
    if sure.sum() < _ROWS or (share := float(near[sure].double().mean())) < _MOST:
        return None
    if ((nearest - lse) / spacing)[sure].mean().abs() > _CENTRED:
        return None
    left, shift = ((read - nearest) / spacing)[sure], ((read - lse) / spacing)[sure]
    if left.abs().median() > _LESS * (shift - shift.median()).abs().median():
        return None
    # In BF16 beside finer inputs it is on their grid as well.
    if fmt != BF16 and (round_nearest_even(nearest, BF16) == nearest)[sure].all():
        return None
    return share, torch.where(sure, nearest, torch.where(possible, read, finite(lse)))
