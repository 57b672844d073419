"""Runs recipes and mitigations on one head, and turns what they err by into candidates."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import chain, groupby

import numpy as np
import numpy.typing as npt
import torch

from attn_diag.analyses.mitigation.equivalence import (
    RepeatedMaxima,
    beta_limits,
    exact_twin,
    float64_bounds,
    judge,
    repeated_maxima_as_run,
    rule_difference,
)
from attn_diag.analyses.mitigation.mitigations import PRODUCTS, Price, WhatIfPlan, changed_fields, content
from attn_diag.head.signed_errors import by_cell, of_rows
from attn_diag.head.truth import HeadTruth, VariantErrors, head_truth, measure_variants
from attn_diag.kernels import Recipe, in_any_block
from attn_diag.kernels.emulation_block import SCORES
from attn_diag.reference import round_nearest_even, ulp
from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.results.what_if import Candidate, Cost, Equivalence, Errors
from attn_diag.results.wording import percent
from attn_diag.statistics.means import SignedErrors, estimate_bias
from attn_diag.work import Progress, map_in_order, silent

# Recipes run side by side keep their intermediates of a block: eight stay far below a gigabyte.
_SIDE_BY_SIDE = 8


class Bench:
    """Runs recipes on one head and turns what they err by into candidates."""

    def __init__(self, truth: HeadTruth, counter: Counter) -> None:
        self.truth, self.counter = truth, counter
        rows = truth.usable
        out = truth.reference.out[rows]
        self._ulp_sum = float(ulp(out, truth.out_format).sum())
        rounding = round_nearest_even(out, truth.out_format) - out
        self._rounding_away = (rounding * out.sign()).sum(1)
        self._clusters = truth.clusters[rows].cpu().numpy()
        self._parallel = truth.head.q.device.type == "cpu"
        self._acting: dict[object, RepeatedMaxima] = {}

    def run(self, baseline: Recipe, wanted: list[WhatIfPlan], clips: list[float], max_logit: float) -> list[Candidate]:
        """The baseline first, then the plans, then QK-clip."""
        started = WhatIfPlan("baseline", baseline.summary, "mitigation", (baseline,), None)
        everything = [started, *wanted]
        recipes = {content(r): r for plan in everything for r in plan.recipes}
        twins = {content(twin): twin for twin in (exact_twin(plan.recipes[0]) for plan in everything)}
        self.counter.total = len(self.truth.head.q) * (len(recipes) + len(twins) + 3 * len(clips))
        judged = partial(self._found, baseline=baseline, errors=self._measure(recipes | twins))
        found = list(map_in_order(judged, everything, parallel=self._parallel))
        found[0] = replace(found[0], kind="baseline", changes={})
        clipped = partial(self._clipped, baseline=baseline, max_logit=max_logit)
        return found + list(map_in_order(clipped, clips, parallel=self._parallel))

    def _measure(self, recipes: dict[str, Recipe]) -> dict[str, VariantErrors]:
        """All of them, those side by side that share most."""

        def likeness(key: str) -> tuple[object, ...]:
            recipe = recipes[key]
            alone = not in_any_block(recipe, self.truth.head)
            return alone, recipe.schedule.query_block, recipe.arithmetic, recipe.forward_json

        groups: list[list[str]] = []
        for _, alike in groupby(sorted(recipes, key=likeness), key=lambda key: likeness(key)[:3]):
            keys = list(alike)
            groups += [keys[i : i + _SIDE_BY_SIDE] for i in range(0, len(keys), _SIDE_BY_SIDE)]

        def work(keys: list[str]) -> list[VariantErrors]:
            def advance(rows: int) -> None:
                self.counter.add(rows * len(keys))

            return measure_variants(self.truth, [recipes[key] for key in keys], advance, delta_cells=True)

        measured = map_in_order(work, groups, parallel=self._parallel)
        return dict(zip(chain.from_iterable(groups), chain.from_iterable(measured), strict=True))

    def _found(self, plan: WhatIfPlan, baseline: Recipe, errors: dict[str, VariantErrors]) -> Candidate:
        recipe = plan.recipes[0]
        runs = [errors[content(r)] for r in plan.recipes]
        exact = errors[content(exact_twin(recipe))]
        beta = recipe.softmax.beta or 1.0
        equivalence = judge(exact.relative(self.truth), float64_bounds(self.truth, beta))
        equivalence = self._survives(recipe, equivalence, finite=all(e.finite for e in runs))
        return self._candidate(plan, baseline, self.truth, runs, equivalence)

    def _candidate(
        self, plan: WhatIfPlan, baseline: Recipe, truth: HeadTruth, runs: list[VariantErrors], equivalence: Equivalence
    ) -> Candidate:
        relative = [Errors(**run.relative(truth)) for run in runs]
        price = plan.price
        return Candidate(
            name=plan.name,
            description=plan.description,
            kind=plan.kind,
            changes=changed_fields(baseline, plan.recipes[0]),
            errors=_combined(relative, lambda v: float(v.mean())),
            equivalence=equivalence,
            finite=all(run.finite for run in runs),
            seeds=len(runs),
            spread=_combined(relative, lambda v: float(np.std(v, ddof=1))) if len(runs) > 1 else None,
            bias_o=self._bias_o(plan.recipes[0], runs) if truth is self.truth else None,
            bias_delta=self._bias_delta(truth, runs),
            cost=None if price is None else self._cost(price),
        )

    def _clipped(self, tau: float, baseline: Recipe, max_logit: float) -> Candidate:
        """QK-clip: q and k scaled so that the largest score becomes tau, and rounded again."""
        factor = math.sqrt(tau / max_logit)
        inputs, original = self.truth.inputs, self.truth
        q, k = (round_nearest_even(t * factor, inputs.input_format) for t in (inputs.head.q, inputs.head.k))
        clipped = head_truth(replace(inputs, head=replace(inputs.head, q=q, k=k)), original.projection)
        self.counter.add(2 * len(q))
        rows = original.usable
        change = clipped.reference.out[rows] - original.reference.out[rows]
        (errors,) = measure_variants(clipped, [baseline], self.counter.add, delta_cells=True)
        words = f"q and k scaled by {factor:.3g} each, so that the largest score ({max_logit:.4g}) becomes {tau:g}"
        price = Price(words="none in attention: W_q and W_k are scaled after the optimiser's step")
        plan = WhatIfPlan(f"qk-clip-{tau:g}", words, "mitigation", (baseline,), price)
        difference = float(change.norm() / original.reference.out[rows].norm())
        reason = f"a change of the model: O itself changes by {percent(difference, '.2g')}"
        equivalence = Equivalence("changes the model", o=difference, reason=reason)
        found = self._candidate(plan, baseline, clipped, [errors], equivalence)
        return replace(found, changes={"inputs": f"q, k -> {factor:.3g} q, {factor:.3g} k"})

    def _survives(self, recipe: Recipe, found: Equivalence, *, finite: bool) -> Equivalence:
        """Equivalence in exact arithmetic is no use where the recipe's own range of numbers does not suffice."""
        broken = None if finite else replace(found, status="breaks down", reason="an output is not finite")
        if recipe.softmax.kind != "stabilised" or not (acting := self._acting_rows(recipe)).rows:
            return broken or found
        beta = recipe.softmax.beta or 1.0
        setting = "with only the scores rounded"
        moved = judge(rule_difference(recipe, self.truth), float64_bounds(self.truth, beta), setting)
        if acting.largest is not None:
            clamp, flush, _ = beta_limits(recipe, acting.largest)
            if beta >= flush:
                end = "" if finite else ", and an output is not finite"
                reason = f"P_bar underflows from beta {flush:.3g} on{end}"
                return replace(moved, status="breaks down", reason=reason)
            if moved.status != "exact" and recipe.row_sum_clamp is not None and beta >= clamp:
                reason = f"{moved.reason}: l meets its lower limit from beta {clamp:.3g} on"
                return replace(moved, reason=reason)
        if broken is not None or moved.status == "exact":
            return broken or found
        if moved.status == "breaks down":
            return moved
        return replace(moved, reason=f"on the recipe's own scores, {moved.reason}")

    def _acting_rows(self, recipe: Recipe) -> RepeatedMaxima:
        epsilon = recipe.softmax.epsilon
        key = *(getattr(recipe, field) for field in SCORES), recipe.schedule, epsilon
        if key not in self._acting:
            self._acting[key] = repeated_maxima_as_run(recipe, self.truth.head, epsilon)
        return self._acting[key]

    def _bias_o(self, recipe: Recipe, runs: list[VariantErrors]) -> BiasEstimate | None:
        """Away from zero, in ulp; beyond one correct rounding where the recipe rounds O to nearest."""
        total = torch.stack([run.o_away for run in runs]).mean(0)
        if recipe.out == recipe.input:
            total = total - self._rounding_away
        if not bool(total.isfinite().all()):
            return None
        signed = SignedErrors(
            total=total.cpu().numpy(),
            square=0.0,
            positive=0,
            nonzero=int(total.count_nonzero()),
            unit_total=float(total.sum()),
            unit_scale=self._ulp_sum,
            count=self.truth.head.v.shape[1],
        )
        estimate = estimate_bias(signed, self._clusters, 0.01, with_drift=False)
        # Only sums by row are known.
        return replace(estimate, rms=None, positive_fraction=None)

    def _bias_delta(self, truth: HeadTruth, runs: list[VariantErrors]) -> BiasEstimate | None:
        parts = [run.delta for run in runs if run.delta is not None]
        cells = [run.delta_cells for run in runs if run.delta_cells is not None]
        if not parts or not cells or truth.noise_floor is None:
            return None
        mean, keys = torch.stack(parts).mean(0), truth.clusters[truth.usable]
        if not bool(mean.isfinite().all()):
            return None
        errors = of_rows(mean, truth.noise_floor[truth.usable])
        errors = by_cell(errors, torch.stack(cells).mean(0), keys)
        return estimate_bias(errors, keys.cpu().numpy(), 0.01, with_drift=False)

    def _cost(self, price: Price) -> Cost:
        """Of what fused attention moves: q, k, v, O and L forward; those and dO, delta, dq, dk, dv backward."""
        d, dv = self.truth.head.q.shape[1], self.truth.head.v.shape[1]
        moved = 2 * (3 * d + 3 * d) + 2 * (3 * dv + 3 * dv) + 4 * 4
        return Cost(
            bytes_per_row=price.bytes_per_feature * dv,
            bytes_fraction=price.bytes_per_feature * dv / moved,
            tensor_flops=price.products / PRODUCTS,
            vector_ops=price.vector_ops,
            words=price.words or "none",
        )


class Counter:
    """Progress from several threads."""

    def __init__(self, report: Progress | None) -> None:
        self.total, self._done, self._report, self._lock = 0, 0, report or silent, threading.Lock()

    def add(self, count: int) -> None:
        """So many more query rows times recipes are done."""
        with self._lock:
            self._done += count
            self._report(self._done, self.total)


def _combined(errors: list[Errors], how: Callable[[npt.NDArray[np.float64]], float]) -> Errors:
    def over(name: str) -> float | None:
        values = [getattr(e, name) for e in errors]
        return None if values[0] is None else float(how(np.array(values, dtype=np.float64)))

    return Errors(**{name: over(name) for name in ("o", "delta", "dq", "dw_q")})
