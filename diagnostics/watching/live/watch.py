"""Watches a model's attention calls for one listener: steps, layers, gradients, recomputation."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from attn_diag.watching.live import intercept
from attn_diag.watching.live.call import AttentionCall, CallPlace, Listener
from attn_diag.watching.live.clock import BY_PARAMETERS, TRAINS, UNSTEPPED, Clock
from attn_diag.watching.live.harmless import harmless, run_harmlessly
from attn_diag.watching.live.linear_layers import FAST_PATHS, MadeWith, first_head, is_run_compiled
from attn_diag.watching.live.losses import reason_of
from attn_diag.watching.live.observer import DRAWN_AGAIN, Met
from attn_diag.watching.live.operator_calls import OperatorBackward, OperatorCall
from attn_diag.watching.live.pending import Hook, Pending
from attn_diag.watching.live.pipeline import pipelines, stage_running
from attn_diag.watching.live.places import Caller, CallPlaces, MadeBy
from attn_diag.watching.live.query_projections import QueryProjections
from attn_diag.watching.live.sites import Fields, Graph
from attn_diag.watching.live.spread_heads import ASSUMED, SpreadHeads
from attn_diag.watching.live.stream_capture import in_cuda_graph
from attn_diag.watching.live.unseen import IN_A_FUNCTION, LOST, Unseen

# Not warnings: where those are errors, they would reach the training loop.
_log = logging.getLogger("attn_diag")
BY_ORDER = "compiled code has no modules: layers are named by the order of their calls"
UNFINISHED = "attention was called in a step to be looked at, but no backward pass came to any of its calls"


class Watch:
    """Tells a listener of the attention calls of a model between ``start`` and ``stop``.

    A step ends with a torch.optim optimizer's ``step()`` (see ``Clock``), or with ``end_step()``. In a loop that has
    neither, every forward of the model is a step. Once a loop trains, calls without gradients (evaluation) are neither
    told of nor counted, and the steps before, if there were any, count as none.

    Args:
        model: whose calls; None: every call.
        listener: who is told.
        first_step: the number of the first step.

    Attributes:
        step: the number of the current one.
        calls_seen: how many, wanted or not.
        gone: whether this is a forked child's copy.
        projections: what makes the q of calls.
    """

    def __init__(self, model: nn.Module | None, listener: Listener, first_step: int = 0) -> None:
        self.model, self.listener, self.step, self.may_wait = model, listener, first_step, listener.may_wait
        self.calls_seen = 0
        self._first_step = first_step
        self._places, self._clock = CallPlaces(model), Clock(model)
        self._with_gradients: set[tuple[int, int]] = set()
        self._trains = TRAINS.get()
        self._calls_this_step = self._forwards_this_step = 0
        self._steps_behind = -1
        self._pending: dict[int, Pending] = {}
        self._lock = threading.RLock()
        self._handles: list[Any] = []
        self.projections, self._spread = QueryProjections(model, self.guarded), SpreadHeads()
        self._warned: set[str] = set()
        self.gone = self._looked = False
        self._unseen = Unseen(model, self._places, self.warn_once)
        self._told: set[tuple[int, int, int, bool]] = set()

    def start(self) -> Self:
        """Install the interception and the hooks; all of them, or none and an exception."""
        try:
            self._install()
        except BaseException:
            self.stop()
            raise
        return self

    def _install(self) -> None:
        self._places.read()
        self._unseen.begin()
        whole = self.model is not None and is_run_compiled(self.model)
        self.projections.watch(whole=whole)
        # A hook inside a compiled module would have it compiled anew.
        if self.model is not None and not whole and not isinstance(self.model, FAST_PATHS):
            begins, ended = self.guarded(self._forward_begins), self.guarded(self._forward_ended)
            self._handles.append(self.model.register_forward_pre_hook(begins))
            self._handles.append(self.model.register_forward_hook(ended))
        self._handles.append(register_optimizer_step_post_hook(self.guarded(self._optimizer_stepped)))
        # So would a function that it calls, if that were another.
        intercept.install(self, functions=not whole)
        self._look()

    def stop(self) -> None:
        """Put everything back. Of calls whose backward is not over, what came is told."""
        self._looked = self.looked
        passes = max(self._places.most_calls, self._forwards_this_step)
        if self._trains and self.step == self._first_step and passes > 1:
            self.warn_once(UNSTEPPED)
        intercept.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.projections.close()
        self._drop_pending()

    def forked(self) -> None:
        """Be gone, in a forked child. Hooks stay, and do nothing: to take them away is to free what they hold."""
        self.gone = True
        self.listener.forked()

    def end_step(self) -> None:
        """The step is over; an optimizer's ``step()`` does this by itself."""
        intercept.backlog.tell()
        if intercept.looks(self):
            self._unseen.step_ends(seen=bool(self.calls_seen))
        self._drop_pending()
        ended, self.step = self.step, self.step + 1
        self._looked = self.looked
        self.projections.step_ended()
        self._with_gradients.clear()
        with self._lock:  # what another thread met in this step may still be told of
            self._told = {key for key in self._told if key[0] >= ended}
        self._places.step_ended()
        self._calls_this_step = self._forwards_this_step = 0
        self._look()
        intercept.refresh()
        self.guarded(self.listener.step_ended)(ended)

    @property
    def layers(self) -> list[int]:
        """Numbers of the layers seen so far."""
        return self._places.layers

    @property
    def looked(self) -> bool:
        """Whether there was a step, or is one now, in which calls were looked for."""
        return self._looked or intercept.looks(self)

    def tell_of_nothing(self) -> bool:
        """Say, at the end, if there was no call although there was a look; returns whether so."""
        if blind := self.looked and not self.calls_seen:
            self._unseen.at_end()
        return blind

    def warn_once(self, message: str, about: str = "") -> None:
        """Warn the user, of the same thing only once; ``about``: the first that it is true of."""
        if message not in self._warned:
            self._warned.add(message)
            _log.warning(about + message)

    # What the interception calls.

    @property
    def may_be_late(self) -> bool:
        """Whether it may be told of calls later, with copies of their tensors: steps are told by an optimizer alone."""
        steps = self._trains and self._clock.heard
        return steps and not pipelines() and (self.listener.may_be_late or not intercept.looks(self))

    def would_want(self, place: CallPlace) -> bool:
        """Whether the listener wants the call that is about to run there; its exceptions are not caught."""
        return self.listener.wants(place)

    def learns(self, met: Met) -> tuple[bool, MadeWith | None] | None:
        """Whether it is known what makes the q of calls like this one, and what; None: another may be another kind."""
        if met.recomputing or met.stage is not None or not met.place.gradients:
            return None
        return self.projections.learned(met, self._places.named(met.place.module))

    @harmless
    def made_by(self, module: str = "") -> MadeBy | None:
        """Say who makes the call that is running; None: not the model. ``module`` as of ``meets``."""
        found = self._made_by(module)
        return None if self._other(found.caller) else found

    def _made_by(self, module: str) -> MadeBy:
        caller = self._places.caller(module)
        recomputing = torch._C._current_graph_task_id() != -1
        return MadeBy(caller, recomputing, torch.is_grad_enabled() or caller.differentiated)

    @property
    def sequences(self) -> int | None:
        """So many sequences, the first of a batch, are all that the listener looks at; None: it looks at every one."""
        return self.listener.sequences

    def _other(self, caller: Caller) -> bool:
        """Whether it is another model's call."""
        nobody = caller.owner is None and (caller.site is None or caller.foreign)
        return self.model is not None and nobody

    @harmless
    def meets(
        self, module: str = "", made_by: MadeBy | None = None, operator: OperatorCall | None = None
    ) -> Met | None:
        """Say who makes the call that is running, and whether the listener wants it; None: it is not to be counted.

        Args:
            module: Its name from the compiled module on, where a graph says it.
            made_by: Who made the call when it was recorded, where it is not what runs now.
            operator: The fused operator that has run, where nothing but that is known.
        """
        if (stage := stage_running()) is not None and stage.rehearses:
            return None
        if made_by is None:
            made_by = self._made_by(module)
            if made_by.caller.pooled:
                return None
            caller = made_by.caller
            if operator is not None and caller.site is not None:
                q = operator.inputs[0]
                find = partial(self.projections.maker, q=q, among_others=caller.owner is None)
                caller = self._places.told_by(caller, find)
        else:
            caller = self._places.seen_from_here(made_by.caller)
        recomputing = made_by.recomputing
        if caller.site is not None:
            self.projections.graph_runs()
        if recomputing and caller.site is not None and not caller.differentiated:
            return None  # a compiled backward makes again what its forward did not keep
        gradients = made_by.gradients
        self._notice_training(caller.owner or self.model, gradients=gradients)
        if self._other(caller) or (self._trains and not gradients):
            return None
        if gradients and not recomputing and self._clock.parameters_changed() and self._calls_this_step:
            self.warn_once(BY_PARAMETERS)
            self.end_step()
        name, layer, call = self._places.of(caller, recomputing=recomputing)
        if caller.site is not None and call and (not self._trains or self._clock.by_passes(call, self.warn_once)):
            self.end_step()  # as no hook of ours stands in a compiled model
            name, layer, call = self._places.of(caller, recomputing=recomputing)
        place = CallPlace(self.step, layer, name, call, gradients)
        # Checkpointing runs the forward again: its first run is already followed.
        followed = recomputing and (layer, call) in self._with_gradients
        return Met(place, caller, recomputing, not followed and self.listener.wants(place), stage)

    @harmless
    def counts(self, met: Met) -> None:
        """Count the call, which is over."""
        self._places.count(met.caller, recomputing=met.recomputing)
        self._calls_this_step += 1
        self.calls_seen += 1
        if not intercept.backlog.telling:
            self.projections.forget()  # also the projections of calls that nobody wanted

    @harmless
    def sees(self, met: Met, fields: Fields, result: Any) -> None:
        """Tell the listener of a wanted call that has run, and follow its gradients."""
        place = met.place
        numbered = self._numbered(place)
        if numbered != place and not self.listener.wants(numbered):
            return
        place, fields = numbered, dict(fields)
        operator: OperatorCall | None = fields.pop("operator", None)
        graph: Graph = fields.pop("graph", {})
        within: OperatorCall | None = fields.pop("within", None)
        began: int = fields.pop("began", 0)
        known = fields.pop("projection", None)
        detached: dict[str, Any] = {
            name: v.detach() if isinstance(v, Tensor) and v.requires_grad else v for name, v in fields.items()
        }
        call = AttentionCall(place=place, stage=met.stage, **detached)
        if (module := self._places.named(place.module)) is not None:
            owner, layers = self.projections.in_layers.around(place.module or ""), self.projections.in_layers
            call.head_offset = first_head(self._places.named(owner) or module, call.q)
            if (spread := self._spread.first(owner, call.q, call.k, layers.made_in(owner))) is not None:
                call.head_offset, sure = spread
                call.notes += [] if sure else [ASSUMED]
        call.notes += [BY_ORDER] if self._places.by_order(met.caller) else []
        call.notes += [DRAWN_AGAIN] if met.recomputing and call.dropout_p else []
        o = result[0] if isinstance(result, tuple) else result
        call.awaits_backward = isinstance(o, Tensor) and o.requires_grad
        if operator is not None:
            # An autograd function's forward, compiled or not, gives the operator tensors that need none; so may a ring.
            inside = met.caller.site is not None or met.caller.differentiated or call.own is not None
            call.awaits_backward = (inside and place.gradients) or operator.differentiable
        elif place.gradients and met.caller.differentiated and not call.awaits_backward:
            self.warn_once(IN_A_FUNCTION, f"{place.module}: " if place.module else "")
        pending = Pending(call, self.guarded, self.finished) if call.awaits_backward else None
        self.projections.take(call, pending, known, module, compiled=met.caller.site is not None)
        if pending is not None:
            self._with_gradients.add((place.layer, place.call))
            with self._lock:
                self._pending[id(pending)] = pending
            if operator is None:
                pending.follow(o, graph, within, began)
            else:
                pending.follow_operator(operator, reused=self._places.crowded(met.caller))
        # Last: what is noted above belongs to what it takes, and it may let the tensors go.
        self.listener.forward(call)

    @harmless
    def went_back(self, back: OperatorBackward) -> None:
        """Give the call whose backward this is its gradients."""
        if not intercept.backlog.telling:
            self.projections.goes_back()
        with self._lock:
            # The newest forward goes back first.
            waiting = [p for p in reversed(self._pending.values()) if p.waits_for_operator]
        if not waiting:
            return
        for is_its in (Pending.kept_by, Pending.looks_like):
            if (found := next((p for p in waiting if is_its(p, back)), None)) is not None:
                if back.of_lse:
                    self.warn_once("gradients are left out where the LSE has one too")
                else:
                    found.from_operator(back)
                return

    def failed(self, error: Exception) -> None:
        """Warn of our own failure; it is never an exception in somebody's training."""
        self.warn_once(f"a call was not recorded: {reason_of(error)}")
        self._unseen.failed = True
        self.listener.failed(error)

    def finished(self, pending: Pending) -> None:
        """Tell the listener of a call whose gradients are all there."""
        with self._lock:
            self._pending.pop(id(pending), None)
        if pending.lost:
            whose = pending.call.place.module or pending.call.kernel
            self.warn_once(LOST.format(" and ".join(pending.lost)), f"{whose}: ")
        self.guarded(self.listener.backward)(pending.call)

    def guarded(self, what: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``what`` so that our own failures are logged instead of raised; it returns None then."""
        return Hook(partial(run_harmlessly, self, what))

    def _look(self, *, at_least: bool = False) -> None:
        """Keep what a wanted step needs; on others nothing costs anything."""
        # A user's function of the step is asked no more often than needed.
        wanted = bool(self.guarded(self.listener.wants_step)(self.step))
        self.projections.look(wanted=wanted)
        # Until it is known that a loop trains, calls tell of steps; so do looks where no optimizer does.
        intercept.look(self, wanted=wanted or at_least or not self._trains or self._clock.by_parameters)

    def _drop_pending(self) -> None:
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
        for one in pending:
            one.give_up()

    def _numbered(self, place: CallPlace) -> CallPlace:
        """The place, with a call number of its own where another thread's call has come to the same meanwhile."""
        with self._lock:
            while (key := (place.step, place.layer, place.call, place.gradients)) in self._told:
                place = replace(place, call=place.call + 1)
            self._told.add(key)
        return place

    def _forward_begins(self, model: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002 - a hook's signature
        if (stage := stage_running()) is not None and stage.rehearses:
            return
        self._notice_training(model, gradients=torch.is_grad_enabled())
        passes = self._forwards_this_step
        if passes and (not self._trains or (torch.is_grad_enabled() and self._clock.by_passes(passes, self.warn_once))):
            self.end_step()
        self._forwards_this_step += not self._trains or torch.is_grad_enabled()

    def _notice_training(self, module: nn.Module | None, *, gradients: bool) -> None:
        if self._trains or module is None or not (module.training and gradients):
            return
        if self._calls_this_step:
            self.end_step()
        self._trains, self.step = True, self._first_step
        self._look(at_least=True)  # the forward that runs is seen to its end

    def _forward_ended(self, model: nn.Module, args: tuple[Any, ...], result: Any) -> None:  # noqa: ARG002
        # What the last linear layers hold, logits among it, is not kept through the backward.
        self.projections.forget()
        self._unseen.passed = True

    def _optimizer_stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:  # noqa: ARG002 - a hook's signature
        if in_cuda_graph():  # it steps when that is replayed
            intercept.recordings.at_replays(self, self.guarded(lambda: self._stepped(optimizer)))
        elif (backward := torch._C._current_graph_task_id()) == -1:
            self._stepped(optimizer)
        elif self._clock.is_ours(optimizer) and backward != self._steps_behind:
            # One that steps as soon as its gradients are there: other calls still wait for theirs.
            self._steps_behind = backward
            stepped = self.guarded(lambda: self._stepped(optimizer))
            torch.autograd.Variable._execution_engine.queue_callback(stepped)

    def _stepped(self, optimizer: Any) -> None:
        intercept.backlog.tell()
        intercept.tell_of_warm_ups()
        if not self._clock.is_ours(optimizer):
            return
        self._trains = True
        self.projections.forget()
        if not self._clock.ticks(optimizer, seen=bool(self._calls_this_step)):
            return
        if intercept.looks(self):
            self.guarded(self._unseen.optimizer_stepped)(bool(self.calls_seen), self._clock.owns)
        self.end_step()
