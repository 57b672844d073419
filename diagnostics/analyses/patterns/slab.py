"""Some rows of O, dQ, dK or dV as sums: weights [n, m] of what the m queries or keys contribute.

    O = P V        dQ = alpha dS K        dK = alpha dS^T Q        dV = P^T dO        (dropout: P o W and W o dP)

The weights are known for invisible pairs too, as if they were seen: P = exp(S - L), with the row's own L.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.reference import AttentionHead, HeadReference
from attn_diag.results.quality import Quantity

# exp of more than this is as good as infinite beside a row sum.
_LARGEST_EXPONENT = 60.0
_CHUNK = 256


@dataclass(frozen=True)
class Slab:
    """Rows of one quantity in one query head."""

    quantity: Quantity
    """o, dq, dk or dv."""
    head: AttentionHead
    """The head."""
    rows: Tensor
    """Which n rows (queries or keys), [n]."""
    visible: Tensor
    """bool [n, m]."""
    probs: Tensor
    """P, [n, m], also where it is not visible."""
    kept_probs: Tensor
    """P o W, which dropout makes of it."""
    tanh: Tensor | None
    """tanh(S/c), [n, m], under softcap c."""
    dprobs: Tensor | None
    """dP; None of O."""
    delta: Tensor | None
    """[n, 1] or [1, m]."""

    @property
    def slope(self) -> Tensor | None:
        """1 - tanh(S/c)^2 under softcap."""
        return None if self.tanh is None else 1 - self.tanh.square()

    @property
    def vectors(self) -> Tensor:
        """What is summed, [m, D]."""
        found = {"o": self.head.v, "dq": self.head.k, "dk": self.head.q, "dv": self.head.do}[self.quantity]
        assert found is not None
        return found

    @property
    def positions(self) -> Tensor:
        """[n], where every row lies among what it sums over: the last key that it would see if causal, or the key."""
        return self.head.positions[self.rows] if self.quantity in ("o", "dq") else self.rows

    def weights(self, delta: Tensor | float | None = None, *, sloped: bool = True) -> Tensor:
        """[n, m], also where not visible: P o W, or alpha dS with this delta (None: the true one)."""
        if self.quantity in ("o", "dv"):
            return self.kept_probs
        assert self.dprobs is not None
        assert self.delta is not None
        dscores = self.probs * (self.dprobs - (self.delta if delta is None else delta)) * self.head.scale
        return dscores if self.slope is None or not sloped else dscores * self.slope

    def total(self, weights: Tensor) -> Tensor:
        """The sum over what is visible, [n, D]."""
        return weights.masked_fill(~self.visible, 0.0) @ self.vectors


def open_slab(head: AttentionHead, quantity: Quantity, rows: Tensor, lse: Tensor, delta: Tensor | None) -> Slab:
    """The slab of some rows.

    Args:
        head: The head, perhaps with another mask, scale or other keys than ``lse`` and ``delta`` were made with.
        quantity: o, dq, dk or dv.
        rows: Which n rows.
        lse: L of all rows, [Tq].
        delta: Likewise; None of O.
    """
    by_key = quantity in ("dk", "dv")
    queries = torch.arange(len(head.q), device=rows.device) if by_key else rows
    keys = rows if by_key else torch.arange(len(head.k), device=rows.device)
    scores = (head.q[queries] @ head.k[keys].T) * head.scale
    tanh = None
    if head.softcap is not None:
        tanh = torch.tanh(scores / head.softcap)
        scores = tanh * head.softcap
    if head.masking.mask is None and head.masking.alibi is None:
        hidden = head.masking.hidden(head.positions[queries], slice(0, len(head.k)))
        visible = torch.ones_like(scores, dtype=torch.bool) if hidden is None else ~hidden[:, keys]
    else:
        added = torch.cat(list(_masks(head, queries, keys if by_key else None)))
        visible = added > -torch.inf
        scores = scores + added.masked_fill(~visible, 0.0)
    own_lse = lse[queries]
    probs = scores.sub_(own_lse.masked_fill(~own_lse.isfinite(), torch.inf)[:, None])
    probs = probs.clamp_(max=_LARGEST_EXPONENT).exp_()
    kept, dprobs = _dropped(head, probs, queries, keys), None
    if quantity != "o":
        assert head.do is not None
        dprobs = _dropped(head, head.do[queries] @ head.v[keys].T, queries, keys)
    own_delta = None if delta is None else delta[queries][:, None]
    if by_key:
        visible, probs, kept = visible.T, probs.T, kept.T
        tanh, dprobs, own_delta = (None if t is None else t.T for t in (tanh, dprobs, own_delta))
    return Slab(quantity, head, rows, visible, probs, kept, tanh, dprobs, own_delta)


def slab_of(head: AttentionHead, reference: HeadReference, quantity: Quantity, rows: Tensor) -> Slab:
    """The slab of some rows as they truly are."""
    return open_slab(head, quantity, rows, reference.lse, reference.delta)


def _dropped(head: AttentionHead, values: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """[queries, keys] times W."""
    dropout = head.dropout
    return values if dropout is None else values * dropout.kept[queries][:, keys] * dropout.factor


def _masks(head: AttentionHead, queries: Tensor, keys: Tensor | None) -> Iterator[Tensor]:
    """What the mask adds, -inf where it hides, chunk by chunk of query rows."""
    for start in range(0, len(queries), _CHUNK):
        part = queries[start : start + _CHUNK]
        added = head.q.new_zeros(len(part), len(head.k))
        head.apply_mask(added, part, slice(0, len(head.k)))
        yield added if keys is None else added[:, keys]
