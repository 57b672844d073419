"""What the pattern of biases over the probes says of their cause: the normaliser, O's own rounding, or neither."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from attn_diag.results.wording import percent

if TYPE_CHECKING:
    from attn_diag.results.probe import Direction, ProbeFinding

# V is 1, or one key has nearly all of P: O_ref lies at, or next to, a number, where rounding is another than elsewhere.
_AT_NUMBERS = ("ones", "one-hot")
# Means of one sign are alike where the largest is less than twice the smallest.
_ALIKE = 2.0
# An l that misses the casts' mean errors is off by their prediction; what is off by less than a tenth has other causes.
_FAR_BELOW = 0.1


def of_own_rounding(findings: Sequence[ProbeFinding]) -> tuple[float, str] | None:
    """The mean in ulp, and where it points, of a bias that every probe shows alike; None where they differ.

    l, P_bar and the sums differ from probe to probe, O's last rounding does not. Two probes at least beside the
    normaliser's must show it.
    """
    spread = [f for f in findings if f.kind == "accuracy" and f.name not in _AT_NUMBERS and "broken" not in f.labels]
    if sum(f.predicted is None for f in spread) < 2:
        return None
    names: tuple[tuple[Direction, str, str], ...] = (
        ("away from zero", "toward zero", "away from zero"),
        ("upward", "downward", "upward"),
    )
    for direction, down, up in names:
        means = [_biased_mean(f, direction) for f in spread]
        known = [m for m in means if m is not None]
        if len(known) == len(means) and _alike(known):
            return sum(known) / len(known), down if known[0] < 0 else up
    return None


def normaliser_words(findings: Sequence[ProbeFinding], level: float) -> list[str]:
    """Whether the row sum matches the weights that multiply V, where the normaliser probes show it.

    A mismatch biases every one of them, to the predicted side, unlike "constant-rows" and "ramp".
    """
    known = [f for f in findings if f.predicted is not None and f.relative is not None and "broken" not in f.labels]
    off = [f for f in known if "biased" in f.labels]
    if known and not off and not any(matches_prediction(f) for f in known):
        return [
            "The row sum matches the weights that multiply V: normaliser off by "
            f"{' and '.join(relative_words(f) for f in known)}, where an l that sums P̄ before its cast would give "
            f"{' and '.join(f'{f.predicted:+.3g}' for f in known)}."
        ]
    if not shows_mismatch(findings):
        return []
    measured = " and ".join(f"{relative_words(f)} ({_rounds(f)})" for f in off)
    expected = " and ".join(f"{f.predicted:+.4g}" for f in off)
    words = (
        f"The row sum does not match the weights that multiply V: normaliser off by {measured}; intervals at "
        f"{percent(1 - level, 'g')}."
    )
    if all(matches_prediction(f) for f in known):
        words += f" That is {expected}, what an l that sums P̄ in fp32 gives while P̄ is cast for P̄V."
    else:
        words += (
            f" It is not {expected}, which an l that sums P̄ in fp32 would give: look at how l is rounded, and at exp."
        )
    return [words]


def shows_mismatch(findings: Sequence[ProbeFinding]) -> bool:
    """Whether every normaliser probe that ran is biased as a mismatch of l biases it, and other probes are not."""
    known = [f for f in findings if f.predicted is not None]
    if not known or not all("biased" in f.labels and "broken" not in f.labels and _to_its_side(f) for f in known):
        return False
    elsewhere = [_biased_mean(f, "away from zero") for f in findings if f.name in ("constant-rows", "ramp")]
    own = [_biased_mean(f, "away from zero") for f in known]
    return not any(m is not None and o is not None and _alike([m, o]) for m in elsewhere for o in own)


def relative_words(found: ProbeFinding) -> str:
    """A relative defect with its interval."""
    if found.relative is None:
        return "unknown"
    if found.relative_ci is None:
        return f"{found.relative:+.3g}"
    return f"{found.relative:+.3g} ({found.relative_ci[0]:+.3g} to {found.relative_ci[1]:+.3g})"


def matches_prediction(found: ProbeFinding) -> bool:
    """Whether the predicted relative error lies in the measured interval."""
    if found.relative_ci is None or found.predicted is None:
        return False
    return found.relative_ci[0] <= found.predicted <= found.relative_ci[1]


def _to_its_side(found: ProbeFinding) -> bool:
    predicted, relative = found.predicted or 0.0, found.relative or 0.0
    return relative * predicted > 0 and abs(relative) >= _FAR_BELOW * abs(predicted)


def _biased_mean(found: ProbeFinding, direction: Direction) -> float | None:
    """The mean in ulp of a biased test; of a positive O the one test serves both directions."""
    tests = {t.direction: t for t in found.tests}
    test = tests.get(direction, found.tests[0] if len(found.tests) == 1 else None)
    return test.mean_ulp if test is not None and test.biased else None


def _alike(means: Sequence[float]) -> bool:
    sizes = [abs(m) for m in means]
    return len({m > 0 for m in means}) == 1 and max(sizes) < _ALIKE * min(sizes)


def _rounds(found: ProbeFinding) -> str:
    return "casts down" if (found.predicted or 0.0) < 0 else "casts up"
