"""A head's quantities, labels and tests: their names, how they are read from a diagnosis, and how they are written.

Every report of a diagnosis takes its columns from these tables, and the page's script gets them as ``vocabulary``;
which of them it shows, and in what order, is each report's own choice (``terminal._FIGURES``, ``html._COLUMNS``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from attn_diag.results.diagnosis import BiasEstimate, HeadDiagnosis, Label
from attn_diag.results.quality import Answer, QuantityVerdict
from attn_diag.results.wording import DASH, SYMBOLS, number, percent, signed, times

# The worst first: letters of the map, and colours.
LETTERS: dict[Label, str] = {
    "nonfinite": "N", "wrong": "W", "lossy": "L", "biased": "B", "ill_conditioned": "c", "undecided": "?", "clean": "·",
}  # fmt: skip
STYLES: dict[Label, str] = {
    "nonfinite": "bold red",
    "wrong": "bold red",
    "biased": "bold red",
    "lossy": "bold red",
    "ill_conditioned": "bold yellow",
    "undecided": "cyan",
    "clean": "green",
}
ANSWER_STYLES: dict[Answer, str] = {
    "nonfinite": "bold red",
    "wrong": "bold red",
    "lossy": "bold red",
    "undecided": "cyan",
    "good": "green",
    "stated": "",
}
# The parts of a gradient's error.
SHARES = {
    "delta": "delta",
    "lse": "LSE",
    "ds_cast": "cast of dS",
    "p_cast": "cast of P",
    "dq_cast": "cast of dQ",
    "dk_cast": "cast of dK",
    "dv_cast": "cast of dV",
}
GRADIENTS = {name: SYMBOLS[name] for name in ("dq", "dw_q", "dk", "dv")}
# The steps of a sum under the microscope, by site and step.
STEPS = {
    "range_pv/product": "P̄V of a key range",
    "accumulator/rescale": "Ō rescaled to a new maximum",
    "accumulator/addition": "Ō + P̄V of a key range",
    "out/numerator": "Ō before the division",
    "out/cast": "O, the last cast",
}


@dataclass(frozen=True)
class Quantity:
    """One number of a head."""

    key: str
    """Its name in a log, and in the JSON of a comparison."""
    title: str
    """Its name where there is room."""
    path: str | Callable[[HeadDiagnosis], float | None]
    """Where it stands in a head's diagnosis, or how it follows from it."""
    heading: str = ""
    """The title of a column in a terminal."""
    digits: int = 3
    fraction: bool = False
    """Whether it is shown as percent."""
    factor: bool = False
    """Whether it is a factor over another error."""
    predicted: str = ""
    """Where a prediction stands of what was not captured."""
    words: str = ""
    """What the page says of it."""

    def value(self, head: HeadDiagnosis) -> float | None:
        """The number as diagnosed; None where unknown."""
        return self.path(head) if callable(self.path) else _read(head, self.path)

    def nearest(self, head: HeadDiagnosis) -> tuple[float | None, bool]:
        """The number, else its prediction, and whether it is only predicted."""
        value = self.value(head)
        if value is not None or not self.predicted:
            return value, False
        value = _read(head, self.predicted)
        return value, value is not None

    def shown(self, value: float | None) -> str:
        """A value of this quantity as every report writes it."""
        if self.factor:
            return times(value)
        return percent(value) if self.fraction else number(value, self.digits)

    def text(self, head: HeadDiagnosis) -> str:
        """The number as a report shows it."""
        return self.shown(self.value(head))

    def nearest_text(self, head: HeadDiagnosis) -> str:
        """The number, or its prediction after a tilde."""
        value, predicted = self.nearest(head)
        return f"{'~' * predicted}{self.shown(value)}"


def _read(head: HeadDiagnosis, path: str) -> float | None:
    found: Any = head
    for name in path.split("."):
        found = None if found is None else getattr(found, name)
    value: float | None = found
    return value


def smallest_p(head: HeadDiagnosis) -> float | None:
    """The smallest adjusted p-value of the primary tests; None where nothing was tested."""
    return min((p for _, e in tested(head) if (p := e.p_adjusted) is not None), default=None)


def worst_factor(head: HeadDiagnosis) -> float | None:
    """The largest factor over a well-rounded kernel's error among the captured quantities; None where none has one."""
    return max((q.factor for q in head.quantities if q.factor is not None), default=None)


FACTOR = Quantity("factor", "times a well-rounded kernel", worst_factor, "\u00d7 well-\nrounded", factor=True)
NOISE_FACTOR = Quantity(
    "noise_factor", "noise factor", "noise_factor", "noise\nfactor",
    words="Delta's error over what one correct rounding of O makes; 0.98 to 1.9 on production kernels in 16 bits.",
)  # fmt: skip
CONDITIONING = Quantity(
    "conditioning", "conditioning", "conditioning", "condi-\ntioning",
    words="How much a relative error of delta grows on its way into dQ. 6 to 8 is ordinary.",
)  # fmt: skip
DQ_ERROR = Quantity(
    "dq_error", "dQ error", "propagation.dq.relative_error", "dQ\nerror", fraction=True,
    predicted="propagation.dq.predicted_relative_error",
    words="How far dQ is off: ‖error‖ / ‖dQ‖ (predicted from delta where it was not captured).",
)  # fmt: skip
DQ_BY_DELTA = Quantity(
    "dq_error_by_delta", "from delta", "propagation.dq.predicted_relative_error", "dQ error\nby delta", fraction=True,
)  # fmt: skip
DW_Q_ERROR = Quantity(
    "dw_q_error", "dW_Q error", "propagation.dw_q.relative_error", "dW_Q\nerror", fraction=True,
    predicted="propagation.dw_q.predicted_relative_error",
    words="How far dW_Q is off: ‖error‖ / ‖dW_Q‖ (predicted from delta where it was not captured).",
)  # fmt: skip
REPEATED_MAXIMA = Quantity(
    "repeated_maxima", "repeated maxima", "row_maxima.exact.fraction", "repeated\nmaxima", fraction=True,
    words="Rows whose maximum is repeated when scores are rounded to q's format.",
)  # fmt: skip
SMALLEST_P = Quantity("smallest_p", "smallest p", smallest_p, digits=2)
MAX_LOGIT = Quantity("max_logit", "max logit", "figures.max_logit", words="The largest score of a visible key.")
NONFINITE_ROWS = Quantity("nonfinite_rows", "rows with NaN or Inf", "rows_nonfinite")
QUANTITIES = {
    quantity.key: quantity
    for quantity in (
        FACTOR, DQ_ERROR, DW_Q_ERROR, NOISE_FACTOR, CONDITIONING, REPEATED_MAXIMA, MAX_LOGIT, DQ_BY_DELTA, SMALLEST_P,
        NONFINITE_ROWS,
    )
}  # fmt: skip

# The table of what was captured of a head: each beside a well-rounded kernel's.
CAPTURED_HEADINGS = ("quantity", "verdict", "error", "well-\nrounded", "factor", "95 %\ninterval")
CAPTURED_WORDS = (
    "Error: ‖error‖ / ‖quantity‖. Well-rounded: that of a well-rounded kernel, the published recipe of this format run "
    "on the same inputs. Factor: how many times as large this one is (or as what one correct rounding must be expected "
    "to leave, where that is more); up to 1.1 is as good, above 1.25 lossy, and what "
    "no rounding makes is wrong."
)


def captured_cells(found: QuantityVerdict) -> tuple[str, ...]:
    """A line of that table."""
    low, high = found.factor_ci95 or (None, None)
    return (
        SYMBOLS[found.quantity],
        found.answer,
        percent(found.relative_error),
        percent(found.relative_error_well_rounded),
        times(found.factor),
        DASH if low is None else f"{times(low)} to {times(high)}",
    )


TESTS_WORDS = (
    "In units: delta's mean error in noise floors (1 is what one correct rounding of O makes of delta), O's in ulp "
    "(spacings of its format). Adj. p: how often a kernel without bias would show such a mean by chance, all tests of "
    "the run counted. n_eff: how many independent terms carry it."
)


@dataclass(frozen=True)
class PrimaryTest:
    """One of the primary tests of a mean signed error."""

    key: str
    """Its name in a head's ``bias``."""
    title: str
    """In a table."""
    error: str
    """What is tested, in a sentence."""

    unit: Literal["floor", "ulp"]
    """What its mean is measured in besides plain numbers: noise floors for delta, spacings of O's format for O."""

    def of(self, head: HeadDiagnosis) -> BiasEstimate | None:
        """Its estimate; None where it was not made."""
        found: BiasEstimate | None = getattr(head.bias, self.key)
        return found

    def in_units(self, estimate: BiasEstimate) -> str:
        """The mean in its unit."""
        return DASH if estimate.mean_ulp is None else f"{signed(estimate.mean_ulp)} {self.unit}"


TESTS = {
    test.key: test
    for test in (
        PrimaryTest("delta", "delta, total", "delta's error", "floor"),
        PrimaryTest("delta_excess", "delta, excess", "delta's error beyond correct rounding", "floor"),
        PrimaryTest("o_away_excess", "|O|, excess", "the error of |O| beyond correct rounding", "ulp"),
        PrimaryTest("o_excess", "O, excess", "the error of O beyond correct rounding", "ulp"),
    )
}


@dataclass(frozen=True)
class TestFigure:
    """One number of a test."""

    key: str
    """Its name in a log."""
    title: str
    heading: str
    """The title of a column in a terminal."""
    attribute: str
    """Its name in a BiasEstimate."""
    digits: int = 3
    form: Literal["number", "signed", "units"] = "number"

    def value(self, estimate: BiasEstimate) -> float | None:
        """The number; None where unknown."""
        found: float | None = getattr(estimate, self.attribute)
        return found

    def text(self, test: PrimaryTest, head: HeadDiagnosis) -> str:
        """The number as a table shows it."""
        estimate = test.of(head)
        if estimate is None:
            return DASH
        if self.form == "units":
            return test.in_units(estimate)
        value = self.value(estimate)
        return signed(value, self.digits) if self.form == "signed" else number(value, self.digits)


TEST_FIGURES = (
    TestFigure("mean", "mean", "mean", "mean", 2, "signed"),
    TestFigure("mean_in_units", "in units", "in units", "mean_ulp", 2, "units"),
    TestFigure("t", "t", "t", "t"),
    TestFigure("p_adjusted", "adjusted p", "adj. p", "p_adjusted", 2),
    TestFigure("n_eff", "n_eff", "n_eff", "n_eff"),
    TestFigure("detectable", "detectable", "detectable", "minimum_detectable", 2),
    TestFigure("reference_bound", "reference ±", "ref. ±", "reference_bound", 1),
)


def tested(head: HeadDiagnosis) -> Iterator[tuple[PrimaryTest, BiasEstimate]]:
    """The primary tests that were made of a head."""
    return ((test, estimate) for test in TESTS.values() if (estimate := test.of(head)) is not None)


def label_names(head: HeadDiagnosis) -> tuple[Label, ...]:
    """The verdict's labels; none where there is no verdict."""
    return head.verdict.labels if head.verdict else ()


def worst_label(head: HeadDiagnosis) -> Label | None:
    """The gravest of the verdict's labels; None where there is none."""
    return next((label for label in LETTERS if label in label_names(head)), None)


def labels(head: HeadDiagnosis) -> str:
    """The verdict's labels, or that there is none."""
    return ", ".join(head.verdict.labels) if head.verdict else "no verdict"


def vocabulary() -> dict[str, Any]:
    """The tables for the page's script; what does not stand in the diagnosis as it is, it works out by itself."""
    return {
        "quantities": {key: asdict(q) for key, q in QUANTITIES.items() if isinstance(q.path, str) and q.words},
        "tests": {key: asdict(test) for key, test in TESTS.items()},
        "testFigures": [asdict(figure) for figure in TEST_FIGURES],
        "symbols": SYMBOLS,
        "gradients": GRADIENTS,
        "shares": SHARES,
        "steps": STEPS,
        "captured": {
            "headings": [h.replace("-\n", "-").replace("\n", " ") for h in CAPTURED_HEADINGS],
            "words": CAPTURED_WORDS,
        },
    }
