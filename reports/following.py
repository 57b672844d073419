"""What to run next about a finding, with its options filled in: the command, and what it shows."""

from __future__ import annotations

import re
import shlex
from pathlib import PurePosixPath

from attn_diag.reports.finding_words import Line
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.findings import SharedFinding
from attn_diag.results.heads import ObservationDiagnosis
from attn_diag.results.quality import OPERANDS, PROBS
from attn_diag.results.wording import source_argument

# What-if's names of what keeps sites in fp32, and the sites (attn_diag.analyses.mitigation).
_IN_FP32 = {
    "fp32-scores": {"scores", "maximum"},
    "fp32-sums": {"row sum", "PV of a range", "O's accumulator"},
}
# By the part that carries dQ's error: what-if's names of what removes it, and what that is.
_REMEDIES = {
    "delta": (
        ("fp32-o-delta", "delta-from-dp"),
        "make delta, the backward's sum of dO∘O, without O's rounding; what that gains",
    ),
    "ds_cast": (("uncast-ds",), "do not cast dS, the scores' gradient; what that gains"),
}
_FITS = re.compile(r"\b(?:(?:causal|scale|layout|softcap|lse_base|alibi_origin)=[\w.-]+|window=-?\d+,-?\d+)")
# Metadata that have an option; ALiBi's origin has none.
_OPTION = re.compile(r"(causal|scale|layout|window|softcap|lse_base)=(.+)")
# What a capture that was put together of several ranks' files calls itself.
_MERGED = re.compile(r"(.*) \(and ranks? [\d, ]+\)")


def next_of(diagnosis: Diagnosis, finding: SharedFinding) -> Line:
    """The line."""
    if finding.cause is not None and finding.cause.kernel is not None:
        return _declared(diagnosis, finding, finding.cause.kernel)
    if (todo := _below_16_bits(finding)) is not None:
        return Line("Next", todo)
    return Line("Next", command(diagnosis, finding), command=True, purpose=_purpose(diagnosis, finding))


def _declared(diagnosis: Diagnosis, finding: SharedFinding, kernel: str) -> Line:
    """To hold it against the kernel below 16 bits that it is."""
    purpose = f"if it is meant to be {kernel}, hold it against that"
    if (arguments := _arguments(diagnosis, finding)) is None:
        return Line("Next", f'{purpose}: inspect it with declared="{kernel}".')
    said = " ".join(["attn-diag inspect", *arguments, "--declared", kernel])
    return Line("Next", said, command=True, purpose=purpose)


def _below_16_bits(finding: SharedFinding) -> str | None:
    """What to do where it is known what was rounded below 16 bits, of which no command tells more; None: it is not."""
    if not finding.formats:
        return None
    if PROBS in finding.formats:
        return "where 8 bits are meant, inspect it as the kernel that it is: --declared fa3-fp8, sage2, …"
    if not finding.formats.keys() & set(OPERANDS):
        return "capture it before the cast below 16 bits, and inspect that."
    return "inspect it again with q, k and v as the kernel multiplies them, code times scale."


def fitting(finding: SharedFinding) -> list[str]:
    """The metadata that fit a capture that those stated do not."""
    return [found.rstrip(".") for found in _FITS.findall(finding.words)]


def commands(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    """(what it answers, command) for a closer look at the gravest finding; none where no rounding makes it."""
    found = [*diagnosis.findings, *diagnosis.undecided]
    if not found or found[0].label in ("wrong", "nonfinite", "unjudged") or _below_16_bits(found[0]) is not None:
        return []
    if (arguments := _arguments(diagnosis, found[0])) is None:
        return []
    if _not_ranked(diagnosis, found[0]):
        return [("Do other kernels do better", f"attn-diag replay {arguments[0]}")]
    questions = [("Which rounding makes it", "attribute"), ("What would remove it", "what-if")]
    if found[0].biased_mean is not None:
        questions.append(("Where it goes wrong, bit by bit", "microscope"))
    return [(question, " ".join(["attn-diag", command, *arguments])) for question, command in questions]


def command(diagnosis: Diagnosis, finding: SharedFinding) -> str:
    """What to run next about a finding, with its options filled in."""
    worst, arguments = finding.worst, _arguments(diagnosis, finding)
    layer = "" if worst.layer is None else f" --layer {worst.layer}"
    if (merged := _MERGED.fullmatch(worst.source)) is not None:
        return f"attn-diag inspect {shlex.quote(str(PurePosixPath(merged[1]).parent))} --no-merge-ranks{layer}"
    if arguments is None:
        place = ("" if worst.head is None else f", {worst.head}") + layer.replace(" --layer ", ", layer=")
        return f"print(attn_diag.explain(found{place})), where found is what inspect returned"
    if finding.label == "unjudged":
        known = [match for found in fitting(finding) if (match := _OPTION.fullmatch(found)) is not None]
        options = [part for match in known for part in (f"--{match[1].replace('_', '-')}", match[2])]
        return " ".join(["attn-diag inspect", *arguments, *options])
    if finding.label in ("wrong", "nonfinite"):
        return " ".join(["attn-diag inspect", *arguments, "--html page.html"])
    if (tried := _tried(diagnosis, finding)) is not None:
        return " ".join(["attn-diag what-if", *arguments, *(f"--only {name}" for name in tried[0])])
    if _not_ranked(diagnosis, finding):
        return f"attn-diag replay {arguments[0]}"
    return " ".join(["attn-diag", "what-if" if finding.label == "ill_conditioned" else "attribute", *arguments])


def _purpose(diagnosis: Diagnosis, finding: SharedFinding) -> str:
    """What to do about a finding, and what the next command shows."""
    if _MERGED.fullmatch(finding.worst.source) is not None:
        unnamed = "may name the rounding" if finding.site is None else "shows its heads alone"
        found = "shows where and how" if finding.label in ("wrong", "nonfinite") else unnamed
        return f"judge each rank by itself, which {found}"
    if finding.label == "unjudged":
        return "if the kernel is meant to do that" if fitting(finding) else "see what was tried"
    if finding.label in ("wrong", "nonfinite"):
        return "where and how" + ("" if _arguments(diagnosis, finding) is None else ", in pictures")
    if (tried := _tried(diagnosis, finding)) is not None:
        return tried[1]
    if _not_ranked(diagnosis, finding) and _arguments(diagnosis, finding) is not None:
        repair = "" if finding.site is None else f"make {finding.site.rpartition(' in ')[0]} in fp32; or "
        return f"{repair}see which kernels do better on these inputs"
    if finding.label == "ill_conditioned":
        return "what would remove it"
    known = finding.label == "lossy" and finding.rounding_known
    return "what each rounding makes of it" if known else "look for the rounding that makes it"


def _not_ranked(diagnosis: Diagnosis, finding: SharedFinding) -> bool:
    """Whether attribute and what-if do not rank its sites: of dK and dV alone; or a rounding that is named, of a kernel
    that no recipe is."""
    if finding.label != "lossy":
        return False
    made = _made(diagnosis, finding)
    no_recipe = bool(made) and made[0].recipe is None and "o" in made[0].outputs
    named = no_recipe and finding.rounding_known
    return named or (bool(finding.quantities) and {"dk", "dv"}.issuperset(finding.quantities))


def _made(diagnosis: Diagnosis, finding: SharedFinding) -> list[ObservationDiagnosis]:
    """The observation of the worst head, where it is there."""
    return [
        observation
        for capture in diagnosis.captures
        for observation in capture.observations
        if capture.source == finding.worst.source and observation.name == finding.worst.observation
    ]


def _tried(diagnosis: Diagnosis, finding: SharedFinding) -> tuple[tuple[str, ...], str] | None:
    """The changes of a kernel that what-if tries for a cause that is known, and what they are; None: there are none."""
    if _MERGED.fullmatch(finding.worst.source) is not None or _arguments(diagnosis, finding) is None:
        return None
    if finding.label == "ill_conditioned":
        return _REMEDIES.get(finding.carrier or "")
    made = _made(diagnosis, finding)
    # The worst head's own bits must show it.
    if finding.label != "lossy" or finding.site is None or not made or made[0].coarse != finding.site:
        return None
    sites = {name for part in finding.site.split("; ") for name in part.rpartition(" in ")[0].split(", ")}
    parts = [name for name, own in _IN_FP32.items() if own & sites]
    if not parts or not sites <= set().union(*_IN_FP32.values()):
        return None
    return ("+".join(parts),), f"keep {'these' if len(sites) > 1 else sites.pop()} in fp32; what that gains"


def _arguments(diagnosis: Diagnosis, finding: SharedFinding) -> list[str] | None:
    """The file and options that name the worst head of a finding; None where it is in no file of its own."""
    worst = finding.worst
    if not worst.source.endswith((".safetensors", ".pt", ".npz")):
        return None
    arguments = [source_argument(worst.source)]
    capture = next((c for c in diagnosis.captures if c.source == worst.source), None)
    if worst.head is not None:
        first = last = worst.head
        pictured = finding.label in ("wrong", "nonfinite") and not {"dk", "dv"}.isdisjoint(finding.quantities)
        if capture is not None and pictured:
            # dK and dV are those of all query heads of a key head, and not judged without one of them.
            group, offset = capture.shape["Hq"] // capture.shape["Hk"], int(capture.metadata.get("head_offset", 0))
            first = offset + (worst.head - offset) // group * group
            last = first + group - 1
        arguments += ["--head", f"{first}-{last}" if first < last else str(worst.head)]
    if worst.batch is not None:
        arguments += ["--batch", str(worst.batch)]
    if capture is not None and len([o for o in capture.observations if o.outputs]) > 1 and worst.observation:
        arguments += ["--observation", shlex.quote(worst.observation)]
    return arguments
