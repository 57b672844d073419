"""How far any sane kernel may be off whose inputs' format has no published recipe: FP32 and FP64, and FP8.

Tensor cores multiply FP32 numbers in TF32: q, k, v, dO, P and dS lose all but 10 bits, to the nearest or, in Triton's
tl.dot, by truncation (FlexAttention on an H200: the error of its O and dV has a correlation of 0.91 to 1.00 with that
of truncated inputs, 0.98 in the median). FP8 operands are exact, and P, dS and dO are cast to the inputs' format. Where
outputs are in BF16 or FP16, or all numbers of q, k and v are, the kernel may have run in that format, and it counts.

Let e^2 be the variance of an operand's relative error, h its largest mean (half a unit), M_ij^2 = alpha^2 q_i^2 . k_j^2
(so e M is the error of a score by one of its operands), g = dP - delta, G_ij = dO_i^2 . v_j^2, and

    a_i = sum_j P_ij^2 M_ij^2                        errors of k, of which every key has its own
    b_i = sum_d alpha^2 q_id^2 Var_P(k_d)            errors of q, which all keys share
    c_i = sum_f dO_if^2 Var_P(v_f)                   errors of dO, likewise; Var_P(x) = sum_j P_ij x_j^2 - (sum P x)^2

What is shared adds up in any way: by Cauchy and Schwarz (sum_j w_j e_j x_j)^2 <= sum |w_j| e_j^2 sum |w_j| x_j^2. So

    var O     <= e^2 (2 P^2 V^2 + 2 (P^2 M^2) V^2 + 2 a O^2 + b Var_P(V)) + 4 h^2 O^2 + ulp^2 / 12
    var delta <= dO^2 (2 e^2 P^2 V^2 + ulp(O)^2 / 12) + e^2 (P^2 M^2 g^2 + b P g^2 + dO^2 O^2)
    var dQ    <= alpha^2 (e^2 (dS^2 (2 + M^2) K^2 + b (P g^2) K^2 + P^2 G K^2 + c Var_P(K))
                          + (var delta + 4 h^2 delta^2) (P K)^2) + (e^2 a + 4 h^2) dQ^2 + ulp^2 / 12
    var dK    <= alpha^2 (e^2 ((dS^2 (2 + 2 M^2 + 2 b')^T Q^2 + (P^2 G)^T Q^2 + |dS|^T(M^2 + a) |dS|^T Q^2
                          + (P G)^T 1 P^T Q^2) + (P^2 var delta)^T Q^2) + 4 h^2 (dK^2 + (alpha (P delta)^T Q)^2)
    var dV    <= e^2 ((P^2 (2 + 2 M^2 + 2 b'))^T dO^2 + P^T(M^2 + a) P^T dO^2) + 4 h^2 dV^2 + ulp^2 / 12

with b'_i = alpha^2 q_i^2 . (P K)_i^2 (products of matrices where a row index is left out, squares elementwise). What
truncation alone does to a head, which has a sign, is measured: the reference of the truncated inputs. With FP8 e^2 of
q, k and v is 0, and 4 h^2 is h^2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import torch
from torch import Tensor

from attn_diag.head.counterfactual import FORMATS, NoiseCollector, covers
from attn_diag.head.fp32_in_bf16 import (
    IN_BLOCKS,
    MOST_OF_GRADIENTS,
    MOST_SCORES,
    CoarseWay,
    coarse_ways,
    nearest_on,
)
from attn_diag.head.propagation import sloped
from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference import (
    AttentionHead,
    Dropout,
    FloatFormat,
    HeadReference,
    RowBlock,
    format_of,
    round_nearest_even,
    ulp,
)
from attn_diag.reference.fused import reference_of

_NARROW = format_of(torch.bfloat16), format_of(torch.float16)
TF32 = FloatFormat("tf32", 10, -126, (2 - 2.0**-10) * 2.0**127)
# Errors of O of no more spacings are those of products in fp32; TF32's are from a thousand on.
_FINE = 64
# Of ln alpha, for a slope: its square is far below the slope's own size, and it is far above float64's roundings.
_STEP = 2.0**-12
# Of a number cut to p bits, of which all are alike likely in a binade: 1/6 - (ln 2 / 2)^2, over 4^p. To nearest: 1/24.
_VARIANCE = 1 / 6 - math.log(2) ** 2 / 4


def coarsest(head: AttentionHead, fmt: FloatFormat, stored: Mapping[str, FloatFormat]) -> FloatFormat:
    """The coarsest format in which a sane kernel may multiply.

    Args:
        head: The head.
        fmt: The inputs' format.
        stored: The formats in which the kernel under test returned its outputs.
    """
    if fmt.precision < _NARROW[0].precision or covers(fmt):
        return fmt
    for narrow in _NARROW:
        if any(stored[name] == narrow for name in ("o", "dq", "dk", "dv") if name in stored):
            return narrow
        if all(bool((round_nearest_even(x, narrow) == x).all()) for x in (head.q, head.k, head.v)):
            return narrow
    return TF32


def noise_collector(
    head: AttentionHead, fmt: FloatFormat, stored: Mapping[str, FloatFormat], *, want_keys: bool
) -> NoiseCollector:
    """The variances of a well-rounded kernel or, without a published recipe, of any sane one; arguments as before."""
    out = stored.get("o", fmt)
    if covers(fmt):
        return NoiseCollector(head, fmt, out, want_keys)
    cast = coarsest(head, fmt, stored)
    return CoarseNoise(head, cast, _narrower(out, cast), want_keys, exact=fmt == cast)


@dataclass
class CoarseNoise(NoiseCollector):
    """Gathers, block by block, how far any sane kernel may be off; see the module."""

    exact: bool = False
    """Whether q, k and v lose nothing as operands: FP8."""
    _shared: dict[str, Tensor] = field(default_factory=dict)
    """Factors of dK's and dV's products, summed over rows."""

    def __post_init__(self) -> None:
        super().__post_init__()
        head, new = self.head, self.head.q.new_zeros
        self._cast = _VARIANCE * 4.0**-self.fmt.precision
        self._operand = 0.0 if self.exact else self._cast
        # (2 h)^2; of a product with an exact operand h^2.
        self._common = 4.0 ** -(self.fmt.precision + (1 if self.exact else 0))
        self._lost = self._smallest * 3  # half the spacing below the normal numbers, squared
        self.variance["lse"] = new(len(head.q))
        if head.do is not None and self.want_keys:
            keys = len(head.k)
            self._shared = {"scores": new(keys), "probs": new(keys), "values": new(keys), "weighted": new(head.k.shape)}
            self._shared |= {"ones": new(head.k.shape), "do": new(head.v.shape), "delta": new(head.k.shape)}

    def add(self, block: RowBlock) -> None:
        """Take one block of the reference."""
        rows, keys, probs, out = block.rows, block.keys, block.probs, block.out
        cast, operand, common = self._cast, self._operand, self._common
        k, k2, v2, q2 = self.head.k[keys], self._k2[keys], self._v2[keys], self._q2[rows]
        square = probs.square()

        def twice(x: Tensor) -> Tensor:
            """Times W^2, by which dropout multiplies the square of what belongs to a key."""
            return self.head.drop(self.head.drop(x, rows, keys), rows, keys)

        scores = q2 @ k2.T  # M^2
        squared_scores = square * scores
        mean = probs @ k
        var_k = (probs @ k2 - mean.square()).clamp_(min=0.0)
        var_v = (twice(probs) @ v2 - out.square()).clamp_(min=0.0)
        own = squared_scores.sum(1)[:, None]  # a
        by_q = (q2 * var_k).sum(1)[:, None]  # b
        moved = (q2 * mean.square()).sum(1)[:, None]  # b'
        # What lies below the cast's smallest number is lost, at most all of it, and with one sign.
        lost = probs * (self._lost / block.unnormalised_probs.square().clamp(min=1e-300)).clamp_(max=1.0)
        products = (cast + operand) * twice(square) @ v2 + lost.sum(1)[:, None] * (twice(probs) @ v2)
        o = products + operand * (2 * twice(squared_scores) @ v2 + 2 * own * out.square() + by_q * var_v)
        o += common * out.square() + ulp(block.out, self.out).square() / 12
        self.variance["o"][rows] = o
        largest = block.row_max.masked_fill(block.fully_masked, 0.0).square()
        self.variance["lse"][rows] = operand * (own + moved)[:, 0] + (common if operand else 0.0) * largest
        if block.delta is None or block.dscores is None:
            return
        assert self.head.do is not None
        dprobs = self.head.drop(self.head.do[rows] @ self.head.v[keys].T, rows, keys) - block.delta[:, None]  # g
        do2, terms = self._do2[rows], twice(self._do2[rows] @ v2.T)  # G
        gradients = probs * dprobs.square()
        delta = (do2 * (products + ulp(out, self.out).square() / 12)).sum(1)
        delta += operand * ((squared_scores * dprobs.square()).sum(1) + by_q[:, 0] * gradients.sum(1))
        delta += cast * (do2 * out.square()).sum(1)
        self.variance["delta"][rows] = delta
        dscores = block.dscores
        squares = dscores.square()
        through = sloped(block, probs) @ k
        by_do = (do2 * var_v).sum(1)[:, None]
        # Scaled to the format's range before it is cast, as FP8 must be.
        tiny = self._smallest * (dscores.abs().amax() / self.fmt.largest) ** 2 if self.exact else self._smallest_dscore
        dq = (squares * (cast + operand + operand * scores)) @ k2
        dq += operand * by_q * (gradients @ k2) + (operand * square * terms) @ k2 + cast * by_do * var_k
        dq += tiny * ((probs > 0).to(probs.dtype) @ k2)
        dq += (delta + common * block.delta.square())[:, None] * through.square()
        assert block.dq is not None
        dq = dq * self.head.scale**2 + (operand * own + common) * block.dq.square()
        self.variance["dq"][rows] = dq
        if not self.want_keys:
            return
        either = cast + operand + 2 * operand * (scores + moved)
        weights = squares * either + cast * square * terms + square * delta[:, None] + tiny * (probs > 0)
        self.variance["dk"][keys] += weights.T @ q2
        self.variance["dv"][keys] += twice(square * either + lost * probs).T @ do2
        shared, size = self._shared, dscores.abs()
        shared["scores"][keys] += (size * (scores + own)).sum(0)
        shared["probs"][keys] += (probs * (scores + own)).sum(0)
        shared["values"][keys] += (probs * terms).sum(0)
        shared["weighted"][keys] += size.T @ q2
        shared["ones"][keys] += probs.T @ q2
        shared["do"][keys] += twice(probs).T @ do2
        shared["delta"][keys] += (probs * block.delta[:, None]).T @ self.head.q[rows] * self.head.scale

    def finished(self, reference: HeadReference, stored: Mapping[str, FloatFormat]) -> dict[str, Tensor]:
        """As of ``NoiseCollector``, with what errors shared by all rows of a key may add to dK and dV."""
        coarse = {name: _narrower(stored.get(name, self.fmt), self.fmt) for name in ("dq", "dk", "dv")}
        found = super().finished(reference, coarse)
        if not self._shared or reference.dk is None or reference.dv is None:
            return found
        shared, operand, common = self._shared, self._operand, self._common
        found["dk"] = (
            found["dk"]
            + common * (reference.dk.square() + shared["delta"].square())
            + operand * (shared["scores"][:, None] * shared["weighted"] + shared["values"][:, None] * shared["ones"])
        )
        found["dv"] = found["dv"] + common * reference.dv.square() + operand * shared["probs"][:, None] * shared["do"]
        return found


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
            return self._at_fp32_factors(error, rows)
        for name in dict.fromkeys((cast.name, "bf16")):
            found = reference_of(_cut(self._head, name), key_gradients=False)
            made = (found.out - truth)[rows]
            follows = float((error * made).sum() / made.square().sum().clamp(min=1e-300))
            if 0.5 < follows < 1.5:
                return {"o": found.out} | ({} if found.delta is None else {"delta": found.delta})
        return None

    def _at_fp32_factors(self, error: Tensor, rows: Tensor) -> dict[str, Tensor] | None:
        """O and delta at the softmax scale, and 1 / (1 - p) of dropout, that kernels have in fp32: of those known, at
        the ones that come nearest to O's error.

        Their rounding moves all scores, or all of O, alike, so that O has a mean error in every kernel, unless alpha
        and 1 - p are powers of two.
        """
        every = list(product(_fp32_scales(self._head.scale), _fp32_drops(self._head.dropout)))
        if set(every) == {(1.0, 1.0)}:
            return None
        # An error of 2^-24 is lost in float64 beside the roundings of two references: the slope is taken.
        up, truth, down = (self.at_scale(1 + step) for step in (_STEP, 0.0, -_STEP))
        slope: dict[str, Tensor] = {
            name: (up[name] - down[name]) / (2 * _STEP) for name in ("o", "delta") if name in up
        }

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
        if self._fmt.precision <= _NARROW[0].precision:
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


def _cut(head: AttentionHead, how: str) -> AttentionHead:
    q, k, v = (round_to(x, parse(how)) for x in (head.q, head.k, head.v))
    return replace(head, q=q, k=k, v=v, do=None if head.do is None else round_to(head.do, parse(how)))


def _narrower(fmt: FloatFormat, cast: FloatFormat) -> FloatFormat:
    """The format of an output: a kernel that runs in BF16 or FP16 has rounded to it, however it is stored."""
    return cast if cast.name in FORMATS and cast.precision < fmt.precision else fmt
