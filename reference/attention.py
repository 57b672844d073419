"""Attention forward and backward in float64, for one head of one sequence, streamed over blocks of query rows.

    S = alpha Q K^T             softcap c: S <- c tanh(S / c); then the mask, and ALiBi's -slope |t - j|
    m = rowmax S                P_bar = exp(S - m)         l = rowsum P_bar       L = m + ln l
    O_bar = P_bar V             O = O_bar / l              P = P_bar / l
    delta = rowsum(dO o O)      dP = dO V^T                dS = P o (dP - delta)  (softcap: times 1 - (S/c)^2)
                                                           dS_bar = P_bar o (dP - delta) (likewise), unnormalised
    dQ = alpha dS K             dK = alpha dS^T Q          dV = P^T dO

A sink is one more visible key, with a fixed logit s and the value zero: m is that of the real keys, and

    l' = l + exp(s - m)         dSink = P_sink (0 - delta), P_sink = exp(s - L')        the rest as it is, with l' for l

Dropout multiplies P by W, which is 0 where a probability is dropped and 1 / (1 - p) elsewhere; L stays as it is:

    O = (P o W) V               dP = W o (dO V^T)          dV = (P o W)^T dO                        the rest as it is

and delta is rowsum(P o dP) as before, since rowsum(dO o O) = sum_j P_j W_j dO.V_j.

The low-precision inputs are taken as exact. A row without a single visible key has O = 0, L = -inf (s, with a sink) and
no gradient. Source of the backward: Dao, "FlashAttention-2", arXiv 2307.08691, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from attn_diag.reference.dropout import Dropout
from attn_diag.reference.masking import Masking
from attn_diag.reference.sums import is_power_of_two, product_in_parts, sum_in_parts

# Query rows of a block: a slice (no copies) or the indices [R].
Rows = slice | Tensor

# Scores of one block, in elements. On a CPU half as many leave more to the cache but double the number of small
# operations, which costs more (measured: 20 % at T = 4096); a GPU wants enough to fill it.
_BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**23}
# Of a short head more rows would hold more of what a causal mask hides (measured, of a whole inspection on a CPU: 11 %
# at T = 512, 2 % at T = 256 and 1024).
_MIN_BLOCK_ROWS, _MOST_BLOCK_ROWS = 16, {"cpu": 128, "cuda": 2**23}

# MKL chooses a vector function's implementation at its first call. When several threads make that call at
# once, some may be given a low-accuracy one (measured on torch 2.13, 2 cores: float64 exp off by 3e-9 in one
# fresh process of fifteen, never after a call from a single thread). So one thread calls them first.
for _function in (torch.exp, torch.log, torch.tanh):
    _function(torch.ones(1, dtype=torch.float64))


@dataclass(frozen=True)
class AttentionHead:
    """One head of one sequence; its tensors are float64 and on one device."""

    q: Tensor
    """[Tq, D]."""
    k: Tensor
    """[Tk, D]."""
    v: Tensor
    """[Tk, Dv]."""
    do: Tensor | None
    """[Tq, Dv]; None: no gradients are wanted."""
    scale: float
    """alpha."""
    masking: Masking = field(default_factory=Masking)
    """Which keys a row sees."""
    softcap: float | None = None
    """c of S = c tanh(alpha q.k / c); None for none."""
    sink: float | None = None
    """s, the logit of a sink in the softmax's denominator; None for none."""
    dropout: Dropout | None = None
    """Which probabilities were dropped; None for none."""

    def __post_init__(self) -> None:
        for name in ("q", "k", "v", "do"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.dtype != torch.float64:
                raise TypeError(f"{name} must be float64, got {tensor.dtype}; convert it first (exactly)")
        if self.dropout is not None and self.dropout.kept.shape != (len(self.q), len(self.k)):
            raise ValueError(
                f"dropout's kept must have shape [{len(self.q)}, {len(self.k)}], got {list(self.dropout.kept.shape)}"
            )
        if self.sink is not None and not math.isfinite(self.sink):
            raise ValueError(f"sink must be a finite logit, got {self.sink}; None is a head without a sink")

    @cached_property
    def positions(self) -> Tensor:
        """position(t) of every query row, int64 [Tq]; see Masking."""
        return self.masking.row_positions(len(self.q), len(self.k), self.q.device)

    @cached_property
    def _position_list(self) -> list[int]:
        return self.positions.tolist()

    def visible_span(self, rows: Rows) -> slice:
        """The keys that at least one of ``rows`` may see, as far as causality and window tell."""
        positions = self._position_list[rows] if isinstance(rows, slice) else self.positions[rows].tolist()
        return self.masking.span(min(positions), max(positions), len(self.k))

    def apply_mask(
        self, scores: Tensor, rows: Rows, keys: slice, unit: float = 1.0, *, least: int | None = None
    ) -> None:
        """Set ``scores`` [..., R, K] of invisible keys to -inf and add an additive mask and ALiBi's bias, in place.

        ``unit``: alpha, where the scores still lack it; an additive mask is taken to be in the same units. ``least``:
        the smallest position of the rows, where the host knows it.
        """
        positions, begin = self.positions[rows], keys.start
        left, right = self.masking.reach
        if left is None and right is not None:
            # Only columns that some row may not see need looking at: for causality, those past the first row's.
            least = int(positions.min()) if least is None else least
            begin = min(max(least + right + 1, keys.start), keys.stop)
        hidden = self.masking.hidden(positions, slice(begin, keys.stop))
        if hidden is not None:
            scores[..., begin - keys.start :].masked_fill_(hidden, -torch.inf)
        if self.masking.mask is not None:
            mask = self.masking.mask[rows, keys]
            if mask.dtype == torch.bool:
                scores.masked_fill_(~mask, -torch.inf)
            else:
                scores.add_(mask)
        if self.masking.alibi is not None:
            self.masking.alibi.add_to(scores, self.masking.alibi.distances(positions, keys, len(self.k)), unit)

    def drop(self, values: Tensor, rows: Rows, keys: slice) -> Tensor:
        """``values`` [R, K] times W; themselves where there is no dropout."""
        if self.dropout is None:
            return values
        return values.mul(self.dropout.kept[rows, keys]).mul_(self.dropout.factor)


@dataclass
class RowBlock:
    """Every intermediate of a block of R query rows against the K keys that any of them may see. All float64."""

    rows: Rows
    """The rows: a slice, or indices [R]."""
    keys: slice
    """The keys."""
    scores: Tensor
    """S, [R, K]; -inf where masked."""
    slope: Tensor | None
    """1 - (S/c)^2, [R, K], under softcap; else None."""
    row_max: Tensor
    """m, [R]."""
    top_key: Tensor
    """int64 [R]: the first key with the largest score, counted from key 0; any in a row without keys."""
    unnormalised_probs: Tensor
    """P_bar, [R, K]."""
    row_sum: Tensor
    """l, [R], that of a sink included; inf where the sink lies more than 709 above m, as in fully masked rows then."""
    inverse_row_sum: Tensor
    """1/l, [R]; 0 in fully masked rows."""
    unnormalised_out: Tensor
    """O_bar, [R, Dv]."""
    fully_masked: Tensor
    """bool [R]."""
    dprobs: Tensor | None = None
    """dP, [R, K]; only where it was asked for."""
    delta: Tensor | None = None
    """[R]; None without dO."""
    unnormalised_dscores: Tensor | None = None
    """dS_bar = dS l, [R, K]; None without dO."""
    dq: Tensor | None = None
    """dQ, [R, D]; None without dO."""
    gradient_sums: tuple[Tensor, Tensor] | None = None
    """Row sums of P_bar o (dP - delta), and its 2-norms, a sink's term included; [R] each, only where asked for."""
    sink: float | None = None
    """The sink's logit; None without one."""
    probs_k: Tensor | None = None
    """P_bar K, [R, D], every probability times its slope; None until whoever streams makes it."""

    @property
    def dscores(self) -> Tensor | None:
        """dS = dS_bar / l, [R, K]; None without dO."""
        bar = self.unnormalised_dscores
        return None if bar is None else bar * self.inverse_row_sum[:, None]

    @property
    def lse(self) -> Tensor:
        """L = m + ln l, [R]; -inf in fully masked rows (a sink's logit, where there is one)."""
        return lse_of(self.row_max, self.row_sum, self.sink)

    @property
    def out(self) -> Tensor:
        """O = O_bar / l, [R, Dv]; zero in fully masked rows."""
        return self.unnormalised_out * self.inverse_row_sum[:, None]

    @property
    def probs(self) -> Tensor:
        """P = P_bar / l, [R, K]; zero in fully masked rows."""
        return self.unnormalised_probs * self.inverse_row_sum[:, None]


@dataclass
class HeadReference:
    """What streaming leaves of a head: row quantities [Tq], O_bar, O, dQ [Tq, D], dK, dV [Tk, D]; float64."""

    row_max: Tensor
    row_sum: Tensor
    unnormalised_out: Tensor
    delta: Tensor | None = None
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    sink: float | None = None

    @cached_property
    def fully_masked(self) -> Tensor:
        """Rows without a visible key, bool [Tq]."""
        return self.row_max == -torch.inf

    @cached_property
    def lse(self) -> Tensor:
        """L = m + ln l, [Tq]; -inf in fully masked rows (a sink's logit, where there is one)."""
        return lse_of(self.row_max, self.row_sum, self.sink)

    @cached_property
    def sink_probs(self) -> Tensor | None:
        """exp(s - L), what the sink takes of every row, [Tq]; None without a sink."""
        return None if self.sink is None else (self.sink - self.lse).exp_()

    @cached_property
    def dsink(self) -> Tensor | None:
        """What every row adds to the gradient of the sink's logit, [Tq]; None without a sink or dO."""
        if self.sink_probs is None or self.delta is None:
            return None
        return self.sink_probs * self.delta.neg()

    @cached_property
    def out(self) -> Tensor:
        """O = O_bar / l, [Tq, Dv]; zero in fully masked rows."""
        return self.unnormalised_out * inverse_of(self.row_sum, self.fully_masked)[:, None]


def row_blocks(
    head: AttentionHead,
    *,
    rows: Tensor | None = None,
    block_rows: int | None = None,
    keep_dprobs: bool = False,
    gradient_sums: bool = False,
) -> Iterator[RowBlock]:
    """The head's intermediates, block by block of query rows.

    Keys that no row of a block can see are left out, so causal attention costs half.

    Args:
        head: The head.
        rows: Indices of the query rows wanted (default: all).
        block_rows: Rows in a block (default: as many as keep its scores within a cache-sized budget).
        keep_dprobs: Keep dP, which otherwise turns into dS in place.
        gradient_sums: Also make the sums that the bound of delta's own error needs (``reference.certificate``).
    """
    count = len(head.q) if rows is None else len(rows)
    wanted = None if rows is None else rows.to(head.q.device)
    if block_rows is None:
        kind = "cuda" if head.q.is_cuda else "cpu"
        fitting = _BLOCK_ELEMENTS[kind] // max(len(head.k), 1)
        block_rows = min(max(_MIN_BLOCK_ROWS, fitting), _MOST_BLOCK_ROWS[kind])
    with torch.no_grad(), torch.autocast(head.q.device.type, enabled=False):
        for start in range(0, count, block_rows):
            part = slice(start, min(start + block_rows, count))
            chosen = part if wanted is None else wanted[part]
            yield _row_block(head, chosen, keep_dprobs=keep_dprobs, gradient_sums=gradient_sums)


def reference_rows(head: AttentionHead, rows: Tensor) -> RowBlock:
    """Every intermediate of the chosen query rows ([R] indices), T x T ones included, as one block."""
    return next(row_blocks(head, rows=rows, block_rows=max(len(rows), 1), keep_dprobs=True))


def reference_head(
    head: AttentionHead,
    observe: Callable[[RowBlock], None] | None = None,
    *,
    block_rows: int | None = None,
    key_gradients: bool = True,
    gradient_sums: bool = False,
) -> HeadReference:
    """Stream the head once and keep what is linear in T.

    Args:
        head: The head.
        observe: Called with every block, for whoever needs the T x T intermediates in passing.
        block_rows: As of ``row_blocks``.
        key_gradients: Also sum dK and dV (two more products a block).
        gradient_sums: As of ``row_blocks``.
    """
    by_row: dict[str, Tensor] = {}
    dk = dv = None
    if head.do is not None and key_gradients:
        dk, dv = torch.zeros_like(head.k), torch.zeros_like(head.v)
    for block in row_blocks(head, block_rows=block_rows, gradient_sums=gradient_sums):
        for name in ("row_max", "row_sum", "unnormalised_out", "delta", "dq"):
            if (values := getattr(block, name)) is not None:
                if name not in by_row:
                    by_row[name] = values.new_empty((len(head.q), *values.shape[1:]))
                by_row[name][block.rows] = values
        if head.do is not None and dk is not None and dv is not None:
            assert block.unnormalised_dscores is not None
            scaled_q = head.q[block.rows] * (block.inverse_row_sum * head.scale)[:, None]
            dk[block.keys] += block.unnormalised_dscores.T @ scaled_q
            scaled_do = head.do[block.rows] * block.inverse_row_sum[:, None]
            dv[block.keys] += head.drop(block.unnormalised_probs, block.rows, block.keys).T @ scaled_do
        if observe is not None:
            observe(block)
    return HeadReference(**by_row, dk=dk, dv=dv, sink=head.sink)


def _row_block(head: AttentionHead, rows: Rows, *, keep_dprobs: bool, gradient_sums: bool) -> RowBlock:
    keys = head.visible_span(rows)
    k, v = head.k[keys], head.v[keys]
    scores = scaled_products(head.q[rows], k, head.scale)
    slope = softcap_(head, scores)
    head.apply_mask(scores, rows, keys)

    if scores.shape[1]:
        row_max, top_key = torch.max(scores, 1)
    else:
        row_max = scores.new_full(scores.shape[:1], -torch.inf)
        top_key = torch.zeros_like(row_max, dtype=torch.int64)
    fully_masked = row_max == -torch.inf
    probs = torch.sub(scores, row_max.masked_fill(fully_masked, 0.0)[:, None]).exp_()
    row_sum = sum_in_parts(probs)
    of_sink = None
    if head.sink is not None:
        of_sink = row_max.neg().add_(head.sink).exp_()
        row_sum.add_(of_sink)
    block = RowBlock(
        rows=rows,
        keys=keys,
        scores=scores,
        slope=slope,
        row_max=row_max,
        top_key=top_key.add_(keys.start),
        unnormalised_probs=probs,
        row_sum=row_sum,
        inverse_row_sum=inverse_of(row_sum, fully_masked),
        unnormalised_out=product_in_parts(head.drop(probs, rows, keys), v),
        fully_masked=fully_masked,
        sink=head.sink,
    )
    if head.do is not None:
        do, inverse = head.do[rows], block.inverse_row_sum
        block.delta = (do * block.unnormalised_out).sum(1).mul_(inverse)
        dprobs = head.drop(do @ v.T, rows, keys)
        if keep_dprobs:
            block.dprobs = dprobs.clone()
        dscores = dprobs.sub_(block.delta[:, None]).mul_(probs)
        if of_sink is None:
            # P = 1 whatever the only score of a row is: dP - delta is 0, and what float64 leaves of it is no gradient.
            alone = torch.nonzero(row_sum == 1)[:, 0]
            dscores[alone[probs[alone].count_nonzero(1) == 1]] = 0.0
        if gradient_sums:
            block.gradient_sums = sum_in_parts(dscores), torch.linalg.vector_norm(dscores, dim=1)
            if of_sink is not None:
                of_sink = torch.where(row_sum == torch.inf, 0.0, of_sink * block.delta.neg())
                block.gradient_sums = block.gradient_sums[0] + of_sink, torch.hypot(block.gradient_sums[1], of_sink)
        if slope is not None:
            dscores.mul_(slope)
        block.unnormalised_dscores = dscores
        # 1/l enters at the end: dP stays as exact as the inputs let it be, and [R, K] is gone over once less.
        block.dq = product_in_parts(dscores, k).mul_((inverse * head.scale)[:, None])
    return block


def scaled_products(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """alpha q.k of some rows and keys, [..., R, K]."""
    # A power of two costs no rounding; another scale waits for the product, which is often exact.
    return (q * scale) @ k.mT if is_power_of_two(scale) else (q @ k.mT).mul_(scale)


def softcap_(head: AttentionHead, scores: Tensor) -> Tensor | None:
    """S becomes c tanh(S / c), where there is a softcap c; returns the slope, 1 - tanh(S / c)^2."""
    if head.softcap is None:
        return None
    # By a tensor: CUDA divides by a plain number by multiplying with its rounded reciprocal.
    scores.div_(scores.new_full((), head.softcap)).tanh_()
    slope = 1 - scores.square()
    scores.mul_(head.softcap)
    return slope


def inverse_of(row_sum: Tensor, fully_masked: Tensor) -> Tensor:
    """1/l, and 0 in fully masked rows; [R]."""
    return row_sum.reciprocal().masked_fill_(fully_masked, 0.0)


def lse_of(row_max: Tensor, row_sum: Tensor, sink: float | Tensor | None) -> Tensor:
    """L = m + ln l of any rows; ``sink``: the logit of their head's (or of each row's), None without one."""
    found = row_max + row_sum.log()
    # Where exp(s - m) overflows nothing but the sink is left of l.
    return found if sink is None else torch.where(row_sum == torch.inf, sink, found)
