"""What other quantisers would leave of the same weight."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor

from attn_diag.kernels.elements import CodeBook, Integers
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import Quantizer, name_changed
from attn_diag.results.quant import Alternative
from attn_diag.testing.quantizing.figures import QuantizationErrors
from attn_diag.work import Progress


def alternatives(
    w: Tensor, x: Tensor | None, by: Quantizer, progress: Progress, other_scales: bool
) -> Iterator[Alternative]:
    """What others leave: the next blocks, the other symmetry and rule of scale, dithering, a search.

    Args:
        w: The weight, [R, C] float64.
        x: The layer's inputs, [N, C] float64; None: none.
        by: The quantiser that is changed.
        progress: Called with (done, total) before each.
        other_scales: Whether the values that are shown beside have scales of something else than w's amax.
    """
    own = "scales of the weight's own amax" if other_scales else "as it is"
    changes: list[tuple[str, dict[str, object]]] = [(own, {})]
    if by.block.isdigit():
        changes += [(f"blocks of {n}", {"block": str(n)}) for n in (int(by.block) // 2, int(by.block) * 4) if n >= 8]
    if isinstance(by.parsed_elements, Integers):
        if by.symmetric:
            changes.append(
                ("with a zero point", {"symmetric": False, "target": None, "search": (), "scale_of": "amax"})
            )
        else:
            changes.append(("symmetric", {"symmetric": True, "zero_point": "integer"}))
    if by.scale.startswith("e8m0"):
        changes.append(("scales rounded up from amax over the largest number", {"scale": "e8m0:up", "target": None}))
    base = by.elements.partition(":")[0]
    if not isinstance(by.parsed_elements, CodeBook):
        changes.append(("stochastic rounding", {"elements": f"{base}:stochastic", "ties": "even"}))
    if not by.search:
        changes += [("amax searched for the least squared error", {"search": tuple(n / 20 for n in range(20, 9, -1))})]
    for number, (words, change) in enumerate(changes):
        progress(number, len(changes))
        name = name_changed(by.name, {k: v for k, v in change.items() if k != "search"})
        other = replace(by, **{"name": name, **change})  # type: ignore[arg-type]
        if change and replace(other, name=by.name) == by:
            continue
        found = quantize(w, other)
        errors = QuantizationErrors(w, found.values - w, (found.values == 0) & (w != 0), found.clipped)
        output = None if x is None else errors.output(x)
        yield Alternative(
            other.name, words, errors.rms, errors.away,
            None if output is None else output.error, None if output is None else output.constant,
        )  # fmt: skip
