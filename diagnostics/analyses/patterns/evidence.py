"""One quantity of one head that was found wrong, with all that tells where and how; and how well a guess fits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from attn_diag.head.mistakes import Mistake
from attn_diag.head.other_sinks import OtherSink
from attn_diag.head.output_fit import TOLERANCE
from attn_diag.head.rounded_scores import moved_by_scores
from attn_diag.reference import AttentionHead, FloatFormat, HeadReference, RowBlock, reference_rows, ulp
from attn_diag.results.quality import Quantity
from attn_diag.results.wording import SYMBOLS

# Where a guess is right, what it leaves is at most so many times what a well-rounded kernel leaves there.
LEAVES = 2.0
# Or, of a kernel that is coarse as well, up to so many times, and explains so much of the squared error.
COARSEST, EXPLAINS = 8.0, 0.99
# A row whose square is so many times its noise's is clear.
CLEAR = 25.0
# So many rows tell in how many directions roundings of P move them.
_WEIGHED = 64
# Of heads with more it is not asked which rows have their gradient.
_MOST_SCORES = 2**22
# Production kernels leave 0.5 to 1.0 times the expected noise.
COARSE = 1.05


def row_limit(features: int) -> float:
    """How many times its expected squared error one row may have by chance, a kernel twice as noisy included."""
    return float((LEAVES * (1 + 2 / features**0.5)) ** 2)


@dataclass(frozen=True)
class Evidence:
    """One quantity of one head; n rows (of O, LSE, delta and dQ: queries; of dK, dV: keys), all float64.

    LSE and delta have one feature.
    """

    quantity: Quantity
    """Its name."""
    observed: Tensor
    """[n, D], what the kernel returned."""
    truth: Tensor
    """[n, D]."""
    variance: Tensor
    """[n, D], a well-rounded kernel's expected squared error."""
    fmt: FloatFormat
    """The format in which ``observed`` was stored."""
    usable: Tensor
    """bool [n], rows whose truth is known."""
    outlying: Tensor
    """bool [n], rows that stand out; none of a kernel that is merely lossy."""
    features: Tensor
    """bool [D], features that stand out."""
    heads: tuple[AttentionHead, ...]
    """The query heads that make it: one, or of dK and dV all that share the key head."""
    references: tuple[HeadReference, ...]
    """What is true of each, with dK and dV."""
    names: tuple[str, ...] = ("this head",)
    """What the heads are called."""
    outputs: Mapping[str, Tensor] = field(default_factory=dict)
    """Other tensors of this head that may have been returned instead, true ones, by name."""
    captured: Sequence[Mapping[str, Tensor]] = ()
    """Of each of the heads, o and lse as the kernel returned them."""
    others: Sequence[tuple[str, Callable[[], AttentionHead]]] = ()
    """Other heads of the capture by name, read when they are needed."""
    key_heads: Mapping[str, str] = field(default_factory=dict)
    """By the names of these heads and the others, in their order: what their key head is called."""
    cuts: Sequence[tuple[str, Callable[[], AttentionHead | None]]] = ()
    """Of packed sequences: these rows in documents that are cut in another way, read likewise."""
    sinks: Sequence[Sequence[OtherSink]] = ()
    """Of each of the heads, the sinks that a faulty kernel may have given it."""
    mistakes: Sequence[Sequence[Mistake]] = ()
    """Likewise other mistakes: in its ALiBi slope, in its dropout."""
    shown: set[tuple[str, str]] = field(default_factory=set)
    """Kinds and words of the guesses that explain this quantity of other heads: those behind one that fits here, too,
    are not looked at. What is found is added."""

    _held: list[tuple[Tensor, tuple[Tensor, float, Tensor, Tensor, Tensor]]] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        """As it is written."""
        return SYMBOLS[self.quantity]

    @property
    def unit(self) -> str:
        """What its rows are."""
        return "keys" if self.quantity in ("dk", "dv") else "rows"

    @property
    def is_gradient(self) -> bool:
        """Whether it belongs to the backward."""
        return self.quantity in ("dq", "dk", "dv")

    def alone(self, forward_right: str) -> str:
        """Where a mistake is that the gradients show: in the backward alone, unless O is wrong as well.

        Args:
            forward_right: What is said of a forward that is right.
        """
        both = zip(self.captured, self.references, strict=False)
        pairs = [(returned["o"], known.out) for returned, known in both if "o" in returned]
        wrong = any(float((o - out).norm()) > TOLERANCE * float(out.norm()) for o, out in pairs)
        return "in the backward" if wrong else f"in the backward alone ({forward_right})"

    @cached_property
    def noise(self) -> Tensor:
        """[n], a well-rounded kernel's expected squared error in each row, its last rounding at least."""
        return torch.maximum(self.variance, ulp(self.truth, self.fmt).square() / 12).sum(1)

    @cached_property
    def clear(self) -> Tensor:
        """bool [n], rows that are larger than their noise, so that what they hold can be told."""
        return self.usable & (self.truth.square().sum(1) > CLEAR * self.noise)

    @cached_property
    def relative_noise(self) -> float:
        """The noise of a typical row over the square of the row, as far as casts make it."""
        kept = self.clear
        found = float((self.noise[kept] / self.truth[kept].square().sum(1)).median()) if bool(kept.any()) else 0.0
        return min(found, 4.0**-self.fmt.precision)

    @cached_property
    def directions(self) -> float:
        """In how many directions its rows point: (tr C)^2 / ||C||^2 of their squares' sum C.

        Of fewer rows of O than features: in how many roundings of P move them, C = sum of p^2 (v - o) (v - o)^T.
        """
        rows = self.usable.nonzero()[:, 0]
        known = self.truth[rows]
        if self.quantity == "o" and 0 < len(known) < known.shape[1]:
            rows = rows[:: -(-len(rows) // _WEIGHED)]
            known = self.truth[rows]
            block = reference_rows(replace(self.heads[0], do=None), rows)
            weights, v = block.probs.square(), self.heads[0].v[block.keys]
            crossed = (weights @ v).mT @ known
            own = known.mT @ (weights.sum(1, keepdim=True) * known)
            squares = torch.linalg.eigvalsh(v.mT @ (weights.sum(0)[:, None] * v) - crossed - crossed.mT + own)
        else:
            squares = torch.linalg.svdvals(known).square()
        return float(squares.sum() ** 2 / squares.square().sum().clamp(min=1e-300)) if len(squares) else 1.0

    @cached_property
    def unseeing(self) -> Tensor:
        """Some rows of O that see no key as stated, and yet hold numbers other than 0."""
        kept = self.references[0].fully_masked & self.observed.isfinite().all(1) & (self.observed != 0).any(1)
        rows = kept.nonzero()[:, 0]
        return rows[:: max(1, len(rows) // _WEIGHED)]

    def agrees(self, head: AttentionHead) -> bool | None:
        """Whether such rows hold what another head gives; None where they see no key of that either."""
        block = reference_rows(replace(head, do=None), self.unseeing)
        seen = block.lse.isfinite()
        if not bool(seen.any()):
            return None
        off, size = (x[seen].square().sum() for x in (self.observed[self.unseeing] - block.out, block.out))
        return bool(off <= max(TOLERANCE, 2.0**-self.fmt.precision) ** 2 * size)

    def _beyond(self, block: RowBlock) -> Tensor:
        """Which rows of O are clearly off by what no weights of the few keys that they see make, [n]."""
        rows, seen = torch.arange(len(self.truth), device=block.probs.device)[block.rows], block.probs > 0
        found = torch.zeros_like(rows, dtype=torch.bool)
        for at in (seen.sum(1) < self.truth.shape[1]).nonzero()[:, 0].tolist():
            error, own = self.error[rows[at]], self.heads[0].v[block.keys][seen[at]]
            basis = torch.linalg.qr(own.T)[0]
            left = (error - basis @ (basis.T @ error)).square().sum()
            found[at] = bool(left > CLEAR * self.noise[rows[at]])
        return found

    def dimensions(self, rows: Tensor, *, any_factor: bool = True) -> float:
        """How many numbers the errors of some rows are, of as many rows as carry them in effect.

        A row that sees k keys moves, as P sums to 1 and dS to 0, along their k - 1 differences; one that is too large
        by a factor is off by a single number, whatever makes the factor; delta's error moves a row of dQ along P K
        alone, and that of one query row moves all keys of dK. Where O is further off than scores in 16 bits make it,
        all rows count. Without ``any_factor``, how many coarse scores could have moved, were it no factor.
        """
        most = self.directions if any_factor else float(self.truth.shape[1])
        count = torch.full((len(rows),), most, dtype=torch.float64, device=rows.device)
        lines = [self.truth[rows]] if any_factor else []
        moved = None
        if self.quantity in ("o", "dq"):
            block = reference_rows(replace(self.heads[0], do=None), rows)
            keys = 1 / block.probs.square().sum(1).clamp(min=1e-12)
            count = torch.minimum(count, (keys - 1).clamp(min=1.0))
            if self.quantity == "dq":
                lines += [block.probs @ self.heads[0].k[block.keys]] if any_factor else []
            else:
                moved = moved_by_scores(self.heads[0], block, self.fmt)
        error = self.error[rows]
        for along in lines:
            sizes = (along.square().sum(1) * error.square().sum(1)).clamp(min=1e-300)
            share = (error * along).sum(1).square() / sizes
            count = torch.minimum(count, 1 / (share.square() + (1 - share).square() / count.clamp(min=1.0)))
        if self.quantity == "o":
            count = torch.where(self._beyond(block), most, count)
        total = float(count.sum())
        sizes = error.square().sum(1).sqrt()
        if self.quantity == "dq" or (moved is not None and self._made_by_scores(rows, sizes, moved)):
            # Rows without an error are no evidence: of one-hot rows, two of 256 may carry all of it.
            effective = float(sizes.sum() ** 2 / sizes.square().sum().clamp(min=1e-300))
            total = min(total, effective * float((count * sizes).sum() / sizes.sum().clamp(min=1e-300)))
        if self.quantity in ("dk", "dv"):
            with_gradient = sum(int((h.do != 0).any(1).sum()) for h in self.heads if h.do is not None)
            total = min(total, self.directions * with_gradient)
        # An error larger than dK is in rows without a gradient of their own.
        by_rows = self.quantity == "dk" and float(self.error[rows].square().sum()) <= float(
            self.truth[rows].square().sum()
        )
        return min(total, self._of_query_rows) if by_rows else total

    @cached_property
    def _of_query_rows(self) -> float:
        """Of dK: how many numbers errors of the query rows are that have a gradient in effect, each along its q."""
        total = 0.0
        for head in self.heads:
            if len(head.q) * len(head.k) > _MOST_SCORES:
                return math.inf
            block = reference_rows(head, torch.arange(len(head.q), device=head.q.device))
            if block.dscores is None:
                return math.inf
            sizes = block.dscores.norm(dim=1) * head.q.norm(dim=1)
            numbers = (1 / block.probs.square().sum(1).clamp(min=1e-12) - 1).clamp(min=1.0) * sizes
            total += float(numbers.sum() * sizes.sum() / sizes.square().sum().clamp(min=1e-300))
        return total

    def _made_by_scores(self, rows: Tensor, sizes: Tensor, moved: Tensor) -> bool:
        """Whether scores in 16 bits, which may move rows of O by ``moved``, can make errors of these ``sizes``."""
        beyond = (sizes - moved - LEAVES * self.noise[rows].sqrt()).clamp(min=0.0)
        return float(beyond.square().sum()) <= (1 - EXPLAINS) * float(sizes.square().sum())

    @cached_property
    def coarse(self) -> bool:
        """Whether rows that do not stand out are worse than a well-rounded kernel's too: then others are their tail."""
        kept = self.usable & ~self.outlying
        noise = float(self.noise[kept].sum())
        return noise > 0 and float(self.error[kept].square().sum()) > COARSE**2 * noise

    @cached_property
    def error(self) -> Tensor:
        """[n, D], observed - true."""
        return self.observed - self.truth

    def _at(self, index: Tensor) -> tuple[Tensor, float, Tensor, Tensor, Tensor]:
        """Of some rows what every guess is held against: what was returned, the squared error, squares, noises."""
        if not self._held or self._held[0][0] is not index:  # guesses of the same rows follow each other
            true = self.truth[index]
            before, floor = float(self.error[index].square().sum()), ulp(true, self.fmt).square() / 12
            held = self.observed[index], before, true.square().sum(1), self.variance[index], floor
            self._held[:] = [(index, held)]
        return self._held[0][1]

    def fit(self, index: Tensor, prediction: Tensor) -> Fit:
        """How well a guess of some rows fits.

        Args:
            index: Which n rows.
            prediction: The guess, [n, D].
        """
        observed, before, size, variance, floor = self._at(index)
        left = (observed - prediction).square()
        # A larger quantity is rounded as much more coarsely.
        grown = (prediction.square().sum(1) - size).clamp(min=0.0) * self.relative_noise
        noise = torch.maximum(variance + (grown / prediction.shape[1])[:, None], floor)
        noise = torch.maximum(noise, ulp(prediction, self.fmt).square() / 12)
        total = float(noise.sum().clamp(min=1e-300))
        # Of results that are far too small every small guess is near the truth's error: it has to be near them.
        shown = min(before, max(float(observed.square().sum()), COARSEST**2 * total))
        return Fit(before, float(left.sum()), total, left.sum(1) / noise.sum(1).clamp(min=1e-300), shown)


@dataclass(frozen=True)
class Fit:
    """What a guess leaves of a squared error."""

    before: float
    """The squared error."""
    left: float
    """What is left of it."""
    noise: float
    """What a well-rounded kernel is expected to leave."""
    by_row: Tensor
    """[n], what is left over that noise in each row."""
    shown: float
    """The squared error, or the squares of what was returned where these are less."""

    @property
    def explained(self) -> float:
        """The part of the squared error that it explains, and of what was returned."""
        return 1 - self.left / self.shown if self.shown else 0.0

    @property
    def remaining(self) -> float:
        """The factor over a well-rounded kernel's error that is left."""
        return math.sqrt(self.left / self.noise)

    @property
    def holds(self) -> bool:
        """Whether the guess fits: it leaves hardly more than noise, and explains most of what there was."""
        if self.remaining <= LEAVES:
            return self.explained >= 0.5
        return self.explained >= EXPLAINS and self.remaining <= COARSEST


@dataclass(frozen=True)
class Guess:
    """How some rows of a quantity may have come about."""

    kind: str
    """In a word; guesses of one kind are no rivals."""
    words: str
    """What follows "rows 0-63 …"."""
    prediction: Tensor
    """[n, D], what the rows would be."""
    freedom: int = 0
    """How many numbers were fitted to choose it; of two that fit as well, the one with fewer is taken."""
    tried: int = 1
    """Of how many like it it is the best."""
    fitted: int = 0
    """How many of these numbers may be any: each fits one of the error's, whatever made it."""
