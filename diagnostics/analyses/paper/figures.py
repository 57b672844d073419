"""The face: captures in, the paper's figures out. Two passes, one capture in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.analyses.microscopy.microscope import microscope
from attn_diag.analyses.paper.atoms import StepRecord, figure_4, shares
from attn_diag.analyses.paper.norms import NormSeries
from attn_diag.analyses.paper.rows import FeatureProductSums, head_rows
from attn_diag.analyses.paper.survey import HeadAtStep, HeadKey, Survey, choose
from attn_diag.captures.capture import Capture
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.captures.selection import Selection
from attn_diag.errors import InputError
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.head.projection import find_projection
from attn_diag.results.paper import (
    FIGURES,
    Atoms,
    DeltaRows,
    DeltaSteps,
    FeatureProducts,
    HeadDrift,
    PaperFigures,
    PrefixError,
    TriggerCounts,
    Triggers,
)
from attn_diag.statistics.sums import accumulate
from attn_diag.work import Progress, silent


def paper_figures(
    captures: Capture | Iterable[Capture],
    *,
    layer: int | None = None,
    head: int | None = None,
    observation: str | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> PaperFigures:
    """The figures of Qiu & Yao (arXiv 2510.04212) from captures: of one step, or of several steps of one run.

    Steps come from the captures' metadata: all captures of the head chosen, of its run, taken as independent batches.

    Args:
        captures: Read one at a time: those opened from files need the memory of one step, plus [D, C] numbers for
            each. Captures of several ranks of one call become one.
        layer, head, observation: What to look at (the model's numbers); None: the worst head over all captures, layers
            and observations, by verdict, then dQ's error, where each capture is a Benjamini-Hochberg family of its own.
        device: auto, cpu or cuda.
        progress: Called with (done, total) captures, each looked at once or twice.

    Returns:
        The figures; those that cannot be drawn are None, with the reason in ``missing``.

    Raises:
        InputError: No capture is of that layer, head or observation, or none's metadata describe its outputs.
    """
    given = [captures] if isinstance(captures, Capture) else list(captures)
    where = pick_device(device)
    merged, said = merged_over_ranks(given)
    of_layer = [c for c in merged if layer is None or c.metadata.layer == layer]
    if not of_layer:
        known = sorted({c.metadata.layer for c in merged if c.metadata.layer is not None})
        raise InputError(f"no capture states layer {layer}; they state {', '.join(map(str, known)) or 'none'}")
    work = _Work(of_layer, head, observation, device, where, progress)
    return work.run(list(said), asked=head is not None)


class _Work:
    """Both passes over the captures."""

    def __init__(
        self,
        captures: list[Capture],
        head: int | None,
        observation: str | None,
        device: str,
        where: torch.device,
        progress: Progress | None,
    ) -> None:
        self.captures, self.device, self.where = captures, device, where
        self.heads = None if head is None else frozenset({head})
        self.observation = observation
        self._tell = progress or silent
        self.survey, self.norms, self.skipped = Survey(), NormSeries(), list[str]()
        self.missing: dict[str, str] = {}

    def run(self, notes: list[str], *, asked: bool) -> PaperFigures:
        self._survey()
        used = len({entry.capture for entry in self.survey.entries})
        chosen = choose(self.survey, captures=used, asked=asked)
        worst = self.survey.worst()
        entries = self.survey.series(worst)
        if apart := len(self.survey.of(worst.key)) - len(entries):
            notes.append(f"{apart} more captures of this head are left out: without a step they make no series")
        left = used - len({e.capture for e in self.survey.entries if e.key.run == chosen.run})
        if left:
            notes.append(f"{left} captures of other runs are left out: steps of one run alone make a series")
        if len(set(chosen.steps)) < len(chosen.steps):
            notes.append("some steps have several captures; each counts as a batch of its own")
        atoms, features = self._details(entries, worst)
        figures = {
            "spectral_norms": self.norms.result(chosen),
            "atoms": atoms,
            "delta_rows": self._delta_rows(),
            "delta_steps": self._delta_steps(entries),
            "features": features,
            "prefix": self._prefix(worst, features),
            "triggers": self._triggers(entries, worst),
        }
        if figures["spectral_norms"] is None:
            self.missing["spectral_norms"] = "no w_q was captured"
        assert all((figures[name] is None) == (name in self.missing) for name in FIGURES)
        return PaperFigures(
            chosen=chosen,
            captures=used,
            tool=describe_tool(self.where),
            missing={name: self.missing[name] for name in FIGURES if name in self.missing},
            notes=(*notes, *self.skipped, *self.survey.refused),
            **figures,  # type: ignore[arg-type]
        )

    def _survey(self) -> None:
        selection = Selection(self.observation, self.heads)
        for number, capture in enumerate(self.captures):
            try:
                found = inspect_captures([capture], selection=selection, device=self.device, merge_ranks=False)
            except InputError as error:
                if len(self.captures) == 1:
                    raise
                self.skipped.append(str(error))
            else:
                self.survey.add(number, capture, found)
                self.norms.add(capture, self.heads, self.where)
            self._tell(number + 1, 2 * len(self.captures))
        if self.skipped and not self.survey.entries and not self.survey.refused:
            raise InputError(self.skipped[0])

    def _details(self, entries: list[HeadAtStep], worst: HeadAtStep) -> tuple[Atoms | None, FeatureProducts | None]:
        """Figures 4 and 5b-c: the second pass, over the captures of the chosen head."""
        reason = None
        if worst.emulated:
            reason = "no kernel's outputs were captured"
        elif worst.head.bias.delta is None:
            reason = "dO or O was not captured, so that delta's error is not known"
        if reason is not None:
            self.missing |= dict.fromkeys(("atoms", "features"), reason)
            return None, None
        records: list[StepRecord] = []
        features, of_step, note = FeatureProductSums(), StepRecord(None), None
        for done, entry in enumerate(entries, 1):
            capture = self.captures[entry.capture]
            head = entry.key.head - capture.metadata.head_offset
            projection = find_projection(capture, range(capture.batch), [head], self.where)
            record = StepRecord(entry.step)
            show, sample = shares(len(entries), capture.batch)
            for rows in head_rows(capture, entry.key.observation, head, projection, self.where):
                record.add(rows, show=show, sample=sample if entry is worst else 0)
                if entry is worst:
                    features.add(rows)
            records.append(record)
            if entry is worst:
                of_step, note = record, projection.note
            self._tell(len(self.captures) + done, len(self.captures) + len(entries))
        found = features.result(worst.step)
        if found is None:
            self.missing["features"] = "O was not captured"
        if not of_step.shown:
            self.missing["atoms"] = "no row is finite"
            return None, found
        return figure_4(records, of_step, [entry.head.propagation.dw_q for entry in entries], note), found

    def _delta_rows(self) -> DeltaRows | None:
        assert self.survey.worst_drift is not None
        worst, delta = self.survey.worst_drift
        if delta is None or delta.drift_band99 is None:
            self.missing["delta_rows"] = "dO or O was not captured, so that delta's error is not known"
            return None
        rows, sums = zip(*((p["row"], p["sum"]) for p in delta.drift), strict=True)
        return DeltaRows(worst.step, rows, sums, delta.drift_band99, bool(delta.drift_outside))

    def _delta_steps(self, entries: list[HeadAtStep]) -> DeltaSteps | None:
        if too_few := _too_few(entries):
            self.missing["delta_steps"] = too_few
            return None
        total = accumulate([e.head.bias.delta for e in entries])
        if total is None:
            self.missing["delta_steps"] = "delta's mean error and its standard error are not known at every step"
            return None
        return DeltaSteps(
            steps=tuple(e.step for e in entries if e.step is not None),
            total=total,
            excess=accumulate([e.head.bias.delta_excess for e in entries]),
            heads=tuple(self._drifts(entries[0].key)),
        )

    def _drifts(self, like: HeadKey) -> Iterator[HeadDrift]:
        """Every head of the same run and observation that has steps, in order."""
        keys = {e.key for e in self.survey.entries if (e.key.run, e.key.observation) == (like.run, like.observation)}
        for key in sorted(keys, key=lambda key: (-1 if key.layer is None else key.layer, key.head)):
            stepped = [e for e in self.survey.of(key) if e.step is not None]
            found = None if _too_few(stepped) else accumulate([e.head.bias.delta for e in stepped])
            if found is not None and found.band99:
                yield HeadDrift(key.layer, key.head, max(found.sums, key=abs) / found.band99)

    def _prefix(self, worst: HeadAtStep, features: FeatureProducts | None) -> PrefixError | None:
        """The element that makes most of delta's error in the worst row; without one, where O's error is largest."""
        capture = self.captures[worst.capture]
        row, feature, batch = None, None, 0
        if features is not None:
            row, batch = features.row, features.batch
            feature = max(range(len(features.product)), key=lambda i: abs(features.product[i]))
        try:
            found = microscope(
                capture, row=row, feature=feature, batch=batch, head=worst.key.head,
                observation=None if worst.emulated else worst.key.observation, device=self.device, whole_head=False,
            )  # fmt: skip
        except InputError as error:
            self.missing["prefix"] = str(error)
            return None
        return PrefixError(
            step=worst.step,
            batch=found.batch,
            row=found.row,
            feature=found.feature,
            recipe=found.recipe,
            recipe_reason=found.recipe_reason,
            as_observed=None if found.observed is None else found.observed == found.walked,
            format=found.curve.format,
            keys=found.curve.keys,
            unit_keys=found.curve.unit_keys,
            positions=tuple(p.position for p in found.curve.points),
            error=tuple(p.error for p in found.curve.points),
            rounding_error=tuple(p.rounding_error for p in found.curve.points),
            unit=tuple(p.unit for p in found.curve.points),
        )

    def _triggers(self, entries: list[HeadAtStep], worst: HeadAtStep) -> Triggers | None:
        if too_few := _too_few(entries):
            self.missing["triggers"] = too_few
            return None
        # By capture: several of one step are points of their own, as in the other figures.
        of_layer: dict[int, list[HeadAtStep]] = {}
        for entry in self.survey.of_layer(worst.key):
            of_layer.setdefault(entry.capture, []).append(entry)
        return Triggers(
            steps=tuple(e.step for e in entries if e.step is not None),
            head=_counts([[e] for e in entries]),
            layer=_counts([of_layer[e.capture] for e in entries]),
        )


def _too_few(entries: list[HeadAtStep]) -> str | None:
    """Why there is no figure over steps; None where there is."""
    steps = [e.step for e in entries if e.step is not None]
    if any(a != b for a, b in pairwise(steps)):
        return None
    stated = f"step {steps[0]} alone" if steps else "no step"
    return f"needs two steps or more of one head; the captures of this one state {stated}"


def _counts(by_step: list[list[HeadAtStep]]) -> TriggerCounts:
    def count(definition: str) -> tuple[int, ...]:
        return tuple(sum(getattr(e.head.row_maxima, definition).rows for e in found) for found in by_step)

    rows = tuple(sum(e.head.rows_all for e in found) for found in by_step)
    return TriggerCounts(rows, count("exact"), count("window"), count("unit"))
