"""An error that is another in every chunk of a kernel, and the same in all of a chunk's steps.

A decay's gradient at a step takes all that the decays after it in its chunk have, and all steps of a chunk the gradient
of the chunk's whole decay, sum(h * dh) over the state h. Where that sum is coarse its error jumps from chunk to chunk
and does not change within. Bits cannot tell it: 16-bit sums of numbers that are known but for their last bits are
rounded otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.head.linear import LinearRun
from attn_diag.head.quality import LOSSY

# Jumps that there must be, numbers at chunk boundaries, to say anything of their size.
_FEWEST = 12
# Of one mean square of jumps over another, by chance (F distribution).
_LEVEL = 0.01


@dataclass(frozen=True)
class Jumps:
    """Squares of an error's changes from one step to the next."""

    within: Tensor
    """Within chunks."""
    at: Tensor
    """At their boundaries."""

    @classmethod
    def of(cls, error: Tensor, run: LinearRun, chunk: int) -> Jumps:
        """Those of a head's error, [B, T] or [B, T, K].

        Args:
            error: Observed less reference.
            run: The capture's, for its sequences.
            chunk: Steps in a chunk.
        """
        within, at = [], []
        for b, steps in run.capture.call.sequences:
            change = error[b, steps].diff(dim=0).square()
            boundary = torch.arange(1, len(change) + 1, device=change.device) % chunk == 0
            within.append(change[~boundary].flatten())
            at.append(change[boundary].flatten())
        return cls(torch.cat(within), torch.cat(at))


def misfit(error: Tensor, sound: Tensor, coarse: Tensor, run: LinearRun, chunk: int) -> float | None:
    """How far an error's jumps are from those of coarse sums over the state: between chunks, and nowhere else.

    Args:
        error: A head's, of a decay's gradient.
        sound: A well-rounded kernel's.
        coarse: One's with coarse sums over the state.
        run: The capture's.
        chunk: Steps in a chunk of both.

    Returns:
        A sum of two logarithms, 0 at best; None: it does not jump at the boundaries, or elsewhere too.
    """
    from scipy.stats import f

    own, other, site = (Jumps.of(x, run, chunk) for x in (error, sound, coarse))
    count = len(own.at)
    if count < _FEWEST or not all(bool(x.any()) for x in (own.at, other.at, other.within, site.at)):
        return None
    within, at, alike = (
        float((x.mean() / y.mean()).sqrt())
        for x, y in ((own.within, other.within), (own.at, other.at), (own.at, site.at))
    )
    by_chance = math.sqrt(float(f.isf(_LEVEL, count, count)))
    # Of the site's own size: one that is half of it, as where products alone are coarse, is another's.
    apart = max(alike, 1 / alike)
    if within > LOSSY or at < by_chance or apart > max(LOSSY, by_chance):
        return None
    return abs(math.log(within)) + abs(math.log(alike))
