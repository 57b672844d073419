"""When a head's rounding error threatens the run: a rule on the stream of its metrics, with a stated false-alarm rate.

A head alarms ("growth") when three things hold at one check:

1. **It matters.** share, the predicted error of dW_Q over dW_Q (of dQ where there is no dW_Q), is ``level`` or more.
2. **It is more than correct rounding makes.** x = over_floor^2 is the error's square over what one correct rounding of O
   would leave of it in the mean. Under correct rounding x is, at worst, 2 chi^2_1: the largest noise_factor^2 seen of
   a correctly rounding kernel is 2 (1.4^2), and a sum of randomly signed atoms that all point one way is a normal
   variable. So E x^3 <= 120 whatever came before, and with c = 120^(1/3) the CUSUM
       X <- max(0, X + min(3 ln(x / c), h / 2))                          (h / 2: no single check may alarm)
   stays below h for N checks of H heads with probability 1 - N H exp(-h) at least: exp(X) is no more than the
   Shiryaev-Roberts sum R <- (R + 1) (x / c)^3, R_n - n is a supermartingale, and Doob's inequality bounds its
   maximum (Shin, Ramdas & Rinaldo, "E-detectors", arXiv 2203.03532).
   The same with z = ``past_z`` for errors of one sign: sums of randomly signed terms are sub-Gaussian, E exp(z - 1/2) <= 1,
   Z <- max(0, Z + min(z - 1/2, h / 2)). Either will do.
3. **It grows** faster than a healthy run's: with l = ln max(share, floor), at steps t,
       W <- max(0, W + (l - l_before) - kappa (t - t_before)),   kappa midway between ``healthy_growth`` and ``failing_growth``,
   is above h_W. See ``growth_threshold``.

Under "correctly rounding kernel" (2) alone, under "a lossy kernel whose share grows no faster than healthy" (3) alone keeps
alarms below the stated rate; Bonferroni over heads in both. A head alarms once for each kind. Two facts need no
statistics: NaN or Inf in a row's forward ("nonfinite"), and an error larger than the gradient itself at two checks in a
row ("overwhelmed").

Everything is a pure function of the stream of ``Check``: ``replay`` gives the alarms of a log.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from attn_diag.monitoring.record import Check, LayerCheck, Values

Kind = Literal["growth", "overwhelmed", "nonfinite"]

# (E (2 chi^2_1)^3)^(1/3), E (chi^2_1)^3 = 15.
_FLOOR_POWER = 3
_FLOOR_REFERENCE = 120.0 ** (1 / 3)
_SIGN_REFERENCE = 0.5
# |N(0, 1)| is below the second number with the probability that is the first.
_QUANTILES = ((0.5, 0.6745), (0.9, 1.6449))
_TINY = 1e-30


@dataclass(frozen=True)
class AlarmRule:
    """The rule's parameters.

    ``false_alarm_rate``: how many false alarms to expect at most in 1,000 checks of the whole model. ``level``: share from
    which a head may alarm. ``floor``: share below which growth does not count. ``healthy_growth``,
    ``failing_growth``: of ln share, per step. ``history``: checks from which noise is estimated; ``warm_up``: checks
    before any growth alarm. ``least_noise``, ``least_wander``: the smallest standard deviations of a check's own
    noise in ln share, and of its lasting change from one check to the next, that are believed.
    """

    false_alarm_rate: float = 0.01
    level: float = 0.10
    floor: float = 0.01
    healthy_growth: float = 0.0025
    failing_growth: float = 0.0075
    history: int = 20
    warm_up: int = 3
    least_noise: float = 0.05
    least_wander: float = 0.02

    @property
    def kappa(self) -> float:
        """The growth of ln share per step that the CUSUM takes off."""
        return (self.healthy_growth + self.failing_growth) / 2

    def log_odds(self, heads: int) -> float:
        """ln(N H / rate) with N = 1,000 checks: the threshold of a sum of log e-values."""
        return math.log(1000 * max(heads, 1) / self.false_alarm_rate)


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


def growth_threshold(rule: AlarmRule, heads: int, spacing: float, noise: float, wander: float) -> float:
    """h_W: the growth CUSUM passes it by chance at most ``false_alarm_rate`` times in 1,000 checks of ``heads`` heads.

    The model: ln share = V + eps, eps independent N(0, noise^2) at every check (its sample), V a random walk whose steps
    over ``spacing`` training steps are N(mu, wander^2), mu <= healthy_growth * spacing. W_n = max over m of V_n - V_m +
    eps_n - eps_m - kappa (t_n - t_m), so for any theta > 0, with d = (kappa - healthy_growth) spacing,
        P(W_n >= h) <= sum over k >= 0 of exp(-theta h + theta^2 noise^2 + k (theta^2 wander^2 / 2 - theta d)),
    and N H times that is what is bounded; theta is chosen to make h smallest. ln max(share, floor) moves no more than ln
    share does, so the floor only makes alarms rarer.
    """
    drift = (rule.kappa - rule.healthy_growth) * spacing
    theta = np.linspace(0.0, 2 * drift / wander**2, 402)[1:-1]
    rest = -np.expm1(theta**2 * wander**2 / 2 - theta * drift)
    return float(((rule.log_odds(heads) - np.log(rest)) / theta + theta * noise**2).min())


def estimate_noise(history: Iterable[Values], rule: AlarmRule) -> tuple[float, float]:
    """Noise and wander of ln share from successive checks' values of all heads, [checks][heads]; see ``AlarmRule``.

    With V1, V2 the variances of differences over one and two checks, about their medians: V1 = wander^2 + 2 noise^2 and
    V2 = 2 wander^2 + 2 noise^2. Scales are the larger of those from the median and from the 90 % quantile of
    |difference|, so that a failing head in twenty changes little and a heavy tail is heeded.
    """
    values = np.array(list(history))
    one, two = (_variance(values[lag:] - values[:-lag]) for lag in (1, 2))
    if not math.isfinite(two):
        two = one
    wander = math.sqrt(max(two - one, 0.0)) if math.isfinite(one) else 0.0
    noise = math.sqrt(max(one - two / 2, 0.0)) if math.isfinite(one) else 0.0
    return max(noise, rule.least_noise), max(wander, rule.least_wander)


def _variance(differences: Values) -> float:
    known = differences[np.isfinite(differences)]
    if len(known) < 2:
        return math.nan
    distance = np.abs(known - np.median(known))
    return float(max(np.quantile(distance, p) / z for p, z in _QUANTILES) ** 2)


class AlarmState:
    """The rule, applied check by check."""

    def __init__(self, rule: AlarmRule | None = None) -> None:
        self.rule = rule or AlarmRule()
        self._layers: dict[tuple[int, str | None], _LayerState] = {}
        self._steps: list[int] = []
        self.noise, self.wander = self.rule.least_noise, self.rule.least_wander

    def update(self, check: Check) -> tuple[Alarm, ...]:
        """Take the next check; the alarms it raises."""
        self._steps = [*self._steps, check.step][-self.rule.history :]
        for layer in check.layers:
            key = layer.layer, layer.module
            if key not in self._layers or len(self._layers[key].growth) != layer.heads:
                self._layers[key] = _LayerState(layer.heads, self.rule)
            self._layers[key].update(check.step, layer, self.rule.log_odds(check.heads))
        self._estimate()
        if not check.layers:
            return ()
        spacing = float(np.median(np.diff(self._steps))) if len(self._steps) > 1 else 1.0
        threshold = growth_threshold(self.rule, check.heads, spacing, self.noise, self.wander)
        found: list[Alarm] = []
        for layer in check.layers:
            found += self._layers[layer.layer, layer.module].alarms(check, layer, threshold)
        return tuple(found)

    def _estimate(self) -> None:
        by_length: dict[int, list[list[Values]]] = {}
        for layer in self._layers.values():
            by_length.setdefault(len(layer.history), []).append(layer.history)
        longest = max(by_length, default=0)
        if longest > 2:
            joined = [np.concatenate(parts) for parts in zip(*by_length[longest], strict=True)]
            self.noise, self.wander = estimate_noise(joined, self.rule)


class _LayerState:
    """The CUSUMs of one layer's heads, [Hq] each."""

    def __init__(self, heads: int, rule: AlarmRule) -> None:
        self.rule = rule
        self.growth, self.excess, self.sign = np.zeros(heads), np.zeros(heads), np.zeros(heads)
        self.checks = np.zeros(heads, dtype=np.int64)
        self.above = np.zeros(heads, dtype=np.int64)
        self.level = np.full(heads, math.nan)
        self.step = np.zeros(heads, dtype=np.int64)
        self.start = np.full(heads, math.nan), np.zeros(heads, dtype=np.int64)
        self.share = np.full(heads, math.nan)
        self.odds = 0.0
        self.history: list[Values] = []
        self.raised: set[tuple[str, int]] = set()
        self.name = "dw_q"

    def update(self, step: int, layer: LayerCheck, odds: float) -> None:
        """Take one check of the layer."""
        rule, self.odds = self.rule, odds
        unknown = np.full(layer.heads, math.nan)
        share = layer.values.get("dw_q_share", unknown)
        self.name = "dw_q" if np.isfinite(share).any() else "dq"
        share = layer.values.get(f"{self.name}_share", unknown)
        over = layer.values.get(f"{self.name}_over_floor", unknown)
        known = np.isfinite(share)
        self.share = share
        with np.errstate(invalid="ignore", divide="ignore"):
            level = np.log(np.maximum(share, rule.floor))
            rise = level - self.level - rule.kappa * (step - self.step)
            excess = _FLOOR_POWER * np.log(np.maximum(over, _TINY) ** 2 / _FLOOR_REFERENCE)
        self.growth = np.maximum(0.0, self.growth + np.where(np.isfinite(rise), rise, 0.0))
        self._restart(known & (self.growth == 0), share, step)
        self.excess = _cusum(self.excess, excess, odds)
        self.sign = _cusum(self.sign, layer.values.get("past_z", unknown) - _SIGN_REFERENCE, odds)
        self.level, self.step = np.where(known, level, self.level), np.where(known, step, self.step)
        self.checks += known
        self.above = np.where(known, np.where(share >= 1, self.above + 1, 0), self.above)
        self.history = [*self.history, np.log(np.maximum(share, _TINY))][-rule.history :]

    def _restart(self, where: npt.NDArray[np.bool_], share: Values, step: int) -> None:
        self.start = np.where(where, share, self.start[0]), np.where(where, step, self.start[1])

    def alarms(self, check: Check, layer: LayerCheck, threshold: float) -> list[Alarm]:
        """Those that the last check raises."""
        rule = self.rule
        witness = (self.excess >= self.odds) | (self.sign >= self.odds)
        growing = (self.growth >= threshold) & witness & (self.share >= rule.level) & (self.checks > rule.warm_up)
        nonfinite = layer.values.get("nonfinite_rate", np.zeros(layer.heads)) > 0
        masks = (("growth", growing), ("overwhelmed", self.above >= 2), ("nonfinite", nonfinite))
        found = []
        for kind, mask in masks:
            for head in map(int, np.flatnonzero(mask)):
                if (kind, head) not in self.raised:
                    self.raised.add((kind, head))
                    found.append(self._alarm(kind, head, check, layer, threshold))
        return found

    def _alarm(self, kind: Kind, head: int, check: Check, layer: LayerCheck, threshold: float) -> Alarm:
        values = {name: float(v[head]) for name, v in layer.values.items() if math.isfinite(v[head])}
        values |= {
            "growth_cusum": float(self.growth[head]),
            "growth_threshold": threshold,
            "excess_cusum": float(self.excess[head]),
            "sign_cusum": float(self.sign[head]),
            "witness_threshold": self.odds,
        }
        matrix = "dW_Q" if self.name == "dw_q" else "dQ"
        if kind == "nonfinite":
            reason = f"NaN or Inf in {values['nonfinite_rate']:.1%} of the sampled rows of q, o or dO"
            advice = "Look at the first step with one: capture it and run attn-diag inspect"
        else:
            reason = self._words(kind, head, check.step, matrix, values)
            advice = "Capture this layer (attn_diag.capture) and run attn-diag inspect on it"
        return Alarm(kind, check.step, layer.layer, head, layer.module, reason, advice, values)

    def _words(self, kind: Kind, head: int, step: int, matrix: str, values: dict[str, float]) -> str:
        share = values[f"{self.name}_share"]
        parts = [f"rounding error of O is predicted to be {share:.2g} of {matrix}'s norm"]
        over = values.get(f"{self.name}_over_floor")
        if over is not None:
            parts.append(f"{over:.1f} times what correct rounding would leave")
        if kind == "growth":
            before, since = float(self.start[0][head]), int(self.start[1][head])
            rate = math.log(share / before) / (step - since) if step > since and before > 0 else math.nan
            allowed = self.rule.healthy_growth
            parts.append(
                f"up from {before:.2g} at step {since} (ln grows {rate:.4f} a step, a healthy run's {allowed:g})"
            )
        if (coherence := values.get("coherence")) is not None:
            parts.append(f"coherence {coherence:.2g}")
        parts += [
            f"{words} {values[name]:.3g}"
            for name, words in (("noise_factor", "noise factor"), ("max_logit", "max logit"), ("w_q_norm", "|W_Q|"))
            if name in values
        ]
        return ", ".join(parts)


def _cusum(before: Values, gain: Values, odds: float) -> Values:
    """One step of a CUSUM of log e-values; unknown gains change nothing, and none counts for more than half the threshold."""
    return np.maximum(0.0, before + np.minimum(np.where(np.isnan(gain), 0.0, gain), odds / 2))


def replay(checks: Iterable[Check], rule: AlarmRule | None = None) -> tuple[Alarm, ...]:
    """The alarms that a stream of checks raises, in order."""
    state = AlarmState(rule)
    return tuple(alarm for check in checks for alarm in state.update(check))
