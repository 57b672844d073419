"""Which attention that is not fused has a head's bits: plain torch's, in one of the ways of ``unfused``.

On random heads the right way has 99.5 % and more of O's bits, others at most 80 %. Fused recipes are searched first:
what both have, as rows that see one key, is theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.head.bit_matches import Match
from attn_diag.head.flaws import Flaw, find_flaw
from attn_diag.head.low_sums import low_sum_ways, low_summed
from attn_diag.head.recipe_rows import usable_rows
from attn_diag.head.recipe_search import SearchedHead, Trial, threshold
from attn_diag.head.unfused import WORDS, forwards, named, unfused
from attn_diag.kernels import preset
from attn_diag.reference import AttentionHead
from attn_diag.results.wording import percent

# A way holds all scores of a head at once, several times.
_SCORES = 2**22


@dataclass(frozen=True)
class UnfusedMatch:
    """The way that has the bits."""

    way: str
    """Its name."""
    words: str
    """What it stores."""
    agreement: float
    """The fraction of O's elements with its bits."""
    flaw: Flaw | None
    """What it does not explain although it has the bits of everything else."""

    def verdict(self, nearest: float) -> str:
        """In words; ``nearest``: the agreement of the best recipe of a fused kernel."""
        flaw = "" if self.flaw is None else f", but {self.flaw.words}"
        return (
            f"Attention that is not fused{flaw}: {self.words} ({percent(self.agreement, '.3f')} of O's elements bit "
            f"for bit; the nearest recipe of a fused kernel has {percent(nearest, '.3g')})."
        )


def find_unfused(subject: SearchedHead, before: UnfusedMatch | None = None) -> UnfusedMatch | None:
    """The way whose O has the observed bits; None: none has, or the head is too long.

    Args:
        subject: A head that no recipe fits.
        before: That of another head of the call, which is tried alone first.
    """
    head = replace(subject.inputs.head, do=None)
    if len(head.q) * len(head.k) > _SCORES:
        return None
    fmt, observed = subject.inputs.input_format, subject.observed
    rows, _ = usable_rows(subject.inputs, observed, torch.arange(len(observed), device=observed.device))
    if not len(rows):
        return None
    fused, summed = forwards(head), low_sum_ways(head, fmt)
    likely = [way for way in (*fused, *summed) if before is not None and way == before.way]
    for ways in ([likely] if likely else []) + [[*fused, *summed]]:
        found = _fitting(subject, head, ways, rows)
        if found is not None and (ways != likely or found.flaw is None):
            return found
    return None


def _fitting(subject: SearchedHead, head: AttentionHead, ways: Sequence[str], rows: Tensor) -> UnfusedMatch | None:
    """The best of some ways, where its bits are those observed."""
    fmt, observed = subject.inputs.input_format, subject.observed
    of_sums = set(low_sum_ways(head, fmt))
    made = {way: (low_summed if way in of_sums else unfused)(head, fmt, way) for way in ways}
    outs = {way: of["o"][rows].to(observed.dtype) for way, of in made.items()}
    matches = {way: Match(out == observed[rows]) for way, out in outs.items()}
    way = max(matches, key=lambda name: matches[name].agreement)
    low = fmt.name
    # What its elements may be off by is what a fused kernel's with such scores may.
    recipe = replace(preset("fa2", low, subject.head_dim), scores=low)
    flaw = find_flaw(subject, Trial(recipe, outs[way], matches[way]), rows)
    flaw = None if flaw is None or flaw.chance else flaw
    agreement, least = matches[way].agreement, threshold(subject.fmt, matches[way].equal.numel())
    if agreement < least and (flaw is None or not flaw.leaves_most or flaw.agreement < least):
        return None
    return UnfusedMatch(way, WORDS[named(way)], agreement, flaw)
