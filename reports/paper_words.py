"""What the paper's figures say here, each in a sentence or two: for captions and for a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rich.console import RenderableType
from rich.rule import Rule
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.layout import Sized, bars
from attn_diag.reports.lead import lead as opening
from attn_diag.results.paper import (
    Accumulated,
    Atoms,
    DeltaRows,
    DeltaSteps,
    FeatureProducts,
    OverSteps,
    PaperFigures,
    PrefixError,
    Similarity,
    SpectralNorms,
    TriggerCounts,
    Triggers,
)
from attn_diag.results.wording import head_name, percent, plural

PAPER = "Qiu & Yao, arXiv 2510.04212"
TITLES = {
    "spectral_norms": "Figure 3: spectral norm of W_Q, head by head",
    "atoms": "Figure 4: are the rank-1 atoms of delta's error alike?",
    "delta_rows": "Figure 5a, within a step: delta's error summed over rows",
    "delta_steps": "Figure 5a, over steps: delta's error summed over steps",
    "features": "Figures 5b-c: dO and the error of O, feature by feature",
    "prefix": "Figure 6: the error of Ō, key by key",
    "triggers": "Figure 13: rows with a repeated maximum, over steps",
}
CAVEAT = (
    "Error = observed - float64 reference on the same inputs. Figures of one step show one batch; growth over these "
    "steps does not prove that training diverges, and its absence proves nothing either."
)


def paper_renderables(f: PaperFigures) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield from first_lines(f)
    yield Text("")
    yield Text(f"Figures after {PAPER}", style="bold")
    yield Text(lead(f))
    for note in f.notes:
        yield Text(f"note: {note}", style="yellow")
    for name, title in TITLES.items():
        lines = _lines(f, name)
        if lines:
            yield layout.section(title)
            yield from (Text(line) if isinstance(line, str) else line for line in lines)
    if f.missing:
        yield layout.section("Not drawn")
        for name, reason in f.missing.items():
            yield Text(f"{TITLES[name].split(':')[0]}: {reason}")
    yield Rule(style="dim")
    yield layout.note(f"{CAVEAT}\n{words.tool_line(f.tool)}")


def first_lines(f: PaperFigures) -> Iterator[RenderableType]:
    """Whether delta's error adds up beyond what unbiased rounding does, where, and over which steps."""
    verdict, what, told = said_first(f)
    yield from opening(verdict, what, told)


def said_first(f: PaperFigures) -> tuple[str, str, list[str]]:
    """The verdict on that, its sentence, and what is to be known of it."""
    c = f.chosen
    steps = f", steps {c.steps[0]} to {c.steps[-1]}" if len(c.steps) > 1 else ""
    drawn = sum(bool(_lines(f, name)) for name in TITLES)
    if f.delta_steps is not None:
        outside = (f.delta_steps.excess or f.delta_steps.total).outside
        over = f"summed over {plural(len(f.delta_steps.steps), 'step')}"
    elif f.delta_rows is not None:
        outside, over = f.delta_rows.outside, "summed over the rows of one capture"
    else:
        outside, over = None, ""
    if outside is None:
        what = "delta's error was not captured, so whether it adds up is not known"
    elif outside:
        what = f"delta's error, {over}, adds up beyond what unbiased rounding makes"
    else:
        what = f"delta's error, {over}, adds up to no more than unbiased rounding makes"
    told = [
        "This is of delta, the backward's sum of dO∘O, alone: whether O and the gradients are right, attn-diag inspect "
        "says.",
        f"{drawn} of {plural(len(TITLES), 'figure')} after {PAPER} are drawn below.",
    ]
    if c.emulated:
        told.insert(0, f"Emulated (recipe {c.observation}): no captured O was looked at.")
    return "FOUND" if outside else "OK" if outside is False else "UNKNOWN", f"{c.name}{steps}: {what}", told


def _lines(f: PaperFigures, name: str) -> Sequence[str | Sized]:
    """A figure's sentences and sparklines; none where it is not drawn."""
    found = getattr(f, name)
    if found is None:
        return []
    if name == "spectral_norms":
        worst = max(found.heads, key=lambda h: h.spectral[-1])
        return [spectral_norms(found), *([bars(worst.spectral, zero=True)] if len(worst.spectral) > 1 else [])]
    if name == "delta_steps":
        sums = [a.sums for a in (found.total, found.excess) if a is not None]
        said = delta_steps(found)
        drawn = [line for pair in zip(said, map(bars, sums), strict=False) for line in pair]
        return [*drawn, *said[len(sums) :]]
    lines: dict[str, Callable[[], Sequence[str | Sized]]] = {
        "atoms": lambda: atoms(found),
        "delta_rows": lambda: [delta_rows(found), bars(found.sums)],
        "features": lambda: [features(found), bars(found.product)],
        "prefix": lambda: [prefix(found), bars(found.error)],
        "triggers": lambda: [triggers(found, f.chosen.name), bars(found.head.exact, zero=True)],
    }
    return lines[name]()


def lead(f: PaperFigures) -> str:
    """What is drawn, of what, and how it was chosen."""
    c = f.chosen
    what = f"recipe {c.observation}, emulated" if c.emulated else f"observation {c.observation!r}"
    steps = f"; steps {c.steps[0]} to {c.steps[-1]} ({len(c.steps)})" if len(c.steps) > 1 else ""
    return f"{c.name}, {what}: {c.reason}. From {plural(f.captures, 'capture')}{steps}."


def at_step(step: int | None) -> str:
    """Where a figure of one step comes from: "at step 500"."""
    return "in the capture shown" if step is None else f"at step {step}"


def spectral_norms(found: SpectralNorms) -> str:
    """The largest at the last step."""
    last = sorted(found.heads, key=lambda h: -h.spectral[-1])
    top, middle = last[0], last[len(last) // 2]
    name = head_name(top.layer, top.head)
    grown = f" (from {top.spectral[0]:.3g} at step {top.steps[0]})" if len(top.steps) > 1 else ""
    others = f"; the median of {len(last)} heads is {middle.spectral[-1]:.3g}" if len(last) > 1 else ""
    return (
        f"Largest: {name} with {top.spectral[-1]:.3g}{grown}{others}. Its first singular direction holds "
        f"{percent(top.first_share)} of ‖W_Q‖²."
    )


def similarity(name: str, found: Similarity) -> str:
    """The mean squared cosine beside chance's."""
    if found.mean_square is None:
        return f"{name}: too few rows."
    chance = "" if found.random99 is None else f" (in 99 % of cases below {found.random99:.3g})"
    return (
        f"{name}: mean squared cosine {found.mean_square:.3g} over pairs of {found.rows} evenly spread rows, random "
        f"directions {found.random:.3g}{chance}; the first direction holds {percent(found.first_share)}."
    )


def atoms(found: Atoms) -> list[str]:
    """Directions alike? And do the signs add up?"""
    said = [similarity("(PK)_t", found.probs_k)]
    if found.x is not None:
        said.append(similarity("x_t", found.x))
    if found.atoms is not None:
        said.append(similarity("(PK)_t ⊗ x_t", found.atoms))
    if found.steps:
        last = found.steps[-1]
        verdict = ""
        if last.coherence is not None and last.coherence_null95 is not None:
            beyond = last.coherence > last.coherence_null95
            adds = "they add up beyond chance" if beyond else "no more than random signs"
            verdict = (
                f" The signed atoms' coherence is {last.coherence:.3g}; random signs stay below "
                f"{last.coherence_null95:.3g} in 95 % of cases: {adds}."
            )
        said.append(
            f"At step {last.step} the first singular direction of the error of dW_Q through delta holds "
            f"{percent(last.first_share)} of it.{verdict}"
        )
    if found.over_steps is not None:
        said.append(over_steps(found.over_steps))
    if found.note is not None:
        said.append(f"{found.note}.")
    return said


def over_steps(found: OverSteps) -> str:
    """Whether the steps' errors of dW_Q add up."""
    adds = "they add up beyond chance" if found.p_value < 0.05 else "no more than random signs of the steps"
    return (
        f"Over {found.count} steps the errors of dW_Q have coherence {found.coherence:.3g} (1: independent signs; 95 % "
        f"of random signs below {found.null95:.3g}; p = {found.p_value:.2g}): {adds}."
    )


def delta_rows(found: DeltaRows) -> str:
    """Inside the band or not."""
    verdict = "leaves" if found.outside else "stays inside"
    return (
        f"{at_step(found.step).capitalize()} the sum ends at {found.sums[-1]:+.3g} and {verdict} the 99 % band of "
        f"±{found.band99:.3g}: {'more than' if found.outside else 'no more than'} unbiased independent rows make."
    )


def delta_steps(found: DeltaSteps) -> list[str]:
    """Total and excess, and how far the band can be trusted."""
    said = [_accumulated("delta's mean error", found.total, len(found.steps))]
    if found.excess is not None:
        said.append(_accumulated("beyond one correct rounding of O", found.excess, len(found.steps)))
    if len(found.heads) > 1:
        said.append(all_heads(found))
    return said


def all_heads(found: DeltaSteps) -> str:
    """How many heads leave their bands, beside chance's 1 %."""
    outside = sum(abs(h.extreme) > 1 for h in found.heads)
    leave = "leaves its band" if outside == 1 else "leave their bands"
    return (
        f"Of all {len(found.heads)} heads looked at {outside} {leave}; of unbiased ones about "
        f"{0.01 * len(found.heads):.2g} would."
    )


def _accumulated(name: str, a: Accumulated, steps: int) -> str:
    verdict = "leaves" if a.outside else "stays inside"
    spread = ""
    if a.t_over_steps is not None and a.p_over_steps is not None:
        spread = f" By the spread of the steps' means alone: t = {a.t_over_steps:+.2f}, p = {a.p_over_steps:.2g}."
    lag = ""
    if a.lag1 is not None and a.lag1_limit is not None and abs(a.lag1) > a.lag1_limit:
        lag = (
            f" Neighbouring steps are correlated ({a.lag1:+.2f}, beyond ±{a.lag1_limit:.2f}): the steps are not "
            "independent and the band is no test of bias."
        )
    return (
        f"{name}, summed over {steps} steps, ends at {a.sums[-1]:+.3g} and {verdict} the 99 % band of "
        f"±{a.band99:.3g}.{spread}{lag}"
    )


def features(found: FeatureProducts) -> str:
    """The row, and whether its features agree beyond chance."""
    order = sorted(range(len(found.product)), key=lambda i: -abs(found.product[i]))[:2]
    top = " and ".join(f"{i} ({found.product[i]:+.2g})" for i in order)
    chance = "chance does not explain it" if found.alignment_p < 0.05 else "chance may do as much among so many rows"
    return (
        f"Row {found.row} of batch item {found.batch} has, {at_step(found.step)}, the largest error of delta, "
        f"{found.delta_error:+.3g} ({percent(found.share)} of the sum of squares); features {top} give most. The "
        f"sum of its products is {found.alignment:.2f} times what random signs give (p <= {found.alignment_p:.2g} over "
        f"{found.rows} rows: {chance})."
    )


def prefix(found: PrefixError) -> str:
    """Where the curve ends, and whose arithmetic it is."""
    unit = f"{found.unit_keys} of {found.keys} keys have P̄ = 1"
    ends = {True: "ends at O as observed", False: "does not end at O as observed", None: "no O was captured"}
    return (
        f"O[{found.row}, {found.feature}] of batch item {found.batch}, {at_step(found.step)}: Ō's error ends at "
        f"{found.error[-1]:+.3g}, {found.rounding_error[-1]:+.3g} of it by rounding the sum to {found.format}; {unit}. "
        f"Inferred by walking recipe {found.recipe_reason}; the walk {ends[found.as_observed]}."
    )


def triggers(found: Triggers, head: str) -> str:
    """First step, last step and the most at any."""
    return f"{head}: {_counts(found.head)}. All heads looked at in its layer: {_counts(found.layer)}."


def _counts(found: TriggerCounts) -> str:
    parts = []
    for name in ("exact", "window", "unit"):
        counts: tuple[int, ...] = getattr(found, name)
        shares = [n / rows if rows else None for n, rows in zip(counts, found.rows, strict=True)]
        first, last, most = map(percent, (shares[0], shares[-1], max((s or 0.0) for s in shares)))
        parts.append(f"{name} {first} of rows at first, {last} at last, {most} at most")
    return "; ".join(parts)
