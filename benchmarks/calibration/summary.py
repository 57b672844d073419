"""From the outcomes of many redraws to rates with intervals, as plain data for JSON."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import stdtr
from scipy.stats import beta, false_discovery_control

from attn_diag.statistics.mean_tests import mean_test
from attn_diag.statistics.means import MIN_EFFECTIVE, MIN_SEQUENCES, PRIMARY, adjust
from calibration.engine import LEVELS, ON_FRESH, TESTED, Array, Outcomes

Flags = npt.NDArray[np.bool_]
# A mean of this many of the test's own standard errors raises a 1 % level to 1.03 %: what counts as none.
NO_MEAN = 0.1
CONTROL = "probs_mismatched"
# The verdict used to drop every alarm with fewer effective terms than this.
FORMER_RULE = 20


def rate(hits: Flags) -> list[float]:
    """[share, low, high, n]: share of hits with Clopper & Pearson's 95 % interval."""
    k, n = int(hits.sum()), hits.size
    low = float(beta.ppf(0.025, k, n - k + 1)) if k else 0.0
    high = float(beta.ppf(0.975, k + 1, n - k)) if k < n else 1.0
    return [_short(x) for x in (k / n if n else 0.0, low, high)] + [n]


def summarise(outcomes: Outcomes) -> dict[str, Any]:
    """Everything the study says of one capture."""
    with_primary = [kernel for kernel in TESTED if set(TESTED[kernel]) & set(PRIMARY)]
    tests = outcomes.tests
    return {
        "heads": len(next(iter(tests.values()))["p"]),
        "tests": {kernel: {test: _test(tests[kernel, test]) for test in TESTED[kernel]} for kernel in TESTED},
        "families": {kernel: _family(outcomes, kernel) for kernel in with_primary},
        "sequences": {
            kernel: {t: _sequences(tests[kernel, t]["mean"]) for t in TESTED[kernel] if t in PRIMARY}
            for kernel in with_primary
            if kernel != CONTROL
        },
        "planted": [
            {"kernel": kernel, "direction": direction, "ulp": size, "n": found["delta"].shape[1]}
            | {"power": _planted(found)}
            for (kernel, direction, size), found in outcomes.plants.items()
        ],
        "others": {
            kernel: {name: rate(_one_head(alarms) > 0) for name, alarms in found.items()}
            for kernel, found in outcomes.others.items()
        },
    }


def _one_head(values: Array) -> Array:
    """[heads, redraws] -> [redraws], the heads taking turns: what is left are independent redraws."""
    heads, redraws = values.shape
    return np.asarray(values[np.arange(redraws) % heads, np.arange(redraws)])


def _rates(p: Array) -> dict[str, list[float]]:
    return {f"{level}": rate(p[np.isfinite(p)] <= level) for level in LEVELS}


def _test(found: dict[str, Array]) -> dict[str, Any]:
    mean, se, p, n_eff = (found[name] for name in ("mean", "se", "p", "n_eff"))
    own = _one_head(p)
    # The mean over redraws that each head truly has, in its stated standard errors: 0 for a null.
    true = np.nanmean(mean, 1) / np.nanmean(se, 1)
    uncertain = np.nanstd(mean, 1) / np.nanmean(se, 1) / np.sqrt(np.isfinite(mean).sum(1))
    worst = int(np.argmax(np.abs(true) - 2 * uncertain))
    result: dict[str, Any] = {
        "false_alarms": _rates(own),
        "few_terms": _rates(_one_head(np.where(n_eff < MIN_EFFECTIVE, p, np.nan))),
        "with_n_eff_20": {f"{a}": rate((own <= a) & (_one_head(n_eff) >= FORMER_RULE)) for a in LEVELS},
        "true_mean_in_se": [_short(true[worst]), _short(uncertain[worst])],
        "is_null": bool(abs(true[worst]) - 2 * uncertain[worst] <= NO_MEAN),
        "se_over_sd": _short(float(np.mean(np.nanmean(se, 1) / np.nanstd(mean, 1)))),
        "n_eff": _short(float(np.nanmedian(n_eff))),
        "df": _short(float(np.nanmedian(found["df"]))),
        "power_at_detectable": {f"{level}": rate(_found_at_detectable(found, level)) for level in LEVELS},
    }
    candidates = {name: values for name, values in found.items() if "/" in name and not name.startswith("detectable")}
    if candidates:
        # Their noise is common, so a table of rates needs no intervals; those of the shipped test apply.
        result["candidates"] = {
            name: [_short(float(np.nanmean(values <= level))) for level in LEVELS]
            for name, values in candidates.items()
        }
    return result


def _found_at_detectable(found: dict[str, Array], level: float) -> Flags:
    """Whether the minimum detectable mean that one redraw states is found when planted in the next one."""
    mean, se, df, stated = (_one_head(found[name]) for name in ("mean", "se", "df", f"detectable/{level}"))
    known = np.isfinite(mean)
    mean, se, df = mean[known], se[known], df[known]
    shifted = mean + np.roll(stated[known], 1)
    return np.asarray(2 * stdtr(df, -np.abs(shifted / se)) <= level)


def _family(outcomes: Outcomes, kernel: str) -> dict[str, Any]:
    """Benjamini-Hochberg over all heads and primary tests of a redraw: any alarm, and any that the verdict keeps."""
    tests = [t for t in PRIMARY if t in TESTED[kernel]]
    p = np.stack([outcomes.tests[kernel, t]["p"] for t in tests])
    adjusted = _adjusted(p)
    result: dict[str, Any] = {"size": p.shape[0] * p.shape[1], "any": {}, "verdict": {}}
    for level in LEVELS:
        alarms = adjusted <= level
        result["any"][f"{level}"] = rate(_any(alarms))
        if kernel in ON_FRESH and "delta" in tests:
            alarms[tests.index("delta")] &= ~_rounding_explains(outcomes, kernel, level)
        result["verdict"][f"{level}"] = rate(_any(alarms))
    return result


def _rounding_explains(outcomes: Outcomes, kernel: str, level: float) -> Flags:
    """As the verdict has it: delta's mean is no kernel's fault where correct rounding of O alone has such a mean."""
    own, rounding = outcomes.tests[kernel, "delta"]["mean"], outcomes.tests["rounded", "delta"]
    alike = (own * rounding["mean"] > 0) & (np.abs(rounding["mean"]) >= np.abs(own) / 2)
    return np.asarray(alike & (rounding["p"] <= level))


def _any(alarms: Flags) -> Flags:
    """[tests, heads, redraws] -> [redraws]."""
    return np.asarray(alarms.any((0, 1)))


def _adjusted(p: Array) -> Array:
    """The product's adjustment of every redraw's p-values [tests, heads, redraws], missing ones (NaN) left out."""
    flat = p.reshape(-1, p.shape[-1])
    whole = np.isfinite(flat).all(0)
    result = np.ones_like(flat)
    # ``adjust`` is this function for one family; column by column takes minutes.
    if whole.any():
        result[:, whole] = false_discovery_control(flat[:, whole], axis=0)
    for i in np.flatnonzero(~whole):
        known = np.isfinite(flat[:, i])
        result[known, i] = adjust(flat[known, i].tolist())
    return result.reshape(p.shape)


def _sequences(means: Array) -> dict[str, Any]:
    """The test with sequences as clusters: every 8 redraws of a head are the sequences of one batch."""
    groups = means.shape[1] // MIN_SEQUENCES
    if groups < 2:
        return {}
    sums = means[:, : groups * MIN_SEQUENCES].reshape(-1, MIN_SEQUENCES)
    sums = sums[np.isfinite(sums).all(1)]
    tests = {level: mean_test(sums, np.ones_like(sums), level) for level in LEVELS}
    test = tests[LEVELS[0]]
    found = {"mean": test.mean[None], "se": test.standard_error[None], "df": test.df[None]}
    found |= {f"detectable/{level}": other.minimum_detectable[None] for level, other in tests.items()}
    return {
        "false_alarms": _rates(test.p_value),
        "power_at_detectable": {f"{level}": rate(_found_at_detectable(found, level)) for level in LEVELS},
    }


def _planted(found: dict[str, Array]) -> dict[str, list[float]]:
    """Power at the levels by test, with the old rule on n_eff, and of all heads' excesses after Benjamini-Hochberg."""
    result, tests = {}, [t for t in found if "/" not in t]
    for test in tests:
        own, n_eff = _one_head(found[test]), _one_head(found[f"n_eff/{test}"])
        result[test] = [_short(float(np.mean(own <= a))) for a in LEVELS]
        result[f"{test}, n_eff >= {FORMER_RULE}"] = [
            _short(float(np.mean((own <= a) & (n_eff >= FORMER_RULE)))) for a in LEVELS
        ]
    adjusted = _adjusted(np.stack([found[t] for t in tests]))
    excess = [i for i, t in enumerate(tests) if t.endswith("_excess")]
    result["any excess, adjusted"] = [_short(float((adjusted[excess] <= a).any((0, 1)).mean())) for a in LEVELS]
    return result


def _short(x: float) -> float:
    """Four digits are enough for a rate, and keep the file small."""
    return float(f"{x:.4g}")
