"""How numbers and names are written, in words and in reports, and whether two written numbers are the same."""

from __future__ import annotations

import math
import shlex
from collections.abc import Collection, Sequence
from decimal import Decimal

DASH = "–"
"""What is shown of a number that is not known."""
SYMBOLS = {"o": "O", "lse": "LSE", "delta": "delta", "dq": "dQ", "dk": "dK", "dv": "dV", "dkv": "dKV",
           "dsinks": "dSink", "dmask": "dMask", "dw_q": "dW_Q"}  # fmt: skip
"""The outputs of attention and of its backward pass, by their keys in captures and results."""
LINEAR_SYMBOLS = {
    "o": "O", "final_state": "the last state", "dq": "dQ", "dk": "dK", "dv": "dV", "da": "da", "db": "db",
    "dg": "the log decay's gradient", "dbeta": "beta's gradient", "ddt": "dt's gradient", "dA": "A's gradient",
    "dinitial_state": "the initial state's gradient", "dg_gamma": "the decay's gradient", "dD": "D's gradient",
}  # fmt: skip
"""The same of an operator of linear attention."""
EVERY_SYMBOL = SYMBOLS | LINEAR_SYMBOLS
"""Both."""

# Two float64 references on one input agree far better than this; two inputs do not agree as well by accident.
_SAME = 1e-6
_FEWEST_DIGITS = 4
# Chances below the one are not worth a figure in a sentence; above the other they are told in percent.
_NEVER, _OFTEN = 1e-6, 0.05
# Of more heads than these only the first are written out.
_HEADS = 8


def number(value: float | None, digits: int = 3) -> str:
    """The shortest useful form: "0.0123"."""
    return DASH if value is None else f"{value:.{digits}g}"


def percent(value: float | None, form: str = ".3g", *, unknown: str = DASH) -> str:
    """A fraction as percent: "1.23 %", "1130 %"; from a thousand on "1.85e+14 times its size".

    Args:
        value: The fraction.
        form: How 100 times the fraction is formatted.
        unknown: What is shown of None.
    """
    if value is None:
        return unknown
    if 1000 <= abs(value) < math.inf:
        return f"{value:.3g} times its size"
    text = f"{100 * value:{form}}"
    return f"{100 * value:.0f} %" if "e+" in text else f"{text} %"


def yardstick(declared: str | None) -> str:
    """What a head is held against: a well-rounded kernel, or the recipe that it is declared to be."""
    return "a well-rounded kernel" if declared is None else f"the recipe {declared}"


def function_words(
    causal: str, scale: float, window: Sequence[int] | None = None, softcap: float | None = None,
    alibi_slopes: Sequence[float] | None = None, sinks: Sequence[float] | None = None,
) -> str:  # fmt: skip
    """Which attention a kernel is said to be: "causal top-left, scale 0.125, window 64,0, softcap 50, sinks 1 2"."""
    band = [] if window is None else ["window {},{}".format(*window)]
    cap = [] if softcap is None else [f"softcap {softcap:g}"]
    each = [f"{n} {_of_heads(x)}" for n, x in (("ALiBi slopes", alibi_slopes), ("sinks", sinks)) if x is not None]
    return ", ".join([f"causal {causal}", f"scale {scale:g}", *band, *cap, *each])


def _of_heads(numbers: Sequence[float]) -> str:
    """One number a head; of many the first ones."""
    more = f" … ({len(numbers)} heads)" if len(numbers) > _HEADS else ""
    return " ".join(f"{x:.4g}" for x in numbers[:_HEADS]) + more


def times(factor: float | None) -> str:
    """A factor, such as one over a well-rounded kernel's error: "1.00", "11.6", "391"."""
    if factor is None or not 0.01 <= factor < 1e5:
        return number(factor)
    return f"{factor:.{2 if factor < 9.995 else 1 if factor < 99.95 else 0}f}"


def share(fraction: float) -> str:
    """A fraction as percent with two digits, never rounded up: 100 % is said of every bit alone."""
    parts = 1e4 * fraction
    return f"{(math.floor(parts) if math.isfinite(parts) else parts) / 100:g} %"


def chance(p: float | None, name: str = "adjusted p") -> str:
    """What a p-value means, in plain words: "by chance in 1 of 500 runs (adjusted p = 0.002)".

    Args:
        p: The p-value; None where nothing was tested.
        name: What it is called.
    """
    if p is None:
        return "whether by chance was not tested"
    if p <= _NEVER:
        often = "less than 1 of a million runs"
    else:
        often = f"1 of {round(1 / p):,} runs" if p <= _OFTEN else f"{percent(p, '.0f')} of runs"
    return f"by chance in {often} ({name} = {p:.2g})"


def in_units(mean: float | None, *, floors: bool) -> str:
    """A mean error of O, or of delta (``floors``), in its unit, with what that is."""
    if floors:
        return f"{signed(mean)} noise floors, of which one correct rounding of O makes 1"
    return f"{signed(mean)} ulp, spacings of O's format"


def signed(value: float | None, digits: int = 2) -> str:
    """With its sign, as for a signed error: "+0.012"."""
    return DASH if value is None else f"{value:+.{digits}g}"


def in_last_bits(ulp: float) -> str:
    """A size in ulp, in plain words: "0.41 of the last bit", "3 last bits"."""
    return f"{ulp:.2g} of the last bit" if ulp < 1 else f"{ulp:.3g} last bits"


def runs_of(noun: str, numbers: Sequence[int]) -> str:
    """Whole numbers with their noun: "row 3", "rows 0-63 and 128"."""
    return f"{noun}{'' if len(numbers) == 1 else 's'} {ranges(numbers)}"


def same(a: float | None, b: float | None) -> bool:
    """Whether two figures agree as those of one input's references do, to the digits that the shorter one has.

    HTML reports shorten numbers, to four digits at the least.
    """
    if a is None or b is None:
        return a is b
    if a == b or (math.isnan(a) and math.isnan(b)):
        return True
    digits = max(min(_digits(a), _digits(b)), _FEWEST_DIGITS)
    # Cut after n digits: off by at most 5 units of the next, 5 * 10^-n of a number that starts with a 1.
    return math.isclose(a, b, rel_tol=max(_SAME, 5.01 * 10.0**-digits), abs_tol=0.0)


def _digits(value: float) -> int:
    """Significant decimal digits of the shortest text that reads back as this number."""
    return len(Decimal(repr(value)).normalize().as_tuple().digits)


def plural(n: int, noun: str) -> str:
    """A number of things: "1 head", "2 heads"."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


# What is said of one thing where more than the first verb changes.
_OF_ONE = {
    "the true ones": "the true one",
    "of their own": "of its own",
    "their features": "its features",
    "they are": "it is",
    "is sums of": "is a sum of",
    " and leave out ": " and leaves out ",
    " and count twice ": " and counts twice ",
    " and hold ": " and holds ",
}
_VERBS = {"should": "should", "are": "is", "have": "has", "were": "was"}


def singular(predicate: str) -> str:
    """What is said of several things, said of one: "are 2 times the true ones", "is 2 times the true one"."""
    verb, _, rest = predicate.partition(" ")
    ending = "es" if verb.endswith(("s", "sh", "ch", "x")) else "s"
    said = f"{_VERBS.get(verb, verb + ending)} {rest}"
    for several, one in _OF_ONE.items():
        said = said.replace(several, one)
    return said


def source_argument(source: str) -> str:
    """A capture's source as an argument of a command; of the bundled example the option that stands for it."""
    return "--example" if source.startswith("example ") else shlex.quote(source)


def listed(names: Sequence[str], most: int) -> str:
    """At most so many names, and how many were left out: "a, b and 3 more"."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def together(names: Sequence[str]) -> str:
    """Names in a sentence: "O", "O and dQ", "O, dQ and dK"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def runs(numbers: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The first and the last of each run of neighbours among whole numbers in ascending order."""
    found: list[tuple[int, int]] = []
    for n in numbers:
        if found and n <= found[-1][1] + 1:
            found[-1] = found[-1][0], n
        else:
            found.append((n, n))
    return tuple(found)


def ranges(numbers: Sequence[int]) -> str:
    """Whole numbers in ascending order, neighbours together: "0-63, 128 and 5 more"."""
    found = runs(numbers)
    named = [str(first) if first == last else f"{first}-{last}" for first, last in found[:4]]
    left = sum(last - first + 1 for first, last in found[4:])
    return ", ".join(named) + (f" and {left} more" if left else "")


def between(low: object, high: object) -> str:
    """From the one to the other, as they are shown: "3 to 8", "6"."""
    return f"{low}" if f"{low}" == f"{high}" else f"{low} to {high}"


def head_name(layer: int | None, head: int | None) -> str:
    """A head by the model's numbers: "L2H4", "H4" where the layer is not stated, "all" for the pooled entry."""
    if head is None:
        return "all"
    return f"H{head}" if layer is None else f"L{layer}H{head}"


def head_names(heads: Collection[tuple[int | None, int]]) -> str:
    """Heads by the model's numbers, neighbours together: "L3H0-3, L7H1 and 2 more"."""
    layers: dict[int | None, list[int]] = {}
    for layer, head in sorted(heads, key=lambda place: (-1 if place[0] is None else place[0], place[1])):
        layers.setdefault(layer, []).append(head)
    spans = [(layer, *span) for layer, found in layers.items() for span in runs(found)]
    names = [head_name(layer, first) + (f"-{last}" if last > first else "") for layer, first, last in spans[:4]]
    left = sum(last - first + 1 for _, first, last in spans[4:])
    return ", ".join(names) + (f" and {left} more" if left else "")


def file_name(source: str) -> str:
    """The end of a path: what tells captures apart."""
    return source.rpartition("/")[2] or source
