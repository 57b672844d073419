"""A check as CI shows it: the failure text of a test, JUnit XML, and GitHub's annotations and summary."""

from __future__ import annotations

import html
import textwrap
import xml.etree.ElementTree as ET
from collections.abc import Sequence

from attn_diag.printing import inert, made_printable
from attn_diag.reports.check import against, suspected, suspects, verdict
from attn_diag.results.check import ARRANGED, KINDS, CheckedCase, CheckReport, Failure, Kind
from attn_diag.results.wording import plural, yardstick

# The gravest first: what is not this attention at all needs no words on its bias.
_ORDER = ("fit", "nonfinite", "wrong", "invariance", "determinism", "bias", "lossy", "growth", "bits")
_LABEL = 12  # columns of "look closer "
_MESSAGE_LINES = 4
_MOST_GROUPS, _MOST_SUSPECTS = 4, 2
# GitHub shows ten annotations of a step.
_ANNOTATIONS = 10


def failure_lines(
    report: CheckReport, *, accept: str | None = None, look_closer: str | None = None, width: int = 80, limit: int = 25
) -> list[str]:
    """The suspect, where, how much against what, how to look closer, how to accept.

    Failures that differ only in the case are told by the first of them.

    Args:
        report: A check that failed.
        accept: The command that makes the new numbers the baseline; it may be wider than ``width``.
        look_closer: A command, by default that of the gravest failure; it may be wider, too.
        width: Columns of a line.
        limit: The most lines there are.
    """
    report = made_printable(report)
    groups = _grouped(report.failures)
    closer = look_closer or next((f.look_closer for g in groups for f in g if f.look_closer), None)
    head = textwrap.wrap(_header(report), width, max_lines=2, placeholder=" ...")
    for suspect in suspected(f for group in groups for f in group)[:_MOST_SUSPECTS]:
        head += _labelled("suspect", suspect, width)
    foot = _labelled("compared", _compared(report), width)
    # Commands stay on one line, to be copied.
    foot += [f"{'look closer':{_LABEL}}{closer}"] if closer else []
    foot += [f"{'accept':{_LABEL}}{accept}"] if accept else []
    # One line tells of the groups that did not fit.
    room = limit - len(head) - len(foot) - 1
    body: list[str] = []
    shown = 0
    for number, group in enumerate(groups[:_MOST_GROUPS], 1):
        lines = _told(number, group, width)
        if len(body) + len(lines) > room:
            break
        body += lines
        shown += 1
    if left := groups[shown:]:
        kinds = ", ".join(f"{g[0].kind} of {g[0].quantity}" for g in left)
        body.append(
            textwrap.shorten(
                f"... and {plural(sum(map(len, left)), 'more failure')}: {kinds}", width, placeholder=" ..."
            )
        )
    return [*head, *body, *foot]


def gravest(report: CheckReport) -> Failure:
    """The failure that ``failure_lines`` tells first; the report must have one."""
    return _grouped(report.failures)[0][0]


def _grouped(failures: Sequence[Failure]) -> list[list[Failure]]:
    groups: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        groups.setdefault((failure.kind, failure.quantity), []).append(failure)
    return sorted(groups.values(), key=lambda g: _ORDER.index(g[0].kind))


def _header(report: CheckReport) -> str:
    failing = len({f.case for f in report.failures})
    where = f"{report.backend}, level {report.level:g}"
    return f"attn-diag: {report.source} fails {failing} of {plural(len(report.cases), 'case')} ({where})"


def _told(number: int, group: Sequence[Failure], width: int) -> list[str]:
    lines = _wrapped(f"{number}. [{group[0].kind}] ", group[0].message, width, _MESSAGE_LINES)
    if others := list(dict.fromkeys(f.case for f in group[1:])):
        lines += _wrapped("   ", f"likewise in {', '.join(others)}", width, 1)
    return lines


def _compared(report: CheckReport) -> str:
    if report.baseline_key is None:
        by = "published recipes" if report.declared is None else yardstick(report.declared)
        return f"with {by} on the same inputs (no baseline)"
    # A key of this machine says nothing new.
    entry = "" if report.baseline_key == report.key else f", entry {report.baseline_key}"
    return f"with {report.baseline}{entry}"


def _wrapped(start: str, text: str, width: int, most: int, *, indent: int = 3, whole: bool = False) -> list[str]:
    """``text`` after ``start`` in at most so many lines; ``whole``: words are not broken."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * indent,
        break_long_words=not whole,
        break_on_hyphens=False,
        max_lines=most,
        placeholder=" ...",
    )


def _labelled(label: str, text: str, width: int) -> list[str]:
    """Words stay whole, so that a command or path can be copied."""
    return _wrapped(f"{label:{_LABEL}}", text, width, 3, indent=_LABEL, whole=True)


def junit_document(found: CheckReport) -> str:
    """One testsuite: properties name versions and key; a failure's text has message, suspect and command."""
    found = made_printable(found)
    suite = ET.Element("testsuite")
    properties = ET.SubElement(suite, "properties")
    tool = found.tool
    stated = {
        "attn-diag": tool.version, "torch": tool.torch, "triton": tool.triton, "python": tool.python,
        "device": tool.device, "key": found.key, "baseline": found.baseline, "baseline_key": found.baseline_key,
        "seed": found.seed, "level": found.level, "exact": found.exact,
    }  # fmt: skip
    for name, value in stated.items():
        if value is not None:
            ET.SubElement(properties, "property", {"name": name, "value": inert(str(value))})
    tests = failed = skipped = 0
    for case in found.cases:
        for kind in KINDS:
            wrong = [f for f in found.failures if f.case == case.name and f.kind == kind]
            named = {"classname": inert(f"attn-diag.check.{found.source}"), "name": inert(f"{case.name}: {kind}")}
            seconds = case.seconds if kind == KINDS[0] else 0.0
            element = ET.SubElement(suite, "testcase", {**named, "time": f"{seconds:.3f}"})
            tests, failed = tests + 1, failed + bool(wrong)
            if not wrong and not _looked_at(case, kind):
                ET.SubElement(element, "skipped")
                skipped += 1
            if wrong:
                text = "\n".join(_failure_text(f) for f in wrong)
                message = {"message": inert(wrong[0].message), "type": kind}
                ET.SubElement(element, "failure", message).text = inert(text)
    if found.notes:
        ET.SubElement(suite, "system-out").text = inert("\n".join(found.notes))
    total = {"tests": str(tests), "failures": str(failed), "errors": "0", "skipped": str(skipped)}
    total["time"] = f"{sum(c.seconds for c in found.cases):.3f}"
    suite.attrib.update({"name": inert(f"attn-diag check {found.source}"), **total})
    root = ET.Element("testsuites", total)
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _looked_at(case: CheckedCase, kind: Kind) -> bool:
    """Whether this was tested: a kernel that raised has no bits, and without a baseline none are compared."""
    return {
        "fit": True,
        "nonfinite": bool(case.outputs),
        "wrong": bool(case.quantities),
        "determinism": case.deterministic is not None,
        "invariance": case.name == ARRANGED,
        "bits": case.same_bits is not None,
        "bias": bool(case.biases),
        "lossy": any(size.limit is None for size in case.sizes.values()) and bool(case.quantities),
        "growth": any(size.limit is not None for size in case.sizes.values()),
    }[kind]


def _failure_text(failure: Failure) -> str:
    parts = [failure.message]
    parts += [f"looks like: {failure.suspect}"] if failure.suspect else []
    parts += [f"look closer: {failure.look_closer}"] if failure.look_closer else []
    return "\n".join(parts)


def workflow_commands(found: CheckReport) -> list[str]:
    """``::error title=…::…``, one a failure, escaped as actions/toolkit's command.ts does."""
    lines, found = [], made_printable(found)
    for failure in found.failures[:_ANNOTATIONS]:
        title = _property(f"attn-diag check {found.source}: {failure.case}: {failure.kind}")
        suspect = f"\nlooks like: {failure.suspect}" if failure.suspect else ""
        lines.append(f"::error title={title}::{_data(failure.message + suspect)}")
    return lines


def step_summary(found: CheckReport) -> str:
    """Markdown for $GITHUB_STEP_SUMMARY; names and messages are text, whatever they hold."""
    found = made_printable(found)
    mark = "✅" if found.passed else "❌"
    lines = [
        f"### {mark} attn-diag check of {_markdown(found.source)}",
        "",
        _markdown(verdict(found)),
        "",
        _markdown(against(found)),
    ]
    if found.failures:
        lines += ["", "| case | kind | what |", "|---|---|---|"]
        lines += [f"| {_markdown(f.case)} | {f.kind} | {_markdown(f.message)} |" for f in found.failures]
        lines += ["", *(f"- {_markdown(suspect)}" for suspect in suspects(found))]
    if found.notes:
        lines += ["", *(f"- {_markdown(note)}" for note in found.notes)]
    return "\n".join(lines) + "\n"


def _data(text: str) -> str:
    return inert(text).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _markdown(text: str) -> str:
    """As text in a table's cell: no HTML, no Markdown, no line break."""
    plain = html.escape(text, quote=False)
    return "".join(f"&#{ord(c)};" if c in "\\`*_{}[]()#+!|~@:" else c for c in plain)
