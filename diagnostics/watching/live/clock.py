"""Which optimizer's ``step()`` ends a step of training."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from types import FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

# So many of the parameters are looked at.
_SAMPLE = 8
# So many steps of others are waited for one of the model's own that is there and has not stepped yet.
_PATIENCE = 20
BY_PARAMETERS = (
    "the parameters changed and no optimizer's step() was seen (in a compiled function, it tells nobody): steps are "
    "counted by that, for which calls are looked for on every one"
)
UNSTEPPED = "no torch.optim optimizer stepped, so all calls count as one step's: call end_step() after every step"
BY_PASSES = (
    "no optimizer's step() was seen, and the gradients were cleared before every forward pass: each pass counts as a "
    "step from now on; where that is not so, call end_step() after every step"
)
# Whether what is watched from now on is known to train: passes before the first that does are no steps then (an RL
# trainer samples first).
TRAINS: ContextVar[bool] = ContextVar("TRAINS", default=False)
# So many forward passes are waited for a step, where no optimizer of torch.optim has the parameters, and where one has
# (its gradients may be those of many passes, or all be skipped).
_PASSES, _PASSES_OF_ONE = 20, 512


class Clock:
    """Tells steps by the optimizers of a model, also while no attention call is seen.

    Several optimizers may step after one backward: the first of them is the one that counts, as long as it steps.

    Args:
        model: Whose optimizers; None: all.

    Attributes:
        owns: whether one that holds the model's parameters is known.
        heard: whether an optimizer's step has been heard of.
        by_parameters: whether steps are told by the change of the model's parameters, as no optimizer is heard of.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self._model, self.owns = model, model is None
        self._leader: weakref.ref[Any] | None = None
        self._others: set[int] = set()
        self.by_parameters = self.heard = False
        self._versions: dict[int, int] | None = None
        self._waited = 0
        self._each_pass = False
        self._awaited: int | None = None

    def is_ours(self, optimizer: Any) -> bool:
        """Not the optimizer of another model (a GAN's critic), once one that holds our parameters is known.

        One with master copies of the weights holds none of the model's own: it counts where there is no other.
        """
        if self._model is None:
            return True
        holds = self._holds(optimizer, {id(p) for p in self._model.parameters()})
        self.owns |= holds
        if holds or self.owns:
            return holds
        if not self._waited:
            self._waited = 1 if self._has_one() else _PATIENCE
        self._waited += 1
        return self._waited > _PATIENCE

    def _holds(self, optimizer: Any, parameters: set[int]) -> bool:
        groups = getattr(optimizer, "param_groups", ())  # one that is being made has none yet
        return any(id(p) in parameters for group in groups for p in group["params"])

    def parameters_changed(self) -> bool:
        """Whether the parameters are others than when this was asked last, and no optimizer is heard of.

        A compiled ``optimizer.step()`` runs no hook.
        """
        if self.heard or self._model is None or "torch._dynamo" not in sys.modules:
            return False
        trained = [p for p in self._model.parameters() if p.requires_grad and not p.is_inference()]
        versions = {id(p): p._version for p in trained[:: max(1, len(trained) // _SAMPLE)]}
        before, self._versions = self._versions, versions
        # torch.func puts others in their place.
        changed = before is not None and before != versions and before.keys() == versions.keys()
        if changed and _in_step():
            self.heard, changed = True, False  # LBFGS calls the model within its step
        self.by_parameters |= changed
        return changed

    def by_passes(self, passes: int, warn: Callable[[str], None]) -> bool:
        """Whether a forward pass begins a step, as many before it ended none and gradients were cleared since.

        Args:
            passes: How many were in this step before.
            warn: Is told what is counted, or that nothing is.
        """
        if self.heard or self.by_parameters or passes < (1 if self._each_pass else _PASSES):
            return False
        if self._awaited is None:
            self._awaited = _PASSES_OF_ONE if self._has_one() else _PASSES
        if passes < self._awaited and not self._each_pass:
            return False
        parameters = [] if self._model is None else [p for p in self._model.parameters() if p.requires_grad]
        self._each_pass = bool(parameters) and all(p.grad is None for p in parameters)
        warn(BY_PASSES if self._each_pass else UNSTEPPED)
        return self._each_pass

    def _has_one(self) -> bool:
        """Whether there is an optimizer whose step may still come."""
        if self._model is None:
            return any(_optimizers())
        own = {id(p) for p in self._model.parameters()}
        return any(self._holds(one, own) for one in _optimizers())

    def ticks(self, optimizer: Any, *, seen: bool) -> bool:
        """Whether this ``step()`` of one of ours ends a step.

        Args:
            optimizer: Whose.
            seen: Whether attention was called since the last one ended: then it does.
        """
        self.heard, self.by_parameters = True, False
        leader = None if self._leader is None else self._leader()
        # Who steps twice while the leader does not has taken over.
        if not seen and leader is not None and optimizer is not leader and id(optimizer) not in self._others:
            self._others.add(id(optimizer))
            return False
        self._leader = weakref.ref(optimizer)
        self._others.clear()
        return True


def _optimizers() -> list[Any]:
    """All that there are."""
    # By their types: some objects answer with a warning to whoever asks what they are.
    return [found for found in gc.get_objects() if issubclass(type(found), Optimizer)]


def _in_step() -> bool:
    """Whether what runs is called by an optimizer's ``step()``."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # A look at a training loop's variables would keep them alive, before Python 3.13.
        if frame.f_code.co_name == "step" and isinstance(frame.f_locals.get("self"), Optimizer):
            return True
        frame = frame.f_back
    return False
