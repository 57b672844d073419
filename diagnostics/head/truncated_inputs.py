"""What an FP32 kernel's choices make of a head: operands cut off to TF32 or rounded, fp32 factors, parts in BF16."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from attn_diag.head.fp32_in_bf16 import (
    EXPLAINED,
    IN_BLOCKS,
    MOST_OF_GRADIENTS,
    MOST_SCORES,
    CoarseWay,
    coarse_ways,
    nearest_on,
)
from attn_diag.head.no_recipe import NARROW, TF32, coarsest
from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference import AttentionHead, Dropout, FloatFormat, reference_rows, round_nearest_even, ulp
from attn_diag.reference.fused import reference_of

# Errors of O of no more spacings are those of products in fp32; TF32's are from a thousand on.
_FINE = 64
# O's errors are so many times those of a way that makes them, beside what else makes some.
_FOLLOWS = 0.5, 1.5
# Of products of parts: 0.41 to 0.91 times (H200; CUTLASS's second part is rounded in another way than to nearest).
_FOLLOWS_PARTS = 0.25
# O is by so much nearer to zero at most: 2.8e-7 to 4.5e-7 of itself (H200, 130 to 2,048 keys); of P without the last 5
# bits, whose errors follow those of parts, 7.6e-7 and more.
_CUT_SUMS = 0.7 * 2.0**-20
# Standard errors of how closely errors follow a way, whose rows are independent.
_SURE = 4.0
# Standard errors of a mean that shows.
_CLEAR = 3.0
# Rows whose scores are held at once.
_ROWS = 256
# Of ln alpha, for a slope: its square is far below the slope's own size, and it is far above float64's roundings.
_STEP = 2.0**-12


class TruncatedInputs:
    """The truth of a head whose q, k, v and dO are cut to the bits that the tensor core keeps, rounded as returned."""

    def __init__(
        self, head: AttentionHead, fmt: FloatFormat, stored: Mapping[str, FloatFormat], *, key_gradients: bool
    ) -> None:
        self._head, self._fmt, self._stored, self._keys = head, fmt, stored, key_gradients
        self._found: dict[str, Tensor] = {}
        self._along: dict[CoarseWay, dict[str, Tensor]] = {}

    def outputs(self) -> dict[str, Tensor]:
        """o, lse and, with dO, delta, dq, dk and dv by name; float64."""
        if not self._found:
            cast = coarsest(self._head, self._fmt, self._stored)
            head = self._head if cast == self._fmt else _cut(self._head, f"{cast.name}:toward-zero")
            for name, tensor in self._outputs_of(head).items():
                own = name in ("o", "dq", "dk", "dv")
                self._found[name] = round_nearest_even(tensor, self._stored.get(name, self._fmt)) if own else tensor
        return self._found

    def _outputs_of(self, head: AttentionHead) -> dict[str, Tensor]:
        truth = reference_of(head, key_gradients=self._keys)
        every = {"o": truth.out, "lse": truth.lse, "delta": truth.delta}
        every |= {"dq": truth.dq, "dk": truth.dk, "dv": truth.dv}
        return {name: tensor for name, tensor in every.items() if tensor is not None}

    def is_cut_off(self, out: Tensor, truth: Tensor, rows: Tensor) -> bool:
        """Whether O's errors are those of operands cut off to TF32, as Triton's ``tl.dot`` of fp32 numbers takes them.

        What P, which is cut off too, leaves beside q, k and v is 7 % of their square at most; where operands are
        rounded to nearest, or O has a factor for which the errors are as biased, it is four times that square and more.

        Args:
            out: The captured O, [Tq, Dv].
            truth: The true one.
            rows: Indices of the rows that count.
        """
        if coarsest(self._head, self._fmt, self._stored) != TF32 or not len(rows):
            return False
        error, made = (out - truth)[rows], (self.outputs()["o"] - truth)[rows]
        return bool((error - made).square().sum() <= EXPLAINED * error.square().sum() > 0)

    def to_nearest(self, out: Tensor, truth: Tensor, rows: Tensor) -> dict[str, Tensor] | None:
        """What operands rounded to nearest make of O and delta: V's errors, which all rows share, have a mean.

        Args:
            out: The captured O, [Tq, Dv].
            truth: The true one.
            rows: Indices of the rows that count.

        Returns:
            o and, with dO, delta in the operands' format whose errors O's follow, of products in fp32 those of factors
            in fp32; None where they follow none, as of truncated operands.
        """
        error = (out - truth)[rows]
        cast = coarsest(self._head, self._fmt, self._stored)
        fine = error.square().mean() <= (_FINE * ulp(truth[rows], self._fmt)).square().mean()
        if cast == self._fmt:
            return None
        if bool(fine):
            return self._from_parts(out, truth, rows) or self._at_fp32_factors(error, rows)
        for name in dict.fromkeys((cast.name, "bf16")):
            for head in _rounded(self._head, name):
                found = reference_of(head, key_gradients=False)
                made = (found.out - truth)[rows]
                follows = float((error * made).sum() / made.square().sum().clamp(min=1e-300))
                if _FOLLOWS[0] < follows < _FOLLOWS[1]:
                    return {"o": found.out} | ({} if found.delta is None else {"delta": found.delta})
        return None

    def _from_parts(self, out: Tensor, truth: Tensor, rows: Tensor) -> dict[str, Tensor] | None:
        """O and delta as they are, where O's errors follow those of products of TF32 parts (``from_tf32_parts``), and O
        is no nearer to zero than these and a tensor core's sums, which are cut off too, make it."""
        error = (out - truth)[rows]
        scores, towards = len(self._head.q) * len(self._head.k), (error * truth[rows].sign()).sum(1)
        if coarsest(self._head, self._fmt, self._stored) != TF32 or scores > MOST_SCORES or len(rows) < 2:
            return None
        if not bool(towards.sum() < -_CLEAR * math.sqrt(len(rows)) * towards.std()):
            return None
        true = truth[rows]
        # Sums that are cut off move S, and O, by a factor, which tells nothing.
        factors = torch.stack([true.flatten(), self._slope()["o"][rows].flatten()], 1)

        def beside_factors(errors: Tensor) -> Tensor:
            fitted: Tensor = torch.linalg.lstsq(factors, errors.reshape(-1, 1)).solution
            return errors - (factors @ fitted).view_as(errors)

        made, observed = (beside_factors(x) for x in ((from_tf32_parts(self._head) - truth)[rows], error))
        square = made.square().sum().clamp(min=1e-300)
        follows = float((observed * made).sum() / square)
        # Rows share V's errors, and features P's: of one row in common, errors are known by no more than its features.
        beside = (observed - follows * made) * made
        sure = _SURE * max(float(beside.sum(dim).square().sum().sqrt() / square) for dim in (0, 1))
        if (
            not _FOLLOWS_PARTS < follows < _FOLLOWS[1]
            or follows < sure
            or -towards.sum() > _CUT_SUMS * true.abs().sum()
        ):
            return None
        return {"o": out} | ({} if self._head.do is None else {"delta": (self._head.do * out).sum(1)})

    def _slope(self) -> dict[str, Tensor]:
        """O and delta by ln alpha; an error of 2^-24 is lost in float64 beside the roundings of two references."""
        up, down = (self.at_scale(1 + step) for step in (_STEP, -_STEP))
        return {name: (up[name] - down[name]) / (2 * _STEP) for name in ("o", "delta") if name in up}

    def _at_fp32_factors(self, error: Tensor, rows: Tensor) -> dict[str, Tensor] | None:
        """O and delta at the softmax scale, and 1 / (1 - p) of dropout, that kernels have in fp32: of those known, at
        the ones that come nearest to O's error.

        Their rounding moves all scores, or all of O, alike, so that O has a mean error in every kernel, unless alpha
        and 1 - p are powers of two.
        """
        every = list(product(_fp32_scales(self._head.scale), _fp32_drops(self._head.dropout)))
        if set(every) == {(1.0, 1.0)}:
            return None
        slope, truth = self._slope(), self.at_scale(1.0)

        def moved(name: str, scale: float, dropped: float) -> Tensor:
            return (scale - 1) * slope[name] + (dropped - 1) * truth[name]

        nearest = min(every, key=lambda factors: float((error - moved("o", *factors)[rows]).square().sum()))
        if nearest == (1.0, 1.0):
            return None
        return {name: truth[name] + moved(name, *nearest) for name in slope}

    def ways(self, observed: Tensor | None = None, truth: Tensor | None = None) -> list[CoarseWay]:
        """Ways through BF16 that may make this head's errors; none of inputs that are no finer.

        Args:
            observed: O, where that is what is off: those that come nearest to it. Else those that have gradients.
            truth: What is true of it.
        """
        head = self._head
        if self._fmt.precision <= NARROW[0].precision:
            return []
        every, scores = coarse_ways(head.q.shape[1], len(head.k)), len(head.q) * len(head.k)
        if head.dropout is not None or scores > (MOST_OF_GRADIENTS if observed is None else MOST_SCORES):
            return list(every[:IN_BLOCKS])
        if observed is not None and truth is not None:
            return nearest_on(head, observed, truth)
        return [way for way in every if way.backward]

    def along(self, way: CoarseWay) -> dict[str, Tensor]:
        """What such a kernel returns, in the formats of the kernel under test; float64."""
        if way not in self._along:
            found = way.outputs(self._head)
            self._along[way] = {
                n: round_nearest_even(t, self._stored[n]) if n in self._stored else t for n, t in found.items()
            }
        return self._along[way]

    def at_scale(self, factor: float) -> dict[str, Tensor]:
        """The truth at another softmax scale."""
        return self._outputs_of(replace(self._head, scale=factor * self._head.scale))


def _fp32_scales(scale: float) -> tuple[float, ...]:
    """alpha as kernels have it over alpha: exact, in fp32, its root on q and on k (SDPA's math), in base 2."""
    size, to_base_2 = np.float32(abs(scale)), np.float32(math.log2(math.e))
    roots = {float(np.float32(abs(scale) ** 0.5)), float(np.sqrt(size))}
    found = [abs(scale), float(size), *(root**2 for root in roots), float(size * to_base_2) / math.log2(math.e)]
    return tuple(one / abs(scale) for one in found) if scale else (1.0,)


def _fp32_drops(dropout: Dropout | None) -> tuple[float, ...]:
    """1 / (1 - p) as kernels have it over its own: exact, in fp32, and divided by 1 - p in fp32."""
    if dropout is None:
        return (1.0,)
    kept = float(np.float32(1 - dropout.p))
    factors = dropout.factor, float(np.float32(dropout.factor)), float(np.float32(1 / kept)), 1 / kept
    return tuple(one / dropout.factor for one in factors)


def _rounded(head: AttentionHead, to: str) -> Iterator[AttentionHead]:
    """With operands rounded to nearest: as they are, times the root of alpha (SDPA's math), and V, of which the mean
    is, alone."""
    yield _cut(head, to)
    if head.scale > 0:
        root = math.sqrt(head.scale)
        q, k = (round_to(x * root, parse(to)) / root for x in (head.q, head.k))
        yield replace(_cut(head, to), q=q, k=k)
    yield replace(head, v=round_to(head.v, parse(to)))


def from_tf32_parts(head: AttentionHead) -> Tensor:
    """O [Tq, Dv], float64, of products x y = x1 y1 + x1 y2 + x2 y1 of fp32 numbers, all else exact ("3xTF32").

    x1 is x cut off to TF32, x2 what that leaves, rounded to it: so CUTLASS multiplies (``OpMultiplyAddFastF32``), and
    torch's memory-efficient SDPA. What is lost has the sign of x y: O is 2e-7 of itself nearer to zero.
    """
    (q1, q2), (k1, k2), (v1, v2) = (_parts(x) for x in (head.q, head.k, head.v))
    of_parts = replace(head, q=torch.cat([q1, q1, q2], 1), k=torch.cat([k1, k2, k1], 1), do=None)
    found = []
    for rows in torch.split(torch.arange(len(q1), device=q1.device), _ROWS):
        block = reference_rows(of_parts, rows)
        p1, p2 = _parts(head.drop(block.unnormalised_probs, block.rows, block.keys))
        keys = block.keys
        found.append((p1 @ v1[keys] + p1 @ v2[keys] + p2 @ v1[keys]) * block.inverse_row_sum[:, None])
    return torch.cat(found)


def _parts(x: Tensor) -> tuple[Tensor, Tensor]:
    first = round_to(x, parse(f"{TF32.name}:toward-zero"))
    return first, round_to(x - first, parse(TF32.name))


def _cut(head: AttentionHead, how: str) -> AttentionHead:
    q, k, v = (round_to(x, parse(how)) for x in (head.q, head.k, head.v))
    return replace(head, q=q, k=k, v=v, do=None if head.do is None else round_to(head.do, parse(how)))
