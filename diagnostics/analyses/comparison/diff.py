"""Two diagnoses (or captures, inspected first) in, a Comparison out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING

from attn_diag.analyses.comparison.matching import HeadPlace, match
from attn_diag.analyses.comparison.means import judged, mean_changes
from attn_diag.analyses.comparison.outcome import head_notes, head_outcomes, same_inputs, summarise
from attn_diag.analyses.comparison.read import read_diagnosis
from attn_diag.captures.files import CAPTURE_SUFFIXES
from attn_diag.errors import InputError
from attn_diag.results.comparison import Comparison, HeadComparison, MeanChange, Outcome, Side, SizeChange
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.statistics.sizes import Sizes, bonferroni_tail, same, size_changes

if TYPE_CHECKING:
    from attn_diag.captures.capture import Capture
    from attn_diag.work import Progress


def diff(
    a: Diagnosis | Capture | str | PathLike[str],
    b: Diagnosis | Capture | str | PathLike[str],
    *,
    level: float = 0.01,
    device: str = "auto",
    progress: Progress | None = None,
) -> Comparison:
    """What became biased from A to B, what was cured, and what grew or shrank beyond chance.

    ``a``, ``b``: a Diagnosis, a file with one (JSON or HTML report), or a Capture, a capture's file or a folder of
    captures, which are inspected first, at ``level`` and on ``device``. ``level``: of the Benjamini-Hochberg family of
    all differences of means, and of one false alarm among all sizes. ``progress(done, total)`` after every head that
    is inspected.

    Raises InputError for what cannot be read, for a level outside (0, 1), and where nothing of A is in B.
    """
    require_level(level)
    first, second = (as_diagnosis(side, level=level, device=device, progress=progress) for side in (a, b))
    return compare(first, second, level=level, sources=(source_of(a), source_of(b)))


def require_level(level: float) -> None:
    """Raise InputError unless ``level`` is a significance level."""
    if not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, got {level}; 0.01 is usual")


def as_diagnosis(
    side: Diagnosis | Capture | str | PathLike[str],
    *,
    level: float = 0.01,
    device: str = "auto",
    progress: Progress | None = None,
) -> Diagnosis:
    """A diagnosis as it is, read from its file, or made from captures. Raises InputError as ``diff`` says."""
    if isinstance(side, Diagnosis):
        return side
    if isinstance(side, str | PathLike):
        path = Path(fspath(side))
        if not path.is_dir() and path.suffix not in CAPTURE_SUFFIXES:
            return read_diagnosis(path)
        from attn_diag.captures.loading import find_captures, load

        captures = [load(found) for found in find_captures([path])]
    else:
        captures = [side]
    from attn_diag.analyses.inspection.inspect import inspect_captures

    return inspect_captures(captures, level=level, device=device, progress=progress)


def source_of(side: Diagnosis | Capture | str | PathLike[str]) -> str:
    """What a side is called in the report."""
    if isinstance(side, str | PathLike):
        return fspath(side)
    if not isinstance(side, Diagnosis):
        return side.source
    names = [capture.source for capture in side.captures]
    return names[0] if len(names) == 1 else f"{len(names)} captures"


def compare(a: Diagnosis, b: Diagnosis, *, level: float = 0.01, sources: tuple[str, str] = ("A", "B")) -> Comparison:
    """The comparison of two diagnoses; see ``diff``."""
    matched = match(a, b)
    if not matched.pairs:
        listed = "; ".join(f"{u.side}: {u.what} ({u.reason})" for u in matched.unmatched[:4])
        raise InputError(
            f"nothing to compare: no head of {sources[0]} is in {sources[1]}, too"
            f"{f' ({listed})' if listed else ''}; captures are matched by file name or by layer, step and rank"
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
        notes=_notes(entries, compared, tail, level),
    )
    return replace(result, summary=summarise(result))


def _entry(
    a: HeadPlace, b: HeadPlace, means: Iterable[MeanChange], sizes: Iterable[SizeChange], level: float
) -> HeadComparison:
    assert a.head.verdict is not None
    assert b.head.verdict is not None
    entry = HeadComparison(
        layer=a.head.layer,
        head=a.head.head,
        batch=a.head.batch,
        a_source=a.capture.source,
        b_source=b.capture.source,
        a_observation=a.observation.name,
        b_observation=b.observation.name,
        a_labels=a.head.verdict.labels,
        b_labels=b.head.verdict.labels,
        same_inputs=same_inputs(a, b),
        means=tuple(means),
        sizes=tuple(sizes),
        outcomes=(),
    )
    entry = replace(entry, outcomes=head_outcomes(entry))
    return replace(entry, notes=head_notes(entry, level))


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
            f"Sizes have no standard error: {compared} ratios are called changes only beyond bounds derived from the "
            f"effective number of independent terms (F quantiles, tail {tail:.2g} each: together {level} for one false "
            "alarm)."
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
