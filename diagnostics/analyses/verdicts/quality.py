"""Each captured quantity of a head judged: is it the mathematics, and is it as good as a well-rounded kernel's?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from attn_diag.analyses.verdicts.joined_samples import joined
from attn_diag.analyses.verdicts.standing_out import as_usual, is_place, next_to_exact, others_right, over_all, where
from attn_diag.analyses.verdicts.words import AS_IN_BF16, cost, factor_words, left_with, rows_named, stand_out, too_few
from attn_diag.captures.sources import KEYED
from attn_diag.head import block_sums, cut_off
from attn_diag.head.outlying import GROUP_LIMIT
from attn_diag.head.quality import AS_GOOD, BEYOND, LIMITED, LOSSY, QuantitySample, within_last_rounding
from attn_diag.head.row_effect import RowEffect
from attn_diag.head.unfused import WORDS
from attn_diag.results.quality import NOT_JUDGED, OR_WRONG, Answer, Pattern, Quantity, QuantityVerdict, no_rounding
from attn_diag.results.wording import SYMBOLS, number, percent, plural, ranges, times, together, yardstick
from attn_diag.statistics.ratios import MIN_GROUPS, paired_ratio

CAPTURED: tuple[Quantity, ...] = ("o", "lse", "delta", "dq", "dk", "dv", "dkv")
# So much of a well-rounded kernel's error is less, however few rows carry it.
_FAR_BETTER = 0.5
_ROUNDED_DELTA = 16.0
# Planted roundings to the inputs' own format make up to 80 times (but where a well-rounded kernel is exact), of FP16
# inputs to FP8 150.
_HUGE = 100.0
_ORDER: tuple[Answer, ...] = ("nonfinite", "wrong", "lossy", "undecided", "good", "stated")
ALONE = "inputs of this format have no published recipe to compare with, only the truth"
SITES = {
    "dscores_from": "dS multiplies the cast P, one rounding more (torch's efficient kernel)",
    "e5m2": "P and dS are cast to E5M2 in the backward",
    "e4m3": "P and dS are cast to E4M3 in the backward",
    "rounded-delta": "delta is rounded to the inputs' format",
    "rounded-products": "dO o O and its row sum, delta, are rounded to the inputs' format, as in JAX's Pallas kernel",
    "rounded-dprobs": "dP is rounded to the inputs' format",
    block_sums.SITE: block_sums.WORDS,
    **cut_off.SITES,
    **WORDS,
}


def worst_of_all(heads: Iterable[Sequence[QuantityVerdict]]) -> list[QuantityVerdict]:
    """The gravest verdict of each quantity over several heads."""
    by_name: dict[Quantity, list[QuantityVerdict]] = {}
    for found in heads:
        for verdict in found:
            by_name.setdefault(verdict.quantity, []).append(verdict)
    return [worst(found) for found in by_name.values()]


def worst(found: Sequence[QuantityVerdict]) -> QuantityVerdict:
    """The gravest of several verdicts of one quantity."""
    return min(found, key=lambda v: (_ORDER.index(v.answer), -(v.factor or 0.0)))


def judge_quantity(
    quantity: Quantity, samples: Sequence[QuantitySample], batches: Sequence[int], broken: int = 0, *, summed: int = 1
) -> QuantityVerdict:
    """Judge O, dQ, dK or dV of one head.

    Args:
        quantity: Its name.
        samples: One a sequence; at least one, unless every row is broken.
        batches: The sequence of each.
        broken: Rows with NaN or Inf where the reference is finite.
        summed: Of dK and dV, how many query rows one of their rows is the sum of.
    """
    name = SYMBOLS[quantity]
    unit = "keys" if quantity in KEYED else "rows"
    if broken or not samples:
        words = f"{name} holds NaN or Inf in {plural(broken, unit[:-1])} where the reference is finite."
        return QuantityVerdict(quantity, "nonfinite", words, rows_outlying=broken)
    whole = joined(samples)
    ratio, typical = (whole.ratio(), whole.typical_ratio) if whole.compared else (None, None)
    # Where dP and delta must cancel, a delta rounded to 16 bits leaves more than O's rounding does elsewhere.
    outlying = whole.outlying
    if outlying.any():
        outlying = outlying & ~(whole.not_zero & (whole.error <= _ROUNDED_DELTA**2 * whole.expected))
    largest, batch = max(zip((s.largest for s in samples), batches, strict=True), key=lambda item: item[0][3])
    error, truth = float(whole.error.sum()), float(whole.reference.sum())
    rounded = math.sqrt(float(whole.counterfactual.sum()) / truth) if truth and whole.compared else None
    plain = None if whole.in_16_bits is None or not truth else math.sqrt(whole.in_16_bits / truth)
    other = f"{yardstick(whole.declared or None)}'s error"

    def verdict(answer: Answer, words: str, *patterns: Pattern) -> QuantityVerdict:
        if whole.scales:
            patterns = (Pattern("scale", f"as where {whole.scales}"), *patterns)
        if whole.scales and answer in ("wrong", "lossy"):
            words = f"{words.removesuffix('.')}, as where {whole.scales}."
        elif whole.scales:
            words = f"{words} Its bits are those of a kernel where {whole.scales}."
        elif answer == "lossy" and whole.site in WORDS:
            patterns = (Pattern("rounding", f"as where {WORDS[whole.site]}"),)
        return QuantityVerdict(
            quantity=quantity,
            answer=answer,
            words=words,
            factor=None if ratio is None else ratio.factor,
            factor_ci95=None if ratio is None else (ratio.low, ratio.high),
            groups=None if ratio is None else ratio.groups,
            typical_factor=None if typical is None else typical.factor,
            typical_factor_ci95=None if typical is None else (typical.low, typical.high),
            relative_error=math.sqrt(error / truth) if truth else None,
            relative_error_well_rounded=rounded,
            rows_outlying=int(np.count_nonzero(outlying)),
            rows=len(outlying),
            largest_ulp=largest[2],
            largest_at=(batch, largest[0], largest[1]),
            declared=whole.declared or None,
            relative_error_16_bit=plain,
            site=whole.site if answer in ("lossy", "undecided") and ratio is not None else None,
            patterns=patterns,
        )

    off = f"{name} is {percent(math.sqrt(error / truth)) if truth else 'far'} off"

    def wrong(pattern: Pattern) -> QuantityVerdict:
        return verdict("wrong", f"{off}{no_rounding([pattern], compared=whole.compared)}: {pattern.words}.", pattern)

    if whole.factors:
        return wrong(Pattern("factor", whole.factors))
    telling = outlying & ~(least := next_to_exact(whole))
    if outlying.any():
        telling = telling & ~(as_usual(whole.error, whole.floor) & whole.by_last_rounding)
    by_chance = whole.exact_by_chance
    # What cancels may cancel in all query rows alike: then their errors add up.
    shared = float(summed) if by_chance else 1.0
    rest = whole.ratio(~telling) if telling.any() and (~telling).sum() > 1 else None
    healthy = rest is not None and rest.factor <= LOSSY
    if by_chance and not healthy:
        telling = telling & (whole.error > GROUP_LIMIT**2 * shared * whole.expected)
    if unlike := whole.unlike is not None and bool((whole.unlike & ~least).any()):
        telling, rest = whole.unlike & ~least, whole.ratio(~whole.unlike)
    if telling.any():
        placed = not whole.compared or is_place(whole, telling, healthy=healthy)
        if whole.zeroed.any() or unlike or (placed and not whole.rounding):
            return wrong(where(whole, telling, unit, rest if whole.compared else None))
    if whole.unlike_features is not None and whole.unlike_features.any():
        return wrong(over_all(np.flatnonzero(whole.unlike_features), unit))
    columns = np.flatnonzero(whole.bad_features)
    explained = whole.features_rounding if whole.compared else whole.rounding
    unexplained = columns.size > 0 and not explained
    if unexplained and by_chance:
        unexplained = others_right(whole)
    if unexplained:
        by_last = within_last_rounding(*whole.features) & as_usual(whole.features[0], whole.features[2])
        unexplained = not by_last.reshape(-1, len(whole.bad_features))[:, columns].all()
    if unexplained and (not whole.compared or others_right(whole) or bool(whole.misplaced_features.any())):
        return wrong(over_all(columns, unit))
    if not whole.compared:
        said = f"{name} is {percent(math.sqrt(error / truth))} off" if truth else f"{name} should be zero"
        if whole.rounding:
            return verdict("lossy", f"{said}, {left_with(whole.way)}.")
        return verdict("stated", f"{said}; {ALONE}.")
    if error > shared * whole.ceiling:
        coarsest = BEYOND * math.sqrt(error / whole.ceiling)
        if whole.declared:
            what = "the coarsest recipe, MXFP4, or the declared one"
            said = f"{times(coarsest)} times what {what} leaves"
            return verdict("wrong", f"{off}, which no rounding makes: {said}.")
        what = "a kernel with 8-bit operands and all else in BF16"
        return verdict("wrong", f"{off}{no_rounding((), compared=True)}: {times(coarsest)} times what {what} leaves.")
    if ratio is None or typical is None:
        return verdict("undecided" if error else "good", f"{name} has too few {unit} to compare.")
    known = SITES.get(whole.site or "")
    site = f", as where {known}" if known else f"; its bits show {whole.site}" if whole.site else ""
    if by_chance and max(ratio.factor, typical.factor) > LOSSY:
        beside = whole.beside_expected()
        factor = "" if beside is None else f"{factor_words(beside)} times "
        words = f"{name} has {factor}the error that casts are expected to leave{site}"
        words += "; in a well-rounded kernel they leave next to none on these very numbers"
        if beside is not None and beside.low > LOSSY * math.sqrt(shared) and beside.groups >= MIN_GROUPS:
            return verdict("lossy", f"{words}.")
        return verdict("undecided", f"{words}, where others need not be exact.")
    factor = f"{factor_words(ratio)} times {other}{cost(error, truth, plain)}"
    if quantity == "dq" and whole.not_zero.any() and ratio.low <= LOSSY:
        zeros = rows_named(sorted(set(whole.rows[whole.not_zero].tolist())))
        site += f"; it should be zero in {zeros}: dP and delta do not cancel there"
        site += "" if known else ", as where delta is rounded"
    if ratio.low > _HUGE and whole.site is None:
        site += OR_WRONG
    if whole.beyond_backward:
        beyond = f"{times(whole.beyond_backward)} times what 16 bits leave, in which {whole.declared} computes it"
        return verdict("lossy", f"{name} has {factor}; it is off what the captured LSE gives by {beyond}.")
    if ratio.low > LOSSY and ratio.groups >= MIN_GROUPS:
        return verdict("lossy", f"{name} has {factor}{site}.")
    if typical.low > LOSSY and typical.groups >= MIN_GROUPS:
        each = f"{factor_words(typical)} times with all {unit} weighted alike"
        return verdict("lossy", f"{name} has {factor}, {each}{site}.")
    limited = whole.limited_ratio() if outlying.any() else None
    if limited is not None and limited.low > LOSSY and limited.groups >= MIN_GROUPS:
        one = unit[:-1]
        each = f"{factor_words(limited)} times with no {one} counted as more than {number(LIMITED)} times its noise"
        found = verdict("lossy", f"{name} has {factor}, {each}{site}; {stand_out(int(outlying.sum()), one)}.")
        return replace(found, typical_factor=limited.factor, typical_factor_ci95=(limited.low, limited.high))
    # Where few rows have most of the error the first says little; each row in units of its noise says what they share.
    as_good = ratio.high <= AS_GOOD or (ratio.factor <= AS_GOOD and typical.high <= AS_GOOD)
    # Hardly any error (exact on one-hot rows) has no interval worth the name.
    as_good |= max(ratio.factor, typical.factor) <= _FAR_BETTER
    if as_good and not outlying.any() and not columns.size and not (quantity == "dq" and whole.not_zero.any()):
        if whole.declared:
            return verdict("good", f"{name} is as good as {whole.declared} allows: {factor}.")
        by_each = ratio.high > LOSSY and typical.high <= AS_GOOD
        each = f", {factor_words(typical)} with all {unit} weighted alike" if by_each else ""
        words = f"{name} is as good as a well-rounded kernel's: {factor_words(ratio)} times its error{each}."
        return verdict("good", words)
    few = ""
    if ratio.groups < MIN_GROUPS:
        few = too_few(whole, ratio.groups, quantity)
    for count, one in ((int(outlying.sum()), unit[:-1]), (columns.size, "feature")):
        few += f"; {stand_out(count, one)}" if count else ""
    return verdict("undecided", f"{name} has {factor}{site}{few}.")


def beside_truth(stated: Sequence[QuantityVerdict]) -> str:
    """What is said of quantities whose format has no published recipe, and that are not wrong."""
    off = [(SYMBOLS[q.quantity], q.relative_error) for q in stated]
    listed = [name if error is None else f"{name} ({percent(error)} off)" for name, error in off]
    return (
        f"{together(listed)}: no more than rounding can make. How well they are rounded was not asked: inputs of this "
        "format have no published recipe to compare with."
    )


def with_empty_rows(
    verdict: QuantityVerdict, counts: Sequence[tuple[int, int]], absorbed: Sequence[int] = ()
) -> QuantityVerdict:
    """The verdict with what is found in rows that see no key: their dQ is 0; of their O kernels think differently.

    Args:
        verdict: Of O or dQ over all other rows, of dK or dV over all other sequences.
        counts: For each sequence, rows with NaN or Inf, and rows with another number than 0.
        absorbed: Batch items to whose dK or dV such rows add an unknown part.
    """
    name = SYMBOLS[verdict.quantity]
    if absorbed:
        words = f"{name} of {batch_items(absorbed)} has a part of rows that see no key, {NOT_JUDGED}"
        return replace(verdict, words=f"{verdict.words} {words}")
    broken, other = (sum(c[i] for c in counts) for i in (0, 1))
    if not broken and not other:
        return verdict
    said = f"{plural(broken, 'row')} with NaN or Inf" if broken else f"{plural(other, 'row')} with other numbers than 0"
    words = f"{name} has {said} among the rows that see no key"
    if verdict.quantity == "dq" and verdict.answer not in ("nonfinite", "wrong"):
        return replace(verdict, answer="nonfinite" if broken else "wrong", words=f"{words}, where it is 0.")
    return replace(verdict, words=f"{verdict.words} {words}, {NOT_JUDGED}")


def judge_effect(quantity: Quantity, effects: Sequence[RowEffect], broken: int = 0) -> QuantityVerdict:
    """Judge LSE or a captured delta of one head, by what its error makes of dQ beside a well-rounded kernel's error.

    Args:
        quantity: "lse" or "delta".
        effects: One a sequence.
        broken: Rows with NaN or Inf where the reference is finite.
    """
    name = SYMBOLS[quantity]
    if broken or not effects:
        words = f"{name} holds NaN or Inf in {plural(broken, 'row')} where the reference is finite."
        return QuantityVerdict(quantity, "nonfinite", words, rows_outlying=broken)
    made = np.concatenate([e.made for e in effects])
    noise = np.concatenate([e.noise for e in effects])
    over = np.concatenate([e.of_budget for e in effects])
    rows = np.concatenate([e.rows for e in effects])
    size = max(e.largest for e in effects)
    compared = all(e.compared for e in effects)
    by_recipe = [np.zeros_like(e.noise) if e.declared is None else e.declared for e in effects]
    ratio = paired_ratio(made + noise, noise + np.concatenate(by_recipe)) if compared else None
    factor = None if ratio is None else ratio.factor
    found = QuantityVerdict(
        quantity, "good", f"{name} is as good as fp32 arithmetic makes it.", factor=factor,
        factor_ci95=None if ratio is None else (ratio.low, ratio.high), groups=None if ratio is None else ratio.groups,
        rows_outlying=int((over > 1).sum()), rows=len(over),
    )  # fmt: skip
    if (over > 1).any() and all(e.in_bf16 for e in effects if (e.of_budget > 1).any()):
        return _answered(found, "undecided", f"{name} is up to {number(size)} off, {AS_IN_BF16}; {ALONE}.")
    if (over > 1).any() and len(ways := {e.way for e in effects if (e.of_budget > 1).any()}) == 1 and all(ways):
        return _answered(found, "lossy", f"{name} is up to {number(size)} off, {left_with(ways.pop())}.")
    if (over > 1).any():
        where = f"{'row' if (over > 1).sum() == 1 else 'rows'} {ranges(rows[over > 1].tolist())}"
        words = f"{name} is up to {number(size)} off, which no rounding makes: {where}"
        return _answered(found, "wrong", f"{words}.", Pattern("rows", where))
    if not compared:
        return _answered(found, "stated", f"{name} is up to {number(size)} off; {ALONE}.")
    if ratio is None or ratio.factor <= AS_GOOD:
        if all(e.exact for e in effects):
            return found
        if all(e.declared is not None for e in effects) and ratio is not None:
            return _answered(found, "good", f"{name} is up to {number(size)} off, no more than the declared recipe's.")
        words = f"{name} is up to {number(size)} off, more than fp32 arithmetic makes; it adds little to dQ's error."
        return _answered(found, "stated", words)
    whose = "a well-rounded kernel's" if effects[0].declared is None else "the declared recipe's"
    effect = f"which alone makes dQ {times(ratio.factor)} times as wrong as {whose}"
    words = f"{name} is up to {number(size)} off, {effect}"
    answer: Answer = "lossy" if ratio.factor > LOSSY and ratio.groups >= MIN_GROUPS else "undecided"
    return _answered(found, answer, f"{words}.")


def _answered(found: QuantityVerdict, answer: Answer, words: str, *patterns: Pattern) -> QuantityVerdict:
    return replace(found, answer=answer, words=words, patterns=patterns)


def batch_items(numbers: Sequence[int]) -> str:
    """ "batch items 0-2"."""
    return f"batch {'item' if len(numbers) == 1 else 'items'} {ranges(list(numbers))}"
