"""``attribute`` of many captures: each by itself, and all their heads beside each other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from attn_diag.analyses.attribution.attribute import attribute
from attn_diag.analyses.several import answered
from attn_diag.captures.capture import Capture
from attn_diag.captures.given import require_captures
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.captures.selection import Selection, select_heads
from attn_diag.errors import InputError
from attn_diag.kernels import Recipe
from attn_diag.results.attribution import Attribution
from attn_diag.results.attributions import Attributions, side_by_side
from attn_diag.results.wording import runs_of
from attn_diag.work import Progress


def attribute_captures(
    captures: Iterable[Capture],
    *,
    recipe: str | Recipe | None = None,
    selection: Selection | None = None,
    level: float = 0.01,
    device: str = "auto",
    progress: Progress | None = None,
    unreadable: Sequence[str] = (),
    skip: Callable[[InputError], None] | None = None,
) -> Attributions:
    """Attribute every capture, one after the other, and say which layers, heads and sites carry the error of a step.

    Args:
        captures: The captures, such as all layers of a step, or of several steps; those of several ranks become one
            with all their batch items (``merged_over_ranks``).
        recipe, selection, level, device: As in ``attribute``.
        progress: Called with (done, total) heads; of one capture alone as ``attribute`` calls it.
        unreadable: Complaints about captures that could not be opened.
        skip: Called with what cannot be attributed where there is more: captures, and single heads of one; without it,
            that is raised.

    Returns:
        The captures' answers, and the heads beside each other (``maps``).

    Raises:
        InputError: Nothing can be attributed, and as ``attribute`` does.
    """
    chosen, told = merged_over_ranks(require_captures(captures, "attribute"))
    counts = [_heads(capture, selection) for capture in chosen]
    of = partial(attribute, recipe=recipe, level=level, device=device)
    in_part = list[InputError]()

    def attributed(numbered: tuple[int, Capture]) -> Attribution:
        number, capture = numbered
        part = _counted(progress, sum(counts[:number]), counts[number], sum(counts)) if len(chosen) > 1 else progress
        try:
            return of(capture, selection=selection, progress=part)
        except InputError as error:
            if skip is None or counts[number] < 2:
                raise
            found, problem = _by_head(capture, selection or Selection(), of, error)
            in_part.append(problem)
            return found

    results, said = answered(enumerate(chosen), attributed, skip)
    for problem in in_part:
        assert skip is not None
        skip(problem)
    said += map(str, in_part)
    unstated = [one for one in chosen if one.metadata.layer is None]
    if len(unstated) > 1:
        told = [*told, f"{len(unstated)} captures do not state their layer: each is taken for a layer of its own"]
    return Attributions(tuple(results), side_by_side(results), (*unreadable, *said), tuple(told))


def _by_head(
    capture: Capture, selection: Selection, of: Callable[..., Attribution], error: InputError
) -> tuple[Attribution, InputError]:
    """Those heads of a capture that can be attributed alone, and why others cannot.

    Args:
        capture: A capture that cannot be attributed in whole.
        selection: What of it was asked for.
        of: Attributes a ``selection`` of a capture.
        error: Why it cannot be; raised again if that holds of every head.
    """
    numbers = [head + capture.metadata.head_offset for head in select_heads(capture, selection)[0]]
    found, left_out = list[Attribution](), dict[int, InputError]()
    for number in numbers:
        try:
            found.append(of(capture, selection=replace(selection, heads=frozenset({number}))))
        except InputError as problem:
            left_out[number] = problem
    if not found or not left_out:
        raise error
    heads = sorted((head for one in found for head in one.heads), key=lambda head: (head.batch or 0, head.head))
    first = str(next(iter(left_out.values()))).rstrip(".")
    why = f"{first} ({runs_of('head', sorted(left_out))}; the others are attributed)"
    return replace(found[0], heads=tuple(heads)), InputError(why)


def _heads(capture: Capture, selection: Selection | None) -> int:
    """How many are attributed, each sequence's; one where there is to be an error."""
    try:
        heads, batches = select_heads(capture, selection or Selection())
    except InputError:
        return 1
    return len(heads) * len(batches)


def _counted(progress: Progress | None, before: int, count: int, of: int) -> Progress | None:
    """For the next ``count`` of all heads, whatever units their work counts in."""
    if progress is None:
        return None
    return lambda done, total: progress(before + count * done // max(total, 1), of)
