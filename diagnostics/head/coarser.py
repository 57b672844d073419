"""Kernels that round one thing more coarsely than the format of their inputs, and whether that is what stands out.

INT8 and FP8 products in a BF16 kernel, BF16 scores in an FP16 kernel, an LSE in BF16: their errors are no wrong
mathematics, though they exceed what rounding to the format makes, in some rows more than in others. A place is wrong
only if no such rounding makes it. Each is run a few times with stochastic rounding; with V the mean square that it
leaves in an element, e and c the observed error and a well-rounded kernel's, n the expected noise: what stands out
holds the share ``made`` of all V / n, and the share ``seen`` of all (e^2 - c^2) / n. Where nothing but a place is
wrong, seen is 1. What stands out by chance, the part ``made`` of squares of unit normal numbers that is largest, holds
made + 2 z phi(z) of their sum, z = the quantile of 1 - made / 2.
A rounding explains what stands out if seen is nearer to that than to 1, or if most of what it makes is there anyway;
and if hardly more rows are turned away from the true ones than by its draws. Of O it does not where the error is
larger than what it makes, and the rows that do not stand out have none of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.head.recipe_candidates import ALL_KEYS
from attn_diag.kernels import Recipe, Schedule, preset
from attn_diag.kernels.formats import parse, round_to
from attn_diag.reference import AttentionHead, reference_rows

# E4M3's mantissa, without its range: INT8 with a scale a tile is finer.
_MANTISSA = 3
_EIGHT_BITS = f"e8m{_MANTISSA}"
_CHUNK = 256
# On a GPU emulation waits for its launches: there all keys are taken at once, in blocks of so many scores. A draw has
# no bits that a schedule would change.
_SCORES = 2**22
# What is rounded: scores to BF16 in the forward alone, so that L does not fit the backward's; q, k, v and dO to 8 bits;
# the casts of P and dS to 8 bits; dP to 8 bits; delta to 8 bits.
SITES = ("scores", "operands", "casts", "dprobs", "delta")
# All of these, and every other intermediate in BF16.
COARSEST = "coarsest"
# k and v to 8 bits, of keys that no row before some one sees: "beyond:37".
BEYOND_ROW = "beyond:"
DRAWS = 2
# Where so much of what a rounding makes stands out, nothing is a place. So many rows may be beyond it by chance: of an
# error of L every row has a single draw.
_MOST, FEW = 0.5, 0.05
# Where the others are more than so many rows, and have so little of what the rounding would make of them, it made
# nothing there; up to the error that it makes it may be that of some rows alone (a cache of the older keys).
ROWS, _NOTHING = 16, 1 / 256
# So many times as much as 8 bits make is made by as few as there are; one key's P differs from row to row by e twice
# over and more, that of many does not.
_FEWER_BITS, _EVEN = 8.0, 1.0
# So many rows at least are so many times, squared, as far off as a well-rounded kernel's.
_MOST_ROWS, _CLEARLY = 0.75, 4.0
# A row of which no more is left, as a cosine, is turned away from the truth.
_TURNED = 0.5


def coarser(head: AttentionHead, input_format: str, name: str, draw: int | None = None) -> tuple[AttentionHead, Recipe]:
    """The inputs and the recipe of a kernel that rounds more coarsely.

    Args:
        head: The head.
        input_format: bf16 or fp16.
        name: One of ``SITES``, ``COARSEST``, or ``BEYOND_ROW`` and the number of a row.
        draw: Starts stochastic roundings; None: to nearest.
    """
    width, how = head.q.shape[1], "" if draw is None else ":stochastic"
    eight, seed = _EIGHT_BITS + how, draw or 0
    if name in ("operands", COARSEST):
        q, k, v = (round_to(x, parse(eight), seed + i) for i, x in enumerate((head.q, head.k, head.v)))
        head = replace(head, q=q, k=k, v=v, do=None if head.do is None else round_to(head.do, parse(eight), seed + 3))
    if name.startswith(BEYOND_ROW):
        before = torch.arange(int(name.removeprefix(BEYOND_ROW)), device=head.q.device)
        seen = head.q.new_zeros(len(before), len(head.k))
        head.apply_mask(seen, before, slice(0, len(head.k)))
        kept = (seen > -torch.inf).any(0)[:, None]
        k, v = (torch.where(kept, x, round_to(x, parse(eight), seed + i)) for i, x in enumerate((head.k, head.v)))
        head = replace(head, k=k, v=v)
    recipe = preset("qiu2025" if name == COARSEST else "fa2", "bf16" if name == COARSEST else input_format, width)
    if name in ("casts", COARSEST):
        recipe = replace(recipe, probs=eight, backward_probs=eight, dscores=eight)
    if name in ("dprobs", COARSEST):
        recipe = replace(recipe, dprobs=eight)
    if name in ("delta", COARSEST):
        recipe = replace(recipe, delta=eight)
    if name == "scores":
        recipe = replace(recipe, scores=f"bf16{how}", alpha="before-rounding", difference="fp32", exp="exact")
    if name == COARSEST:
        recipe = replace(recipe, row_sum_clamp=None, backward_scores="fp32", dscores_from="cast-probs")
    if head.q.is_cuda:
        recipe = replace(recipe, schedule=Schedule(max(128, _SCORES // max(1, len(head.k))), ALL_KEYS))
    return head, replace(recipe, seed=seed)


def operands_noise(head: AttentionHead, rows: Tensor, mantissa: int = _MANTISSA) -> Tensor:
    """The standard deviation of L of some rows where q and k are rounded, [n]: every score's, weighted by P.

    A score is off by e alpha sqrt(2 q^2 . k^2); q's error is shared by all keys, and so may add up.
    """
    found = []
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        block = reference_rows(replace(head, do=None), part)
        squares = head.q[part].square() @ head.k[block.keys].square().T
        found.append((block.probs * squares).sum(1).sqrt())
    return torch.cat(found) * (head.scale * math.sqrt(2) * 2.0**-mantissa / math.sqrt(24))


def explains(
    errors: Tensor,
    others: Tensor,
    expected: Tensor,
    left: Sequence[Tensor],
    truth: Tensor,
    marked: Tensor,
    limits: Tensor,
    *,
    of_o: bool = False,
) -> bool:
    """Whether a rounding explains what stands out, see the module.

    Args:
        errors: Signed errors, [n, D].
        others: A well-rounded kernel's, [n, D].
        expected: Its expected squared ones, [n, D].
        left: The errors that the rounding leaves, draw by draw, each [n, D].
        truth: What is true, [n, D].
        marked: bool [n, D], the elements that stand out, or all of a row that does.
        limits: How many times a row's root mean square may exceed the noise's, [n].
        of_o: Whether they are O's, of which no row is right because something cancels.
    """
    from scipy.special import ndtri

    if _turned(errors, truth) > FEW + 2 * max(_turned(draw, truth) for draw in left):
        return False
    squares, others = errors.square(), others.square()
    expected = expected.clamp(min=1e-300)
    variance = torch.stack([draw.square() for draw in left]).mean(0)
    excess, relative = (squares - others) / expected, variance / expected
    size, makes = float(excess.sum()), float(relative.sum())
    if not (size > 0 and 0 < makes < math.inf):
        return False
    seen, made = float(excess[marked].sum()) / size, float(relative[marked].sum()) / makes
    right = ~marked.any(1)
    if (
        of_o
        and size > makes
        and int(right.sum()) > ROWS
        and excess[right].sum() / size < _NOTHING * relative[right].sum() / makes
    ):
        return False
    border = float(ndtri(1 - made / 2)) if 0 < made < 1 else 0.0
    largest = made + 2 * border * math.exp(-(border**2) / 2) / math.sqrt(2 * math.pi)
    if made < _MOST and seen > (1 + largest) / 2:
        return False
    noise = torch.maximum(others, expected) + size / makes * variance
    beyond = squares.sum(1) > limits.square() * noise.sum(1)
    return float(beyond.double().mean()) <= FEW


def of_later_keys(errors: Tensor, usual: Tensor, left: Sequence[Tensor], truth: Tensor) -> bool:
    """Whether rounding of the keys that earlier rows do not see makes an error: a cache whose first ones are kept.

    It may have fewer than 8 bits. Its rows are off as that makes them, more evenly than in proportion to what is true
    or all alike, as other faults are; those of a single key are off very unevenly.

    Args:
        errors: Signed errors of the rows from there on, [n, D].
        usual: A well-rounded kernel's, [n, D]: where few rows are beyond them, something is wrong in these.
        left: The errors that rounding of these keys to 8 bits leaves, draw by draw, each [n, D].
        truth: What is true, [n, D].
    """
    squares, variance = errors.square().sum(1), torch.stack([draw.square() for draw in left]).mean(0).sum(1)
    made = variance > 0
    if not bool(made.any()) or squares.sum() > _FEWER_BITS**2 * variance.sum():
        return False
    if (squares > _CLEARLY * usual.square().sum(1)).double().mean() < _MOST_ROWS:
        return False
    squares, like_truth = squares[made].clamp(min=1e-300), truth[made].square().sum(1).clamp(min=1e-300)
    # In units of what rounding makes, of what is true, and as it is.
    uneven, *others = (_spread(x.log()) for x in (squares / variance[made], squares / like_truth, squares))
    return uneven < min(_EVEN, *others)


def _spread(x: Tensor) -> float:
    """Half of what lies between the quartiles."""
    low, high = x.double().quantile(x.new_tensor([0.25, 0.75], dtype=torch.float64)).tolist()
    return float(high - low) / 2


def _turned(errors: Tensor, truth: Tensor) -> float:
    """The fraction of rows that these errors turn away from the true ones."""
    cosine = torch.nn.functional.cosine_similarity(truth + errors, truth, dim=1, eps=1e-300)
    return float((cosine < _TURNED).double().mean())
