"""Watches a model's attention calls for one listener: steps, layers, gradients, recomputation."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from attn_diag.errors import InputError
from attn_diag.watching.live import intercept
from attn_diag.watching.live.call import AttentionCall, CallPlace, Listener
from attn_diag.watching.live.linear_layers import FAST_PATHS, Projections, clean
from attn_diag.watching.live.losses import reason_of
from attn_diag.watching.live.pending import Hook, Pending
from attn_diag.watching.live.sites import Fields, Graph, autocast_dtype

# Not warnings: where those are errors, they would reach the training loop.
_log = logging.getLogger("attn_diag")
_MAX_FRAMES = 60
# So many steps without any attention call are worth a word.
_BLIND = 3

# What a user is told where nothing can be seen, by whoever watches.
COMPILED = (
    "the model is compiled: attention inside compiled graphs is not seen. Compile all but the attention, or run the "
    'steps in question under torch.compiler.set_stance("force_eager") (uncompiled, with other roundings)'
)
UNSEEN = (
    "no attention call was seen. It may run inside a compiled graph or on the fast path of nn.TransformerEncoder in "
    "eval mode (torch.backends.mha.set_fastpath_enabled(False)), call a kernel that is not known here, or be another "
    "model's than the one that was given (a copy's, say)"
)
UNSTEPPED = "no torch.optim optimizer stepped, so all calls count as one step's: call end_step() after every step"
UNFINISHED = "attention was called in a step to be looked at, but no backward pass came to any of its calls"


def require_container(name: str, chosen: object) -> None:
    """Check a choice of numbers (of steps, layers, calls) when it is made, not in the middle of a training run.

    Raises:
        InputError: it is one number, or a text.
    """
    if isinstance(chosen, (str, bytes)) or not (chosen is None or isinstance(chosen, Container)):
        raise InputError(f"{name} must be a set, list or range of numbers, such as {{2}}, got {chosen!r}")


class Watch:
    """Tells a listener of the attention calls of a model between ``start`` and ``stop``.

    A step ends with a torch.optim optimizer's ``step()`` after an attention call (not that of one that holds other
    models' parameters, once one that holds ours has stepped), or with ``end_step()``. In a loop that has neither, every
    forward of the model is a step. Once a loop trains, calls without gradients (evaluation) are neither told of nor
    counted, and the steps before, if there were any, count as none.

    Args:
        model: whose calls; None: every call.
        listener: who is told.
        first_step: the number of the first step.

    Attributes:
        step: the number of the current one.
        compiled: whether a part of the model is.
        calls_seen: how many, wanted or not.
    """

    def __init__(self, model: nn.Module | None, listener: Listener, first_step: int = 0) -> None:
        self.model, self.listener, self.step = model, listener, first_step
        self.compiled = model is not None and any(_is_compiled(m) for m in model.modules())
        self.calls_seen = 0
        self._blind_steps = 0
        self._first_step = first_step
        self._names: dict[int, str] = {}
        self._layers: dict[int | None, int] = {}
        self._counts: dict[tuple[int | None, bool], int] = defaultdict(int)
        self._with_gradients: set[tuple[int, int]] = set()
        self._no_modules: set[CodeType] = set()
        self._trains = False
        self._calls_this_step = 0
        self._pending: dict[int, Pending] = {}
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self._projections = Projections()
        self._warned: set[str] = set()
        self._owns = self._gone = False
        self._told: set[tuple[int, int, bool]] = set()

    def start(self) -> Self:
        """Install the interception and the hooks; all of them, or none and an exception."""
        try:
            self._install()
        except BaseException:
            self.stop()
            raise
        if self.compiled:
            self.warn_once(COMPILED)
        return self

    def _install(self) -> None:
        if self.model is not None:
            self._names = {id(module): clean(name) for name, module in self.model.named_modules()}
            # A hook inside a compiled module would have it compiled anew.
            if not self.compiled:
                self._projections.watch(self.model, self.guarded)
                self._projections.recording = self._wants_step()
                if not isinstance(self.model, FAST_PATHS):
                    begins, ended = self.guarded(self._forward_begins), self.guarded(self._forward_ended)
                    self._handles.append(self.model.register_forward_pre_hook(begins))
                    self._handles.append(self.model.register_forward_hook(ended))
        self._handles.append(register_optimizer_step_post_hook(self.guarded(self._optimizer_stepped)))
        intercept.install(self)

    def stop(self) -> None:
        """Put everything back. Of calls whose backward is not over, what came is told."""
        intercept.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._projections.close()
        self._drop_pending()

    def forked(self) -> None:
        """Be gone, in a forked child. Hooks stay, and do nothing: to take them away is to free what they hold."""
        self._gone = True
        self.listener.forked()

    def end_step(self) -> None:
        """The step is over; an optimizer's ``step()`` does this by itself."""
        self._drop_pending()
        ended, self.step = self.step, self.step + 1
        self._projections.forget()
        self._projections.settle()
        # A user's function of the step is asked no more often than needed.
        self._projections.recording = self._projections.watching and self._wants_step()
        for counted in (self._counts, self._with_gradients, self._told):
            counted.clear()
        self._calls_this_step = 0
        intercept.refresh()
        self.guarded(self.listener.step_ended)(ended)

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers seen so far."""
        return sorted(self._layers.values())

    @property
    def never_stepped(self) -> bool:
        """Whether a module was called again and again, with gradients, and no step ever ended."""
        return self._trains and self.step == self._first_step and max(self._counts.values(), default=0) > 1

    def warn_once(self, message: str) -> None:
        """Warn the user, of the same thing only once."""
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(message)

    # What the interception calls.

    def expects(self) -> CallPlace | None:
        """Say where the coming call stands, if the listener wants it."""
        gradients, recomputing = torch.is_grad_enabled(), torch._C._current_graph_task_id() != -1
        owner = self._owner()
        self._notice_training(owner)
        if self._passes_over(owner):
            return None
        module, layer = self._names.get(id(owner)), self._layer(owner)
        call = self._counts[_key(owner), recomputing]
        if recomputing and (layer, call) in self._with_gradients:
            return None  # checkpointing runs the forward again: its first run is already followed
        place = CallPlace(self.step, layer, module, call, gradients)
        return place if self.listener.wants(place) else None

    def counts(self) -> None:
        """Count one more call of the module that makes it."""
        owner = self._owner()
        if self._passes_over(owner):
            return
        recomputing = torch._C._current_graph_task_id() != -1
        self._counts[_key(owner), recomputing] += 1
        self._calls_this_step += 1
        self.calls_seen += 1
        self._projections.forget()  # also the projections of calls that nobody wanted

    def sees(self, place: CallPlace, fields: Fields, result: Any) -> None:
        """Tell the listener of a wanted call that has run, and follow its gradients."""
        numbered = self._numbered(place)
        if numbered != place and not self.listener.wants(numbered):
            return
        place, fields = numbered, dict(fields)
        graph: Graph = fields.pop("graph")
        known = fields.pop("projection", None)
        detached: dict[str, Any] = {name: v.detach() if isinstance(v, Tensor) else v for name, v in fields.items()}
        call = AttentionCall(place=place, **detached)
        o = result[0] if isinstance(result, tuple) else result
        call.awaits_backward = isinstance(o, Tensor) and o.requires_grad
        pending = Pending(call, self.guarded, self.finished) if call.awaits_backward else None
        if known is not None:
            x, weight, biased = known
            call.x, call.x_dtype, call.w_q = x.detach(), autocast_dtype(x), weight.detach()
            if pending is not None:
                pending.copy_dq = biased
        elif place.module is not None and (found := self._projections.find(place.module, call.q)) is not None:
            projection, x, y = found
            call.x, call.x_dtype, call.w_q = x.detach(), autocast_dtype(x), projection.weight()
            if call.w_q is None:
                call.notes.append("w_q is left out: the weight is sharded over ranks while attention runs")
            if pending is not None:
                pending.follow_projection(y, projection)
        if pending is not None:
            self._with_gradients.add((place.layer, place.call))
            with self._lock:
                self._pending[id(pending)] = pending
            pending.follow(o, graph)
        # Last: what is noted above belongs to what it takes, and it may let the tensors go.
        self.listener.forward(call)

    def failed(self, error: Exception) -> None:
        """Warn of our own failure; it is never an exception in somebody's training."""
        self.warn_once(f"a call was not recorded: {reason_of(error)}")
        self.listener.failed(error)

    # Ourselves.

    def finished(self, pending: Pending) -> None:
        """Tell the listener of a call whose gradients are all there."""
        with self._lock:
            self._pending.pop(id(pending), None)
        self.guarded(self.listener.backward)(pending.call)

    def guarded(self, what: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``what`` so that our own failures are logged instead of raised; it returns None then."""

        def run(*args: Any) -> Any:
            if self._gone or torch.compiler.is_compiling():
                return None  # nothing of ours belongs in a graph that is traced, nor in a forked child
            try:
                return what(*args)
            except Exception as error:
                self.failed(error)
                return None

        return Hook(run)

    def _wants_step(self) -> bool:
        return bool(self.guarded(self.listener.wants_step)(self.step))

    def _drop_pending(self) -> None:
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for one in pending:
            one.give_up()

    def _numbered(self, place: CallPlace) -> CallPlace:
        """The place, with a call number of its own where another thread's call has come to the same meanwhile."""
        with self._lock:
            while (key := (place.layer, place.call, place.gradients)) in self._told:
                place = replace(place, call=place.call + 1)
            self._told.add(key)
        return place

    def _passes_over(self, owner: nn.Module | None) -> bool:
        if self.model is not None and owner is None:
            return True
        return self._trains and not torch.is_grad_enabled()

    def _owner(self) -> nn.Module | None:
        """Find the innermost module (of the model, where there is one) that is running."""
        frame: FrameType | None = sys._getframe(2)
        for _ in range(_MAX_FRAMES):
            if frame is None:
                break
            code = frame.f_code
            # Before Python 3.13 a look at a frame's variables keeps them alive: not those of training loops.
            if code.co_varnames[:1] == ("self",) and code not in self._no_modules:
                owner = frame.f_locals.get("self")
                if not isinstance(owner, nn.Module):
                    self._no_modules.add(code)
                elif self.model is None or id(owner) in self._names:
                    return owner
            frame = frame.f_back
        return None

    def _layer(self, owner: nn.Module | None) -> int:
        key = _key(owner)
        if key not in self._layers:
            number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", self._names.get(id(owner), ""))
            stated = getattr(owner, "layer_idx", None)
            wanted = stated if isinstance(stated, int) else int(number[1]) if number else len(self._layers)
            taken = set(self._layers.values())
            self._layers[key] = wanted if wanted not in taken else max(taken) + 1
        return self._layers[key]

    def _forward_begins(self, model: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002 - a hook's signature
        self._notice_training(model)
        if not self._trains and self._calls_this_step:
            self.end_step()

    def _notice_training(self, module: nn.Module | None) -> None:
        if self._trains or module is None or not (module.training and torch.is_grad_enabled()):
            return
        if self._calls_this_step:
            self.end_step()
        self._trains, self.step = True, self._first_step
        self._projections.recording = self._wants_step()

    def _forward_ended(self, model: nn.Module, args: tuple[Any, ...], result: Any) -> None:  # noqa: ARG002
        # What the last linear layers hold, logits among it, is not kept through the backward.
        self._projections.forget()

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - a hook's signature
        if not self._is_ours(optimizer):
            return
        self._trains = True
        # Several optimizers may step after one backward.
        if self._calls_this_step:
            self.end_step()
        else:
            intercept.refresh()
            self._blind_steps += 1
            if self._blind_steps == _BLIND and not self.calls_seen:
                self.warn_once(UNSEEN)

    def _is_ours(self, optimizer: Any) -> bool:
        """Not the optimizer of another model (a GAN's critic), once one that holds our parameters is known.

        One with master copies of the weights holds none of the model's own: it counts where there is no other.
        """
        if self.model is None:
            return True
        own = {id(p) for p in self.model.parameters()}
        holds = any(id(p) in own for group in optimizer.param_groups for p in group["params"])
        self._owns |= holds
        return holds or not self._owns


def _key(owner: nn.Module | None) -> int | None:
    return None if owner is None else id(owner)


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None
