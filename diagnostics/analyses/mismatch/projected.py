"""q, k or v that are apart where what is projected is not: in which tokens, and what is said of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attn_diag.analyses.mismatch.layers import ComparedLayer
from attn_diag.analyses.mismatch.rows import RunRows
from attn_diag.results.wording import ranges, together

# Of so many tokens, one may be another: of half of them it is no place.
_FEW = 1 / 8
# So many of them are looked for among the other run's tokens, and so many are named.
_MOST, _NAMED = 64, 4


def of_few_tokens(found: ComparedLayer, worst: str, limit: float) -> str | None:
    """In words, where few tokens have all of the difference: an entry of a cache that is another's, or nobody's.

    Args:
        found: The layer.
        worst: Which of q, k and v is furthest apart.
        limit: Up to what difference, relative, a token's is rounding.
    """
    heads = [head.rows for head in found.heads]
    off = {name: _apart([(a.tokens, getattr(a, name), getattr(b, name)) for a, b in heads], limit) for name in "qkv"}
    if len({head.sequence for head in found.heads}) > 1 or not 0 < len(off[worst]) <= _FEW * len(heads[0][0].tokens):
        return None
    which = [name for name in "qkv" if torch.equal(off[name], off[worst])]
    tokens, count = off[worst].tolist(), len(heads[0][0].tokens)
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
    named = f"{'token' if one else 'tokens'} {ranges(origins)}" if len(origins) <= _NAMED else "other tokens"
    return f"what train has in {named}"
