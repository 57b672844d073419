"""The float64 reference against the oracle: its certificate holds, is not idle, and wrong ones are found.

A small version of benchmarks/bench_certificate.py. A bound that lacks a term is caught where that term is all there is:
on inputs, and with a summation order or an exp, that use up what the docstring of ``reference.certificate`` allows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from bench_certificate import FAMILIES, checked_rows, compute, near_underflow
from builders import some
from mpmath import mp, mpf
from torch import Tensor

from attn_diag.reference import AttentionHead, BoundCollector, HeadBounds, HeadReference, Masking, reference_head, sums
from attn_diag.reference import attention as forward
from attn_diag.reference import certificate as bounding
from attn_diag.reference.certify import OUTPUTS, CheckedRow, check_rows
from attn_diag.reference.heads import Heads

ROWS = 1500
Result = tuple[HeadReference, HeadBounds]


@cache
def checked(name: str) -> list[CheckedRow]:
    """This family's share of the rows."""
    share = ROWS / sum(weight for weight, _, _ in FAMILIES.values())
    return [row for _, row, _ in checked_rows(name, math.ceil(FAMILIES[name][0] * share))]


def certified(rows: Iterable[CheckedRow]) -> bool:
    """Whether every error is within its bound, and every bound says something."""
    return all(row.held and all(math.isfinite(x.bound) for x in row.outputs.values()) for row in rows)


def pessimism(rows: Iterable[CheckedRow], output: str, factor: float = 1.0) -> list[float]:
    """bound / error of the rows where the output has an error."""
    found = [row.outputs[output] for row in rows]
    return [factor * x.bound / x.error for x in found if x.error > 0]


def is_sharp(ratios: list[float]) -> bool:
    return statistics.median(ratios) <= 1000


@pytest.mark.parametrize("name", FAMILIES)
def test_certificate_is_never_violated(name: str) -> None:
    rows = checked(name)
    assert all(set(row.outputs) == set(OUTPUTS) for row in rows)
    assert certified(rows), max((x.ratio, row.row, o) for row in rows for o, x in row.outputs.items())


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_certificate_is_never_violated_on_a_gpu(name: str) -> None:
    """Other sums of products, another exp, and a division by a number that multiplies by its reciprocal."""
    assert certified(row for _, row, _ in checked_rows(name, 24, device="cuda"))


def test_bounds_are_at_most_1000_times_the_error_in_the_median() -> None:
    rows = [row for name in FAMILIES for row in checked(name)]
    assert len(rows) >= ROWS
    for output in OUTPUTS:
        assert is_sharp(pessimism(rows, output)), output
        # Bounds a hundred times as large would not be.
        assert output == "lse" or not is_sharp(pessimism(rows, output, factor=100)), output


# What is assumed of the math library.


def worst_error(function: Callable[[Tensor], Tensor], exact: Callable[[Any], Any], points: Tensor) -> float:
    """The largest relative error in units of u = 2**-53."""
    with mp.workprec(160):
        truth = [exact(mpf(x)) for x in points.tolist()]
        got = function(points).tolist()
        return float(max(abs((mpf(g) - t) / t) for g, t in zip(got, truth, strict=True) if t) * 2**53)


def points(low: float, high: float) -> Tensor:
    return torch.linspace(low, high, 3000, dtype=torch.float64) * (1 + 2.0**-30)


@pytest.mark.parametrize(
    ("function", "exact", "at"),
    [
        (torch.exp, mp.exp, points(-700.0, 0.0)),
        (torch.exp, mp.exp, points(-2.0, 0.0)),
        (torch.log, mp.log, points(1.0, 3.0)),
        (torch.log, mp.log, points(1.0, 1e6)),
        (torch.tanh, mp.tanh, points(-5.0, 5.0)),
        (torch.tanh, mp.tanh, points(-1e-3, 1e-3)),
    ],
    ids=["exp", "exp near 0", "log near 1", "log", "tanh", "tanh near 0"],
)
def test_functions_are_right_to_two_ulp_here(
    function: Callable[[Tensor], Tensor], exact: Callable[[Any], Any], at: Tensor
) -> None:
    assert worst_error(function, exact, at) <= 4
    assert worst_error(lambda x: function(x) * (1 + 2.0**-50), exact, at) > 4


# A wrong reference.


def through_fp32(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *tensors: function(*(t.float() for t in tensors)).double()


def exp_in_fp32(self: Tensor) -> Tensor:
    return self.copy_(self.float().exp())


def delta_of_rounded_out(head: AttentionHead, reference: HeadReference) -> HeadReference:
    return replace(reference, delta=(some(head.do) * reference.out.float()).sum(1))


def unscaled_dq(head: AttentionHead, reference: HeadReference) -> HeadReference:
    return replace(reference, dq=some(reference.dq) / head.scale)


def keeps(_: AttentionHead, reference: HeadReference) -> HeadReference:
    return reference


Patches = Mapping[str, Any]
WRONG_REFERENCES: dict[str, tuple[Patches, Callable[[AttentionHead, HeadReference], HeadReference]]] = {
    "exp in fp32": ({"torch.Tensor.exp_": exp_in_fp32}, keeps),
    "P_bar V in fp32": ({"product_in_parts": through_fp32(sums.product_in_parts)}, keeps),
    "row sum in fp32": ({"sum_in_parts": through_fp32(sums.sum_in_parts)}, keeps),
    "delta of O in fp32": ({}, delta_of_rounded_out),
    "dQ without alpha": ({}, unscaled_dq),
}


def patched(monkeypatch: pytest.MonkeyPatch, module: str, patches: Patches) -> None:
    for name, value in patches.items():
        monkeypatch.setattr(name if "." in name else f"{module}.{name}", value)


@pytest.mark.parametrize("name", WRONG_REFERENCES)
def test_wrong_references_are_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patches, change = WRONG_REFERENCES[name]

    def wrong(head: AttentionHead) -> Result:
        reference, bounds = compute(head)
        return change(head, reference), bounds

    patched(monkeypatch, forward.__name__, patches)
    assert not certified(row for _, row, _ in checked_rows("bf16, T = 64", 32, wrong))


def test_one_key_too_many_is_found() -> None:
    def wrong(head: AttentionHead) -> Result:
        return compute(replace(head, masking=Masking("none", window=(40, 1))))

    assert not certified(row for _, row, _ in checked_rows("window", 32, wrong))


@pytest.mark.parametrize("planted", [2.0, -2.0, math.nan], ids=["above", "below", "nan"])
@pytest.mark.parametrize("output", OUTPUTS)
def test_twice_the_bound_in_one_element_is_found(output: str, planted: float) -> None:
    """The reference is nearer to the truth than its bound: twice the bound more is outside, and half is inside."""
    head = FAMILIES["bf16, T = 64"][2](0)
    reference, bounds = compute(head)
    t = 37
    for factor, held in ((planted, False), (0.5, True)):
        values = {o: getattr(reference, o).clone() for o in OUTPUTS}
        bound = getattr(bounds, output)
        element = (t, 5) if bound.ndim == 2 else (t,)
        values[output][element] += factor * bound[element]
        wrong = replace(reference)
        for name, tensor in values.items():
            setattr(wrong, name, tensor)
        rows = {row.row: row for row in check_rows(head, wrong, bounds, [t - 1, t])}
        assert rows[t - 1].held
        assert rows[t].held is held
        assert (rows[t].outputs[output].ratio <= 1) is held


def test_rows_without_keys_must_be_zero() -> None:
    head = FAMILIES["rows without keys"][2](0)
    reference, bounds = compute(head)
    assert (bounds.out[::3] == 0).all()
    assert certified(check_rows(head, reference, bounds, [0, 3]))
    reference.out[3, 1] = 1e-300
    assert [row.held for row in check_rows(head, reference, bounds, [0, 3])] == [True, False]


# A wrong bound: what a reference may lawfully do at worst, and a bound that forgets it.


def summed_in_order(values: Tensor) -> Tensor:
    total = values.new_zeros(len(values))
    for column in values.unbind(1):
        total = total + column
    return total


def product_in_order(weights: Tensor, values: Tensor) -> Tensor:
    total = weights.new_zeros(len(weights), values.shape[1])
    for column, row in zip(weights.unbind(1), values, strict=True):
        total = total + column[:, None] * row
    return total


IN_ORDER: Patches = {"sum_in_parts": summed_in_order, "product_in_parts": product_in_order}


def exp_two_ulp_off(self: Tensor) -> Tensor:
    self.copy_(self.exp())
    up = self.nextafter(torch.full_like(self, torch.inf))
    return self.copy_(up.nextafter(torch.full_like(self, torch.inf)))


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def head_of(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, **options: Any) -> AttentionHead:
    return AttentionHead(q, k, v, torch.ones(len(q), v.shape[1], dtype=torch.float64), scale, **options)


def each_term_lost() -> AttentionHead:
    """1 and then 62 numbers exp(-36.75) = 0.987 * 2**-53, each lost when added to l; times V = 1.0234 each counts 2."""
    count = 63
    k = torch.full((count, 2), -36.75, dtype=torch.float64)
    k[0] = 0.0
    v = torch.full((count, 1), 1.0234375, dtype=torch.float64)
    v[0] = 1.0
    return head_of(tensor([1.0, 0.0]), k, v)


def two_keys() -> AttentionHead:
    return head_of(tensor([1.0]), tensor([0.0], [-0.5]), tensor([1.0], [-1.0]))


def large_and_close(dtype: torch.dtype, scale: float, **options: Any) -> AttentionHead:
    """Scores about alpha 2**24, differing by a few alpha."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 16, generator=generator, dtype=torch.float64).to(dtype).double() for n in (16, 12, 12))
    q[:, 0] = k[:, 0] = 2.0**12
    return head_of(q, k, v, scale, **options)


def large_mask() -> AttentionHead:
    mask = 1e6 + torch.randn(16, 12, generator=torch.Generator().manual_seed(1))
    return replace(large_and_close(torch.bfloat16, 2.0**-24), masking=Masking(mask=mask))


ORIGINAL_GAMMA, ORIGINAL_SCORE_ERROR = bounding._gamma, bounding._score_error


@dataclass(frozen=True)
class Forgotten:
    """A head and a lawful reference of it (``worst``), for which bounds without something (``wrong``) do not hold."""

    head: Callable[[], AttentionHead]
    wrong: Patches
    worst: Patches


def no_score_error(head: Heads) -> tuple[Tensor, Tensor, Tensor]:
    error, size, exact = ORIGINAL_SCORE_ERROR(head)
    return torch.zeros_like(error), size, exact


def no_softcap_error(head: Heads) -> tuple[Tensor, Tensor, Tensor]:
    return ORIGINAL_SCORE_ERROR(replace(head, softcap=None))


FORGOTTEN: dict[str, Forgotten] = {
    "row sum": Forgotten(each_term_lost, {"sum_depth": lambda _: 0}, IN_ORDER),
    "products' sums": Forgotten(each_term_lost, {"product_depth": lambda _: 0}, IN_ORDER),
    "half of the terms": Forgotten(each_term_lost, {"_gamma": lambda n: ORIGINAL_GAMMA(n / 2)}, IN_ORDER),
    "exp": Forgotten(two_keys, {"_FUNCTION": 0.0}, {"torch.Tensor.exp_": exp_two_ulp_off}),
    "alpha": Forgotten(lambda: large_and_close(torch.bfloat16, 0.1), {"_score_error": no_score_error}, {}),
    "inexact products": Forgotten(
        lambda: large_and_close(torch.float64, 0.125),
        {"_Products.exact": lambda self, _=1.0: torch.ones_like(self.size, dtype=torch.bool)},
        {},
    ),
    "softcap": Forgotten(
        lambda: large_and_close(torch.bfloat16, 0.125, softcap=4e6), {"_score_error": no_softcap_error}, {}
    ),
    "mask": Forgotten(large_mask, {"_mask_error": lambda _r, _m, error, size, exact: (error, size, exact)}, {}),
    "underflow": Forgotten(lambda: near_underflow(0, 64, 16), {"_SMALL": 0.0}, {}),
    "underflow of delta": Forgotten(lambda: near_underflow(1, 64, 16), {"_SMALL": 0.0}, {}),
}


def check_all(head: AttentionHead) -> list[CheckedRow]:
    collector = BoundCollector(head)
    reference = reference_head(head, collector.add, key_gradients=False, gradient_sums=True)
    return check_rows(head, reference, collector.bounds(reference), range(len(head.q)))


@pytest.mark.parametrize("name", FORGOTTEN)
def test_no_term_of_the_bound_can_be_forgotten(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = FORGOTTEN[name]
    head = case.head()
    patched(monkeypatch, forward.__name__, case.worst)
    assert certified(check_all(head))
    for attribute, value in case.wrong.items():
        monkeypatch.setattr(f"{bounding.__name__}.{attribute}", value)
    assert not certified(check_all(head))


def test_bounds_in_the_worst_order_are_nearly_reached() -> None:
    """Otherwise half of them would do."""
    head = each_term_lost()
    with pytest.MonkeyPatch.context() as monkeypatch:
        patched(monkeypatch, forward.__name__, IN_ORDER)
        (row,) = check_all(head)
    assert 0.85 < row.outputs["out"].ratio <= 1
    assert 0.85 < row.outputs["lse"].ratio <= 1


def test_nothing_is_certain_beyond_float64() -> None:
    """Scores so large that nothing is known of the probabilities: infinite bounds, not wrong ones."""
    head = large_and_close(torch.float64, 1e13)
    reference, bounds = compute(head)
    assert bounds.out.isinf().all()
    assert some(bounds.delta).isinf().all()
    assert all(row.held for row in check_rows(head, reference, bounds, [0, 5]))
    with pytest.raises(IndexError, match="between 0 and 15, got 16"):
        check_rows(head, reference, bounds, [16])
    with pytest.raises(ValueError, match="between 64 and 32768 bits, got 53"):
        check_rows(head, reference, bounds, [0], bits=53)
