"""Proven bounds of the float64 reference's own error, element by element.

u = 2**-53, gamma(n) = n u / (1 - n u): a term that passes n roundings is changed by at most that fraction of itself,
so a sum of products by at most gamma(n) sum |x_i y_i|, in whatever order, blocked or not, fused or not (Higham,
Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1, eq. 3.5 and section 4.2).

Assumed, not proven: IEEE 754's +, -, *, / and FMA in float64, and products of matrices that are sums of products (of
MKL, OpenBLAS, cuBLAS and its float64 tensor cores; not Strassen's algorithm, nor float64 emulated by smaller formats,
which cuBLAS offers on request); exp, log and tanh within 2 ulp, at most 4 u: MKL's high-accuracy mode, SLEEF's u10 and
CUDA state 1, CUDA from tests that are not exhaustive. What underflows may be flushed to zero.

Per row t, over its n visible keys:

    S       exact where every product q_i k_ji is a multiple of a power of two g and ||q|| max_j ||k_j|| <= 2**52 g: no
            sum needs more than 53 bits (BF16 and FP16 inputs, as a rule), and S - m is exact too. A scale that is no
            power of two costs u alpha ||q|| max ||k||. Otherwise gamma(D + 1) alpha ||q|| max ||k|| (Cauchy-Schwarz).
            Softcap: tanh is 1-Lipschitz, and |x| tanh'(x) <= tanh |x|: 8 u min(c, |S|) more. A mask used: u |S| more,
            and |S| <= |m| + 746 where exp(S - m) is not zero. ALiBi's slope has at most 24 bits and a distance at most
            29, so their product is exact, and it is one more mask; with a mask as well, 2 u (|S| + |mask| + |bias|).
    P_bar   computed = P_bar (1 + rho_j), |rho_j| <= rho = expm1(error of S + u |S - m| + 4.5 u), P_bar taken from
            the computed m: any number will do. The rest depends on the rows' weights P = P_bar / l:
    B_d     sum_j P_j |V_jd| <= min(||P||_2 ||V_.d||_2, max_j |V_jd|) =: B_d, as sum_j P_j = 1; B'_d likewise for K
    l       rho + gamma(n_l), relative: its terms have one sign
    L       rho + gamma(n_l) + 4.5 u |ln l| + u |L|
    O       moving P_j by rho_j moves O by sum_j P_j rho_j (V_j - O): rho (B + |O|); the sums: gamma(n_O) B and
            gamma(n_l) |O|; the division: 3 u |O|
    dP      exact as S may be, else gamma(Dv) ||dO|| max ||v||
    X       sum_j P_j |dP_j - delta| = sum_j |dS_j| <= sqrt(n) ||dS||_2, or sum_d |dO_d| (B_d + |O_d|) if that is less;
            under softcap, dS and its computed norm are those before the slope
    delta   rho X, and then the smaller of two: beforehand gamma(n_O) sum_d |dO_d| B_d + gamma(Dv) sum_d |dO_d O_d| +
            (gamma(n_l) + 3 u) |delta|; or afterwards, as sum_j P_j (dP_j - d) = delta - d for any number d, also the
            computed delta: |sum_j P_j (dP_j - d)|, computed, + gamma(n_l + 2) X + the error of dP
    dQ      alpha [(rho + gamma(n_dQ) + 3 u + error of the slope) Y_d + (errors of dP and delta) B'_d]
            + (rho + gamma(n_l) + 4 u) |dQ|,  Y_d >= sum_j |dS_j K_jd|: min(X max_j |K_jd|, ||dS||_2 ||K_.d||_2)

    dSink   of each row, -P_sink delta: P_sink (error of delta) + (rho + gamma(n_l) + 3 u) |dSink|

A sink is one more key (n counts it) of weight P_sink = exp(s - m) / l, with K = V = dP = 0 and so dS = -P_sink delta:
it is part of l, X and ||dS||_2. Its s is exact, and |s - m| takes the place of |S - m| where |s| is the largest.

Dropout multiplies by W_j <= w = 1 / (1 - p), a float64 taken as exact: wherever V_j stands W_j V_j is meant, so w V
bounds it, and dP_j is W_j times what it was. A product with w costs u of every term of O's sums, and u w ||dO|| ||v||
of dP; errors of dP before it grow by w. sum_j P_j = 1 holds as ever, and delta = sum_j P_j dP_j with that dP.

The fused kernels (``triton_attention``) take P_bar from the maximum of the keys so far, and rescale what they have
summed where a tile of keys raises it, r times in a row's life: a term passes r factors exp(m - m') and as many
products with them, (4.5 + 1) r u more in rho; u |S - m| stays, as |S - m_1| + |m_1 - m_2| + ... = |S - m|, and what is
exact stays exact. S, dP and delta are made as above; P_bar of dQ and of the sums afterwards is that of the last m.

n_l, n_O and n_dQ are how many roundings a term passes (``product_depth``, ``sum_depth``; at most n: adding zero
rounds nothing). Of the kernels n_O = n_dQ = n, as their products are summed in place, and n_l = N - 1 + the number of
tiles that hold visible keys, N keys to a tile. With e = rho + gamma(n_l), products of such small quantities and
computed weights, |O| and X in place of true ones enlarge no term by more than (1 - e)**-6 <= 1 + 8 e, e <= 0.05; where
e is larger the bound is inf. 2**-20 more is for the rounding of the bounds themselves, and a multiple of 2**-1018 for
underflow (``tiny``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attn_diag.reference.attention import (
    AttentionHead,
    HeadReference,
    RowBlock,
)
from attn_diag.reference.head_bounds import HeadBounds, each_head
from attn_diag.reference.heads import Heads, stacked
from attn_diag.reference.magnitudes import LOST_SQUARE, SLACK, exponent_of, parts, quantum_of, upper_norm
from attn_diag.reference.sums import is_power_of_two, product_depth, sum_depth

if TYPE_CHECKING:
    from attn_diag.reference.fused import FusedHeads

UNIT = 2.0**-53
# exp, log and tanh: 2 ulp is at most 4 u; the half covers products of errors.
_FUNCTION = 4.5 * UNIT
# exp(-746) is 0 in float64; so is every probability below it.
_VANISHES = 746.0
# An underflow loses less than 2**-1022.
_SMALL = 2.0**-1018
_TOO_LARGE = 0.05
_NOTHING = torch.zeros(0, dtype=torch.float64)


class BoundCollector:
    """Takes what the bounds need from each block while the reference streams (with ``gradient_sums``)."""

    def __init__(self, head: AttentionHead) -> None:
        self._head = head
        # ||P_bar||_2, the largest additive mask that counts, and the row's block: its keys and the lengths of its sums.
        # The kernels bring their own.
        self._norm = self._mask = self._keys = self._product_depth = self._sum_depth = self._rises = _NOTHING
        self._gradient: tuple[Tensor, ...] | None = None

    def _begin(self) -> None:
        every = self._head.q.new_zeros(8, len(self._head.q)).unbind()
        self._norm, self._mask, self._keys, self._product_depth, self._sum_depth, self._rises = every[:6]
        self._gradient = every[6:] if self._head.do is not None else None

    def add(self, block: RowBlock) -> None:
        """Take one block of the reference, its scores unchanged."""
        if self._norm is _NOTHING:
            self._begin()
        rows = block.rows
        self._norm[rows] = torch.linalg.vector_norm(block.unnormalised_probs, dim=1)
        keys = block.keys.stop - block.keys.start
        self._keys[rows] = float(keys)
        self._product_depth[rows], self._sum_depth[rows] = float(product_depth(keys)), float(sum_depth(keys))
        masking = self._head.masking
        added = [] if masking.mask is None or masking.mask.dtype == torch.bool else [masking.mask[rows, block.keys]]
        if masking.alibi is not None:
            distances = masking.alibi.distances(self._head.positions[rows], block.keys, len(self._head.k))
            added.append(distances * masking.alibi.slope)
        if added and block.scores.shape[1]:
            sizes = torch.stack([t.double().abs().expand(block.scores.shape) for t in added]).sum(0)
            top = block.row_max.masked_fill(block.fully_masked, 0.0)
            self._mask[rows] = sizes.masked_fill_(block.scores < (top - _VANISHES)[:, None], 0.0).amax(1)
        if self._gradient is not None:
            assert block.gradient_sums is not None
            for kept, found in zip(self._gradient, block.gradient_sums, strict=True):
                kept[rows] = found

    @staticmethod
    def take(collectors: Sequence[BoundCollector], fused: FusedHeads) -> None:
        """Let the collectors of all heads of the kernels take them from these, instead of blocks."""
        rows, head = fused.forward, fused.head
        keys = torch.full_like(rows.bias[0], float(len(head.k)))
        visible = _visible_at_most(head, keys)
        # One tile more where keys begin within one.
        depth = torch.stack([(visible / tile).ceil() + tile for tile in fused.sum_keys]).amax(0)
        by_row = (t.unbind() for t in (rows.squares.sqrt(), rows.bias, rows.rises.double()))
        for one, norm, bias, rises in zip(collectors, *by_row, strict=True):
            one._norm, one._mask, one._rises = norm, bias, rises
            one._keys, one._product_depth, one._sum_depth = keys, visible, depth
        if fused.do is not None:
            for one, *sums in zip(collectors, *(t.unbind() for t in fused.gradient_sums), strict=True):
                one._gradient = tuple(sums)

    def bounds(self, reference: HeadReference) -> HeadBounds:
        """The bounds of everything that the stream left."""
        return self.each([self], [reference])[0]

    @staticmethod
    def each(collectors: Sequence[BoundCollector], references: Sequence[HeadReference]) -> list[HeadBounds]:
        """The same of several heads of one shape, scale and masking, side by side."""
        for one in collectors:
            if one._norm is _NOTHING:  # no rows, and so no block
                one._begin()
        with torch.no_grad():
            return _bounds(collectors, references)


def _bounds(collectors: Sequence[BoundCollector], references: Sequence[HeadReference]) -> list[HeadBounds]:
    heads = Heads.of([c._head for c in collectors], references)

    def kept(name: str) -> Tensor:
        return stacked([getattr(c, name) for c in collectors])

    keys, of_out = kept("_keys"), stacked([r.out for r in references])
    visible = _visible_at_most(heads, keys)
    depths = (torch.minimum(visible, kept(name)) for name in ("_product_depth", "_sum_depth"))
    weights = _Weights(heads, kept("_norm"), kept("_mask"), kept("_rises"), visible, *depths)
    rho, gamma, product = weights.rho, weights.gamma, weights.product
    v = _Columns(heads.v if heads.dropout is None else heads.v * (heads.dropout * SLACK))
    share, relative = (rho + product) * weights.factor, (rho + gamma + 3 * UNIT) * weights.factor
    underflow = weights.tiny * (1 + v.top)
    out = torch.empty_like(of_out)
    # Rounding of the products' sums and of rowsum(dO o O), as they reach delta.
    before, spread = torch.zeros_like(rho), torch.zeros_like(rho)
    for part in parts(out):
        sizes = of_out[:, part].abs()
        torch.addcmul(underflow[:, part, None], sizes, relative[:, part, None], out=out[:, part])
        out[:, part] += v.least(share[:, part] * weights.norm[:, part], share[:, part])  # (rho + gamma(n_O)) B
        if heads.do is not None:
            do = heads.do[:, part].abs()
            by_norm, by_largest = (do @ v.stacked).unbind(2)
            of_mean = torch.minimum(weights.norm[:, part] * by_norm, by_largest)
            of_rows = sizes.mul_(do).sum(2)
            before[:, part] = product[:, part] * of_mean + _gamma(heads.v.shape[2]) * of_rows
            spread[:, part] = of_mean + of_rows
    logarithm = heads.row_sum.clamp(max=torch.finfo(torch.float64).max).log()
    lse = rho + gamma + _FUNCTION * logarithm.abs() + UNIT * stacked([r.lse for r in references]).abs()
    out, lse = weights.settle(out), weights.settle(lse * weights.factor + weights.tiny)
    if heads.do is None:
        return each_head(out, lse, None, None, None)
    sums = [stacked(found) for found in zip(*(c._gradient for c in collectors if c._gradient), strict=True)]
    return _backward(heads, references, weights, before, spread, sums, keys, out, lse)


def _backward(
    heads: Heads, references: Sequence[HeadReference], weights: _Weights, before: Tensor, spread: Tensor,
    sums: Sequence[Tensor], keys: Tensor, out: Tensor, lse: Tensor,
) -> list[HeadBounds]:  # fmt: skip
    rho, gamma, product = weights.rho, weights.gamma, weights.product
    assert heads.do is not None
    sizes, of_dq = (stacked([getattr(r, name) for r in references]).abs() for name in ("delta", "dq"))
    dprobs = _Products(heads.do, heads.v)
    of_dprobs = torch.where(dprobs.exact(), 0.0, _gamma(heads.v.shape[2]) * dprobs.size)
    # dO times what P_bar V lost, 1 times what dO O lost, dP times what P_bar lost; the same after dO V^T.
    underflow = weights.tiny * (1 + dprobs.left_norm) * (1 + dprobs.right_norm)
    if heads.dropout is not None:
        w = heads.dropout * SLACK
        of_dprobs, underflow = (of_dprobs + UNIT * dprobs.size) * w, underflow * w
    residual, norm = (s.abs() * weights.inverse_row_sum for s in sums)
    norm += LOST_SQUARE * keys.sqrt()
    spread = torch.minimum(spread, norm * weights.visible.sqrt())  # X
    before = before + (gamma + 3 * UNIT) * sizes
    after = residual + _gamma(weights.sum_depth + 2) * spread + of_dprobs
    of_delta = rho * (spread + of_dprobs) + torch.minimum(before, after)
    delta = weights.settle(of_delta * weights.factor + underflow)
    dsink = None
    if references[0].sink_probs is not None and references[0].dsink is not None:
        probs, terms = (stacked([getattr(r, name) for r in references]) for name in ("sink_probs", "dsink"))
        of_dsink = (rho + gamma + 3 * UNIT) * terms.abs() * weights.factor
        # P_sink was made of L.
        of_dsink += (probs * lse.clamp(max=1.0) * 2) * sizes
        dsink = weights.settle(of_dsink + probs * delta * SLACK + underflow)

    k, alpha, drift = _Columns(heads.k), abs(heads.scale), of_dprobs + of_delta
    relative = rho + product + 3 * UNIT + weights.slope_error
    # Y of the computed dS, and what the errors of dP and delta add to it.
    of_y, of_mean = alpha * relative * weights.factor, alpha * drift * (1 + relative) * weights.factor
    by_norm, by_largest = of_y * norm + of_mean * weights.norm, of_y * spread + of_mean
    of_size = (rho + gamma + 4 * UNIT) * weights.factor
    underflow = underflow * (1 + alpha) * (1 + k.top)
    dq = torch.empty_like(of_dq)
    for part in parts(dq):
        torch.addcmul(underflow[:, part, None], of_dq[:, part], of_size[:, part, None], out=dq[:, part])
        dq[:, part] += k.least(by_norm[:, part], by_largest[:, part])
    dq = weights.settle(dq)
    return each_head(out, lse, delta, dq, dsink)


class _Weights:
    """What is known of every row's probabilities: their errors, norms, and the lengths of the sums. All [H, Tq].

    ``visible`` keys at most, ``rho`` relative error of P_bar, ``gamma`` of the row sum beyond that, ``product`` of the
    sums in products, ``norm`` ||P||_2, ``tiny`` what underflow may take from a row, ``factor`` what covers everything
    of higher order.
    """

    def __init__(
        self,
        head: Heads,
        norm: Tensor,
        mask: Tensor,
        rises: Tensor,
        visible: Tensor,
        in_product: Tensor,
        in_sum: Tensor,
    ) -> None:
        if head.sink is not None:
            visible, in_sum = visible + 1, in_sum + 1
        if head.dropout is not None:
            in_product = in_product + 1
        self.visible, self.sum_depth = visible, in_sum
        self.product, self.gamma = _gamma(in_product), _gamma(in_sum)
        error, size, exact = _score_error(head)
        if head.sink is not None:
            size, exact = torch.maximum(size, head.sink.abs()), torch.zeros_like(exact)
        self.slope_error = torch.zeros_like(error)
        if head.softcap is not None:
            self.slope_error = 3 * error / head.softcap + 3 * UNIT
        if bool((mask > 0).any()):
            error, size, exact = _mask_error(head, mask, error, size, exact)
            if head.masking.alibi is not None and head.masking.mask is not None:
                error = error + 2 * UNIT * SLACK * size  # of two additions the first may be larger than what follows
        theta = error + torch.where(exact, 0.0, UNIT * (2 * size).clamp(max=_VANISHES)) + _FUNCTION
        theta = theta + rises * (_FUNCTION + UNIT)
        self.rho = torch.expm1(theta)
        relative = self.rho + self.gamma
        self.factor = (1 + 8 * relative) * SLACK
        # NaN where something overflowed: nothing is certain then.
        self._hopeless = ~(relative <= _TOO_LARGE)
        self._masked = head.fully_masked
        self._any_special = bool((self._hopeless | self._masked).any())
        self.inverse_row_sum = head.row_sum.reciprocal().masked_fill_(self._masked, 0.0)
        self.norm = (norm * self.inverse_row_sum).clamp_(max=1.0)
        # As many underflows as a row and one feature see, times as many features.
        self.tiny = _SMALL * (visible + 8) * (head.q.shape[2] + head.v.shape[2])

    def settle(self, bound: Tensor) -> Tensor:
        """The bound, in place: 0 in fully masked rows, inf where it says nothing."""
        if self._any_special:
            bound[self._hopeless], bound[self._masked] = torch.inf, 0.0
        if not math.isfinite(float(bound.sum())):
            bound.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        return bound


def _score_error(head: Heads) -> tuple[Tensor, Tensor, Tensor]:
    """Error of S before the mask, |S| at most, and whether S is free of rounding; [H, Tq] each."""
    alpha = abs(head.scale)
    products = _Products(head.q, head.k)
    size = products.size * alpha
    exact = products.exact(alpha)
    error = torch.where(exact, 0.0 if is_power_of_two(alpha) else UNIT * SLACK, _gamma(head.q.shape[2] + 1)) * size
    exact = exact & is_power_of_two(alpha)
    # Where q alpha underflows, at most D 2**-1022 ||k|| < 2**-500: less than ``_FUNCTION`` leaves.
    error += torch.where(exact, 0.0, _SMALL * (head.q.shape[2] + 2) * (1 + alpha))
    if head.softcap is not None:
        size = size.clamp(max=head.softcap)
        # S / c (2 u: on CUDA torch multiplies by 1 / c), tanh (4 u), times c (u), and 1 u for their products.
        error = error + 8 * UNIT * size
        exact = torch.zeros_like(exact)
    return error, size, exact


def _mask_error(head: Heads, mask: Tensor, error: Tensor, size: Tensor, exact: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same after an additive mask of at most ``mask`` [H, Tq] where it counts."""
    top = head.row_max.masked_fill(head.fully_masked, 0.0).abs()
    bound = torch.minimum(top + _VANISHES, size + mask)
    error = error + torch.where(mask > 0, UNIT * SLACK * bound, 0.0)
    # Keys that vanish must do so in truth as well: the mask's own rounding there is relative to |m| + |S - m|.
    error = error.masked_fill(~(UNIT * top <= _TOO_LARGE), torch.inf)
    return error, size + mask, exact & (mask == 0)


def _visible_at_most(head: AttentionHead | Heads, keys: Tensor) -> Tensor:
    """How many keys each row may see, as far as causality and window tell; float64, of the shape of ``keys``."""
    left, right = head.masking.reach
    position = head.positions.double()
    stop, start = keys.new_full(keys.shape, float(head.k.shape[-2])), torch.zeros_like(keys)
    if right is not None:
        stop = torch.minimum(stop, position + right + 1)
    if left is not None:
        start = torch.maximum(start, position - left)
    return torch.minimum(stop - start, keys).clamp_(min=1)


class _Columns:
    """Of K or V [H, n, d]: at least ||M_.d||_2 (``norm``) and max_j |M_jd| (``largest``), [H, d]; ``top`` max over all,
    [H, 1]. ``stacked`` [H, d, 2]: both.
    """

    def __init__(self, values: Tensor) -> None:
        self.norm = upper_norm(values, 1)
        self.largest = torch.maximum(values.amax(1), -values.amin(1)) if values.shape[1] else self.norm
        self.top = self.largest.amax(1, keepdim=True)
        self.stacked = torch.stack([self.norm, self.largest], 2)

    def least(self, by_norm: Tensor, by_largest: Tensor) -> Tensor:
        """The smaller of the two products with ``by_norm`` and ``by_largest`` [H, R]; [H, R, d]."""
        found = by_norm[..., None] * self.norm[:, None]
        return torch.minimum(found, by_largest[..., None] * self.largest[:, None], out=found)


class _Products:
    """The products of rows of ``left`` [H, n, d] with all rows of ``right`` [H, m, d].

    ``size`` [H, n]: at least the sum of the sizes of the terms of every product, from ``left_norm`` [H, n] and the
    largest ``right_norm`` [H, 1] (Cauchy-Schwarz).
    """

    def __init__(self, left: Tensor, right: Tensor) -> None:
        self.left_norm, some = upper_norm(left, 2), right.shape[1] > 0
        self.right_norm = upper_norm(right, 2).amax(1, keepdim=True) if some else right.new_zeros(len(right), 1)
        self.size = self.left_norm * self.right_norm
        # Every element of row t, and of ``right``, is a multiple of 2**quantum.
        self._left = quantum_of(left)
        self._right = quantum_of(right).amin(1, keepdim=True) if some else self._left.new_zeros(len(right), 1)

    def exact(self, factor: float = 1.0) -> Tensor:
        """Whether no product, sum or difference of two sums rounds (nor times ``factor``, a power of two); [H, n]."""
        smallest = min(math.frexp(factor)[1] - 1, 0)
        quantum = self._left + self._right
        normal = torch.minimum(quantum, self._left) + smallest >= -1022
        return (exponent_of(self.size) <= quantum + 52) & normal & self.size.isfinite()


def _gamma(n: Tensor | int) -> Tensor:
    """Gamma(n) of Higham, lemma 3.1."""
    steps = torch.as_tensor(n, dtype=torch.float64) * UNIT
    return steps / (1 - steps)
