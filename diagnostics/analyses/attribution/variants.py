"""What attribution needs of a recipe's errors on a head, measured of one head or of many at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.head.emulated_together import joins
from attn_diag.head.open import OpenHead
from attn_diag.head.row_maxima import settle_alike
from attn_diag.head.stacks import inner
from attn_diag.head.truth import HeadTruth, VariantErrors, fused_truths, measure_variants
from attn_diag.kernels import Recipe, emulate_stack, in_any_block, stackable
from attn_diag.reference.fused import fuses
from attn_diag.reference.heads import batches

Array = npt.NDArray[np.float64]
# Errors of dQ that are kept until they are carried over to dW_Q, in elements; and scores of so many rows of all heads.
_KEPT, _SCORES, _ROWS = 2**28, 2**25, 128
Advance = Callable[[int], None]


@dataclass(frozen=True)
class RecipeErrors:
    """One recipe's errors on a head; by row over its n usable rows."""

    sizes: dict[str, float]
    """As ``VariantErrors.relative``."""
    along: float
    """dW_Q's error along dW_Q, over its squared norm; 0 where it is not known."""
    o_away: Array
    """The sum of O's errors, each times the sign of O_ref, [n]."""
    in_floors: Array | None
    """delta's error in noise floors, [n]; None without dO."""
    dq: Array | None
    """The sum of dQ's errors, [n]; None without dO."""
    dq_square: Array | None
    """The sum of their squares, [n]; None without dO."""

    @classmethod
    def of(cls, errors: VariantErrors, truth: HeadTruth) -> RecipeErrors:
        """From the errors of one head."""
        along, in_floors = 0.0, None
        if errors.dw_q is not None and truth.dw_q is not None and truth.norms["dw_q"]:
            along = float((errors.dw_q * truth.dw_q).sum()) / truth.norms["dw_q"] ** 2
        if truth.noise_floor is not None and errors.delta is not None:
            floor = truth.noise_floor[truth.usable]
            in_floors = torch.where(floor > 0, errors.delta / floor, 0.0).cpu().numpy()
        return cls(
            sizes=errors.relative(truth),
            along=along,
            o_away=errors.o_away.cpu().numpy(),
            in_floors=in_floors,
            dq=None if errors.dq is None else errors.dq.cpu().numpy(),
            dq_square=None if errors.dq_square is None else errors.dq_square.cpu().numpy(),
        )


def measure_heads(
    truths: Sequence[HeadTruth], recipes: Sequence[Recipe], advance: Advance | None = None
) -> list[list[RecipeErrors]]:
    """Errors of these recipes (of one query block) on heads that are ``alike``: of each head, in the recipes' order.

    On a GPU, where a launch takes longer than what it computes of one head, all heads are emulated together, but for
    recipes whose sums cannot be; and those whose rows need their own query blocks alone keep to them.
    """
    head, many = truths[0].head, joins(truths[0].head.q.device)
    groups: dict[tuple[bool, bool] | None, list[int]] = {}
    for i, recipe in enumerate(recipes):
        kind = (len(truths) > 1 and stackable(recipe), in_any_block(recipe, head)) if many else None
        groups.setdefault(kind, []).append(i)
    found: list[dict[int, RecipeErrors]] = [{} for _ in truths]
    for number, (kind, places) in enumerate(groups.items(), 1):
        some, told = [recipes[i] for i in places], advance if number == len(groups) else None
        if kind is not None and kind[0]:
            made = measure_together(truths, some, told)
        else:
            made = [[RecipeErrors.of(e, t) for e in measure_variants(t, some, told)] for t in truths]
        for of_head, errors in zip(found, made, strict=True):
            of_head |= zip(places, errors, strict=True)
    return [[of_head[i] for i in range(len(recipes))] for of_head in found]


def take_truths(heads: Sequence[OpenHead]) -> None:
    """Know the truth of every head; those whose reference the kernels compute in one launch get it so."""
    waiting = [head for head in heads if head.measured is None and not head.inputs.marks_rows]
    for places in (
        batches([head.inputs.head for head in waiting]) if waiting and joins(waiting[0].inputs.head.q.device) else []
    ):
        some = [waiting[i] for i in places]
        if len(some) < 2 or not fuses([head.inputs.head for head in some]):
            continue
        truths = fused_truths([head.inputs for head in some], [head.projection for head in some])
        settle_alike([truth.maxima for truth in truths])
        for head, truth in zip(some, truths, strict=True):
            head.measured = truth


def measure_together(
    truths: Sequence[HeadTruth], recipes: Sequence[Recipe], advance: Advance | None = None
) -> list[list[RecipeErrors]]:
    """``measure_heads`` by emulating all heads at once, so many as their errors of dQ can be kept of."""
    q, keys = truths[0].head.q, len(truths[0].head.k)
    most = max(1, min(_KEPT // (len(recipes) * q.numel()), _SCORES // (_ROWS * keys)))
    found: list[list[RecipeErrors]] = []
    for start in range(0, len(truths), most):
        found += _Stack(truths[start : start + most]).measured(recipes, advance)
    return found


class _Stack:
    """H heads side by side."""

    def __init__(self, truths: Sequence[HeadTruth]) -> None:
        self._truths = truths

        def all_of(get: Callable[[HeadTruth], Tensor | None]) -> Tensor | None:
            known = [t for truth in truths if (t := get(truth)) is not None]
            return torch.stack(known) if known else None

        usable, out = all_of(lambda t: t.usable), all_of(lambda t: t.reference.out)
        assert usable is not None
        assert out is not None
        self.usable, self._out = usable, out
        self._delta, self._dq = (all_of(lambda t, n=name: getattr(t.reference, n)) for name in ("delta", "dq"))  # type: ignore[misc]
        self._floor = all_of(lambda t: t.noise_floor)

    def measured(self, recipes: Sequence[Recipe], advance: Advance | None) -> list[list[RecipeErrors]]:
        parts: list[dict[str, list[Tensor]]] = [{} for _ in recipes]
        dq_errors: list[list[Tensor]] = [[] for _ in recipes]
        for rows, results in emulate_stack(recipes, [truth.head for truth in self._truths]):
            usable = self.usable[:, rows]
            for i, result in enumerate(results):
                error = _kept(result.out.double() - self._out[:, rows], usable)
                sums = {
                    "o_away": (error * self._out[:, rows].sign()).sum(2),
                    "o_square": error.square().sum(2),
                }
                if result.delta is not None and result.dq is not None:
                    assert self._delta is not None
                    assert self._dq is not None
                    assert self._floor is not None
                    floor = self._floor[:, rows]
                    delta = _kept(result.delta.double() - self._delta[:, rows], usable & (floor > 0))
                    sums["in_floors"] = torch.where(floor > 0, delta / floor, 0.0)
                    error = _kept(result.dq.double() - self._dq[:, rows], usable)
                    sums |= {"dq": error.sum(2), "dq_square": error.square().sum(2)}
                    if self._truths[0].projection is not None:
                        dq_errors[i].append(error)
                for name, part in sums.items():
                    parts[i].setdefault(name, []).append(part)
            if advance is not None:
                advance(len(rows) * len(self._truths))
        by_row = {n: torch.stack([torch.cat(p[n], 1) for p in parts], 1) for n in parts[0]}  # [H, recipes, Tq]
        carried = self._carried([torch.cat(errors, 1) for errors in dq_errors if errors])
        totals = {n: by_row[n].sum(2).tolist() for n in ("o_square", "dq_square") if n in by_row}
        factors = None
        if self._floor is not None:
            counts = (self.usable & (self._floor > 0)).sum(1, keepdim=True)
            factors = (by_row["in_floors"].square().sum(2) / counts).sqrt().tolist()
        on_host = {n: t.cpu().numpy() for n, t in by_row.items()}
        rows_of = self.usable.cpu().numpy()
        found = []
        for h, truth in enumerate(self._truths):
            norms, every = truth.norms, bool(rows_of[h].all())
            variants = []
            for i in range(len(recipes)):
                squares = {"o": totals["o_square"][h][i]}
                if factors is not None:
                    squares["dq"] = totals["dq_square"][h][i]
                along = 0.0
                if carried is not None and "dw_q" in norms:
                    squares["dw_q"], along = carried[h][i]
                sizes = {n: math.sqrt(s) / norms[n] if norms[n] else 0.0 for n, s in squares.items()}
                if factors is not None:
                    sizes["delta"] = factors[h][i]
                known = {n: t[h, i] if every else t[h, i][rows_of[h]] for n, t in on_host.items() if n != "o_square"}
                variants.append(
                    RecipeErrors(
                        sizes={n: sizes[n] for n in ("o", "delta", "dq", "dw_q") if n in sizes},
                        along=along / norms["dw_q"] ** 2 if norms.get("dw_q") else 0.0,
                        o_away=known["o_away"],
                        in_floors=known.get("in_floors"),
                        dq=known.get("dq"),
                        dq_square=known.get("dq_square"),
                    )
                )
            found.append(variants)
        return found

    def _carried(self, errors: Sequence[Tensor]) -> list[list[tuple[float, float]]] | None:
        """By head and recipe: ||dW_Q's error||^2, and its inner product with dW_Q; None where it is not known."""
        if not errors:
            return None
        found = []
        for h, truth in enumerate(self._truths):
            assert truth.dw_q is not None
            # Rows that are left out have an error of 0.
            errors_of_head = [e[h][truth.usable] for e in errors]
            made = truth.project(errors_of_head, truth.usable)
            assert made is not None
            each = made.view(len(errors), *truth.dw_q.shape)
            found.append(torch.stack([inner(each, each), inner(each, truth.dw_q.expand_as(each))]))
        return [list(zip(*of_head, strict=True)) for of_head in torch.stack(found).tolist()]


def _kept(error: Tensor, rows: Tensor) -> Tensor:
    """The error with 0 in rows that do not count; [H, R] or [H, R, D]."""
    return torch.where(rows if error.ndim == 2 else rows[..., None], error, 0.0)
