"""``identify`` for several captures, observations and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attn_diag.analyses.identification.identify import identify
from attn_diag.captures.capture import Capture
from attn_diag.captures.selection import Selection, select_heads, select_observations
from attn_diag.errors import InputError
from attn_diag.results.identification import Identification, Identifications
from attn_diag.work import Progress, part_of


def identify_captures(
    captures: Iterable[Capture],
    *,
    selection: Selection | None = None,
    rows: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    unreadable: Sequence[str] = (),
    skip: Callable[[InputError], None] | None = None,
) -> Identifications:
    """Identify every observation of every capture, from its first head and sequence unless others are selected.

    ``rows`` and ``device`` as in ``identify``. ``unreadable``: complaints about captures that could not be opened.
    ``skip`` is called with what cannot be identified where there is more; without it, that is raised.
    ``progress(done, total)`` counts hundredths of an observation.

    Raises InputError where nothing can be identified, and as ``identify`` does.
    """
    chosen, skipped = list(captures), list(unreadable)
    jobs: list[tuple[Capture, str, int, int]] = []
    errors: list[InputError] = []
    for capture in chosen:
        try:
            jobs += _jobs(capture, selection or Selection())
        except InputError as error:
            errors.append(error)
    results: list[Identification] = []
    for number, (capture, observation, batch, head) in enumerate(jobs):
        part = part_of(progress, number, len(jobs))
        try:
            found = identify(capture, observation, batch=batch, head=head, device=device, rows=rows, progress=part)
            results.append(found)
        except InputError as error:
            errors.append(error)
    if errors and (skip is None or not results):
        raise errors[0]
    for problem in errors:
        if skip is not None:
            skip(problem)
        skipped.append(str(problem))
    return Identifications(tuple(results), tuple(skipped))


def _jobs(capture: Capture, selection: Selection) -> list[tuple[Capture, str, int, int]]:
    observations = select_observations(capture, selection.observation)
    if not observations:
        raise InputError(f"{capture.source}: no observation; capture at least o, the kernel's output")
    heads, batches = select_heads(capture, selection)
    heads = heads if selection.heads is not None else heads[:1]
    batches = batches if selection.batches is not None else batches[:1]
    # ``identify`` takes the model's numbers.
    offset = capture.metadata.head_offset
    return [(capture, o, b, h + offset) for o in observations for b in batches for h in heads]
