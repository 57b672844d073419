"""What was not captured: counted by reason, and told once."""

from __future__ import annotations

import logging
import threading

import torch

from attn_diag.errors import InputError

_log = logging.getLogger("attn_diag")
# Reasons that say something new each time must fill neither a log nor memory.
_MOST_REASONS = 20
# torch's own words for the host's memory; it has no type for them.
_NO_MEMORY = ("can't allocate memory", "not enough memory")


class Losses:
    """A count for each reason, from any thread.

    Attributes:
        counts: reason -> how many calls.
    """

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, reason: str, *, told: bool = False) -> None:
        """Count one more, and log the first of its reason unless that was ``told`` already."""
        with self._lock:
            if reason not in self.counts and len(self.counts) >= _MOST_REASONS:
                reason = "other reasons"
            first = reason not in self.counts
            self.counts[reason] = self.counts.get(reason, 0) + 1
        if first and not told:
            _log.warning("not captured: %s", reason)


def reason_of(error: Exception) -> str:
    """Words for an exception that are the same each time: how much memory was asked for is left out."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in _NO_MEMORY):
        return "out of memory"
    return str(error) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
