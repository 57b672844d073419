"""Whether the errors of the steps add up, and by what: bias, size or coherence. The rules, fixed before any data.

Notation of ``accumulation``. Seven tests are made of the steps together:

1. bias, spread: Student's t of the steps' mean errors of delta, from their spread alone.
2. bias, band: the running sum of these means against Lévy's band, from each step's clustered standard error.
3. bias, equal weights: Student's t of the steps' mean / standard error. In 1 and 2 a few steps with errors many times
   larger than the others, as at the end of a failing run, decide alone.
4. size: the median noise factor is above 2 (sign test over the steps; production kernels have 0.98 to 1.4).
5. coherence within steps: at more steps than chance makes it (5 %, binomial) the atoms' coherence lies above the 95 %
   quantile of its own null, random signs of the rows.
6. coherence across steps: ||sum E||^2 / sum ||E||^2 against random signs of the steps.
7. coherence across steps, equal weights: the same of E / ||E||, as Adam's division by sqrt(V) weighs steps.

These seven are one family, adjusted by Holm, level 1 %. The verdict:

- **bias** where 1, 2 or 3 is significant. All three take the steps as independent: where neighbouring steps are
  positively correlated beyond chance (``Accumulated.lag1``), the answer is "undecided", not yes.
- **size** where 4 is significant and ||E|| / ||G|| is 0.03 or more in the median: where the monitor's alarm begins.
- **coherence within steps** where 5 is significant, **across steps** where 6 or 7 is.

The same seven for the first, middle and last third of the steps are a second family of 21: a failure changes character
as it grows. The alignments of E, over all steps and by thirds, are a third family: signed cosines with the weight, its
change so far, the momentum and the first singular direction of W, each step with equal weight, and the sum of E with
the weight's change over the steps; all against random signs of the steps. The same of G stands beside them as a
yardstick, with p-values of its own, unadjusted. E of a step goes into the weight's change of that very step: the last
of these alignments is not zero under the null, the one with the change so far is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np
import torch
from accumulation_steps import Alignment, Series, cosine, first_directions
from torch import Tensor

from attn_diag.analyses.paper.atoms import Directions, cosines
from attn_diag.results.diagnosis import BiasEstimate
from attn_diag.results.paper import Accumulated
from attn_diag.statistics.means import holm
from attn_diag.statistics.sums import (
    SIGN_DRAWS,
    accumulate,
    band_p_value,
    sign_coherence,
    spread_test,
)
from attn_diag.statistics.welch import degrees_of_freedom
from attn_diag.watching.monitoring.alarm import AlarmRule

SPREAD, BAND, EQUAL = "bias, spread", "bias, band", "bias, equal weights"
SIZE, WITHIN = "size", "coherence within steps"
ACROSS, ACROSS_EQUAL = "coherence across steps", "coherence across steps, equal weights"
LEVEL = 0.01
NOISE = 2.0
SHARE = AlarmRule().level
# Signed alignments of a step that are averaged over the steps.
SIGNED = ("weight", "past_change", "momentum", "top")
CHANGE = "weight change"


@dataclass(frozen=True)
class Test:
    """``statistic`` beside ``limit``, what its null keeps below (in 95 % of cases, or 99 % for the band).

    ``p_adjusted``: Holm's, in the test's family. All None where there were no data.
    """

    name: str
    statistic: float | None
    limit: float | None
    p_value: float | None
    p_adjusted: float | None = None

    @property
    def significant(self) -> bool:
        return self.p_adjusted is not None and self.p_adjusted < LEVEL


@dataclass(frozen=True)
class Together:
    """Do matrices of several steps add up? ``coherence`` = ||sum X||^2 / sum ||X||^2, with its null and p-value.

    ``equal_*``: the same of X / ||X||.
    Mean squared cosine over pairs of steps of their first singular directions: ``left`` (q's features), ``right`` (x)
    and ``rank_1`` (both, of u v^T); ``*_random``: in the mean for independent uniform directions, ``*_random99``: the
    99 % quantile (none for rank_1).
    """

    coherence: float
    null95: float
    p_value: float
    equal_coherence: float
    equal_null95: float
    equal_p_value: float
    left: float
    left_random: float
    left_random99: float | None
    right: float
    right_random: float
    right_random99: float | None
    rank_1: float
    rank_1_random: float


@dataclass(frozen=True)
class Yardstick:
    """One alignment of E, tested, and the same of G with its own p-value."""

    name: str
    error: Test
    reference: Test


@dataclass(frozen=True)
class Window:
    """Some consecutive steps. ``share``: median of ||E|| / ||G||. ``coherent_steps``: above their null's 95 % quantile.

    ``bias_energy``: median over the steps of mean^2 / mean square of delta's error, what its mean makes of it.
    ``accumulated_share`` = ||sum E|| / ||sum G||; ``independent_share``: the same if the E_s were orthogonal.
    ``change``: cosine of sum E with the weight's change over the window; ``top_change``: with that of sigma u v^T, the
    weight's first singular component; ``spectral_growth``: of its spectral norm. ``more_aligned``: steps at which
    |cosine| of E with the momentum is larger than that of G, of ``compared``.
    """

    name: str
    first: int
    last: int
    count: int
    noise_factor: float | None
    share: float
    coherent_steps: int
    bias_energy: float | None
    delta: Accumulated | None
    accumulated_share: float
    independent_share: float
    change: float | None
    top_change: float | None
    spectral_growth: float
    more_aligned: int
    compared: int
    error: Together
    reference: Together
    tests: tuple[Test, ...]
    alignments: tuple[Yardstick, ...]


@dataclass(frozen=True)
class OverSteps:
    """``windows``: all steps, then thirds. ``cosines``: signed, of all pairs of steps; of E and of G."""

    draws: int
    steps: tuple[int, ...]
    windows: tuple[Window, ...]
    error_cosines: tuple[tuple[float, ...], ...]
    reference_cosines: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class Finding:
    """One answer: ``holds``, by which tests, in a sentence."""

    name: Literal["bias", "size", "coherence within steps", "coherence across steps"]
    holds: bool
    tests: tuple[Test, ...]
    sentence: str


@dataclass(frozen=True)
class Verdict:
    """``family``: the tests adjusted together, by Holm, at ``level``."""

    family: tuple[str, ...]
    level: float
    findings: tuple[Finding, ...]
    sentence: str


def over_steps(of: Series) -> OverSteps:
    """All steps, and thirds of three steps or more each."""
    n = len(of.rows)
    cuts = [round(i * n / 3) for i in range(4)]
    parts = [("all steps", slice(0, n))]
    if n >= 9:
        names = ("first third", "middle third", "last third")
        parts += [(name, slice(a, b)) for name, a, b in zip(names, cuts, cuts[1:], strict=False)]
    windows = [_window(name, _cut(of, where)) for name, where in parts]
    primary = _adjusted(windows[0].tests)
    of_thirds = iter(_adjusted([test for w in windows[1:] for test in w.tests]))
    aligned = iter(_adjusted([y.error for w in windows for y in w.alignments]))
    adjusted = []
    for i, w in enumerate(windows):
        tests = primary if i == 0 else [next(of_thirds) for _ in w.tests]
        alignments = tuple(replace(y, error=next(aligned)) for y in w.alignments)
        adjusted.append(replace(w, tests=tuple(tests), alignments=alignments))
    return OverSteps(
        draws=SIGN_DRAWS,
        steps=tuple(row.step for row in of.rows),
        windows=tuple(adjusted),
        error_cosines=_matrix(of.errors),
        reference_cosines=_matrix(of.references),
    )


def judge(over: OverSteps) -> Verdict:
    """The verdict on all steps, by the rules above."""
    w = over.windows[0]
    tests = {test.name: test for test in w.tests}
    spread, band, equal, size, within, across, across_equal = w.tests
    lag, limit = (None, None) if w.delta is None else (w.delta.lag1, w.delta.lag1_limit)
    correlated = lag is not None and limit is not None and lag > limit
    significant = any(test.significant for test in (spread, band, equal))
    biased = significant and not correlated
    large = size.significant and w.share >= SHARE
    coherent = across.significant or across_equal.significant
    undecided = "undecided, as neighbouring steps are correlated" if significant and correlated else None
    energy = "" if w.bias_energy is None else f"; its square is {w.bias_energy:.2%} of the mean square in the median"
    findings = (
        Finding(
            "bias", biased, (spread, band, equal),
            f"Bias: {undecided or _yes(biased)}. The mean of delta's error has, over the steps, t = "
            f"{_number(spread.statistic, '+.2f')} {_p(spread)}, with equal weights {_number(equal.statistic, '+.2f')} "
            f"{_p(equal)}; its running sum reaches {_number(band.statistic)} of the 99 % band {_p(band)}{energy}.",
        ),
        Finding(
            "size", large, (size,),
            f"Size: {_yes(large)}. The noise factor is {_number(w.noise_factor)} in the median (correct rounding: "
            f"about 1) and above {NOISE:g} at {_number(size.statistic, '.0%')} of the steps {_p(size)}; ‖E‖ is "
            f"{w.share:.1%} of ‖dW_Q‖ in the median.",
        ),
        Finding(
            "coherence within steps", within.significant, (within,),
            f"Coherence within steps: {_yes(within.significant)}. It is above its null's 95 % quantile at "
            f"{w.coherent_steps} of {w.count} steps {_p(within)}.",
        ),
        Finding(
            "coherence across steps", coherent, (across, across_equal),
            f"Coherence across steps: {_yes(coherent)}. ‖ΣE‖²/Σ‖E‖² = {_number(across.statistic)} (95 % of random "
            f"signs below {_number(across.limit)}) {_p(across)}, with equal weights {_number(across_equal.statistic)} "
            f"(below {_number(across_equal.limit)}) {_p(across_equal)}; ‖ΣE‖ is {w.accumulated_share:.1%} of ‖ΣdW_Q‖, "
            f"orthogonal errors would leave {w.independent_share:.1%}.",
        ),
    )  # fmt: skip
    return Verdict(tuple(tests), LEVEL, findings, _sentence(w, findings))


def _sentence(w: Window, findings: Sequence[Finding]) -> str:
    yes, no = ([f.name for f in findings if f.holds is holds] for holds in (True, False))
    shown = f"is marked by {' and '.join(yes)}" if yes else "shows none of them"
    without = f", not by {' or '.join(no)}" if yes and no else ""
    paper = "there is one" if findings[0].holds else "these steps do not show one"
    return (
        f"Steps {w.first} to {w.last}: of bias, size and coherence the error of dW_Q through delta {shown}{without}. "
        f"The paper's explanation (Qiu & Yao, arXiv 2510.04212) needs a mean of delta's error of one sign: {paper}."
    )


def _window(name: str, of: Series) -> Window:
    rows, n = of.rows, len(of.rows)
    errors, references = torch.stack(of.errors), torch.stack(of.references)
    total, true = errors.sum(0), references.sum(0)
    norms = [row.error.norm for row in rows]
    change = of.weights[-1] - of.weights[0]
    noise = [row.noise_factor for row in rows if row.noise_factor is not None]
    judged = [row for row in rows if row.coherence is not None and row.coherence_null95 is not None]
    coherent = sum((row.coherence or 0.0) > (row.coherence_null95 or 0.0) for row in judged)
    energy = [d.mean**2 / d.rms**2 for d in of.deltas if d.mean is not None and d.rms]
    delta = accumulate(of.deltas)
    error = _together(errors)
    momenta = [
        (abs(a), abs(b))
        for row in rows
        if (a := row.error_alignment.momentum) is not None and (b := row.reference_alignment.momentum) is not None
    ]
    return Window(
        name=name,
        first=rows[0].step,
        last=rows[-1].step,
        count=n,
        noise_factor=median(noise) if noise else None,
        share=median(row.error.norm / row.reference.norm for row in rows),
        coherent_steps=coherent,
        bias_energy=median(energy) if energy else None,
        delta=delta,
        accumulated_share=float(total.norm() / true.norm()),
        independent_share=math.hypot(*norms) / float(true.norm()),
        change=cosine(total, change),
        top_change=cosine(total, _first_component(of.weights[-1]) - _first_component(of.weights[0])),
        spectral_growth=rows[-1].spectral_norm - rows[0].spectral_norm,
        more_aligned=sum(a > b for a, b in momenta),
        compared=len(momenta),
        error=error,
        reference=_together(references),
        tests=(
            *_bias_tests(of.deltas, delta),
            _sign_test(SIZE, sum(f > NOISE for f in noise), len(noise), 0.5),
            _sign_test(WITHIN, coherent, len(judged), 0.05),
            Test(ACROSS, error.coherence, error.null95, error.p_value),
            Test(ACROSS_EQUAL, error.equal_coherence, error.equal_null95, error.equal_p_value),
        ),
        alignments=_alignments(of, change),
    )


def _alignments(of: Series, change: Tensor) -> tuple[Yardstick, ...]:
    def signed(name: str) -> Yardstick:
        def test(found: Sequence[Alignment]) -> Test:
            values = [value for a in found if (value := getattr(a, name)) is not None]
            return _sign_mean(name, values, len(values))

        return Yardstick(
            name, test([r.error_alignment for r in of.rows]), test([r.reference_alignment for r in of.rows])
        )

    def with_change(found: Sequence[Tensor]) -> Test:
        whole = float(torch.stack(list(found)).sum(0).norm() * change.norm())
        return _sign_mean(CHANGE, [float((x * change).sum()) for x in found], whole)

    return (*map(signed, SIGNED), Yardstick(CHANGE, with_change(of.errors), with_change(of.references)))


def _sign_mean(name: str, values: Sequence[float], divisor: float) -> Test:
    """sum of ``values`` / ``divisor`` against random signs, two-sided; the limit holds for its |value|."""
    x = np.array(values)
    if not x.any():
        return Test(name, None, None, None)
    _, null95, p = sign_coherence(np.outer(x, x))
    return Test(name, float(x.sum()) / divisor, math.sqrt(null95 * float(x @ x)) / divisor, p)


def _sign_test(name: str, count: int, of: int, chance: float) -> Test:
    """More than ``chance`` of the steps? The statistic and its limit are fractions of the steps."""
    from scipy.stats import binom

    if not of:
        return Test(name, None, None, None)
    return Test(name, count / of, float(binom.ppf(0.95, of, chance)) / of, float(binom.sf(count - 1, of, chance)))


def _bias_tests(deltas: Sequence[BiasEstimate], delta: Accumulated | None) -> tuple[Test, Test, Test]:
    """Of the means' spread, of the running sum (its largest |value| in units of the 99 % band), of mean / error."""
    if delta is None or not delta.band99:
        return Test(SPREAD, None, None, None), Test(BAND, None, None, None), Test(EQUAL, None, None, None)
    reached = max(map(abs, delta.sums))
    df = np.array([degrees_of_freedom(d) for d in deltas])
    p = band_p_value(reached, np.array(delta.standard_errors), df)
    spread = Test(SPREAD, delta.t_over_steps, _t95(len(deltas)), delta.p_over_steps)
    t, of_t = spread_test(np.array([d.t for d in deltas if d.t is not None]))
    return spread, Test(BAND, reached / delta.band99, 1.0, p), Test(EQUAL, t, _t95(len(deltas)), of_t)


def _t95(count: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, 0.975))


def _together(found: Tensor) -> Together:
    """Of matrices [S, D, C]."""
    flat = found.flatten(1)
    gram = flat @ flat.T
    norms = gram.diag().sqrt()
    coherence, null95, p = sign_coherence(gram.numpy())
    equal = sign_coherence((gram / torch.outer(norms, norms)).numpy())
    left, right = map(torch.stack, zip(*(first_directions(x) for x in found), strict=True))
    of_left, of_right = (Directions.of(side).similarity(cosines(side)) for side in (left, right))
    both = Directions.of_products(left, right).similarity(cosines(left))
    assert of_left.mean_square is not None
    assert of_right.mean_square is not None
    assert both.mean_square is not None
    return Together(
        coherence=coherence,
        null95=null95,
        p_value=p,
        equal_coherence=equal[0],
        equal_null95=equal[1],
        equal_p_value=equal[2],
        left=of_left.mean_square,
        left_random=of_left.random,
        left_random99=of_left.random99,
        right=of_right.mean_square,
        right_random=of_right.random,
        right_random99=of_right.random99,
        rank_1=both.mean_square,
        rank_1_random=both.random,
    )


def _first_component(weight: Tensor) -> Tensor:
    u, s, v = torch.linalg.svd(weight, full_matrices=False)
    return torch.outer(u[:, 0] * s[0], v[0])


def _cut(of: Series, where: slice) -> Series:
    return Series(of.rows[where], of.errors[where], of.references[where], of.deltas[where], of.weights[where])


def _matrix(found: Sequence[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Three decimals are more than a colour shows."""
    values = cosines(torch.stack(list(found)).flatten(1))
    return tuple(tuple(round(x, 3) for x in row) for row in values.tolist())


def _adjusted(tests: Sequence[Test]) -> list[Test]:
    """Holm's p-values; tests without one are no members of the family."""
    known = iter(holm([t.p_value for t in tests if t.p_value is not None]))
    return [t if t.p_value is None else replace(t, p_adjusted=next(known)) for t in tests]


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _p(test: Test) -> str:
    return f"(p = {_number(test.p_adjusted, '.2g')})"


def _number(value: float | None, form: str = ".3g") -> str:
    return "unknown" if value is None else format(value, form)
