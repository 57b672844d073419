"""Keys or query rows, single or whole tiles, that a sum misses, counts twice or should not have seen.

What row t of a sum would be without part J is known in closed form: for dQ, dK and dV, true - (weights V)_J; for O,
whose row sum loses J too, O + (p_J O - (P o W V)_J) / (1 - p_J), W of dropout. Every J is tried for all rows at once:
one place for all rows, or one at the same distance from each row's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import torch
from torch import Tensor

from attn_diag.analyses.patterns.evidence import Evidence, Guess
from attn_diag.analyses.patterns.slab import Slab

TILES = (16, 32, 64, 128, 256)
# A place that leaves more of the squared error, in units of the noise, is not looked at further.
_PROMISING = 0.5
# In O a tile can be lost from both sums, or from one.
_SUMS = {
    "both": "", "pv": " in P V, though not in the row sum", "l": " in the row sum, though not in P V",
    "throughout": " in forward and backward alike",
}  # fmt: skip
_WHERE = {"o": ("both", "pv", "l"), "dq": ("both", "throughout")}


def lost_parts(evidence: Evidence, slabs: Sequence[Slab], rows: Tensor) -> Iterator[Guess]:
    """Guesses that some keys (of dK and dV: query rows) are missing, counted twice or wrongly seen.

    Args:
        evidence: The quantity.
        slabs: Of the rows, one a query head that makes it.
        rows: Which n rows, [n].
    """
    search = _Search(evidence, rows, slabs[0].positions)
    if len(slabs) == 1:
        yield from _single(search, slabs[0])
    weights = [s.weights().masked_fill(~s.visible, 0.0) for s in slabs]
    own = [_tiles(w, s.vectors) for w, s in zip(weights, slabs, strict=True)]
    base = torch.stack(own).sum(0)  # [n, m / 16, D]
    # A kernel that takes the group's heads one after the other may lose a tile of one.
    bases = [(base, ""), *((one, f" of {name}") for one, name in zip(own, evidence.names, strict=True) if own[1:])]
    # What a part takes of the row sum, [n, m / 16]: under dropout that is not its weight in O.
    mass = _padded(slabs[0].probs.masked_fill(~slabs[0].visible, 0.0)).sum(2)
    whole_row = _WholeRow(slabs[0], search.truth) if evidence.quantity == "dq" else None
    count, noun = weights[0].shape[1], _noun(evidence)
    for size, (tiles, of_head) in product(TILES, bases):
        parts, masses = _coarser(tiles, size // TILES[0]), _coarser(mass, size // TILES[0])
        if parts.shape[1] < 2:
            break
        for where in _WHERE.get(evidence.quantity, ("both",)):
            for sign, verb in ((-1.0, "miss"), (1.0, "count twice")):
                if where == "throughout":
                    assert whole_row is not None
                    change = whole_row.change(size // TILES[0], sign)
                else:
                    change = _change(evidence, parts, masses, search.truth, sign, where)
                for place, relative, found in search.best(change, size):
                    named = _tile_words(place, size, count, noun, relative=relative) + of_head
                    words = f"count {named} twice" if sign > 0 else f"{verb} {named}"
                    yield Guess(
                        "part",
                        f"{words}{_SUMS[where]}",
                        search.truth + found,
                        1 + (where != "both"),
                        3 * len(TILES) * len(bases) * parts.shape[1],
                    )
    if evidence.quantity == "o" and count > TILES[0]:
        # The last few keys, which a load of whole vectors cuts off.
        end = slice(count - TILES[0] + 1, count)
        last = weights[0][:, end, None] * slabs[0].vectors[end]
        takes = slabs[0].probs.masked_fill(~slabs[0].visible, 0.0)[:, end]
        last, takes = (t.flip(1).cumsum(1).flip(1) for t in (last, takes))
        for where in ("both", "pv"):
            for place, relative, found in search.best(_change(evidence, last, takes, search.truth, -1.0, where), 1):
                if not relative:
                    words = f"miss {noun}s {end.start + place}-{count - 1}{_SUMS[where]}"
                    yield Guess("part", words, search.truth + found, 1 + (where != "both"), 2 * last.shape[1])
    before = base.cumsum(1)[:, :-1], mass.cumsum(1)[:, :-1]
    behind = base.flip(1).cumsum(1).flip(1)[:, 1:], mass.flip(1).cumsum(1).flip(1)[:, 1:]
    for (part, whole), words in ((before, "before {}"), (behind, "from {} on")):
        change = _change(evidence, part, whole, search.truth, -1.0, "both")
        for place, relative, found in search.best(change, TILES[0]):
            if not relative:
                words_ = words.format((place + 1) * TILES[0])
                yield Guess("part", f"miss all {noun}s {words_}", search.truth + found, 2, base.shape[1])


class _Search:
    """Which place of a lost part leaves least, over all rows."""

    def __init__(self, evidence: Evidence, rows: Tensor, positions: Tensor) -> None:
        self.truth, self.error = evidence.truth[rows], evidence.error[rows]
        self.noise, self.positions = evidence.noise[rows].clamp(min=1e-300), positions
        self.squares = self.error.square().sum(1)
        self.before = float((self.squares / self.noise).sum())

    def best(self, change: Tensor, size: int) -> Iterator[tuple[int, bool, Tensor]]:
        """The best place for all rows, and the best distance from their own: place, whether a distance, change."""
        # |error - change|^2 without another [n, tiles, D].
        left = self.squares[:, None] - 2 * torch.einsum("nd,njd->nj", self.error, change) + change.square().sum(2)
        for place, relative, chosen in self.places(left, size):
            found = torch.zeros_like(self.truth)
            known = chosen >= 0
            found[known] = change[known.nonzero()[:, 0], chosen[known]]
            yield place, relative, found

    def places(self, left: Tensor, size: int) -> Iterator[tuple[int, bool, Tensor]]:
        """The same of what is left, [n, places]; with each row's place (-1: none) instead of the change."""
        n, places = left.shape
        if not places:
            return  # shorter than a tile
        scaled = left.nan_to_num(torch.inf, torch.inf, torch.inf) / self.noise[:, None]
        constant = scaled.sum(0)
        place = int(constant.argmin())
        if float(constant[place]) < _PROMISING * self.before:
            yield place, False, torch.full((n,), place, device=left.device)
        own = self.positions // size
        distances = torch.arange(-places, places + 1, device=left.device)
        index = own[:, None] - distances
        inside = (index >= 0) & (index < places)
        gathered = scaled.gather(1, index.clamp(0, places - 1))
        total = torch.where(inside, gathered, (self.squares / self.noise)[:, None]).sum(0)
        best = int(total.argmin())
        if float(total[best]) < _PROMISING * self.before and n > 1:
            yield int(distances[best]), True, torch.where(inside[:, best], index[:, best], -1)


def _single(search: _Search, slab: Slab) -> Iterator[Guess]:
    """One key, or query row, too few or too many."""
    noun = "key" if slab.quantity in ("o", "dq") else "query row"
    visible, truth = slab.visible, search.truth
    along = search.error @ slab.vectors.T  # [n, m], error . vector
    squares = slab.vectors.square().sum(1)
    for verb in ("miss", "count", "see"):
        sign = -1.0 if verb == "miss" else 1.0
        # What changes: share . vector, less what another row sum makes of the whole O.
        share, whole = sign * slab.weights(), torch.zeros_like(slab.probs)
        if slab.quantity == "o":
            row_sum = (1 + sign * slab.probs).clamp(min=1e-12)
            share, whole = share / row_sum, sign * slab.probs / row_sum
        allowed = ~visible if verb == "see" else visible
        left = search.squares[:, None] - 2 * share * along + share.square() * squares
        left += 2 * whole * (search.error * truth).sum(1, keepdim=True)
        left += whole.square() * truth.square().sum(1, keepdim=True) - 2 * share * whole * (truth @ slab.vectors.T)
        left = torch.where(allowed, left, search.squares[:, None])
        for place, relative, chosen in search.places(left, 1):
            at = chosen.clamp(min=0)[:, None]
            used = allowed.gather(1, at)[:, 0] & (chosen >= 0)
            change = share.gather(1, at) * slab.vectors[at[:, 0]] - whole.gather(1, at) * truth
            change = change.masked_fill(~used[:, None], 0.0)
            which = _distance_words(place, noun) if relative else f"{noun} {place}"
            words = {"miss": f"miss {which}", "count": f"count {which} twice", "see": f"see {which}, which is masked"}
            yield Guess("part", words[verb], search.truth + change, 1, 6 * len(slab.vectors))


class _WholeRow:
    """What dQ is where the forward lost a part too, so that L and delta are those of the other keys.

    alpha / (1 -+ p) [sum of P dP K - delta' sum of P K], delta' = (delta -+ sum of P dP over J) / (1 -+ p).
    """

    def __init__(self, slab: Slab, truth: Tensor) -> None:
        assert slab.dprobs is not None
        assert slab.delta is not None
        probs = slab.probs.masked_fill(~slab.visible, 0.0)
        sloped = probs if slab.slope is None else probs * slab.slope
        self._truth, self._scale, self._delta = truth[:, None, :], slab.head.scale, slab.delta[:, :, None]
        self._mass, self._gain = _padded(probs).sum(2), _padded(probs * slab.dprobs).sum(2)
        self._with_dp, self._plain = _tiles(sloped * slab.dprobs, slab.vectors), _tiles(sloped, slab.vectors)

    def change(self, factor: int, sign: float) -> Tensor:
        """[n, J, D] for tiles of so many times 16 keys."""
        left = (1 + sign * _coarser(self._mass, factor)).clamp(min=1e-9)[:, :, None]
        delta = (self._delta + sign * _coarser(self._gain, factor)[:, :, None]) / left
        with_dp = self._with_dp.sum(1, keepdim=True) + sign * _coarser(self._with_dp, factor)
        plain = self._plain.sum(1, keepdim=True) + sign * _coarser(self._plain, factor)
        return self._scale / left * (with_dp - delta * plain) - self._truth


def _change(evidence: Evidence, parts: Tensor, masses: Tensor, truth: Tensor, sign: float, where: str) -> Tensor:
    """What losing (``sign`` -1) or doubling (+1) each part [n, J, D] changes."""
    if evidence.quantity != "o" or where == "pv":
        return sign * parts
    mass, out = masses[:, :, None], truth[:, None, :]
    left = (1 + sign * mass).clamp(min=1e-9)
    if where == "l":
        return -sign * mass * out / left
    return sign * (parts - mass * out) / left


def _padded(weights: Tensor) -> Tensor:
    """[n, m] as [n, tiles of 16, 16]."""
    short = -weights.shape[1] % TILES[0]
    return torch.nn.functional.pad(weights, (0, short)).reshape(len(weights), -1, TILES[0])


def _tiles(weights: Tensor, vectors: Tensor) -> Tensor:
    """What every tile of 16 adds, [n, tiles, D]."""
    return torch.einsum("ntk,tkd->ntd", _padded(weights), _padded(vectors.T).permute(1, 2, 0))


def _coarser(tiles: Tensor, factor: int) -> Tensor:
    """Sums of so many neighbouring tiles."""
    if factor == 1:
        return tiles
    short = -tiles.shape[1] % factor
    padding = (0, 0, 0, short) if tiles.ndim == 3 else (0, short)
    padded = torch.nn.functional.pad(tiles, padding)
    return padded.reshape(len(tiles), -1, factor, *tiles.shape[2:]).sum(2)


def _noun(evidence: Evidence) -> str:
    return "query row" if evidence.quantity in ("dk", "dv") else "key"


def _tile_words(place: int, size: int, count: int, noun: str, *, relative: bool) -> str:
    if not relative:
        return f"{noun}s {place * size}-{min((place + 1) * size, count) - 1}"
    if place == 0:
        return f"the tile of {size} {noun}s on the diagonal"
    way = "before" if place > 0 else "after"
    tiles = "the tile" if abs(place) == 1 else f"{abs(place)} tiles"
    return f"{size} {noun}s, {tiles} {way} the diagonal's"


def _distance_words(distance: int, noun: str) -> str:
    if distance == 0:
        return f"the {noun} on the diagonal"
    return f"the {noun} {abs(distance)} {'before' if distance > 0 else 'after'} the diagonal"
