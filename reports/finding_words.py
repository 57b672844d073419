"""A finding in words: where, what, since when, what it does to training, and how sure it is.

The finding itself is computed elsewhere (``attn_diag.results.grouping``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from attn_diag.reports.onset import NAMES, grows, since, when
from attn_diag.reports.places import where
from attn_diag.reports.quantities import STYLES, TESTS
from attn_diag.results.estimates import Label
from attn_diag.results.findings import Kind, SharedFinding
from attn_diag.results.quality import LOSSY, MASK_UNSEEN, OPERANDS, PROBS, TRIED, Quantity
from attn_diag.results.wording import SYMBOLS, chance, head_name, percent, plural, times, together, yardstick

__all__ = ["NAMES", "Line", "about", "brief", "fault", "grows", "matters", "style_of", "sure", "what", "when", "where"]
# Of dW_Q in the worst head: training runs that blew up had 11 to 42 % 100 to 200 steps before (benchmarks/failing_run).
_LITTLE, _LARGE = 0.01, 0.1
# Lossy is what has its whole 95 % interval above ``LOSSY``; of these the factor itself, which is that of the dQ that
# their error makes.
_BY_EFFECT = ("lse", "delta")
# One sound run in a hundred has a bias by chance at level 0.01; an adjusted p below this is not explained by that.
_HARDLY_CHANCE = 1e-4
# Of causes that other heads show.
_MOST_OTHERS = 2
_ANOTHER = "much: O is wrong, so the model computes another function than meant"


@dataclass(frozen=True)
class Line:
    """What is said first, a line at a time."""

    about: str
    """What it is about: What, Since, Matters, Sure, Next."""
    said: str
    command: bool = False
    """Whether ``said`` can be typed as it stands."""
    purpose: str = ""
    """What it shows, of a command."""
    label: Kind | None = None
    """The finding's label, for its colour; None: no finding."""

    @property
    def whole(self) -> str:
        """What is said, a command after what it shows."""
        return f"{self.purpose}: {self.said}" if self.purpose else self.said


def style_of(label: Kind | Label) -> str:
    """The colour in which a label is written, or what is said of it."""
    plain = "bold red" if label == "unjudged" else STYLES[label]
    return f"bold {plain.removeprefix('bold ')}"


def about(finding: SharedFinding) -> Iterator[Line]:
    """What a finding is, in other heads too, since when, what it does to training, and how sure it is."""
    yield Line("What", f"{what(finding)}{_site(finding)}", label=finding.label)
    if others := otherwise(finding):
        yield Line("Others", others)
    if onset := when(finding):
        yield Line("Since", onset)
    yield Line("Sure", sure(finding))
    if effect := matters(finding):
        yield Line("Matters", effect)


def brief(finding: SharedFinding, observations: str = "", *, following: str = "", crowded: bool = False) -> Line:
    """The same in a paragraph of about three lines of 80 columns, for one of several findings.

    Args:
        finding: What was found.
        observations: " in paper", where that tells it.
        following: The command to run next, for one of many that is not the gravest: what it is and this are all there
            is room for, and the headline says since when.
        crowded: Whether there are three findings or more: rows and patterns are then left to the details.
    """
    said = _in_short(finding, crowded=crowded)
    if others := sum(other.heads for other in finding.otherwise):
        said += f"; {plural(others, 'other head')} otherwise"
    said = f"In{observations.removeprefix(' in')}: {said}" if observations else said
    told = [said, since(finding), _surely(finding), _effect(finding)]
    whole = f"{said}. Next: {following}" if following else f"{'. '.join(told)}."
    return Line(_titled(finding), whole, label=finding.label)


def _titled(finding: SharedFinding) -> str:
    short = {"nonfinite": "NaN", "unjudged": "Mask", "ill_conditioned": "Fragile"}
    return short.get(finding.label, finding.label.capitalize())


def _in_short(finding: SharedFinding, *, crowded: bool) -> str:
    """What it is, in a line."""
    place = _worst_place(finding, steps=False)
    if finding.label == "lossy" and finding.factors:
        # Which rounding makes it, without whose it is.
        made = "" if crowded else (finding.pattern or "").partition(": as where ")[2].partition(", as ")[0].rstrip(".")
        return f"{_factors(finding, yardstick(finding.declared))}{place}{f', as where {made}' if made else ''}"
    if finding.label == "biased" and finding.biased_mean is not None:
        return f"{_bias_in_short(finding)}{place}"
    if finding.label == "ill_conditioned":
        return f"dQ is {percent(finding.dq_error)} off{place}, as {yardstick(finding.declared)}'s would be"
    if finding.label == "unjudged":
        return finding.words.partition(":")[0].rstrip(".")
    said = finding.words.partition(": ")[0] if crowded else finding.words
    return f"{said.rstrip('.')}{place}"


def _surely(finding: SharedFinding) -> str:
    """How certain it is, and who is at fault, in half a line."""
    if finding.label == "nonfinite":
        return "Sure: certain, and the kernel's fault"
    if finding.label == "wrong":
        return f"Sure: certain; {fault(finding)}{unknown(finding) if finding.formats else ', or a damaged capture'}"
    if finding.label == "unjudged":
        return "Sure: certain that metadata or kernel are wrong"
    if finding.label == "biased" and finding.p_adjusted is not None:
        often = chance(finding.p_adjusted).partition(" (")[0].removeprefix("by chance ")
        return f"Sure: chance makes it {often}; {fault(finding)}"
    if finding.label == "lossy" and (shown := _interval(finding)) is not None:
        low, high = shown
        alike = ", all rows weighted alike" if _by_all_rows(finding) else ""
        return f"Sure: {times(low)} to {times(high)} times at 95 %{alike}; {fault(finding)}"
    if finding.label == "ill_conditioned":
        return "Sure: compared on the same inputs; no fault of the kernel"
    return "Sure: seen, not tested"


def _effect(finding: SharedFinding) -> str:
    """What it does to training, in half a line."""
    if finding.label == "unjudged":
        return "Matters if the kernel is not what was meant"
    if finding.label == "nonfinite":
        return "Matters: training stops, NaN spreads to all weights"
    if (worse := _worse_gradient(finding)) is not None:
        return f"Matters {_degree(finding)}: {SYMBOLS[worse]} {percent(_error(finding, worse))} off"
    if finding.gradients is None and finding.dw_q_error is None:
        if not _wrong_o(finding):
            return "Matters: not known without dO"
        return "Matters much, unless it is meant" if finding.formats else "Matters much: O is another function"
    other = finding.dq_error_well_rounded
    beside = (
        ""
        if other is None or finding.label == "ill_conditioned"
        else f" ({yardstick(finding.declared).removeprefix('a ').removesuffix(' kernel')}: {percent(other)})"
    )
    how = "as predicted " if finding.gradients == "predicted" else ""
    return f"Matters {_degree(finding)}: dQ {how}{percent(finding.dq_error)} off{beside}"


def what(finding: SharedFinding) -> str:
    """The finding in a sentence or two, of its worst head."""
    place = _worst_place(finding)
    if finding.label == "unjudged":
        return finding.words
    if finding.label == "biased" and finding.biased_mean is not None:
        return f"{_bias(finding)}{place}."
    if finding.label == "ill_conditioned":
        other = finding.dq_error_well_rounded
        alike = "" if other is None else f", and {yardstick(finding.declared)}'s would be {percent(other)} off as well"
        return f"dQ is {percent(finding.dq_error)} off{place}{alike}: these inputs amplify ordinary rounding."
    said = finding.words.rstrip(".")
    if finding.label == "lossy" and finding.factors:
        said = _factors(finding, yardstick(finding.declared))
    pattern = f" {finding.pattern.rstrip('.')}." if finding.label == "lossy" and finding.pattern else ""
    pattern += _unexplained(finding) if finding.label == "lossy" and finding.factors else ""
    too = f" Biased too: {_bias(finding)}." if "biased" in finding.also and finding.biased_mean is not None else ""
    if finding.label in ("wrong", "nonfinite"):
        # The words are of one quantity of the worst head; what is right there may be wrong in others.
        others = [q for q in finding.quantities if q not in finding.right and not said.startswith(f"{SYMBOLS[q]} ")]
        for names, are in ((others, f"{NAMES[finding.label]} too"), (finding.right, "right")):
            if names:
                too += f" {together([SYMBOLS[n] for n in names])} {'are' if len(names) > 1 else 'is'} {are}."
    return f"{said}{place}.{pattern}{too}"


def otherwise(finding: SharedFinding) -> str:
    """What other heads of it show, the commonest cause first; empty where none is known that is another."""
    told = []
    for other in finding.otherwise[:_MOST_OTHERS]:
        name = "this head" if other.head is None else head_name(other.layer, other.head)
        several = f"{other.heads} heads as {name}" if other.heads > 1 else name
        told.append(f"{several}: {other.words.rstrip('.')}.")
    if more := sum(other.heads for other in finding.otherwise[_MOST_OTHERS:]):
        told.append(f"{plural(more, 'head')} in other ways again.")
    return " ".join(told)


def _unexplained(finding: SharedFinding) -> str:
    """That no rounding is known which makes the error, where that is so."""
    return "" if finding.rounding_known or finding.declared else " None of the roundings that were tried makes it."


def _worst_place(finding: SharedFinding, *, steps: bool = True) -> str:
    """Of several heads the one that is told of, in brackets; with its step, where there are several."""
    worst = finding.worst
    if finding.heads == 1 or worst.head is None:
        return ""
    step = f" at step {worst.step}" if steps and worst.step is not None and len(finding.by_step) > 1 else ""
    return f" ({head_name(worst.layer, worst.head)}{step})"


def _factors(finding: SharedFinding, kernel: str) -> str:
    """How many times a well-rounded kernel's error: "O has 1.86 and dQ 1.40 times the error of a …"."""
    own = {q: f for q, f in finding.factors.items() if q not in _BY_EFFECT}
    said = []
    if own:
        (first, factor), *others = own.items()
        factors = [f"{SYMBOLS[first]} has {times(factor)}", *(f"{SYMBOLS[q]} {times(f)}" for q, f in others)]
        said.append(f"{together(factors)} times the error of {kernel}")
    # Of LSE and delta the factor is that of the dQ which their error makes.
    said += [
        f"the error of {SYMBOLS[q]} alone makes dQ {times(f)} times as wrong as that of {kernel}"
        for q, f in finding.factors.items()
        if q in _BY_EFFECT
    ]
    return "; ".join(said)


def _site(finding: SharedFinding) -> str:
    if finding.site is None:
        return ""
    return f" Its bits show {finding.site}; good kernels keep fp32 there."


def _bias(finding: SharedFinding) -> str:
    """The mean that is beyond chance, in its unit, and what the unit is."""
    assert finding.biased_mean is not None
    test, mean = TESTS[finding.biased_mean], finding.biased_by or 0.0
    if test.unit == "floor":
        return f"{test.error} averages {mean:+.2g} of what one correct rounding of O makes"
    towards = f", {'towards' if mean < 0 else 'away from'} zero" if test.key == "o_away_excess" else ""
    return f"{test.error} averages {mean:+.2g} of O's last bit (ulp){towards}"


def _bias_in_short(finding: SharedFinding) -> str:
    """The same of O in fewer words."""
    mean = finding.biased_by or 0.0
    if finding.biased_mean == "o_away_excess":
        return f"|O| is {abs(mean):.2g} of its last bit too {'small' if mean < 0 else 'large'} on average"
    if finding.biased_mean == "o_excess":
        return f"O is {abs(mean):.2g} of its last bit too {'low' if mean < 0 else 'high'} on average"
    return _bias(finding)


def matters(finding: SharedFinding) -> str:
    """What it does to the gradients that train; that it is not known, where nothing could be judged."""
    if finding.label == "unjudged":
        return "much if the kernel is not what was meant; not at all if the metadata alone are wrong."
    if finding.label == "nonfinite":
        return "NaN spreads to every weight within a step that is not skipped: the run stops learning."
    if MASK_UNSEEN in (finding.pattern or ""):
        return "not known: where dropout was on, nothing is judged without its mask."
    worse = _worse_gradient(finding)
    if worse is not None and not _wrong_o(finding):
        beside = "" if finding.dq_error is None else f", dQ {percent(finding.dq_error)}"
        off = f"the gradient {SYMBOLS[worse]} is up to {percent(_error(finding, worse))} off"
        return f"{_degree(finding)}: {off}{beside}."
    if finding.gradients is None and finding.dw_q_error is None:
        if not _wrong_o(finding):
            return "not known; without dO (and dQ) no gradient can be judged."
        return f"{_of_wrong_o(finding)}."
    other = finding.dq_error_well_rounded
    how = "predicted (from delta) to be " if finding.gradients == "predicted" else ""
    beside = (
        ""
        if other is None or finding.label == "ill_conditioned"
        else f" ({yardstick(finding.declared)}'s: {percent(other)})"
    )
    weights = "" if finding.dw_q_error is None else f", the weights' gradient dW_Q {percent(finding.dw_q_error)}"
    if (finding.dw_q_error or 0.0) >= _LARGE:
        weights += ". Runs that blew up had dW_Q 11 to 42 % off shortly before"
    if _wrong_o(finding):
        said = f"dQ is {how}{percent(finding.dq_error)} off{beside}"
        return f"{_of_wrong_o(finding)}; {said}."
    size = f"the gradient dQ is {how}up to {percent(finding.dq_error)} off{beside}"
    alone = " in one step (whether the errors add up over steps is not known)" if finding.label == "biased" else ""
    return f"{_degree(finding)}{alone}: {size}{weights}."


def _degree(finding: SharedFinding) -> str:
    """How much it matters, in a word."""
    size = max(finding.dq_error or 0.0, finding.dw_q_error or 0.0, _error(finding, _worse_gradient(finding)))
    if size >= _LARGE or _wrong_o(finding):
        return "much"
    return "little" if size < _LITTLE else "some"


def _worse_gradient(finding: SharedFinding) -> Quantity | None:
    """The captured gradient that is twice as far off as dQ and more, and by more than little; None: there is none."""
    others = [name for name in finding.errors or {} if name not in ("o", "lse", "delta", "dq", "dw_q")]
    worst = max(others, key=lambda name: _error(finding, name), default=None)
    above = max(2 * (finding.dq_error or 0.0), finding.dw_q_error or 0.0, _LITTLE)
    return worst if _error(finding, worst) > above else None


def _error(finding: SharedFinding, quantity: Quantity | None) -> float:
    return 0.0 if quantity is None else (finding.errors or {}).get(quantity, 0.0)


def _of_wrong_o(finding: SharedFinding) -> str:
    """What a wrong O does: one of numbers of a few bits is meant so where these are."""
    return "much, unless these bits are meant to be lost" if finding.formats else _ANOTHER


def _wrong_o(finding: SharedFinding) -> bool:
    return finding.label == "wrong" and "o" in finding.quantities


def fault(finding: SharedFinding) -> str:
    """Whose fault it is; a bias that chance makes now and then may be that."""
    whose = "the kernel's fault" if finding.captured else "the fault of these roundings"
    if finding.formats.keys() - {PROBS}:
        some = f" in {finding.alike} of them" if finding.alike != finding.heads else ""
        what = "kernel or cache" if finding.formats.keys() & set(OPERANDS) else "last cast"
        whose = f"the fault of a {what} below 16 bits{some}"
    return f"{whose}, or chance" if _may_be_chance(finding) else whose


def unknown(finding: SharedFinding) -> str:
    """Of which quantities the format below 16 bits is not the fault; empty: of none."""
    names = [SYMBOLS[name] for name in finding.unexplained]
    return f"; of {together(names)} it is another" if names else ""


def _may_be_chance(finding: SharedFinding) -> bool:
    return finding.label == "biased" and (finding.p_adjusted or 0.0) > _HARDLY_CHANCE


def _interval(finding: SharedFinding) -> tuple[float, float] | None:
    """The interval that shows it lossy: of the error itself, or with all rows weighted alike."""
    if _by_all_rows(finding):
        return finding.typical_factor_ci95
    return finding.factor_ci95


def _by_all_rows(finding: SharedFinding) -> bool:
    """Whether few rows have most of the error, and only all rows weighted alike show it lossy."""
    whole, each = finding.factor_ci95, finding.typical_factor_ci95
    return whole is not None and each is not None and whole[0] <= LOSSY < each[0]


def sure(finding: SharedFinding) -> str:
    """How certain it is, in plain words, and whether the kernel or its inputs are at fault."""
    if finding.label == "nonfinite":
        return "certain: the exact result is finite there. The kernel is at fault."
    if finding.label == "wrong" and MASK_UNSEEN in (finding.pattern or ""):
        return "certain that no rounding does that; but dropout would, and is no fault of the kernel."
    if finding.label == "wrong" and finding.formats:
        return f"certain: {fault(finding)}, not the inputs'{unknown(finding)}."
    if finding.label == "wrong":
        if finding.of_few_bits:
            # FP32 inputs are held against kernels through BF16, and formats below 16 bits by name.
            whole = finding.cause is None or finding.cause.words.startswith("all ")
            whole = whole and TRIED not in finding.words
            less = "FP8 in all rows makes less" if whole else "no rounding that was tried makes that"
            meant = ", or 8 bits or fewer are meant there" if TRIED in finding.words else ""
            return f"certain: {less}; kernel or capture is at fault{meant}."
        return "certain: no rounding does that; kernel at fault, or capture damaged."
    if finding.label == "unjudged":
        return "certain: metadata or kernel are wrong; nothing else is judged."
    if finding.label == "biased" and finding.p_adjusted is not None:
        said = f"an unbiased kernel shows that {chance(finding.p_adjusted)}: {fault(finding)}, not the inputs'."
        return f"{said} Another batch tells which." if _may_be_chance(finding) else said
    if finding.label == "lossy" and (shown := _interval(finding)) is not None:
        low, high = shown
        alike = ", with all rows weighted alike" if _by_all_rows(finding) else ""
        rule = "lossy: above 1.25" if low > LOSSY else "lossy: a factor above 1.25"
        whose = (
            "FlashAttention-2's (the well-rounded kernel's)" if finding.declared is None else "the declared recipe's"
        )
        beside = f"{times(low)} to {times(high)} times {whose} error{alike}"
        return f"{beside} (95 % interval; {rule}): {fault(finding)}, not the inputs'."
    if finding.label == "ill_conditioned":
        return f"{yardstick(finding.declared)} was run on the same inputs: this one is not at fault."
    return "seen, not tested."
