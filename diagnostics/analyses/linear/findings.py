"""What heads of linear attention share, and the run in one sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from attn_diag.reference import format_of
from attn_diag.results.diagnosis import LABELS, Label
from attn_diag.results.linear import (
    LinearDiagnosedCapture,
    LinearFinding,
    LinearHead,
    LinearObservation,
    LinearQuantity,
)
from attn_diag.results.quality import Answer
from attn_diag.results.wording import LINEAR_SYMBOLS, chance, percent, plural, ranges, together
from attn_diag.statistics.means import adjust

_Key = tuple[str, str, Label, str | None]
# A mean that is smaller beside the error's size is stated and called no bias, however sure it is: a released kernel
# (flash-linear-attention's RWKV-7 on an H200) has one beyond a fiftieth, and the yardstick is not calibrated on those.
_MATTERS = 0.25
# So many zeros are no accident.
_ZEROS = 8


def adjusted(found: Sequence[LinearDiagnosedCapture], level: float) -> tuple[list[LinearDiagnosedCapture], int]:
    """The p-values of all means adjusted together, and heads with a mean beyond chance labelled.

    Args:
        found: With p-values as they were tested.
        level: Significance.

    Returns:
        The captures, and how many tests there were.
    """
    quantities = [q for c in found for o in c.observations for h in o.heads for q in h.quantities]
    p_values = adjust([q.p_adjusted for q in quantities])
    new = iter(p_values)

    def of_head(head: LinearHead) -> LinearHead:
        own = tuple(replace(q, p_adjusted=next(new)) for q in head.quantities)
        biased = [
            q for q in own
            if q.p_adjusted is not None and q.p_adjusted < level
            # Beside a well-rounded kernel's error where the kernel has less.
            and abs(q.mean_away or 0.0) * min(1.0, q.factor or 1.0) > _MATTERS
            and q.answer in ("good", "undecided", "lossy")
        ]  # fmt: skip
        if not biased:
            return replace(head, quantities=own)
        labels = {*head.labels, "biased"} - {"clean"}
        said = [
            f"{LINEAR_SYMBOLS.get(q.quantity, q.quantity)} is {'away from' if (q.mean_away or 0) > 0 else 'towards'} "
            f"zero in the mean, by {percent(abs(q.mean_away or 0))} of its error's size ({chance(q.p_adjusted)})."
            for q in biased
        ]
        order = tuple(label for label in LABELS if label in labels)
        return replace(head, quantities=own, labels=order, reasons=(*head.reasons, *said))

    def of_observation(o: LinearObservation) -> LinearObservation:
        return replace(o, heads=tuple(map(of_head, o.heads)))

    captures = [replace(c, observations=tuple(map(of_observation, c.observations))) for c in found]
    return captures, sum(p is not None for p in p_values)


def findings_of(found: Sequence[LinearDiagnosedCapture]) -> tuple[LinearFinding, ...]:
    """Heads with one label and cause together, the gravest first."""
    grouped: dict[_Key, list[LinearHead]] = {}
    places: dict[_Key, tuple[LinearDiagnosedCapture, LinearObservation]] = {}
    for capture in found:
        for observation in capture.observations:
            for head in observation.heads:
                label: Label = head.labels[0]
                if label == "clean":
                    continue
                cause = next((q.cause for q in head.quantities if q.answer == label and q.cause), None)
                key: _Key = capture.source, observation.name, label, cause
                grouped.setdefault(key, []).append(head)
                places[key] = capture, observation
    made = []
    for key, heads in grouped.items():
        capture, observation = places[key]
        label = key[2]
        worst = max(heads, key=lambda h: max((q.factor or 0.0 for q in h.quantities if q.answer == label), default=0.0))
        named = [q.quantity for h in heads for q in h.quantities if q.answer == label]
        if label == "biased":
            named = [
                q.quantity for h in heads for q in h.quantities if q.p_adjusted is not None and q.p_adjusted < 0.05
            ]
        reasons = [r for r in worst.reasons if label != "biased" or " in the mean, " in r]
        layer, step = (capture.metadata.get(name) for name in ("layer", "step"))
        made.append(
            LinearFinding(
                label,
                capture.source,
                observation.name,
                None if layer is None else int(layer),
                None if step is None else int(step),
                tuple(h.head for h in heads),
                len(observation.heads),
                tuple(dict.fromkeys(named)),
                key[3],
                reasons[0] if reasons else "",
            )
        )
    return tuple(sorted(made, key=lambda f: LABELS.index(f.label)))


def sentence_of(findings: Sequence[LinearFinding], found: Sequence[LinearDiagnosedCapture]) -> str:
    """The run in one sentence."""
    count = sum(len(o.heads) for c in found for o in c.observations)
    real = [f for f in findings if f.label != "undecided"]
    if not findings:
        return f"{plural(count, 'head')}: the mathematics, and as good as a well-rounded kernel."
    if not real:
        return f"{plural(count, 'head')}: nothing found; what was captured does not decide all."
    first = real[0]
    names = together([LINEAR_SYMBOLS.get(q, q) for q in first.quantities]) if first.quantities else "the inputs"
    heads = f"head{'s' if len(first.heads) > 1 else ''} {ranges(first.heads)}"
    return f"{first.label}: {names} of {heads} ({plural(count, 'head')} looked at). {first.words}"


def capital(text: str) -> str:
    """A quantity's name at the start of a sentence."""
    return text[:1].upper() + text[1:] if text.startswith("the ") else text


def all_zero(name: str, symbol: str, observed: Tensor, true: Tensor, sound: Sequence[Tensor]) -> LinearQuantity | None:
    """The answer where all numbers are zero and should not be: however small they are, no rounding makes that."""
    least = 2.0 ** format_of(observed.dtype).min_exponent
    if observed.any() or int((true.abs() >= least).sum()) < _ZEROS or not all(bool(x.any()) for x in sound):
        return None
    words = f"{symbol} is 100 % off, which no rounding makes: it is zero, which explains 100 % of the squared error."
    return replace(stated(name, "wrong", words), relative_error=1.0, cause="zero", explained=1.0)


def stated(name: str, answer: Answer, words: str) -> LinearQuantity:
    """An answer without figures."""
    return LinearQuantity(name, answer, words, None, None, None, None, None, None, None, None)
