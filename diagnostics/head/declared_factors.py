"""What O or the scores of a declared kernel are multiplied by that they should not be: throughout, or in blocks.

A descale factor that is x too large makes O, or the scores, 1 + x times as large: a small error beside the format's,
but one that all elements share. The factors are fitted by Gauss-Newton to what O and L are off the recipe's,

    O - O_recipe = (1 + b) O(f) - O(1)        L - L_recipe = L(f) - L(1)

with O(f) and L(f) the attention in float64 whose scores are multiplied by f: one number, or one for each block of keys
(a scale of k) or of rows (of q). A factor is named where no more is left than the difference of two sound kernels, also
in the worst row, and "throughout" only where no block has another one. Kernels that smooth k multiply what is left of
it, and add what the mean makes of L afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from attn_diag.head.quality import LOSSY
from attn_diag.reference import AttentionHead, reference_rows
from attn_diag.results.wording import between, ranges, together

# A softmax scale in BF16 is up to 0.4 % off. Where a tensor core's sums are too many to be followed, they are up to 7 %
# too small (benchmarks/bench_fp8_products.py).
FACTOR, FACTOR_OF_SUMS = 0.02, 0.15
# So rarely may a sound kernel's mean be as far from the recipe's: of ten thousand.
MEANS_APART = 1e-4
# A row that is off by more than three times its noise, which factors leave by two thirds of its square, has something
# else: 0.86 to 1.0 measured of masks and keys left out, up to 0.45 of factors up to 1.5 (study_declared.py's kernels).
_ROW_OFF, _ROW_LEFT = 3.0, 2 / 3
# And where blocks are guessed: rows that lack 32 keys left 3.0 of them in NVFP4.
_ROW_OFF_GUESSED = 2.0
# Rows that are looked at, and elements of P in them; blocks; steps of Gauss-Newton, and how far one may go.
_ROWS, _ELEMENTS, _BLOCKS = 512, 2**23, 32
_STEPS, _FARTHEST, _STILL = 8, 0.3, 1e-4
# Of what is off in units of the noise, factors that multiply that too may leave so much.
_PART = 0.25
# So many blocks are named one by one.
_NAMED = 4

Of = Literal["q", "k"]
# Factors of scores, and of O, below 1 may be these too, where O's bits do not tell.
CLIPPED = ", or numbers of q or k that are clipped or rounded toward zero"
CLIPPED_VALUES = ", or numbers of v that are clipped or rounded toward zero"
_CULPRIT = {
    "all": "a descale factor of q or k, or the softmax scale, that is wrong",
    "q": "a scale of q that is wrong there",
    "k": "a scale of k that is wrong there",
    "v": "a descale factor of v that is wrong, or casts of P_bar that all round one way",
}


@dataclass(frozen=True)
class Factors:
    """Factors that are named."""

    words: str
    """What is said; empty: nothing."""
    scores: float = 1.0
    """Of all scores; 1 where blocks have their own."""
    out: float = 1.0
    """Of O."""
    throughout: bool = True
    """Whether they are of all scores."""
    smaller: bool = False
    """Whether scores are multiplied by less than 1, and by nothing more."""


@dataclass(frozen=True)
class _Fit:
    """Factors minus 1, O's last, of one choice of blocks."""

    found: Tensor
    """[G + 1]."""
    projection: Tensor
    """[G + 1, M]: what makes factors of what is off."""
    left: Tensor
    """[M]: what they leave, in units of the noise."""


@dataclass(frozen=True)
class FactorSearch:
    """O and L of one head beside a recipe's.

    Args:
        head: Its inputs.
        out: What O is off the recipe's, [Tq, Dv].
        noise: ``drawn_noise`` of the recipe's O, [N, Tq, Dv].
        lse: The same of L, [Tq] and [N, Tq]; None where L was not captured.
        rows: The query rows that may be looked at.
        limit: What is no wrong factor yet.
        blocks: Rows of q and of k that share a scale; None: all, or one has several.
        smoothed: Whether k's mean is taken off.
    """

    head: AttentionHead
    out: Tensor
    noise: Tensor
    lse: tuple[Tensor, Tensor] | None
    rows: Tensor
    limit: float
    blocks: Mapping[Of, int | None]
    smoothed: bool = False

    def named(self, *, suspect: bool) -> Factors:
        """The factors that are wrong; ``suspect``: whether O is off by more than noise in any case."""
        rows = self.rows
        most = max(16, min(_ROWS, _ELEMENTS // max(len(self.head.k), 1)))
        if len(rows) > most:
            rows = rows[torch.linspace(0, len(rows) - 1, most, device=rows.device).long()]
        tried = [_Fitted(self, rows, of_mean) for of_mean in ((True, False) if self.smoothed else (False,))]
        if not len(rows):
            return Factors("")
        # L tells which of both it is: the one that leaves less.
        best = min(tried, key=lambda one: float(one.whole.left.square().sum()))
        return best.factors(suspect=suspect)


class _Fitted:
    """The fits of ``FactorSearch`` in chosen rows, with k's mean multiplied too or not."""

    def __init__(self, search: FactorSearch, rows: Tensor, centred: bool) -> None:
        self._rows, self._limit = rows, search.limit
        k = search.head.k
        self._head = replace(search.head, do=None, k=k - k.mean(0) if centred else k)
        parts = [(search.out[rows], search.noise[:, rows])]
        if search.lse is not None:
            parts.append((search.lse[0][rows], search.lse[1][:, rows]))
        self._units = [_by_row(noise) for _, noise in parts]
        self._apart = self._joined([off for off, _ in parts])
        self._noise = torch.stack([self._joined([x[n] for _, x in parts]) for n in range(len(search.noise))])
        self._size = parts[0][0].numel()
        self._blocks = search.blocks
        block = reference_rows(self._head, rows)
        self._plain = block.out, block.lse
        self.whole = self._fit("k", torch.zeros(len(k), dtype=torch.long, device=k.device))

    def factors(self, *, suspect: bool) -> Factors:
        """What is named."""
        both = self.whole.projection @ self.whole.projection.T
        if float(torch.linalg.det(both)) <= 1e-9 * float(both.diagonal().prod()):
            return Factors("")
        wrong = self._wrong(self.whole)
        fits = self._explains(self.whole)
        # Scores that are all small are in L alone.
        of_lse = self._apart[self._size :].square()
        suspect |= bool(len(of_lse) and of_lse.mean() > _ROW_OFF**2)
        if not (fits or suspect):
            return Factors("")
        blocks = [(of, each, self._fit(of, each)) for of, each in self._groups(1)]
        if fits and not any(self._differ(fit) for _, _, fit in blocks):
            if not wrong.any():
                return Factors("")
            scores, out = (1 + self.whole.found).tolist()
            if wrong[0] and self._denied():
                wrong[0], scores = False, 1.0
            said = [f"its scores are multiplied by {scores:.3g} throughout, as by {_CULPRIT['all']}"] * bool(wrong[0])
            said = [f"it is multiplied by {out:.3g} throughout, as by {_CULPRIT['v']}"] * bool(wrong[1]) + said
            return Factors("; ".join(said), scores, out, smaller=bool(wrong[0]) and scores < 1)
        explained = [one for one in blocks if self._of_its_own(*one)]
        # Where the recipe does not say what shares a scale, smaller blocks may.
        finer = [(of, each, self._fit(of, each)) for of, each in self._groups(2) if self._blocks[of] is None]
        if not explained:
            explained = [one for one in finer if self._of_its_own(*one, row_off=_ROW_OFF_GUESSED)]
        if not explained:
            return Factors("")
        # Whether they are of q or of k smaller blocks tell better, as those of another size may pass for either.
        nearest = min([*blocks, *finer], key=lambda one: float(one[2].left.square().sum()))[0]
        mine = [one for one in explained if one[0] == nearest]
        if not mine:
            return Factors("")
        of, each, fit = mine[0]
        if of == "k" and self._left_out(each, fit):
            return Factors("")
        own = fit.found[:-1][self._wrong(fit)[:-1]]
        smaller = bool(len(own) and (own < 0).all())
        return Factors(self._of_blocks(of, each, fit), throughout=False, smaller=smaller)

    def _denied(self) -> bool:
        """Whether L is nearer without the scores' factor: only a constant would undo what the factor makes of it."""
        factors = 1 + self.whole.found
        off, _ = self._model("k", torch.zeros(len(self._head.k), dtype=torch.long, device=factors.device), factors)
        of_lse = self._apart[self._size :]
        return bool((of_lse - off[self._size :]).square().sum() > of_lse.square().sum())

    def _of_blocks(self, of: Of, each: Tensor, fit: _Fit) -> str:
        """In words, the blocks with a wrong factor."""
        wrong, where = self._wrong(fit), "keys" if of == "k" else "rows"
        factors = (1 + fit.found).tolist()
        some = [g for g in range(len(factors) - 1) if wrong[g]]
        places = [ranges((each == g).nonzero()[:, 0].tolist()) for g in some]
        said = [f"it is multiplied by {factors[-1]:.3g} throughout, as by {_CULPRIT['v']}"] if wrong[-1] else []
        if len(some) > _NAMED:
            own = [factors[g] for g in some]
            by = f"factors of {between(f'{min(own):.3g}', f'{max(own):.3g}')}, each block of {where} by its own"
            blocks = f"in {len(some)} of {len(factors) - 1} blocks its scores are multiplied by {by}"
            said.append(f"{blocks}, as by {_CULPRIT[of]}")
        elif some:
            by = together([f"{factors[g]:.3g} in {where} {p}" for g, p in zip(some, places, strict=True)])
            said.append(f"its scores are multiplied by {by}, as by {_CULPRIT[of]}")
        return "; ".join(said)

    def _of_its_own(self, of: Of, each: Tensor, fit: _Fit, row_off: float = _ROW_OFF) -> bool:
        """Whether blocks have factors of their own, and these explain what is off."""
        return self._explains(fit, row_off) and self._differ(fit) and self._whole_blocks(of, each, fit)

    def _whole_blocks(self, of: Of, each: Tensor, fit: _Fit) -> bool:
        """Whether both halves of each block have its factor: keys that are left out look like a factor of theirs."""
        place = torch.arange(len(each), device=each.device)
        first = torch.zeros(len(fit.found) - 1, dtype=torch.long, device=each.device)
        first.scatter_reduce_(0, each, place, "amin", include_self=False)
        size = each.bincount(minlength=len(first))
        halves = 2 * each + (2 * (place - first[each]) >= size[each])
        split = self._fit(of, halves)
        apart = split.found[:-1] - fit.found[:-1].repeat_interleave(2)[: len(split.found) - 1]
        own = fit.projection[:-1].repeat_interleave(2, 0)[: len(apart)]
        return not bool(self._beyond(apart, split.projection[:-1] - own).any())

    def _left_out(self, each: Tensor, fit: _Fit) -> bool:
        """Whether keys whose factor is below 1 are as likely left out, by some rows or all."""
        head, rows = self._head, self._rows
        block = reference_rows(head, rows)
        smaller = (self._wrong(fit)[:-1] & (fit.found[:-1] < 0)).nonzero()[:, 0]
        seen = block.probs.masked_fill(torch.isin(each[block.keys], smaller), 0.0)
        rest = seen.sum(1).clamp(min=1e-300)
        out = head.drop(seen, rows, block.keys) @ head.v[block.keys] / rest[:, None]
        without = self._joined([out - self._plain[0], rest.log()])
        nearer = torch.minimum(self._by_row(self._apart), self._by_row(self._apart - without))
        return bool(nearer.sum() <= fit.left.square().sum())

    def _by_row(self, values: Tensor) -> Tensor:
        """The sum of squares of O's and L's ``values`` in each row, [R]."""
        squares = values.square()
        of_out = squares[: self._size].view(len(self._rows), -1).sum(1)
        return of_out + squares[self._size :] if len(squares) > self._size else of_out

    def _groups(self, parts: int) -> list[tuple[Of, Tensor]]:
        """Blocks of keys and of rows, in so many parts, [Tk] and [Tq] numbers from 0, where there are several."""
        found: list[tuple[Of, Tensor]] = []
        lengths: dict[Of, int] = {"k": len(self._head.k), "q": len(self._head.q)}
        for of, length in lengths.items():
            size = max(self._blocks[of] or 64, -(-length // _BLOCKS)) // parts
            if length > size:
                found.append((of, torch.arange(length, device=self._rows.device) // size))
        return found

    def _fit(self, of: Of, each: Tensor) -> _Fit:
        """Factors of blocks of rows or keys, ``each`` of them in one, and O's; L may be off by a constant besides."""
        factors = torch.ones(int(each.max()) + 2, dtype=torch.float64, device=each.device)
        # Where scores are all small, a factor makes much the same of all rows' L.
        constant = self._joined([torch.zeros_like(self._plain[0]), torch.ones_like(self._plain[1])])[:, None]
        for _ in range(_STEPS):
            off, shapes = self._model(of, each, factors)
            projection = torch.linalg.pinv(torch.cat([shapes, constant], 1), rtol=1e-7)
            step = (projection @ (self._apart - off))[:-1].clamp(-_FARTHEST, _FARTHEST)
            factors = factors + step
            if float(step.abs().max()) < _STILL:
                break
        off, _ = self._model(of, each, factors)
        left = self._apart - off
        return _Fit(factors - 1, projection[:-1], left - (constant * (projection[-1:] @ left)).flatten())

    def _model(self, of: Of, each: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
        """What O and L are off with these factors, [M], and the derivatives by them, [M, G + 1]."""
        head, rows = self._head, self._rows
        own = factors[each][:, None]
        block = reference_rows(replace(head, **{of: getattr(head, of) * own}), rows)
        scores = (head.q[rows] @ head.k[block.keys].T) * head.scale
        scores = scores if block.slope is None else scores * block.slope
        moved = block.probs * scores.masked_fill(block.probs == 0, 0.0)
        kept, out = head.drop(moved, rows, block.keys), block.out
        shapes = []
        for g in range(len(factors) - 1):
            if of == "k":
                some = each[block.keys] == g
                more, sums = kept[:, some] @ head.v[block.keys][some], moved[:, some].sum(1)
            else:
                some = (each[rows] == g)[:, None]
                more, sums = (kept * some) @ head.v[block.keys], (moved * some).sum(1)
            shapes.append(self._joined([(more - sums[:, None] * out) * factors[-1], sums]))
        shapes.append(self._joined([out, torch.zeros_like(block.lse)]))
        off = self._joined([factors[-1] * out - self._plain[0], (block.lse - self._plain[1]).nan_to_num()])
        return off, torch.stack(shapes, 1)

    def _joined(self, parts: list[Tensor]) -> Tensor:
        """O's and L's (where it is known) in units of their noise, one after the other, [M]."""
        return torch.cat(
            [(x.double().view(len(u), -1) / u).flatten() for x, u in zip(parts, self._units, strict=False)]
        )

    def _explains(self, fit: _Fit, row_off: float = _ROW_OFF) -> bool:
        """Whether no more than noise is left, in no row either: another fault has a part that looks like a factor."""
        # A factor multiplies the noise too.
        more = max(1.0, float(fit.found.max()) + 1) ** 2
        left, off = (float(x.square().mean()) for x in (fit.left, self._apart))
        if left > 2 * LOSSY**2 and left > min(2 * LOSSY**2 * more, _PART * off):
            return False
        if len(of_lse := fit.left[self._size :].square()):
            off = float(self._apart[self._size :].square().mean())
            if float(of_lse.mean()) > max(2 * LOSSY**2 * more, _PART * off):
                return False
        worst, whole = (
            float(x[: self._size].view(len(self._rows), -1).square().mean(1).max()) for x in (fit.left, self._apart)
        )
        # Factors of blocks fit more of anything.
        part = _ROW_LEFT if len(fit.found) == 2 else _PART
        return worst <= max(row_off**2 * more, part * whole)

    def _wrong(self, fit: _Fit) -> Tensor:
        """Which factors are not 1, bool [G + 1]: by more than ``limit``, and than chance."""
        return self._beyond(fit.found, fit.projection)

    def _differ(self, fit: _Fit) -> bool:
        """Whether some block's factor is another than the common one."""
        count = len(fit.found) - 1
        apart = fit.found[:count] - self.whole.found[0]
        return bool(self._beyond(apart, fit.projection[:count] - self.whole.projection[0]).any())

    def _beyond(self, values: Tensor, projection: Tensor) -> Tensor:
        # The difference of two kernels has twice the variance of one.
        deviations = math.sqrt(2) * (projection @ self._noise.T).std(1)
        far = [
            abs(x) > self._limit and beyond_chance(x, s, len(self._noise), len(values))
            for x, s in zip(values.tolist(), deviations.tolist(), strict=True)
        ]
        return torch.tensor(far)


def _by_row(noise: Tensor) -> Tensor:
    """The root mean square of noise [N, n, ...] by row, [n, 1]; no less than a tenth of that of all."""
    variance = noise.double().flatten(2).square().mean((0, 2)) if noise.ndim > 2 else noise.double().square().mean(0)
    found: Tensor = variance.clamp(min=float(variance.mean()) / 100 or 1.0).sqrt()[:, None]
    return found


def beyond_chance(difference: float, deviation: float, draws: int, tests: int = 1) -> bool:
    """Whether a difference is beyond the chance of ``MEANS_APART``, its standard deviation known from draws."""
    from scipy.special import stdtr

    return bool(2 * stdtr(draws - 1, -abs(difference) / max(deviation, 1e-300)) <= MEANS_APART / tests)
