"""Heads whose errors stand out at a check are looked at again, on a later step, as ``inspect`` looks at a capture.

Whole sequences of one key head and its query heads are copied with all gradients, and get a verdict: is it the
mathematics, or coarse rounding? That takes 0.5 s of a CPU's core for a head of 256 rows, so a check has two heads
looked at, those furthest beyond their limits, of different layers. A layer whose head was not wrong is looked at again
once another error of its stands out twice as far, or so far that hardly any rounding leaves it; heads that an alarm
named are not looked at again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attn_diag.errors import InputError
from attn_diag.head.outlying import GROUP_LIMIT
from attn_diag.head.quality import BEYOND
from attn_diag.watching.live.call import AttentionCall, CallPlace, Part
from attn_diag.watching.monitoring.record import MEASURED, LayerCheck, MonitorCheck, Values
from attn_diag.watching.monitoring.stacks import Key
from attn_diag.watching.monitoring.standing_out import same_as, standing_out
from attn_diag.watching.monitoring.whole_heads import WholeHeads

# Layers that one check has looked at again, and steps on which a call may fail to show what is asked (a step without a
# gradient, or with an infinite one, as a loss scaler makes them).
_MOST, _TRIES = 2, 3
# How much further another error has to stand out.
_FURTHER = 2.0
# Three times what operands of 8 bits leave, in units of the limit, of BF16: E4M3 has 4 bits less.
_HARDLY = BEYOND * 2.0**4 / GROUP_LIMIT


@dataclass
class _Asked:
    head: int
    quantity: str
    scores: dict[str, Values]
    tries: int = 0


class SecondLooks:
    """Which heads of a model are looked at again, and what is found.

    Args:
        sequences: How many of a batch are looked at.
        level: Significance of the tests of means in one look.
    """

    def __init__(self, sequences: int, level: float) -> None:
        self._sequences, self._level = sequences, level
        self._asked: dict[Key, _Asked] = {}
        self._known: dict[Key, dict[str, Values]] = {}
        self._open: dict[tuple[Key, int], WholeHeads] = {}
        self._complete: dict[Key, WholeHeads] = {}
        self._taken: set[Key] = set()

    @property
    def wanted(self) -> bool:
        """Whether some head is to be looked at on the next step."""
        return bool(self._asked)

    def forget(self) -> None:
        """Ask for nothing any more."""
        for things in (self._asked, self._known, self._open, self._complete, self._taken):
            things.clear()

    def consider(self, check: MonitorCheck) -> None:
        """Choose heads of a check."""
        candidates = []
        for layer in check.layers:
            key = layer.layer, layer.module
            if layer.is_judged or key in self._asked:
                continue
            scores = standing_out(layer)
            known = self._known.get(key, {})
            for name, score in scores.items():
                before = known.get(name)
                if before is None or len(before) != len(score):
                    before = np.zeros(len(score))
                beyond = score / np.maximum(1.0, _FURTHER * before)
                head = int(np.argmax(np.nan_to_num(beyond, posinf=np.inf)))
                if beyond[head] > 1:
                    candidates.append((float(beyond[head]), key, _Asked(head, name, scores)))
        for _, key, asked in sorted(candidates, key=lambda one: one[0], reverse=True):
            if len(self._asked) < _MOST:
                self._asked.setdefault(key, asked)

    def wants(self, place: CallPlace) -> bool:
        """Whether a call that is about to run is to be looked at."""
        key = place.layer, place.module
        return key in self._asked and key not in self._taken

    def forward(self, call: AttentionCall) -> None:
        """Copy the heads."""
        key = call.place.layer, call.place.module
        self._taken.add(key)
        head = self._asked[key].head
        if head < call.q.shape[1]:
            sample = WholeHeads.of(call, Part([head], range(self._sequences)))
            if call.awaits_backward:
                self._open[key, call.place.call] = sample
            else:
                self._complete[key] = sample

    def backward(self, call: AttentionCall) -> None:
        """Copy the heads' gradients."""
        key = call.place.layer, call.place.module
        sample = self._open.pop((key, call.place.call), None)
        if sample is not None:
            self._complete[key] = sample.with_gradient(call)

    def finish(self) -> tuple[list[LayerCheck], list[str]]:
        """What this step's looks show, and why others show nothing. The host waits for the device."""
        complete, self._complete = self._complete, {}
        self._open.clear()
        self._taken.clear()
        found, unknown = [], []
        for key, asked in list(self._asked.items()):
            if asked.tries >= _TRIES:  # what failed before its end
                self._remember(key, asked, wrong=False)
                continue
            asked.tries += 1
            layer: LayerCheck | None = None
            if (sample := complete.get(key)) is not None:
                try:
                    layer = sample.judge(key, self._level, again=True)
                except InputError as error:
                    unknown.append(str(error))
                    asked.tries = _TRIES
            if layer is not None and (_shows(layer, asked) or asked.tries >= _TRIES):
                found.append(layer)
                self._remember(key, asked, wrong=bool(np.nanmax(layer.values["wrong"]) > 0))
            elif asked.tries >= _TRIES:
                self._remember(key, asked, wrong=False)
        return found, unknown

    def _remember(self, key: Key, asked: _Asked, *, wrong: bool) -> None:
        del self._asked[key]
        known = self._known.setdefault(key, {name: np.zeros_like(s) for name, s in asked.scores.items()})
        for name in MEASURED:
            score = asked.scores[name]
            if wrong:
                # Named in the alarm, as ``alarm`` has it.
                named = same_as(asked.scores, asked.head)
                known[name] = np.where(named, np.inf, known[name])
            else:
                # What rounding leaves is alike in the heads of a layer; what it hardly leaves is asked of each.
                own = np.arange(len(score)) == asked.head
                usual = min(float(score[asked.head]), _HARDLY / _FURTHER)
                known[name] = np.maximum(known[name], np.where(own, score[asked.head], usual))


def _shows(layer: LayerCheck, asked: _Asked) -> bool:
    """Whether the look shows what is asked: numbers, and an error that has a size."""
    if layer.values["nonfinite_rate"][asked.head] > 0:
        return False
    error = layer.values.get(f"{asked.quantity}_error")
    if error is None and asked.quantity in ("dq", "dk", "dv"):
        return False  # no gradient came
    return error is None or not np.isnan(error[asked.head]) or layer.values["wrong"][asked.head] > 0
