"""When a head's rounding error threatens the run: a rule on the stream of its metrics, with a stated false-alarm rate.

A head alarms ("rounding") when three things hold at one check:

1. **It is more than a well-rounded kernel makes.** over_floor^2 is the error's square over what one correct rounding
   of O would leave of it in the mean. A production kernel also casts P_bar, and delta = sum_j P_j dP_j sees that:
       var Delta_delta = sum_i dO_i^2 ulp(O_i)^2 / 12 + eps^2 sum_j P_j^2 dP_j^2,   eps^2 = 2^(-2p) / 24
   (the top key's P_bar is 1 and casts exactly, unless the running maximum is stale; it is counted all the same). On
   Gaussian inputs the second part is as large as the first. But one cast moves all features of O together: where dO
   points along V, as on low-rank inputs, it may be many times that, so that no constant bounds the noise factor
   (on such inputs flash and FlexAttention have 1.9, a kernel with a stale maximum 2.3; a head in training 2.4). So
   over_floor^2 is divided by its expectation for this head at this check: x = (over_floor / expected_over_floor)^2 has
   a mean of 1 at most. In dW_Q, a sum over rows, those that copy one key's V (1 - P of the top key is below a spacing:
   attention sinks) share its roundings, and are expected to err in one direction, all of them: the bound is loose
   there, and an alarm takes more. Without that E x^3 was 9e4 on such heads, where dO's rows have a mean; with it, 2e-5.
   With random signs, independent between the other rows, x is at worst chi^2_1: a sum of randomly signed atoms is a
   normal variable where all point one way. So E x^3 <= 15 whatever came before (on planted healthy heads of eight
   families at most 0.5, and 6 where all rows of the projection's input point one way), and g = 1/4 + 3/4 x^3 / 15 has
   a mean of 1 at most (the quarter keeps one small x from undoing all). The CUSUM
       X <- max(0, X + min(ln g, h / 2))          (h / 2: no single check may alarm)
   stays below h for N checks of H heads with probability 1 - N H exp(-h) at least: until then max(1, exp(X)) is no more
   than the Shiryaev-Roberts sum R <- (R + 1) g, R_n - n is a supermartingale, and Doob's inequality bounds its maximum
   (Shin, Ramdas & Rinaldo, "E-detectors", arXiv 2203.03532). This alone keeps alarms on such a kernel below the stated
   rate, Bonferroni over heads included. Logs from before expected_over_floor was measured are read with 2 in place of
   its square, from noise factors of up to 1.4.
   Where dQ was measured and errs less than the error of O is predicted to make it, over_floor, and share below, count
   in proportion.
2. **It matters.** share, the predicted error of dW_Q over dW_Q (of dQ where there is no dW_Q), averaged over the last
   checks, is ``level`` or more.
3. **It grows.** That average is ``growth`` times its lowest so far, or more: a kernel that always was that coarse is
   attn-diag inspect's business.

2 and 3 are no tests; their numbers were frozen on one failing and one healthy run of seed 0 and tried on other seeds
(``benchmarks/results/failing_run``). Max logit and W_Q's spectral norm are in the metrics, but not in the rule: there
they were larger in the healthy run than in the failing one at its alarm.

Attention that is not fused (plain torch) has the same rule, with dQ's measured error in 1, and what the casts of dS and
dQ add in the expectation: x has a mean of 1 at most there too. In 2 and 3 not all of that error counts alike. share was
frozen on errors of delta, which move row t of dQ along (P K)_t, the mean of its keys, so that the row's dS no longer
add up to 0. Rounded scores leave them adding up to 0, as autograd has the P of the forward that ran: what is off is
many small errors of all signs. So the part of the error that lies along (P K)_t in each row, of norm d over dQ's,
counts as share does. The rest, of norm s at most, changes what a step gains by its mean along the gradient g, which is
0 for errors of all signs, and by the variance that it adds, s^2 of |g|^2, which costs what a smaller batch does. So
d + s^2 takes the place of share: 3 % of what a step does, in both. Of BF16 scores d was a quarter to a half of s, which
may thus come to 5 to 9 %, and to 17 % in no case. An error with a mean along the gradient (dQ times 1.05) is none that
rounding makes: see below. ``benchmarks/study_plain_torch_faults.py`` counts what is found.

Linear attention has no delta, and attention that is declared to run below 16 bits another yardstick: each check judges
a head as ``inspect`` does. It alarms where two looks in a row find the same: "wrong" (no rounding makes the error) or
"rounding" (lossy: 1.25 times the error of a well-rounded kernel, or of the declared recipe; of linear attention by a
site that is named, or 3 times), "biased" (at the rate's level) or "nonfinite". A kernel that always was so alarms too.
No rate is proven for it: ``benchmarks/study_linear_training.py`` and ``study_declared_monitor.py`` count.

An error that no rounding makes has no need to grow. Of all other attention each check measures O, dQ, dK and dV. A
head that stands out there (``standing_out``) is judged on the next step as ``inspect`` does, whole ("again"), and
"wrong" in one such look is an alarm, one for its layer, from the first check on. No rate is proven for it either:
``benchmarks/study_absolute_monitor.py`` counts.

NaN or Inf in a head's O, dQ, dK or dV whose inputs are finite ("nonfinite") alarms at once, one alarm for its layer; of
FP16's gradients, which overflow where a loss scaler tries its factor, once checks in a row span 40 steps.

A head alarms once for each kind. Two facts need no statistics, but two checks in a row: NaN or Inf that came in, or was
met elsewhere ("nonfinite"; in FP16's dO, they span 40 steps), and an error larger than the gradient itself
("overwhelmed").

All is a pure function of the stream of ``MonitorCheck``: ``replay`` gives the alarms of a log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from attn_diag.printing import printable
from attn_diag.results.wording import percent, ranges
from attn_diag.watching.monitoring.error_words import error_words
from attn_diag.watching.monitoring.own_nonfinite import SCALER_STEPS, MadeHere
from attn_diag.watching.monitoring.record import JUDGED_FLAGS, MEASURED, LayerCheck, MonitorCheck, Values
from attn_diag.watching.monitoring.standing_out import same_as, standing_out

Kind = Literal["rounding", "overwhelmed", "nonfinite", "wrong", "biased"]

# E (chi^2_1)^3.
_THIRD_MOMENT = 15.0
# Square of expected_over_floor in logs that do not have it.
_FORMER_EXPECTATION = 2.0
_HEDGE = 0.25
_TINY = 1e-30
_NONFINITE = (*(f"{name}_nonfinite" for name in MEASURED), "came_nonfinite")
_ADVICE = "Capture this layer (attn_diag.capture) and run attn-diag inspect on it"


@dataclass(frozen=True)
class AlarmRule:
    """The alarm's thresholds; the module's docstring says what they are compared with."""

    false_alarm_rate: float = 0.01
    """False alarms to expect at most in 1,000 checks of the whole model, of a kernel that rounds correctly, with errors
    independent between rows."""
    level: float = 0.03
    """A head may alarm from this averaged share on; of measured errors see condition 2."""
    growth: float = 2.0
    """The averaged share over its lowest so far, from which a head may alarm."""
    weight: float = 0.5
    """Weight of the newest check in the average of ln share."""
    warm_up: int = 4
    """Checks before the lowest share is taken."""

    def log_odds(self, tests: int) -> float:
        """ln(N H / rate) with N = 1,000 checks of H ``tests``: the threshold of a sum of log e-values."""
        return math.log(1000 * max(tests, 1) / self.false_alarm_rate)


@dataclass(frozen=True)
class Alarm:
    """One head's alarm: what, where and when, the reason with its numbers, and what to do next."""

    kind: Kind
    step: int
    layer: int
    head: int
    module: str | None
    reason: str
    advice: str
    values: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        where = f"layer {self.layer} head {self.head}" + (f" ({self.module})" if self.module else "")
        return printable(f"step {self.step}, {where}: {self.reason}. {self.advice}")


class AlarmState:
    """The rule, applied check by check."""

    def __init__(self, rule: AlarmRule | None = None) -> None:
        self.rule = rule or AlarmRule()
        self._layers: dict[tuple[int, str | None], LayerState] = {}
        self._judged: dict[tuple[int, str | None], JudgedState] = {}
        self._again: dict[tuple[int, str | None], AgainState] = {}

    def update(self, check: MonitorCheck) -> tuple[Alarm, ...]:
        """Take the next check, and return the alarms that it raises."""
        found: list[Alarm] = []
        states: list[tuple[LayerState, LayerCheck]] = []
        for layer in check.layers:
            key = layer.layer, layer.module
            if layer.again:
                found += self._again.setdefault(key, AgainState()).update(check.step, layer)
                continue
            if layer.is_judged:
                found += self._judged.setdefault(key, JudgedState()).update(check.step, layer)
                continue
            state = self._layers.get(key)
            if state is None or state.heads != layer.heads:
                state = self._layers[key] = LayerState(layer.heads, self.rule)
            state.update(check.step, layer, self.rule.log_odds(check.heads))
            states.append((state, layer))
            self._again.setdefault(key, AgainState()).checked(check.step, layer)
        # Where a kernel made NaN, its place is told first, and the layers that it went on to are not.
        for state, layer in states:
            found += state.nonfinite(check.step, layer)
        source = any(bool(state.made) for state, _ in states)
        for state, layer in states:
            found += state.alarms(check.step, layer, source=source)
        return tuple(found)

    @property
    def witness(self) -> float:
        """Largest of all heads' witnesses over their threshold; from 1 on, an error exceeds correct rounding's."""
        return max((float(s.largest / s.odds) for s in self._layers.values()), default=0.0)

    @property
    def share(self) -> float:
        """The largest averaged share, as condition 2 counts it."""
        averages = [float(np.nanmax(s.average)) for s in self._layers.values() if np.isfinite(s.average).any()]
        return math.exp(max(averages)) if averages else 0.0


class LayerState:
    """What the rule remembers of one layer's heads, [Hq] each."""

    def __init__(self, heads: int, rule: AlarmRule) -> None:
        self.heads, self.rule, self.name, self.odds = heads, rule, "dw_q", math.inf
        self.excess = np.zeros(heads)
        self.average, self.lowest = np.full(heads, math.nan), np.full(heads, math.inf)
        self.checks, self.above, self.lowest_at = (np.zeros(heads, dtype=np.int64) for _ in range(3))
        # Checks on end with NaN or Inf, the step of the first, and whether it may be a loss scaler's.
        self.broken, self.broken_at = (np.zeros(heads, dtype=np.int64) for _ in range(2))
        self.doubtful: npt.NDArray[np.bool_] = np.zeros(heads, dtype=np.bool_)
        self.made = MadeHere(heads)
        self._raised: set[tuple[str, int]] = set()

    @property
    def largest(self) -> float:
        """The largest of the heads' witnesses."""
        return float(self.excess.max())

    @property
    def witnessed(self) -> npt.NDArray[np.bool_]:
        """Whether a head's error is more than correct rounding makes, [Hq]."""
        passed: npt.NDArray[np.bool_] = self.excess >= self.odds
        return passed

    def update(self, step: int, layer: LayerCheck, odds: float) -> None:
        """Take one check of the layer.

        Args:
            odds: the threshold of the witnesses, ``AlarmRule.log_odds``.
        """
        unknown = np.full(self.heads, math.nan)
        share = layer.values.get("dw_q_share", unknown)
        self.name = "dw_q" if np.isfinite(share).any() else "dq"
        believed = _believed(layer)
        share = layer.values.get(f"{self.name}_share", unknown) * believed
        threat = _threat(share, layer.values.get(f"{self.name}_share_delta", unknown))
        over = layer.values.get(f"{self.name}_over_floor", unknown) * believed
        self.odds = odds
        expected = np.square(layer.values.get(f"{self.name}_expected_over_floor", unknown))
        expected = np.where(np.isnan(expected), _FORMER_EXPECTATION, expected)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            excess = np.log(_HEDGE + (1 - _HEDGE) * (over**2 / expected) ** 3 / _THIRD_MOMENT)
        self.excess = _cusum(self.excess, excess, odds)
        known = np.isfinite(threat)
        logs = np.log(np.maximum(np.where(known, threat, 1.0), _TINY))
        # A plain mean until that is what the weights amount to.
        weights = np.maximum(self.rule.weight, 1 / (self.checks + 1.0))
        moved = np.where(self.checks > 0, self.average + weights * (logs - self.average), logs)
        self.average = np.where(known, moved, self.average)
        lower = known & (self.checks >= self.rule.warm_up) & (self.average < self.lowest)
        self.lowest = np.where(lower, self.average, self.lowest)
        self.lowest_at = np.where(lower, step, self.lowest_at)
        self.above = np.where(known, np.where(share >= 1, self.above + 1, 0), self.above)
        self.broken_at = np.where(self.broken > 0, self.broken_at, step)
        self.broken = np.where(layer.values.get("nonfinite_rate", np.zeros(self.heads)) > 0, self.broken + 1, 0)
        kinds = np.stack([np.nan_to_num(layer.values.get(name, np.zeros(self.heads))) for name in _NONFINITE])
        self.doubtful = np.logical_and(((kinds > 0) & (kinds < 1)).any(0), (kinds < 1).all(0))
        self.made.update(step, layer)
        self.checks += known

    def nonfinite(self, step: int, layer: LayerCheck) -> list[Alarm]:
        """Return the alarms of what was made NaN or Inf here: one for each of O, dQ, dK and dV, with all its heads."""
        found = []
        for heads, reason in self.made.alarms(layer):
            self._raised |= {("nonfinite", head) for head in heads}
            values = {name: float(v[heads[0]]) for name, v in layer.values.items() if math.isfinite(v[heads[0]])}
            found.append(Alarm("nonfinite", step, layer.layer, heads[0], layer.module, reason, _ADVICE, values))
        return found

    def alarms(self, step: int, layer: LayerCheck, *, source: bool) -> list[Alarm]:
        """Return the other alarms that the last check raises.

        Args:
            source: Whether NaN or Inf was made in a layer that the check saw.
        """
        came = layer.values.get("came_nonfinite", np.zeros(self.heads)) > 0
        with np.errstate(invalid="ignore"):
            matters = self.average >= math.log(self.rule.level)
            grows = self.average >= self.lowest + math.log(self.rule.growth)
        masks: dict[Kind, npt.NDArray[np.bool_]] = {
            "rounding": self.witnessed & matters & grows,
            "overwhelmed": self.above >= 2,
            "nonfinite": (self.broken >= 2)
            & ~(came & source)
            & ~(self.doubtful & (step - self.broken_at < SCALER_STEPS)),
        }
        found = []
        for kind, mask in masks.items():
            for head in map(int, np.flatnonzero(mask)):
                if (kind, head) not in self._raised:
                    self._raised.add((kind, head))
                    found.append(self._alarm(kind, head, step, layer))
        return found

    def _alarm(self, kind: Kind, head: int, step: int, layer: LayerCheck) -> Alarm:
        values = {name: float(v[head]) for name, v in layer.values.items() if math.isfinite(v[head])}
        values |= {
            "share_average": math.exp(self.average[head]),
            "share_lowest": math.exp(self.lowest[head]) if math.isfinite(self.lowest[head]) else math.nan,
            "excess_cusum": float(self.excess[head]),
            "witness_threshold": self.odds,
        }
        if kind == "nonfinite":
            where = f"in {percent(values['nonfinite_rate'], '.1f')} of sampled rows"
            reason = f"NaN or Inf in q, o, dO or what follows from them, {where}"
            if values.get("came_nonfinite"):
                reason = f"NaN or Inf came in with q, k, v or dO, {where}: made by another call, or by an earlier step"
            advice = "Look for the first step that has one: capture it (attn_diag.capture) and run attn-diag inspect"
        else:
            reason = error_words(kind, self.name, int(self.lowest_at[head]), values)
            advice = _ADVICE
        return Alarm(kind, step, layer.layer, head, layer.module, reason, advice, values)


class JudgedState:
    """What the rule remembers of one layer whose heads have verdicts."""

    def __init__(self) -> None:
        self._before: set[tuple[Kind, int]] = set()
        self._raised: set[tuple[Kind, int]] = set()

    def update(self, step: int, layer: LayerCheck) -> list[Alarm]:
        """Take one check of the layer, and return the alarms that it raises."""
        now: set[tuple[Kind, int]] = {
            (_KIND_OF[label], int(head))
            for label, flag in JUDGED_FLAGS.items()
            for head in np.flatnonzero(layer.values[flag] > 0)
        }
        # An error at the edge of what rounding makes is "wrong" in one look and "lossy" in the next.
        again = {one for one in now if {(kind, one[1]) for kind in _SEEN_WITH.get(one[0], (one[0],))} & self._before}
        again -= self._raised
        # Of heads that were not looked at, what the last look found still stands.
        unseen = np.isnan(layer.values["lossy"])
        self._before = now | {(kind, head) for kind, head in self._before if unseen[head]}
        self._raised |= again
        what, advice = "linear attention", "Capture it (attn_diag.capture_linear) and run attn-diag inspect"
        if layer.declared is not None:
            what = f"attention declared {layer.declared}"
            advice = (
                f"Capture this layer (attn_diag.capture) and run attn-diag inspect --declared {layer.declared} on it"
            )
        found = []
        for kind, head in sorted(again, key=lambda one: (one[1], one[0])):
            values = {name: float(v[head]) for name, v in layer.values.items() if math.isfinite(v[head])}
            reason = (layer.words[head] if head < len(layer.words) else None) or f"{what} is {kind}"
            found.append(Alarm(kind, step, layer.layer, head, layer.module, reason.rstrip("."), advice, values))
        return found


class AgainState:
    """What the rule remembers of one layer of which heads may be looked at again."""

    def __init__(self) -> None:
        self._scores: dict[str, Values] = {}
        self._step = 0
        self._raised: set[int] = set()

    def checked(self, step: int, layer: LayerCheck) -> None:
        """Take what stands out at a check."""
        self._step, self._scores = step, standing_out(layer)

    def update(self, step: int, layer: LayerCheck) -> list[Alarm]:
        """Take a second look, and return the alarm that it raises: one for the layer, which names its heads."""
        wrong = [int(head) for head in np.flatnonzero(layer.values["wrong"] > 0)]
        if not wrong or set(wrong) <= self._raised:
            return []
        head = next(h for h in wrong if h not in self._raised)
        also: set[int] = set()
        if self._scores and len(next(iter(self._scores.values()))) == layer.heads:
            also = {int(other) for other in np.flatnonzero(same_as(self._scores, head))}
        self._raised |= also | set(wrong)
        values = {name: float(v[head]) for name, v in layer.values.items() if math.isfinite(v[head])}
        reason = (layer.words[head] or "its results are not attention's").rstrip(".")
        if others := sorted((also | set(wrong)) - {head}):
            said = f"heads {ranges(others)} stand" if len(others) > 1 else f"head {others[0]} stands"
            reason += f"; {said} out as well (step {self._step})"
        return [Alarm("wrong", step, layer.layer, head, layer.module, reason, _ADVICE, values)]


_SEEN_WITH: dict[Kind, tuple[Kind, ...]] = {"wrong": ("wrong", "rounding"), "rounding": ("wrong", "rounding")}
_KIND_OF: dict[str, Kind] = {"nonfinite": "nonfinite", "wrong": "wrong", "lossy": "rounding", "biased": "biased"}


def _believed(layer: LayerCheck) -> Values:
    """How much of a predicted error of dQ is there in the dQ that was measured, at most 1, [Hq]; 1 where none was.

    What a backward that makes P again errs in common with the forward (fp32 scores in the thousands) cancels in dQ.
    """
    unknown = np.full(layer.heads, math.nan)
    measured, predicted = (layer.values.get(name, unknown) for name in ("dq_error", "dq_share"))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = np.minimum(measured / predicted, 1.0)
    return np.where(np.isfinite(ratio), ratio, 1.0)


def _threat(share: Values, of_delta: Values) -> Values:
    """What of a share counts, [Hq]: of a measured error the part as of delta, and the square of all.

    A predicted error is of delta throughout, and logs of before do not have that part.
    """
    with np.errstate(over="ignore"):
        return np.where(np.isnan(of_delta), share, of_delta + np.square(share))


def _cusum(before: Values, gain: Values, odds: float) -> Values:
    """One step of a CUSUM of log e-values; an unknown gain changes nothing, none counts for more than odds / 2."""
    return np.maximum(0.0, before + np.minimum(np.where(np.isnan(gain), 0.0, gain), odds / 2))


def replay(checks: Iterable[MonitorCheck], rule: AlarmRule | None = None) -> tuple[Alarm, ...]:
    """Return the alarms that a stream of checks raises, in order."""
    state = AlarmState(rule)
    return tuple(alarm for check in checks for alarm in state.update(check))
