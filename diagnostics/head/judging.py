"""The outputs of one head beside a well-rounded kernel's: O, dQ, LSE and delta by query head, dK and dV by key head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
from torch import Tensor

from attn_diag.head.beside import beside_well_rounded
from attn_diag.head.block_sums import SITE as SUMS_IN_BLOCKS
from attn_diag.head.block_sums import made_in_blocks
from attn_diag.head.counterfactual import covers
from attn_diag.head.declared import beside_declared, with_scale_faults
from attn_diag.head.head_stack import HeadStack
from attn_diag.head.noise_directions import directions
from attn_diag.head.propagation import ForwardErrors
from attn_diag.head.quality import (
    LOSSY,
    Directions,
    QuantitySample,
    samples,
)
from attn_diag.head.shown_ways import Shown, ShownOfHead
from attn_diag.head.streaming import ObservedHead, StreamedHead
from attn_diag.statistics.arrays import dense


def measure_quality(stack: HeadStack) -> list[dict[str, QuantitySample]]:
    """O and dQ of each head beside a well-rounded kernel's."""
    found: list[dict[str, QuantitySample]] = [{} for _ in stack.passes]
    for name in ("o", "dq"):
        observed = stack.output(name)
        if observed is None or not observed.shape[1] or (name == "dq" and stack.head.do is None):
            continue
        fed = [None if name == "o" else _fed(p, s) for p, s in zip(stack.passes, stack.seen, strict=True)]
        clusters = [dense(keys) for keys in stack.top_key.cpu().numpy()] if name == "o" else [None] * len(found)
        firsts: list[QuantitySample | None] = [None] * len(found)
        if stack.passes[0].declared(stack.seen[0]) is None:
            firsts[:] = beside = samples(
                observed,
                stack.of(partial(_true, name)),
                stack.chosen([passed.counterfactuals.outputs()[name] for passed in stack.passes]),
                stack.chosen([found[name] for found in stack.variances]),
                stack.formats[name],
                stack.indices,
                len(stack.head.q),
                fed=None if fed[0] is None else stack.chosen(fed),
                clusters=clusters,
                directions=[_directions(passed, name) for passed in stack.passes],
            )
            QuantitySample.find_ratios(beside)
        for h, (passed, seen) in enumerate(zip(stack.passes, stack.seen, strict=True)):
            found[h][name] = _quality(name, passed, seen, stack.indices[h], fed[h], clusters[h], firsts[h])
    return found


def _true(name: str, passed: StreamedHead) -> Tensor:
    found = passed.truth.reference.out if name == "o" else passed.truth.reference.dq
    assert found is not None
    return found


def _fed(passed: StreamedHead, seen: ObservedHead) -> Tensor | None:
    """dQ as the casts of a backward make it that is fed with the captured O and LSE; None: unknown."""
    backward = passed.backward.get(seen.name)
    return None if backward is None else backward.dq_cast


def _directions(passed: StreamedHead, name: str) -> Directions | None:
    """Errors that all keys share may lie in one direction; None where no recipe tells."""
    fmt = passed.truth.out_format
    return partial(directions, passed.truth.head, fmt, name) if covers(fmt) else None


def _quality(
    name: str, passed: StreamedHead, seen: ObservedHead, rows: Tensor, fed: Tensor | None,
    clusters: npt.NDArray[np.int64] | None, first: QuantitySample | None,
) -> QuantitySample:  # fmt: skip
    """O or dQ of one head beside a well-rounded kernel's; ``first`` beside the first of these, if none is declared."""
    truth, variance = _true(name, passed), passed.variance(seen)[name]
    observed, fmt, backward = seen.outputs[name], seen.formats[name], passed.backward.get(seen.name)
    if (declared := passed.declared(seen)) is not None:
        beside = beside_declared(
            observed, truth, partial(_only, name), [declared], variance=variance, fmt=fmt, rows=rows,
            fed=fed if covers(passed.truth.out_format) else None, clusters=clusters,
        )  # fmt: skip
        return beside if name != "o" else with_scale_faults(beside, observed, seen.outputs.get("lse"), declared, rows)
    shown, total = passed.shown(seen.name), partial(_only, name)
    beside_usual = partial(
        beside_well_rounded, name, observed, truth, total, [passed.counterfactuals], variance=variance, fmt=fmt,
        rows=rows, fed=fed, clusters=clusters, directions=_directions(passed, name), first=first, shown=shown,
        outs=() if name == "o" else [seen.outputs.get("o")],
    )  # fmt: skip
    if name == "o" or fed is None or backward is None:
        return beside_usual()
    return with_sums(name, beside_usual, partial(made_in_blocks, name, observed, fed, [backward], total, fmt), shown)


def with_sums(
    name: str, beside: Callable[..., QuantitySample], made: Callable[[], float], shown: ShownOfHead | None
) -> QuantitySample:
    """A gradient with sums in the inputs' format as the site, where they are what makes it lossy.

    Args:
        name: dq, dk or dv.
        beside: ``beside_well_rounded`` of it but for ``known``.
        made: ``made_in_blocks`` of it.
        shown: Where the first head shows such sums, others are asked for them before any other way is looked for.
    """
    told = None if shown is None else shown.look(name)
    by_sums = made() if told is not None and told.way == SUMS_IN_BLOCKS else 0.0
    found = beside(known=by_sums > 0)
    ratio = found.ratio()
    if found.site is not None or ratio is None or ratio.high <= LOSSY:
        return found
    by_sums = by_sums or made()
    if by_sums and shown is not None:
        shown.put(name, Shown(SUMS_IN_BLOCKS, 0.0, None))
    return replace(found, site=SUMS_IN_BLOCKS, made_by_site=by_sums) if by_sums else found


def rows_without_keys(seen: ObservedHead, rows: npt.NDArray[np.bool_]) -> dict[str, tuple[int, int]]:
    """Of the rows [Tq] that see no key, where O and dQ are 0: how many have NaN or Inf, and how many a number."""
    found = {}
    for name in ("o", "dq"):
        if name in seen.outputs and rows.any():
            values = seen.outputs[name].cpu().numpy()[rows]
            finite = np.isfinite(values).all(1)
            found[name] = int((~finite).sum()), int((values[finite] != 0).any(1).sum())
    return {name: counts for name, counts in found.items() if any(counts)}


def paired_deltas(passed: StreamedHead, observed: ForwardErrors) -> tuple[Tensor, Tensor]:
    """delta's errors over their noise: observed, and the counterfactual's."""
    assert passed.truth.reference.delta is not None
    other = passed.counterfactuals.outputs()["delta"] - passed.truth.reference.delta
    noise = passed.noise.variance["delta"].sqrt().clamp(min=1e-300)
    return observed.delta_error / noise, other / noise


def _only(name: str, outputs: Sequence[dict[str, Tensor]]) -> Tensor:
    return outputs[0][name]
