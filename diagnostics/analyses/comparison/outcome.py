"""What the changes of one head amount to, and the whole comparison in one sentence."""

from __future__ import annotations

from attn_diag.analyses.comparison.matching import HeadPlace
from attn_diag.results.comparison import Comparison, HeadComparison, Outcome
from attn_diag.results.wording import plural
from attn_diag.statistics.sizes import same

_STATED = ("causal", "scale", "window", "softcap", "dtype")
ORDER: tuple[Outcome, ...] = (
    "became-biased",
    "bias-reversed",
    "bias-grew",
    "bias-moved",
    "grew",
    "cured",
    "bias-shrank",
    "shrank",
    "relabelled",
)
PHRASES: dict[Outcome, str] = {
    "became-biased": "became biased",
    "bias-grew": "more biased than before",
    "bias-reversed": "biased the other way",
    "bias-moved": "mean error moved",
    "grew": "errors grew",
    "cured": "cured of bias",
    "bias-shrank": "less biased than before",
    "shrank": "errors shrank",
    "relabelled": "labels alone differ",
}


def same_inputs(a: HeadPlace, b: HeadPlace) -> bool | None:
    """Whether what both diagnoses say of q, k, v and the mask agrees; None where they say too little.

    What correct rounding of O does to this input (``rounding_bias``) is a fingerprint of q, k and v: its mean and rms
    are sums over all elements of O of the fractional part of O in ulp, and agree to six digits on no other input.
    """
    one, other = a.head.rounding_bias.o, b.head.rounding_bias.o
    if one is None or other is None or one.rms is None or other.rms is None:
        return None
    stated = all(a.capture.metadata.get(key) == b.capture.metadata.get(key) for key in _STATED)
    counted = all(
        getattr(a.head.row_maxima, name).rows == getattr(b.head.row_maxima, name).rows
        for name in ("exact", "window", "unit")
    )
    figures = [(one.mean, other.mean), (one.rms, other.rms)]
    return stated and counted and a.head.rows_all == b.head.rows_all and all(same(x, y) for x, y in figures)


def head_outcomes(entry: HeadComparison) -> tuple[Outcome, ...]:
    """What happened to a head, the worst first.

    "became-biased" and "cured" take both: the verdict has gained (lost) the label, and the difference of a primary mean
    is significant. Where labels differ and nothing else does beyond chance, the head is "relabelled".
    """
    found: set[Outcome] = set()
    means = {m.outcome for m in entry.means}
    biased = "biased" in entry.a_labels, "biased" in entry.b_labels
    if biased == (False, True) and means & {"became biased", "grew", "reversed"}:
        found.add("became-biased")
    elif biased == (True, False) and means & {"cured", "shrank"}:
        found.add("cured")
    elif biased == (True, True):
        if "reversed" in means:
            found.add("bias-reversed")
        if means & {"grew", "became biased"}:
            found.add("bias-grew")
        if means & {"shrank", "cured"} and "bias-grew" not in found:
            found.add("bias-shrank")
    elif means - {"none", "untested"}:
        found.add("bias-moved")
    if "moved" in means and not found:
        found.add("bias-moved")
    sizes = {s.outcome for s in entry.sizes}
    if "grew" in sizes:
        found.add("grew")
    if "shrank" in sizes:
        found.add("shrank")
    if not found and set(entry.a_labels) != set(entry.b_labels):
        found.add("relabelled")
    return tuple(outcome for outcome in ORDER if outcome in found)


def head_notes(entry: HeadComparison, level: float) -> tuple[str, ...]:
    """What must be said beside the outcomes: labels that changed without a significant change behind them."""
    notes = []
    for labels, word, outcome in ((entry.gained, "B", "became-biased"), (entry.lost, "A", "cured")):
        if "biased" in labels and outcome not in entry.outcomes:
            p_values = [m.p_adjusted for m in entry.means if m.p_adjusted is not None]
            least = f" (smallest adjusted p = {min(p_values):.2g})" if p_values else " (nothing could be tested)"
            notes.append(
                f"Biased in {word} only, but no difference of means is significant at {level}{least}: one run came to "
                "lie on the other side of its threshold, which chance does; not called "
                f"{'a new bias' if word == 'B' else 'a cure'}."
            )
    changed = [s.name for s in entry.sizes if s.outcome == "other inputs"]
    if changed and entry.same_inputs is not False:
        notes.append(f"{', '.join(changed)} depend on the inputs alone, and differ.")
    return tuple(notes)


def summarise(found: Comparison) -> str:
    """The comparison in one sentence."""
    heads = [entry for entry in found.entries if entry.head is not None]
    number = plural(len(heads), "head")
    rest = f" {len(found.unmatched)} could not be compared." if found.unmatched else ""
    if found.identical:
        return f"Nothing changed: every figure of {number} is the same."
    counts = [(PHRASES[o], found.counts[o]) for o in ORDER if found.counts.get(o) and o != "relabelled"]
    if alone := found.counts.get("relabelled"):
        rest = f" Labels alone differ in {alone}: near a threshold chance does that.{rest}"
    if not counts:
        pooled = [o for e in found.entries if e.head is None for o in e.outcomes if o != "relabelled"]
        only = f" (all heads pooled: {', '.join(PHRASES[o] for o in dict.fromkeys(pooled))})" if pooled else ""
        return f"Nothing changed beyond chance in {number}{only}.{rest}"
    unchanged = sum(not set(entry.outcomes) - {"relabelled"} for entry in heads)
    same = f"; {unchanged} unchanged beyond chance" if unchanged else ""
    return f"Of {number}: {', '.join(f'{n} {words}' for words, n in counts)}{same}.{rest}"
