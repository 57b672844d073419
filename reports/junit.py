"""A check as JUnit XML, one testcase for every case and kind of failure."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING, get_args

if TYPE_CHECKING:
    from attn_diag.results.check import CheckedCase, CheckReport, Failure, Kind

# What XML 1.0 (section 2.2) has no way to say.
_FORBIDDEN = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_document(found: CheckReport) -> str:
    """One testsuite: properties name versions and key; a failure's text has message, suspect and command."""
    from attn_diag.results.check import Kind

    kinds = get_args(Kind)
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
            ET.SubElement(properties, "property", {"name": name, "value": _clean(str(value))})
    tests = failed = skipped = 0
    for case in found.cases:
        for kind in kinds:
            wrong = [f for f in found.failures if f.case == case.name and f.kind == kind]
            attributes = {
                "classname": _clean(f"attn-diag.check.{found.source}"),
                "name": _clean(f"{case.name}: {kind}"),
            }
            seconds = case.seconds if kind == kinds[0] else 0.0
            element = ET.SubElement(suite, "testcase", {**attributes, "time": f"{seconds:.3f}"})
            tests, failed = tests + 1, failed + bool(wrong)
            if not wrong and not _looked_at(case, kind):
                ET.SubElement(element, "skipped")
                skipped += 1
            if wrong:
                text = "\n".join(_text(f) for f in wrong)
                message = {"message": _clean(wrong[0].message), "type": kind}
                ET.SubElement(element, "failure", message).text = _clean(text)
    if found.notes:
        ET.SubElement(suite, "system-out").text = _clean("\n".join(found.notes))
    total = {"tests": str(tests), "failures": str(failed), "errors": "0", "skipped": str(skipped)}
    total["time"] = f"{sum(c.seconds for c in found.cases):.3f}"
    suite.attrib.update({"name": _clean(f"attn-diag check {found.source}"), **total})
    root = ET.Element("testsuites", total)
    root.append(suite)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def _looked_at(case: CheckedCase, kind: Kind) -> bool:
    """Whether this was tested: a kernel that raised has no bits, and without a baseline none are compared."""
    return {
        "fit": True,
        "determinism": case.deterministic is not None,
        "bits": case.same_bits is not None,
        "bias": bool(case.biases),
        "growth": bool(case.sizes),
    }[kind]


def _text(failure: Failure) -> str:
    parts = [failure.message]
    parts += [f"looks like: {failure.suspect}"] if failure.suspect else []
    parts += [f"look closer: {failure.look_closer}"] if failure.look_closer else []
    return "\n".join(parts)


def _clean(text: str) -> str:
    return _FORBIDDEN.sub("\ufffd", text)
