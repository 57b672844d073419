"""x, or q, k and v, that are further apart than what came in explains: what is said, and in which tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.layers import ComparedLayer
from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.analyses.mismatch.storage import few_levels
from attn_diag.results.mismatch import MismatchLayer, Place
from attn_diag.results.wording import percent, ranges, together

# Half a dozen roundings stand between the token and q, k, v of one layer, or between one layer and the next: the
# norm, the product, the bias, RoPE, each at most one unit. Differences above are none of one layer's roundings.
ROUNDINGS = 8
# Between one and the same x and q, k, v eight of them (half a unit each in the mean) leave two runs two units apart.
OF_SAME_INPUT = 4
# What came in may be amplified, but not by so much in one layer.
JUMP = 4.0
# Of so many tokens, one may be another: of half of them it is no place.
_FEW = 1 / 8
# So many of them are looked for among the other run's tokens, and so many are named.
_MOST, _NAMED = 64, 4


def jump_of(
    found: ComparedLayer, result: MismatchLayer, before: Sequence[MismatchLayer], told: Collection[str]
) -> tuple[Place, str] | None:
    """Whether x, or q, k and v, differ by more than this layer's roundings and what came in explain."""
    limit = ROUNDINGS * found.unit
    earlier = [layer.difference for layer in before[-1:]] + [
        d for layer in before[-1:] for d in (layer.x,) if d is not None
    ]
    came_in = max(earlier, default=0.0)
    if result.x is not None and result.x > max(limit, JUMP * came_in):
        where = f"O of layer {before[-1].layer} by {percent(before[-1].difference)}" if before else "nothing before it"
        return "stream", (
            f"the attention's input x differs by {percent(result.x)}, {where}: something outside attention (norm, MLP, "
            "embedding, projection of O, dropout) is another"
        )
    if result.x is None and before:
        return _unseen_jump(found, result, before[-1], told)
    worst, size = _furthest(found, result, told)
    limit = OF_SAME_INPUT * found.unit if result.x == 0 else limit
    if size > max(limit, JUMP * (result.x or 0.0)):
        beside = "" if result.x is None else f", x by {percent(result.x)}"
        if (few := _of_few_tokens(found, worst, max(limit, JUMP * (result.x or 0.0)))) is not None:
            return "projection", f"{worst} differs by {percent(size)}{beside}: {few}"
        kept = "" if worst == "q" else ", or a cache below 16 bits behind it"
        return "projection", (
            f"{worst} differs by {percent(size)}{beside}: the projection (weights, bias, norm, position encoding or "
            f"the order of heads) is another{kept}; not told which"
        )
    return None


def _unseen_jump(
    found: ComparedLayer, result: MismatchLayer, before: MismatchLayer, told: Collection[str]
) -> tuple[Place, str] | None:
    """The same without x: what came in is what q, k, v and O of the layer before show, and two steps lie between."""
    if before.layer != found.layer - 1:
        return None  # what the layers between did is not known
    came_in = max(float(getattr(before, name)) for name in ("q", "k", "v", "difference"))
    worst, size = _furthest(found, result, told)
    if size <= max(2 * ROUNDINGS * found.unit, JUMP**2 * came_in):
        return None
    return "stream", (
        f"{worst} differs by {percent(size)}, where q, k, v and O of layer {before.layer} differ by {percent(came_in)} "
        "at most: something between (projection, bias, norm, position encoding, order of heads, MLP) is another; not "
        "told which (the attention's input x was not captured)"
    )


def _furthest(found: ComparedLayer, result: MismatchLayer, told: Collection[str] = ()) -> tuple[str, float]:
    """Which of q, k and v, but those that have a cause, are furthest apart, and how far, relative.

    A quantiser of few bits in both runs makes whole steps of what came in as rounding, in few elements. On average it
    neither widens nor narrows a difference: between its numbers the mean of |b - a| is what came in.
    """
    sizes = {name: float(getattr(result, name)) for name in ("q", "k", "v") if name not in told}
    for name in sizes:
        if sizes[name] > ROUNDINGS * found.unit:
            a, b = (torch.cat([getattr(head.rows[side], name) for head in found.heads]) for side in (0, 1))
            if few_levels(a) and few_levels(b):
                sizes[name] = float((b - a).abs().nanmean() / a.abs().nanmean())
    worst = max(sizes, key=lambda name: sizes[name])
    return worst, sizes[worst]


def _of_few_tokens(found: ComparedLayer, worst: str, limit: float) -> str | None:
    """In words, where few tokens have all of the difference: an entry of a cache that is another's, or nobody's.

    Args:
        found: The layer.
        worst: Which of q, k and v is furthest apart.
        limit: Up to what difference, relative, a token's is rounding.
    """
    heads = [head.rows for head in found.heads]
    every = heads[0][0].tokens
    if any(head.sequence != found.heads[0].sequence for head in found.heads) or any(
        not torch.equal(a.tokens, every) for a, _ in heads
    ):
        return None
    off = {name: _apart([(a.tokens, getattr(a, name), getattr(b, name)) for a, b in heads], limit) for name in "qkv"}
    if not 0 < len(off[worst]) <= _FEW * len(every):
        return None
    which = [name for name in "qkv" if torch.equal(off[name], off[worst])]
    tokens, count = off[worst].tolist(), len(every)
    where = f"{'token' if len(tokens) == 1 else 'tokens'} {ranges(tokens)}"
    words = f"{together(which)} {'are' if len(which) > 1 else 'is'} another in {where} ({len(tokens)} of {count}) alone"
    if (origin := _origins(heads, which, tokens, limit)) is not None:
        words += f", where rollout has {origin}"
    return words


def _apart(rows: Sequence[tuple[Tensor, Tensor, Tensor]], limit: float) -> Tensor:
    """The tokens that are further apart than the limit, over all heads, int64 [m]; the others are within it."""
    size = torch.stack([a.square().sum(1) for _, a, _ in rows]).nansum(0)
    apart = torch.stack([(b - a).square().sum(1) for _, a, b in rows]).nansum(0)
    # A token that is next to nothing beside the others is as far off as their rounding.
    return rows[0][0][apart > limit**2 * torch.maximum(size, size.mean())]


def _origins(
    heads: Sequence[tuple[RunRows, RunRows]], which: Sequence[str], tokens: list[int], limit: float
) -> str | None:
    """What rollout has there, where that is train's of other tokens, or zeros."""
    if len(tokens) > _MOST:
        return None
    known = heads[0][0].tokens.tolist()
    every = torch.cat([getattr(a, name) for a, _ in heads for name in which], 1)
    origins = []
    for token in tokens:
        own = torch.cat([getattr(b, name)[known.index(token)] for _, b in heads for name in which])
        if not bool(own.any()):
            continue
        left = ((every - own).norm(dim=1) / every.norm(dim=1).clamp(min=1e-300)).nan_to_num(torch.inf)
        if float(left.min()) > limit:
            return None
        origins.append(known[int(left.argmin())])
    if len(origins) not in (0, len(tokens)):
        return None
    if not origins:
        return "zeros"
    one = len(origins) == 1
    numbers = ranges(origins) if origins == sorted(set(origins)) else together(list(map(str, origins)))
    named = f"{'token' if one else 'tokens'} {numbers}" if len(origins) <= _NAMED else "other tokens"
    return f"what train has in {named}"
