"""The terminal report: who, verdict per head, and the worst heads in detail; readable from 80 columns on."""

from __future__ import annotations

import io
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from attn_diag.diagnosis import CaptureDiagnosis, Diagnosis, HeadDiagnosis, ObservationDiagnosis, severity
from attn_diag.reports import words

_STYLES = {"clean": "green", "lossy": "bold red", "ill_conditioned": "bold yellow", "biased": "bold red"}
_MAX_ROWS = 16
_MAX_DETAILS = 3


def terminal_text(diagnosis: Diagnosis, width: int = 100) -> str:
    """The report as plain text without colours, ``width`` columns wide."""
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, legacy_windows=False)
    for renderable in terminal_renderables(diagnosis):
        console.print(renderable)
    return buffer.getvalue()


def terminal_renderables(diagnosis: Diagnosis) -> Iterator[RenderableType]:
    """The report, piece by piece, for a rich console."""
    yield Text(diagnosis.summary.sentence, style="bold")
    for warning in (*diagnosis.summary.warnings, *(f"not read: {u}" for u in diagnosis.summary.unreadable)):
        yield Text(f"warning: {warning}", style="yellow")
    for capture in diagnosis.captures:
        yield from _capture(capture)
    yield Rule(style="dim")
    family = diagnosis.family
    yield Text(
        f"{family.size} primary tests, one Benjamini-Hochberg family at level {family.level}. {words.CAVEAT}\n"
        f"{words.tool_line(diagnosis.tool)}",
        style="dim",
    )


def _capture(capture: CaptureDiagnosis) -> Iterator[RenderableType]:
    yield Rule(Text(capture.source, overflow="ellipsis"), align="left")
    yield Text(words.shape(capture))
    if capture.assumptions.defaults:
        yield Text(f"assumed: {', '.join(capture.assumptions.defaults)}", style="yellow")
    failed = capture.assumptions.ok is False
    yield Text(f"assumptions: {capture.assumptions.message}", style="bold red" if failed else "")
    for observation in capture.observations:
        yield from _observation(observation, judged=not failed)


def _observation(observation: ObservationDiagnosis, *, judged: bool) -> Iterator[RenderableType]:
    yield Text("")
    yield Text(words.observation_line(observation), style="bold")
    if not judged:
        yield Text("  no verdict: correct the assumptions first")
        return
    single = [h for h in observation.heads if h.head is not None]
    worst = sorted(single, key=severity)
    yield _overview([*worst[:_MAX_ROWS], *([observation.pooled] if len(single) > 1 else [])])
    if len(single) > _MAX_ROWS:
        yield Text(f"  {len(single) - _MAX_ROWS} more heads in --json", style="dim")
    for head in worst[:_MAX_DETAILS]:
        yield from _detail(head)


def _overview(heads: list[HeadDiagnosis]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("head", no_wrap=True)
    table.add_column("verdict", min_width=15)
    for name in (
        "noise\nfactor",
        "condi-\ntioning",
        "dQ\nerror",
        "from\ndelta",
        "dW_Q\nerror",
        "repeated\nmaxima",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for head in heads:
        dq, dw_q = head.propagation.dq, head.propagation.dw_q
        table.add_row(
            words.head_name(head),
            _labels(head),
            words.number(head.noise_factor),
            words.number(head.conditioning),
            words.percent(dq.relative_error if dq else None),
            words.percent(dq.predicted_relative_error if dq else None),
            words.percent(dw_q.relative_error if dw_q else None),
            words.percent(head.row_maxima.exact.fraction),
        )
    return table


def _labels(head: HeadDiagnosis) -> Text:
    if head.verdict is None:
        return Text("no verdict", style="dim")
    parts = [Text(label, style=_STYLES.get(label, "cyan")) for label in head.verdict.labels]
    return Text(", ").join(parts)


def _detail(head: HeadDiagnosis) -> Iterator[RenderableType]:
    assert head.verdict is not None
    yield Text("")
    yield Text.assemble((f"{words.head_name(head)}: ", "bold"), _labels(head), f" (evidence: {head.verdict.evidence})")
    for reason in head.verdict.reasons:
        yield words.bullet("-", reason)
    for suggestion in head.verdict.suggestions:
        yield words.bullet(">", suggestion)
    yield Padding(_tests(head), (0, 0, 0, 2))
    for line in (words.reference_words(head), words.certificate_words(head)):
        if line is not None:
            yield words.bullet(" ", line)
    for name, title in words.GRADIENTS.items():
        error = getattr(head.propagation, name)
        if error is not None and error.relative_error is not None:
            rest = (
                f"; unexplained {words.percent(error.unexplained_fraction)} by delta alone"
                if error.unexplained_fraction
                else ""
            )
            if error.unexplained_with_casts is not None:
                rest += (
                    f", {words.percent(error.unexplained_with_casts)} with LSE and casts"
                    if rest
                    else (f"; unexplained {words.percent(error.unexplained_with_casts)}")
                )
            yield words.bullet(
                " ", f"{title} off {words.percent(error.relative_error)}: {words.share_words(error)}{rest}"
            )
            if error.coherence is not None:
                yield words.bullet(
                    " ",
                    f"coherence of delta's part in {title} {words.number(error.coherence)} (random signs: up to "
                    f"{words.number(error.coherence_null95)}), cancellation {words.number(error.cancellation)}, "
                    f"participation {words.number(error.participation)}",
                )
    for note in head.propagation.notes:
        yield words.bullet(" ", note)
    counted = {
        "fully masked": head.rows_fully_masked,
        "not finite": head.rows_nonfinite,
        "beyond float64 (huge scores or masks)": head.rows_unknown,
    }
    if left_out := [f"{count} {why}" for why, count in counted.items() if count]:
        yield words.bullet(" ", f"rows left out: {', '.join(left_out)}; {head.rows_all} analysed")


def _tests(head: HeadDiagnosis) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), header_style="dim")
    table.add_column("mean error of")
    for name in ("mean", "in units", "t", "adj. p", "n_eff", "detectable"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in words.TESTS:
        table.add_row(*words.test_cells(name, getattr(head.bias, name)))
    return table
