"""What a kernel rounds in its forward that has no name here, from the bits of an O that is lossy."""

from __future__ import annotations

from collections.abc import Sequence

from attn_diag.head.baseline import has_bits
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.head.open import OpenCapture
from attn_diag.head.quality import LOSSY
from attn_diag.head.recipe_changes import coarse_words
from attn_diag.kernels import Recipe

# A search goes through every schedule, on rows of so many scores each.
_MOST_KEYS = 2**13


class UnnamedKernels:
    """The roundings of the kernels of one capture: each looked for once, by ``identify``'s whole search."""

    def __init__(self, opened: OpenCapture) -> None:
        """Of a capture that is being inspected."""
        self._opened = opened
        self._found = dict[str, Recipe | None]()

    def coarse(self, observation: str, parts: Sequence[HeadMeasurement]) -> str | None:
        """What O of one head rounds, in words (``coarse_words``); None: it is not lossy, or nobody knows.

        The search is made on the first head of an observation that asks; another one's O must have the same bits.

        Args:
            observation: Which.
            parts: Of the head in each sequence.
        """
        part = next((p for p in parts if _unexplained(p)), None)
        if part is None or self._opened.capture.lengths(part.batch)[1] > _MOST_KEYS:
            return None
        if observation not in self._found:
            found = self._opened.identify(observation, part.batch, part.head)
            self._found[observation] = None if found is None or found.outcome == "flawed" else found.recipe
        recipe = self._found[observation]
        if recipe is None or not has_bits(recipe, self._opened.capture, observation, part.batch, part.head):
            return None
        return coarse_words(recipe)


def _unexplained(part: HeadMeasurement) -> bool:
    o = part.quality.get("o")
    ratio = None if o is None or o.site is not None or not o.compared else o.ratio()
    return ratio is not None and ratio.factor > LOSSY
