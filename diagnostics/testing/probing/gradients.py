"""One backward of a kernel that ``probe`` finds no fault in: its gradients, as ``inspect`` judges them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.lent import written_words
from attn_diag.errors import InputError
from attn_diag.results.quality import QuantityVerdict
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.probing.inputs import Draw
from attn_diag.testing.probing.outcome import ProbeOutcome
from attn_diag.testing.target import GRADIENTS, MisfitError, Target

_NOT_JUDGED = "Gradients were not judged"
_ONE_CALL = "dQ, dK and dV were looked at in one call on N(0,1) inputs."
_NOT_TRIED = "Other head sizes, and fewer key heads than query heads (GQA), were not tried: attn-diag check does."


@dataclass(frozen=True)
class GradientLook:
    """What one backward showed."""

    words: str
    """What was looked at and what is coarse, in a sentence or two; or why nothing was."""
    wrong: QuantityVerdict | None = None
    """The worst gradient that no rounding makes."""


def gradient_look(case: CaseInputs, target: Target, draw: Draw) -> GradientLook:
    """Call the kernel once more, with a dO of N(0,1), and judge dQ, dK and dV.

    Args:
        case: Ordinary inputs, of which O is right.
        target: The kernel; a recipe has no backward of its own to be tested.
        draw: Draws dO.

    Raises:
        InputError: Its backward writes into an input, dO or O.
    """
    if target.recipe is not None:
        return GradientLook(f"{_NOT_JUDGED}.")
    case = replace(case, do=draw.normal().to(draw.dtype))
    try:
        called = target.call(case, gradients=True)
    except MisfitError as error:
        return GradientLook(f"{_NOT_JUDGED}: {error}.")
    if called.overwritten:
        raise InputError(f"{target.name}{written_words(called.overwritten).removeprefix('it')}")
    outputs = {n: (x.float() if n == "lse" else x).cpu() for n, x in called.outputs.items()}
    found = inspect_captures([case.captured(outputs)], device=target.device.type)
    judged = [q for q in found.captures[0].observations[0].pooled.quantities if q.quantity in GRADIENTS]
    if wrong := [q for q in judged if q.answer in ("wrong", "nonfinite")]:
        return GradientLook(_ONE_CALL, max(wrong, key=lambda q: q.relative_error or 0.0))
    coarse = [q.words for q in judged if q.answer == "lossy"]
    return GradientLook(" ".join([_ONE_CALL, *(coarse or ["They show no fault."]), _NOT_TRIED]))


def with_gradients(found: ProbeOutcome, look: GradientLook) -> ProbeOutcome:
    """The outcome of probes that found no fault in O, after a look at the gradients."""
    if look.wrong is None:
        return found
    evidence = f"{look.words} The probes found no fault in O."
    return replace(
        found, outcome="fail", suspect=look.wrong.words.removesuffix("."), certainty="certain", evidence=evidence
    )
