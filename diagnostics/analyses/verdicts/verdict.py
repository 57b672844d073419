"""From figures to words: the labels of one entry, the reasons for them with numbers, and what to try next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Literal, get_args

from attn_diag.analyses.verdicts.advice import (
    DROPPED_OUT,
    MEAN_OF_OPERANDS,
    SUGGESTIONS,
    WITHOUT_O,
    lost_bits,
    of_lossy,
    of_wrong,
)  # fmt: skip
from attn_diag.analyses.verdicts.means import REFERENCE_BELOW, beyond_reference, excuse, leans_on_few, rejects
from attn_diag.analyses.verdicts.quality import beside_truth
from attn_diag.head.quality import LOSSY
from attn_diag.results.diagnosis import (
    LABELS,
    Bias,
    BiasEstimate,
    Certificate,
    HeadDiagnosis,
    Label,
    Propagation,
    RoundingBias,
    RowMaxima,
    Summary,
    TopRow,
    Verdict,
)
from attn_diag.results.quality import NOT_JUDGED, UNSEEN_DROPOUT, Answer, QuantityVerdict, kept_open, right_beside
from attn_diag.results.wording import SYMBOLS, chance, in_units, percent, plural, together
from attn_diag.statistics.means import MIN_EFFECTIVE, MIN_SEQUENCES, PRIMARY

# A noise factor above which O was not rounded well; production kernels have 0.98 to 1.9 in BF16.
NOISY_ABOVE = 2.0
# Relative error of dQ from which a head is called ill-conditioned, where a well-rounded kernel has it too.
DQ_ERROR_ABOVE = 0.02
# Unexplained part of dQ's error: at most 0.03 for fused backwards that cast dS and dQ, 0.14 and more for others.
ROUNDS_ELSEWHERE_ABOVE = 0.1
_NAMES = {
    "delta": "delta",
    "delta_excess": "delta beyond correct rounding of O",
    "o_excess": "O beyond correct rounding",
    "o_away_excess": "O's magnitude beyond correct rounding",
}
# At least so much of dQ's error must come from one named part for the head to be called ill-conditioned by it.
CARRIED_BY = 0.5


def judge(
    *,
    bias: Bias,
    rounding_bias: RoundingBias,
    row_maxima: RowMaxima,
    noise_factor: float | None,
    conditioning: float | None,
    propagation: Propagation,
    top_rows: tuple[TopRow, ...],
    bit_identical: bool | None,
    in_doubt: int,
    swamped_rows: int,
    sequences: int,
    level: float,
    quantities: Sequence[QuantityVerdict] = (),
    certificate: Certificate | None = None,
    declared: Mapping[str, bool] | None = None,
) -> Verdict:
    """The verdict of one entry: is it the mathematics, well rounded, biased, fragile? In this order.

    ``bias`` must carry the adjusted p-values of the primary tests. ``quantities``: each captured one; those of a format
    without a published recipe are wrong or stated, and not asked how well they are rounded. ``declared``: by primary
    test, whether the mean is what the declared recipe has too.
    """
    if certificate is not None and not certificate.held:
        return _violated(certificate)
    scope = "this sequence only" if sequences < MIN_SEQUENCES else f"{sequences} sequences"
    answers = {answer: [q for q in quantities if q.answer == answer] for answer in get_args(Answer)}
    if answers["nonfinite"] or answers["wrong"]:
        return _not_the_mathematics(answers)
    stated = answers["stated"]
    quantities = [q for q in quantities if q.answer != "stated"]
    labels: list[Label] = []
    reasons: list[str] = []
    if answers["lossy"] or answers["undecided"]:
        labels.append("lossy" if answers["lossy"] else "undecided")
        # What no known rounding explains, nor the forward, comes first.
        lossy = sorted(answers["lossy"], key=lambda q: bool(q.site or [p for p in q.patterns if p.kind == "forward"]))
        reasons += [q.words for q in (*lossy, *answers["undecided"])]
    if (fragile := _fragile(propagation, quantities, noise_factor, conditioning)) is not None and "lossy" not in labels:
        labels.append("ill_conditioned")
        reasons.append(fragile)
    elif not quantities and "lossy" not in labels and (error := _captured_error(propagation)) > DQ_ERROR_ABOVE:
        labels.append("undecided")
        reasons.append(
            f"dQ is {percent(error)} off, which the rounding of O does not explain; of this format there is no "
            "well-rounded kernel to compare with."
        )
    tests = {name: e for name in PRIMARY if (e := getattr(bias, name)) is not None and e.p_value is not None}
    blurred = {name: e for name, e in tests.items() if beyond_reference(e)}
    tests = {name: e for name, e in tests.items() if name not in blurred}
    if blurred:
        labels.append("undecided")
        # Where most are in doubt it is the reference, as beside an O in float64.
        few = bias.o_excess is not None and 2 * in_doubt < bias.o_excess.n
        reasons += _blurred(blurred, in_doubt if few else 0)
    biased = _biased(tests, rounding_bias, level, scope, declared or {})
    reasons += biased[1]
    if biased[0]:
        labels.append("biased")
    delta = tests.get("delta")
    if delta is not None and sequences < MIN_SEQUENCES and leans_on_few(delta, level):
        labels.append("undecided")
        listed = together([f"row {r.row} ({percent(r.share, '.0f')})" for r in top_rows[:3]])
        reasons.append(
            "Too few independent rows to test for a bias: rows that attend most to the same key err together, and "
            f"only about {delta.n_eff:.2g} groups of such rows make delta's error (at least {MIN_EFFECTIVE} are needed)"
            f"{f'; most of it is in {listed}' if listed else ''}."
        )
    untested = {n: e for n in PRIMARY if (e := getattr(bias, n)) is not None and e.rms and e.p_value is None}
    if untested:
        labels.append("undecided")
        reasons.append(
            f"The mean of {', '.join(_NAMES[n] for n in untested)} cannot be tested: there is a single row, sequence "
            "or feature, or errors cancel in each so that the standard error vanishes."
        )
    if not tests and not blurred and not untested and bit_identical is None:
        labels.append("undecided")
        reasons.append(_nothing_to_test(bias))
    labels = labels or ["clean"]
    if stated:
        # With a recipe to compare with, LSE alone is stated.
        reasons += [q.words for q in stated] if quantities else [beside_truth(stated)]
    exact = _identical_words(in_doubt) if bit_identical else None
    silent = bool(tests) and not biased[1] and not {"biased", "undecided"} & set(labels)
    reasons += _context(bias, silent, row_maxima, quantities, propagation, exact, scope)
    if swamped_rows:
        equal, its = ("rows of O equal", "their") if swamped_rows > 1 else ("row of O equals", "its")
        reasons.append(f"{swamped_rows} {equal} V of {its} top key exactly (swamped: a count, not a cause).")
    unique = tuple(label for label in LABELS if label in labels)
    seen: Literal["none", "seen"] = "seen" if {"lossy", "ill_conditioned"} & set(unique) else "none"
    evidence: Literal["none", "seen", "significant"] = "significant" if "biased" in unique else seen
    unseen = all(getattr(bias, name) is None for name in PRIMARY) and bit_identical is None
    suggestions = SUGGESTIONS | ({"undecided": WITHOUT_O} if unseen else {})
    if labels.count("undecided") == 1 and (known := kept_open(quantities)):
        suggestions["undecided"] = known
    suggestions["lossy"] = of_lossy(answers["lossy"])
    if (lost := lost_bits(answers["lossy"] or answers["undecided"])) is not None:
        suggestions |= {"lossy" if answers["lossy"] else "undecided": lost, "biased": MEAN_OF_OPERANDS}
    return Verdict(unique, evidence, tuple(reasons), tuple(suggestions[label] for label in unique))


def _nothing_to_test(bias: Bias) -> str:
    if any(getattr(bias, name) is not None for name in PRIMARY):
        return "No row of O or delta can be tested: all are fully masked, not finite, or beyond float64."
    return "Neither O nor delta was captured: no bias test is possible."


def _identical_words(in_doubt: int) -> str:
    if not in_doubt:
        return "O is bit-identical to correct rounding."
    return f"O is bit-identical to correct rounding, as far as float64 can tell ({in_doubt} elements are in doubt)."


def _blurred(tests: dict[str, BiasEstimate], in_doubt: int) -> Iterator[str]:
    """Why means are not tested: elements of O of which correct rounding is not known, or the reference's own error."""
    halfway = {name for name in tests if name != "delta"} if in_doubt else set[str]()
    for of_rounding, why in (
        (True, f"{in_doubt} elements of O lie halfway between two numbers of its format, as far as float64 can tell, "
         "so that correct rounding may make either (which may move the mean by more than "),
        (False, "No test of a mean that the float64 reference is not sharp enough for (its own error may exceed "),
    ):  # fmt: skip
        listed = "; ".join(
            f"{_NAMES[name]}: up to {e.reference_bound:.2g} beside a standard error of {e.standard_error:.2g}"
            for name, e in tests.items()
            if (name in halfway) is of_rounding
        )
        if listed:
            yield f"{why}{percent(REFERENCE_BELOW, '.0f')} of the standard error): {listed}."


def _violated(certificate: Certificate) -> Verdict:
    worst = ", ".join(f"{name} {ratio:.3g}" for name, ratio in certificate.worst_ratio.items() if not ratio <= 1)
    reason = (
        "THE REFERENCE IS WRONG HERE: its error against the oracle exceeds its proven bound "
        f"({worst} times, in {certificate.rows} rows checked). Nothing is concluded from it; please report this."
    )
    advice = "Report the capture with the output of attn-diag env; a faulty math library or processor makes this."
    return Verdict(("undecided",), "none", (reason,), (advice,))


def _not_the_mathematics(answers: Mapping[str, Sequence[QuantityVerdict]]) -> Verdict:
    """Where a quantity holds NaN or Inf, or what no rounding makes; nothing is said of rounding then."""
    labels: list[Label] = [label for label in ("nonfinite", "wrong") if answers[label]]
    reasons = [q.words for label in labels for q in answers[label]]
    reasons += [q.words for q in answers["lossy"]]
    every = [q for found in answers.values() for q in found]
    if right := [SYMBOLS[name] for name in right_beside(every)]:
        reasons.append(f"{together(right)} {_are(right)} right: as good as a well-rounded kernel's.")
    reasons += [q.words for q in answers["good"] if q.words.endswith(NOT_JUDGED)]
    advice = SUGGESTIONS | {"wrong": of_wrong(answers["wrong"])}
    suggestions = [advice[label] for label in labels]
    if any(pattern.kind == UNSEEN_DROPOUT for q in every for pattern in q.patterns):
        suggestions.insert(0, DROPPED_OUT)
    return Verdict(tuple(labels), "seen", tuple(reasons), tuple(suggestions))


def _fragile(
    propagation: Propagation,
    quantities: Sequence[QuantityVerdict],
    noise_factor: float | None,
    conditioning: float | None,
) -> str | None:
    """Why the head is ill-conditioned, if it is: a well-rounded kernel is as far off, and a named part carries it."""
    error, words = _dq_error(propagation)
    if error is None or error <= DQ_ERROR_ABOVE:
        return None
    shares = propagation.dq.shares if propagation.dq is not None else None
    carrier = max((shares or {}).items(), key=lambda item: item[1] or 0.0, default=("", None))
    carried = carrier[1] or 0.0
    known = {q.quantity: q for q in quantities}
    fragility = f"conditioning {conditioning or 0:.3g}: rows have little dQ of their own"
    if any(q.answer == "undecided" and q.rows_outlying for q in quantities):
        return None  # what stands out in some rows is no amplified rounding
    dq = known.get("dq")
    if dq is None:
        if _captured_error(propagation) and (carrier[0] != "delta" or carried < CARRIED_BY):
            return None  # not judged, and not what the rounding of O makes
        # dQ is predicted, from delta alone.
        o = known.get("o")
        fine = o.answer == "good" if o is not None else noise_factor is not None and noise_factor <= NOISY_ABOVE
        return f"{words}, through the rounding of O in delta; {fragility}." if fine else None
    other = dq.relative_error_well_rounded if dq.declared is None else dq.relative_error_16_bit
    if other is None or other <= DQ_ERROR_ABOVE or dq.factor is None or not 1 / LOSSY <= dq.factor <= LOSSY:
        return None
    if carried < CARRIED_BY:
        return None
    by_delta = carrier[0] == "delta"
    part = "the rounding of O, through delta," if by_delta else f"the part of {carrier[0].replace('_', ' ')}"
    alike = f"a well-rounded kernel's is {percent(other)} off as well"
    return f"{words}, and {alike}: {part} makes {percent(carried, '.0f')} of it; {fragility}."


def _captured_error(propagation: Propagation) -> float:
    """How far a captured dQ is off; 0 where none was captured."""
    return 0.0 if propagation.dq is None else propagation.dq.relative_error or 0.0


def _are(names: Sequence[str]) -> str:
    return "are" if len(names) > 1 else "is"


def _dq_error(propagation: Propagation) -> tuple[float | None, str]:
    dq = propagation.dq
    if dq is None:
        return None, ""
    if dq.relative_error is not None:
        explained = (
            ""
            if dq.predicted_relative_error is None
            else f" ({percent(dq.predicted_relative_error)} predicted from delta alone)"
        )
        return dq.relative_error, f"dQ is {percent(dq.relative_error)} off{explained}"
    if dq.predicted_relative_error is not None:
        return (
            dq.predicted_relative_error,
            f"dQ is predicted to be {percent(dq.predicted_relative_error)} off through delta",
        )
    return None, ""


def _biased(
    tests: dict[str, BiasEstimate], rounding_bias: RoundingBias, level: float, scope: str, declared: Mapping[str, bool]
) -> tuple[bool, list[str]]:
    """Whether a primary test rejects a mean that is the kernel's own, and the sentence for each that rejects."""
    guilty, words = False, []
    for name, estimate in tests.items():
        if not rejects(estimate, level):
            continue
        sentence = (
            f"Mean error of {_NAMES[name]} is {estimate.mean:.3g} "
            f"({in_units(estimate.mean_ulp, floors=name.startswith('delta'))}); an unbiased kernel has such a mean "
            f"{chance(estimate.p_adjusted or 0.0)}; {scope}"
        )
        if estimate.t is None:
            sentence += f"; it is the same everywhere, and p the chance that {estimate.n_clusters} signs agree"
        excused = excuse(name, estimate, rounding_bias, level)
        if excused is None and declared.get(name):
            excused = "no further off than the declared recipe's mean may be"
        guilty |= excused is None
        words.append(f"{sentence}." if excused is None else f"{sentence}; {excused}: no fault of the kernel.")
    return guilty, words


def _context(
    bias: Bias,
    silent: bool,
    row_maxima: RowMaxima,
    quantities: Sequence[QuantityVerdict],
    propagation: Propagation,
    identical: str | None,
    scope: str,
) -> list[str]:
    """What else is said; ``silent``: tests were made, decided, and found no mean, not even one that is excused."""
    words = []
    if identical is not None:
        words.append(identical)
    if silent:
        delta = bias.delta or bias.o_excess
        if delta is not None and delta.p_value is not None and delta.minimum_detectable is not None:
            name = "delta" if bias.delta is not None else "O"
            words.append(
                f"No significant mean error ({scope}): {name} {delta.mean:.2g}, as large "
                f"{chance(delta.p_value, 'p')}; {delta.minimum_detectable:.2g} would have been detected with 80 % "
                "power."
            )
    repeats = row_maxima.exact
    if repeats.rows:
        words.append(f"Repeated row maxima in {repeats.rows} of {repeats.rows_eligible} eligible rows (input format).")
    else:
        words.append("No row has a repeated maximum, so that is not the trigger here.")
    words += [q.words for q in quantities if q.answer == "good" and q.declared]
    good = [SYMBOLS[q.quantity] for q in quantities if q.answer == "good" and not q.declared]
    if good:
        words.append(f"{together(good)} {_are(good)} as good as a well-rounded kernel's.")
    dq = propagation.dq
    if dq is not None and dq.unexplained_with_casts is not None and dq.unexplained_with_casts > ROUNDS_ELSEWHERE_ABOVE:
        words.append(
            "dQ's error is not explained by delta and the casts of a fused backward alone (what these leave is "
            f"{percent(dq.unexplained_with_casts, '.0f')} of its size): this backward rounds elsewhere too."
        )
    if propagation.dw_q is not None and propagation.dw_q.relative_error is not None:
        words.append(f"dW_Q of this sample is {percent(propagation.dw_q.relative_error)} off.")
    elif bias.delta is None and dq is None:
        words.append("Without dO nothing can be said of delta and the gradients.")
    return words


def summarise(
    entries: Iterable[tuple[str, str, HeadDiagnosis]], unreadable: tuple[str, ...], warnings: tuple[str, ...]
) -> Summary:
    """One sentence over all heads. ``entries``: (capture, observation, head entry), pooled ones left out."""
    judged, without, worst = 0, 0, None
    labels: Counter[Label] = Counter()
    for source, observation, head in entries:
        if head.verdict is None:
            without += 1
            continue
        judged += 1
        labels.update(head.verdict.labels)
        error = _dq_error(head.propagation)[0]
        if error is not None and (worst is None or error > worst[0]):
            worst = error, source, observation, head
    counts = ", ".join(f"{count} {label}" for label, count in labels.most_common())
    sentence = f"{plural(judged, 'head')} judged: {counts}." if judged else "No verdict."
    if without:
        sentence += f" {without} without a verdict: the assumptions about the capture do not hold."
    if worst is not None:
        error, source, observation, head = worst
        place = f"head {head.head}" if head.layer is None else f"layer {head.layer} head {head.head}"
        sentence += f" Largest dQ error: {percent(error)} ({place}, {observation}, {PurePath(source).name})."
    return Summary(sentence, dict(labels), unreadable, warnings)
