"""Errors of many recipes on one head: what attribution and what-if compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.projection import HeadProjection
from attn_diag.head.read import HeadInputs, read_float64
from attn_diag.kernels import EmulatedRows, Recipe, emulate_blocks
from attn_diag.kernels.recipe import FORMATS
from attn_diag.reference import AttentionHead, FloatFormat, HeadReference, RowBlock, reference_head, ulp
from attn_diag.work import map_in_order


@dataclass
class HeadTruth:
    """The float64 reference of one head, and what errors are measured in.

    ``usable`` [Tq]: rows with finite inputs and at least one key. ``top_key`` [Tq]: the key of the largest score;
    ``top_prob`` [Tq] its probability. ``noise_floor`` [Tq]: sigma_t, the standard deviation that one correct rounding
    of O gives delta (None without dO). ``projection``: where dW_Q is wanted.
    """

    inputs: HeadInputs
    reference: HeadReference
    usable: Tensor
    top_key: Tensor
    top_prob: Tensor
    noise_floor: Tensor | None
    projection: HeadProjection | None

    @property
    def head(self) -> AttentionHead:
        """The head's inputs in float64."""
        return self.inputs.head

    @property
    def out_format(self) -> FloatFormat:
        """The format of the inputs: O's and the gradients' own."""
        return self.inputs.input_format

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
        """Errors of dQ, [n, D] each, carried over to dW_Q, one [D, C] below the other; None where it is not known.

        ``rows``: which n rows they are, as indices or bool [Tq].
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


def head_truth(
    inputs: HeadInputs,
    projection: HeadProjection | None = None,
    observe: Callable[[RowBlock], None] | None = None,
) -> HeadTruth:
    """Stream the reference of one head once. ``observe`` is called with every block."""
    head = inputs.head
    top_key = torch.zeros(len(head.q), dtype=torch.int64, device=head.q.device)
    top_prob = head.q.new_zeros(len(head.q))

    def see(block: RowBlock) -> None:
        inputs.mark_rows(block)
        top_key[block.rows] = block.top_key
        top_prob[block.rows] = block.inverse_row_sum  # P_bar is 1 at the maximum
        if observe is not None:
            observe(block)

    reference = reference_head(head, see, key_gradients=False)
    floor = None
    if head.do is not None:
        floor = (head.do * ulp(reference.out, inputs.input_format)).square().sum(1).div(12).sqrt()
    usable = ~inputs.unusable & ~reference.fully_masked
    return HeadTruth(inputs, reference, usable, top_key, top_prob, floor, projection)


@dataclass
class VariantErrors:
    """Signed errors (observed - reference) of one recipe on one head, over its usable rows.

    By row, [n] float64: ``o`` sums O's errors, ``o_away`` those times the sign of O_ref, ``delta`` is delta's error,
    ``dq`` sums dQ's errors and ``dq_square`` their squares. ``o_square`` sums O's squared errors. ``dw_q`` [D, C].
    ``delta_cells`` [keys, Dv]: what O's errors contribute to delta's, by argmax key (``HeadTruth.clusters``) and
    feature, where asked for. Backward ones are None without dO. ``finite``: every output is.
    """

    o: Tensor
    o_away: Tensor
    o_square: float
    finite: bool
    delta: Tensor | None = None
    delta_cells: Tensor | None = None
    dq: Tensor | None = None
    dq_square: Tensor | None = None
    dw_q: Tensor | None = None

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


def observed_sizes(capture: Capture, observation: str, batch: int, head: int, truth: HeadTruth) -> dict[str, float]:
    """As ``VariantErrors.relative``, of what a kernel really returned; delta as captured, else rowsum(dO o O).

    Each over the rows in which it is finite; only what is known is there.
    """
    reference, inputs = truth.reference, truth.head

    def read(output: str) -> Tensor | None:
        return read_float64(capture, capture.key(observation, output), batch, head, inputs.q.device)

    def finite(values: Tensor) -> Tensor:
        return truth.usable & (values.isfinite() if values.ndim == 1 else values.isfinite().all(1))

    found: dict[str, float] = {}
    o, dq, delta = read("o"), read("dq"), read("delta")
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
            found["dw_q"] = _ratio(projected, reference_dw_q)
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
        dq = [total.add(rows, result) for total, result in zip(sums, results, strict=True)]
        known = [error for error in dq if error is not None]
        # One product for all recipes.
        part = truth.project(known, rows[truth.usable[rows]])
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
    return replace(recipe, **unrounded, arithmetic="fp64", accumulation="exact", exp="exact")


class _Sums:
    def __init__(self, truth: HeadTruth, delta_cells: bool) -> None:
        self._truth = truth
        self._delta_cells = None
        if delta_cells and truth.head.do is not None:
            keys = int(truth.clusters.max()) + 1 if len(truth.clusters) else 0
            self._delta_cells = truth.reference.out.new_zeros(keys, truth.head.v.shape[1])
        self._parts: dict[str, list[Tensor]] = {}
        self._o_square = 0.0
        self._finite = True

    def add(self, rows: Tensor, result: EmulatedRows) -> Tensor | None:
        """Take a block's results; returns dQ's error [n, D] where there is one."""
        kept = self._truth.usable[rows]
        rows = rows[kept]
        reference = self._truth.reference
        truth = reference.out[rows]
        error = result.out[kept].double() - truth
        self._finite &= bool(error.sum().isfinite())
        self._append("o", error.sum(1))
        self._append("o_away", (error * truth.sign()).sum(1))
        self._o_square += float(error.square().sum())
        if result.delta is None or result.dq is None:
            return None
        assert reference.delta is not None
        assert reference.dq is not None
        self._append("delta", result.delta[kept].double() - reference.delta[rows])
        if self._delta_cells is not None and self._truth.head.do is not None:
            self._delta_cells.index_add_(0, self._truth.clusters[rows], self._truth.head.do[rows] * error)
        error = result.dq[kept].double() - reference.dq[rows]
        self._finite &= bool(error.sum().isfinite())
        self._append("dq", error.sum(1))
        self._append("dq_square", error.square().sum(1))
        return error

    def errors(self, dw_q: Tensor | None) -> VariantErrors:
        """What has been summed up; ``dw_q`` [D, C] dW_Q's error."""
        rows = {name: torch.cat(parts) for name, parts in self._parts.items()}
        return VariantErrors(
            **rows, o_square=self._o_square, finite=self._finite, dw_q=dw_q, delta_cells=self._delta_cells
        )

    def _append(self, name: str, values: Tensor) -> None:
        self._parts.setdefault(name, []).append(values)


def _ratio(error: Tensor, reference: Tensor) -> float:
    """||error|| / ||reference||; 0 where there is no reference to compare with."""
    norm = float(reference.norm())
    return float(error.norm()) / norm if norm else 0.0
