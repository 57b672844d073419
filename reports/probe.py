"""The report of ``probe``: what was found in sentences, one line a probe, what was assumed; from 80 columns on."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from attn_diag.reports import layout, words
from attn_diag.reports.lead import FAIL, OK, lead
from attn_diag.results.probe import ProbeFinding, ProbeReport
from attn_diag.results.wording import number, percent, plural

_STYLES = {
    "exact": "green",
    "within-rounding": "green",
    "biased": "bold yellow",
    "too-large": "bold red",
    "lse-biased": "bold yellow",
    "lse-too-large": "bold red",
    "not-invariant": "bold yellow",
    "broken": "bold red",
    "nonfinite": "bold red",
}


def probe_renderables(found: ProbeReport) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield from lead(*_first(found), found.next)
    yield Text("")
    yield layout.heading(f"probes of {found.source}")
    b, h, t, d = found.shape
    yield Text(
        f"B={b} H={h} T={t} D={d} {found.dtype}, o in {found.out_dtype}; {found.backend}; {found.heads} independent "
        f"heads a probe, seed {found.seed}",
        style="bold",
    )
    for sentence in found.summary:
        yield layout.bullet("-", sentence)
    if not found.findings:
        yield layout.note(words.tool_line(found.tool))
        return
    yield Text("")
    yield _table([f for f in found.findings if f.kind == "accuracy"], "against the float64 reference")
    yield Text("")
    yield _table([f for f in found.findings if f.kind == "invariance"], "two calls that must agree in every bit")
    yield Text("")
    yield layout.note(_legend(found))
    yield layout.note(words.tool_line(found.tool))


def _first(found: ProbeReport) -> tuple[str, str, list[str]]:
    """The verdict, what was found, and sentences on how sure that is and what is normal."""
    probed = f"{plural(len(found.findings), 'probe')} of {plural(found.heads, 'head')}"
    if found.outcome is None:
        # A document of before outcomes were said.
        quiet = found.assumptions.ok and found.labels <= {"exact", "within-rounding"}
        return (OK if quiet else FAIL), f"probe of {found.source}: see below", []
    if found.outcome == "ok":
        normal = f", but for what is normal in {_family(found)}" if found.normal else ""
        told = [f"{probed}, tests at level {found.level:g}: no fault{normal}."]
        told.append(found.gradients or "Gradients were not judged.")
        return OK, f"{found.source}: it rounds as a sound kernel does", [*told, *found.normal]
    told = [] if found.evidence is None else [found.evidence]
    return FAIL, f"{found.source} ({found.certainty}): {found.suspect}", told


def _family(found: ProbeReport) -> str:
    return "FlashAttention-2" if any("FlashAttention-2" in said for said in found.normal) else "published kernels"


def _table(findings: list[ProbeFinding], title: str) -> Table | Text:
    if not findings:
        return layout.note(f"{title}: not asked for")
    accuracy = findings[0].kind == "accuracy"
    with_lse = any(f.lse is not None for f in findings)
    bounds = ["of the\nbound"] * accuracy + ["L of\nbound"] * with_lse
    figures = layout.figures(["max\nulp", *bounds])
    table = layout.table(Column("probe", no_wrap=True), title, *figures, collapse=True)
    for finding in findings:
        text = Text(finding.words, style=_STYLES[finding.labels[0]])
        text.append(f"\n{finding.shows}", style="dim")
        bound = [number(finding.of_budget, 2)] if accuracy else []
        if with_lse:
            bound.append(number(None if finding.lse is None else finding.lse.of_budget, 2))
        table.add_row(finding.name, text, number(finding.max_error_ulp), *bound)
    return table


def _legend(found: ProbeReport) -> str:
    assumed = found.assumptions
    said = assumed.said
    return (
        f"Assumed of fn: softmax(scale Q K^T) V with {said}; on N(0,1) "
        f"inputs its O is {percent(assumed.relative_error)} off. Error = O - float64 reference on the same "
        "inputs, in spacings (ulp, the last bit) of O's format; p = how often chance alone would make such a mean; "
        "bias = mean excess beyond one correct rounding, away from zero unless it says upward, with its interval; "
        "significant only if mean error and mean excess both are, at level "
        f"{found.level:g} among {found.family_size} tests (Benjamini-Hochberg; heads are the clusters). The bound is "
        "what casts of P̄ and O to the input's format and sums in fp32 can make of one element's error."
        f"{_fine(found)} {_lse(found)}"
    )


def _fine(found: ProbeReport) -> str:
    if not any(test.allowed_ulp for finding in found.findings for test in finding.tests):
        return ""
    return (
        f" An {found.out_dtype} O shows fp32 arithmetic itself (alpha's rounding, exp, orders of sums): a mean is bias "
        "only beyond what that can make."
    )


def _lse(found: ProbeReport) -> str:
    if not any(finding.lse for finding in found.findings):
        return "L (lse) was not judged: fn returned none as a second output [B, H, T]."
    return (
        "L = m + ln l is biased if its mean error is more than fp32 arithmetic makes; its bound also allows a cast of "
        "the P̄ that l sums."
    )
