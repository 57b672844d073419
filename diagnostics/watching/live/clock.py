"""Which optimizer's ``step()`` ends a step of training."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn


class Clock:
    """Tells steps by the optimizers of a model, also while no attention call is seen.

    Several optimizers may step after one backward: the first of them is the one that counts, as long as it steps.

    Args:
        model: Whose optimizers; None: all.

    Attributes:
        owns: whether one that holds the model's parameters is known.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model, self.owns = model, model is None
        self._leader: weakref.ref[Any] | None = None
        self._others: set[int] = set()

    def is_ours(self, optimizer: Any) -> bool:
        """Not the optimizer of another model (a GAN's critic), once one that holds our parameters is known.

        One with master copies of the weights holds none of the model's own: it counts where there is no other.
        """
        if self._model is None:
            return True
        own = {id(p) for p in self._model.parameters()}
        holds = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        self.owns |= holds
        return holds or not self.owns

    def ticks(self, optimizer: Any, *, seen: bool) -> bool:
        """Whether this ``step()`` of one of ours ends a step.

        Args:
            optimizer: Whose.
            seen: Whether attention was called since the last one ended: then it does.
        """
        leader = None if self._leader is None else self._leader()
        # Who steps twice while the leader does not has taken over.
        if not seen and leader is not None and optimizer is not leader and id(optimizer) not in self._others:
            self._others.add(id(optimizer))
            return False
        self._leader = weakref.ref(optimizer)
        self._others.clear()
        return True
