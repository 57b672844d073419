"""Choices of layers, steps, heads and so on, checked when they are made rather than in the middle of a training run."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable

from attn_diag.errors import InputError


def require_container(name: str, chosen: object) -> None:
    """Raise InputError where a choice of numbers is one number, or a text."""
    if isinstance(chosen, (str, bytes)) or not (chosen is None or isinstance(chosen, Container)):
        raise InputError(f"{name} must be a set, list or range of numbers, such as {{2}}, got {chosen!r}")


def indices(name: str, chosen: Iterable[int] | None) -> list[int] | None:
    """The numbers, sorted. Raises InputError unless all are 0 or more."""
    if chosen is None:
        return None
    try:
        numbers = sorted(operator.index(number) for number in chosen)
    except TypeError:
        numbers = []
    if not numbers or numbers[0] < 0:
        raise InputError(f"{name} must hold numbers from 0 on, such as [0, 1], got {chosen!r}")
    return numbers
