"""Making the calls of a kernel, and comparing what two of them returned."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median_low

import torch
from torch import Tensor

from attn_diag.head.quality import ELEMENT_LIMIT
from attn_diag.reference import format_of, ulp
from attn_diag.results.invariance import PathDifference
from attn_diag.results.wording import SYMBOLS, times, together
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.invariance.arrangements import Path
from attn_diag.testing.invariance.distance import Expected, difference, expected_of, own_error
from attn_diag.testing.target import GRADIENTS, MisfitError, Target

Outputs = dict[str, Tensor]
# Another rounding, however coarse, makes no more of a quantity than this; beyond it a call is wrong, not noisy.
ROUNDS_TO = 0.05


class LostDeviceError(MisfitError):
    """A call after which the process cannot use its GPU any more."""

    def __init__(self, error: Exception) -> None:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        super().__init__(f"it ends the GPU's context ({first})")


@dataclass
class Calls:
    """A kernel, what its calls returned, and what is expected of these."""

    target: Target
    overwritten: dict[str, str] = field(default_factory=dict)
    """What a call has written into, as ``Lent.written``."""
    _first: dict[int, tuple[CaseInputs, Outputs, Expected]] = field(default_factory=dict)

    def first(self, inputs: CaseInputs) -> tuple[Outputs, Expected]:
        """The outputs of a call that others are compared with, and what is expected of it; made once."""
        if id(inputs) not in self._first:
            outputs = self.made(Path("", inputs))
            formats = {n: format_of(x.dtype) for n, x in outputs.items() if n != "lse"}
            self._first[id(inputs)] = inputs, outputs, expected_of(inputs, formats, self.target.device)
        return self._first[id(inputs)][1:]

    def take(self, inputs: CaseInputs, outputs: Outputs) -> None:
        """Let others be compared with these outputs of a call that was made before."""
        self._first[id(inputs)] = inputs, outputs, self._first[id(inputs)][2]

    def made(self, path: Path) -> Outputs:
        """The outputs of a path's call, on the CPU, in memory of their own.

        Raises LostDeviceError where the call has ended the GPU's context, and as ``Target.call`` does.
        """
        try:
            return self._made(path)
        except Exception as error:
            if not _usable(self.target.device):
                raise LostDeviceError(error) from error
            raise

    def _made(self, path: Path) -> Outputs:
        target, inputs = path.target or self.target, path.inputs
        with path.around():
            if path.before is not None:
                self._call(target, path.before, path)
            parts = [self._call(target, one, path) for one in (inputs, *path.further)]
            if path.after is not None:
                self._call(target, path.after, path)
        # What a kernel keeps and writes to again must not change what it has returned.
        found = [{n: x.cpu().clone() for n, x in part.items()} for part in parts]
        if path.further:
            own = {n: x for n, x in found[0].items() if n in GRADIENTS}
            return {n: torch.stack([part[n].double() for part in found]).sum(0).to(x.dtype) for n, x in own.items()}
        return found[0]

    def _call(self, target: Target, inputs: CaseInputs, path: Path) -> Mapping[str, Tensor]:
        gradients = inputs.do is not None and path.gradients
        returned = target.call(inputs, gradients=gradients, place=lambda _, x: path.place(x))
        self.overwritten = {**returned.overwritten, **self.overwritten}
        return returned.outputs


def _usable(device: torch.device) -> bool:
    """Whether the device still computes; an illegal access ends every later call too."""
    try:
        return float(torch.ones(1, device=device).sum()) == 1.0
    except RuntimeError:
        return False


def alike(first: Outputs, second: Outputs) -> bool:
    """Whether two calls returned the same numbers."""
    return first.keys() == second.keys() and all(
        bool(first[n].eq(x).logical_or(x.isnan()).all()) for n, x in second.items()
    )


def compared(path: Path, first: Outputs, second: Outputs, expected: Expected) -> list[PathDifference]:
    """What a path's outputs and those of the call that it must agree with differ by."""
    found = []
    for name in (n for n in expected.truth if n in first and n in second):
        of_first, of_second = path.select(name, first[name]), path.align(name, second[name])
        truth, variance, sane = (path.select(name, x[name]) for x in (expected.truth, expected.variance, expected.sane))
        if of_first is None or of_second is None or truth is None or variance is None or sane is None:
            continue
        # Of a kernel that is wrong in one of the two calls, the other tells its noise.
        own = min(own_noise(of_first, truth, sane), own_noise(of_second, truth, sane))
        fmt = format_of(of_second.dtype)
        of_first = of_first.to(of_second.dtype)
        if path.terms > 1 and name in ("dk", "dv"):
            rounded = path.terms * ulp(of_first.double(), fmt).square() / 12
            variance, sane = variance + rounded, sane + rounded
        found.append(difference(name, of_first, of_second, variance, own**2 * sane, fmt))
    return found


def own_noise(observed: Tensor, truth: Tensor, variance: Tensor) -> float:
    """How many times a well-rounded kernel's error one is off by, as far as that can be rounding; at least 1.

    It is the median head's, the lower of two: inputs of all heads are drawn alike, and what one alone is off by is no
    noise of the others.
    """
    heads = zip(*(x.flatten(0, 1) for x in (observed.double(), truth, variance)), strict=True)
    own = [error for head in heads if (error := own_error(*head)) is not None]
    return min(max(median_low(own), 1.0), rounds_to(truth, variance)) if own else 1.0


def rounds_to(truth: Tensor, variance: Tensor) -> float:
    """How many times a well-rounded kernel's error another rounding can be off by; at least 1."""
    good = truth.isfinite() & variance.isfinite()
    size, noise = float(truth[good].square().sum()), float(variance[good].sum())
    return max(ROUNDS_TO * math.sqrt(size / noise), 1.0) if noise > 0 else 1.0


def beyond_rounding(outputs: Outputs, expected: Expected) -> list[str]:
    """Quantities of a call that no rounding makes, in words."""
    found, far = [], dict[str, float]()
    for name, truth in expected.truth.items():
        if (x := outputs.get(name)) is None:
            continue
        variance, observed = expected.sane[name], x.double()
        if bad := int((~observed.isfinite() & truth.isfinite()).sum()):
            found.append(f"{SYMBOLS[name]} holds NaN or Inf in {bad} of {x.numel()} elements")
            continue
        own = own_error(observed, truth, variance)
        if own is not None and own > max(ELEMENT_LIMIT, rounds_to(truth, variance)):
            far[SYMBOLS[name]] = own
    if far:
        are = "is" if len(far) == 1 else "are"
        found.append(f"{together(list(far))} {are} {times(max(far.values()))} times as far off as rounding makes it")
    return found
