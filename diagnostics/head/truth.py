"""The one pass of truth over a head, and the errors of many recipes against it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from attn_diag.head.projection import HeadProjection
from attn_diag.head.propagation import sloped
from attn_diag.head.read import HeadInputs
from attn_diag.head.row_maxima import RowMaximaCollector, collector_of, take_maxima
from attn_diag.kernels import EmulatedRows, Recipe, emulate_blocks
from attn_diag.kernels.recipe import FORMATS, QUANTIZERS, SMOOTHING
from attn_diag.reference import AttentionHead, FloatFormat, HeadReference, RowBlock, Rows, reference_head, ulp
from attn_diag.reference.fused import FusedHeads, fuses
from attn_diag.work import map_in_order


@dataclass
class HeadTruth:
    """What one pass of the float64 reference over a head leaves, and what errors are measured in (all float64)."""

    inputs: HeadInputs
    """The head; the pass has marked the rows that attend to NaN or Inf."""
    reference: HeadReference
    """O, L, delta and dQ; dK and dV where they were asked for."""
    maxima: RowMaximaCollector
    """Its repeated row maxima."""
    products: Tensor | None
    """P̄ K, [Tq, D], under softcap (P̄∘slope) K; None without dO."""
    blocks: tuple[Rows, ...]
    """The blocks of query rows, in the order in which they came."""
    projection: HeadProjection | None = None
    """How dW_Q follows from dQ; None where it does not, or is not wanted."""

    @property
    def head(self) -> AttentionHead:
        """The head's inputs in float64."""
        return self.inputs.head

    @property
    def out_format(self) -> FloatFormat:
        """The format of the inputs: O's and the gradients' own."""
        return self.inputs.input_format

    @cached_property
    def usable(self) -> Tensor:
        """Rows with finite inputs and at least one key, bool [Tq]."""
        return ~self.inputs.unusable & ~self.reference.fully_masked

    @cached_property
    def top_key(self) -> Tensor:
        """The first key with the largest score, int64 [Tq]; 0 in rows without keys."""
        return self.maxima.top_key

    @cached_property
    def top_prob(self) -> Tensor:
        """The probability of the top key, [Tq]: P̄ is 1 there, so 1/l; 0 in rows without keys."""
        return self.reference.row_sum.reciprocal().masked_fill_(self.reference.fully_masked, 0.0)

    @cached_property
    def probs_k(self) -> Tensor | None:
        """P K, [Tq, D], under softcap (P∘slope) K; None without dO."""
        return None if self.products is None else self.products * self.top_prob[:, None]

    @cached_property
    def noise_floor(self) -> Tensor | None:
        """sigma_t, [Tq]: the standard deviation that one correct rounding of O gives delta; None without dO."""
        if self.head.do is None:
            return None
        return (self.head.do * ulp(self.reference.out, self.out_format)).square().sum(1).div(12).sqrt()

    @cached_property
    def conditioning(self) -> float | None:
        """||alpha diag(delta) P K|| / ||dQ|| over the usable rows; None without dO, and where dQ is 0."""
        norm = self.norms.get("dq")
        if not norm or self.products is None or self.reference.delta is None:
            return None
        weight = (self.reference.delta * self.top_prob * self.head.scale)[:, None]
        parts = ((self.products[rows] * weight[rows])[self.usable[rows]] for rows in self.blocks)
        return math.sqrt(sum(float(part.square().sum()) for part in parts)) / norm

    @cached_property
    def clusters(self) -> Tensor:
        """Number of every row's argmax key among those of the usable rows, int64 [Tq]; 0 in other rows."""
        numbers = torch.zeros_like(self.top_key)
        numbers[self.usable] = torch.unique(self.top_key[self.usable], return_inverse=True)[1]
        return numbers

    @cached_property
    def mean_ulp(self) -> dict[str, float]:
        """The mean spacing of the inputs' format at the references of o and dq."""
        known = {"o": self.reference.out, "dq": self.reference.dq}
        return {n: float(ulp(t[self.usable], self.out_format).mean()) for n, t in known.items() if t is not None}

    @cached_property
    def dw_q(self) -> Tensor | None:
        """dW_Q = J^T dQ^T x of this head and sequence, [D, C]; None where the projection or dO is not known."""
        if self.reference.dq is None:
            return None
        return self.project([self.reference.dq[self.usable]], self.usable)

    def project(self, errors: Sequence[Tensor], rows: Tensor) -> Tensor | None:
        """Carry errors of dQ over to dW_Q.

        Args:
            errors: Errors of dQ, [n, D] float64 each.
            rows: Which n rows they are: indices, or bool [Tq].

        Returns:
            Those of dW_Q, one [D, C] below the other; None where it is not known.
        """
        if self.projection is None or not errors:
            return None
        pulled = [self.projection.pull(error, rows) for error in errors]
        return torch.cat(pulled, 1).T @ self.projection.x[rows]

    @cached_property
    def norms(self) -> dict[str, float]:
        """Frobenius norms of the references of o and, where they are known, dq and dw_q (dQ^T x), usable rows alone."""
        found = {"o": float(self.reference.out[self.usable].norm())}
        if self.reference.dq is not None:
            found["dq"] = float(self.reference.dq[self.usable].norm())
        if self.dw_q is not None:
            found["dw_q"] = float(self.dw_q.norm())
        return found

    @property
    def alone(self) -> HeadTruth:
        """The same without dK, dV and what can be computed again without another pass, its tensors no parts of larger.

        Heads that were read or fused together share theirs.
        """
        r, head = self.reference, self.head
        out, dq, products = _whole(r.unnormalised_out), _whole(r.dq), _whole(self.products)
        q, k, v = (_whole(t) for t in (head.q, head.k, head.v))
        assert out is not None
        assert q is not None
        assert k is not None
        assert v is not None
        inputs = replace(self.inputs, head=replace(head, q=q, k=k, v=v, do=_whole(head.do)))
        reference = replace(r, unnormalised_out=out, dq=dq, dk=None, dv=None)
        return replace(self, inputs=inputs, reference=reference, products=products)

    @property
    def bytes(self) -> int:
        """What its large tensors take, [Tq, D] and [Tk, D]."""
        head, reference = self.head, self.reference
        held = (head.q, head.k, head.v, head.do, reference.unnormalised_out, reference.dq, self.products)
        return sum(t.numel() * t.element_size() for t in held if t is not None)


def head_truth(
    inputs: HeadInputs,
    projection: HeadProjection | None = None,
    observe: Callable[[RowBlock], None] | None = None,
    *,
    maxima: RowMaximaCollector | None = None,
    key_gradients: bool = False,
    gradient_sums: bool = False,
) -> HeadTruth:
    """Stream the reference of one head, once; without an observer by the kernels, where they compute it.

    Args:
        inputs: The head.
        projection: How dW_Q follows from dQ, where that is wanted.
        observe: Called with every block, after its rows with NaN or Inf have been marked.
        maxima: A collector that ``observe`` feeds; None: one of this pass's own, without a recipe.
        key_gradients: Also sum dK and dV.
        gradient_sums: See ``reference.row_blocks``.
    """
    head = inputs.head
    collected = maxima or collector_of(inputs, None)
    if observe is None and maxima is None and not inputs.marks_rows and fuses([head]):
        return fused_truths([inputs], [projection], key_gradients=key_gradients)[0]
    products = torch.zeros_like(head.q) if head.do is not None else None
    blocks: list[Rows] = []

    def see(block: RowBlock) -> None:
        inputs.mark_rows(block)
        blocks.append(block.rows)
        if maxima is None:
            collected.add(block)
        if products is not None:
            block.probs_k = sloped(block, block.unnormalised_probs) @ head.k[block.keys]
            products[block.rows] = block.probs_k
        if observe is not None:
            observe(block)

    reference = reference_head(head, see, key_gradients=key_gradients, gradient_sums=gradient_sums)
    return HeadTruth(inputs, reference, collected, products, tuple(blocks), projection)


def fused_truths(
    inputs: Sequence[HeadInputs], projections: Sequence[HeadProjection | None], *, key_gradients: bool = False
) -> list[HeadTruth]:
    """``head_truth`` of heads that the kernels compute in one launch."""
    fused, collected = FusedHeads([one.head for one in inputs]), [collector_of(one, None) for one in inputs]
    references = fused.references(key_gradients=key_gradients)
    take_maxima(collected, fused)
    products = [None] * len(inputs) if fused.products is None else list(fused.products)
    each = zip(inputs, references, collected, products, projections, strict=True)
    return [HeadTruth(one, reference, maxima, pk, (slice(None),), of) for one, reference, maxima, pk, of in each]


@dataclass
class VariantErrors:
    """Signed errors (observed - reference) of one recipe on one head, over its n usable rows; float64.

    Those of the backward are None without dO.
    """

    o: Tensor
    """The sum of O's errors in each row, [n]."""
    o_away: Tensor
    """The same, each times the sign of O_ref: away from zero."""
    o_square: float
    """The sum of O's squared errors."""
    finite: bool
    """Whether every output is finite."""
    delta: Tensor | None = None
    """delta's error, [n]."""
    delta_cells: Tensor | None = None
    """What O's errors contribute to delta's by argmax key (``HeadTruth.clusters``) and feature, [keys, Dv]."""
    dq: Tensor | None = None
    """The sum of dQ's errors in each row, [n]."""
    dq_square: Tensor | None = None
    """The sum of their squares in each row, [n]."""
    dw_q: Tensor | None = None
    """dW_Q's error, [D, C]."""

    def relative(self, truth: HeadTruth) -> dict[str, float]:
        """||error|| / ||reference|| of o, dq and dw_q, and "delta": rms(delta error / noise floor), the noise factor.

        Only what is known is there.
        """
        squares = {"o": self.o_square}
        if self.dq_square is not None:
            squares["dq"] = float(self.dq_square.sum())
        if self.dw_q is not None:
            squares["dw_q"] = float(self.dw_q.square().sum())
        norms = truth.norms
        found = {name: math.sqrt(square) / norms[name] if norms[name] else 0.0 for name, square in squares.items()}
        if self.delta is not None and truth.noise_floor is not None:
            floor = truth.noise_floor[truth.usable]
            kept = floor > 0
            found["delta"] = float((self.delta[kept] / floor[kept]).square().mean().sqrt())
        return {name: found[name] for name in ("o", "delta", "dq", "dw_q") if name in found}


def observed_sizes(outputs: Mapping[str, Tensor], truth: HeadTruth) -> dict[str, float]:
    """As ``VariantErrors.relative``, of what a kernel really returned; delta as captured, else rowsum(dO o O).

    Args:
        outputs: What it returned, float64, by name (o, delta, dq).
        truth: Of the same head.

    Returns:
        Each over the rows in which it is finite, but for dW_Q, which adds all rows up: NaN where dQ has NaN or Inf in
        one; only what is known is there.
    """
    reference, inputs = truth.reference, truth.head

    def finite(values: Tensor) -> Tensor:
        return truth.usable & (values.isfinite() if values.ndim == 1 else values.isfinite().all(1))

    found: dict[str, float] = {}
    o, dq, delta = (outputs.get(name) for name in ("o", "dq", "delta"))
    if o is not None:
        rows = finite(o)
        found["o"] = _ratio((o - reference.out)[rows], reference.out[rows])
    if inputs.do is not None and delta is None and o is not None:
        delta = (inputs.do * o).sum(1)
    if delta is not None and reference.delta is not None and truth.noise_floor is not None:
        rows = finite(delta) & (truth.noise_floor > 0)
        found["delta"] = float(((delta - reference.delta) / truth.noise_floor)[rows].square().mean().sqrt())
    if dq is not None and reference.dq is not None:
        rows = finite(dq)
        error, exact = (dq - reference.dq)[rows], reference.dq[rows]
        found["dq"] = _ratio(error, exact)
        projected, reference_dw_q = truth.project([error], rows), truth.project([exact], rows)
        if projected is not None and reference_dw_q is not None:
            lost = bool((truth.usable & ~rows).any())
            found["dw_q"] = math.nan if lost else _ratio(projected, reference_dw_q)
    return found


def measure_variants(
    truth: HeadTruth,
    recipes: Sequence[Recipe],
    advance: Callable[[int], None] | None = None,
    *,
    delta_cells: bool = False,
) -> list[VariantErrors]:
    """Run the recipes (of one query block size) side by side over the head; ``advance(rows)`` after every block."""
    sums = [_Sums(truth, delta_cells) for _ in recipes]
    dw_q: Tensor | None = None
    run = partial(map_in_order, parallel=truth.head.q.device.type == "cpu")
    for rows, results in emulate_blocks(recipes, truth.head, run):
        kept = truth.usable[rows].nonzero()[:, 0]  # once, as a GPU is waited for here
        rows_kept = rows[kept]
        dq = [total.add(rows_kept, result, kept) for total, result in zip(sums, results, strict=True)]
        known = [error for error in dq if error is not None]
        # One product for all recipes.
        part = truth.project(known, rows_kept)
        if part is not None:
            dw_q = part if dw_q is None else dw_q.add_(part)
        if advance is not None:
            advance(len(rows))
    by_recipe: Sequence[Tensor | None] = (
        [None] * len(sums) if dw_q is None else torch.split(dw_q, truth.head.q.shape[1])
    )
    return [total.errors(part) for total, part in zip(sums, by_recipe, strict=True)]


def exact_recipe(recipe: Recipe) -> Recipe:
    """The same algorithm and schedule in float64, nothing rounded."""
    unrounded: dict[str, Any] = dict.fromkeys([name for name in FORMATS if name != "input"], "fp32")
    unrounded |= dict.fromkeys((*QUANTIZERS, *SMOOTHING), "none")
    return replace(recipe, **unrounded, arithmetic="fp64", accumulation="exact", exp="exact")


class _Sums:
    def __init__(self, truth: HeadTruth, delta_cells: bool) -> None:
        self._truth = truth
        self._delta_cells = None
        if delta_cells and truth.head.do is not None:
            keys = int(truth.clusters.max()) + 1 if len(truth.clusters) else 0
            self._delta_cells = truth.reference.out.new_zeros(keys, truth.head.v.shape[1])
        self._parts: defaultdict[str, list[Tensor]] = defaultdict(list)
        self._o_square = truth.reference.out.new_zeros(())

    def add(self, rows: Tensor, result: EmulatedRows, kept: Tensor) -> Tensor | None:
        """Take a block's results, at ``kept`` those of the usable ``rows`` [n]; returns dQ's error [n, D] if any."""
        reference = self._truth.reference
        truth = reference.out[rows]
        error = result.out[kept].double() - truth
        self._parts["o"].append(error.sum(1))
        self._parts["o_away"].append((error * truth.sign()).sum(1))
        self._o_square += error.square().sum()
        if result.delta is None or result.dq is None:
            return None
        assert reference.delta is not None
        assert reference.dq is not None
        self._parts["delta"].append(result.delta[kept].double() - reference.delta[rows])
        if self._delta_cells is not None and self._truth.head.do is not None:
            self._delta_cells.index_add_(0, self._truth.clusters[rows], self._truth.head.do[rows] * error)
        error = result.dq[kept].double() - reference.dq[rows]
        self._parts["dq"].append(error.sum(1))
        self._parts["dq_square"].append(error.square().sum(1))
        return error

    def errors(self, dw_q: Tensor | None) -> VariantErrors:
        """What has been summed up; ``dw_q`` [D, C] dW_Q's error."""
        rows = {name: torch.cat(parts) for name, parts in self._parts.items()}
        finite = all(bool(rows[name].sum().isfinite()) for name in ("o", "dq") if name in rows)
        square = float(self._o_square)
        return VariantErrors(**rows, o_square=square, finite=finite, dw_q=dw_q, delta_cells=self._delta_cells)


def _whole(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone()


def _ratio(error: Tensor, reference: Tensor) -> float:
    """||error|| / ||reference||; 0 where there is no reference to compare with."""
    norm = float(reference.norm())
    return float(error.norm()) / norm if norm else 0.0
