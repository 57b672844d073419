"""What heads share: findings grouped over layers, heads and steps, the gravest first.

A head belongs to the finding of its gravest label. Heads of one observation and kernel share a finding where label and
cause agree; the cause is a layer's, not a head's, as chance names it in some heads and not in others.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from attn_diag.results.base import Number
from attn_diag.results.estimates import Label
from attn_diag.results.heads import CaptureDiagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.quality import Quantity, QuantityVerdict
from attn_diag.results.wording import SYMBOLS

Entry = tuple[CaptureDiagnosis, ObservationDiagnosis, HeadDiagnosis]

Kind = Label | Literal["unjudged"]
"""The label of a finding; unjudged: the metadata of the capture do not fit its tensors."""

# The gravest first.
KINDS: tuple[Kind, ...] = (
    "nonfinite", "wrong", "unjudged", "lossy", "biased", "ill_conditioned", "undecided",
)  # fmt: skip
_FORWARD = ("o", "lse")


@dataclass(frozen=True)
class FindingPlace:
    """Layers in which a finding holds in the same heads at the same steps."""

    layers: tuple[int, ...]
    """The model's numbers of the layers; none where captures do not state them."""
    heads: tuple[int, ...]
    """The model's numbers of the heads in which it was found at any of the steps."""
    all_heads: bool
    """Whether these are all heads of the layers that were looked at, and more than one."""
    steps: tuple[int, ...]
    """The steps at which it was found, in order: the first is its onset; none where captures do not state them."""
    steps_looked: tuple[int, ...]
    """The steps at which these layers were looked at."""


@dataclass(frozen=True)
class FindingAtStep:
    """A finding at one step: the worst of its heads there."""

    step: int
    """The training step."""
    heads: int
    """Heads with the finding at this step."""
    of: int
    """Heads of its layers looked at there."""
    factor: Number | None
    """Largest factor over a well-rounded kernel's error; null: not compared."""
    dq_error: Number | None
    """Largest relative error of dQ, or of its prediction; null: unknown."""
    dw_q_error: Number | None
    """The same of dW_Q."""


@dataclass(frozen=True)
class WorstHead:
    """The head that shows a finding best, to look at closely."""

    source: str
    """The capture's file, or "memory"."""
    observation: str
    """The observation's name."""
    layer: int | None
    """The model's number of the layer; null: not stated."""
    head: int | None
    """The model's number of the head; null: all heads of the capture."""
    batch: int | None
    """The batch item, where one of several was looked at; null otherwise."""
    step: int | None
    """The training step; null: not stated."""


@dataclass(frozen=True)
class SharedFinding:
    """What was found in a group of heads that share it."""

    label: Kind
    """What it is: the gravest label of its heads."""
    also: tuple[Label, ...]
    """Labels that heads among them carry besides."""
    observations: tuple[str, ...]
    """The observations in which it was found; several only of heads that are fragile whatever kernel runs them."""
    captured: bool
    """Whether a kernel returned them; false: a recipe was run on the captured inputs."""
    kernel: str | None
    """The kernel that the captures state; null: none."""
    places: tuple[FindingPlace, ...]
    """Where, layers with the same heads and steps together, the earliest first."""
    ranks: tuple[str, ...]
    """The ranks in whose captures it was found, where several ranks have captures of their own; else none."""
    heads: int
    """Heads (a head at each step counts) with the finding."""
    of: int
    """Heads of the same observation and kernel that were looked at."""
    site: str | None
    """What the kernel's recipe, recognised by its bits, rounds more coarsely than published kernels; null: unknown."""
    quantities: tuple[Quantity, ...]
    """The captured quantities that have it, in the order of the computation."""
    factors: dict[Quantity, Number]
    """Of the worst head, how many times a well-rounded kernel's error each of them has, the largest first."""
    factor_ci95: tuple[Number, Number] | None
    """The 95 % interval of the first of these; null where there is none."""
    p_adjusted: Number | None
    """Smallest adjusted p-value of a mean's test among its heads; null: nothing was tested."""
    dq_error: Number | None
    """Largest relative error of dQ; where dQ was not captured, of its prediction from delta; null: unknown."""
    dq_error_well_rounded: Number | None
    """The relative error of a well-rounded kernel's dQ in the head of ``dq_error``; null: not compared."""
    dw_q_error: Number | None
    """Largest relative error of dW_Q, or of its prediction; null: unknown."""
    by_step: tuple[FindingAtStep, ...]
    """Step by step, where captures state steps: does it grow?"""
    worst: WorstHead
    """The head that shows it best."""
    words: str
    """Why, of that head, in words with numbers."""
    pattern: str | None = None
    """Of that head, where and how it is off, in words; null: no pattern was found."""

    @property
    def layers(self) -> tuple[int, ...]:
        """All its layers."""
        return tuple(sorted({layer for place in self.places for layer in place.layers}))

    @property
    def onset(self) -> int | None:
        """The first step at which it was found; None where captures do not state steps."""
        return min((place.steps[0] for place in self.places if place.steps), default=None)


def find(captures: Sequence[CaptureDiagnosis]) -> tuple[tuple[SharedFinding, ...], tuple[SharedFinding, ...]]:
    """The findings, captured ones first and then the gravest; and what stayed undecided, grouped alike."""
    judged = [
        (capture, observation, head)
        for capture in captures
        for observation in capture.observations
        for head in observation.heads
        if head.head is not None and head.verdict is not None
    ]
    found = [
        _finding(label, group, [e for e in judged if _maker(label, e) == maker])
        for (label, maker, *_), group in _by_cause(judged).items()
    ]
    found += _unjudged([c for c in captures if c.unjudged])
    found.sort(key=lambda f: (not f.captured, KINDS.index(f.label), -f.heads))
    sure = tuple(f for f in found if f.label != "undecided")
    return sure, tuple(f for f in found if f.label == "undecided")


def step_of(capture: CaptureDiagnosis) -> int | None:
    """The training step of a capture; None where it states none."""
    stated = capture.metadata.get("step", "")
    return int(stated) if stated.isdecimal() else None


def worst_label(head: HeadDiagnosis) -> Kind | None:
    """The gravest label of a head; None where it is clean or has no verdict."""
    labels = head.verdict.labels if head.verdict else ()
    return next((kind for kind in KINDS if kind in labels), None)


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


def _by_cause(judged: Sequence[Entry]) -> dict[tuple[Kind, object, object], list[Entry]]:
    """Entries by label, maker and cause, where the cause is that of all heads of a layer with this label."""
    by_layer: dict[tuple[Kind, object, int | None], list[Entry]] = {}
    for entry in judged:
        if (label := worst_label(entry[2])) is not None:
            by_layer.setdefault((label, _maker(label, entry), entry[2].layer), []).append(entry)
    found: dict[tuple[Kind, object, object], list[Entry]] = {}
    for (label, maker, _), group in by_layer.items():
        found.setdefault((label, maker, _cause(label, group)), []).extend(group)
    return found


def _cause(label: Kind, group: Sequence[Entry]) -> object:
    """What tells the causes of two layers apart: the recipe's coarse sites, or which outputs are off, and how."""
    if label not in ("nonfinite", "wrong", "lossy"):
        return None
    if label == "lossy" and (site := _site(group)) is not None:
        return site
    off = [q for _, _, head in group for q in _answered(head, label)]
    kinds = Counter(p.kind for q in off for p in q.patterns[:1])
    forward = any(q.quantity in _FORWARD for q in off)
    return forward, kinds.most_common(1)[0][0] if kinds and label == "wrong" else None


def _site(group: Sequence[Entry]) -> str | None:
    named = Counter(observation.coarse for _, observation, _ in group if observation.coarse is not None)
    return named.most_common(1)[0][0] if named else None


def _answered(head: HeadDiagnosis, label: Kind) -> list[QuantityVerdict]:
    return [q for q in head.quantities if q.answer == label]


def _errors(head: HeadDiagnosis, gradient: Literal["dq", "dw_q"]) -> float | None:
    error = getattr(head.propagation, gradient)
    if error is None:
        return None
    found: float | None = error.predicted_relative_error if error.relative_error is None else error.relative_error
    return found


def _factor(head: HeadDiagnosis) -> float | None:
    return _largest(q.factor for q in head.quantities)


def _largest(values: Iterable[float | None]) -> float | None:
    """NaN counts as larger than all numbers."""
    known = [v for v in values if v is not None]
    return max(known, key=lambda v: math.inf if math.isnan(v) else v, default=None)


def _smallest_p(head: HeadDiagnosis) -> float | None:
    estimates = (head.bias.delta, head.bias.delta_excess, head.bias.o_excess, head.bias.o_away_excess)
    return min((e.p_adjusted for e in estimates if e is not None and e.p_adjusted is not None), default=None)


def _weight(label: Kind, head: HeadDiagnosis) -> float:
    """By which heads of one label are ranked."""
    if label == "biased":
        return -(1.0 if (p := _smallest_p(head)) is None else p)
    size = _factor(head) if label in ("lossy", "undecided") else None
    size = _errors(head, "dq") if size is None else size
    return math.inf if size is None or math.isnan(size) else size


def _finding(label: Kind, group: Sequence[Entry], looked: Sequence[Entry]) -> SharedFinding:
    """One finding of ``group``; ``looked``: every entry of the same maker."""
    source, observation, head = max(group, key=lambda e: _weight(label, e[2]))
    _, kernel, captured = _maker(label, group[0])
    off = [q for _, _, h in group for q in _answered(h, label)]
    order: tuple[Quantity, ...] = ("o", "lse", "delta", "dq", "dk", "dv", "dw_q")
    own = sorted(_answered(head, label), key=lambda q: -(q.factor or 0.0))
    carried = {name for _, _, h in group if h.verdict for name in h.verdict.labels}
    furthest = max(group, key=lambda e: _errors(e[2], "dq") or 0.0)[2]
    dq = next((q for q in furthest.quantities if q.quantity == "dq"), None)
    ranks = {c.metadata["rank"] for c, _, _ in group if "rank" in c.metadata}
    several = len({c.metadata.get("rank") for c, _, _ in looked}) > 1
    assert head.verdict is not None
    return SharedFinding(
        label=label,
        also=tuple(k for k in KINDS if k != label and k != "unjudged" and k in carried),
        observations=tuple(dict.fromkeys(o.name for _, o, _ in group)),
        captured=captured,
        kernel=kernel,
        places=_places(group, looked),
        ranks=tuple(sorted(ranks, key=lambda r: (len(r), r))) if several else (),
        heads=len(group),
        of=len(looked),
        site=_site(group) if label in ("lossy", "biased") else None,
        quantities=tuple(name for name in order if any(q.quantity == name for q in off)),
        factors={q.quantity: q.factor for q in own if q.factor is not None},
        factor_ci95=own[0].factor_ci95 if own else None,
        p_adjusted=min((p for _, _, h in group if (p := _smallest_p(h)) is not None), default=None),
        dq_error=_largest(_errors(h, "dq") for _, _, h in group),
        dq_error_well_rounded=None if dq is None else dq.relative_error_well_rounded,
        dw_q_error=_largest(_errors(h, "dw_q") for _, _, h in group),
        by_step=_by_step(group, looked),
        worst=WorstHead(
            source=source.source,
            observation=observation.name,
            layer=head.layer,
            head=head.head,
            batch=head.batch if source.shape["B"] > 1 else None,
            step=step_of(source),
        ),
        words=next(iter(head.verdict.reasons), ""),
        pattern=next((f"{SYMBOLS[q.quantity]}: {p.words}" for q in own for p in q.patterns[:1]), None),
    )


def _numbers(values: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(sorted({v for v in values if v is not None}))


def _places(group: Sequence[Entry], looked: Sequence[Entry]) -> tuple[FindingPlace, ...]:
    alike: dict[tuple[object, ...], FindingPlace] = {}
    by_layer: dict[int | None, list[Entry]] = {}
    for entry in group:
        by_layer.setdefault(entry[2].layer, []).append(entry)
    for layer, found in sorted(by_layer.items(), key=lambda item: -1 if item[0] is None else item[0]):
        there = [e for e in looked if e[2].layer == layer]
        heads = _numbers(h.head for _, _, h in found)
        place = FindingPlace(
            layers=() if layer is None else (layer,),
            heads=heads,
            all_heads=len(heads) > 1 and heads == _numbers(h.head for _, _, h in there),
            steps=_numbers(step_of(c) for c, _, _ in found),
            steps_looked=_numbers(step_of(c) for c, _, _ in there),
        )
        key = (layer is None, place.all_heads or heads, place.steps, place.steps_looked)
        same = alike.get(key)
        alike[key] = place if same is None else replace(same, layers=same.layers + place.layers)
    return tuple(sorted(alike.values(), key=lambda p: (p.steps[:1], p.layers)))


def _by_step(group: Sequence[Entry], looked: Sequence[Entry]) -> tuple[FindingAtStep, ...]:
    """Every step at which the layers of a finding were looked at."""
    layers = {head.layer for _, _, head in group}
    there = [(step_of(c), h) for c, _, h in looked if h.layer in layers]
    members = {id(h) for _, _, h in group}
    found = []
    for step in _numbers(step for step, _ in there):
        heads = [h for s, h in there if s == step]
        found.append(
            FindingAtStep(
                step=step,
                heads=sum(id(h) in members for h in heads),
                of=len(heads),
                factor=_largest(map(_factor, heads)),
                dq_error=_largest(_errors(h, "dq") for h in heads),
                dw_q_error=_largest(_errors(h, "dw_q") for h in heads),
            )
        )
    return tuple(found)


def _unjudged(captures: Sequence[CaptureDiagnosis]) -> list[SharedFinding]:
    """Captures of which nothing is said, those together that other metadata fit alike."""
    alike: dict[tuple[str | None, ...], list[CaptureDiagnosis]] = {}
    for capture in captures:
        alike.setdefault(tuple(sorted({c.better or "" for c in capture.assumptions.checks})), []).append(capture)
    found = []
    for group in alike.values():
        entries = [
            (c, observation, head)
            for c in group
            for observation in c.observations
            for head in observation.heads
            if head.head is not None
        ]
        first, steps = group[0], _numbers(map(step_of, group))
        layers = _numbers(h.layer for _, _, h in entries)
        heads = _numbers(h.head for _, _, h in entries)
        layer = layers[0] if layers else None
        found.append(
            SharedFinding(
                label="unjudged",
                also=(),
                observations=tuple(o.name for o in first.observations),
                captured=True,
                kernel=first.metadata.get("kernel"),
                places=(FindingPlace(layers, heads, len(heads) > 1, steps, steps),),
                ranks=(),
                heads=len(entries),
                of=len(entries),
                site=None,
                quantities=(),
                factors={},
                factor_ci95=None,
                p_adjusted=None,
                dq_error=None,
                dq_error_well_rounded=None,
                dw_q_error=None,
                by_step=(),
                worst=WorstHead(first.source, "", layer, None, None, step_of(first)),
                words=first.assumptions.message,
            )
        )
    return found
