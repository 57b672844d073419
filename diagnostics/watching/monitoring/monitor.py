"""``attn_diag.Monitor``: watches a model's attention while it trains, and raises an alarm before the loss does."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from torch import nn

from attn_diag.errors import InputError
from attn_diag.head.declared import require_declarable
from attn_diag.results.wording import plural
from attn_diag.watching.live.call import AttentionCall, CallPlace, Part
from attn_diag.watching.live.choices import require_container, require_model
from attn_diag.watching.live.linear_layers import is_run_compiled
from attn_diag.watching.live.observer import Met
from attn_diag.watching.live.recorder import trigger
from attn_diag.watching.live.run import rank
from attn_diag.watching.live.sites import refusals
from attn_diag.watching.live.watch import UNFINISHED, Watch
from attn_diag.watching.monitoring.alarm import Alarm, AlarmRule, AlarmState
from attn_diag.watching.monitoring.declared import DeclaredLayers
from attn_diag.watching.monitoring.linear import LinearLayers
from attn_diag.watching.monitoring.measuring import Measuring
from attn_diag.watching.monitoring.record import LayerCheck, LogFile, MonitorCheck, flat_metrics, table
from attn_diag.watching.monitoring.sample import Sample
from attn_diag.watching.monitoring.second_looks import SecondLooks
from attn_diag.watching.monitoring.stacks import Key
from attn_diag.watching.monitoring.to_host import Sent
from attn_diag.watching.monitoring.whole_heads import WholeHeads

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_log = logging.getLogger("attn_diag")
_HISTORY = 1000
# So many samples of a layer are kept, at most, until one has its backward.
_MOST_WAITING = 4
_ALL = Part(None, None)


class Monitor:
    """Watches every attention layer of a model on every ``every``-th step, from now until ``close()``.

        monitor = attn_diag.Monitor(model, every=50)
        for batch in data:
            train_step(batch)
            logger.log(monitor.metrics())

    On a monitored step the first micro-batch's call of each layer is compared with float64, for a sample of rows, on
    the device, at the end of the step, layers of one shape together; results are read at a later step, so that no step
    waits for them. Outputs and gradients stay the same bits, and nothing is raised in the training loop: what goes
    wrong is logged (logger "attn_diag").

    O, dQ, dK and dV are measured beside what a well-rounded kernel leaves. A head whose error stands out is looked at
    again on a later step, whole, as ``inspect`` does (that step waits): what no rounding makes alarms at once.

    Shares are predicted from the errors of O and LSE, for a backward that takes delta from O and recomputes P from
    exact scores. One that recomputes it from the scores that the forward rounded errs less than predicted: by 1.2 % of
    dW_Q instead of 6 % where the scores are BF16 (one capture). Of plain torch (transformers' eager attention, SDPA's
    math) dQ's error is measured instead, and held against what a well-rounded kernel's casts leave.

    flash-linear-attention's functions are met by name, and one call of each layer is judged as ``inspect_linear`` does,
    on each rank for itself; the step waits for that. Inside a compiled model they are not seen. Attention that is
    ``declared`` to be below 16 bits is judged so too, as ``inspect`` does: 0.6 s of a CPU's core a head of 256 rows.

    Behind RoPE or QK-norm dQ's share of error is known, not dW_Q's nor its coherence; ``attn_diag.capture`` and
    ``inspect`` know them there too.

    With torch.distributed initialised before, the sums of all ranks are added up (``monitoring.reduction``): every rank
    must have a monitor with the same options, and gets the same results. Where ranks do not all hold the same heads
    (tensor parallelism), ``process_group`` must be the data-parallel group.

    Args:
        model: whose calls; None: all calls of the process, without layers' names and dW_Q.
        every: steps between checks; the first is step 0. A step ends with an optimizer's ``step()``; a loop without any
            has one step a forward.
        sequences: how many of the micro-batch are looked at.
        rows: at most so many query rows of each, evenly spaced.
        layers: their numbers (as in the module's name); None: all.
        on_alarm: called with each ``Alarm``; from the training loop, so it should be quick.
        false_alarm_rate: false alarms to expect at most in 1,000 checks of the whole model; see ``monitoring.alarm``.
        rule: all parameters of the alarm, instead of ``false_alarm_rate`` alone.
        log: a file to which each check is appended, as a line of JSON with every head (``attn_diag.read_log``,
            ``monitoring.alarm.replay``); on rank 0.
        process_group: ranks to add up over; None: all.
        functions: other functions of linear attention, by the operator whose arguments they have.
        declared: a recipe below 16 bits (fa3-fp8, sage1, …) that all watched layers are meant to be. Some heads of
            each, whole sequences, are judged a check, the next ones after two.
        first_step: the number of the first step.
        history: checks of the run until then, where it is resumed: ``attn_diag.read_log(log)``. The alarm goes on as if
            nothing had happened; what it raised before is not raised again. Those from ``first_step`` on are left out.
            Coherence with earlier checks begins anew.

    Raises:
        InputError: the model is none, a number is below 1, a rate not above 0, a log cannot be written, an
            operator or a recipe is not known, or a history lacks a first step.
    """

    def __init__(
        self,
        model: nn.Module | None,
        every: int = 50,
        *,
        sequences: int = 1,
        rows: int = 1024,
        layers: Container[int] | None = None,
        on_alarm: Callable[[Alarm], None] | None = None,
        false_alarm_rate: float = 0.01,
        rule: AlarmRule | None = None,
        log: str | os.PathLike[str] | None = None,
        process_group: ProcessGroup | None = None,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        declared: str | None = None,
        first_step: int = 0,
        history: Iterable[MonitorCheck] = (),
    ) -> None:
        require_model(model)
        for name, number in (("every", every), ("sequences", sequences), ("rows", rows)):
            if not isinstance(number, int) or number < 1:
                raise InputError(f"{name} must be a whole number, 1 or more, got {number!r}")
        require_container("layers", layers)
        require_declarable(declared)
        if not false_alarm_rate > 0:
            raise InputError(f"false_alarm_rate must be above 0, got {false_alarm_rate}; 0.01 in 1,000 checks is usual")
        self.every, self.alarms = every, list[Alarm]()
        self.history: deque[MonitorCheck] = deque(maxlen=_HISTORY)
        self._sequences, self._rows, self._layers, self._on_alarm = sequences, rows, layers, on_alarm
        self._alarm_state = AlarmState(rule or AlarmRule(false_alarm_rate=false_alarm_rate))
        for check in history:
            if not first_step:
                raise InputError(f"history holds step {check.step}, but the first step is 0: give first_step")
            if check.step < first_step:
                self.history.append(check)
                self._alarm_state.update(check)
        self._raised_at_newest, self._ended_at = 0, first_step
        self._taken: set[Key] = set()
        self._open: dict[Key, dict[int, Sample | WholeHeads]] = {}
        self._in_vain: set[Key] = set()
        self._complete: dict[Key, Sample | WholeHeads] = {}
        self._measuring = Measuring(process_group, self._warn)
        self._sent: deque[Sent] = deque()
        self._trains = self._refused = False
        self._log_file = LogFile(None if rank() else log)
        level = self._alarm_state.rule.false_alarm_rate / 1000
        self._linear = LinearLayers(self._linear_begins, functions, sequences, level)
        self._declared = None if declared is None else DeclaredLayers(declared, sequences, level)
        self._again = SecondLooks(sequences, level)
        self._watch: Watch | None = Watch(model, self, first_step)
        self._watch.start()
        self._whole = model is not None and is_run_compiled(model)
        self._linear.look(wanted=not self._whole)

    def close(self) -> None:
        """Stop watching; what has been computed can still be read."""
        watch, self._watch = self._watch, None
        if watch is not None:
            self._ended_at = watch.step
            watch.tell_of_nothing()
            watch.stop()
            self._linear.look(wanted=False)
            self._open.clear()
            self._complete.clear()
            self._read(wait=True)
            self._again.forget()
            self._measuring.forget()

    @property
    def step(self) -> int:
        """The current step; once closed, the one that it came to."""
        return self._ended_at if self._watch is None else self._watch.step

    def end_step(self) -> None:
        """Say that a step is over, where no torch.optim optimizer does."""
        if self._watch is not None:
            self._watch.end_step()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        check = self._newest
        newest = "no check yet" if check is None else f"newest check of step {check.step}"
        closed = f"closed at step {self.step}, " if self._watch is None else ""
        alarms = plural(len(self.alarms), "alarm")
        return f"<Monitor every {plural(self.every, 'step')}: {closed}{newest}, {alarms}; print(m.table()) shows it>"

    def metrics(self, *, per_head: bool = False, wait: bool = False) -> dict[str, float]:
        """The newest check's figures under flat names, for any logger; empty before the first.

        "attn/max_logit/max" and "/mean" over all heads ("/min" too for some; see ``HeadMetrics`` for the figures; what
        nothing is known of is left out), "attn/alarm" how many alarms that check raised, "attn/alarms" how many there
        were in all, "attn/step" its step.

        Args:
            per_head: also "attn/layer02/head07/max_logit" and so on.
            wait: for a check that is still being computed; without it nothing waits.
        """
        self._read(wait=wait)
        if (newest := self._newest) is None:
            return {}
        return flat_metrics(newest, self._raised_at_newest, len(self.alarms), per_head=per_head)

    def table(self) -> str:
        """Show the newest check: each layer's worst head, how well it rounds, and the alarms so far."""
        self._read(wait=True)
        return table(self._newest, self.alarms)

    # What the watch calls.

    @property
    def sequences(self) -> int:
        """So many of a batch are sampled."""
        return self._sequences

    may_be_late = may_wait = False

    def wants_step(self, step: int) -> bool:
        """Check every so many steps, and look again where something stood out."""
        return self._checks(step) or self._again.wanted

    def wants(self, place: CallPlace) -> bool:
        """Want the first call of each layer; one without gradients only in a loop that has none.

        Where the first waited for a backward in vain once (a GAN makes an image whose gradients it drops), want all
        until one has it.
        """
        if not self.wants_step(place.step) or (self._layers is not None and place.layer not in self._layers):
            return False
        return (self._checked(place) or self._again.wants(place)) and (place.gradients or not self._trains)

    def forward(self, call: AttentionCall) -> None:
        """Copy the sample."""
        by = self._declared
        # What is declared is fused, and no fused kernel says what it kept.
        if (refused := call.refused or _ALL.missing(call) or (by and refusals(call.dropout_p))) is not None:
            self._warn(f"{call.place.module or 'attention'} is not monitored: {refused}")
            self._refused = True
            return
        if call.written is not None:
            self._warn(f"{call.written}; checked with what it was given")
        sample = None
        if self._checked(call.place):
            sample = Sample.of(call, self._sequences, self._rows) if by is None else by.sample(call)
        if self._again.wants(call.place):
            self._again.forward(call)
        call.let_go()
        if sample is None:
            return
        self._take(call.place)
        key = call.place.layer, call.place.module
        if call.awaits_backward:
            waiting = self._open.setdefault(key, {})
            waiting[call.place.call] = sample
            if len(waiting) > _MOST_WAITING:
                del waiting[next(iter(waiting))]
        else:
            self._complete[key] = sample

    def backward(self, call: AttentionCall) -> None:
        """Copy the sample's part of the gradient."""
        self._again.backward(call)
        key = call.place.layer, call.place.module
        sample = self._open.get(key, {}).get(call.place.call)
        if sample is not None:
            del self._open[key]
            self._complete[key] = sample.with_gradient(call)

    def step_ended(self, step: int) -> None:
        """Send off what this step brought, and read what earlier ones did."""
        # The collective comes first: whatever fails on one rank, the others must not wait for it.
        if self._checks(step):
            self._finish(step)
        self._look_again(step)
        self._linear.look(wanted=not self._whole and (not self._trains or self._checks(step + 1)))
        self._read(wait=False)

    def failed(self, error: Exception) -> None:
        """Nothing is counted here."""

    def forked(self) -> None:
        """Be closed: what is on its way from the device, and the log, are the parent's."""
        self._of_parent = self._watch, self._sent
        self._watch, self._sent, self._log_file = None, deque(), LogFile(None)

    # Ourselves.

    @property
    def _newest(self) -> MonitorCheck | None:
        return next((check for check in reversed(self.history) if not check.again), None)

    def _checks(self, step: int) -> bool:
        return step % self.every == 0

    def _checked(self, place: CallPlace) -> bool:
        """Whether a call belongs to a check."""
        key = place.layer, place.module
        first = key not in self._taken or (key in self._in_vain and key not in self._complete)
        return first and self._checks(place.step)

    def _linear_begins(self) -> CallPlace | None:
        """Where a call of linear attention is that is about to run, if it is wanted."""
        watch = self._watch
        met: Met | None = None if watch is None else watch.meets()
        if watch is None or met is None:
            return None
        watch.counts(met)
        if not met.wanted:
            return None
        self._take(met.place)
        return met.place

    def _take(self, place: CallPlace) -> None:
        if place.gradients:
            if not self._trains:
                self._trains = True
                self._take_back(place.step)
            self._taken.add((place.layer, place.module))

    def _take_back(self, step: int) -> None:
        """Forget the checks, from a step on, of an evaluation before training: that counts its steps anew."""
        self._sent = deque(sent for sent in self._sent if sent.step < step)
        while self.history and self.history[-1].step >= step:
            self.history.pop()
        self._again.forget()
        self._log_file.take_back(step)

    def _finish(self, step: int) -> None:
        complete, self._complete = self._complete, {}
        samples = {key: sample for key, sample in complete.items() if isinstance(sample, Sample)}
        self._taken.clear()
        self._in_vain.update(self._open)
        self._open.clear()
        watch = self._watch
        found = self._measuring.measure(samples, None if watch is None else watch.guarded)
        judged = self._judged({k: s for k, s in complete.items() if isinstance(s, WholeHeads)})
        if found or judged:
            self._sent.append(Sent(step, found, judged))
        elif watch is not None and watch.calls_seen and not self._refused:
            self._warn(UNFINISHED)

    def _look_again(self, step: int) -> None:
        if self._watch is None or not self._again.wanted:
            return
        found, unknown = self._watch.guarded(self._again.finish)() or ([], [])
        for reason in unknown:
            self._warn(f"a head that stands out is not looked at again: {reason}")
        if found:
            self._sent.append(Sent(step, [], found))

    def _judged(self, declared: Mapping[Key, WholeHeads]) -> list[LayerCheck]:
        """The layers that are judged as ``inspect`` judges: of linear attention, and declared ones."""
        if (watch := self._watch) is None:
            return []
        found, unknown = watch.guarded(self._linear.finish)() or ([], [])
        reasons = [f"linear attention is not monitored: {reason}" for reason in unknown]
        if self._declared is not None:
            more, unknown = watch.guarded(self._declared.judge)(declared) or ([], [])
            found, reasons = found + more, reasons + [f"declared attention is not monitored: {r}" for r in unknown]
        for reason in reasons:
            watch.warn_once(reason)
        return found

    def _read(self, *, wait: bool) -> None:
        while self._sent and (wait or self._sent[0].ready()):
            check = self._sent.popleft().check(self._newest)
            self.history.append(check)
            if (lost := self._log_file.write(check)) is not None:
                self._warn(f"the monitor's log is not written any more: {lost}")
            found = self._alarm_state.update(check)
            self._raised_at_newest = len(found) + (self._raised_at_newest if check.again else 0)
            for alarm in found:
                self._raise(alarm)
            self._again.consider(check)

    def _raise(self, alarm: Alarm) -> None:
        self.alarms.append(alarm)
        _log.warning("attention alarm: %s", alarm)
        # Running captures write their rings.
        trigger(f"alarm: {alarm}")
        if self._on_alarm is not None:
            try:
                self._on_alarm(alarm)
            except Exception as error:
                self._warn(f"on_alarm raised {type(error).__name__}: {error}")

    def _warn(self, message: str) -> None:
        if self._watch is not None:
            self._watch.warn_once(message)
