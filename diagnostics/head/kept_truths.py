"""References of heads that are wanted again, up to so many bytes."""

from __future__ import annotations

import threading

from attn_diag.head.truth import HeadTruth


class KeptTruths:
    """Truths of the heads of one capture, up to so many bytes: of those with the largest errors.

    Heads of one capture are of one size, so what is kept does not depend on the order in which they come.
    """

    def __init__(self, most: int) -> None:
        self._most, self._held, self._lock = most, 0, threading.Lock()
        self._found: dict[tuple[int, int], tuple[float, HeadTruth]] = {}

    def offer(self, place: tuple[int, int], truth: HeadTruth, error: float) -> None:
        """Keep the truth of the head at ``place`` (batch, head) if there is room, or one with a smaller error goes."""
        if truth.bytes > self._most:
            return
        with self._lock:
            self._found[place] = error, truth.alone
            self._held += truth.bytes
            while self._held > self._most:
                least = min(self._found, key=lambda place: (self._found[place][0], place))
                self._held -= self._found.pop(least)[1].bytes

    def get(self, place: tuple[int, int]) -> HeadTruth | None:
        """The truth of a head; None where it was not kept."""
        found = self._found.get(place)
        return None if found is None else found[1]
