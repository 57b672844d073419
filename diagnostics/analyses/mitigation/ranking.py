"""The candidates of a what-if, ranked, and put into a few sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from attn_diag.analyses.mitigation.equivalence import RepeatedMaxima, beta_limits
from attn_diag.head.quality import AS_GOOD, LOSSY
from attn_diag.kernels import LOW_BIT, Recipe
from attn_diag.results import wording
from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.results.what_if import Candidate, Cost, StabilisedLimits, WhatIf
from attn_diag.statistics.means import adjust

# Less than this fraction of the baseline's error, either way, is called nothing.
NOTHING = 0.02
_NAMED = 6


def rank(candidates: Sequence[Candidate], by: str) -> list[Candidate]:
    """The baseline, then what is equivalent by the error it leaves and its cost, then the rest.

    Args:
        candidates: The baseline first.
        by: The error that ranks them, "o" or "dq".
    """
    start = getattr(candidates[0].errors, by)
    completed = []
    for candidate in candidates:
        left = getattr(candidate.errors, by)
        left = left if candidate.finite and not math.isnan(left) else math.inf
        removed = 1 - left / start if start and math.isfinite(start) else None
        completed.append(replace(candidate, left=left, removed=removed))
    baseline, *others = completed
    same = ("exact", "nearly exact")
    equivalent = sorted((c for c in others if c.equivalence.status in same), key=lambda c: (c.left, _cost_key(c)))
    rest = sorted((c for c in others if c.equivalence.status not in same), key=lambda c: c.equivalence.status)
    mitigations = [c for c in (baseline, *equivalent) if c.kind in ("baseline", "mitigation")]
    ranked = [
        replace(c, rank=i, pareto=c.kind == "mitigation" and not any(_dominates(o, c) for o in mitigations))
        for i, c in enumerate(equivalent, 1)
    ]
    return [baseline, *ranked, *rest]


def _cost_key(candidate: Candidate) -> tuple[float, ...]:
    cost = candidate.cost
    if cost is None:
        # The baseline costs nothing more; what another kernel costs is unknown.
        return (0.0, 0.0, 0.0) if candidate.kind == "baseline" else (math.inf,) * 3
    return float(cost.tensor_flops), float(cost.bytes_per_row), float(cost.vector_ops)


def _dominates(one: Candidate, other: Candidate) -> bool:
    a, b = ((c.left or 0.0, *_cost_key(c)) for c in (one, other))
    return all(x <= y for x, y in zip(a, b, strict=True)) and a != b


def adjust_biases(candidates: Sequence[Candidate], level: float) -> tuple[list[Candidate], int]:
    """All biases' p-values as one Benjamini-Hochberg family, and its size."""
    tested = [
        (i, name)
        for i, candidate in enumerate(candidates)
        for name in ("bias_o", "bias_delta")
        if (estimate := getattr(candidate, name)) is not None and estimate.p_value is not None
    ]
    adjusted = list(candidates)
    p_values = [float(getattr(candidates[i], name).p_value) for i, name in tested]
    for (i, name), p in zip(tested, adjust(p_values), strict=True):
        adjusted[i] = replace(adjusted[i], **{name: replace(getattr(adjusted[i], name), p_adjusted=p)})
    return [replace(c, biased=_biased(c, level)) for c in adjusted], len(tested)


def _biased(candidate: Candidate, level: float) -> tuple[Literal["o", "delta"], ...]:
    tested: dict[Literal["o", "delta"], BiasEstimate | None] = {"o": candidate.bias_o, "delta": candidate.bias_delta}
    return tuple(n for n, e in tested.items() if e is not None and e.p_adjusted is not None and e.p_adjusted <= level)


def stabilised_limits(
    recipe: Recipe, acting: RepeatedMaxima, candidates: Sequence[Candidate], rows: int
) -> StabilisedLimits:
    """Where the stabilised softmax stops working on this head, and the best beta tried.

    Args:
        recipe: The baseline.
        acting: The rows in which the rule acts.
        candidates: As ranked.
        rows: How many rows the head has that are usable.
    """
    if acting.largest is None:
        return StabilisedLimits(acting.rows, rows)
    limits = StabilisedLimits(acting.rows, rows, acting.largest, *beta_limits(recipe, acting.largest))
    best = next((c for c in candidates if c.rank is not None and c.name.startswith("stabilised-")), None)
    if best is None:
        return limits
    beta = float(best.name.removeprefix("stabilised-"))
    return replace(limits, best=beta, best_helps=best.removed is not None and best.removed > 0)


# Less of P_bar that becomes 0 is not told.
_UNDERFLOW = 1e-3


def summarise(found: WhatIf) -> tuple[str, ...]:
    """What the baseline loses, what helps most and cheapest, what does nothing, what harms, what changes the model."""
    mitigations = [c for c in found.candidates if c.kind == "mitigation"]
    ranked = [c for c in mitigations if c.rank is not None]
    title = wording.SYMBOLS[found.ranked_by]
    sentences = [_baseline(found)]
    if found.unfit:
        warning = f"{found.unfit} The ranking is of {found.recipe}'s own error, not of the captured kernel's."
        sentences.insert(0, warning)
        if found.baseline_from != "given":
            # What would repair this recipe says nothing of the kernel.
            return tuple(sentences)
    if ranked:
        sentences.append(_best(found, ranked, title))
    sentences += _fp32_o(found)
    sentences += _mixed_scores(found, title)
    sentences += _underflow(found)
    sentences += _beside_own_format(found)
    useless = [c for c in ranked if abs(c.removed or 0.0) < NOTHING]
    if useless:
        named = _names(useless)
        sentences.append(f"Next to nothing (under {percent(NOTHING)} of {title}'s error): {named}.")
    worse = [c for c in found.candidates if c.rank is not None and (c.removed or 0.0) <= -NOTHING]
    sentences += _worse(worse, title)
    sentences += _biases(found)
    sentences += _stabilised(found, title)
    sentences += _not_equivalent(found, title)
    return tuple(sentences)


def _beside_own_format(found: WhatIf) -> Iterator[str]:
    """Whether a kernel below 16 bits is as good as its own format allows: its captured errors beside its recipe's."""
    if found.observed is None or found.recipe not in LOW_BIT:
        return
    pairs = {name: (getattr(found.observed, name), getattr(found.baseline.errors, name)) for name in ("o", "dq")}
    factors = {name: seen / own for name, (seen, own) in pairs.items() if seen is not None and own}
    if not factors:
        return
    told = wording.together([f"{wording.SYMBOLS[name]} {factor:.2f}" for name, factor in factors.items()])
    worst = max(factors.values())
    words = (
        "as good as that format allows" if worst <= AS_GOOD
        else "something is rounded more coarsely than this recipe rounds it" if worst > LOSSY
        else "neither clearly as good nor clearly coarser"
    )  # fmt: skip
    yield f"Captured errors are {told} times those of {found.recipe}, the kernel's own format: {words} (this head)."


def _underflow(found: WhatIf) -> Iterator[str]:
    """What of P_bar becomes 0 in its cast, and what another scale or order would leave of that."""
    if not found.underflow or max(u.counted for u in found.underflow) < _UNDERFLOW:
        return
    own, *others = found.underflow
    closed = "" if own.closed_form is None else f", from the gap to the first keys alone {percent(own.closed_form)}"
    rest = "; ".join(f"{u.words} {percent(u.counted)}" for u in others)
    yield (
        f"{percent(own.counted)} of P_bar becomes 0 in its cast (predicted from means and deviations of the scores: "
        f"{percent(own.predicted)}{closed}){f'; {rest}' if rest else ''}."
    )


def percent(value: float | None) -> str:
    """A fraction as percent, in a sentence."""
    return wording.percent(value, unknown="unknown")


def cost_words(cost: Cost | None) -> str:
    """A cost in a few words and numbers."""
    if cost is None:
        return "unknown cost"
    parts = []
    if cost.tensor_flops:
        parts.append(f"{wording.percent(cost.tensor_flops, '.0f')} more tensor-core work")
    if cost.bytes_per_row:
        parts.append(f"{cost.bytes_per_row:.0f} bytes a row and head ({wording.percent(cost.bytes_fraction, '.0f')})")
    if cost.vector_ops:
        parts.append(f"{cost.vector_ops:.0f} elementwise operations a score")
    return " and ".join(parts) or "next to nothing"


def _baseline(found: WhatIf) -> str:
    origin = {"given": "as asked for", "assumed": "assumed"}.get(
        found.baseline_from, f"recognised: {percent(found.agreement)} of sampled elements of O bit-equal"
    )
    errors = found.baseline.errors
    parts = [f"dQ {percent(errors.dq)} off"] if errors.dq is not None else []
    parts += [f"dW_Q {percent(errors.dw_q)}"] if errors.dw_q is not None else []
    parts += [f"O {percent(errors.o)}"]
    noise = f", noise factor {errors.delta:.3g}" if errors.delta is not None else ""
    seen = found.observed.dq if found.observed is not None else None
    captured = f" (captured: {percent(seen)})" if seen is not None else ""
    return f"Baseline {found.recipe} ({origin}): {', '.join(parts)}{noise}{captured}. Everything below is emulated."


def _best(found: WhatIf, ranked: Sequence[Candidate], title: str) -> str:
    best = ranked[0]
    if (best.removed or 0.0) < NOTHING:
        return f"No mitigation takes away as much as {percent(NOTHING)} of {title}'s error."
    words = (
        f"{best.name} helps most: {title} {percent(best.left)} off, {percent(best.removed)} of the error "
        f"gone, for {cost_words(best.cost)} (estimated)."
    )
    # The cheapest one that takes most of what can be taken.
    front = [c for c in ranked if c.pareto and (c.removed or 0.0) >= 0.5 * (best.removed or 0.0)]
    if front and front[-1] is not best:
        cheap = front[-1]
        words += f" {cheap.name} leaves {percent(cheap.left)} for {cost_words(cheap.cost)}."
    kernels = [c for c in found.candidates if c.kind == "other recipe" and c.rank is not None]
    if kernels and (kernels[0].removed or 0.0) >= NOTHING:
        words += f" Of other kernels' recipes {kernels[0].name} leaves least, {percent(kernels[0].left)}."
    return words


def _fp32_o(found: WhatIf) -> list[str]:
    """What O in fp32 for delta leaves, alone and with the casts that come next."""
    by_name = {c.name: c for c in found.candidates}
    alone = by_name.get("fp32-o-delta")
    if alone is None or alone.errors.dq is None:
        return []
    words = f"Delta from O before its last rounding leaves {percent(alone.errors.dq)} of dQ"
    if (alone.removed or 0.0) < NOTHING:
        return [f"{words} wrong: O's last rounding is not what is wrong here."]
    more = {
        "+uncast-ds": "with dS uncast as well",
        "+uncast-p": "with P_bar uncast for PV instead",
        "+uncast-p+uncast-ds": "with both",
    }
    parts = [
        f"{percent(c.errors.dq)} {text}" for tail, text in more.items() if (c := by_name.get(f"fp32-o-delta{tail}"))
    ]
    reason = ""
    if (with_p := by_name.get("fp32-o-delta+uncast-p")) and with_p.errors.delta and alone.errors.delta:
        reason = (
            f" (an fp32 O still holds the rounding of P_bar: delta's noise factor is {alone.errors.delta:.2g}, "
            f"without that cast {with_p.errors.delta:.2g})"
        )
    return [f"{words} wrong{''.join(f', {part}' for part in parts)}{reason}."]


def _mixed_scores(found: WhatIf, title: str) -> list[str]:
    """Scores that forward and backward round differently, there or brought about."""
    by_name = {c.name: c for c in found.candidates}
    if (same := by_name.get("same-scores")) is not None:
        return [
            f"Recomputing P from the forward's own rounded scores leaves {percent(same.left)}: "
            f"{wording.percent(same.removed or 0.0, '.0f')} of {title}'s error is that forward and backward use "
            "different scores."
        ]
    forward, both = by_name.get("coarse-forward-scores"), by_name.get("coarse-scores")
    if forward is None or both is None or found.ranked_by == "o":
        return []
    return [
        f"Scores rounded in the forward only would make {title} {percent(forward.left)} wrong, in forward and backward "
        f"{percent(both.left)}."
    ]


def _worse(worse: Sequence[Candidate], title: str) -> list[str]:
    words_of = {True: "Harmful here", False: f"Other recipes and mixes that leave more of {title} wrong"}
    sentences = []
    for mine, words in words_of.items():
        if harmful := [c for c in worse if (c.kind == "mitigation") == mine]:
            harmful.sort(key=lambda c: -(c.left or 0.0))
            named = wording.listed([f"{c.name} ({percent(c.left)})" for c in harmful], _NAMED)
            sentences.append(f"{words}: {named}.")
    return sentences


def _biases(found: WhatIf) -> list[str]:
    """Biases that candidates bring about, or take away."""
    brings = [c for c in found.candidates if c.rank is not None and set(c.biased) - set(found.baseline.biased)]
    sentences = []
    if found.baseline.biased:
        kept = [c for c in found.candidates if c.kind == "mitigation" and c.rank is not None]
        removed = [c for c in kept if not c.biased]
        words = f"The baseline is biased ({_bias_words(found.baseline)})"
        sentences.append(f"{words}; not so: {_names(removed)}." if removed else f"{words}.")
    if brings:
        named = wording.listed([f"{c.name} ({_bias_words(c)})" for c in brings], _NAMED)
        sentences.append(f"A bias that the baseline has not: {named}.")
    return sentences


def _bias_words(candidate: Candidate) -> str:
    parts = []
    if "o" in candidate.biased and candidate.bias_o is not None:
        parts.append(f"|O| {candidate.bias_o.mean_ulp:+.2g} ulp")
    if "delta" in candidate.biased and candidate.bias_delta is not None:
        parts.append(f"delta {candidate.bias_delta.mean_ulp:+.2g} noise floors")
    return ", ".join(parts)


def _names(candidates: Sequence[Candidate]) -> str:
    return wording.listed([c.name for c in candidates], _NAMED)


def _stabilised(found: WhatIf, title: str) -> list[str]:
    limits = found.stabilised
    if limits is None or limits.best is None or limits.largest is None:
        return []
    best = found[f"stabilised-{limits.best:g}"]
    removed = best.removed or 0.0
    verdict = f"{'helps' if removed > 0 else 'harms'} by {percent(abs(removed))} of the error"
    if abs(removed) < NOTHING:
        verdict = "changes next to nothing"
    words = (
        f"Stabilised softmax acts on {limits.rows} of {limits.rows_all} rows; the best beta is {limits.best:g}, and "
        f"{verdict} ({title} {percent(best.left)} off"
    )
    biases = (found.baseline.bias_delta, best.bias_delta)
    if all(b is not None and b.t is not None for b in biases):
        before, after = (float(b.t) for b in biases if b is not None and b.t is not None)
        words += f"; bias of delta t {before:+.2g} -> {after:+.2g}"
    return [
        f"{words}). The largest repeated maximum is {limits.largest:.3g}: beta must stay below {limits.flush:.3g} "
        f"(underflow; {limits.subnormal:.3g} with subnormals), and below {limits.clamp:.3g} where l is kept above "
        "1e-10, as in the published code."
    ]


def _not_equivalent(found: WhatIf, title: str) -> list[str]:
    sentences = []
    broken = [c for c in found.candidates if c.equivalence.status == "breaks down"]
    if broken:
        by_reason: dict[str, list[str]] = {}
        for c in broken:
            by_reason.setdefault(c.equivalence.reason or "", []).append(c.name)
        named = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in list(by_reason.items())[:_NAMED])
        sentences.append(f"Not attention any more on these inputs: {named}.")
    changed = [c for c in found.candidates if c.equivalence.status == "changes the model"]
    if changed:
        named = ", ".join(
            f"{c.name} (O changes by {percent(c.equivalence.o)}; {title} then {percent(c.left)} off)" for c in changed
        )
        sentences.append(f"Changes of the model, not repairs of the kernel: {named}.")
    return sentences
