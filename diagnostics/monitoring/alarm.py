"""When a head's rounding error threatens the run: a rule on the stream of its metrics, with a stated false-alarm rate.

A head alarms ("growth") when three things hold at one check:

1. **It matters.** share, the predicted error of dW_Q over dW_Q (of dQ where there is no dW_Q), is ``level`` or more.
2. **It is more than correct rounding makes.** x = over_floor^2 is the error's square over what one correct rounding
   of O would leave of it in the mean. Under correct rounding x is, at worst, 2 chi^2_1: the largest noise_factor^2
   seen of a correctly rounding kernel is 2 (1.4^2), and a sum of randomly signed atoms that all point one way is a
   normal variable. So E x^3 <= 120 whatever came before, g = 1/4 + 3/4 x^3 / 120 has a mean of 1 at most (the
   quarter keeps one small x from undoing all), and the CUSUM
       X <- max(0, X + min(ln g, h / 2))          (h / 2: no single check may alarm)
   stays below h for N checks of H heads with probability 1 - N H exp(-h) at least: exp(X) is no more than the
   Shiryaev-Roberts sum R <- (R + 1) g, R_n - n is a supermartingale, and Doob's inequality bounds its maximum
   (Shin, Ramdas & Rinaldo, "E-detectors", arXiv 2203.03532). The same with z = ``past_z`` for errors of one sign: sums
   of randomly signed terms are sub-Gaussian, E exp(z - 1/2) <= 1, so Z <- max(0, Z + min(z - 1/2, h / 2)). Either will
   do.
3. **It grows** faster than a healthy run's: with l = ln max(share, floor) at steps t,
       W <- max(0, W + (l - l_before) - kappa (t - t_before))
   is above h_W, kappa being midway between ``healthy_growth`` and ``failing_growth``; see ``growth_thresholds``. Two
   such CUSUMs run side by side: of l as it is, quick, and of its moving average, for heads whose share is noisy.

Under "the kernel rounds correctly" (2) alone, under "the kernel is lossy, but the share grows no faster than a healthy
one" (3) alone keeps alarms below the stated rate, Bonferroni over heads and CUSUMs included. A head alarms once for
each kind. Two facts need no statistics: NaN or Inf in a row ("nonfinite"), and an error larger than the gradient itself
at two checks in a row ("overwhelmed").

All is a pure function of the stream of ``Check``: ``replay`` gives the alarms of a log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from attn_diag.monitoring.record import Check, LayerCheck, Values

Kind = Literal["growth", "overwhelmed", "nonfinite"]

# E (2 chi^2_1)^3 = 8 * 15.
_THIRD_MOMENT = 120.0
_HEDGE = 0.25
_SIGN_REFERENCE = 0.5
# |N(0, 1)| is below the second number with the probability that is the first.
_QUANTILES = ((0.5, 0.6745), (0.9, 1.6449))
# Weight of the newest check in the two CUSUMs' levels.
_WEIGHTS = (1.0, 1 / 3)
# A head's own variance counts like so many differences of all heads.
_PRIOR = 20.0
_TINY = 1e-30


@dataclass(frozen=True)
class AlarmRule:
    """The rule's parameters.

    ``false_alarm_rate``: how many false alarms to expect at most in 1,000 checks of the whole model. ``level``: share
    from which a head may alarm. ``floor``: share below which growth does not count. ``healthy_growth``,
    ``failing_growth``: of ln share, per step. ``history``: checks from which noise is estimated. ``warm_up``: checks
    before the first that growth is counted from. ``least_noise``, ``least_wander``: the smallest standard deviations
    that are believed of a check's own noise in ln share, and of its lasting change from one check to the next.
    """

    false_alarm_rate: float = 0.01
    level: float = 0.10
    floor: float = 0.01
    healthy_growth: float = 0.0025
    failing_growth: float = 0.0075
    history: int = 20
    warm_up: int = 4
    least_noise: float = 0.05
    least_wander: float = 0.02

    @property
    def kappa(self) -> float:
        """The growth of ln share per step that the CUSUM takes off."""
        return (self.healthy_growth + self.failing_growth) / 2

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
        return f"step {self.step}, {where}: {self.reason}. {self.advice}"


def growth_thresholds(rule: AlarmRule, tests: int, spacing: float, noise: Values, wander: Values) -> Values:
    """h_W [heads]: the growth CUSUMs pass it by chance at most ``false_alarm_rate`` times in 1,000 checks of ``tests``.

    The model: ln share = V + eps, eps independent N(0, noise^2) at every check (its sample), V a random walk whose
    changes over ``spacing`` steps are N(mu, wander^2), mu <= healthy_growth * spacing. W_n = max over m of V_n - V_m +
    eps_n - eps_m - kappa (t_n - t_m), so for any theta > 0, with d = (kappa - healthy_growth) spacing,
        P(W_n >= h) <= sum over k >= 0 of exp(-theta h + theta^2 noise^2 + k (theta^2 wander^2 / 2 - theta d)),
    and N H times that is what is bounded; theta is chosen to make h smallest. ln max(share, floor) moves no more than
    ln share does, so the floor only makes alarms rarer. A moving average (weights w (1 - w)^j) leaves noise^2 w /
    (2 - w), and its changes over k checks vary no more than V's own.
    """
    drift = (rule.kappa - rule.healthy_growth) * spacing
    theta = np.geomspace(0.02, 0.98, 40)[:, None] * 2 * drift / np.square(wander)
    rest = -np.expm1(np.square(theta * wander) / 2 - theta * drift)
    bound: Values = (rule.log_odds(tests) - np.log(rest)) / theta + theta * np.square(noise)
    return np.asarray(bound.min(0))


def estimate_noise(history: Sequence[Values], rule: AlarmRule) -> tuple[Values, Values]:
    """Noise and wander of ln share [heads] from earlier checks' values [checks][heads]; see ``AlarmRule``.

    With V1, V2 the variances over all heads of differences over one and two checks, about their medians: V1 = wander^2
    + 2 noise^2 and V2 = 2 wander^2 + 2 noise^2. Both are then scaled by the head's own V1, which counts by its number
    of differences against twenty of all heads'. Scales are the larger of those from the median and from the 90 %
    quantile of |difference|: a failing head in twenty changes little, and a heavy tail is heeded.
    """
    values = np.array(history)
    first = values[1:] - values[:-1]
    one = _pooled(first)
    two = _pooled(values[2:] - values[:-2]) if len(values) > 3 else 2 * one
    factor = np.sqrt(_shrunk(first, one) / one) if one > 0 else np.ones(values.shape[1])
    noise, wander = math.sqrt(max(one - two / 2, 0.0)), math.sqrt(max(two - one, 0.0))
    return np.fmax(noise * factor, rule.least_noise), np.fmax(wander * factor, rule.least_wander)


def _pooled(differences: Values) -> float:
    known = differences[np.isfinite(differences)]
    return float(_scale(known[:, None])[0]) if len(known) > 1 else 0.0


def _shrunk(differences: Values, pooled: float) -> Values:
    """Each head's own variance [heads] of [n, heads], drawn towards that of all."""
    known = np.isfinite(differences)
    usable = known.sum(0) > 1
    count, own = np.where(usable, known.sum(0), 0), np.zeros(differences.shape[1])
    own[usable] = _scale(np.where(known, differences, math.nan)[:, usable])
    return np.asarray((_PRIOR * pooled + count * own) / (_PRIOR + count))


def _scale(differences: Values) -> Values:
    """Squared robust scale of each column, of which NaN is left out."""
    distance = np.abs(differences - _quantiles(differences, 0.5))
    found = [_quantiles(distance, p) / z for p, z in _QUANTILES]
    return np.asarray(np.square(np.maximum(*found)))


def _quantiles(values: Values, p: float) -> Values:
    """Of each column, by linear interpolation, as numpy.nanquantile, which takes a Python call for each."""
    ordered = np.sort(values, axis=0)  # NaN come last
    at = p * np.maximum(np.isfinite(values).sum(0) - 1, 0)
    low = at.astype(np.int64)
    below, above = (np.take_along_axis(ordered, np.minimum(i, len(values) - 1)[None], 0)[0] for i in (low, low + 1))
    return np.asarray(np.where(at > low, below + (at - low) * (above - below), below))


class AlarmState:
    """The rule, applied check by check."""

    def __init__(self, rule: AlarmRule | None = None) -> None:
        self.rule = rule or AlarmRule()
        self._layers: dict[tuple[int, str | None], _LayerState] = {}
        self._steps: list[int] = []

    def update(self, check: Check) -> tuple[Alarm, ...]:
        """Take the next check; the alarms it raises."""
        self._steps = [*self._steps, check.step][-self.rule.history :]
        spacing = float(np.median(np.diff(self._steps))) if len(self._steps) > 1 else 1.0
        for layer in check.layers:
            key = layer.layer, layer.module
            if key not in self._layers or self._layers[key].heads != layer.heads:
                self._layers[key] = _LayerState(layer.heads, self.rule)
        states = [self._layers[layer.layer, layer.module] for layer in check.layers]
        # From what came before this check: the change that it brings must not raise its own limit.
        thresholds = self._thresholds(states, check.heads, spacing)
        found: list[Alarm] = []
        for state, layer in zip(states, check.layers, strict=True):
            state.update(check.step, layer, self.rule.log_odds(2 * check.heads))
            found += state.alarms(check, layer, thresholds[:, : layer.heads])
            thresholds = thresholds[:, layer.heads :]
        return tuple(found)

    def _thresholds(self, states: Sequence[_LayerState], heads: int, spacing: float) -> Values:
        """[CUSUMs, all heads]."""
        length = max((len(s.history) for s in states), default=0)
        if length < 2:
            return np.full((len(_WEIGHTS), heads), math.inf)
        unknown = [[np.full(s.heads, math.nan)] * (length - len(s.history)) for s in states]
        joined = [[*u, *s.history] for u, s in zip(unknown, states, strict=True)]
        noise, wander = estimate_noise([np.concatenate(row) for row in zip(*joined, strict=True)], self.rule)
        tests = len(_WEIGHTS) * heads
        return np.array(
            [growth_thresholds(self.rule, tests, spacing, noise * math.sqrt(w / (2 - w)), wander) for w in _WEIGHTS]
        )


class _LayerState:
    """The CUSUMs of one layer's heads: [Hq], growth's [CUSUMs, Hq]."""

    def __init__(self, heads: int, rule: AlarmRule) -> None:
        self.heads, self.rule, self.name, self.odds = heads, rule, "dw_q", math.inf
        shape = len(_WEIGHTS), heads
        self.growth, self.average = np.zeros(shape), np.full(shape, math.nan)
        self.excess, self.sign = np.zeros(heads), np.zeros(heads)
        self.checks, self.above, self.step = (np.zeros(heads, dtype=np.int64) for _ in range(3))
        # Share and step from which the growth is counted.
        self.start = np.full(shape, math.nan), np.zeros(shape, dtype=np.int64)
        self.share = np.full(heads, math.nan)
        self.history: list[Values] = []
        self.raised: set[tuple[str, int]] = set()

    def update(self, step: int, layer: LayerCheck, odds: float) -> None:
        """Take one check of the layer. ``odds``: the threshold of the witnesses."""
        unknown = np.full(self.heads, math.nan)
        share = layer.values.get("dw_q_share", unknown)
        self.name = "dw_q" if np.isfinite(share).any() else "dq"
        self.share = share = layer.values.get(f"{self.name}_share", unknown)
        over = layer.values.get(f"{self.name}_over_floor", unknown)
        self.odds = odds
        with np.errstate(over="ignore"):
            excess = np.log(_HEDGE + (1 - _HEDGE) * over**6 / _THIRD_MOMENT)
        self.excess = _cusum(self.excess, excess, odds)
        self.sign = _cusum(self.sign, layer.values.get("past_z", unknown) - _SIGN_REFERENCE, odds)
        known = np.isfinite(share)
        self._grow(step, share, known)
        self.above = np.where(known, np.where(share >= 1, self.above + 1, 0), self.above)
        with np.errstate(invalid="ignore"):
            self.history = [*self.history, np.log(np.maximum(share, _TINY))][-self.rule.history :]

    def _grow(self, step: int, share: Values, known: npt.NDArray[np.bool_]) -> None:
        logs = np.log(np.maximum(np.where(known, share, 1.0), _TINY))
        floor = math.log(self.rule.floor)
        counted = known & (self.checks > self.rule.warm_up)
        for i, weight in enumerate(_WEIGHTS):
            # A plain mean until that is what the weights amount to.
            weights = np.maximum(weight, 1 / (self.checks + 1.0))
            before = self.average[i]
            average = np.where(self.checks > 0, before + weights * (logs - before), logs)
            rise = np.maximum(average, floor) - np.maximum(before, floor) - self.rule.kappa * (step - self.step)
            self.growth[i] = np.maximum(0.0, self.growth[i] + np.where(counted, rise, 0.0))
            self.average[i] = np.where(known, average, before)
            again = known & (self.growth[i] == 0)
            self.start[0][i][again], self.start[1][i][again] = np.exp(average[again]), step
        self.checks += known
        self.step = np.where(known, step, self.step)

    def alarms(self, check: Check, layer: LayerCheck, thresholds: Values) -> list[Alarm]:
        """Those that the last check raises."""
        witness = (self.excess >= self.odds) | (self.sign >= self.odds)
        grown = self.growth >= thresholds
        growing = grown.any(0) & witness & (self.share >= self.rule.level)
        nonfinite = layer.values.get("nonfinite_rate", np.zeros(self.heads)) > 0
        masks: dict[Kind, npt.NDArray[np.bool_]] = {
            "growth": growing, "overwhelmed": self.above >= 2, "nonfinite": nonfinite
        }  # fmt: skip
        found = []
        for kind, mask in masks.items():
            for head in map(int, np.flatnonzero(mask)):
                if (kind, head) not in self.raised:
                    self.raised.add((kind, head))
                    which = int(grown[:, head].argmax())
                    found.append(self._alarm(kind, head, check, layer, which, float(thresholds[which, head])))
        return found

    def _alarm(self, kind: Kind, head: int, check: Check, layer: LayerCheck, which: int, threshold: float) -> Alarm:
        values = {name: float(v[head]) for name, v in layer.values.items() if math.isfinite(v[head])}
        values |= {
            "growth_cusum": float(self.growth[which, head]),
            "growth_threshold": threshold,
            "excess_cusum": float(self.excess[head]),
            "sign_cusum": float(self.sign[head]),
            "witness_threshold": self.odds,
        }
        if kind == "nonfinite":
            reason = (
                f"NaN or Inf in q, o, dO or what follows from them, in {values['nonfinite_rate']:.1%} of sampled rows"
            )
            advice = "Look for the first step that has one: capture it (attn_diag.capture) and run attn-diag inspect"
        else:
            reason = self._words(kind, head, check.step, which, values)
            advice = "Capture this layer (attn_diag.capture) and run attn-diag inspect on it"
        return Alarm(kind, check.step, layer.layer, head, layer.module, reason, advice, values)

    def _words(self, kind: Kind, head: int, step: int, which: int, values: dict[str, float]) -> str:
        share, matrix = values[f"{self.name}_share"], "dW_Q" if self.name == "dw_q" else "dQ"
        parts = [f"the rounding of O is predicted to put {share:.2g} of {matrix}'s norm in error"]
        over = values.get(f"{self.name}_over_floor")
        if over is not None:
            parts.append(f"{over:.1f} times what correct rounding would")
        if kind == "growth":
            before, since = float(self.start[0][which, head]), int(self.start[1][which, head])
            allowed = f"a healthy run's at most {self.rule.healthy_growth:.2%} a step"
            parts.append(
                f"up from {before:.2g} at step {since}: {math.log(share / before) / (step - since):.2%}, {allowed}"
            )
        words = {
            "coherence": "coherence",
            "noise_factor": "noise factor",
            "max_logit": "max logit",
            "w_q_norm": "|W_Q|",
        }
        parts += [f"{text} {values[name]:.3g}" for name, text in words.items() if name in values]
        return "; ".join(parts)


def _cusum(before: Values, gain: Values, odds: float) -> Values:
    """One step of a CUSUM of log e-values; an unknown gain changes nothing, none counts for more than odds / 2."""
    return np.maximum(0.0, before + np.minimum(np.where(np.isnan(gain), 0.0, gain), odds / 2))


def replay(checks: Iterable[Check], rule: AlarmRule | None = None) -> tuple[Alarm, ...]:
    """The alarms that a stream of checks raises, in order."""
    state = AlarmState(rule)
    return tuple(alarm for check in checks for alarm in state.update(check))
