"""An attribution in sentences, the most telling first."""

from __future__ import annotations

import math
from collections.abc import Iterator

from attn_diag.analyses.verdicts.verdict import DQ_ERROR_ABOVE
from attn_diag.head.counterfactual import RECIPE
from attn_diag.head.quality import AS_GOOD, LOSSY
from attn_diag.kernels import Recipe, preset
from attn_diag.results.attribution import CANCELLED, HeadAttribution, MeanError, Total
from attn_diag.results.wording import SYMBOLS, number, percent, together
from attn_diag.statistics.means import MIN_EFFECTIVE

_INERT = {"backward_probs": "which reaches dV alone", "row_sum_clamp": "which no row comes near"}
# From this share on a site is called the cause.
_CAUSE = 0.5
# A kind of rows has no part in an error of which it carries less than this.
_NO_PART = 0.01
# A sham that leaves less than the first part of what the site adds says that the signs of its errors did the damage;
# one that leaves more than the second, that their size did.
_SIGNS_MATTER, _SIZE_ALONE = 0.5, 0.8


def reasons(found: HeadAttribution, level: float) -> Iterator[str]:
    """Sentences, the most telling first."""
    main = "dq" if "dq" in found.totals else "o"
    if not found.sites or not found.totals[main].error:
        yield "No rounding changes anything here: there is no error to attribute."
        return
    if found.unfit:
        yield f"{found.unfit} The shares name no cause: they are those of {found.recipe}."
        yield from _sizes(found)
        return
    yield from _misfit(found)
    # Of a quantity that the captured kernel makes otherwise nothing is said.
    main = main if main in found.guilty else "o"
    if main not in found.guilty:
        return
    yield _cause(found, main)
    yield from _more_than_well_rounded(found, main)
    if main == "dq" and "dw_q" in found.totals and found.guilty["dw_q"] != found.guilty[main]:
        yield f"In dW_Q the largest share is the {_words(found, found.guilty['dw_q'])}."
    if main == "dq":
        yield from _beside_well_rounded(found)
        yield from _rows(found)
    yield from _repairs(found, main)
    yield from _shams(found, main)
    for quantity in ("o", "delta"):
        if quantity in found.totals and quantity in found.guilty:
            yield from _bias(found, quantity, level)


def _cause(found: HeadAttribution, main: str) -> str:
    total = found.totals[main]
    ranked = sorted(found.sites, key=lambda s: -s.effects[main].share)
    first, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    size = f"{SYMBOLS[main]} is off by {percent(total.error)}"
    if found.differences:
        size = f"With {found.recipe.split(',')[0]} {size}"
    if total.captured is not None:
        size += f" (captured: {percent(total.captured)})"
    if main == "dq" and "dw_q" in found.totals:
        size += f" and dW_Q by {percent(found.totals['dw_q'].error)}"
    share = first.effects[main].share
    if share > CANCELLED:
        largest = percent(share, ".0f")
        cause = f"the errors of several sites cancel (the largest share is {largest}), so that none makes it alone"
    elif share >= _CAUSE:
        reaches_dq = main == "dq" and first.site in ("out", "accumulator", "range_pv")
        way = ", through delta = rowsum(dO∘O)" if reaches_dq else ""
        cause = f"the cause is the {first.words}{way} ({percent(share, '.0f')} of the squared error)"
        if second is not None and second.effects[main].share >= 0.05:
            cause += f", next the {second.words} ({percent(second.effects[main].share, '.0f')})"
    elif second is not None:
        cause = (
            f"no site alone makes it: the {first.words} ({percent(share, '.0f')} of the squared error) and "
            f"the {second.words} ({percent(second.effects[main].share, '.0f')}) come first"
        )
    else:
        cause = f"its largest part is the {first.words} ({percent(share, '.0f')})"
    return f"{size}; {cause}."


def _more_than_well_rounded(found: HeadAttribution, main: str) -> Iterator[str]:
    """The roundings that a well-rounded kernel does not have, however small their shares of the whole."""
    recipe = Recipe.from_json(found.recipe_json)
    usual = preset(RECIPE, recipe.input)
    quantities = [main] if main == "o" else [main, "o"]
    more = []
    for site in found.sites:
        if getattr(recipe, site.site) != getattr(usual, site.site):
            shares = ", ".join(f"{percent(site.effects[q].share, '.0f')} of {SYMBOLS[q]}'s" for q in quantities)
            more.append(f"the {site.words} ({shares} squared error)")
    if more:
        yield f"What a well-rounded kernel does not round: {'; '.join(more)}."


def _misfit(found: HeadAttribution) -> Iterator[str]:
    """Where the emulated recipe errs otherwise than the captured kernel."""
    if not found.differences:
        return
    said = []
    for quantity, difference in found.differences.items():
        total = found.totals.get(quantity)
        sizes = "" if total is None or total.captured is None else f" ({_both(quantity, total)})"
        said.append(f"{SYMBOLS[quantity]}: {difference}{sizes}")
    listed = "; ".join(said)
    if found.recipe_from == "given":
        yield f"The emulated recipe is not what the captured kernel does: {listed}. What follows is the recipe's."
        return
    names = together([SYMBOLS[q] for q in found.differences])
    yield (f"The recipe has the bits of O, but {listed}: no cause of the error of {names} is named.")


def _sizes(found: HeadAttribution) -> Iterator[str]:
    """The captured errors beside the recipe's, of a kernel that is not the recipe."""
    known = {q: t for q, t in found.totals.items() if t.captured is not None}
    if known:
        listed = "; ".join(f"{SYMBOLS[q]} {_both(q, t)}" for q, t in known.items())
        yield f"Errors of the captured kernel, and of the recipe: {listed}."
    yield from _factors(found)


def _both(quantity: str, total: Total) -> str:
    captured, emulated = (
        f"{value:.3g} noise floors" if quantity == "delta" else percent(value)
        for value in (total.captured, total.error)
    )
    return f"{captured} captured, {emulated} emulated"


def _factors(found: HeadAttribution) -> Iterator[str]:
    said = [
        f"{SYMBOLS[q]} {number(factor)} ({number(low)} to {number(high)})"
        for q, (factor, low, high) in found.well_rounded.items()
    ]
    if said and any(total.captured is not None for total in found.totals.values()):
        yield f"The captured errors are so many times a well-rounded kernel's: {', '.join(said)}."


def _beside_well_rounded(found: HeadAttribution) -> Iterator[str]:
    """Whether the roundings or the head are to blame: dQ's error beside what a well-rounded kernel leaves."""
    if "dq" not in found.well_rounded:
        return
    factor, low, high = found.well_rounded["dq"]
    said = f"dQ's error is {number(factor)} times a well-rounded kernel's ({number(low)} to {number(high)})"
    captured = found.totals["dq"].captured is not None
    if not captured:
        said = f"The recipe's {said}"
    if low > LOSSY:
        yield f"{said}: the roundings, not the head, are to blame."
    elif high > AS_GOOD:
        yield f"{said}: that decides nothing between roundings and head."
    elif found.totals["dq"].error > DQ_ERROR_ABOVE:
        yield f"{said}: the head is ill-conditioned (conditioning {found.conditioning:.3g})."
    else:
        yield f"{said}, and the head is not fragile."


def _rows(found: HeadAttribution) -> Iterator[str]:
    hot = found.row_kinds["near_one_hot"]
    if hot.error_share is not None and hot.reference_share is not None and hot.error_share >= _NO_PART:
        little = " (near one-hot rows have almost no dQ of their own)" if hot.reference_share < 0.1 else ""
        yield (
            f"The {hot.rows} rows with less than 5 % of P outside the top key carry {percent(hot.error_share, '.0f')} "
            f"of dQ's squared error and {percent(hot.reference_share, '.1f')} of its squared norm{little}."
        )
    for kind, name in (("repeated_maximum", "Repeated row maxima"), ("swamped", "Swamped rows")):
        rows = found.row_kinds[kind]
        if rows.error_share is None:
            continue
        if rows.rows == 0:
            yield f"{name} have no part in it: there are none."
        elif rows.error_share < _NO_PART:
            part = percent(rows.error_share, ".2f")
            yield f"{name} have no part in it: {rows.rows} of {found.rows} rows, {part} of the error."
        else:
            fraction = rows.rows / found.rows
            carried = percent(rows.error_share, ".0f")
            compared = ", no more than their number lets expect" if rows.error_share <= 1.5 * fraction else ""
            yield (
                f"{name}: {rows.rows} of {found.rows} rows ({percent(fraction, '.1f')}) carry {carried} of dQ's "
                f"squared error{compared}."
            )


def _repairs(found: HeadAttribution, main: str) -> Iterator[str]:
    if not found.repairs:
        return
    left = [found.totals[main].error, *(step.left[main] for step in found.repairs)]
    # They are dQ's: those of its backward change nothing in O.
    changing = [step for step, before in zip(found.repairs, left, strict=False) if step.left[main] != before]
    if not changing:
        return
    steps = [f"the {_words(found, step.site)} exact leaves {percent(step.left[main])}" for step in changing]
    start = f"{SYMBOLS[main]}'s error of {percent(found.totals[main].error)}"
    yield f"Repairs, one after the other, of {start}: {'; also '.join(steps)}."


def _shams(found: HeadAttribution, main: str) -> Iterator[str]:
    guilty = next(s for s in found.sites if s.site == found.guilty[main])
    effect, whole = guilty.effects[main], found.totals[main].error
    inert, change = found.inert
    other = f"a repair of {inert}, {_INERT[inert]}, changes nothing"
    if change:
        other = f"a repair of {inert} changes it by {percent(change)}"
    if effect.sham is None:
        yield f"Sham: {other}."
        return
    # What the site adds in squares, with its own signs and with random ones.
    own, drawn = whole**2 - effect.repaired**2, effect.sham**2 - effect.repaired**2
    meaning = (
        "the site adds nothing that a sham could take away"
        if own <= 0
        else "the signs of these errors do the damage, not their size"
        if drawn < _SIGNS_MATTER**2 * own
        else "the signs of these errors matter beside their size"
        if drawn < _SIZE_ALONE**2 * own
        else "the size of these errors does the damage, not a bias in them"
    )
    yield (
        f"Shams: with the signs of that site's errors drawn at random (equal variance) {percent(effect.sham)} is "
        f"left: {meaning}; {other}."
    )


def _bias(found: HeadAttribution, quantity: str, level: float) -> Iterator[str]:
    total, twin = found.totals[quantity].bias, found.twin.bias.get(quantity)
    if total is None or total.standard_error is None:
        return
    unit = "ulp" if quantity == "o" else "noise floors"
    name = "O's error away from zero" if quantity == "o" else "delta's error"
    site = found.biased.get(quantity)
    if site is None:
        yield f"The mean of {name} is {_mean(total, unit)}; no site contributes significantly (level {level:g})."
        return
    part = next(s for s in found.sites if s.site == site).effects[quantity].bias
    assert part is not None
    leans = part.n_eff is not None and part.n_eff < MIN_EFFECTIVE
    few = f"; it leans on few of them, n_eff {part.n_eff:.2g}" if leans else ""
    sentence = (
        f"The mean of {name} is {_mean(total, unit)}; the {_words(found, site)} contributes {_mean(part, unit)} "
        f"(adjusted p {part.p_adjusted:.2g}{few})"
    )
    biased = total.p_value is not None and total.p_value < level
    if biased and twin is not None and twin.standard_error is not None:
        gone = abs(twin.mean) < 3 * twin.standard_error
        changed = abs(total.mean - twin.mean) >= 3 * math.hypot(total.standard_error, twin.standard_error)
        sentence += f"; with every rounding to a format stochastic the mean is {_mean(twin, unit)}: " + (
            "what stays does not come from the rounding mode"
            if not gone
            else "it comes from the rounding mode"
            if changed
            else "too uncertain to tell whether it comes from the rounding mode"
        )
    yield sentence + "."


def _mean(estimate: MeanError, unit: str) -> str:
    error = "" if estimate.standard_error is None else f" ± {estimate.standard_error:.1g}"
    return f"{estimate.mean:+.2g}{error} {unit}"


def _words(found: HeadAttribution, site: str) -> str:
    return next(s.words for s in found.sites if s.site == site)
