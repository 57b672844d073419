"""Which rounding site makes the errors of O, delta, dQ and dW_Q: recipes in which only some sites round.

Every subset of sites is a run of its own, in which the sites outside it round nothing. Contributions are Shapley values
(``attn_diag.analyses.attribution.shapley``) of three set functions: the mean signed error, row by row, so that it has
an uncertainty; the squared error norm; and for delta the squared noise factor. Errors of independent sites add up in
squares, so a share of the squared norm is what a site alone would be held to account for. fp32 arithmetic joins before
all sites: its part is small, and every run after it costs half of what float64 would.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attn_diag.analyses.attribution.shapley import Array, Subset, SubsetPlan
from attn_diag.analyses.attribution.sites import RoundingSite, inert_change, rounding_sites, with_low, with_mode
from attn_diag.analyses.attribution.variants import RecipeErrors, measure_heads
from attn_diag.head.truth import HeadTruth
from attn_diag.kernels import Recipe
from attn_diag.kernels.formats import Mode
from attn_diag.results.attribution import QUANTITIES, Effect, MeanError, Repair, SiteAttribution, Total, Twin
from attn_diag.statistics.means import BiasCase, SignedErrors, adjust, estimate_biases

ARITHMETIC = "arithmetic"
# So many sites are repaired one after the other.
_REPAIRS = 4


@dataclass(frozen=True)
class SiteTable:
    """What ``attribute_sites`` found; see HeadAttribution."""

    runs: int
    orders: int | None
    totals: dict[str, Total]
    sites: tuple[SiteAttribution, ...]
    inert: tuple[str, float]
    repairs: tuple[Repair, ...]
    twin: Twin
    guilty: dict[str, str]
    biased: dict[str, str]
    whole: RecipeErrors


def attribute_sites(
    truths: Sequence[HeadTruth],
    recipe: Recipe,
    *,
    level: float = 0.01,
    captured: Sequence[Mapping[str, float] | None] | None = None,
    advance: Callable[[int], None] | None = None,
) -> list[SiteTable]:
    """Attribute the errors that ``recipe`` makes on some heads that are ``alike``.

    Each head says which recipes it wants next; they are run on all of them together where a GPU does so.

    Args:
        truths: Of the heads.
        recipe: The recipe.
        level: Significance of a site's mean error after Benjamini-Hochberg over the sites.
        captured: Errors of the real kernel on each, for comparison.
        advance: Called with the number of query rows after every block of them.
    """
    tables = [_Table(*each, recipe, level) for each in zip(truths, captured or [None] * len(truths), strict=True)]
    asking = [table.made() for table in tables]
    found: dict[int, SiteTable] = {}
    wanted = {i: next(one) for i, one in enumerate(asking)}
    while wanted:
        union = dict.fromkeys(run for of_head in wanted.values() for run in of_head)
        recipes = [tables[0].recipe_of(run) for run in union]
        measured = measure_heads([truths[i] for i in wanted], recipes, advance)
        asked, wanted = wanted, {}
        for i, errors in zip(asked, measured, strict=True):
            by_run = dict(zip(union, errors, strict=True))
            try:
                wanted[i] = asking[i].send({run: by_run[run] for run in asked[i]})
            except StopIteration as done:
                found[i] = done.value
    return [found[i] for i in range(len(truths))]


# The sites that round, or one of "inert", "twin" and "sham " and a site.
Run = Subset | str


class _Table:
    """One head's table, and the recipes that it takes."""

    def __init__(self, truth: HeadTruth, captured: Mapping[str, float] | None, recipe: Recipe, level: float) -> None:
        self._truth, self._captured, self._recipe, self._level = truth, captured or {}, recipe, level
        self._sites = rounding_sites(recipe, dropout=truth.head.dropout is not None)
        self._runs: dict[Run, RecipeErrors] = {}

    def made(self) -> Generator[list[Run], dict[Run, RecipeErrors], SiteTable]:
        """Ask for runs twice; then the table."""
        truth, recipe, sites, level, runs = self._truth, self._recipe, self._sites, self._level, self._runs
        names = [site.name for site in sites]
        everything, nothing = frozenset(names), frozenset[str]()
        plan = SubsetPlan.make([n for n in names if n != ARITHMETIC], [n for n in names if n == ARITHMETIC])
        alone = {name: frozenset([*plan.first, name]) for name in names}
        without = {name: everything - {name} for name in names}
        runs |= yield [everything, nothing, *plan.subsets, *alone.values(), *without.values(), "inert", "twin"]

        game = _Game(truth)
        contributions = plan.values({subset: game.value(runs[subset]) for subset in plan.subsets})
        quantities = [q for q in QUANTITIES if q in runs[everything].sizes]
        biases = {q: game.biases(q, contributions, level) for q in quantities if game.has_bias(q)}
        shares = _shares(contributions, game.value(runs[everything]) - game.value(runs[nothing]), quantities)
        guilty = {q: max(names, key=lambda n: shares[n][q][0]) for q in quantities} if names else {}
        biased = _biased(biases, level)
        main = "dq" if "dq" in quantities else "o"
        order = sorted(names, key=lambda n: -shares[n][main][0])[:_REPAIRS]
        stages = [everything - set(order[: i + 1]) for i in range(len(order))]
        # A sham repair shows something only where a repair would: at the sites that are blamed.
        blamed = {*guilty.values(), *biased.values()}
        shams = [site.name for site in sites if site.format is not None and site.name in blamed]
        runs |= yield [*(stage for stage in stages if stage not in runs), *(f"sham {name}" for name in shams)]

        def effect(site: RoundingSite, q: str) -> Effect:
            one, sham = alone[site.name], f"sham {site.name}"
            share, error = shares[site.name][q]
            bias = biases[q][site.name] if q in biases else None

            def mean(run: Run) -> float | None:
                return None if bias is None else game.mean(q, game.value(runs[run]))

            return Effect(
                share=share,
                share_error=error,
                alone=runs[one].sizes[q],
                repaired=runs[without[site.name]].sizes[q],
                sham=runs[sham].sizes[q] if sham in runs else None,
                bias=bias,
                bias_alone=mean(one),
                bias_repaired=mean(without[site.name]),
                bias_sham=mean(sham) if sham in runs else None,
            )

        whole, twin = game.value(runs[everything]), game.value(runs["twin"])
        tested = {q: game.means(q, [whole, twin], level) for q in quantities if game.has_bias(q)}
        return SiteTable(
            runs=len(runs),
            orders=None if plan.orders is None else len(plan.orders),
            totals={
                q: Total(
                    runs[everything].sizes[q],
                    runs[nothing].sizes[q],
                    self._captured.get(q),
                    tested[q][0] if q in tested else None,
                )
                for q in quantities
            },
            sites=tuple(
                SiteAttribution(s.name, s.words, s.format, {q: effect(s, q) for q in quantities}) for s in sites
            ),
            inert=(
                inert_change(recipe)[0],
                max((abs(runs["inert"].sizes[q] - runs[everything].sizes[q]) for q in quantities), default=0.0),
            ),
            repairs=tuple(Repair(name, runs[stage].sizes) for name, stage in zip(order, stages, strict=True)),
            twin=Twin(seeds=1, sizes=runs["twin"].sizes, bias={q: of_twin for q, (_, of_twin) in tested.items()}),
            guilty=guilty,
            biased=biased,
            whole=runs[everything],
        )

    def recipe_of(self, run: Run) -> Recipe:
        """What is run."""
        if isinstance(run, frozenset):
            return with_low(self._recipe, self._sites, run)
        if run == "inert":
            return inert_change(self._recipe)[1]
        sites = self._sites if run == "twin" else [s for s in self._sites if run == f"sham {s.name}"]
        return with_mode(self._recipe, sites, Mode.STOCHASTIC if run == "twin" else Mode.RANDOM_SIGN)


class _Game:
    """The set functions as one array: squared sizes of o, delta, dq, dw_q; dW_Q's error along dW_Q; and by row the
    signed errors of o, delta and dq."""

    def __init__(self, truth: HeadTruth) -> None:
        self.truth = truth
        self.rows = int(truth.usable.sum())
        # Argmax keys alone: sums by feature as well (``means.two_way``) would need them of every subset.
        self.clusters = truth.clusters[truth.usable].cpu().numpy()
        # By row: how many elements each has, and in what the mean is stated.
        self.by_row = {"o": (truth.head.v.shape[1], truth.mean_ulp["o"])}
        if truth.noise_floor is not None:
            self.by_row |= {"delta": (1, 1.0), "dq": (truth.head.q.shape[1], truth.mean_ulp["dq"])}

    def value(self, errors: RecipeErrors) -> Array:
        parts = [np.array([errors.sizes.get(q, 0.0) ** 2 for q in QUANTITIES] + [errors.along]), errors.o_away]
        if errors.in_floors is not None and errors.dq is not None:
            parts += [errors.in_floors, errors.dq]
        return np.concatenate(parts)

    def has_bias(self, quantity: str) -> bool:
        return quantity in self.by_row or (quantity == "dw_q" and self.truth.dw_q is not None)

    def mean(self, quantity: str, value: Array) -> float:
        """The mean signed error in a value, or in a contribution to one."""
        if quantity == "dw_q":
            return float(value[len(QUANTITIES)])
        count, unit = self.by_row[quantity]
        return float(self._rows(quantity, value).sum()) / (self.rows * count) / unit if self.rows else 0.0

    def means(self, quantity: str, values: Sequence[Array], level: float) -> list[MeanError]:
        """The same of several, with its uncertainty where there is one."""
        if quantity == "dw_q":
            return [MeanError(self.mean(quantity, value)) for value in values]
        count, unit = self.by_row[quantity]
        cases = []
        for value in values:
            errors = SignedErrors.of_sums(self._rows(quantity, value), count)
            cases.append(BiasCase(errors, None if quantity == "dq" else self.clusters, with_drift=False))
        return [
            MeanError(
                mean=(found.mean or 0.0) / unit,
                standard_error=None if found.standard_error is None else found.standard_error / unit,
                n_eff=found.n_eff,
                p_value=found.p_value,
            )
            for found in estimate_biases(cases, level)
        ]

    def _rows(self, quantity: str, value: Array) -> Array:
        start = len(QUANTITIES) + 1 + self.rows * list(self.by_row).index(quantity)
        return value[start : start + self.rows]

    def biases(
        self, quantity: str, contributions: Mapping[str, tuple[Array, Array | None]], level: float
    ) -> dict[str, MeanError]:
        """Every site's contribution to the mean signed error."""
        found = self.means(quantity, [phi for phi, _ in contributions.values()], level)
        adjusted = adjust([m.p_value for m in found])
        return {n: replace(m, p_adjusted=p) for n, m, p in zip(contributions, found, adjusted, strict=True)}


def _shares(
    contributions: Mapping[str, tuple[Array, Array | None]], total: Array, quantities: Sequence[str]
) -> dict[str, dict[str, tuple[float, float | None]]]:
    """(share of the squared size, its standard error) by site and quantity; 0 of a quantity without error."""

    def share(phi: Array, error: Array | None, index: int) -> tuple[float, float | None]:
        whole = total[index]
        if not whole:
            return 0.0, None if error is None else 0.0
        return float(phi[index] / whole), None if error is None else float(error[index] / whole)

    return {
        name: {q: share(phi, error, QUANTITIES.index(q)) for q in quantities}
        for name, (phi, error) in contributions.items()
    }


def _biased(biases: Mapping[str, Mapping[str, MeanError]], level: float) -> dict[str, str]:
    """By quantity, the site with the largest significant mean error."""
    named = {}
    for quantity, means in biases.items():
        significant = {n: m for n, m in means.items() if m.p_adjusted is not None and m.p_adjusted <= level}
        if significant:
            named[quantity] = max(significant, key=lambda n: abs(significant[n].mean))
    return named
