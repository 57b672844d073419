"""``attn_diag.break_if``: a debugger's breakpoint on what is true of an attention call."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Container, Iterable
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from attn_diag.analyses.inspection.inspect import DEFAULT_LEVEL, inspect_captures
from attn_diag.captures.selection import Selection
from attn_diag.errors import InputError
from attn_diag.printing import say
from attn_diag.results.diagnosis import Diagnosis, Label, severity
from attn_diag.statistics.means import require_level
from attn_diag.watching.debugging.finding import Conditions, Finding
from attn_diag.watching.live.call import AttentionCall, CallPlace
from attn_diag.watching.live.choices import require_container, require_model
from attn_diag.watching.live.watch import Watch

_log = logging.getLogger("attn_diag")
_last: Finding | None = None
_NOT_USERS = ("attn_diag", "torch", "threading", "concurrent")


class Breakpoint:
    """See ``break_if``.

    Attributes:
        judged: how many times a call was looked at.
        found: how many times a condition held.
    """

    def __init__(
        self,
        conditions: Conditions,
        model: nn.Module | None,
        layers: Container[int] | None,
        batch: Iterable[int] | None,
        every: int,
        level: float,
        hook: Callable[[Finding], object] | None,
    ) -> None:
        require_container("layers", layers)
        self.judged = self.found = 0
        self._conditions, self._model, self._layers = conditions, model, layers
        self._batch = None if batch is None else frozenset(batch)
        self._every, self._level, self._hook = every, level, hook
        self._watch: Watch | None = None
        self._handle: Any = None
        # Findings hold this, not the breakpoint: the last one lives on, and the model need not.
        self._disarmed = threading.Event()
        self._waiting: list[Finding | Exception] = []
        self._on_its_way = False
        self._without_backward: dict[int, AttentionCall] = {}
        self._thread = threading.local()
        self._said: set[str] = set()

    # A context, or start() and close().

    def start(self) -> Self:
        """Begin to look at calls."""
        if self._watch is None:
            self._watch = Watch(self._model, self)
            self._watch.start()
            self._handle = register_optimizer_step_post_hook(lambda *_: self._stop_if_found())
        return self

    def close(self) -> None:
        """Judge what still waits for a backward, and remove everything."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        watch.stop()
        self._handle.remove()
        self._judge_without_backward(watch)
        self._stop_if_found()
        watch.tell_of_nothing()

    def disarm(self) -> None:
        """Stop no more; at a prompt: ``attn_diag.last_finding().disarm()``."""
        self._disarmed.set()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # What the watch calls.

    sequences = None
    may_be_late = False
    may_wait = True

    def wants_step(self, step: int) -> bool:
        """Look at every so many steps."""
        return not self._disarmed.is_set() and step % self._every == 0

    def wants(self, place: CallPlace) -> bool:
        """Want the chosen layers; and, as this is asked in the user's own thread, stop for what another one found."""
        if getattr(self._thread, "judging", False):
            return False
        self._stop_if_found()
        return self.wants_step(place.step) and (self._layers is None or place.layer in self._layers)

    def forward(self, call: AttentionCall) -> None:
        """Judge what the tensors show, and unless a backward is to come, what an inspection shows."""
        inspected = self._conditions.need_diagnosis and not call.awaits_backward
        if self._conditions.need_diagnosis and call.awaits_backward:
            self._without_backward[id(call)] = call
        self._judge(call, "after its forward", inspect=inspected)

    def backward(self, call: AttentionCall) -> None:
        """Judge delta's error and its way into dQ, now that the gradients have come."""
        self._without_backward.pop(id(call), None)
        self._judge(call, "after its backward", inspect=self._conditions.need_diagnosis, after_backward=True)

    def step_ended(self, step: int) -> None:  # noqa: ARG002 - the protocol
        """Judge the calls whose backward never came."""
        assert self._watch is not None
        for call in self._without_backward.values():
            call.x = call.w_q = None  # the optimizer has changed the weight since
        self._judge_without_backward(self._watch)

    def failed(self, error: Exception) -> None:
        """Nothing is counted here."""

    def forked(self) -> None:
        """Be closed; what was found is the parent's to stop for."""
        self._watch, self._waiting = None, []

    # Ourselves.

    def _judge_without_backward(self, watch: Watch) -> None:
        calls, self._without_backward = list(self._without_backward.values()), {}
        for call in calls:
            try:
                self._judge(call, "after its forward, as no backward came", inspect=True, only_inspect=True)
            except Exception as error:
                watch.failed(error)

    def _judge(
        self,
        call: AttentionCall,
        judged: str,
        *,
        inspect: bool,
        after_backward: bool = False,
        only_inspect: bool = False,
    ) -> None:
        self._thread.judging = True
        try:
            with torch.no_grad(), torch.autocast(call.q.device.type, enabled=False):
                self.judged += 1
                reasons = [] if only_inspect else self._conditions.of_tensors(call, after_backward=after_backward)
                diagnosis, refused = None, call.refused
                if refused is None and (inspect or reasons):
                    diagnosis, refused = self._diagnose(call)
                if inspect and diagnosis is not None:
                    reasons += self._of_diagnosis(diagnosis)
                    for label in self._conditions.graver(diagnosis):
                        where = call.place.module or "attention"
                        self._warn(f"{where} is {label}, for which this breakpoint does not stop: give {label}=True")
                elif inspect:
                    self._warn(f"a call of {call.place.module or 'attention'} is not judged: {refused}")
                if reasons:
                    self._hold(call, judged, reasons, diagnosis, refused)
        finally:
            self._thread.judging = False

    def _of_diagnosis(self, diagnosis: Diagnosis) -> list[str]:
        try:
            return self._conditions.of_diagnosis(diagnosis)
        except Exception as error:  # of the user's predicate: it belongs to the user's program
            self._waiting.append(error)
            self._stop_if_found()
            return []

    def _diagnose(self, call: AttentionCall) -> tuple[Diagnosis | None, str | None]:
        """Inspect the call; None where that cannot be, and why."""
        chosen = None if self._batch is None else self._batch & set(range(call.q.shape[0])) or frozenset({0})
        try:
            found = inspect_captures([call.capture()], selection=Selection(batches=chosen), level=self._level)
        except InputError as error:
            return None, str(error)
        assumptions = found.captures[0].assumptions
        if assumptions.refused:
            self._warn(f"no verdict on {call.place.module or 'attention'}: {assumptions.message}")
        return found, None

    def _warn(self, message: str) -> None:
        if message not in self._said:
            self._said.add(message)
            _log.warning(message)

    def _hold(
        self, call: AttentionCall, judged: str, reasons: list[str], diagnosis: Diagnosis | None, refused: str | None
    ) -> None:
        capture = None
        try:
            seen = call.capture()
            # What the model goes on to use may change before anybody looks.
            capture = replace(seen, tensors={name: t[...].clone() for name, t in seen.tensors.items()})
        except InputError as error:
            refused = refused or str(error)
        self.found += 1
        finding = Finding(
            tuple(reasons), call.place, judged, call.kernel, capture, diagnosis, refused, disarm=self._disarmed.set
        )
        self._waiting.append(finding)
        self._stop_if_found()

    def _stop_if_found(self) -> None:
        """Stop in the user's frame, if this thread has one; else a later call, optimizer step or ``close`` will."""
        if self._waiting and not self._on_its_way and (frame := users_frame()) is not None:
            self._on_its_way = True
            at_next_instruction(frame, self._stop)

    def _stop(self) -> None:
        """In the user's frame: hand over what was found."""
        global _last
        waiting, self._waiting, self._on_its_way = self._waiting, [], False
        if self._disarmed.is_set():
            return
        found = [one for one in waiting if isinstance(one, Finding)]
        if found and self._hook is not None:
            for finding in found:
                _last = finding
                self._hook(finding)
        elif found:
            worst = min(found, key=_rank)
            _last = replace(worst, also=tuple(one for one in found if one is not worst))
            # The debugger comes first: it only sets a trace here, and under pytest it ends the capture of output.
            sys.breakpointhook()
            say(str(_last), sys.stdout)
        for error in waiting:
            if isinstance(error, Exception):
                raise error


def _rank(finding: Finding) -> tuple[int, float]:
    ranked = finding.diagnosis.ranked() if finding.diagnosis is not None else []
    return severity(ranked[0][2]) if ranked else (-1, 0.0)


def break_if(
    *,
    nonfinite: bool = False,
    wrong: bool = False,
    lossy: bool = False,
    ill_conditioned: bool = False,
    biased: bool = False,
    undecided: bool = False,
    max_logit: float | None = None,
    predicate: Callable[[Diagnosis], object] | None = None,
    model: nn.Module | None = None,
    layers: Container[int] | None = None,
    batch: Iterable[int] | None = (0,),
    every: int = 1,
    level: float = DEFAULT_LEVEL,
    hook: Callable[[Finding], object] | None = None,
) -> Breakpoint:
    """Inspect the attention calls of the running program, and enter the debugger where a condition holds.

        with attn_diag.break_if(nonfinite=True, wrong=True, lossy=True, model=model):
            train(model)

    At the prompt one is in the user's own frame, behind the attention call, with its q, k and v in reach;
    ``attn_diag.last_finding()`` holds the diagnosis and a copy of the tensors. The debugger is that of
    ``breakpoint()`` (so PYTHONBREAKPOINT and ``pytest --pdb`` hold). Outputs and gradients stay the same bits.

    **When a call is judged.** ``nonfinite`` and ``max_logit`` right after its forward (``nonfinite`` of the gradients
    after its backward). Labels and ``predicate`` after its backward, as only dO makes delta known, where one comes; a
    call that takes no part in autograd after its forward; one whose backward never comes at the end of the step or of
    the context, by its O alone.

    **Where the program stops.** After a forward: behind the call, in the innermost frame that is not torch's. After a
    backward: behind ``loss.backward()``. On CUDA gradients come in threads of autograd's own, which have no frame of
    the user's: then before the next attention call, behind the optimizer's step or at the end of the context,
    whichever comes first.

    Every inspected call is a family of tests of its own: on unbiased data up to ``level`` of the calls stop for
    ``biased``. Over thousands of calls choose a smaller one (1e-6).

    Without a terminal (torchrun, a batch job) give a ``hook``: a debugger that finds no input ends the program, and
    other ranks wait while one is stopped.

    Args:
        nonfinite: NaN or Inf in q, k, v, o, LSE, dO, dQ, dK or dV. What no sum needs does not count: q and dO of a
            row that sees no key, its LSE of plus or minus infinity, and k and v of a key that no row sees. Padding that
            the mask does not hide counts, and so does every row of o, dQ, dK and dV.
        wrong, lossy, ill_conditioned, biased, undecided: labels of any head (see ``inspect``); wrong also where a
            function under ``attn_diag.observe`` wrote into its q, k or v.
        max_logit: a score alpha q.k above it, of a visible key, before a softcap and additive masks.
        predicate: called with the Diagnosis of a call; what it raises is raised in the program.
        model: whose calls; None: all of the process, without x and w_q.
        layers: their numbers; None: all.
        batch: items of the batch that are inspected; None: all. ``nonfinite`` and ``max_logit`` see all of them.
        every: look at every so many steps (a step ends with an optimizer's ``step()``).
        level: significance after Benjamini-Hochberg, as of ``inspect``.
        hook: called with each Finding in place of the debugger, in the user's frame: what it raises is raised there.
            ``hook=lambda finding: pytest.fail(str(finding))`` makes a test of it.

    Returns:
        A context manager (also ``start()`` and ``close()``).

    Raises:
        InputError: no condition is given, or one makes no sense.
    """
    flags: dict[Label, bool] = {
        "wrong": wrong,
        "lossy": lossy,
        "ill_conditioned": ill_conditioned,
        "biased": biased,
        "undecided": undecided,
    }
    labels = tuple(label for label, asked in flags.items() if asked)
    conditions = Conditions(labels, nonfinite, max_logit, predicate)
    if not conditions.any:
        raise InputError(f"nothing to break on: give nonfinite, {', '.join(flags)}, max_logit or predicate")
    require_level(level)
    if every < 1:
        raise InputError(f"every must be 1 (each step) or more, got {every}")
    if max_logit is not None and max_logit != max_logit:
        raise InputError("max_logit must be a number, got NaN")
    require_model(model)
    return Breakpoint(conditions, model, layers, batch, every, level, hook)


def last_finding() -> Finding | None:
    """What ``break_if`` stopped for last: ``.diagnosis``, ``.capture``, ``.reasons``, ``.disarm()``; None before."""
    return _last


def users_frame() -> FrameType | None:
    """Find the innermost frame of this thread that is neither ours nor torch's; None in a thread of autograd's own."""
    frame: FrameType | None = sys._getframe().f_back
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_USERS:
        frame = frame.f_back
    return frame


def at_next_instruction(frame: FrameType, action: Callable[[], object]) -> None:
    """Have ``action`` run before the next instruction of ``frame``, a frame of this thread that is running.

    What it raises is raised there. A debugger that it starts stops there, with that frame's variables: on
    ``return attention(q, k, v)`` before the return, else on the line that follows. A trace function that was set is
    put back before (where ``action`` raises, Python itself drops it).
    """
    tracer, local_tracer, by_opcode = sys.gettrace(), frame.f_trace, frame.f_trace_opcodes

    def here(at: FrameType, event: str, argument: Any) -> None:  # noqa: ARG001 - a trace function's signature
        at.f_trace_opcodes = by_opcode
        at.f_trace = local_tracer
        sys.settrace(tracer)
        action()

    # In this order: what is set before sys.settrace holds for frames that are running already.
    frame.f_trace = here
    frame.f_trace_opcodes = True
    sys.settrace(_ignore_new_frames)


def _ignore_new_frames(*event: Any) -> None:  # noqa: ARG001 - a trace function's signature
    return None
