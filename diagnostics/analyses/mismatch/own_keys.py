"""Which keys a row sees, and which of them is its own: that of its token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.head.read import read_float64, read_head
from attn_diag.reference import AttentionHead, hides

# Additive masks hide keys by -1e4 or less, where scores are far smaller: below -104 exp is 0 in fp32.
_HIDING, _NOTHING = -9000.0, 104.0


def own_bias(capture: Capture, item: int, head: int, read: AttentionHead) -> Tensor:
    """What is added to the scaled scores of one head, -inf where a key is hidden; float64 [Tq, Tk]."""
    q_length, k_length = len(read.q), len(read.k)
    bias = torch.zeros(q_length, k_length, dtype=torch.float64, device=read.q.device)
    read.apply_mask(bias, slice(0, q_length), slice(0, k_length))
    if (mask := capture.mask(item, head)) is not None:
        added = mask[0].to(bias.device)
        bias.masked_fill_(hides(added), -torch.inf)
        if added.dtype != torch.bool and bool((low := added <= _HIDING).any()):
            largest = abs(read.scale) * float(read.q.norm(dim=1).amax() * read.k.norm(dim=1).amax())
            if 2 * largest + _NOTHING < -_HIDING:
                bias.masked_fill_(low, -torch.inf)
    return bias


def own_keys(visible: Tensor) -> Tensor:
    """Index of every row's own key, int64 [Tq]: the last one that it sees."""
    count = visible.shape[1]
    last = count - 1 - visible.flip(1).int().argmax(1)
    seen = visible.any(1)
    if bool((last[seen] == last[seen][0]).all()) and visible.shape[0] == count > 1:
        # Every row sees the last key: a row's own key is then the one in its place.
        return torch.arange(count, device=visible.device)
    return last


def values_of(capture: Capture, item: int, heads: int, device: torch.device, keys: slice) -> Tensor:
    """v of these keys and so many heads, [keys, Hk, Dv]: of those that were repeated for GQA one each."""
    every = range(0, capture.kv_heads, capture.kv_heads // heads)
    found = [read_float64(capture, "v", item, head, device) for head in every]
    return torch.stack([v[keys] for v in found if v is not None], 1)


@dataclass
class OwnKeys:
    """The own keys of decoded rows, where a mask ends before or behind them."""

    calls: Sequence[Capture]
    """Of the guide layer, in order."""
    heads: int
    """How many heads of v are compared."""
    device: torch.device
    """Where."""
    _last: dict[tuple[int, int], int] = field(default_factory=dict)
    _off: set[tuple[int, int]] = field(default_factory=set)

    def masked(self, at: int, item: int) -> int | None:
        """The own key of a call's only row where its mask ends at another; None: it does not, or that is not known.

        A key that the row does not see is its own where the next call sees more than this one, or this is the last one
        and the call before was off too: rows of a sequence that has ended see the same keys in every call. One before
        the last that a row sees is its own where the call before did not see that last one, or was off too: of slots
        that are used in turn, all were seen.
        """
        last, written = self._seen(at, item), self._written(at, item)
        if last is None or written is None or written == last:
            return None
        was_off = (at - 1, item) in self._off
        if written < last:
            before = self._seen(at - 1, item, rows=None)
            off = was_off or (before is not None and before < last)
        else:
            after = self._seen(at + 1, item)
            off = was_off if after is None else after > last
        if not off:
            return None
        self._off.add((at, item))
        return written

    def _seen(self, at: int, item: int, rows: int | None = 1) -> int | None:
        """The last key that any row of a call sees; None: it sees none, or has not so many rows."""
        if not 0 <= at < len(self.calls) or item >= self.calls[at].batch:
            return None
        if rows is not None and self.calls[at].q_length != rows:
            return None
        if (at, item) not in self._last:
            capture = self.calls[at]
            bias = own_bias(capture, item, 0, read_head(capture, item, 0, self.device).head)
            seen = (bias > -torch.inf).any(0).nonzero()
            self._last[at, item] = int(seen[-1]) if len(seen) else -1
        found = self._last[at, item]
        return None if found < 0 else found

    def _written(self, at: int, item: int) -> int | None:
        """The key that a call of one row wrote, whether it sees it or not: what its cache has more, or otherwise, than
        that of the call before; None: not known."""
        if not at or item >= self.calls[at - 1].batch:
            return None
        now, old = (self.calls[n].lengths(item)[1] for n in (at, at - 1))
        if now == old + 1:
            return old
        if now != old:
            return None
        values, earlier = (values_of(self.calls[n], item, self.heads, self.device, slice(None)) for n in (at, at - 1))
        if values.shape != earlier.shape:
            return None
        changed = (values != earlier).flatten(1).any(1).nonzero()[:, 0].tolist()
        return int(changed[0]) if len(changed) == 1 else None
