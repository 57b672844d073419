"""What the errors of LSE and of a captured delta, one number a row, make of dQ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.head.coarser import operands_noise
from attn_diag.head.fp32_in_bf16 import EXPLAINED
from attn_diag.head.head_stack import HeadStack
from attn_diag.head.quality import ELEMENT_LIMIT
from attn_diag.head.row_effect import RowEffect
from attn_diag.head.truncated_inputs import TruncatedInputs
from attn_diag.reference import format_of

# LSE summed in fp32 is off by less than 2^-9 of what roundings to the inputs' format may make; measured on healthy
# kernels (benchmarks/study_verdicts.py).
_NINE_IN_TEN, _EXACT, _APART = 0.9, 2.0**-9, 64
# fp32 kernels leave up to 1e-6 of 1 + |m|, truncated sums included.
_FP32 = 2.0**-17
# An unstated sink is found where its error of L is right so far, relative to 1 + |m|, at so many sizes of it apart.
_RIGHT, _SIZES, _BETWEEN = 2.0**-19, 6, 4
BF16 = format_of(torch.bfloat16)


def measure_effects(stack: HeadStack) -> list[dict[str, RowEffect]]:
    """What the errors of LSE and of a captured delta make of dQ, beside a well-rounded kernel's noise there.

    LSE's error D scales a row of P, and so of dQ, by exp(-D); delta's adds -alpha D (P K). Beyond their budgets no
    rounding takes them. To the inputs' format (unit u) it makes 2 u (2 max |S| + 4) of LSE and 2 u sum |dO O| of delta,
    of operands to 8 bits more of LSE (see ``coarser``). Where nine in ten rows of LSE are exact to fp32, a row far
    beyond them is beyond its budget too, and so is any row that a sink which is not stated explains to fp32.
    """
    found: list[dict[str, RowEffect]] = [{} for _ in stack.passes]
    known = {name for name in ("lse", "delta") if name in stack.seen[0].outputs}
    if not known or not stack.indices.shape[1]:
        return found
    # Kernels of FP16 may keep L or delta in BF16.
    units = [2.0**-passed.noise.fmt.precision for passed in stack.passes]
    if stack.passes[0].compared:
        units = [max(unit, 2.0**-BF16.precision) for unit in units]
    unit = stack.head.q.new_tensor(units)[:, None]
    if stack.head.do is None:
        noise = unit.square() / 24 * torch.ones_like(stack.indices)
    else:
        noise = stack.chosen([v["dq"] for v in stack.variances]).sum(2)
    if "lse" in known:
        for one, effect in zip(found, _of_lse(stack, unit, noise), strict=True):
            one["lse"] = effect
    if "delta" in known and stack.head.do is not None:
        for one, effect in zip(found, _of_delta(stack, unit, noise), strict=True):
            one["delta"] = effect
    return found


def _of_lse(stack: HeadStack, unit: Tensor, noise: Tensor) -> list[RowEffect]:
    passes, first, lse = stack.passes, stack.passes[0], stack.output("lse")
    assert lse is not None
    true = stack.of(lambda passed: passed.truth.reference.lse)
    error, size = lse - true, torch.ones_like(lse)
    if first.truth.reference.dq is not None:
        size = stack.of(lambda passed: passed.truth.reference.dq).square().sum(2)
    largest = stack.of(lambda passed: passed.truth.reference.row_max).abs()
    for h in (h for h, passed in enumerate(passes) if passed.truth.head.sink is not None):
        largest[h] = torch.maximum(largest[h], true[h].abs())  # L may be the sink's, far from every score
    budget = 2 * unit * (2 * largest + 4)
    if first.compared:
        beyond = error.abs() > budget
        for h in _marked(beyond):
            rows = stack.indices[h][beyond[h]]
            budget[h, beyond[h]] += ELEMENT_LIMIT * operands_noise(passes[h].truth.head, rows)
    usual = (error.abs() / budget).quantile(_NINE_IN_TEN, 1)[:, None]
    # Nine in ten rows are exact: where one is not, it saw other keys or lost a rescaling.
    of_sum = stack.chosen([passed.noise.variance["row_sum"] for passed in passes]).sqrt()
    tight = torch.maximum(_APART * usual.clamp(min=_EXACT / 8) * budget, 8 * of_sum)
    budget = torch.where(usual < _EXACT, torch.minimum(budget, tight), budget)
    drawn = stack.chosen([v["lse"] for v in stack.variances]).sqrt() if "lse" in stack.variances[0] else None
    if drawn is not None:  # operands that are rounded move a score by more than its size
        budget = budget + ELEMENT_LIMIT * drawn
    apart, by_recipe = error, None
    declared = [passed.declared(seen) for passed, seen in zip(passes, stack.seen, strict=True)]
    if declared[0] is not None:  # as far off as the recipe's own L is no fault
        own = stack.chosen([None if one is None else one.outputs()["lse"] for one in declared]) - true
        apart = torch.where((error - own).abs() < error.abs(), error - own, error)
        # L of a kernel below 16 bits is off by as much as its scores are, by whole units where one key is huge.
        assert drawn is not None
        by_recipe = torch.maximum(torch.expm1(-own).square(), torch.expm1(drawn).square()) * size
    exact = (error.abs() <= _FP32 * (1 + largest)).all(1).tolist()
    sinks = [None if fine else _unstated_sink(*rows) for fine, *rows in zip(exact, error, true, largest, strict=True)]
    for h in (h for h, sink in enumerate(sinks) if sink is not None):
        budget[h] = torch.where(error[h] > _RIGHT * (1 + largest[h]), 0.5 * error[h], budget[h])
    beyond = apart.abs() > budget
    in_bf16, ways = [False] * len(passes), [""] * len(passes)
    for h in _marked(beyond):
        rows = stack.indices[h]
        if first.truth.inputs.input_format.precision > BF16.precision:
            wider = ELEMENT_LIMIT * operands_noise(passes[h].truth.head, rows[beyond[h]], BF16.precision)
            in_bf16[h] = not first.compared and bool((error[h][beyond[h]].abs() <= wider).all())
        if not in_bf16[h] and sinks[h] is None:
            ways[h] = _lse_through_bf16(stack, h, error[h], budget[h])
    found = _effects(stack, apart, torch.expm1(-error).square() * size, noise, budget, by_recipe)
    sizes = error.abs().amax(1).tolist()
    said = [
        "" if one is None else one.said_of_lse(seen.outputs["lse"])
        for one, seen in zip(declared, stack.seen, strict=True)
    ]
    return [
        replace(one, exact=fine, in_bf16=narrow, way=way, largest=most, scales=scales, sink=sink)
        for one, fine, narrow, way, most, scales, sink in zip(
            found, exact, in_bf16, ways, sizes, said, sinks, strict=True
        )
    ]


def _unstated_sink(error: Tensor, lse: Tensor, row_max: Tensor) -> float | None:
    """The logit of a sink that L holds beside what it should; None where none explains all errors of L to fp32.

    A sink of logit s adds ln(1 + exp(s - L)) to L. So does a key of zeros that is not masked, with s = 0.

    Args:
        error: L's, [n].
        lse: The true L, [n].
        row_max: [n], the size of the largest score.
    """
    right = _RIGHT * (1 + row_max)
    off = error > right
    if not bool(off.any()) or bool((error < -right).any()):
        return None
    logits = lse + error.clamp(min=1e-30).expm1().log()
    # The error of a logit is L's over expm1 of it.
    weight = torch.where(off, error.clamp(max=1.0).square(), 0.0)
    logit = float((weight * logits).nan_to_num(0.0).sum() / weight.sum())
    made = torch.nn.functional.softplus(logit - lse)
    if bool(((error - made)[off].abs() > right[off]).any()):
        return None
    sizes = set((made / (_BETWEEN * right))[off].round().tolist())
    return logit if len(sizes) >= _SIZES else None


def _of_delta(stack: HeadStack, unit: Tensor, noise: Tensor) -> list[RowEffect]:
    delta, true = stack.output("delta"), stack.of(lambda passed: passed.truth.reference.delta)
    do, o = stack.of(lambda passed: passed.truth.head.do), stack.of(lambda passed: passed.truth.reference.out)
    assert delta is not None
    error, size = delta - true, (do * o).abs().sum(2)
    if (out := stack.output("o")) is not None:
        own = delta - (do * out).sum(2)
        # A kernel may make it from O before or after its last rounding.
        error = torch.where(own.abs() < error.abs(), own, error)
    through = stack.of(lambda passed: passed.truth.probs_k).square().sum(2) * stack.head.scale**2
    budget = 2 * unit * size + 4 * stack.chosen([v["delta"] for v in stack.variances]).sqrt()
    return _effects(stack, error, error.square() * through, noise, budget, None)


def _effects(
    stack: HeadStack, error: Tensor, made: Tensor, noise: Tensor, budget: Tensor, declared: Tensor | None
) -> list[RowEffect]:
    """Of each head, from numbers by row, [H, n]."""
    of_budget = error.abs() / budget.clamp(min=1e-300)
    rows, compared = stack.indices.cpu().numpy(), stack.passes[0].compared
    by_row = torch.stack([made, noise, of_budget, *([] if declared is None else [declared])], 1).cpu().numpy()
    return [
        RowEffect(
            rows=own,
            made=found[0],
            noise=found[1],
            of_budget=found[2],
            largest=most,
            compared=compared,
            declared=None if declared is None else found[3],
        )
        for own, found, most in zip(rows, by_row, error.abs().amax(1).tolist(), strict=True)
    ]


def _marked(where: Tensor) -> Sequence[int]:
    """The heads of which some row is marked, bool [H, n]."""
    return [h for h, some in enumerate(where.any(1).tolist()) if some]


def _lse_through_bf16(stack: HeadStack, h: int, error: Tensor, budget: Tensor) -> str:
    """What is in BF16 of a kernel of finer inputs whose O and LSE are head ``h``'s; empty: nothing that is known."""
    passed, seen, rows = stack.passes[h], stack.seen[h], stack.indices[h]
    other, o = passed.counterfactuals, seen.outputs.get("o")
    if not isinstance(other, TruncatedInputs) or o is None:
        return ""
    for way in other.ways(o, passed.truth.reference.out):
        left = (seen.outputs["lse"] - other.along(way)["lse"])[rows]
        if float(left.square().sum()) <= EXPLAINED * float(error.square().sum()) and bool((left.abs() <= budget).all()):
            return way.told
    return ""
