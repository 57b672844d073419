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
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_diag.head.counterfactual import FORMATS, NoiseCollector, covers
from attn_diag.head.propagation import sloped
from attn_diag.reference import (
    AttentionHead,
    FloatFormat,
    HeadReference,
    RowBlock,
    format_of,
    round_nearest_even,
    ulp,
)

NARROW = format_of(torch.bfloat16), format_of(torch.float16)
TF32 = FloatFormat("tf32", 10, -126, (2 - 2.0**-10) * 2.0**127)
# Of a number cut to p bits, of which all are alike likely in a binade: 1/6 - (ln 2 / 2)^2, over 4^p. To nearest: 1/24.
_VARIANCE = 1 / 6 - math.log(2) ** 2 / 4


def coarsest(head: AttentionHead, fmt: FloatFormat, stored: Mapping[str, FloatFormat]) -> FloatFormat:
    """The coarsest format in which a sane kernel may multiply.

    Args:
        head: The head.
        fmt: The inputs' format.
        stored: The formats in which the kernel under test returned its outputs.
    """
    if fmt.precision < NARROW[0].precision or covers(fmt):
        return fmt
    for narrow in NARROW:
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


def _narrower(fmt: FloatFormat, cast: FloatFormat) -> FloatFormat:
    """The format of an output: a kernel that runs in BF16 or FP16 has rounded to it, however it is stored."""
    return cast if cast.name in FORMATS and cast.precision < fmt.precision else fmt
