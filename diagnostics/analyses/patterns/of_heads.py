"""Other heads of a capture, whose tensors a quantity may have been made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from attn_diag.analyses.patterns.worded import item_of
from attn_diag.captures.capture import Capture
from attn_diag.head.read import read_head
from attn_diag.reference import AttentionHead

_MOST_OTHERS, _MOST_ELSEWHERE, _MOST_READ = 8, 16, 64


class OtherHeads:
    """Which they are, by name, read when they are needed."""

    def __init__(self, capture: Capture, device: torch.device) -> None:
        self._capture, self._device = capture, device
        self._group = capture.q_heads // capture.kv_heads
        self._largest: dict[str, float] | None = None

    def name(self, head: int) -> str:
        """What a head is called."""
        return f"head {head + self._capture.metadata.head_offset}"

    def nearest(self, batch: int, heads: Sequence[int]) -> list[tuple[str, Callable[[], AttentionHead]]]:
        """The nearest query heads of other key heads, and the same ones of other sequences."""
        c = self._capture
        far = sorted(set(range(c.q_heads)) - set(heads), key=lambda h: abs(h - heads[0]))[:_MOST_ELSEWHERE]
        places = [(batch, h) for h in far]
        places += [(b, h) for b in range(c.batch) if b != batch for h in heads][:_MOST_OTHERS]
        return [(self.name(h) + self._elsewhen(b, batch), partial(self._read, b, h)) for b, h in places]

    def _read(self, batch: int, head: int) -> AttentionHead:
        return read_head(self._capture, batch, head, self._device).head

    def largest(self) -> dict[str, float]:
        """The largest number of k and of v; of a capture of one head, or of many, it is not known."""
        c = self._capture
        if self._largest is None and not 1 < c.batch * c.kv_heads <= _MOST_READ:
            self._largest = {}
        if self._largest is None:
            heads = [self._read(b, h) for b in range(c.batch) for h in range(0, c.q_heads, self._group)]
            self._largest = {name: max(float(getattr(h, name).abs().amax()) for h in heads) for name in ("k", "v")}
        return self._largest

    def _elsewhen(self, batch: int, own: int) -> str:
        return "" if batch == own else f" of {item_of(self._capture.metadata, batch)[0]}"

    def key_heads(self, batch: int) -> dict[str, str]:
        """By the query heads' names: their key head's."""
        c, offset = self._capture, self._capture.metadata.head_offset
        if offset % self._group:
            return {}
        return {
            self.name(h) + where: f"key head {(h + offset) // self._group}{where}"
            for where in (self._elsewhen(b, batch) for b in range(c.batch))
            for h in range(c.q_heads)
        }

    def others(self, batch: int, head: int) -> list[tuple[str, Callable[[], AttentionHead]]]:
        """The nearest other heads, one of each other key head first, and the same head of other sequences."""
        c = self._capture
        own = head // self._group
        keys = sorted((kv for kv in range(c.kv_heads) if kv != own), key=lambda kv: abs(kv - own))
        heads = [kv * self._group + head % self._group for kv in keys]
        heads += sorted(
            (h for h in range(c.q_heads) if h // self._group == own and h != head), key=lambda h: abs(h - head)
        )
        heads = list(dict.fromkeys([*heads[:_MOST_OTHERS], *((head + by) % c.q_heads for by in (-1, 1))]))
        others = [b for b in range(c.batch) if b != batch][:_MOST_OTHERS]
        named = {h: self.name(h) for h in heads if h != head}
        if self._group > 1:
            offset = c.metadata.head_offset
            named |= {h: f"{n} (key head {(h + offset) // self._group})" for h, n in named.items()}
        found = [(name, partial(self._read, batch, h)) for h, name in named.items()]
        return [*found, *((item_of(c.metadata, b)[0], partial(self._read, b, head)) for b in others)]
