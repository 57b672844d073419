"""``attribute``: a capture in, every rounding site's part in its heads' errors out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from attn_diag.analyses.attribution.site_shares import SiteTable, attribute_sites
from attn_diag.analyses.verdict import DQ_ERROR_ABOVE, LOSSY_ABOVE
from attn_diag.captures.capture import Capture
from attn_diag.captures.selection import Selection, select_heads
from attn_diag.errors import InputError
from attn_diag.head.baseline import observation_with_o
from attn_diag.head.machine import backend_name, describe_tool, pick_device
from attn_diag.head.open import OpenCapture, OpenHead
from attn_diag.head.row_maxima import swamped_elements
from attn_diag.head.truth import observed_sizes
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.results.attribution import Attribution, HeadAttribution, MeanError, RowKind
from attn_diag.results.wording import SYMBOLS, percent
from attn_diag.statistics.means import MIN_EFFECTIVE, require_level
from attn_diag.work import Progress, part_of

# A row with less than this part of P outside its top key is called near one-hot.
_NEAR_ONE_HOT = 0.05


def attribute(
    capture: Capture,
    *,
    recipe: str | Recipe | None = None,
    selection: Selection | None = None,
    level: float = 0.01,
    device: str = "auto",
    progress: Progress | None = None,
) -> Attribution:
    """Attribute the errors of a kernel to its rounding sites, head by head.

    Args:
        capture: Their inputs, and what the kernel made of them.
        recipe: What is emulated; None: the recipe that reproduces the O of the observation selected, else fa2.
        selection: The observation (default: the first with an O), heads and batch items (default: all).
        level: Significance of a site's mean error after Benjamini-Hochberg over the sites.
        device: auto, cpu or cuda.
        progress: Called with (done, total) query rows.

    Raises:
        InputError: The selected does not exist, no recipe covers the inputs, or O contradicts the metadata.
    """
    require_level(level)
    where = pick_device(device)
    wanted = selection or Selection()
    name = observation_with_o(capture, wanted.observation)
    heads, batches = select_heads(capture, wanted)
    opened = OpenCapture(capture, where, batches, heads)
    opened.require_assumptions(name)
    notes = notes_of(opened)
    results = []
    places = [(batch, head) for batch in batches for head in heads]
    for number, (batch, head) in enumerate(places):
        found = attribute_head(
            opened.open_head(name, recipe, batch, head), level, notes, part_of(progress, number, len(places))
        )
        results.append(found if capture.batch > 1 else replace(found, batch=None))
    return Attribution(
        tool=describe_tool(where),
        source=capture.source,
        observation=name,
        level=level,
        backend=f"emulation on {backend_name(where)}",
        heads=tuple(results),
    )


def notes_of(opened: OpenCapture) -> tuple[str, ...]:
    """What is not attributed in these heads, and why; how dW_Q follows, where that needs saying."""
    if opened.projection is None:
        return ("delta, dQ and dW_Q: not attributed, dO was not captured",)
    return () if opened.projection.note is None else (opened.projection.note,)


def attribute_head(
    head: OpenHead, level: float, notes: tuple[str, ...] = (), progress: Progress | None = None
) -> HeadAttribution:
    """Attribute the errors of one head, sort its rows into kinds, and put it into words.

    Args:
        head: The head, opened.
        level: Significance of a site's mean error after Benjamini-Hochberg over the sites.
        notes: Of the capture, to be repeated.
        progress: Counts query rows.

    Raises:
        InputError: No row is finite and sees a key.
    """
    truth, recipe = head.truth, head.baseline.recipe
    if not bool(truth.usable.any()):
        raise InputError(f"{head.source}: head {head.head}: no row is finite and sees a key: nothing to attribute")
    rows, done = len(truth.head.q), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        # Runs come in two rounds.
        if progress is not None:
            progress(done, 2 * rows)

    captured = None if head.observation is None else observed_sizes(head.outputs, truth)
    table = attribute_sites(truth, recipe, level=level, captured=captured, advance=advance)
    found = HeadAttribution(
        layer=head.layer,
        batch=head.batch,
        head=head.head,
        rows=int(truth.usable.sum()),
        recipe=head.baseline.words,
        recipe_json=recipe.json,
        agreement=head.baseline.agreement,
        runs=table.runs,
        orders=table.orders,
        noise_factor=table.totals["delta"].error if "delta" in table.totals else None,
        conditioning=truth.conditioning,
        totals=table.totals,
        sites=table.sites,
        inert=table.inert,
        repairs=table.repairs,
        twin=table.twin,
        row_kinds=_row_kinds(head, table),
        guilty=table.guilty,
        biased=table.biased,
        notes=notes,
    )
    return replace(found, reasons=tuple(reasons(found, level)))


def _row_kinds(head: OpenHead, table: SiteTable) -> dict[str, RowKind]:
    """Rows with a repeated maximum (``exact``), swamped rows (of the captured O, else the emulated one), and near
    one-hot rows."""
    truth, rows = head.truth, head.truth.usable
    out = head.outputs.get("o")
    if out is None:
        out = emulate_head(head.baseline.recipe, replace(truth.head, do=None)).o.double()
    swamped = swamped_elements(out, truth.reference.out, truth.head.v, truth.top_key).all(1)
    repeats = truth.maxima.repeats("exact")
    assert repeats is not None
    kinds = {
        "repeated_maximum": repeats.multiplicity > 1,
        "swamped": swamped & truth.maxima.several_keys,
        "near_one_hot": 1 - truth.top_prob < _NEAR_ONE_HOT,
    }
    errors, reference = table.whole.dq_square, truth.reference.dq
    reference_square = None if reference is None else reference[rows].square().sum(1)

    def share(values: Tensor | None, kind: Tensor) -> float | None:
        total = 0.0 if values is None else float(values.sum())
        return float(values[kind[rows]].sum()) / total if values is not None and total else None

    return {
        name: RowKind(int((kind & rows).sum()), share(errors, kind), share(reference_square, kind))
        for name, kind in kinds.items()
    }


_INERT = {"backward_probs": "which reaches dV alone", "row_sum_clamp": "which no row comes near"}
# From this share on a site is called the cause.
_CAUSE = 0.5
# A kind of rows has no part in an error of which it carries less than this.
_NO_PART = 0.01
# Errors of the recipe and of the captured kernel that differ by more than this factor are not the same kernel's.
_ALIKE = 1.25
# A sham that leaves less than the first part of what the site adds says that the signs of its errors did the damage;
# one that leaves more than the second, that their size did.
_SIGNS_MATTER, _SIZE_ALONE = 0.5, 0.8


def reasons(found: HeadAttribution, level: float) -> Iterator[str]:
    """Sentences, the most telling first."""
    main = "dq" if "dq" in found.totals else "o"
    if not found.sites or not found.totals[main].error:
        yield "No rounding changes anything here: there is no error to attribute."
        return
    yield from _misfit(found)
    yield _cause(found, main)
    if "dw_q" in found.totals and found.guilty["dw_q"] != found.guilty[main]:
        yield f"In dW_Q the largest share is the {_words(found, found.guilty['dw_q'])}."
    if found.noise_factor is not None:
        yield from _floor(found)
        yield from _rows(found)
    yield from _repairs(found, main)
    yield from _shams(found, main)
    for quantity in ("o", "delta"):
        if quantity in found.totals:
            yield from _bias(found, quantity, level)


def _cause(found: HeadAttribution, main: str) -> str:
    total = found.totals[main]
    ranked = sorted(found.sites, key=lambda s: -s.effects[main].share)
    first, second = ranked[0], ranked[1] if len(ranked) > 1 else None
    size = f"{SYMBOLS[main]} is off by {percent(total.error)}"
    if total.captured is not None:
        size += f" (captured: {percent(total.captured)})"
    if main == "dq" and "dw_q" in found.totals:
        size += f" and dW_Q by {percent(found.totals['dw_q'].error)}"
    share = first.effects[main].share
    if share >= _CAUSE:
        reaches_dq = main == "dq" and first.site in ("out", "accumulator", "range_pv")
        way = ", through delta = rowsum(dO∘O)" if reaches_dq else ""
        cause = f"the cause is the {first.words}{way} ({share:.0%} of the squared error)"
        if second is not None and second.effects[main].share >= 0.05:
            cause += f", next the {second.words} ({second.effects[main].share:.0%})"
    elif second is not None:
        cause = (
            f"no site alone makes it: the {first.words} ({share:.0%} of the squared error) and "
            f"the {second.words} ({second.effects[main].share:.0%}) come first"
        )
    else:
        cause = f"its largest part is the {first.words} ({share:.0%})"
    return f"{size}; {cause}."


def _misfit(found: HeadAttribution) -> Iterator[str]:
    """Where the emulated recipe errs otherwise than the captured kernel: nothing below is about that kernel."""
    differing = []
    for quantity, total in found.totals.items():
        if total.captured is not None and not 1 / _ALIKE <= total.captured / (total.error or math.nan) <= _ALIKE:
            captured, emulated = (
                f"{value:.3g} noise floors" if quantity == "delta" else percent(value)
                for value in (total.captured, total.error)
            )
            differing.append(f"{SYMBOLS[quantity]} {captured} captured, {emulated} emulated")
    if differing:
        yield (
            f"The emulated recipe is not what the captured kernel does ({'; '.join(differing)}): what follows is "
            "the recipe's, not the kernel's."
        )


def _floor(found: HeadAttribution) -> Iterator[str]:
    assert found.noise_factor is not None
    error = found.totals["dq"].error if "dq" in found.totals else 0.0
    if found.noise_factor > LOSSY_ABOVE:
        yield (
            f"The kernel is above its noise floor: delta's error is {found.noise_factor:.3g} times what one "
            "correct rounding of O makes. The roundings, not the head, are to blame."
        )
    elif error > DQ_ERROR_ABOVE:
        yield (
            f"The kernel is at its noise floor (delta's error is {found.noise_factor:.3g} times what one correct "
            f"rounding of O makes); the head is ill-conditioned (conditioning {found.conditioning:.3g})."
        )
    else:
        yield f"The kernel is at its noise floor (noise factor {found.noise_factor:.3g}) and the head is not fragile."


def _rows(found: HeadAttribution) -> Iterator[str]:
    hot = found.row_kinds["near_one_hot"]
    if hot.error_share is not None and hot.reference_share is not None and hot.error_share >= _NO_PART:
        little = " (near one-hot rows have almost no dQ of their own)" if hot.reference_share < 0.1 else ""
        yield (
            f"The {hot.rows} rows with less than 5 % of P outside the top key carry {hot.error_share:.0%} of dQ's "
            f"squared error and {hot.reference_share:.1%} of its squared norm{little}."
        )
    for kind, name in (("repeated_maximum", "Repeated row maxima"), ("swamped", "Swamped rows")):
        rows = found.row_kinds[kind]
        if rows.error_share is None:
            continue
        if rows.rows == 0:
            yield f"{name} have no part in it: there are none."
        elif rows.error_share < _NO_PART:
            yield f"{name} have no part in it: {rows.rows} of {found.rows} rows, {rows.error_share:.2%} of the error."
        else:
            fraction = rows.rows / found.rows
            compared = ", no more than their number lets expect" if rows.error_share <= 1.5 * fraction else ""
            yield (
                f"{name}: {rows.rows} of {found.rows} rows ({fraction:.1%}) carry {rows.error_share:.0%} "
                f"of dQ's squared error{compared}."
            )


def _repairs(found: HeadAttribution, main: str) -> Iterator[str]:
    if not found.repairs:
        return
    steps = [f"the {_words(found, step.site)} exact leaves {percent(step.left[main])}" for step in found.repairs]
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
