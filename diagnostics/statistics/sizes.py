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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from attn_diag.results.comparison import SizeChange, SizeOutcome
from attn_diag.results.diagnosis import BiasEstimate, HeadDiagnosis
from attn_diag.results.wording import same

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

    @classmethod
    def of(cls, head: HeadDiagnosis) -> Sizes:
        """The figures of one head; dQ's error as predicted from delta where dQ was not captured."""
        dq, dw_q = head.propagation.dq, head.propagation.dw_q
        delta, own = freedom(head.bias.delta), freedom(head.bias.dq)
        both = [f for f in (delta, own) if f is not None]
        signs = None if dw_q is None else _freedom_of_signs(dw_q.coherence_null95)
        return cls(
            values={
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


def _freedoms(a: Sizes, b: Sizes, name: str) -> tuple[float, float] | None:
    """Degrees of freedom of a figure in A and in B; None where it gets no bounds: they, or a value, are not known."""
    f_a, f_b = a.freedom.get(name), b.freedom.get(name)
    if a.values[name] is None or b.values[name] is None or f_a is None or f_b is None:
        return None
    return f_a, f_b


def size_changes(a: Sizes, b: Sizes, tail: float) -> list[SizeChange]:
    """Every figure that A or B has, judged.

    Args:
        a: A's figures.
        b: B's figures.
        tail: A figure's chance of a false "grew", and of a false "shrank".
    """
    found = []
    for name, one in a.values.items():
        other = b.values[name]
        if (one is None and other is None) or (name == _COUNTED and one == other == 0):
            continue
        ratio = other / one if one and other is not None and math.isfinite(one) else None
        freedoms = _freedoms(a, b, name)
        low, high = (None, None) if freedoms is None else bounds(*freedoms, tail)
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
    count = sum(_freedoms(a, b, name) is not None for a, b in pairs for name in a.freedom)
    return level / (2 * max(count, 1)), count
