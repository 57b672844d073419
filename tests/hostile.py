"""Names that would like to be markup, scripts or formulas, and a diagnosis that has them everywhere."""

from __future__ import annotations

from dataclasses import replace

from builders import some
from synthetic_reports import synthetic

from attn_diag.results.diagnosis import Diagnosis, HeadDiagnosis, Summary

# Each sets window.hacked where anything of it runs.
NAMES = [
    "<script>window.hacked=1;alert(1)</script>",
    '"><img src=x onerror="window.hacked=1">',
    "'><svg onload=window.hacked=1>",
    "</script><script>window.hacked=1</script>",
    "</title></style><script>window.hacked=1</script>",
    "<!--<script>window.hacked=1",
    "{{7*7}} {% raw %} ${7*7}",
    "javascript:window.hacked=1",
    "a\u2028window.hacked=1\u2029",
    "\u202egnp.exe <b>",
    "x" * 5000,
    "a\nb\r\nc\t<i>",
    "=HYPERLINK(1)",
    "&lt;script&gt;window.hacked=1&lt;/script&gt;",
    "__proto__",
]


def hostile_diagnosis(name: str) -> Diagnosis:
    """Three heads; every free text of the diagnosis is ``name``. The second capture's assumptions fail."""

    def changed(head: HeadDiagnosis) -> HeadDiagnosis:
        verdict = replace(some(head.verdict), reasons=(name, name), suggestions=(name,))
        return replace(head, verdict=verdict, propagation=replace(head.propagation, notes=(name,)))

    diagnosis = synthetic(2, 2)
    captures = []
    for capture in diagnosis.captures:
        [observation] = capture.observations
        heads = tuple(map(changed, observation.heads))
        made = replace(observation, name=name, recipe=name, backend=name, outputs=(name,), heads=heads)
        assumptions = replace(capture.assumptions, message=name, defaults=(name,))
        metadata = {**capture.metadata, "notes": name, name: name}
        captures.append(replace(capture, source=name, metadata=metadata, assumptions=assumptions, observations=(made,)))
    # Where the check fails there is no verdict.
    [judged] = captures[1].observations
    unjudged = replace(judged, heads=tuple(replace(head, verdict=None) for head in judged.heads))
    assumptions = replace(captures[1].assumptions, ok=False)
    captures[1] = replace(captures[1], assumptions=assumptions, observations=(unjudged,))
    summary = Summary(name, diagnosis.summary.labels, (name,), (name,))
    tool = replace(diagnosis.tool, version=name, device=name, hardware=name)
    return replace(diagnosis, tool=tool, captures=tuple(captures), summary=summary)
