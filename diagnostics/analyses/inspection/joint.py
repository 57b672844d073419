"""Heads of one or several captures, recognised and measured together: on a GPU many take about as long as few."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Generic, Protocol, TypeVar

import torch

from attn_diag.analyses.inspection.groups import (
    GroupMeasurement,
    HeadGroup,
    jobs_at_once,
    jobs_recognised,
    key_heads_at_once,
    made_at_once,
)
from attn_diag.analyses.inspection.pooled_errors import PooledErrors, Tested, tests
from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.head.baseline import Recognised
from attn_diag.head.by_kernels import recognise_by_kernels, worth_kernels
from attn_diag.head.certification import Certify
from attn_diag.head.key_gradients import KeyHead, key_gradients
from attn_diag.head.measure import measure_heads
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.head.open import OpenCapture
from attn_diag.head.output_fit import FitSubject, out_fits
from attn_diag.head.read import HeadTensors
from attn_diag.head.shared import SharedRows
from attn_diag.head.shown_ways import ShownWays
from attn_diag.head.streaming import StreamedHead
from attn_diag.kernels import Recipe
from attn_diag.results.diagnosis import Assumptions

# One of several captures cannot be read, or changes while it is, or together they need memory that each alone does not.
_OF_ONE_CAPTURE = (InputError, OSError, torch.OutOfMemoryError)


class Job(Protocol):
    """A ``CaptureJob``, as far as its heads are measured here."""

    capture: Capture
    opened: OpenCapture
    device: torch.device
    certify: Certify | None
    captured: list[str]
    recipes: dict[str, Recipe]
    declared: Recipe | None
    heads: list[int]
    batches: list[int]
    shared: dict[int, dict[int, SharedRows]]
    first: tuple[int, int]
    shown: ShownWays
    recognised: dict[str, Recognised]
    assumptions: Assumptions
    ahead: list[GroupMeasurement] | None
    level: float
    tested: dict[str, list[Tested]]

    def begin(self) -> None: ...  # noqa: D102 - described there, as the rest
    def measure(self) -> Iterable[int]: ...  # noqa: D102
    def errors(self) -> dict[str, list[PooledErrors]]: ...  # noqa: D102
    def pool(self) -> None: ...  # noqa: D102
    def release(self) -> None: ...  # noqa: D102
    def groups(self) -> list[HeadGroup]: ...  # noqa: D102
    def open_head(self, result: GroupMeasurement, head: int, tensors: HeadTensors) -> StreamedHead: ...  # noqa: D102
    def complete(  # noqa: D102
        self, result: GroupMeasurement, measured: Iterator[tuple[StreamedHead, list[HeadMeasurement]]]
    ) -> dict[str, KeyHead]: ...


_Job = TypeVar("_Job", bound=Job)


def measured(work: Sequence[tuple[Job, Sequence[HeadGroup]]]) -> list[list[GroupMeasurement]]:
    """Some groups of heads of captures that are alike, or of one: every observation of them."""
    with ExitStack() as showing:
        for job, groups in work:
            if any((group.batch, head) == job.first for group in groups for head in group.heads):
                showing.enter_context(job.shown.shown_here())
        return _measured(work)


def _measured(work: Sequence[tuple[Job, Sequence[HeadGroup]]]) -> list[list[GroupMeasurement]]:
    results = [[GroupMeasurement(group) for group in groups] for _, groups in work]
    every = [(job, result) for (job, _), of_job in zip(work, results, strict=True) for result in of_job]
    heads = [(job, result, head) for job, result in every for head in result.group.heads]
    shared = [job.shared.get(head, {}).get(result.group.batch) for job, result, head in heads]
    first = work[0][0]

    def open_heads(which: slice) -> list[StreamedHead]:
        places: dict[Job, list[tuple[int, int]]] = {}
        for job, result, head in heads[which]:
            places.setdefault(job, []).append((result.group.batch, head))
        tensors = {
            job: job.opened.tensors or HeadTensors(job.capture, of_job, job.device) for job, of_job in places.items()
        }
        return [job.open_head(result, head, tensors[job]) for job, result, head in heads[which]]

    def measure(passes: Sequence[StreamedHead], which: slice) -> list[list[HeadMeasurement]]:
        places = [(result.group.batch, head) for _, result, head in heads[which]]
        return measure_heads(passes, places, first.certify, shared[which])

    found = made_at_once(len(heads), open_heads, measure, first.capture, first.device)
    pending: list[tuple[GroupMeasurement, str, KeyHead]] = []
    for job, result in every:
        pending += [(result, *of_name) for of_name in job.complete(result, found).items()]
        if sum(len(head.terms) for _, _, head in pending) >= key_heads_at_once(job.capture, job.device):
            _judge_keys(pending)
            pending = []
    _judge_keys(pending)
    return results


def _judge_keys(pending: Sequence[tuple[GroupMeasurement, str, KeyHead]]) -> None:
    """Judge the gradients of some key heads, each of an observation of a group."""
    gradients = key_gradients([head for _, _, head in pending])
    for (result, name, _), found in zip(pending, gradients, strict=True):
        result.key_sums[name] = found


def alike(jobs: Sequence[_Job]) -> Iterator[list[_Job]]:
    """Captures that follow each other and may be recognised together, as many as fit; others alone."""
    some: list[_Job] = []
    for job in jobs:
        kind = _shape_of(job)
        full = len(some) >= jobs_recognised(job.capture, job.device)
        if some and (kind is None or kind != _shape_of(some[0]) or full):
            yield some
            some = []
        some.append(job)
    if some:
        yield some


def recognise_ahead(jobs: Sequence[Job]) -> None:
    """Recognise the kernels of captures that are ``alike`` by running the published ones, where that is sooner.

    What is not recognised so is looked for as each capture is begun.
    """
    places = [
        (job, (job.capture, name, job.batches[0], job.heads[0]))
        for job in jobs
        for name in job.captured
        if name not in job.recognised
    ]
    if not worth_kernels([place for _, place in places], jobs[0].device):
        return
    try:
        # Of captures that are measured together all is read that they need.
        together = len(jobs) <= jobs_at_once(jobs[0].capture, jobs[0].device)
        known = [job.opened.tensors if together else None for job, _ in places]
        found = recognise_by_kernels([place for _, place in places], jobs[0].device, known)
    except _OF_ONE_CAPTURE:
        return
    for (job, (_, name, batch, head)), looked_at in zip(places, found, strict=True):
        if looked_at.settled:
            job.opened.take_recognised(name, batch, head, looked_at.recognised)


def check_ahead(jobs: Sequence[Job]) -> None:
    """Compare O of captures that are ``alike`` with what their metadata make it, in the rows that are looked at."""
    asked = [(job, name) for job in jobs for name in job.captured if "o" in job.capture.observations[name]]
    if len(jobs) < 2:
        return
    try:
        found = out_fits([FitSubject(job.capture, name, job.opened.tensors) for job, name in asked], jobs[0].device)
    except _OF_ONE_CAPTURE:
        return
    for (job, name), fit in zip(asked, found, strict=True):
        job.opened.take_fit(name, fit)


def measure_ahead(jobs: Sequence[Job]) -> None:
    """Measure captures that are ``alike``, and begun, together where their recipes are the same too.

    Where one of them cannot be read, or memory does not suffice, each is measured by itself later.
    """
    by_recipe: dict[object, list[Job]] = {}
    for job in jobs:
        recipes = tuple((name, found.recipe) for name, found in job.recognised.items())
        by_recipe.setdefault((recipes, job.assumptions.refused), []).append(job)
    for some in by_recipe.values():
        if len(some) < 2:
            continue
        try:
            found = measured([(job, job.groups()) for job in some])
        except _OF_ONE_CAPTURE:
            continue
        for job, results in zip(some, found, strict=True):
            job.ahead = results


def test_ahead(jobs: Sequence[Job]) -> None:
    """Test the means of captures that are ``alike``, and measured, side by side."""
    if len(jobs) < 2:
        return
    errors = [job.errors() for job in jobs]
    found = iter(tests([one for of_job in errors for several in of_job.values() for one in several], jobs[0].level))
    for job, of_job in zip(jobs, errors, strict=True):
        job.tested = {name: list(islice(found, len(several))) for name, several in of_job.items()}


@dataclass
class Inspected(Generic[_Job]):
    """What became of some captures that are alike."""

    ran: list[_Job] = field(default_factory=list)
    """Those that could be inspected."""
    failed: list[tuple[_Job, Exception]] = field(default_factory=list)
    """The others, and why."""
    told: list[str] = field(default_factory=list)
    """What the report is to say besides."""


def run_alike(jobs: Sequence[_Job], alone: bool, done: Callable[[int], None]) -> Inspected[_Job]:
    """Begin, measure and pool captures that are ``alike``, together as far as they can be.

    Args:
        jobs: The captures.
        alone: Whether a failure of one ends all.
        done: Told how many heads were done since the last time.
    """
    found = Inspected[_Job]()

    def usable(job: _Job, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:
            if alone:
                raise
            found.failed.append((job, error))
            return False
        return True

    def ahead(work: Callable[[Sequence[_Job]], None], some: Sequence[_Job]) -> None:
        """What each of them can do without; told of where the program fails."""
        try:
            work(some)
        except Exception as error:
            if alone:
                raise
            what = f"{type(error).__name__}: {error}"
            source = some[0].capture.source
            found.told.append(f"{source} and those like it were taken one by one: internal error ({what})")

    def measure(job: _Job) -> None:
        for count in job.measure():
            done(count)

    def pool(job: _Job) -> None:
        job.pool()
        job.release()

    ahead(recognise_ahead, jobs)
    step = jobs_at_once(jobs[0].capture, jobs[0].device)
    for start in range(0, len(jobs), step):
        some = jobs[start : start + step]
        ahead(check_ahead, some)
        ready = [job for job in some if usable(job, job.begin)]
        ahead(measure_ahead, ready)
        pending = [job for job in ready if usable(job, partial(measure, job))]
        ahead(test_ahead, pending)
        found.ran += [job for job in pending if usable(job, partial(pool, job))]
    return found


def _shape_of(job: Job) -> object | None:
    """What captures agree in whose heads are alike; None: others are not, whatever they hold."""
    c, m = job.capture, job.capture.metadata
    if not c.is_plain or job.recipes or job.declared is not None:
        return None
    tensors = tuple(sorted((name, tuple(t.shape), str(t.dtype)) for name, t in c.tensors.items()))
    how = m.layout, m.causal, m.window, m.softcap, c.scale, m.lse_base, m.softmax_offset, m.lse_sink, m.dropout_p
    return tensors, how, tuple(job.captured), tuple(job.heads), tuple(job.batches)
