"""One door for the functions about heads: what they are given, and one answer or several."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from attn_diag.captures.capture import Capture
from attn_diag.captures.given import Array, CallTensors, Source, captures_of, is_several
from attn_diag.errors import InputError
from attn_diag.results.several import R, Several
from attn_diag.work import Progress, part_of

Item = TypeVar("Item")
Answer = TypeVar("Answer")


def answers(
    function: str,
    source: Source,
    k: Array | None,
    v: Array | None,
    call: CallTensors,
    answer: Callable[[Capture, Progress | None], R],
    progress: Progress | None,
) -> R | Several[R]:
    """The answer about what ``source`` stands for; of a list or a folder the answers about all of its captures.

    Args:
        function: What the user called, for errors.
        source, k, v, call: As for ``captures_of``.
        answer: The answer about one capture, and what counts its progress.
        progress: Counts that of all.
    """
    require_by_name(function, k)
    captures = captures_of(source, k, v, call, function=function)
    if not is_several(source):
        return answer(captures[0], progress)
    parts = (part_of(progress, i, len(captures)) for i in range(len(captures)))
    return Several(tuple(answer(capture, part) for capture, part in zip(captures, parts, strict=True)))


def answered(
    items: Iterable[Item],
    answer: Callable[[Item], Answer],
    skip: Callable[[InputError], None] | None,
    errors: Sequence[InputError] = (),
) -> tuple[list[Answer], list[str]]:
    """The answers about some items, and what is said of those without one.

    Args:
        items: Such as captures.
        answer: The answer about one of them.
        skip: Called with why there is none where there are others; without it, that is raised.
        errors: Of items that were left out before.

    Raises:
        InputError: There is no answer at all, and what ``skip`` is not there for.
    """
    results, failed = list[Answer](), list(errors)
    if failed and skip is None:
        raise failed[0]
    for item in items:
        try:
            results.append(answer(item))
        except InputError as error:
            if skip is None:
                raise
            failed.append(error)
    if failed and not results:
        raise failed[0]
    for problem in failed:
        if skip is not None:
            skip(problem)
    return results, [str(problem) for problem in failed]


def require_by_name(function: str, k: Any) -> None:
    """Raise InputError where an option stands in k's place, as in ``microscope(capture, 891)``."""
    if isinstance(k, str | int):
        option = "observation" if isinstance(k, str) else "row"
        raise InputError(
            f"{function}() takes q, k and v, or a capture and options by name: {function}(capture, {option}={k!r}, …)"
        )
