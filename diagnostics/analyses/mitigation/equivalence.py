"""Whether recipes compute attention in exact arithmetic: runs in float64, and what float64 itself may err by."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from attn_diag.head.truth import HeadTruth, exact_recipe
from attn_diag.kernels import Recipe, SoftmaxRule, emulate_blocks
from attn_diag.results.what_if import Equivalence
from attn_diag.results.wording import percent

# A difference below one rounding in fp32 is beyond what a kernel with fp32 sums could show.
NEARLY = 2.0**-24
_UNIT = 2.0**-53


def exact_twin(recipe: Recipe) -> Recipe:
    """The recipe's float64 run; the same one for recipes that differ in nothing that is left without roundings."""
    return replace(
        exact_recipe(recipe),
        name="exact",
        summary="",
        seed=0,
        # Without casts these choose between equal numbers.
        row_sum_of="fp32-probs",
        backward_scores="as-forward",
        lse_from="unrounded-l",
        division="before-last-cast",
        delta_from="dp" if recipe.delta_from == "dp" else "rounded-o",
    )


@dataclass(frozen=True)
class EquivalenceBounds:
    """Relative differences of two float64 computations of O and dQ on one head; None where dQ is unknown."""

    o: float
    dq: float | None


def float64_bounds(truth: HeadTruth, beta: float = 1.0) -> EquivalenceBounds:
    """Worst-case bounds, normwise, to first order in u = 2^-53.

    A score errs by (D + 2) u s, s = alpha max|q| max|k|, its subtraction of m = beta max by 2 (1 + beta) u s and the
    sum l by Tk u: P errs relatively by e = 2 (D + 2 + 2 (1 + beta)) u s + 2 Tk u. Then |O error| <= 2 e max|V| row by
    row, and |dQ error| <= 4 e alpha |dO_t| max|v| max|k|. Twice each, for the reference errs too.
    """
    head, rows = truth.head, truth.usable
    count = int(rows.sum())
    norm = {name: float(getattr(head, name).norm(dim=1).max()) for name in ("q", "k", "v")}
    span = head.scale * norm["q"] * norm["k"]
    e = 2 * _UNIT * ((head.q.shape[1] + 2 + 2 * (1 + beta)) * span + len(head.k) + head.v.shape[1])
    out = float(truth.reference.out[rows].norm())
    bound_o = 4 * e * math.sqrt(count) * norm["v"] / out if out else 0.0
    if head.do is None or truth.reference.dq is None:
        return EquivalenceBounds(bound_o, None)
    dq = float(truth.reference.dq[rows].norm())
    size = float(head.do[rows].norm()) * norm["v"] * norm["k"] * head.scale
    return EquivalenceBounds(bound_o, 8 * e * size / dq if dq else 0.0)


def judge(relative: dict[str, float], bounds: EquivalenceBounds, setting: str = "without any rounding") -> Equivalence:
    """From the relative differences of a float64 run; ``setting``: what was rounded in it."""
    o, dq = relative["o"], relative.get("dq")
    pairs = [(o, bounds.o)] + ([] if dq is None or bounds.dq is None else [(dq, bounds.dq)])
    found = Equivalence("exact", o, dq, bounds.o, bounds.dq)
    if all(difference <= bound for difference, bound in pairs):
        return found
    # dQ is as much worse than O as it is where float64's own rounding is the only error.
    if all(difference <= max(bound, NEARLY * bound / bounds.o) for difference, bound in pairs):
        return replace(found, status="nearly exact", reason="differs by less than one rounding in fp32")
    where = "O" if not o <= max(bounds.o, NEARLY) else "dQ"
    off = o if where == "O" else dq
    return replace(found, status="breaks down", reason=f"{setting} {where} is {percent(off or 0.0, '.2g')} off")


def rule_difference(recipe: Recipe, truth: HeadTruth) -> dict[str, float]:
    """How far a softmax rule moves O and dQ where only the scores are rounded: ||with - without|| / ||reference||.

    Maxima that repeat among rounded scores only are none in exact arithmetic, where the rule would not act; so the
    scores are rounded as the recipe does it, and the rest, with the lower limit on l, is exact. "o", and with dO "dq".
    """
    scores = "e8m23" if recipe.scores == "fp32" else recipe.scores
    ruled = replace(exact_twin(recipe), scores=scores, delta_from="rounded-o")
    plain = replace(ruled, softmax=SoftmaxRule(), row_sum_clamp=None)
    squares: dict[str, float] = {}
    for rows, (a, b) in emulate_blocks([ruled, plain], truth.head):
        kept = truth.usable[rows]
        for name, x, y in (("o", a.out, b.out), ("dq", a.dq, b.dq)):
            if x is not None and y is not None:
                squares[name] = squares.get(name, 0.0) + float((x - y)[kept].square().sum())
    norms = {"o": truth.reference.out, "dq": truth.reference.dq}
    return {name: _ratio(square, norms[name], truth.usable) for name, square in squares.items()}


def _ratio(square: float, reference: Tensor | None, rows: Tensor) -> float:
    norm = 0.0 if reference is None else float(reference[rows].norm())
    return math.sqrt(square) / norm if norm else 0.0
