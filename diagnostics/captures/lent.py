"""What a kernel was handed, and whether it has written into that: inputs are its caller's, and so is a returned O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attn_diag.results.wording import share, together

_GIVEN = {"do": "dO", "dfinal_state": "the gradient of the last state"}
_RETURNED = {"o": "the O that it returned", "final_state": "the last state that it returned"}
_BACKWARD = "in its backward; "


@dataclass
class Lent:
    """The tensors of one call that are not the kernel's to change."""

    written: dict[str, str] = field(default_factory=dict)
    """By name, where it was written into: "(in its backward; 12 % of its 64 elements, first at [0, 0, 3, 0])"."""
    _held: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def out(self, name: str, held: Tensor, lent: Tensor) -> Tensor:
        """Hand a tensor out.

        Args:
            name: q, k, v, do, o, …
            held: What it holds, in memory of its own.
            lent: The tensor itself.

        Returns:
            ``lent``.
        """
        self._held[name] = held, lent
        return lent

    def forget(self, name: str) -> None:
        """Look at a tensor no more."""
        self._held.pop(name, None)

    def look(self, *, backward: bool = False) -> None:
        """Note what holds other bits now (a NaN that was there is none); after a backward, what did not before it."""
        for name, (held, lent) in self._held.items():
            if name not in self.written and (words := _change(held, lent)) is not None:
                self.written[name] = f"({_BACKWARD if backward else ''}{words})"


def written_words(written: Mapping[str, str]) -> str:
    """What is said of a kernel, called "it", that wrote into these (``Lent.written``)."""
    named = [f"{_RETURNED.get(n, f'its input {_GIVEN.get(n, n)}')} {words}" for n, words in written.items()]
    return f"it writes into {together(named)}, which its caller still needs"


def bits_of(x: Tensor) -> Tensor:
    """Its bytes."""
    # A single number that autograd has expanded has a stride of 0, and counts as contiguous.
    return x.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def _change(held: Tensor, lent: Tensor) -> str | None:
    before, after = (bits_of(x.detach().to(lent.device)) for x in (held, lent))
    if torch.equal(before, after):
        return None
    changed = before.ne(after).view(held.numel(), -1).any(1).view(held.shape)
    count, first = int(changed.sum()), changed.nonzero()[0].tolist()
    part = f"{count} of" if 100 * count < changed.numel() else f"{share(count / changed.numel())} of"
    return f"{part} its {changed.numel()} elements, first at {first}"
