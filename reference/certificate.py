"""Bounds of the float64 reference's own error, element by element, that hold for certain.

u = 2**-53, gamma(n) = n u / (1 - n u): n roundings in a row change a product or a sum of terms of one sign by at most
that fraction, in whatever order they are added, fused or not (Higham, Accuracy and Stability of Numerical Algorithms,
2nd ed., lemma 3.1 and section 4.2). Assumed beyond IEEE arithmetic: exp, log and tanh are right to 2 ulp (4 u), and
what underflows may be flushed to zero. Per row t, over its n visible keys:

    S       exact where every product q_i k_ji is a multiple of a power of two g and ||q|| max_j ||k_j|| <= 2**52 g: no
            sum needs more than 53 bits (BF16 and FP16 inputs, as a rule), and S - m is exact too. A scale that is no
            power of two costs u alpha ||q|| max ||k||. Otherwise gamma(D + 1) alpha ||q|| max ||k|| (Cauchy-Schwarz).
            Softcap: tanh is 1-Lipschitz; 7 u min(c, |S|) more. A mask used: u |S| more, and |S| <= |m| + 746 where
            exp(S - m) is not zero.
    P_bar   computed = P_bar (1 + rho_j), |rho_j| <= rho = expm1(error of S + u |S - m| + 4.5 u), P_bar taken from
            the computed m: any number will do. The rest depends on the rows' weights P = P_bar / l:
    B_d     sum_j P_j |V_jd| <= min(||P||_2 ||V_.d||_2, max_j |V_jd|) =: B_d, and B'_d likewise for K
    l       rho + gamma(n_l), relative
    L       rho + gamma(n_l) + 4.5 u |ln l| + u |L|
    O       moving P_j by rho_j moves O by sum_j P_j rho_j (V_j - O): rho (B + |O|); the sums: gamma(n_O) B and
            gamma(n_l) |O|; the division: 3 u |O|
    dP      exact as S may be, else gamma(Dv) ||dO|| max ||v||
    X       sum_j P_j |dP_j - delta|, from its computed value
    delta   rho X, and then the smaller of two: beforehand gamma(n_O) sum_d |dO_d| B_d + gamma(Dv) sum_d |dO_d O_d| +
            (gamma(n_l) + 3 u) |delta|; or afterwards, as sum_j P_j (dP_j - delta) = 0 holds for the true delta alone:
            |sum_j P_j (dP_j - delta)|, computed, + gamma(n_l + 2) X + the error of dP
    dQ      alpha [(rho + gamma(n_dQ) + 3 u + error of the slope) Y_d + (errors of dP and delta) B'_d]
            + (rho + gamma(n_l) + 4 u) |dQ|,  Y_d >= sum_j |dS_j K_jd|: min(X max_j |K_jd|, ||dS||_2 ||K_.d||_2)

n_l, n_O and n_dQ are how many roundings a term passes (``product_depth``, ``sum_depth``; at most n: adding zero
rounds nothing). Products of such small quantities, computed weights in place of true ones, and the rounding of the
bounds themselves are covered by a factor 1 + 8 (rho + gamma(n_l)) + 2**-20; where rho + gamma(n_l) exceeds 0.05 the
bound is inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference.attention import AttentionHead, RowBlock, is_power_of_two, product_depth, sum_depth

UNIT = 2.0**-53
# exp, log and tanh of torch on CPU and CUDA: 2 ulp is at most 4 u; the half covers products of errors.
_FUNCTION = 4.5 * UNIT
# exp(-746) is 0 in float64; so is every probability below it.
_VANISHES = 746.0
_SMALL = 2.0**-1018
_SLACK = 1 + 2.0**-20
_TOO_LARGE = 0.05
_PART = 128  # keys that share one entry of the column norms
_NO_BIT = 10**6


@dataclass
class HeadBounds:
    """Bounds of |reference - truth|: ``out`` [Tq, Dv], ``lse`` [Tq]; with dO also ``delta`` [Tq], ``dq`` [Tq, D]."""

    out: Tensor
    lse: Tensor
    delta: Tensor | None
    dq: Tensor | None


class BoundCollector:
    """Gathers the bounds block by block while the reference streams with ``gradient_sums``."""

    def __init__(self, head: AttentionHead) -> None:
        self._head = head
        new = head.q.new_zeros
        rows = len(head.q)
        backward = head.do is not None
        self.bounds = HeadBounds(
            new(head.out_shape), new(rows), new(rows) if backward else None, new(head.q.shape) if backward else None
        )
        self._k, self._v = _Columns(head.k), _Columns(head.v)
        self._scores = _Products(head.q, head.k)
        self._dprobs = None if head.do is None else _Products(head.do, head.v)

    def add(self, block: RowBlock) -> None:
        """Take one block of the reference, its scores unchanged."""
        head, rows = self._head, block.rows
        weights = _Weights(head, block, self._scores)
        k_largest, v_largest = self._k.largest(block.keys), self._v.largest(block.keys)
        out, lse = block.out, block.lse
        mean_v = torch.minimum(weights.norm[:, None] * self._v.norm(block.keys), v_largest)  # B, [R, Dv]
        product, tiny = _gamma(weights.product_depth), weights.tiny
        of_out = mean_v * (weights.rho + product)[:, None]
        of_out += out.abs() * (weights.rho + weights.gamma + 3 * UNIT)[:, None]
        self.bounds.out[rows] = weights.finish(of_out, tiny[:, None] * v_largest)
        of_lse = weights.rho + weights.gamma + _FUNCTION * block.row_sum.log().abs() + UNIT * lse.abs()
        self.bounds.lse[rows] = weights.finish(of_lse, tiny)
        if head.do is None or self._dprobs is None:
            return
        assert block.delta is not None
        assert block.dq is not None
        assert block.gradient_sums is not None
        assert self.bounds.delta is not None
        assert self.bounds.dq is not None
        do, width = head.do[rows].abs(), head.v.shape[1]
        largest_dprob = self._dprobs.size(rows)
        of_dprobs = torch.where(self._dprobs.exact(rows), 0.0, _gamma(width) * largest_dprob)
        residual, spread, norm = (s.abs() * block.inverse_row_sum for s in block.gradient_sums)
        spread_true = spread + of_dprobs
        before = product * (do * mean_v).sum(1) + _gamma(width) * (do * out.abs()).sum(1)
        before += (weights.gamma + 3 * UNIT) * block.delta.abs()
        after = residual + _gamma(weights.sum_depth + 2) * spread + of_dprobs
        of_delta = weights.rho * spread_true + torch.minimum(before, after)
        self.bounds.delta[rows] = weights.finish(of_delta, tiny * largest_dprob)

        k_norm, drift = self._k.norm(block.keys), (of_dprobs + of_delta)[:, None]
        mean_k = torch.minimum(weights.norm[:, None] * k_norm, k_largest)  # B', [R, D]
        # Y: of the computed dS, and what dP and delta may be off by.
        of_sizes = torch.minimum(norm[:, None] * k_norm, spread[:, None] * k_largest) + drift * mean_k
        of_dq = of_sizes * (weights.rho + product + 3 * UNIT + weights.slope_error)[:, None]
        of_dq += drift * mean_k
        of_dq *= abs(head.scale)
        of_dq += block.dq.abs() * (weights.rho + weights.gamma + 4 * UNIT)[:, None]
        small = (tiny * (1 + abs(head.scale)) * (1 + largest_dprob))[:, None] * (1 + k_largest)
        self.bounds.dq[rows] = weights.finish(of_dq, small)


class _Weights:
    """What is known of a block's probabilities: their errors, norms, and the lengths of the sums. All [R].

    ``rho`` relative error of P_bar, ``gamma`` of the row sum beyond that, ``norm`` ||P||_2, ``tiny`` what underflow may
    take from a row.
    """

    def __init__(self, head: AttentionHead, block: RowBlock, scores: _Products) -> None:
        keys = block.keys.stop - block.keys.start
        visible = _visible_at_most(head, block)
        self.product_depth = visible.clamp(max=product_depth(keys))
        self.sum_depth = visible.clamp(max=sum_depth(keys))
        self.gamma = _gamma(self.sum_depth)
        error, size, exact = _score_error(head, block, scores)
        self.slope_error = torch.zeros_like(error)
        if head.softcap is not None:
            self.slope_error = 3 * error / head.softcap + 3 * UNIT
        error, size, exact = _mask_error(head, block, error, size, exact)
        theta = error + torch.where(exact, 0.0, UNIT * (2 * size).clamp(max=_VANISHES)) + _FUNCTION
        self.rho = torch.expm1(theta)
        self._masked = block.fully_masked
        relative = self.rho + self.gamma
        self._factor = (1 + 8 * relative) * _SLACK
        # NaN where something overflowed: nothing is certain then.
        self._factor.masked_fill_(~(relative <= _TOO_LARGE), torch.inf)
        norm = torch.linalg.vector_norm(block.unnormalised_probs, dim=1) * block.inverse_row_sum
        self.norm = norm.clamp(max=1.0)
        self.tiny = _SMALL * (keys + head.q.shape[1] + head.v.shape[1] + 8) * (1 + block.inverse_row_sum)

    def finish(self, bound: Tensor, underflow: Tensor) -> Tensor:
        """The bound with everything of higher order; 0 in fully masked rows, inf where it is too large to be one."""
        factor, masked = self._factor, self._masked
        if bound.ndim == 2:
            factor, masked = factor[:, None], masked[:, None]
            underflow = underflow if underflow.ndim == 2 else underflow[:, None]
        return (bound * factor + underflow).nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill_(masked, 0.0)


def _score_error(head: AttentionHead, block: RowBlock, scores: _Products) -> tuple[Tensor, Tensor, Tensor]:
    """Error of S before the mask, |S| at most, and whether S is free of rounding; [R] each."""
    alpha = abs(head.scale)
    size = scores.size(block.rows) * alpha
    exact = scores.exact(block.rows, alpha)
    per_product = _gamma(head.q.shape[1] + 1)
    error = torch.where(exact, 0.0 if is_power_of_two(alpha) else UNIT * _SLACK, per_product) * size
    exact = exact & is_power_of_two(alpha)
    error += torch.where(exact, 0.0, _SMALL * (head.q.shape[1] + 2) * (1 + alpha))
    if head.softcap is not None:
        size = size.clamp(max=head.softcap)
        error = error + 7 * UNIT * size
        exact = torch.zeros_like(exact)
    return error, size, exact


def _mask_error(
    head: AttentionHead, block: RowBlock, error: Tensor, size: Tensor, exact: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same after an additive mask."""
    mask = head.masking.mask
    if mask is None or mask.dtype == torch.bool or not block.scores.shape[1]:
        return error, size, exact
    top = block.row_max.masked_fill(block.fully_masked, 0.0)
    part = mask[block.rows, block.keys].double().abs()
    used = part.masked_fill_(block.scores <= (top - _VANISHES)[:, None], 0.0).amax(1)
    bound = torch.minimum(top.abs() + _VANISHES, size + used)
    # Keys that vanish must do so in truth as well: the mask's own rounding there is relative to |m| + |S - m|.
    certain = UNIT * top.abs() <= _TOO_LARGE
    error = error + torch.where(used > 0, UNIT * _SLACK * bound, 0.0)
    return error.masked_fill(~certain, torch.inf), size + used, exact & (used == 0)


def _visible_at_most(head: AttentionHead, block: RowBlock) -> Tensor:
    """How many keys each row may see, as far as causality and window tell; float64 [R]."""
    left, right = head.masking.reach
    position = head.positions[block.rows]
    stop = torch.full_like(position, block.keys.stop)
    if right is not None:
        stop = torch.minimum(stop, position + right + 1)
    start = torch.full_like(position, block.keys.start)
    if left is not None:
        start = torch.maximum(start, position - left)
    return (stop - start).clamp(min=1).double()


class _Columns:
    """Norms and largest sizes of the columns of K or V [n, d], over spans of keys (widened to parts of 128)."""

    def __init__(self, values: Tensor) -> None:
        squares, sizes = [], []
        for part in values.split(_PART):
            squares.append(part.square().sum(0))
            sizes.append(part.abs().amax(0))
        empty = values.new_zeros((0, values.shape[1]))
        self._squares = torch.stack(squares) if len(values) else empty
        self._sizes = torch.stack(sizes) if len(values) else empty

    def norm(self, keys: slice) -> Tensor:
        """At least ||M_.d||_2 over ``keys``, [d]."""
        return _root(self._squares[self._span(keys)].sum(0))

    def largest(self, keys: slice) -> Tensor:
        """At least max_j |M_jd| over ``keys``, [d]."""
        found = self._sizes[self._span(keys)]
        return found.amax(0) if len(found) else found.sum(0)

    @staticmethod
    def _span(keys: slice) -> slice:
        return slice(keys.start // _PART, -(-keys.stop // _PART))


class _Products:
    """The products of rows of ``left`` [n, d] with all rows of ``right`` [m, d]: their sizes, and which are exact."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        largest = _norm(right).amax() if len(right) else right.new_zeros(())
        self._size = _norm(left) * largest
        common = _lowest_bit(right).amin(0) if len(right) else 0
        # Every product of row t is a multiple of 2**quantum_t.
        lowest = _lowest_bit(left)
        self._quantum, self._lowest = (lowest + common).amin(1), lowest.amin(1)

    def size(self, rows: slice | Tensor) -> Tensor:
        """At least the sum of the sizes of every product's terms, [R]."""
        return self._size[rows]

    def exact(self, rows: slice | Tensor, factor: float = 1.0) -> Tensor:
        """Whether no product, sum or difference of two sums rounds (times ``factor``, a power of two, likewise)."""
        quantum, size = self._quantum[rows], self._size[rows]
        exponent = torch.frexp(size)[1]  # size < 2**exponent
        smallest = torch.frexp(torch.tensor(factor, dtype=torch.float64))[1].item() - 1
        normal = torch.minimum(quantum, self._lowest[rows]) + min(smallest, 0) >= -1022
        return (exponent <= quantum + 52) & normal & size.isfinite()


def _lowest_bit(values: Tensor) -> Tensor:
    """Exponent of the lowest bit set in each float64, int64; a large number for zero."""
    bits = values.view(torch.int64)
    field = (bits >> 52) & 0x7FF
    mantissa = (bits & ((1 << 52) - 1)) | ((field > 0).long() << 52)
    lowest = mantissa & -mantissa
    place = (lowest.double().view(torch.int64) >> 52) - 1023
    return (place + field.clamp(min=1) - 1075).masked_fill_(mantissa == 0, _NO_BIT)


def _norm(values: Tensor) -> Tensor:
    """At least the Euclidean norm of each row, [n]."""
    return _root(values.square().sum(1))


def _root(squares: Tensor) -> Tensor:
    # Squares that underflow are no larger than 2**-1022 each; the slack is for the sum's rounding.
    return (squares + _SMALL).sqrt() * _SLACK


def _gamma(n: Tensor | int) -> Tensor:
    """Gamma(n) of Higham, lemma 3.1."""
    steps = torch.as_tensor(n, dtype=torch.float64) * UNIT
    return steps / (1 - steps)
