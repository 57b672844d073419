"""The study's tables, made from its JSON: no figure is typed by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from attn_diag.statistics.means import PRIMARY
from calibration import engine
from calibration.summary import CONTROL, FORMER_RULE

# A rate with its interval: [share, low, high, n].
Rate = list[float]
LEVELS = tuple(str(level) for level in engine.LEVELS)
# The measured power at the stated minimum detectable bias has to lie here.
POWER = (0.72, 0.88)


def section(result: dict[str, Any]) -> str:
    """The section of benchmarks/results/README.md."""
    parts = [
        "## Calibration of the bias tests",
        f"{result['redraws']} redraws a capture, seed {result['seed']}, torch {result['tool']['torch']}, "
        f"{result['tool']['device']}, {result['date']}. Rates in %, with Clopper & Pearson's 95 % interval; "
        "the kernels are explained in `benchmarks/study_calibration.py`.",
        "### Can I trust it\n\n" + trust(result),
        "### False alarms of the single tests, level 1 % / 5 %\n\n" + false_alarms(result),
        "### After Benjamini-Hochberg over all heads and primary tests of a capture\n\n" + families(result),
        "### Power at the stated minimum detectable bias, level 1 % / 5 %\n\n" + detectable(result),
        "### Planted biases, level 1 %\n\n" + planted(result),
        "### The test beside others, share of alarms pooled over captures, level 1 % / 5 %\n\n" + candidates(result),
        "### Methods that the product does not use\n\n" + others(result),
        "### What misses\n\n" + misses(result),
    ]
    return "\n\n".join(parts)


def trust(result: dict[str, Any]) -> str:
    """One screen for the README: what was demanded of the tests, and what was measured."""
    cells = [c for c in _cells(result) if c[2] in PRIMARY and c[1] != CONTROL and c[3]["is_null"]]
    families = [cell for cell in _families(result) if cell[1] != CONTROL]
    rows = [
        _demand(f"{question} {_percent(float(level))}", [found[kind][level] for *_, found in among], float(level))
        for question, kind, among in (
            ("alarms without a bias, single tests, level", "false_alarms", cells),
            ("the same for the verdict (all tests of a capture),", "verdict", families),
        )
        for level in LEVELS
    ]
    gaussian = [
        min(f["false_alarms"][level][0] for name, _, _, f in cells if name in result["gaussian"]) for level in LEVELS
    ]
    smallest = " / ".join(_percent(x) for x in gaussian)
    rows.append(
        ("a test that never rejects is no test: lowest rate on Gaussian data, 1 % / 5 %", smallest, "≥ a third")
    )
    power = [r["power_at_detectable"][level][0] for *_, r in cells for level in LEVELS]
    rows.append((
        "power at the stated minimum detectable bias (80 %)", f"{min(power):.2f} to {max(power):.2f}",
        f"{POWER[0]} to {POWER[1]}",
    ))  # fmt: skip
    for kernel, words, wanted in (
        ("rounded", "else correctly rounded", "≥ 0.99"),
        ("probs_stochastic", "P̄ rounded stochastically", "–"),
    ):
        found = [_power(c, kernel, "along_do", 0.005) for c in result["captures"].values()]
        for test, where in (("delta_excess", "delta's excess"), ("delta", "delta's raw mean")):
            name = f"planted 0.005 ulp along dO, {words}: found in {where} (1 %)"
            rows.append((name, _span(p[test][0] for p in found), wanted if test == "delta_excess" else "–"))
    return _table(("question", "measured, lowest to highest over the captures", "wanted"), rows)


def _demand(question: str, rates: list[Rate], level: float) -> tuple[str, str, str]:
    above = sum(r[1] > level for r in rates)
    measured = f"{_span(100 * r[0] for r in rates)} %; {above} of {len(rates)} intervals above"
    return question, f"{measured} (chance: {0.025 * len(rates):.1f})", "at most the level"


def false_alarms(result: dict[str, Any]) -> str:
    """Kernel by test: rates from the lowest capture to the highest, and how far a mean over redraws is from zero."""
    rows = []
    for (kernel, test), found in _grouped(_cells(result)).items():
        mean, uncertain = max((f["true_mean_in_se"] for f in found.values()), key=lambda m: abs(m[0]) - 2 * m[1])
        no_null = [name for name, f in found.items() if not f["is_null"]]
        note = f" (no null: {', '.join(no_null)})" if no_null else ""
        row = [kernel, test, f"{mean:+.2f} ± {uncertain:.2f}{note}"]
        for level in LEVELS:
            rates = {name: f["false_alarms"][level] for name, f in found.items()}
            row += [_span((100 * r[0] for r in rates.values()), 1), ", ".join(_above(rates, level))]
        row.append(_span((100 * f["with_n_eff_20"]["0.05"][0] for f in found.values()), 1))
        rows.append(tuple(row))
    header = (
        "kernel", "test", "largest mean, in its standard error", "alarms at 1 %", "above 1 %", "alarms at 5 %",
        "above 5 %", f"5 %, with the former rule n_eff ≥ {FORMER_RULE}",
    )  # fmt: skip
    return _table(header, rows)


def families(result: dict[str, Any]) -> str:
    """Any alarm of a capture's family; "verdict": less those that correct rounding of O explains."""
    rows = []
    for (kernel,), found in _grouped(_families(result)).items():
        sizes = [f["size"] for f in found.values()]
        row = [kernel, f"{min(sizes)} to {max(sizes)}"]
        for kind in ("any", "verdict"):
            for level in LEVELS:
                rates = {name: f[kind][level] for name, f in found.items()}
                row.append("; ".join([_span((100 * r[0] for r in rates.values()), 1), *_above(rates, level)]))
        rows.append(tuple(row))
    return _table(("kernel", "tests", "any, 1 %", "any, 5 %", "verdict, 1 %", "verdict, 5 %"), rows)


def detectable(result: dict[str, Any]) -> str:
    """Power at 1x the stated minimum detectable bias, lowest to highest over captures; by keys, and by sequences."""
    rows = []
    for (kernel, test), cells in _grouped(c for c in _cells(result) if c[1] != CONTROL).items():
        found = [cell["power_at_detectable"] for cell in cells.values()]
        batches = [b for c in result["captures"].values() if (b := c["sequences"].get(kernel, {}).get(test))]
        rows.append((
            kernel, test, *(_span(f[level][0] for f in found) for level in LEVELS),
            *(_span(b["power_at_detectable"][level][0] for b in batches) for level in LEVELS),
            *(_span((100 * b["false_alarms"][level][0] for b in batches), 1) for level in LEVELS),
        ))  # fmt: skip
    header = ("kernel", "test", "1 %", "5 %", "8 sequences, 1 %", "5 %", "their false alarms, 1 %", "5 %")
    return _table(header, rows)


def planted(result: dict[str, Any]) -> str:
    """Share of planted biases found, lowest to highest over captures."""
    rows = []
    first = next(iter(result["captures"].values()))
    seen = {"away": "o_away_excess", "constant": "o_excess", "along_do": "delta_excess"}
    for p in first["planted"]:
        kernel, direction, size = p["kernel"], p["direction"], p["ulp"]
        found = [_power(c, kernel, direction, size) for c in result["captures"].values()]
        test = seen[direction]
        names = (test, f"{test}, n_eff >= {FORMER_RULE}", "delta", "any excess, adjusted")
        rows.append((kernel, direction, f"{size:g}", test, *(_span(f[name][0] for f in found) for name in names)))
    header = (
        "kernel", "direction", "ulp", "its test", "found by it", f"with the former rule n_eff ≥ {FORMER_RULE}",
        "by raw delta", "by any excess, adjusted",
    )  # fmt: skip
    return _table(header, rows)


def candidates(result: dict[str, Any]) -> str:
    """Every candidate's share of alarms on the nulls, by test.

    What ships is cr2: with keys as clusters for O's excesses, rows for delta's, keys and features at once else.
    """
    rows: list[tuple[str, ...]] = []
    cells = [c for c in _cells(result) if "candidates" in c[3] and c[3]["is_null"]]
    tests = (*PRIMARY, "o")
    for name in dict.fromkeys(name for c in cells for name in c[3]["candidates"]):
        row = [name]
        for test in tests:
            rates = [c[3]["candidates"][name] for c in cells if c[2] == test and name in c[3]["candidates"]]
            means = [_percent(sum(r[i] for r in rates) / len(rates)) for i in (0, 1)] if rates else []
            worst = [_percent(max(r[i] for r in rates)) for i in (0, 1)] if rates else []
            row.append(f"{' / '.join(means)} (worst {' / '.join(worst)})" if rates else "")
        rows.append(tuple(row))
    return _table(("candidate/clusters", *tests), rows)


def others(result: dict[str, Any]) -> str:
    """Shares of unbiased redraws in which each method alarms: lowest to highest over captures."""
    names: dict[tuple[str, str], list[float]] = {}
    for capture in result["captures"].values():
        for kernel, found in capture["others"].items():
            for name, rates in found.items():
                names.setdefault((kernel, name), []).append(100 * rates[0])
    return _table(
        ("kernel", "method / level", "alarms, %"),
        [(kernel, name, _span(values, 1)) for (kernel, name), values in names.items()],
    )


def misses(result: dict[str, Any]) -> str:
    """Every cell that breaks a demand: intervals above the level, powers outside their range."""
    rows = []
    for name, kernel, test, found in _cells(result):
        if kernel == CONTROL:
            continue
        for level in LEVELS:
            rates = found["false_alarms"][level]
            if rates[1] > float(level):
                rows.append((name, kernel, test, f"false alarms at {_percent(float(level))}", _rate(rates)))
            power = found["power_at_detectable"][level]
            if test in PRIMARY and (power[2] < POWER[0] or power[1] > POWER[1]):
                rows.append((name, kernel, test, f"power at detectable, {_percent(float(level))}", _rate(power)))
    for name, kernel, found in _families(result):
        rows += [
            (name, kernel, "verdict", f"false alarms at {_percent(float(level))}", _rate(found["verdict"][level]))
            for level in LEVELS
            if kernel != CONTROL and found["verdict"][level][1] > float(level)
        ]
    for name, capture in result["captures"].items():
        p = _power(capture, "rounded", "along_do", 0.005)["delta_excess"][0]
        if p < 0.99:
            rows.append((name, "rounded", "delta_excess", "planted 0.005 ulp along dO", f"{p:.3f}"))
    return _table(("capture", "kernel", "test", "demand", "measured"), rows) if rows else "Nothing."


def _cells(result: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    for name, capture in result["captures"].items():
        for kernel, tests in capture["tests"].items():
            for test, found in tests.items():
                yield name, kernel, test, found


def _families(result: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for name, capture in result["captures"].items():
        for kernel, found in capture["families"].items():
            yield name, kernel, found


def _grouped(cells: Iterable[tuple[Any, ...]]) -> dict[tuple[str, ...], dict[str, dict[str, Any]]]:
    """Cells (capture, *key, found) by their key, each by capture."""
    found: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for name, *key, cell in cells:
        found.setdefault(tuple(key), {})[name] = cell
    return found


def _above(rates: dict[str, Rate], level: str) -> list[str]:
    """Those of rates by capture whose interval lies above the level."""
    return [f"{name} {_rate(r)}" for name, r in rates.items() if r[1] > float(level)]


def _power(capture: dict[str, Any], kernel: str, direction: str, size: float) -> dict[str, list[float]]:
    wanted = (kernel, direction, size)
    found = next(p for p in capture["planted"] if (p["kernel"], p["direction"], p["ulp"]) == wanted)
    power: dict[str, list[float]] = found["power"]
    return power


def _span(values: Iterable[float], digits: int = 2) -> str:
    found = list(values)
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}" if found else ""


def _percent(x: float) -> str:
    return f"{100 * x:.2g} %"


def _rate(rates: Rate) -> str:
    return f"{100 * rates[0]:.2f} [{100 * rates[1]:.2f}, {100 * rates[2]:.2f}]"


def _table(header: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
