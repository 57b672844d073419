"""Whether two runs project with weights of the same values, and which quantiser made those of each.

Weights that were quantised with one scale for a group of g columns are the same again when they are quantised so once
more: the largest element of each group lies on the last level. With another g that is not so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import Quantizer, quantizer
from attn_diag.reference import format_of, ulp

_ROWS = 64
_BLOCKS = ("16", "32", "64", "128", "256", "row", "tensor")
# Beside those that lie exactly on a level, stored values are rounded, and the scale is found from one of them.
_ULPS = 2.0
_AGREE = 0.999


@dataclass(frozen=True)
class OtherWeights:
    """That two runs have other w_q."""

    difference: float
    """||w_b - w_a|| / ||w_a||."""
    quantizers: tuple[str | None, str | None]
    """What each was quantised with, in words; None: with nothing that is known here."""

    @property
    def words(self) -> str:
        """In a sentence."""
        return self.words_of("query")

    def words_of(self, projection: str) -> str:
        """In a sentence, as those of another projection."""
        a, b = (name or "no quantiser that is known here" for name in self.quantizers)
        if self.quantizers == (None, None):
            return f"other weights of the {projection} projection"
        of = "" if projection == "query" else f" of the {projection} projection"
        return f"weights{of} quantised another way: train {a}, rollout {b}"


def compare_weights(a: Tensor | None, b: Tensor | None) -> OtherWeights | None:
    """Compare the weights of two runs, [D heads, C] each; None where they are the same, or either is missing."""
    if a is None or b is None or a.shape != b.shape or torch.equal(a.double(), b.double()) or rounded_alike(a, b):
        return None
    difference = float((b.double() - a.double()).norm() / a.double().norm())
    return OtherWeights(difference, (quantizer_of(a), quantizer_of(b)))


def rounded_alike(a: Tensor, b: Tensor) -> bool:
    """Whether weights of two formats may be the same ones, rounded to either: no element is further apart."""
    if a.dtype == b.dtype:
        return False
    wide = a.double(), b.double()
    room = sum(ulp(w, format_of(t.dtype)) for w, t in zip(wide, (a, b), strict=True)) / 2
    return bool(((wide[1] - wide[0]).abs() <= room).all())


def quantizer_of(w: Tensor) -> str | None:
    """The quantiser of fewest bits whose values these weights are, in words; None where there is none."""
    some = w[:: max(1, len(w) // _ROWS)].detach().cpu()
    spacing = ulp(some.double(), format_of(w.dtype)) if w.dtype in (torch.bfloat16, torch.float16) else None
    for candidate in _candidates(some.shape[1]):
        if candidate.block == "tensor" and len(some) < len(w):
            continue
        again = quantize(some.float(), candidate).values.double()
        room = some.double().abs() * 1e-5 if spacing is None else _ULPS * spacing
        if float(((again - some.double()).abs() <= room).double().mean()) >= _AGREE:
            block = candidate.block
            named = f"groups of {block}" if block.isdecimal() else f"one scale a {block}"
            return f"{candidate.elements.upper()} in {named}"
    return None


def _candidates(columns: int) -> Iterator[Quantizer]:
    for elements in ("int2", "int3", "int4", "int5", "int6", "int8"):
        for block in _BLOCKS:
            if block.isdecimal() and int(block) > columns:
                continue
            yield quantizer("int4", elements=elements, block=block)
            yield quantizer(
                "int4", elements=elements, block=block, narrow=False, target=float(2 ** (int(elements[3:]) - 1))
            )
            yield quantizer("int4-asymmetric", elements=elements, block=block)
    for name in ("mxfp4", "nvfp4", "mxfp6", "fp8", "fp8-row"):
        yield quantizer(name)
