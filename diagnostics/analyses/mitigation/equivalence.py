"""Whether recipes compute attention in exact arithmetic: runs in float64, and what float64 itself may err by.

The stabilised softmax (Qiu & Yao, arXiv 2510.04212, section 4) stops being attention where its beta is too large. Where
a row's maximum r > 0 is repeated, m = beta r is subtracted instead. Exact arithmetic does not mind, but P_bar's largest
element becomes exp(-(beta - 1) r): it underflows at (beta - 1) r = -ln(smallest number), and a lower limit of 1e-10 on
l, as the published code has it, is reached at (beta - 1) r = -ln(1e-10) = 23.03.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from attn_diag.head.truth import HeadTruth, exact_recipe
from attn_diag.kernels import Recipe, Schedule, SoftmaxRule, block_scores, emulate_blocks
from attn_diag.kernels.formats import NumberFormat, parse
from attn_diag.reference import AttentionHead
from attn_diag.results.what_if import Equivalence
from attn_diag.results.wording import percent

# A difference below one rounding in fp32 is beyond what a kernel with fp32 sums could show.
NEARLY = 2.0**-24
_UNIT = 2.0**-53
CLAMP_LOG = -math.log(1e-10)
_FP32 = NumberFormat(8, 23)
_IN_ONE_RANGE = Schedule(key_tile=2**20)


def exact_twin(recipe: Recipe) -> Recipe:
    """The recipe's float64 run; the same one for recipes that differ in nothing that is left without roundings."""
    # Under the safe rule the ranges' order and size only change how float64's own sums round.
    whole = recipe.softmax.kind == "safe" and recipe.row_sum_clamp is None
    return replace(
        exact_recipe(recipe),
        schedule=_IN_ONE_RANGE if whole else recipe.schedule,
        alpha="in-exponent" if whole else recipe.alpha,
        name="exact",
        summary="",
        seed=0,
        # Without casts these choose between equal numbers.
        rescaling="difference",
        row_sum_of="fp32-probs",
        dscores_from="fp32-probs",
        alpha_in_backward="after-product",
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
    out = truth.norms["o"]
    bound_o = 4 * e * math.sqrt(count) * norm["v"] / out if out else 0.0
    if head.do is None or truth.reference.dq is None:
        return EquivalenceBounds(bound_o, None)
    dq = truth.norms["dq"]
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
    norms = truth.norms
    return {name: math.sqrt(square) / norms[name] if norms.get(name) else 0.0 for name, square in squares.items()}


@dataclass(frozen=True)
class RepeatedMaxima:
    """Rows in which the rule acts, and the largest repeated maximum there (scaled scores; None: none above 0)."""

    rows: int
    largest: float | None


def repeated_maxima_as_run(recipe: Recipe, head: AttentionHead, epsilon: float) -> RepeatedMaxima:
    """Stream the head's scores as the recipe stores them, key range by key range, as the rule sees them.

    ``epsilon``: scores within it of the maximum repeat it, in the unit of the stored scores.
    """
    acted = torch.zeros(len(head.q), dtype=torch.bool, device=head.q.device)
    largest, factor = torch.zeros((), dtype=torch.float64, device=head.q.device), 1.0
    for rows, scores, factor in block_scores(recipe, head):
        top = scores.amax(1, keepdim=True)
        repeated = ((scores >= top - epsilon).sum(1) > 1) & (top[:, 0] > -torch.inf) & (top[:, 0] != 0)
        acted[rows] |= repeated
        found = torch.where(repeated, top[:, 0], 0.0).amax().double() * factor
        largest = torch.maximum(largest, found)
    return RepeatedMaxima(int(acted.sum()), float(largest) or None)


def beta_limits(recipe: Recipe, largest: float) -> tuple[float, float, float]:
    """The beta at which l meets a lower limit of 1e-10, and at which P_bar's largest element falls below the smallest
    normal, and the smallest subnormal, number; of P_bar's format where that is narrower than fp32."""
    rounding = parse(recipe.probs)
    fmt = rounding.format if rounding is not None and rounding.format.min_exponent > _FP32.min_exponent else _FP32
    normal = -fmt.min_exponent * math.log(2)
    subnormal = (fmt.mantissa_bits + 1 - fmt.min_exponent) * math.log(2)  # half the smallest rounds to 0
    return tuple(1 + limit / largest for limit in (CLAMP_LOG, normal, subnormal))  # type: ignore[return-value]
