"""Dropout whose mask was not captured: what O alone tells of it.

A row that sees fewer keys than there are features has O = (P o W) V with V's rows independent, so that its weights W
can be solved for: under dropout each is 0 or 1 / (1 - p), with one p. Where all rows see more keys, O is off by a sum
of independent terms, e_t = sum_j (W_tj - 1) P_tj v_j, of mean 0 and E |e_t|^2 = p / (1 - p) sum_j P_tj^2 |v_j|^2: p is
the same in all rows, and rows err in independent directions (a v that is rounded coarsely moves them alike). Other
noise in P may look so too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference import AttentionHead, FloatFormat, reference_rows, ulp

_ROWS = 64
# A weight counts where O's rounding, twice, leaves it so well known; so near to 0 or to the common one it is that.
_KNOWN, _NEAR = 0.02, 0.1
_MOST = 0.99
# At least so many weights, and so many of them 0.
_WEIGHTS, _ZEROS = 40, 3
# A factor nearer to 1 may be anything; dropout of more than this nobody trains with.
_LEAST, _LARGEST = 0.01, 0.7
# In standard errors.
_CHANCE = 4.0
# The variance of |e_t|^2 over rows may be so many times what dropout's few large terms make it: other noise in P has
# none such.
_LOW, _HIGH = 0.3, 3.0
# The zeros have to be so many times as probable under a factor that was multiplied in twice as under one that was not.
_TWICE = 1000.0
# Where one term makes most of |e_t|^2 its relative variance is 1 / p and more.
_TELLING = 2.0
# Rows of independent errors: |sum of n unit vectors|^2 is n in the mean.
_TOGETHER = 2.0


@dataclass(frozen=True)
class UnseenDropout:
    """Dropout that O shows."""

    p: float
    """How many are dropped in the mean."""
    weights: int
    """How many weights of single keys were read off O, all 0 or 1 / (1 - p); 0: none, it is told by the size alone."""
    error: float
    """The squared error of O that these weights leave in their rows."""
    reference: float
    """The squared norm of the reference there."""
    zeros: int = 0
    """How many of the weights are 0."""
    twice: bool = False
    """Whether the others are 1 / (1 - p)^2: the factor was multiplied in twice."""

    @property
    def words(self) -> str:
        """What it is."""
        twice = " and whose factor 1 / (1 - p) is multiplied in twice" * self.twice
        return f"attention dropout with p = {self.p:.2g} whose mask was not captured{twice}"

    @property
    def sentence(self) -> str:
        """What shows it, and what to do."""
        factor, add = 1 / (1 - self.p), "Add the mask (dropout_mask, bool [B, Hq, Tq, Tk], True: kept, and dropout_p; "
        shown = f"each of {self.weights} probabilities is 0 or {factor:.3g} times what it is without"
        if self.twice:
            shown = (
                f"{self.zeros} of {self.weights} probabilities are 0, and the others {factor**2:.3g} times what they "
                f"are without, where once makes {factor:.3g}"
            )
        return (
            f"it is {self.words}: where rows see few keys, {shown}. {add}a seed does not tell it), or capture with "
            "dropout 0 (model.eval())."
        )


def in_weights(
    heads: list[tuple[AttentionHead, Tensor]], fmt: FloatFormat, *, unscaled: bool = False
) -> UnseenDropout | None:
    """Dropout by the weights of rows that see few keys; None where there are none, or they are something else.

    Args:
        heads: Each head without dropout, and its O, [Tq, Dv] float64.
        fmt: The format in which O was stored.
        unscaled: Whether what is sought lacks the factor 1 / (1 - p), by mistake.
    """
    of_heads = [_weights(head, o, fmt) for head, o in heads]
    found = [row for rows in of_heads for row in rows]
    if not found:
        return None
    weights = torch.cat([row.weights[row.known] for row in found])
    zero, kept = weights.abs() < _NEAR, weights > 0.5
    count, zeros = len(weights), int(zero.sum())
    if count < _WEIGHTS or zeros < _ZEROS or int((zero | kept).sum()) < _MOST * count:
        return None
    factor = float(weights[kept].median())
    if unscaled != (abs(factor - 1) < _LEAST):
        return None
    p = zeros / count if unscaled else 1 - 1 / factor if factor > 0 else 0.0
    if twice := not unscaled and p > 0 and _is_twice(p, zeros, count):
        p = 1 - math.sqrt(1 - p)
    alike = (weights[kept] / factor - 1).abs() < _NEAR
    by_chance = _CHANCE * math.sqrt(p * (1 - p) / count) + 1 / count if 0 < p < 1 else 0.0
    if not _LEAST <= p <= _LARGEST or alike.double().mean() < _MOST or abs(zeros / count - p) > by_chance:
        return None
    # A mask that all rows of a key share, or all keys of a row, is drawn by no dropout.
    by_key: dict[tuple[int, int], list[Tensor]] = {}
    for head, rows in enumerate(of_heads):
        for row in rows:
            for key, weight in zip(row.keys[row.known].tolist(), row.weights[row.known], strict=True):
                by_key.setdefault((head, key), []).append(weight)
    groups = [row.weights[row.known] for row in found], [torch.stack(of_key) for of_key in by_key.values()]
    if not all(_drawn(of, p) for of in groups):
        return None
    error = reference = 0.0
    for row in found:
        error += float((factor * (row.weights > factor / 2).double() @ row.parts - row.observed).square().sum())
        reference += float(row.parts.sum(0).square().sum())
    return UnseenDropout(p, count, error, reference, zeros, twice)


def _is_twice(p: float, zeros: int, count: int) -> bool:
    """Whether so many zeros tell that 1 / (1 - p), the factor of the others, is another p's, multiplied in twice."""
    once = 1 - math.sqrt(1 - p)
    odds = zeros * math.log(once / p) + (count - zeros) * math.log((1 - once) / (1 - p))
    return odds > math.log(_TWICE)


@dataclass(frozen=True)
class _Row:
    """A row that sees k keys, and few."""

    keys: Tensor
    """[k], which."""
    weights: Tensor
    """[k], theirs."""
    known: Tensor
    """bool [k], which of them are well known."""
    parts: Tensor
    """[k, Dv], P_tj v_j without dropout."""
    observed: Tensor
    """[Dv], its O."""


def _drawn(groups: list[Tensor], p: float) -> bool:
    """Whether the zeros in groups of weights (a row, a key) are as many in each as chance makes them."""
    counts = [(int((g.abs() < _NEAR).sum()), len(g)) for g in groups if len(g)]
    scores = [(zeros - n * p) ** 2 / (n * p * (1 - p)) for zeros, n in counts]
    return sum(scores) <= len(scores) * (1 + _CHANCE * math.sqrt(max(2.0, 1 / p) / len(scores)))


def _weights(head: AttentionHead, o: Tensor, fmt: FloatFormat) -> list[_Row]:
    """Rows that see few keys."""
    visible = _visible(head)
    rows = ((visible > 0) & (visible <= head.v.shape[1] / 4)).nonzero()[:, 0][:_ROWS]
    if not len(rows):
        return []
    block = reference_rows(head, rows)
    values, places, found = head.v[block.keys], torch.arange(len(head.k), device=o.device)[block.keys], []
    for probs, observed in zip(block.probs, o[rows], strict=True):
        seen = probs > 0
        parts = probs[seen, None] * values[seen]
        gram = parts @ parts.T
        # Neither of NaN: v may hold zeros, or a row of keys that P hardly reaches.
        solvable = bool(torch.linalg.cond(gram) < 1 / torch.finfo(gram.dtype).eps ** 0.5)
        if not (solvable and bool(observed.isfinite().all())):
            continue
        inverse = torch.linalg.inv(gram)
        noise = 2 * float((ulp(observed, fmt).square() / 12).mean().sqrt())
        known = noise * inverse.diagonal().clamp(min=0.0).sqrt() < _KNOWN
        found.append(_Row(places[seen], inverse @ parts @ observed, known, parts, observed))
    return found


def _visible(head: AttentionHead) -> Tensor:
    """[Tq], how many keys each row sees, among the first and last rows; 0 elsewhere."""
    count = torch.zeros(len(head.q), dtype=torch.int64, device=head.q.device)
    places = torch.arange(len(head.q), device=head.q.device)
    ends = ((places < _ROWS) | (places >= len(places) - _ROWS)).nonzero()[:, 0]
    count[ends] = (reference_rows(head, ends).probs > 0).sum(1)
    return count


def in_size(head: AttentionHead, o: Tensor, rows: Tensor) -> float | None:
    """p of the dropout that would make O's error in some rows; None where it is not such an error.

    Args:
        head: The head without dropout.
        o: Its O, [Tq, Dv] float64.
        rows: Which n rows, int64.
    """
    rows = rows[torch.linspace(0, len(rows) - 1, min(_ROWS, len(rows)), device=rows.device).long()]
    block = reference_rows(head, rows)
    found = drawn_size(o[rows] - block.out, block.out, block.probs, head.v[block.keys])
    return None if found is None else found[0] / (1 + found[0])


def drawn_size(error: Tensor, truth: Tensor, weights: Tensor, values: Tensor) -> tuple[float, float] | None:
    """p / (1 - p) of the dropout that would make the errors of rows of any sum, and its standard error; None where they
    are no such errors.

    Args:
        error: Of n rows, [n, D].
        truth: The rows without dropout.
        weights: [n, m], what dropout multiplies in each.
        values: [m, D], what these weigh.
    """
    size = truth.square().sum(1)
    along = (error * truth).sum(1)
    expected = weights.square() @ values.square().sum(1)
    if len(error) < _ROWS // 2 or not bool((expected > 0).all()) or not bool(error.isfinite().all()):
        return None
    ratios = error.square().sum(1) / expected
    p = float(ratios.mean() / (1 + ratios.mean()))
    if not _LEAST <= p <= _LARGEST:
        return None
    variances = _variances(weights, values, p)
    # A row whose mass is on one key is off by p / (1 - p) of it at least; where few keys have it, sizes tell nothing.
    everywhere = (ratios > p * ratios.mean() / 10).double().mean() >= _MOST
    if not everywhere or float(variances.median()) > _TELLING:
        return None
    mean = float((ratios / variances).sum() / variances.reciprocal().sum())
    spread = float(((ratios / mean - 1).square() / variances).mean())
    shift = float(along.sum() / size.sum())
    uncertainty = float((along - shift * size).square().sum().sqrt() / size.sum())
    together = float((error / error.norm(dim=1, keepdim=True).clamp(min=1e-300)).sum(0).square().sum()) / len(error)
    if abs(shift) > _CHANCE * uncertainty or not _LOW <= spread <= _HIGH or together > _TOGETHER:
        return None
    return mean, float(variances.reciprocal().sum() ** -0.5) * mean


def _variances(weights: Tensor, values: Tensor, p: float) -> Tensor:
    """[n], the relative variance of |e_t|^2, e_t = sum_j xi_j x_j with x_j what it weighs.

    (kappa - 1) sum |x_j|^4 + 2 sum_{i != j} (x_i . x_j)^2 over (sum |x_j|^2)^2, kappa the kurtosis of xi, which is -1
    with probability p, else p / (1 - p).
    """
    kurtosis = (1 - p) ** 2 / p + p**2 / (1 - p)
    found = []
    for row in weights:
        parts = row[:, None] * values
        sizes = parts.square().sum(1)
        fourths, products = float(sizes.square().sum()), float((parts.T @ parts).square().sum())
        found.append(((kurtosis - 1) * fourths + 2 * (products - fourths)) / float(sizes.sum()) ** 2)
    return torch.tensor(found, dtype=weights.dtype, device=weights.device)
