"""Findings from judged heads: which of them share one, where, since when, and how bad it is at the worst.

A head belongs to the finding of its gravest label. Heads of one observation and kernel share a finding where label and
cause agree; the cause is a layer's, not a head's, as chance names it in some heads and not in others. Heads that get
worse over the steps are one finding too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from attn_diag.results.estimates import Label
from attn_diag.results.finding_places import Entry, numbers, other_ranks, places_of, ranks_of, step_of
from attn_diag.results.findings import KINDS, FindingAtStep, FindingPlace, Kind, OtherCause, SharedFinding, WorstHead
from attn_diag.results.heads import CaptureDiagnosis, HeadDiagnosis
from attn_diag.results.quality import BEYOND_FORMAT, Quantity, QuantityVerdict, is_explained, right_beside
from attn_diag.results.wording import SYMBOLS, together

_FORWARD = ("o", "lse")
_MEANS: tuple[Literal["delta", "delta_excess", "o_away_excess", "o_excess"], ...] = (
    "delta", "delta_excess", "o_away_excess", "o_excess",
)  # fmt: skip
# Kinds of patterns that say where a quantity is off, or that it follows from another, and not how it came about.
_PLACES = ("off", "unrelated", "elements", "factors", "rows", "keys", "features", "forward", BEYOND_FORMAT)
# Labels that one fault has one after the other, as it grows.
_GROWING: tuple[Kind, ...] = ("wrong", "lossy", "biased")


def find(captures: Sequence[CaptureDiagnosis]) -> tuple[tuple[SharedFinding, ...], tuple[SharedFinding, ...]]:
    """The findings, captured ones first and then the gravest; and what stayed undecided, grouped alike."""
    judged = [
        (capture, observation, head)
        for capture in captures
        for observation in capture.observations
        for head in observation.heads
        if head.head is not None and head.verdict is not None
    ]
    found = []
    for (label, group), earlier in _grown(_by_cause(judged)):
        captured = _maker(label, group[0])[2]
        names = {observation.name for _, observation, _ in group}
        looked = [e for e in judged if e[1].name in names and bool(e[1].outputs) == captured]
        found.append(_finding(label, group, earlier, looked))
    found += _unjudged(captures)
    found.sort(key=lambda f: (not f.captured, KINDS.index(f.label), -f.heads))
    sure = tuple(f for f in found if f.label != "undecided")
    return sure, tuple(f for f in found if f.label == "undecided")


def worst_label(head: HeadDiagnosis) -> Kind | None:
    """The gravest label of a head; None where it is clean or has no verdict."""
    labels = head.verdict.labels if head.verdict else ()
    return next((kind for kind in KINDS if kind in labels), None)


def _gravest(head: HeadDiagnosis) -> Kind | None:
    return "unjudged" if head.verdict is None else worst_label(head)


def _maker(label: Kind, entry: Entry) -> tuple[str, str | None, bool]:
    """The observation, its kernel, and whether it was captured; which of these matters not to a fragile head."""
    capture, observation, _ = entry
    captured = bool(observation.outputs)
    if not captured:
        return observation.name, None, captured
    return (
        ("", None, captured)
        if label == "ill_conditioned"
        else (observation.name, capture.metadata.get("kernel"), captured)
    )


def _by_cause(judged: Sequence[Entry]) -> list[tuple[Kind, list[Entry]]]:
    """Entries by label, maker and cause, where the cause is that of all heads of a layer with this label."""
    by_layer: dict[tuple[Kind, object, int | None], list[Entry]] = {}
    for entry in judged:
        if (label := worst_label(entry[2])) is not None:
            by_layer.setdefault((label, _maker(label, entry), entry[2].layer), []).append(entry)
    found: dict[tuple[Kind, object, object], list[Entry]] = {}
    for (label, maker, _), group in by_layer.items():
        found.setdefault((label, maker, _cause(label, group)), []).extend(group)
    return [(label, group) for (label, *_), group in found.items()]


def _grown(groups: list[tuple[Kind, list[Entry]]]) -> list[tuple[tuple[Kind, list[Entry]], list[Entry]]]:
    """The groups without those that became graver ones: each with what it was at other steps."""
    left, found = sorted(groups, key=lambda group: KINDS.index(group[0])), []
    while left:
        label, group = left.pop(0)
        earlier: list[Entry] = []
        if label in _GROWING and all(step_of(c) is not None for c, _, _ in group):
            heads = {(_maker(label, e), e[2].layer, e[2].head) for e in group}
            grew = [
                other
                for other in left
                if other[0] in _GROWING and {(_maker(label, e), e[2].layer, e[2].head) for e in other[1]} <= heads
            ]
            left = [other for other in left if other not in grew]
            earlier = [entry for _, entries in grew for entry in entries]
        found.append(((label, group), earlier))
    return found


def _cause(label: Kind, group: Sequence[Entry]) -> object:
    """What tells the causes of two layers apart: the recipe's coarse sites, or which outputs are off, and how."""
    if label not in ("nonfinite", "wrong", "lossy"):
        return None
    if label == "lossy" and (site := _site(group)) is not None:
        return site
    off = [q for _, _, head in group for q in head.answered(label)]
    kinds = Counter(p.kind for q in off for p in q.patterns[:1])
    forward = any(q.quantity in _FORWARD for q in off)
    return forward, kinds.most_common(1)[0][0] if kinds and label == "wrong" else None


def _site(group: Sequence[Entry]) -> str | None:
    # Names of sites are one word; what O's bits show of a head are several.
    shown = [q.site for _, _, h in group for q in h.answered("lossy") if q.quantity == "o" and q.site is not None]
    known = [o.coarse for _, o, _ in group if o.coarse is not None] or [site for site in shown if " " in site]
    if known:
        return Counter(known).most_common(1)[0][0]
    if {q.site for _, _, head in group for q in head.answered("lossy")} != {"gradient_accumulator"}:
        return None
    names = {q.quantity for _, _, head in group for q in head.quantities if q.site == "gradient_accumulator"}
    return f"the sums of {together([SYMBOLS[n] for n in ('dq', 'dk', 'dv') if n in names])} in the inputs' format"


def _errors(head: HeadDiagnosis, gradient: Literal["dq", "dw_q"]) -> float | None:
    if (error := head.propagation.dq if gradient == "dq" else head.propagation.dw_q) is None:
        return None
    return error.predicted_relative_error if error.relative_error is None else error.relative_error


def _factor(head: HeadDiagnosis) -> float | None:
    return _largest(q.factor for q in head.quantities)


def _largest(values: Iterable[float | None]) -> float | None:
    """NaN counts as larger than all numbers."""
    known = [v for v in values if v is not None]
    return max(known, key=lambda v: math.inf if math.isnan(v) else v, default=None)


def _smallest_p(head: HeadDiagnosis) -> float | None:
    return None if (name := _furthest_mean(head)) is None else getattr(head.bias, name).p_adjusted


def _furthest_mean(head: HeadDiagnosis) -> Literal["delta", "delta_excess", "o_away_excess", "o_excess"] | None:
    """The mean whose error is furthest beyond chance; None where none was tested."""
    tested = [name for name in _MEANS if (e := getattr(head.bias, name)) is not None and e.p_adjusted is not None]
    estimates = {name: getattr(head.bias, name) for name in tested}
    return min(tested, key=lambda name: (estimates[name].p_adjusted, estimates[name].p_value), default=None)


def _weight(label: Kind, head: HeadDiagnosis) -> float:
    """By which heads of one label are ranked."""
    if label == "biased":
        return -(1.0 if (p := _smallest_p(head)) is None else p)
    sizes = [_factor(head), _errors(head, "dq")]
    known = [size for size in (sizes if label in ("lossy", "undecided") else sizes[::-1]) if size is not None]
    size = known[0] if known else None
    return math.inf if size is None or math.isnan(size) else size


def _finding(label: Kind, group: Sequence[Entry], earlier: Sequence[Entry], looked: Sequence[Entry]) -> SharedFinding:
    """One finding of ``group``; ``earlier``: what led to it; ``looked``: every entry of its observations."""
    source, observation, head = max(group, key=lambda e: _weight(label, e[2]))
    _, kernel, captured = _maker(label, group[0])
    off = [q for _, _, h in group for q in h.answered(label)]
    order: tuple[Quantity, ...] = ("o", "lse", "delta", "dq", "dk", "dv", "dkv", "dsinks", "dmask", "dw_q")
    own = _gravest_first(label, head)
    carried = {name for _, _, h in group if h.verdict for name in h.verdict.labels}
    furthest = max(group, key=lambda e: _errors(e[2], "dq") or 0.0)[2]
    dq = next((q for q in furthest.quantities if q.quantity == "dq"), None)
    mean = _furthest_mean(head) if label == "biased" or "biased" in carried else None
    gradients = [h.propagation.dq for _, _, h in group if h.propagation.dq is not None]
    observed = any(dq.relative_error is not None for dq in gradients)
    assert head.verdict is not None
    site = _site(group) if label in ("lossy", "biased") else None
    if any(p.formats for q in own for p in q.patterns[:1]) and all(q.site is None for q in own):
        site = None  # other heads'
    patterns = [(q, p) for q in own for p in q.patterns[:1] if site is None or p.kind != "rounding"]
    words, cause = next(((f"{SYMBOLS[q.quantity]}: {p.words}", p) for q, p in patterns), (None, None))
    alike, others = _causes(label, group, head)
    ranks = ranks_of(label, group, looked)
    return SharedFinding(
        label=label,
        also=tuple(k for k in KINDS if k != label and k not in ("unjudged", "undecided") and k in carried),
        observations=tuple(dict.fromkeys(o.name for _, o, _ in group)),
        captured=captured,
        kernel=kernel,
        places=places_of(group, looked),
        ranks=ranks,
        heads=len(group),
        of=sum(_maker(label, e) == _maker(label, group[0]) for e in looked),
        site=site,
        quantities=tuple(name for name in order if any(q.quantity == name for q in off)),
        right=right_beside(head.quantities),
        factors={q.quantity: q.factor for q in own if q.factor is not None},
        factor_ci95=own[0].factor_ci95 if own else None,
        p_adjusted=min((p for _, _, h in group if (p := _smallest_p(h)) is not None), default=None),
        dq_error=_largest(_errors(h, "dq") for _, _, h in group),
        dq_error_well_rounded=None if dq is None else dq.relative_error_well_rounded,
        declared=next((q.declared for q in head.quantities if q.declared is not None), None),
        dw_q_error=_largest(_errors(h, "dw_q") for _, _, h in group),
        gradients="observed" if observed else "predicted" if gradients else None,
        biased_mean=mean,
        biased_by=None if mean is None else getattr(head.bias, mean).mean_ulp,
        earlier=_first_steps(earlier, [step for c, _, _ in group if (step := step_of(c)) is not None]),
        by_step=_by_step([*group, *earlier], looked),
        worst=WorstHead(
            source=source.source,
            observation=observation.name,
            layer=head.layer,
            head=head.head,
            batch=head.batch if source.shape["B"] > 1 else None,
            step=step_of(source),
        ),
        words=_why(label, own, head.verdict.reasons),
        pattern=words,
        cause=cause,
        otherwise=others,
        unexplained=tuple(
            q.quantity for q in own if cause and cause.formats and label == "wrong" and not is_explained(q)
        ),
        alike=alike,
        typical_factor_ci95=own[0].typical_factor_ci95 if own else None,
        other_ranks=other_ranks(ranks, group, looked),
        carrier=_carrier(head) if label == "ill_conditioned" else None,
        errors={
            name: error
            for name in order
            if (error := _largest(q.relative_error for q in off if q.quantity == name)) is not None
        },
    )


def _gravest_first(label: Kind, head: HeadDiagnosis) -> list[QuantityVerdict]:
    """The quantities of a head with a label; of wrong ones first those of which a cause is known."""
    wrong = label == "wrong"
    return sorted(
        head.answered(label),
        key=lambda q: (wrong and all(p.kind in _PLACES for p in q.patterns[:1]), -(q.factor or 0.0)),
    )


def _causes(label: Kind, group: Sequence[Entry], worst: HeadDiagnosis) -> tuple[int | None, tuple[OtherCause, ...]]:
    """How many heads show the worst head's cause; and what those show whose cause is known, and another."""
    if label not in ("wrong", "lossy"):
        return None, ()
    found = dict[object, list[tuple[HeadDiagnosis, QuantityVerdict]]]()
    for _, _, head in group:
        if (shown := _own_cause(label, head)) is not None:
            found.setdefault(shown[0], []).append((head, shown[1]))
    own = _own_cause(label, worst)
    alike = None if own is None else len(found.pop(own[0]))
    told = []
    for heads in sorted(found.values(), key=len, reverse=True):
        head, quantity = max(heads, key=lambda one: _weight(label, one[0]))
        told.append(OtherCause(len(heads), head.layer, head.head, quantity.words))
    return alike, tuple(told)


def _own_cause(label: Kind, head: HeadDiagnosis) -> tuple[object, QuantityVerdict] | None:
    """What tells a head's cause from others', and the quantity that shows it; None: it is not known."""
    for quantity in _gravest_first(label, head):
        if label == "lossy" and quantity.site is not None:
            return quantity.site, quantity
        for pattern in quantity.patterns[:1]:
            if pattern.kind not in _PLACES:
                return (pattern.kind, pattern.kernel, *sorted(pattern.formats.items())), quantity
    return None


def _carrier(head: HeadDiagnosis) -> str | None:
    """The part that carries most of dQ's error; that of delta where dQ was not captured, and is predicted from it."""
    dq = head.propagation.dq
    shares = {} if dq is None or dq.shares is None else {n: s for n, s in dq.shares.items() if s is not None}
    if not shares:
        return None if dq is None or dq.relative_error is not None else "delta"
    return max(shares, key=lambda name: shares[name])


def _why(label: Kind, off: Sequence[QuantityVerdict], reasons: Sequence[str]) -> str:
    """The reason for a label: of the quantity that is furthest off, of a mean's test, or the first."""
    if off and label != "undecided":
        return off[0].words
    tested = (said for said in reasons if label == "biased" and said.startswith("Mean error of"))
    return next(tested, next(iter(reasons), ""))


def _first_steps(entries: Sequence[Entry], graver: Sequence[int]) -> dict[Label, int]:
    """The first step of each label, where it is before all ``graver`` ones: else nothing grew."""
    first: dict[Label, int] = {}
    for capture, _, head in entries:
        step, label = step_of(capture), worst_label(head)
        if step is not None and label is not None and label != "unjudged":
            first[label] = min(step, first.get(label, step))
    return {label: step for label, step in first.items() if step < min(graver)}


def _by_step(group: Sequence[Entry], looked: Sequence[Entry]) -> tuple[FindingAtStep, ...]:
    """Every step at which the layers of a finding were looked at."""
    layers = {head.layer for _, _, head in group}
    there = [(step_of(c), h) for c, _, h in looked if h.layer in layers]
    members = {id(h) for _, _, h in group}
    found = []
    for step in numbers(step for step, _ in there):
        heads = [h for s, h in there if s == step]
        own = [h for h in heads if id(h) in members]
        found.append(
            FindingAtStep(
                step=step,
                label=min(filter(None, map(_gravest, own)), key=KINDS.index, default=None),
                heads=len(own),
                of=len(heads),
                factor=_largest(map(_factor, own or heads)),
                dq_error=_largest(_errors(h, "dq") for h in own or heads),
                dw_q_error=_largest(_errors(h, "dw_q") for h in own or heads),
            )
        )
    return tuple(found)


def _unjudged(captures: Sequence[CaptureDiagnosis]) -> list[SharedFinding]:
    """Captures of which nothing is said, those together that other metadata fit alike."""
    alike: dict[tuple[str | None, ...], list[CaptureDiagnosis]] = {}
    for capture in captures:
        if capture.unjudged:
            alike.setdefault(tuple(sorted({c.better or "" for c in capture.assumptions.checks})), []).append(capture)
    looked = _heads_of(captures)
    found = []
    for group in alike.values():
        entries, first = _heads_of(group), group[0]
        places = places_of(entries, looked)
        layer = places[0].layers[0] if places and places[0].layers else None
        found.append(
            SharedFinding(
                label="unjudged",
                also=(),
                observations=tuple(o.name for o in first.observations),
                captured=True,
                kernel=first.metadata.get("kernel"),
                places=places or (FindingPlace((), (), False, (), ()),),
                ranks=(),
                heads=len(entries),
                of=len(entries),
                site=None,
                quantities=(),
                right=(),
                factors={},
                factor_ci95=None,
                p_adjusted=None,
                dq_error=None,
                dq_error_well_rounded=None,
                dw_q_error=None,
                gradients=None,
                biased_mean=None,
                biased_by=None,
                earlier={},
                by_step=_by_step(entries, looked),
                worst=WorstHead(first.source, "", layer, None, None, step_of(first)),
                words=first.assumptions.message,
            )
        )
    return found


def _heads_of(captures: Sequence[CaptureDiagnosis]) -> list[Entry]:
    return [
        (capture, observation, head)
        for capture in captures
        for observation in capture.observations
        for head in observation.heads
        if head.head is not None
    ]
