"""Two diagnoses (or captures, inspected first) in, a Comparison out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from os import PathLike, fspath
from typing import TYPE_CHECKING

from attn_diag.analyses.comparison.matching import HeadPlace, none_of
from attn_diag.analyses.comparison.matching import match as match_heads
from attn_diag.analyses.comparison.of_wrong import judged_where_wrong, untested_words
from attn_diag.analyses.comparison.read import read_diagnosis
from attn_diag.analyses.comparison.trends import find_trends, trend_words
from attn_diag.captures.files import CAPTURE_SUFFIXES
from attn_diag.captures.places import place
from attn_diag.errors import InputError
from attn_diag.results.comparison import Comparison, HeadComparison, MeanChange, MeanOutcome, Outcome, Side, SizeChange
from attn_diag.results.diagnosis import BiasEstimate, Diagnosis, HeadDiagnosis
from attn_diag.results.wording import head_name, plural, same
from attn_diag.statistics.means import PRIMARY, adjust, require_level
from attn_diag.statistics.sizes import Sizes, bonferroni_tail, size_changes
from attn_diag.statistics.welch import estimated, welch

if TYPE_CHECKING:
    from attn_diag.captures.capture import Capture
    from attn_diag.work import Progress


def diff(
    a: Diagnosis | Capture | str | PathLike[str],
    b: Diagnosis | Capture | str | PathLike[str],
    *,
    match: Sequence[str] = (),
    level: float = 0.01,
    device: str = "auto",
    progress: Progress | None = None,
) -> Comparison:
    """What became biased from A to B, what was cured, and what grew or shrank beyond chance.

    Args:
        a: A Diagnosis, a file with one (JSON or HTML report), or a Capture, a capture's file or a folder of captures,
            which are inspected first.
        b: The same of B.
        match: What heads are matched by, of layer, head, step, rank, batch and file, such as ("layer", "head") across
            steps; none: as fits best.
        level: Of the Benjamini-Hochberg family of all differences of means, of one false alarm among all sizes, and
            of an inspection.
        device: Where captures are inspected.
        progress: Called with (done, total) after every head that is inspected.

    Raises:
        InputError: Something cannot be read, the level lies outside (0, 1), or nothing of A is in B.
    """
    require_level(level)
    first, second = (as_diagnosis(side, level=level, device=device, progress=progress) for side in (a, b))
    return compare(first, second, level=level, sources=(source_of(a), source_of(b)), by=match)


def as_diagnosis(
    side: Diagnosis | Capture | str | PathLike[str],
    *,
    level: float,
    device: str,
    progress: Progress | None,
    skip: Callable[[InputError], None] | None = None,
    observation: str | None = None,
) -> Diagnosis:
    """A diagnosis as it is, read from its file, or made from captures; raises, or skips, as inspecting does.

    Captures none of which has the ``observation`` are not inspected first: raises InputError.
    """
    unreadable: list[InputError] = []
    if isinstance(side, Diagnosis):
        return side
    if isinstance(side, str | PathLike):
        path = place(side)
        if not path.is_dir() and path.suffix not in CAPTURE_SUFFIXES:
            return read_diagnosis(path)
        from attn_diag.captures.loading import find_captures, load_each

        captures, unreadable = load_each(find_captures([path]))
        for error in unreadable:
            if skip is None or not captures:
                raise error
            skip(error)
    else:
        captures = [side]
    if observation is not None and all(c.observations and observation not in c.observations for c in captures):
        raise none_of(observation, str(source_of(side)), [name for c in captures for name in c.observations])
    from attn_diag.analyses.inspection.inspect import inspect_captures

    said = [str(error) for error in unreadable]
    return inspect_captures(captures, level=level, device=device, progress=progress, unreadable=said, skip=skip)


def source_of(side: Diagnosis | Capture | str | PathLike[str]) -> str:
    """What a side is called in the report."""
    if isinstance(side, str | PathLike):
        return fspath(side)
    if not isinstance(side, Diagnosis):
        return side.source
    names = [capture.source for capture in side.captures]
    return names[0] if len(names) == 1 else f"{len(names)} captures"


def compare(
    a: Diagnosis,
    b: Diagnosis,
    *,
    level: float = 0.01,
    sources: tuple[str, str] = ("A", "B"),
    by: Sequence[str] = (),
) -> Comparison:
    """The comparison of two diagnoses; see ``diff``."""
    matched = match_heads(a, b, by)
    if not matched.pairs:
        listed = "; ".join(f"{u.side}: {u.what} ({u.reason})" for u in matched.unmatched[:4])
        raise InputError(
            f"nothing to compare: no head of {sources[0]} is in {sources[1]}, too"
            f"{f' ({listed})' if listed else ''}; captures are matched by file name or by layer, step and rank; "
            "--match layer,head matches across steps"
        )
    levels = a.family.level, b.family.level
    tested = [mean_changes(one.head, other.head, levels) for one, other in matched.pairs]
    changes = iter(judged([change for group in tested for change in group], level))
    means = [[next(changes) for _ in group] for group in tested]
    sizes = [(Sizes.of(one.head), Sizes.of(other.head)) for one, other in matched.pairs]
    tail, compared = bonferroni_tail(sizes, level)
    entries = tuple(
        _entry(one, other, found, size_changes(*pair, tail), level)
        for (one, other), found, pair in zip(matched.pairs, means, sizes, strict=True)
    )
    counts: Counter[Outcome] = Counter(o for e in entries if e.head is not None for o in e.outcomes)
    identical = all(_equal(entry) for entry in entries) and not matched.unmatched
    result = Comparison(
        a=_side(a, sources[0]),
        b=_side(b, sources[1]),
        level=level,
        family_size=sum(c.p_value is not None for group in means for c in group),
        matched_by=matched.how,
        entries=entries,
        unmatched=matched.unmatched,
        identical=identical,
        counts=dict(counts),
        summary="",
        trends=find_trends(matched.pairs, entries, level),
        notes=_notes(entries, compared, tail, level),
    )
    return replace(result, summary=summarise(result))


def _entry(
    a: HeadPlace, b: HeadPlace, means: Iterable[MeanChange], sizes: Iterable[SizeChange], level: float
) -> HeadComparison:
    assert a.head.verdict is not None
    assert b.head.verdict is not None
    entry = HeadComparison(
        # B's, whose labels, steps and captures the report names; another of A is a note.
        layer=b.head.layer,
        head=b.head.head,
        batch=b.head.batch,
        a_source=a.capture.source,
        b_source=b.capture.source,
        a_observation=a.observation.name,
        b_observation=b.observation.name,
        a_labels=a.head.verdict.labels,
        b_labels=b.head.verdict.labels,
        same_inputs=(same_input := same_inputs(a, b)),
        means=tuple(means),
        sizes=tuple(judged_where_wrong(sizes, a.head, b.head, same_inputs=same_input is True)),
        outcomes=(),
        a_step=a.step,
        b_step=b.step,
    )
    entry = replace(entry, outcomes=head_outcomes(entry))
    before = head_name(a.head.layer, a.head.head)
    other = () if before == head_name(b.head.layer, b.head.head) else (f"It is compared with {before} of A.",)
    return replace(entry, notes=other + head_notes(entry, level))


def _equal(entry: HeadComparison) -> bool:
    means = all(m.a == m.b or same(m.a, m.b) for m in entry.means)
    return means and entry.a_labels == entry.b_labels and all(same(s.a, s.b) for s in entry.sizes)


def _notes(entries: tuple[HeadComparison, ...], compared: int, tail: float, level: float) -> tuple[str, ...]:
    shared = sum(e.same_inputs is True for e in entries)
    notes = []
    if shared == len(entries):
        notes.append(
            "A and B ran on the same inputs, as far as their figures tell: errors are then paired and the tests, which "
            "take them as independent, conservative."
        )
    elif shared:
        notes.append(f"{shared} of {len(entries)} entries ran on the same inputs: their tests are conservative.")
    elif any(e.same_inputs is False for e in entries):
        notes.append(
            "A and B ran on different inputs: a change, of a size above all, may come from the inputs as well as from "
            "the kernel; compare on the same captures to tell."
        )
    if compared:
        notes.append(
            f"{compared} ratios of sizes are called changes only beyond bounds for chance: of factors over a "
            "well-rounded kernel's error from their own intervals, of the others, which have no standard error, from "
            f"the effective number of independent terms (F quantiles); tail {tail:.2g} each, together {level} for one "
            "false alarm."
        )
    return tuple(notes)


def _side(diagnosis: Diagnosis, source: str) -> Side:
    return Side(
        source=source,
        tool=diagnosis.tool,
        level=diagnosis.family.level,
        heads=sum(1 for _ in diagnosis.entries()),
        sentence=diagnosis.summary.sentence,
        unreadable=diagnosis.summary.unreadable,
    )


def mean_changes(a: HeadDiagnosis, b: HeadDiagnosis, levels: tuple[float, float]) -> list[MeanChange]:
    """The primary means of one head that A or B has, tested but not yet judged. ``levels``: of A's and B's own runs."""
    found = []
    for name in PRIMARY:
        one, other = getattr(a.bias, name), getattr(b.bias, name)
        if one is None and other is None:
            continue
        change = MeanChange(
            name=name,
            a=one.mean if one else None,
            b=other.mean if other else None,
            a_units=one.mean_ulp if one else None,
            b_units=other.mean_ulp if other else None,
            a_biased=_significant(one, levels[0]),
            b_biased=_significant(other, levels[1]),
        )
        first, second = estimated(one), estimated(other)
        if first is not None and second is not None:
            change = replace(change, **asdict(welch(first, second)), outcome="none")
        found.append(change)
    return found


def _significant(estimate: BiasEstimate | None, level: float) -> bool:
    return estimate is not None and estimate.p_adjusted is not None and estimate.p_adjusted <= level


def judged(changes: Sequence[MeanChange], level: float) -> list[MeanChange]:
    """The changes of the whole run with adjusted p-values and outcomes.

    Benjamini & Hochberg, J. R. Stat. Soc. B 57 (1995) 289, over all differences tested.
    """
    adjusted = zip(changes, adjust([c.p_value for c in changes]), strict=True)
    return [
        c if p is None else replace(c, p_adjusted=p, outcome=_outcome(c) if p <= level else "none") for c, p in adjusted
    ]


def _outcome(change: MeanChange) -> MeanOutcome:
    """What a significant difference means."""
    a, b = change.a or 0.0, change.b or 0.0
    if change.a_biased and change.b_biased:
        if a * b < 0:
            return "reversed"
        return "grew" if abs(b) > abs(a) else "shrank"
    if change.b_biased:
        return "became biased"
    return "cured" if change.a_biased else "moved"


_TOO_LARGE = {"nonfinite", "wrong", "lossy"}
_STATED = ("causal", "scale", "window", "softcap", "dtype")
# The worst first.
PHRASES: dict[Outcome, str] = {
    "became-biased": "became biased",
    "bias-reversed": "biased the other way",
    "bias-grew": "more biased than before",
    "bias-moved": "mean error moved",
    "grew": "with larger errors",
    "cured": "cured of bias",
    "bias-shrank": "less biased than before",
    "shrank": "with smaller errors",
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
    is significant. Errors grew (shrank) too where B (A) alone is wrong: no rounding makes that, however few rows carry
    it; beside a lossy head the label is a matter of a threshold. Where labels differ and nothing else does beyond
    chance, the head is "relabelled".
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
    found.update(s.outcome for s in entry.sizes if s.outcome in ("grew", "shrank"))
    if "wrong" in entry.gained and not _TOO_LARGE & {*entry.a_labels}:
        found.add("grew")
    if "wrong" in entry.lost and not _TOO_LARGE & {*entry.b_labels}:
        found.add("shrank")
    if not found and set(entry.a_labels) != set(entry.b_labels):
        found.add("relabelled")
    return tuple(outcome for outcome in PHRASES if outcome in found)


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
    untested = untested_words(heads)
    counts = [(words, found.counts[o]) for o, words in PHRASES.items() if found.counts.get(o) and o != "relabelled"]
    if alone := found.counts.get("relabelled"):
        rest = f" Labels alone differ in {alone}: near a threshold chance does that.{rest}"
    if not counts:
        pooled = [o for e in found.entries if e.head is None for o in e.outcomes if o != "relabelled"]
        only = f" (all heads pooled: {', '.join(PHRASES[o] for o in dict.fromkeys(pooled))})" if pooled else ""
        what = f"{untested} Nothing else changed" if untested else "Nothing changed"
        return f"{what} beyond chance in {number}{only}.{trend_words(found)}{rest}"
    rest = (f" {untested}" if untested else "") + rest
    unchanged = sum(not set(entry.outcomes) - {"relabelled"} for entry in heads)
    same = f"; {unchanged} unchanged beyond chance" if unchanged else ""
    return f"Of {number}: {', '.join(f'{n} {words}' for words, n in counts)}{same}.{trend_words(found)}{rest}"
