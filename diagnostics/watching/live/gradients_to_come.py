"""The gradient at the output of the layer that made a recorded call's q, where more than a bias lies between them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from attn_diag.watching.live.slices import Slice
from attn_diag.watching.live.untraced import passed_by, untraced
from attn_diag.watching.live.whole_copies import copied_on, stream_now, whole


class Waits(Protocol):
    """Who waits for the gradient."""

    def projection_arrived(self, gradient: Tensor | None) -> None:
        """Take it, [B * T, N]; None: it does not come."""
        ...


class GradientToCome:
    """Called with the gradient on its way back, it keeps a copy, of which those who wait are told later.

    Args:
        through: The columns of the layer's output that q was made of.
        rows: So many of the gradient's rows, the first, are wanted; all where it has no more.
        keep: Given this, once it has come.
        failed: Told of a failure of ours.

    Attributes:
        waiting: Who waits.
        handle: Of the hook that this is.
    """

    __slots__ = ("_copy", "_failed", "_keep", "_rows", "_stream", "handle", "through", "waiting")

    def __init__(
        self,
        through: Slice,
        rows: int,
        keep: Callable[[GradientToCome], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self.through, self._rows, self._failed = through, rows, failed
        self._keep: Callable[[GradientToCome], None] | None = keep
        self.waiting: list[Waits] = []
        self.handle: Any = None
        self._copy: Tensor | None = None
        self._stream = 0

    def __call__(self, gradient: Tensor) -> None:
        """Keep a copy of the gradient, [B, T, N] or [B * T, N]; of a second backward nothing."""
        keep, self._keep = self._keep, None
        if keep is None:
            return
        try:
            gradient = gradient.detach()
            if gradient.dim() != 2:
                gradient = gradient.flatten(0, -2)
            if gradient.shape[0] > self._rows:
                gradient = gradient[: self._rows]
            self._copy = gradient.clone(memory_format=whole)
            self._stream = stream_now(gradient) if gradient.is_cuda else 0
            keep(self)
        except Exception as error:  # never an exception in somebody's training
            untraced(self._failed, error)

    def tell(self) -> None:
        """Give it to those who wait."""
        gradient, self._copy = self._copy, None
        try:
            while self.waiting:
                self.waiting.pop().projection_arrived(gradient)
        except Exception as error:  # likewise
            self._failed(error)

    def leave(self, one: Waits | None = None) -> None:
        """Have ``one`` wait no longer; be no hook any more once nobody waits."""
        if one in self.waiting:
            self.waiting.remove(one)
        if not self.waiting:
            self._keep = None
            if self.handle is not None:
                self.handle.remove()
                self.handle = None

    def stream_of_copies(self) -> AbstractContextManager[Any]:
        """The stream on which the copy was made; see ``records.Record``."""
        assert self._copy is not None
        return copied_on(self._stream, self._copy.device)


passed_by(GradientToCome.__call__.__code__)
