"""The worst heads of a diagnosis taken apart: each rounding site's part, and one element of O followed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import TypeVar

from attn_diag.analyses.attribution.attribute import attribute_heads, notes_of
from attn_diag.analyses.inspection.capture_job import CaptureJob
from attn_diag.analyses.inspection.ranks import Ranks
from attn_diag.analyses.microscopy.closed_form import of_open_head
from attn_diag.analyses.microscopy.microscope import look, most_of_delta
from attn_diag.captures.sources import INPUTS
from attn_diag.errors import InputError
from attn_diag.head.baseline import observation_with_o
from attn_diag.head.open import OpenCapture, OpenHead
from attn_diag.kernels import Recipe
from attn_diag.results.attribution import HeadAttribution
from attn_diag.results.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, ObservationDiagnosis
from attn_diag.results.microscope import Microscope
from attn_diag.work import Progress

_Found = TypeVar("_Found")


def with_details(
    diagnosis: Diagnosis, jobs: Mapping[int, CaptureJob], count: int, ranks: Ranks, progress: Progress | None = None
) -> Diagnosis:
    """``diagnosis`` with ``attribution`` and ``microscope`` of its ``count`` worst heads (those ranked first).

    Args:
        diagnosis: The diagnosis of all ranks; what cannot be taken apart says why in ``details_note``.
        jobs: This rank's, by the place of their captures in it.
        count: How many heads.
        ranks: The processes that each take their own heads apart.
        progress: Called with (done, total) heads of this rank.
    """
    worst = [(id(observation), head) for _, observation, head in diagnosis.ranked()[:count]]
    places = {place for place, _ in worst}
    mine = {place: job for place, job in jobs.items() if places & {*map(id, diagnosis.captures[place].observations)}}
    own = {id(observation) for place in mine for observation in diagnosis.captures[place].observations}
    done, total = 0, sum(place in own for place, _ in worst)

    def of_observation(job: CaptureJob, observation: ObservationDiagnosis) -> ObservationDiagnosis:
        nonlocal done
        chosen = [head for place, head in worst if place == id(observation)]
        opened, name, recipe = _explained(job, observation.name)
        if name is not None and recipe is None:
            opened.identify_ahead(name, [_place(job, head) for head in chosen])
        detailed: dict[int, HeadDiagnosis] = {}
        for head in chosen:
            detailed[id(head)] = _detailed(job, observation, head, diagnosis.family.level)
            done += 1
            if progress is not None:
                progress(done, total)
        return replace(observation, heads=tuple(detailed.get(id(head), head) for head in observation.heads))

    def of_capture(job: CaptureJob, capture: CaptureDiagnosis) -> CaptureDiagnosis:
        return replace(capture, observations=tuple(of_observation(job, o) for o in capture.observations))

    found = [(place, of_capture(job, diagnosis.captures[place])) for place, job in mine.items()]
    detailed = dict(chain.from_iterable(ranks.gather(found)))
    captures = tuple(detailed.get(place, capture) for place, capture in enumerate(diagnosis.captures))
    return replace(diagnosis, captures=captures)


def _detailed(job: CaptureJob, observation: ObservationDiagnosis, head: HeadDiagnosis, level: float) -> HeadDiagnosis:
    """One head of one observation, taken apart in the sequence of its worst row."""
    top = head.top_rows[0] if head.top_rows else None
    batch, index = _place(job, head)
    opened, name, recipe = _explained(job, observation.name)
    place = opened.only(batch, index)

    def open_head() -> OpenHead:
        seen = observation_with_o(opened.capture, name)
        return place.open_head(seen, recipe, batch, index, measured=job.truths.get((batch, index)))

    def shares(read: OpenHead) -> HeadAttribution:
        (found,) = attribute_heads([read], level, notes_of(place))
        return found if job.capture.batch > 1 else replace(found, batch=None)

    def element(read: OpenHead) -> Microscope:
        subject = of_open_head(read)
        if top is None:
            return look(subject, None, None)
        feature = most_of_delta(subject, top.row)
        return look(subject, top.row, feature, chosen="adds most to delta's error, in the row where that is largest")

    read, refusal = _attempt(open_head)
    attribution, no_attribution = (None, refusal) if read is None else _attempt(partial(shares, read))
    microscope, no_microscope = (None, refusal) if read is None else _attempt(partial(element, read))
    notes = {"no attribution": no_attribution, "no microscope": no_microscope}
    if no_attribution == no_microscope:
        notes = {"neither attribution nor microscope": no_attribution}
    said = [f"{what}: {why}" for what, why in notes.items() if why is not None]
    if observation.name in job.recipes and not observation.emulated:
        said.append("attribution and microscope follow the recipe's emulation, not what the kernels returned")
    return replace(head, attribution=attribution, microscope=microscope, details_note="; ".join(said) or None)


def _place(job: CaptureJob, head: HeadDiagnosis) -> tuple[int, int]:
    """The sequence of its worst row, and its index in the capture."""
    assert head.head is not None
    batch = head.top_rows[0].batch if head.top_rows else job.batches[0]
    return batch, head.head - job.capture.metadata.head_offset


def _attempt(work: Callable[[], _Found]) -> tuple[_Found | None, str | None]:
    """What ``work`` finds, or why it refuses."""
    try:
        return work(), None
    except InputError as error:
        return None, str(error)


def _explained(job: CaptureJob, name: str) -> tuple[OpenCapture, str | None, str | Recipe | None]:
    """The capture, observation and recipe that explain an observation: its own where they are known."""
    if (run := job.recipes.get(name)) is not None:
        # Without what kernels returned, the emulation's own O is explained.
        inputs = {n: tensor for n, tensor in job.capture.tensors.items() if n in INPUTS}
        return OpenCapture(replace(job.capture, tensors=inputs), job.device, job.batches, job.heads), None, run
    known = job.recognised.get(name)
    # A recipe that was recognised, not given, is recognised again on the head itself.
    return job.opened, name, known.recipe if known is not None and known.agreement is None else None
