"""Published kernels that round once more than a well-rounded one: their errors are known, and no failure.

| kernel | where | why | times a well-rounded kernel's error |
|---|---|---|---|
| torch's efficient | dQ, dK | dS multiplies the cast P | up to sqrt(3/2) where both casts and the last rounding weigh alike, sqrt(2) where the casts do; 0.92 to 1.36 on an H200 |
| kernels whose l sums the cast P | dV | the backward's P is off by l | 1.55 where every cast errs to one side (cases normaliser-up, -down), else 1.0 |
| torch's SDPA on a CPU | dK, dV; dQ | gradients are added in the inputs' format, tile by tile | see below |

torch's CPU kernel (``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``) adds dK and dV over n tiles of 32 query rows
(64 from Tq = 192 on, 256 from 768 on), and dQ over n tiles of 512 keys, in BF16 or FP16. Where all tiles add alike, the
n - 1 more roundings have the variance of (n - 1) / 2 last ones, beside one of the cast and one last: sqrt(1 + (n - 1) /
4). Where the first tile adds nearly all (causal: the first keys), sqrt(1 + (n - 1) / 2). Measured on N(0,1), torch
2.13: n = 2, 3, 4, 8: 1.11, 1.22, 1.33, 1.65 by the first, 1.37, 1.55, 2.06 for n = 3, 4, 8 by the second; 1.0 to 1.2
on real heads.
"""  # noqa: E501 - a table

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from math import sqrt

import torch
from torch import Tensor

from attn_diag.errors import InputError
from attn_diag.head.quality import AS_GOOD
from attn_diag.results.check import CheckedCase
from attn_diag.results.quality import QuantityVerdict
from attn_diag.results.wording import SYMBOLS, number
from attn_diag.testing.case_inputs import CaseInputs
from attn_diag.testing.target import MisfitError, Target

# target -> what it rounds once more, and the machine that it is for (None: any, it is emulated).
_KERNELS = {
    "efficient": ("torch's efficient kernel, whose dS multiplies the cast P", None),
    "lowp-row-sum": ("kernels whose l sums the cast P", None),
    "sdpa": ("torch's SDPA on a CPU, which adds gradients in the inputs' format tile by tile", "cpu"),
    "sdpa:efficient": ("torch's efficient kernel, whose dS multiplies the cast P", "cuda"),
}
# What is left of the error, beside that of a kernel that makes the same, is independent of it: with so much left it is
# at most AS_GOOD times the other's.
_LEFT = sqrt(1 - 1 / AS_GOOD**2)


def judged(verdict: QuantityVerdict) -> bool:
    """Whether a quantity is held to anything: a gradient of which a well-rounded kernel has no digit right is not."""
    other = verdict.relative_error_well_rounded
    return verdict.answer == "nonfinite" or other is None or other < 1


def explained(
    quantities: Sequence[QuantityVerdict], inputs: CaseInputs, outputs: dict[str, Tensor], where: torch.device,
    run: Callable[[str], Mapping[str, Tensor]] | None = None,
) -> dict[str, str]:  # fmt: skip
    """The lossy or wrong quantities of a case that a published kernel returns so too, and in words which, and why.

    ``run`` gives a published kernel's outputs (none where it does not run); by default it is called here.
    """
    bad = {q.quantity: q for q in quantities if q.answer in ("lossy", "wrong") and q.quantity in outputs}
    bad = {name: q for name, q in bad.items() if q.relative_error and judged(q)}
    found: dict[str, str] = {}
    if not bad:
        return found
    for words, made in _published(inputs, where, run, gradients="dq" in outputs):
        for name, verdict in bad.items():
            if name not in made or name in found:
                continue
            # ||published|| is the reference's to within its error, which is a rounding's; what is judged may be
            # many times as long.
            published = made[name].double()
            left = float((published - outputs[name].double()).norm())
            if left <= _LEFT * (verdict.relative_error or 0.0) * float(published.norm()):
                found[name] = words
    return found


def factors(
    names: Collection[str], inputs: CaseInputs, other: Mapping[str, Tensor], where: torch.device
) -> dict[str, list[float]]:
    """How much longer published kernels' gradients are than a well-rounded kernel's, along those; mean over sequences.

    Args:
        names: Which gradients.
        inputs: The case.
        other: The well-rounded kernel's outputs.
        where: Where kernels run.
    """
    found: dict[str, list[float]] = {name: [] for name in names}
    if names:
        for _, made in _published(inputs, where, None, gradients=True):
            for name in names:
                if name in made:
                    base, here = (x[name].double().flatten(1).cpu() for x in (other, made))
                    found[name].append(float((((here - base) * base).sum(1) / base.square().sum(1)).nanmean()))
    return found


def words_of(cases: Sequence[CheckedCase]) -> list[str]:
    """A note for each published kernel whose errors were found."""
    found: dict[str, dict[str, list[str]]] = {}
    largest: dict[str, float] = {}
    for case in cases:
        for verdict in case.quantities:
            if (kernel := case.documented.get(verdict.quantity)) is not None:
                found.setdefault(kernel, {}).setdefault(SYMBOLS[verdict.quantity], []).append(case.name)
                largest[kernel] = max(largest.get(kernel, 0.0), verdict.factor or 0.0)
    return [
        f"up to {number(largest[kernel])} times a well-rounded kernel's error, as documented of {kernel}: "
        + "; ".join(f"{name} in {', '.join(where)}" for name, where in quantities.items())
        for kernel, quantities in found.items()
    ]


def _published(
    inputs: CaseInputs, where: torch.device, run: Callable[[str], Mapping[str, Tensor]] | None, *, gradients: bool
) -> Iterator[tuple[str, Mapping[str, Tensor]]]:
    for name, (words, device) in _KERNELS.items():
        if device not in (None, where.type):
            continue
        if run is not None:
            yield words, run(name)
            continue
        target = Target.of(name, dtype=inputs.q.dtype, head_dim=inputs.q.shape[3], device=where)
        # A backend that refuses these inputs made nothing of them.
        with suppress(MisfitError, InputError):
            yield words, target.run(inputs, backward=gradients)[0]
