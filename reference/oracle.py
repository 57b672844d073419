"""Attention of single rows in mpmath at any precision, forward and backward, correctly rounded.

Scores are exact: q, k, alpha and an additive mask are floats, so S = alpha q.k + mask is an integer times a power of
two. The rest is evaluated in fixed point with w fractional bits; every error is bounded beforehand in units of 2**-w:

    E_j = exp(S_j - m) 2**w             off by at most e = 2 (3 with softcap): mpmath's exp, log and tanh are taken to
                                        be right to 2 units in the last of w + 10 bits; then one floor
    l = sum E_j                         off by n e            (n visible keys; integer sums are exact)
    O_bar_d = sum E_j V_jd              off by e sum_j |V_jd| (V is integers times a power of two)
    A = sum E_j dP_j                    off by e sum_j |dP_j| (dP = dO.V_j is exact)
    Z_j = E_j (l dP_j - A)              off by e |l dP_j - A| + (E_j + e) (n e |dP_j| + e sum_i |dP_i|)
    dS_j = Z_j / l^2                    dQ_d = alpha sum_j dS_j K_jd     (softcap: times 1 - tanh^2, known to 2 units)

Quotients are rounded outwards. A result is rounded to a format where both ends of its enclosure round alike; else w is
doubled (A. Ziv, ACM Trans. Math. Softw. 17 (1991) 410). That never ends where the true value is a rational number at a
midpoint, so rational results are recognised: ``reference.rational``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from operator import mul

import numpy as np
from mpmath import libmp

from attn_diag.reference.attention import AttentionHead
from attn_diag.reference.exact import Enclosure, IntegerMatrix, dyadic, quotient, round_dyadic, round_fraction, scaled
from attn_diag.reference.rational import RowRationals
from attn_diag.reference.rounding import FP64, FloatFormat
from attn_diag.reference.visible import visible_keys

# float64 has 53 bits, and 11 more leave room for 2 units an exponential in a row of up to 2**9 keys: with less, no
# enclosure could be narrower than float64's own rounding.
MIN_BITS = 64
DEFAULT_BITS = 128
# Differences of logits of 1e4 need 14,427 bits before exp(-1e4) shows beside 1.
MAX_BITS = 2**15
_GUARD = 10


class OracleLimitError(ArithmeticError):
    """The rounding of a value could not be decided within the largest working precision allowed."""


@dataclass(frozen=True)
class _Evaluation:
    """One row at one working precision; see the module's table."""

    bits: int
    exponentials: list[int]
    slack: int
    row_sum: int
    shift: Fraction  # what was taken off every score: m, or a number close to it under softcap
    scores: list[Enclosure]
    slopes: list[int] | None

    @property
    def row_sum_error(self) -> int:
        return self.slack * len(self.exponentials)

    @property
    def row_sum_ends(self) -> tuple[int, int]:
        return self.row_sum - self.row_sum_error, self.row_sum + self.row_sum_error


class HeadOracle:
    """The exact truth about chosen rows of one head.

    Args:
        head: As the float64 reference takes it.
        bits: The working precision to start with, fractional bits of exp(S - m).
        max_bits: Where Ziv's loop gives up.

    Raises:
        ValueError: Fewer than 64 bits, more than ``max_bits``, or NaN or Inf in the head.
    """

    def __init__(self, head: AttentionHead, *, bits: int = DEFAULT_BITS, max_bits: int = MAX_BITS) -> None:
        if not MIN_BITS <= bits <= max_bits:
            raise ValueError(
                f"the oracle's precision must lie between {MIN_BITS} and {max_bits} bits, got {bits}: "
                f"with fewer than {MIN_BITS} nothing can be said about float64"
            )
        self.head, self.bits, self.max_bits = head, bits, max_bits
        self.k, self.v = IntegerMatrix.of(head.k), IntegerMatrix.of(head.v)
        self.scale = dyadic(head.scale)

    def row(self, t: int) -> OracleRow:
        """Row t of the head. Raises IndexError where there is no such row."""
        if not 0 <= t < len(self.head.q):
            raise IndexError(f"row must lie between 0 and {len(self.head.q) - 1}, got {t}")
        return OracleRow(self, t)


class OracleRow:
    """One query row. Methods return float64 lists (one number for L, m, l and delta), correctly rounded to ``fmt``.

    Lists over keys follow ``keys``, the visible ones; lists over features are [D]. The row of a head without dO has
    no delta, dP, dS and dQ (ValueError). A row without keys has O = 0, L = m = -inf, l = 0 and zero gradients; with a
    sink, which is a last key that lists leave out, L is the sink's logit. l is relative to the largest of all logits.
    """

    def __init__(self, oracle: HeadOracle, t: int) -> None:
        self._oracle, self.t = oracle, t
        head = oracle.head
        self.keys, self._mask = visible_keys(head, t)
        self._k, self._v = oracle.k.rows(self.keys), oracle.v.rows(self.keys)
        if head.dropout is not None:  # with W_j V_j for V_j everything else is as ever
            factor, exponent = dyadic(head.dropout.factor)
            kept = head.dropout.kept[t].cpu().numpy()[self.keys]
            self._v = self._v.times_rows([factor if one else 0 for one in kept], exponent)
        if head.sink is not None:  # a last key of zeros, whose logit is an additive mask
            self._mask.append(Fraction(head.sink))
            self._k, self._v = self._k.with_zeros(), self._v.with_zeros()
        products, exponent = self._k.times(IntegerMatrix.of(head.q[t : t + 1]))
        m, e = oracle.scale
        # Products before softcap and mask, as integers times a power of two.
        self._raw, self._raw_exponent = [m * p for p in products], exponent + e
        self._dprobs: list[int] = []
        self._dprobs_exponent = 0
        if head.do is not None:
            self._dprobs, self._dprobs_exponent = self._v.times(IntegerMatrix.of(head.do[t : t + 1]))
        self.has_terms = bool(self._mask)
        self._evaluations: dict[int, _Evaluation] = {}
        self._ends: dict[tuple[str, int], list[Enclosure]] = {}

    def scores(self, fmt: FloatFormat = FP64) -> list[float]:
        """S of the visible keys (softcap and mask applied)."""
        return self._many(lambda bits: self.score_ends(bits)[: len(self.keys)], fmt, self._rational.score)

    def row_max(self, fmt: FloatFormat = FP64) -> float:
        """m = max S; -inf in a row without keys."""
        return max(self.scores(fmt), default=-np.inf)

    def row_sum(self, fmt: FloatFormat = FP64) -> float:
        """l = sum exp(S - m)."""
        if not self.has_terms:
            return 0.0
        return self._many(self.row_sum_ends, fmt, lambda _: self._rational.row_sum())[0]

    def probs(self, fmt: FloatFormat = FP64) -> list[float]:
        """P of the visible keys."""
        return self._many(lambda bits: self.probs_ends(bits)[: len(self.keys)], fmt, lambda _: self._rational.prob())

    def lse(self, fmt: FloatFormat = FP64) -> float:
        """L = m + ln l; -inf in a row without keys."""
        if not self.has_terms:
            return -np.inf
        return self._many(self.lse_ends, fmt, lambda _: self._rational.lse())[0]

    def out(self, fmt: FloatFormat = FP64) -> list[float]:
        """O [Dv]."""
        return self._many(self.out_ends, fmt, self._rational.out)

    def delta(self, fmt: FloatFormat = FP64) -> float:
        """Delta = rowsum(dO o O), of the exact O."""
        return self._many(self.delta_ends, fmt, lambda _: self._rational.delta())[0]

    def dprobs(self, fmt: FloatFormat = FP64) -> list[float]:
        """dP of the visible keys."""
        self._need_do()
        return [round_dyadic(x, self._dprobs_exponent, fmt) for x in self._dprobs]

    def dscores(self, fmt: FloatFormat = FP64) -> list[float]:
        """dS of the visible keys, the slope of a softcap included."""
        return self._many(lambda bits: self.dscores_ends(bits)[: len(self.keys)], fmt, self._rational.dscore)

    def dq(self, fmt: FloatFormat = FP64) -> list[float]:
        """dQ [D]."""
        return self._many(self.dq_ends, fmt, self._rational.dq)

    def dsink(self, fmt: FloatFormat = FP64) -> float:
        """What the row adds to the gradient of the sink's logit: dS of the last key, -P_sink delta."""
        return self._many(self.dsink_ends, fmt, lambda _: self.exact("dsink", 0))[0]

    def ends(self, output: str, bits: int) -> list[Enclosure]:
        """Enclosures of out, lse, delta, dq or dsink at ``bits`` bits; computed once."""
        if (output, bits) not in self._ends:
            self._ends[output, bits] = getattr(self, f"{output}_ends")(bits)
        return self._ends[output, bits]

    def exact(self, output: str, i: int) -> Fraction | None:
        """Element i of out, lse, delta, dq or dsink where it is known to be rational, else None."""
        of_one = {"out": self._rational.out, "dq": self._rational.dq}
        if output == "dsink":
            return self._rational.dscore(len(self._mask) - 1)
        of_row = {"lse": self._rational.lse, "delta": self._rational.delta}
        return of_one[output](i) if output in of_one else of_row[output]()

    def score_ends(self, bits: int) -> list[Enclosure]:
        """Enclosures of S."""
        return self._at(bits).scores if self.has_terms else []

    def row_sum_ends(self, bits: int) -> list[Enclosure]:
        """Enclosure of l, as a list of one."""
        e = self._at(bits)
        # Under softcap the maximum itself is known to one unit only.
        extra = 0 if e.slopes is None else (e.row_sum >> bits) + 1
        return [Enclosure(e.row_sum_ends[0] - extra, e.row_sum_ends[1] + extra, -bits)]

    def probs_ends(self, bits: int) -> list[Enclosure]:
        """Enclosures of P."""
        if not self.has_terms:
            return []
        e = self._at(bits)
        return [
            Enclosure(*quotient((max(x - e.slack, 0), x + e.slack), e.row_sum_ends, bits), -bits)
            for x in e.exponentials
        ]

    def lse_ends(self, bits: int) -> list[Enclosure]:
        """Enclosure of L, as a list of one."""
        e = self._at(bits)
        logarithm = libmp.mpf_log(libmp.from_man_exp(e.row_sum, -bits), bits + _GUARD + bits.bit_length(), "n")
        middle = libmp.to_fixed(logarithm, bits)
        # d ln l <= dl / (l - dl), l >= 1 - slack; 2 for the logarithm and its floor.
        margin = 2 + 2 * e.row_sum_error
        shift, exponent = e.shift.numerator, 1 - e.shift.denominator.bit_length()
        common = min(exponent, -bits)
        base = shift << (exponent - common)
        low, high = ((middle + sign * margin) << (-bits - common) for sign in (-1, 1))
        return [Enclosure(base + low, base + high, common)]

    def out_ends(self, bits: int) -> list[Enclosure]:
        """Enclosures of O."""
        width = self._oracle.head.v.shape[1]
        if not self.has_terms:
            return [Enclosure(0, 0, 0)] * width
        e = self._at(bits)
        sums = self._v.combine(e.exponentials)
        margins = [e.slack * len(self._mask) * x for x in self._v.largest]
        return [
            Enclosure(*quotient((s - m, s + m), e.row_sum_ends, bits), self._v.exponent - bits)
            for s, m in zip(sums, margins, strict=True)
        ]

    def delta_ends(self, bits: int) -> list[Enclosure]:
        """Enclosure of delta, as a list of one."""
        self._need_do()
        if not self.has_terms:
            return [Enclosure(0, 0, 0)]
        e = self._at(bits)
        total, margin = self._weighted_dprobs(e)
        ends = quotient((total - margin, total + margin), e.row_sum_ends, bits)
        return [Enclosure(*ends, self._dprobs_exponent - bits)]

    def dscores_ends(self, bits: int) -> list[Enclosure]:
        """Enclosures of dS."""
        if not self.has_terms:
            return []
        e = self._at(bits)
        weights, margins = self._unscaled_dscores(e)
        return [
            Enclosure(*quotient((w - m, w + m), self._square(e), 2 * bits), self._dprobs_exponent - bits)
            for w, m in zip(weights, margins, strict=True)
        ]

    def dsink_ends(self, bits: int) -> list[Enclosure]:
        """Enclosure of what the row adds to the sink's gradient, as a list of one."""
        return self.dscores_ends(bits)[-1:]

    def dq_ends(self, bits: int) -> list[Enclosure]:
        """Enclosures of dQ."""
        self._need_do()
        if not self.has_terms:
            return [Enclosure(0, 0, 0)] * self._oracle.head.q.shape[1]
        e = self._at(bits)
        weights, margins = self._unscaled_dscores(e)
        sums, margin = self._k.combine(weights), sum(margins)
        exponent = self._dprobs_exponent + self._k.exponent - bits
        widths = [margin * x for x in self._k.largest]
        ends = [quotient((s - w, s + w), self._square(e), 2 * bits) for s, w in zip(sums, widths, strict=True)]
        return [Enclosure(*pair, exponent).times(*self._oracle.scale) for pair in ends]

    def _need_do(self) -> None:
        if self._oracle.head.do is None:
            raise ValueError("this head has no dO: there is no delta and no gradient")

    def _weighted_dprobs(self, e: _Evaluation) -> tuple[int, int]:
        """A = sum E_j dP_j and its error."""
        return sum(map(mul, e.exponentials, self._dprobs)), e.slack * sum(map(abs, self._dprobs))

    @staticmethod
    def _square(e: _Evaluation) -> tuple[int, int]:
        low, high = e.row_sum_ends
        return low * low, high * high

    def _unscaled_dscores(self, e: _Evaluation) -> tuple[list[int], list[int]]:
        """Z_j (times the slope) in units of 2**-bits, and their errors."""
        self._need_do()
        total, total_error = self._weighted_dprobs(e)
        slack, row_sum, row_sum_error = e.slack, e.row_sum, e.row_sum_error
        weights, margins = [], []
        for i, (x, dprob) in enumerate(zip(e.exponentials, self._dprobs, strict=True)):
            centred = row_sum * dprob - total
            weight = (x * centred) >> e.bits
            margin = slack * abs(centred) + (x + slack) * (row_sum_error * abs(dprob) + total_error)
            margin = (margin >> e.bits) + 2
            if e.slopes is not None:
                margin += (2 * (abs(weight) + margin) >> e.bits) + 2
                weight = (weight * e.slopes[i]) >> e.bits
            weights.append(weight)
            margins.append(margin)
        return weights, margins

    def _at(self, bits: int) -> _Evaluation:
        if bits not in self._evaluations:
            self._evaluations[bits] = self._plain(bits) if self._oracle.head.softcap is None else self._capped(bits)
        return self._evaluations[bits]

    @cached_property
    def _integer_scores(self) -> tuple[list[int], int]:
        """Alpha q.k + mask (no softcap) as integers times a power of two."""
        masks = [dyadic(x) for x in self._mask]
        exponent = min([self._raw_exponent, *(e for m, e in masks if m)])
        moved = self._raw_exponent - exponent
        pairs = zip(self._raw, masks, strict=True)
        return [(x << moved) + (m << (e - exponent) if m else 0) for x, (m, e) in pairs], exponent

    @cached_property
    def _rational(self) -> RowRationals:
        head = self._oracle.head
        return RowRationals(
            scores=self._integer_scores if head.softcap is None else None,
            products=self._raw,
            mask=self._mask,
            dprobs=self._dprobs,
            dprobs_exponent=self._dprobs_exponent,
            k=self._k,
            v=self._v,
            scale=self._oracle.scale,
        )

    def _plain(self, bits: int) -> _Evaluation:
        scores, exponent = self._integer_scores
        top = max(scores)
        exponentials = _exponentials([s - top for s in scores], exponent, bits)
        ends = [Enclosure(s, s, exponent) for s in scores]
        return _Evaluation(bits, exponentials, 2, sum(exponentials), scaled(top, exponent), ends, None)

    def _capped(self, bits: int) -> _Evaluation:
        """The same under softcap, where S itself is rounded to one unit."""
        cap = self._oracle.head.softcap
        assert cap is not None
        numerator, cap_exponent = dyadic(cap)
        width = max(numerator.bit_length() + cap_exponent, 0)
        precision = bits + _GUARD + width + 10
        divisor = libmp.from_man_exp(numerator, cap_exponent)
        scores, slopes = [], []
        for raw, mask in zip(self._raw, self._mask, strict=True):
            ratio = libmp.mpf_div(libmp.from_man_exp(raw, self._raw_exponent), divisor, precision)
            t = libmp.mpf_tanh(ratio, precision)
            # Tanh by less than 2**-(bits + width + 8), so c tanh by less than 2**-(bits + 8), then one floor.
            value = libmp.to_fixed(libmp.mpf_mul(t, divisor), bits + 2)
            m, e = dyadic(mask)
            place = e + bits + 2
            scores.append(value + (m << place if place >= 0 else m >> -place))
            fixed = libmp.to_fixed(t, bits + 2)
            slopes.append(((1 << 2 * (bits + 2)) - fixed * fixed) >> (bits + 4))
        top = max(scores)
        exponentials = _exponentials([s - top for s in scores], -bits - 2, bits)
        ends = [Enclosure(s - 4, s + 4, -bits - 2) for s in scores]
        shift = scaled(top, -bits - 2)
        return _Evaluation(bits, exponentials, 3, sum(exponentials), shift, ends, slopes)

    def _many(
        self, ends: Callable[[int], list[Enclosure]], fmt: FloatFormat, exact: Callable[[int], Fraction | None]
    ) -> list[float]:
        """Ziv's loop over a list of enclosures; ``exact(i)`` is asked once, where the first attempt fails."""
        bits = self._oracle.bits
        found = [x.rounded(fmt) for x in ends(bits)]
        for i, value in enumerate(found):
            if value is None and (rational := exact(i)) is not None:
                found[i] = round_fraction(rational.numerator, rational.denominator, fmt)
        while any(value is None for value in found):
            bits *= 2
            if bits > self._oracle.max_bits:
                raise OracleLimitError(
                    f"row {self.t}: {sum(v is None for v in found)} values lie too close to a midpoint of {fmt.name} "
                    f"to be rounded with {self._oracle.max_bits} bits; allow more (max_bits)"
                )
            again = ends(bits)
            found = [again[i].rounded(fmt) if value is None else value for i, value in enumerate(found)]
        return [value for value in found if value is not None]


def _exponentials(differences: Sequence[int], exponent: int, bits: int) -> list[int]:
    """exp(x 2**exponent) for x <= 0 in units of 2**-bits, each off by less than two of them."""
    # exp(-0.7 (bits + 2)) < 2**-bits: nothing is left of it. The comparison is made on integers.
    limit = -(7 * (bits + 2) << max(-exponent, 0)) // (10 << max(exponent, 0)) - 1
    known = dict.fromkeys(differences, 0)
    for x in known:
        if x > limit:
            known[x] = libmp.to_fixed(libmp.mpf_exp(libmp.from_man_exp(x, exponent), bits + _GUARD, "n"), bits)
    return [known[x] for x in differences]
