"""What the reference's own error can have done to a figure, and rows of it checked against the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from attn_diag.captures.selection import Ranges
from attn_diag.errors import InputError
from attn_diag.reference import UNIT, AttentionHead, HeadBounds, HeadReference
from attn_diag.reference.magnitudes import upper_norm
from attn_diag.results.diagnosis import Certificate

Floats = npt.NDArray[np.float64]

# The oracle's own default, without loading mpmath for it; the command line has it too.
DEFAULT_ORACLE_BITS = 128


@dataclass(frozen=True)
class Certify:
    """Which rows of every head the oracle recomputes: ``count`` of its choice and ``rows`` by number, at ``bits`` bits.

    Raises InputError for a negative count, and for a precision that the oracle does not take.
    """

    count: int = 0
    rows: Ranges | frozenset[int] | None = None
    bits: int = DEFAULT_ORACLE_BITS

    def __post_init__(self) -> None:
        from attn_diag.reference.oracle import MAX_BITS, MIN_BITS

        if self.count < 0:
            raise InputError(f"the number of rows to certify must be 0 or more, got {self.count}")
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise InputError(
                f"the oracle's precision must lie between {MIN_BITS} and {MAX_BITS} bits, got {self.bits}: fewer say "
                f"nothing about float64's 53; {DEFAULT_ORACLE_BITS} is usual"
            )

    @classmethod
    def of(cls, wanted: int | Certify | None) -> Certify | None:
        """A number of rows as that; None for no row. Raises InputError for anything else."""
        found = cls(wanted) if isinstance(wanted, int) and not isinstance(wanted, bool) else wanted
        if found is not None and not isinstance(found, Certify):
            raise InputError(f"certify must be a number of rows or attn_diag.Certify(rows=…, bits=…), got {wanted!r}")
        return found if found is not None and (found.count or found.rows is not None) else None

    def require_rows(self, source: str, count: int) -> None:
        """Raise InputError where a row asked for is not among the ``count`` rows of a capture."""
        for row in self.rows or ():
            if not 0 <= row < count:
                raise InputError(f"{source}: no row {row} to certify; the capture has rows 0 to {count - 1}")

    def choose(self, bounds: HeadBounds, usable: Tensor) -> list[int]:
        """``count`` of the rows [Tq] that ``usable`` marks, and those by number that are usable.

        Half of the count is spread evenly; the other half are the rows where the bound of O is largest.
        """
        known = usable.nonzero()[:, 0].cpu()
        count = min(self.count, len(known))
        spread = known[torch.linspace(0, len(known) - 1, -(-count // 2)).round().long()]
        largest = known[bounds.out.sum(1).cpu()[known].argsort(descending=True, stable=True)]
        chosen = list(dict.fromkeys([*spread.tolist(), *largest.tolist()]))[:count]
        return sorted({*chosen, *(set(known.tolist()).intersection(self.rows or ()))})

    def check(self, head: AttentionHead, reference: HeadReference, bounds: HeadBounds, usable: Tensor) -> Certificate:
        """Recompute the rows chosen. Raises InputError where even the oracle's largest precision cannot tell."""
        from attn_diag.reference.certify import check_rows
        from attn_diag.reference.oracle import OracleLimitError

        try:
            checked = check_rows(head, reference, bounds, self.choose(bounds, usable), bits=self.bits)
        except OracleLimitError as error:
            raise InputError(f"--certify: {error}") from None
        worst: dict[str, float] = {}
        for row in checked:
            for name, output in row.outputs.items():
                known = "o" if name == "out" else name
                worst[known] = max(worst.get(known, 0.0), output.ratio)
        return Certificate(len(checked), self.bits, worst, all(row.held for row in checked))


def pool_certificates(parts: Sequence[Certificate | None]) -> Certificate | None:
    """One certificate of several heads or sequences; None where there is none."""
    known = [part for part in parts if part is not None]
    if not known:
        return None
    names = dict.fromkeys(name for part in known for name in part.worst_ratio)
    worst = {name: max(part.worst_ratio.get(name, 0.0) for part in known) for name in names}
    return Certificate(sum(part.rows for part in known), known[0].bits, worst, all(part.held for part in known))


@dataclass(frozen=True)
class RoundedBound:
    """How far RN(O_ref) of H heads may lie from RN(O_true)."""

    heads: int
    """H."""
    moved: Tensor | None
    """By so much, [H, n, Dv]: 0 but for an O_ref within its bound of a midpoint; None where it is 0, as a rule."""
    unsigned: Tensor | None
    """Where the sign of O itself is not certain, bool [H, n, Dv]; None where it is, as a rule."""

    @classmethod
    def of(cls, truth: Tensor, error: Tensor, ulps: Tensor, bound: Tensor) -> RoundedBound:
        """``truth`` O_ref, ``error`` RN(O_ref) - O_ref, ``ulps`` the spacing at O_ref, ``bound`` of |O_ref - O_true|.

        A midpoint is half a spacing from O_ref's neighbours; below a power of two it is a quarter.
        """
        if not truth.numel():
            return cls(len(truth), None, None)
        # As a rule nothing is in doubt, and the largest and smallest elements tell so. In place: fresh memory costs
        # more than arithmetic. The sign of a float64 sum is right.
        scratch = error.abs().sub_(ulps, alpha=0.5).add_(bound)
        clear = float(scratch.amax()) < 0 and float(torch.sub(bound, ulps, alpha=0.25, out=scratch).amax()) < 0
        doubtful = None if clear else (ulps / 2 - error.abs() <= bound) | (ulps / 4 <= bound)
        moved = None if doubtful is None else torch.where(doubtful, ulps + 2 * bound, 0.0)
        signed = float(torch.abs(truth, out=scratch).sub_(bound).amin()) > 0
        return cls(len(truth), moved, None if signed else truth.abs() <= bound)

    @property
    def counts(self) -> list[int]:
        """How many roundings of each head are in doubt."""
        return [0] * self.heads if self.moved is None else self.moved.count_nonzero((1, 2)).tolist()

    def sums(self, weights: Tensor | None = None) -> Floats:
        """Each head's sum of ``moved``, or of its products with |``weights``|, [H]."""
        if self.moved is None:
            return np.zeros(self.heads)
        return sums_of(self.moved if weights is None else (weights * self.moved).abs_())

    def turned(self, excess: Tensor) -> Floats:
        """How much each head's sum of ``excess``, in the direction of O, changes at most if those signs are wrong."""
        if self.unsigned is None:
            return np.zeros(self.heads)
        return sums_of((2 * excess.abs()).masked_fill_(~self.unsigned, 0.0))


def sums_of(bounds: Tensor) -> Floats:
    """The sum of each head's bounds [H, ...], rounded upwards, [H]."""
    return np.asarray(bounds.flatten(1).sum(1).cpu().numpy() * (1 + 2.0**-20))


def rounding_of_products(left: Tensor, right: Tensor) -> Floats:
    """Bound of the rounding of rowsum(left o right) in float64, summed over the rows of each head; [H, n, D] and [H].

    gamma(D) sum |l r| (Higham, eq. 3.5) <= gamma(D) ||l|| ||r||; D + 1 for the rounding of this bound.
    """
    steps = (left.shape[2] + 1) * UNIT
    return sums_of(upper_norm(left, 2) * upper_norm(right, 2)) * (steps / (1 - steps))
