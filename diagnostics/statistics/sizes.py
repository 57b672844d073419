"""Did an error grow? Bounds for the ratio of two sizes that come without a standard error, derived from n_eff.

A size is the root of a mean square over n terms. With kurtosis k = E e^4 / (E e^2)^2 the relative variance of that mean
square is (k - 1) / n, that of its root (k - 1) / (4 n). As n_eff = (sum e^2)^2 / sum e^4 estimates n / k, this is
1 / n_eff - 1 / n: a mean square scatters like chi^2 / f of f = 2 / (1 / n_eff - 1 / n) degrees of freedom (n for normal
errors). So the squared ratio of two sizes of equal expectation follows F(f_B, f_A), and ``bounds`` are its quantiles.
Assumed: terms are independent (n and n_eff count clusters, see ``statistics.means``), tails are no lighter than the
normal's (f <= n), and the norm of the true dQ and dW_Q is known.

- noise factor: f from delta's errors, unscaled; scaled by their noise floors they are more alike: f is rather larger.
- dQ: f from the smaller n_eff of delta's errors and dQ's own.
- dW_Q: its error is a sum of atoms whose signs are chance, too. Under random signs ||sum||^2 / sum ||.||^2 has
  mean 1 and the 95 % quantile ``coherence_null95``, as chi^2 / f of an f solved for; the relative variances add.

A quantity's factor over a well-rounded kernel's error has an interval of its own, a jackknife over rows of the log
ratio to that kernel on the same inputs (``statistics.ratios``): what the inputs make cancels, and it is far sharper.
Two factors are compared by Welch's t of their logarithms; a ratio within 1.1 either way, the limit up to which a
verdict calls a quantity as good as can be, is no change however sure it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from attn_diag.results.comparison import NO_MATTER, SizeChange, SizeOutcome
from attn_diag.results.diagnosis import BiasEstimate, HeadDiagnosis
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.wording import same
from attn_diag.statistics.ratios import MIN_GROUPS
from attn_diag.statistics.welch import Estimated

# Rows that are NaN or Inf are no matter of chance.
_COUNTED = "nonfinite_rows"
# Figures of the inputs alone: whatever changes them changed the inputs.
_OF_INPUTS = ("conditioning", "repeated_maxima")


@dataclass(frozen=True)
class Sizes:
    """One head's figures by name; None where a figure is not known."""

    values: dict[str, float | None]
    """The figures."""
    freedom: dict[str, float | None]
    """Degrees of freedom of those that are the root of a mean square; None: unknown."""
    spread: dict[str, Estimated | None]
    """Of factors over a well-rounded kernel's error their logarithm; None: not known well enough."""

    @classmethod
    def of(cls, head: HeadDiagnosis) -> Sizes:
        """The figures of one head; dQ's error as predicted from delta where dQ was not captured."""
        dq, dw_q = head.propagation.dq, head.propagation.dw_q
        delta, own = freedom(head.bias.delta), freedom(head.bias.dq)
        both = [f for f in (delta, own) if f is not None]
        signs = None if dw_q is None else _freedom_of_signs(dw_q.coherence_null95)
        factors = {f"{q.quantity}_factor": q for q in head.quantities if q.factor is not None}
        return cls(
            spread={name: _log_factor(q) for name, q in factors.items()},
            values={
                **{name: q.factor for name, q in factors.items()},
                "noise_factor": head.noise_factor,
                "dq_error": None if dq is None else dq.known_error,
                "dw_q_error": dw_q.relative_error if dw_q else None,
                "conditioning": head.conditioning,
                # From the counts: they are whole numbers, whatever a report does to fractions.
                "repeated_maxima": head.row_maxima.exact.rows / head.rows_all if head.rows_all else None,
                _COUNTED: float(head.rows_nonfinite),
            },
            freedom={
                "noise_factor": delta,
                "dq_error": min(both) if both else None,
                "dw_q_error": None if signs is None or delta is None else 1 / (1 / signs + 1 / delta),
            },
        )


def _log_factor(found: QuantityVerdict) -> Estimated | None:
    """The logarithm of a factor, from its 95 % interval; None where too few rows carry it, or it is not finite."""
    from scipy.special import stdtrit

    if found.factor is None or found.factor_ci95 is None or found.groups is None or found.groups < MIN_GROUPS:
        return None
    _, high = found.factor_ci95
    if not (0 < found.factor < math.inf and high < math.inf):
        return None
    df = max(found.groups - 1, 1.0)
    half = math.log(high / found.factor) if high > found.factor else 0.0
    return Estimated(math.log(found.factor), half / float(stdtrit(df, 0.975)), df)


def freedom(estimate: BiasEstimate | None) -> float | None:
    """f of a mean square of an estimate's errors; None where they were not counted, or are one cluster."""
    if estimate is None or estimate.n_eff is None or estimate.n_clusters < 2 or not estimate.n_eff > 0:
        return None
    n = float(estimate.n_clusters)
    scatter = 1 / estimate.n_eff - 1 / n
    return min(n, 2 / scatter) if scatter > 0 else n


def _freedom_of_signs(null95: float | None) -> float | None:
    """f of which chi^2 / f has the 95 % quantile ``null95``; None where no f has."""
    from scipy.optimize import brentq
    from scipy.special import chdtri

    if null95 is None or not math.isfinite(null95):
        return None

    def excess(log_f: float) -> float:
        f = math.exp(log_f)
        return float(chdtri(f, 0.05)) / f - null95

    # The quantile falls with f from 3.84 at f = 1 to 1.
    low, high = 0.0, math.log(1e8)
    if excess(low) <= 0:
        return 1.0
    return math.exp(brentq(excess, low, high)) if excess(high) < 0 else None


def bounds(a: float, b: float, tail: float) -> tuple[float, float]:
    """Between which the ratio B / A of two sizes of equal expectation lies but for ``tail`` on either side."""
    from scipy.special import fdtri

    # A ratio with its arguments exchanged: the lower tail is accurate, 1 - tail is not where tail is tiny.
    return math.sqrt(float(fdtri(b, a, tail))), math.sqrt(1 / float(fdtri(a, b, tail)))


def _bounds_of(a: Sizes, b: Sizes, name: str) -> Callable[[float], tuple[float, float]] | None:
    """What gives the bounds of a figure's ratio for a tail; None where it gets none: too little is known of it."""
    one, other = a.spread.get(name), b.spread.get(name)
    if one is not None and other is not None:
        return lambda tail: _factor_bounds(one, other, tail)
    f_a, f_b = a.freedom.get(name), b.freedom.get(name)
    if a.values.get(name) is None or b.values.get(name) is None or f_a is None or f_b is None:
        return None
    return lambda tail: bounds(f_a, f_b, tail)


def _factor_bounds(a: Estimated, b: Estimated, tail: float) -> tuple[float, float]:
    """Between which the ratio of two factors of equal expectation lies but for ``tail``, and what is no matter."""
    from scipy.special import stdtrit

    squares = a.standard_error**2, b.standard_error**2
    reach = 0.0
    if sum(squares) > 0:
        df = sum(squares) ** 2 / (squares[0] ** 2 / a.df + squares[1] ** 2 / b.df)
        reach = min(-float(stdtrit(df, tail)) * math.sqrt(sum(squares)), 700.0)
    high = max(math.exp(reach), NO_MATTER)
    return 1 / high, high


def size_changes(a: Sizes, b: Sizes, tail: float) -> list[SizeChange]:
    """Every figure that A or B has, judged.

    Args:
        a: A's figures.
        b: B's figures.
        tail: A figure's chance of a false "grew", and of a false "shrank".
    """
    found = []
    for name in dict.fromkeys((*a.values, *b.values)):
        one, other = a.values.get(name), b.values.get(name)
        if (one is None and other is None) or (name == _COUNTED and one == other == 0):
            continue
        ratio = other / one if one and other is not None and math.isfinite(one) else None
        limits = _bounds_of(a, b, name)
        low, high = (None, None) if limits is None else limits(tail)
        found.append(SizeChange(name, one, other, ratio, low, high, _outcome(name, one, other, low, high)))
    return found


def _outcome(name: str, a: float | None, b: float | None, low: float | None, high: float | None) -> SizeOutcome:
    if a is None or b is None:
        return "unknown"
    if same(a, b):
        return "none"
    if name in _OF_INPUTS:
        return "other inputs"
    if name == _COUNTED:
        return "grew" if b > a else "shrank"
    if low is None or high is None:
        return "unknown"
    # NaN and infinity are no errors of a size that chance makes; so is anything beside an error of exactly zero.
    if not math.isfinite(b) or b > a * high:
        return "grew"
    return "shrank" if not math.isfinite(a) or b < a * low else "none"


def bonferroni_tail(pairs: Sequence[tuple[Sizes, Sizes]], level: float) -> tuple[float, int]:
    """The tail of each comparison of the run such that one false alarm in all has at most the chance ``level``."""
    names = [dict.fromkeys((*a.freedom, *a.spread)) for a, _ in pairs]
    count = sum(_bounds_of(a, b, name) is not None for (a, b), of in zip(pairs, names, strict=True) for name in of)
    return level / (2 * max(count, 1)), count
