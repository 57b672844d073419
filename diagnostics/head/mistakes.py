"""What a faulty kernel may have computed in the place of a head as its capture states it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attn_diag.reference import AttentionHead


@dataclass(frozen=True)
class Mistake:
    """One mistake in what a head has besides q, k and v."""

    kind: str
    """In a word: alibi, dropout."""
    words: str
    """What follows "are what … gives"."""
    made: Callable[[AttentionHead], AttentionHead]
    """The head with the mistake."""
    of_several: str
    """The words where several query heads make the same mistake, each with its own numbers."""
    forward_right: str
    """What is said of a forward that is right, where the backward alone makes it."""
