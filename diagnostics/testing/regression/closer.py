"""A closer look at a failing case: its outputs as a capture, and the command that says most about it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.results.check import GRADIENTS, Failure
from attn_diag.results.wording import source_argument
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.next_command import Again
from attn_diag.testing.other_function import OtherFunction
from attn_diag.testing.probing.catalogue import PROBES
from attn_diag.testing.stated import Stated
from attn_diag.testing.target import MisfitError

# The suite's name of a case, where the probe that looks closer has another.
_PROBES = {"pairs": "duplicates"}
_IMPOSSIBLE = ("nonfinite", "wrong")


def save_case(
    folder: Path, name: str, inputs: CaseInputs, outputs: dict[str, Tensor], kernel: str, declared: str | None
) -> Path:
    """Write a case and what was returned for it as a capture; where it is."""
    folder.mkdir(parents=True, exist_ok=True)
    capture = inputs.captured(outputs, kernel=kernel, declared=declared, notes=f"case {name} of attn-diag check")
    return capture.save(folder / f"{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.safetensors")


def of_saved(file: Path, failures: Sequence[Failure]) -> str:
    """The command about a case that was saved: where it is wrong, or which rounding makes it coarse."""
    impossible = any(f.kind in _IMPOSSIBLE for f in failures)
    return f"attn-diag {'inspect' if impossible else 'attribute'} {shlex.quote(str(file))}"


def of_capture(capture: Capture, command: str, options: Sequence[str] = ()) -> str | None:
    """A command about a capture; None for one that is in memory alone."""
    if capture.source == "memory":
        return None
    return " ".join([f"attn-diag {command}", source_argument(capture.source), *options])


def other_inputs(error: MisfitError, inputs: CaseInputs, stated: Stated) -> list[str]:
    """What else a kernel may be asked that does not take a case of the suite."""
    if inputs.capture is not None or not (error.__cause__ is not None or "of shape" in str(error)):
        return []
    of_heads = (
        "the suite has one head, no slopes and no sinks: a function that has these, one a head, or must be given them, "
        "is asked with --alibi-slopes or --sinks"
    )
    others = "the suite has inputs of other lengths and head sizes too: --length, --head-dim"
    # What a kernel asks itself of its inputs it says itself.
    asked = isinstance(error.__cause__, ValueError | AssertionError)
    return [others] if asked or stated.heads is not None else [others, of_heads]


def of_other(
    other: OtherFunction, case: CaseInputs, again: Again, declared: str | None, file: Path | None, stored: bool
) -> str | None:
    """The command, or the call, with what a kernel computes instead; where that is not known, what looks into its O.

    Args:
        other: What it computes.
        case: What it was called with.
        again: What was asked for.
        declared: The recipe that it is declared to be.
        file: Where the case was saved, if it was.
        stored: Nothing was run: the case is a capture's.
    """
    if stored and case.capture is not None:
        return other.call or of_capture(case.capture, "inspect", other.options)
    if file is not None:
        return f"attn-diag inspect {shlex.quote(str(file))}"
    also = [] if declared is None else [f"--declared {declared}"]
    if other.known:
        return other.again("check", again, also)
    if case.capture is not None:  # the suite has no such case
        command = again.command("check", [*also, "--out failing", "--capture"]).removeprefix("attn-diag ")
        return None if again.target is None else of_capture(case.capture, command)
    return again.command("check", [*also, f"--cases {case.name}", "--out failing"])


def of_kernel(failure: Failure, case: str, again: Again, declared: str | None) -> str | None:
    """The command, or the call, that runs the kernel again: probe, which judges no gradient, or what does."""
    if failure.quantity not in GRADIENTS:
        named = _PROBES.get(case, case)
        return again.command("probe", [f"--probes {named}"] if named in PROBES else [])
    also = [] if declared is None else [f"--declared {declared}"]
    if failure.kind in _IMPOSSIBLE and again.target is not None:
        return again.command("check", [*also, "--hunt"])
    return again.command("check", [*also, f"--cases {case}", "--out failing"])
