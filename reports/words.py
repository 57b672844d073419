"""Numbers and names as both reports show them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from attn_diag.results.diagnosis import (
    BiasEstimate,
    CaptureDiagnosis,
    GradientError,
    HeadDiagnosis,
    Label,
    ObservationDiagnosis,
    Tool,
)

DASH = "–"
TESTS = {
    "delta": "delta, total",
    "delta_excess": "delta, excess",
    "o_away_excess": "|O|, excess",
    "o_excess": "O, excess",
}
SHARES = {
    "delta": "delta",
    "lse": "LSE",
    "ds_cast": "cast of dS",
    "p_cast": "cast of P",
    "dq_cast": "cast of dQ",
    "dk_cast": "cast of dK",
    "dv_cast": "cast of dV",
}
GRADIENTS = {"dq": "dQ", "dw_q": "dW_Q", "dk": "dK", "dv": "dV"}
CAVEAT = (
    "Error = observed - float64 reference on the same inputs; excess = beyond one correct rounding. "
    "Bias in one capture does not prove that training diverges."
)


def number(value: float | None, digits: int = 3) -> str:
    """Shortest useful form; a dash for what is not known."""
    return DASH if value is None else f"{value:.{digits}g}"


def percent(value: float | None) -> str:
    """A fraction as percent."""
    return DASH if value is None else f"{100 * value:.3g} %"


def signed(value: float | None) -> str:
    """With its sign, as for a signed error."""
    return DASH if value is None else f"{value:+.2g}"


def printable(text: str) -> str:
    """A name of the user's on one line: without line breaks and control characters."""
    return "".join(c if c.isprintable() else "�" for c in text)


def head_name(head: HeadDiagnosis) -> str:
    """L2H4, H4 or "all"."""
    if head.head is None:
        return "all"
    return f"H{head.head}" if head.layer is None else f"L{head.layer}H{head.head}"


def labels(head: HeadDiagnosis) -> str:
    """The verdict's labels, or that there is none."""
    return ", ".join(head.verdict.labels) if head.verdict else "no verdict"


def label_names(head: HeadDiagnosis) -> tuple[Label, ...]:
    """The verdict's labels; none where there is no verdict."""
    return head.verdict.labels if head.verdict else ()


def file_name(source: str) -> str:
    """The end of a path, printable: what tells captures apart."""
    return printable(source.rpartition("/")[2] or source)


def shape(capture: CaptureDiagnosis) -> str:
    """Sizes, type and masking in one line."""
    s, m = capture.shape, capture.metadata
    heads = f"H={s['Hq']}" if s["Hq"] == s["Hk"] else f"Hq={s['Hq']} Hk={s['Hk']}"
    length = f"T={s['Tq']}" if s["Tq"] == s["Tk"] else f"Tq={s['Tq']} Tk={s['Tk']}"
    stated = [f"{k} {m[k]}" for k in ("scale", "window", "softcap", "step") if k in m]
    causal = "no causal mask" if m["causal"] == "none" else f"causal {m['causal']}"
    return printable(", ".join([f"B={s['B']} {heads} {length} D={s['D']} {m['dtype']}", causal, *stated]))


def observation_line(observation: ObservationDiagnosis) -> str:
    """Who made the numbers."""
    if observation.emulated:
        return printable(f"{observation.name}: {observation.backend}")
    recipe = "no known recipe reproduces its O"
    if observation.recipe is not None:
        recipe = f"recipe {observation.recipe}"
    if observation.agreement is not None:
        # Never rounded up: 100 % is said of every bit alone.
        share = math.floor(1e4 * observation.agreement) / 100
        recipe = f"O as recipe {observation.recipe} makes it ({share:g} % of sampled elements bit-equal)"
    return printable(f"{observation.name}: {observation.backend}; {recipe}")


def tool_line(tool: Tool) -> str:
    """Versions and the reference's backend."""
    triton = f", triton {tool.triton}" if tool.triton else ""
    measured = f"; {tool.hardware}" if tool.hardware else ""
    return printable(
        f"attn-diag {tool.version}, torch {tool.torch}{triton}; float64 reference on {tool.backend} "
        f"({tool.device}){measured}"
    )


def in_units(name: str, estimate: BiasEstimate) -> str:
    """A mean in ulp, or for delta in noise floors."""
    unit = "floor" if name.startswith("delta") else "ulp"
    return DASH if estimate.mean_ulp is None else f"{signed(estimate.mean_ulp)} {unit}"


def test_cells(name: str, estimate: BiasEstimate | None) -> tuple[str, ...]:
    """mean, mean in ulp or noise floors, t, adjusted p, effective and detectable size of one primary test."""
    if estimate is None:
        return (TESTS[name], *[DASH] * 6)
    return (
        TESTS[name],
        signed(estimate.mean),
        in_units(name, estimate),
        number(estimate.t),
        number(estimate.p_adjusted, 2),
        number(estimate.n_eff),
        number(estimate.minimum_detectable, 2),
    )


def reference_words(head: HeadDiagnosis) -> str | None:
    """How far the reference's own error can have moved the means tested; None where nothing was tested."""
    known = {n: e.reference_bound for n in TESTS if (e := getattr(head.bias, n)) is not None}
    listed = ", ".join(f"{TESTS[n]} {b:.1g}" for n, b in known.items() if b is not None)
    return f"the reference's own error has moved these means by at most: {listed}" if listed else None


def certificate_words(head: HeadDiagnosis) -> str | None:
    """What recomputing rows in mpmath said of the reference; None where none were."""
    found = head.certificate
    if found is None:
        return None
    if not found.rows:
        why = "fully masked, not finite, or beyond float64"
        return f"certified: nothing, as none of the rows asked for is analysed ({why})"
    names = {"o": "O", "lse": "L", "delta": "delta", "dq": "dQ"}
    worst = ", ".join(f"{names[name]} {number(ratio, 2)}" for name, ratio in found.worst_ratio.items())
    outcome = "every error of the float64 reference is within its bound" if found.held else "THE BOUND IS VIOLATED"
    return f"certified: {found.rows} rows recomputed in mpmath ({found.bits} bits): {outcome} (worst part: {worst})"


def share_words(error: GradientError) -> str:
    """The shares of an error's parts, largest first."""
    known = [(name, share) for name, share in (error.shares or {}).items() if share is not None]
    known.sort(key=lambda item: -abs(item[1]))
    # Adding 0 makes -0.0 the 0.0 that it stands for.
    return ", ".join(f"{SHARES[name]} {round(100 * share, 1) + 0.0:.1f} %" for name, share in known) or DASH


def bullet(mark: str, text: str | Text) -> RenderableType:
    """A line with a mark before it, wrapped beside the mark."""
    return Hanging(f"{mark:>3} ", text if isinstance(text, Text) else Text(printable(text)))


def paragraph(text: str, style: str = "") -> RenderableType:
    """Text wrapped to the console's width, printable characters only."""
    return Hanging("", Text(printable(text), style=style))


@dataclass(frozen=True)
class Hanging:
    """Text wrapped to the console's width, its later lines indented by the width of ``mark``; nothing is cut off."""

    mark: str
    text: Text

    def lines(self, console: Console, width: int) -> Iterator[Text]:
        """The lines, at most ``width`` columns wide."""
        for i, line in enumerate(self.text.wrap(console, max(width - len(self.mark), 16))):
            line.rstrip()
            yield Text.assemble(" " * len(self.mark) if i else self.mark, line)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield from self.lines(console, options.max_width)
