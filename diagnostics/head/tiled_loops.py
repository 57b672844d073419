"""FlashAttention-2 written out, tile by tile, with some of S, m, S - m, P, l and O in the inputs' 16 bits.

    S = cast(alpha cast(q kT)), cast(cast(alpha q) kT), cast(alpha q kT) or alpha q kT in fp32
    m' = max(m, rowmax(S)), a = exp(m - m'), P = exp(S - m')
    l = a l + rowsum(P), O = a O + cast(cast(P) V), and O / l behind the last tile

In plain torch each step has the dtype that torch gives it: of operands in 16 bits it is rounded to 16 bits, too. In a
kernel of one's own, as in Triton, the tensor core hands P V over in fp32, and what is kept from tile to tile is rounded
once, when it is stored. A recipe rounds O's accumulator where it is rescaled, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby, product
from typing import Any, Literal

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.baseline import compared_rows
from attn_diag.head.bit_matches import Match
from attn_diag.head.from_lse import FROM_LSE, from_lse
from attn_diag.head.identification import IdentifiedHead
from attn_diag.head.recipe_changes import coarse_words
from attn_diag.head.recipe_rows import in_one_tile, seeing_few, usable_rows
from attn_diag.head.recipe_search import LEVEL, MISSED_BY_SUMS, SearchedHead, read_subject, threshold
from attn_diag.kernels import preset
from attn_diag.kernels.formats import Format, base
from attn_diag.reference import AttentionHead, FloatFormat
from attn_diag.reference.masking import adds

_TILES = (16, 32, 64, 128)
# A search goes through every tile, on rows of so many keys at most.
MOST_KEYS = 2**13
# Whether m is in 16 bits, and what is done to P: exp as it comes or, of any operand, in fp32 (autocast), P cast before
# its sum, or multiplied by V in fp32. "kernel": P cast for P V, all else in fp32.
_OF_STORED = ((True, ""), (True, "autocast"), (False, ""), (False, "cast"))
_OF_FP32 = tuple(product((True, False), ("", "cast", "fp32")))


@dataclass(frozen=True)
class TiledLoop:
    """One such loop; flags say what is stored in 16 bits."""

    tile: int
    """Keys of a tile."""
    scores: str
    """ "after": S, alpha behind it; "q": S, of alpha q; "divided": S, over 1 / alpha behind it; "once": alpha S, cast
    once; "fp32"."""
    row_max: bool
    """m."""
    probs: str
    """See ``_OF_STORED``."""
    row_sum: bool
    """l."""
    accumulator: bool
    """O between tiles."""
    difference: bool = False
    """S - m."""
    divisor: Literal["", "row sum", "inverse"] = ""
    """Whether l, or 1 / l, is cast behind the last tile alone."""

    def rounded(self, fmt: Format) -> dict[str, Any]:
        """What it rounds to a format that published kernels keep in fp32, as fields of a recipe."""
        scores = self.scores != "fp32"
        every = {
            "scores": scores,
            "row_max": self.row_max and not scores,  # the largest of rounded scores is one of them
            "difference": self.difference,
            "row_sum": self.row_sum or self.divisor == "row sum",
            "range_pv": self.probs not in ("fp32", "kernel"),
            "accumulator": self.accumulator,
        }
        return {site: fmt for site, coarse in every.items() if coarse}

    def out(self, head: AttentionHead, rows: Tensor, low: torch.dtype) -> Tensor:
        """O of some rows, int64 [R], of a head: [R, Dv] in the dtype ``low``."""
        return self.forward(head, rows, low)[0]

    def forward(self, head: AttentionHead, rows: Tensor, low: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """The same, and m and l, [R, 1]."""
        m, (sums,) = self._walked(head, rows, low, [self])
        return self._divided(*sums, low), m, sums[0]

    def outs(self, head: AttentionHead, rows: Tensor, low: torch.dtype, some: Sequence[TiledLoop]) -> list[Tensor]:
        """O of loops that differ from this one in nothing but what their sums l and O are stored in, and divided by."""
        sums = self._walked(head, rows, low, some)[1]
        return [one._divided(*of_one, low) for one, of_one in zip(some, sums, strict=True)]

    def _divided(self, row_sum: Tensor, out: Tensor, low: torch.dtype) -> Tensor:
        if self.divisor == "inverse":
            return (out * row_sum.reciprocal().to(low)).to(low)
        return (out / (row_sum.to(low) if self.divisor else row_sum)).to(low)

    def _walked(
        self, head: AttentionHead, rows: Tensor, low: torch.dtype, some: Sequence[TiledLoop]
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """m, and l and O before it is divided, of loops as in ``outs``."""
        of = {True: low, False: torch.float32}
        q, k, v = head.q[rows].to(low), head.k.to(low), head.v.to(low)
        m = torch.full((len(rows), 1), -torch.inf, dtype=of[self.row_max])
        row_sums = {coarse: torch.zeros(len(rows), 1, dtype=of[coarse]) for coarse in {one.row_sum for one in some}}
        outs = {of_o: torch.zeros(len(rows), v.shape[1], dtype=of[of_o]) for of_o in {one.accumulator for one in some}}
        seen = head.visible_span(rows)  # a tile of others changes nothing
        for start in range(seen.start // self.tile * self.tile, seen.stop, self.tile):
            keys = slice(start, min(start + self.tile, len(k)))
            scores = self._scores(q, k[keys], head.scale)
            scores = scores.float() if self.probs == "kernel" else scores
            head.apply_mask(scores, rows, keys)
            largest = torch.maximum(m, scores.amax(1, keepdim=True).to(m.dtype))
            shift = largest.masked_fill(largest == -torch.inf, 0.0)
            rescale, probs = (m.float() if self.probs == "kernel" else m) - shift, scores - shift
            probs = probs.to(low) if self.difference else probs
            if self.probs in ("autocast", "kernel"):
                rescale, probs = rescale.float(), probs.float()
            rescale, probs = rescale.exp(), probs.exp()
            probs = probs.to(low) if self.probs == "cast" else probs
            cast = probs if self.probs == "fp32" else probs.to(low)
            products = cast.float() @ v[keys].float()
            products = products if self.probs in ("fp32", "kernel") else products.to(low)
            total = probs.sum(1, keepdim=True)
            row_sums = {coarse: (rescale * one + total).to(one.dtype) for coarse, one in row_sums.items()}
            outs = {coarse: (rescale * one + products).to(one.dtype) for coarse, one in outs.items()}
            m = largest
        return m, [(row_sums[one.row_sum], outs[one.accumulator]) for one in some]

    def _scores(self, q: Tensor, k: Tensor, alpha: float) -> Tensor:
        if self.scores == "fp32":
            return q.float() @ k.float().T * alpha
        if self.scores == "once":
            return (q.float() @ k.float().T * alpha).to(q.dtype)
        if self.scores == "q":
            return _product(q * alpha, k.T)
        stored = _product(q, k.T)
        return stored / (1 / alpha) if self.scores == "divided" else stored * alpha


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of 16 bits, summed in fp32 on every processor."""
    return (a.float() @ b.float()).to(a.dtype)


@cache
def loops(keys: int, *, alpha_exact: bool) -> tuple[TiledLoop, ...]:
    """Those that are tried on heads of so many keys; ``alpha_exact``: wherever alpha multiplies, it rounds nothing."""
    stored = ("after",) if alpha_exact else ("after", "q", "divided")
    softmax = [(scores, *more) for scores, more in (*product(stored, _OF_STORED), *product(("fp32",), _OF_FP32))]
    of_kernels = ("once", *(() if alpha_exact else stored), "fp32")
    softmax += [(scores, scores != "fp32", "kernel") for scores in of_kernels] + [("fp32", True, "kernel")]
    tiles, flags = (*(tile for tile in _TILES if tile < keys), keys), (True, False)
    found = [TiledLoop(tile, *of_p, row_sum, o) for tile, of_p, row_sum, o in product(tiles, softmax, flags, flags)]
    for tile in tiles:
        kernel = TiledLoop(tile, "fp32", False, "kernel", False, False)
        found.remove(kernel)  # a published one
        found += [replace(kernel, difference=True), *(replace(kernel, divisor=one) for one in ("row sum", "inverse"))]
    return tuple(found)


def backwards(loop: TiledLoop, head: AttentionHead, fmt: FloatFormat, low: torch.dtype) -> dict[str, dict[str, Tensor]]:
    """Gradients behind a loop by what makes P of its L, one of ``FROM_LSE``; "": of its m and l, rounding nothing."""
    o, m, row_sum = loop.forward(replace(head, do=None), torch.arange(len(head.q)), low)
    stored, exact = ((m + row_sum.log())[:, 0].double(), (m.double() + row_sum.double().log())[:, 0])
    ways = [way for way in FROM_LSE if not way.endswith(":unfused")]
    found = {way: from_lse(head, fmt, way, (o.double(), stored)) for way in ways}
    return found | {"": from_lse(head, fmt, "from-l:fused:fp32", (o.double(), exact))}


@dataclass(frozen=True)
class KnownLoops:
    """Loops that have a head's bits and are not told apart there, the likeliest first."""

    every: tuple[TiledLoop, ...]

    def words(self, fmt: Format) -> str | None:
        """What all of them round that published kernels keep in fp32; None where that is nothing."""
        if all(loop.divisor == "inverse" for loop in self.every):
            return f"1 / row sum in {base(fmt).upper()}"
        return coarse_words(*(replace(preset("fa2", fmt), **loop.rounded(fmt)) for loop in self.every))

    def have_bits(self, subject: SearchedHead, rows: Tensor) -> bool:
        """Whether another head's O has the bits of the likeliest."""
        return bool(_fitting(subject, rows, self.every[:1]))


def find_loops(subject: SearchedHead, rows: Tensor) -> KnownLoops | None:
    """The loops whose O has the observed bits; None: none has, or the head has what they are not written for.

    Args:
        subject: A head on the CPU.
        rows: Query rows that are compared, int64 [R].
    """
    head = subject.inputs.head
    found = _fitting(subject, rows, loops(len(head.k), alpha_exact=math.frexp(abs(head.scale))[0] in (0.0, 0.5)))
    if not found:
        return None
    best = found[0][1]
    return KnownLoops(tuple(loop for loop, match in found if best.compare(match).p_value > LEVEL))


def with_loop(
    found: IdentifiedHead | None, capture: Capture, observation: str, batch: int, head: int
) -> IdentifiedHead | None:
    """What the search for a head's recipe found, with the loop that has its bits where no recipe has: no rows stand out
    then."""
    if found is None or capture.lengths(batch)[1] > MOST_KEYS:
        return found
    unfit = found.outcome in ("flawed", "unknown") and (found.flaw is None or found.flaw.explained)
    device = torch.device("cpu")
    subject = read_subject(capture, observation, batch, head, device) if unfit else None
    loops = None if subject is None else find_loops(subject, compared_rows(*capture.lengths(batch), device))
    words = None if loops is None else loops.words(found.subject.fmt)
    if loops is None or words is None:
        return found
    tiles = {loop.tile for loop in loops.every}
    in_tiles = f"{min(tiles)}-key tiles" if len(tiles) == 1 else "tiles"
    return IdentifiedHead(
        found.subject, found.rows, found.trials, found.tried, found.threshold, flaw=None,
        loop=f"a loop over {in_tiles}, ascending, with {words}",
    )  # fmt: skip


def _fitting(subject: SearchedHead, rows: Tensor, some: Sequence[TiledLoop]) -> list[tuple[TiledLoop, Match]]:
    """Those of some loops that fit, best first."""
    head, observed = replace(subject.inputs.head, do=None), subject.observed
    mask = head.masking.mask
    other = (head.softcap, head.sink, head.dropout, head.masking.alibi)
    if any(one is not None for one in other) or (mask is not None and adds(mask)):
        return []
    rows, _ = usable_rows(subject.inputs, observed, rows)
    if not len(rows):
        return []

    def matches(loops: Sequence[TiledLoop], of_rows: Tensor) -> Iterator[tuple[TiledLoop, Match]]:
        for _, alike in groupby(loops, key=lambda loop: replace(loop, row_sum=False, accumulator=False, divisor="")):
            first, *others = alike
            made = first.outs(head, of_rows, observed.dtype, [first, *others])
            yield from zip([first, *others], (Match(out == observed[of_rows]) for out in made), strict=True)

    few = in_one_tile(subject.inputs, observed)
    few = few if len(few) else seeing_few(head, rows)
    near = [loop for loop, m in matches(some, few) if m.agreement >= 1 - 2 * MISSED_BY_SUMS[subject.fmt]]
    found = [(loop, m) for loop, m in matches(near, rows) if m.agreement >= threshold(subject.fmt, m.equal.numel())]
    return sorted(found, key=lambda one: -one[1].agreement)
