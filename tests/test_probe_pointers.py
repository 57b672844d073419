"""What probes say of the step at fault: of l, of L, and of no other than was planted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from builders import some
from probed_kernels import CAST_PROBS, EPSILON, TRUNCATING, Fn, kernel, nearest, rounding, run
from rich.cells import cell_len
from torch import Tensor

from attn_diag.kernels.formats import parse, round_to
from attn_diag.testing.probing.catalogue import PROBES
from attn_diag.testing.probing.pointers import TABLE, pointers

pytestmark = pytest.mark.slow


OWN_ROUNDING = "O itself is rounded"
MISMATCH = "The row sum does not match the weights"
# A kernel, and which of the two sentences its report must have; "" for neither.
CAUSES: dict[str, tuple[Fn, str, dict[str, Any]]] = {
    "truncates O": (TRUNCATING, OWN_ROUNDING, {}),
    "rounds O up": (kernel(cast=rounding("up")), OWN_ROUNDING, {}),
    "casts P": (CAST_PROBS, MISMATCH, {}),
    "sums cast P alone": (kernel(row_sum=lambda p: nearest(p).double().sum(-1, keepdim=True)), "", {}),
    "adds to l": (EPSILON, "", {}),
    "is right": (kernel(), "", {}),
    "returns zeros": (lambda q, k, v: torch.zeros_like(q), "", {}),  # noqa: ARG005
    "is not causal": (CAST_PROBS, "", {"causal": True}),
}


@pytest.mark.parametrize("kind", CAUSES)
def test_the_report_speaks_of_l_only_where_l_is_wrong(kind: str) -> None:
    fn, sentence, options = CAUSES[kind]
    found = run(fn, shape=(2, 8, 64, 32), probes=[n for n, p in PROBES.items() if p.build is not None], **options)
    text = " ".join(found.summary)
    assert [s for s in (OWN_ROUNDING, MISMATCH) if s in text] == ([sentence] if sentence else [])
    if sentence == OWN_ROUNDING:
        assert ("toward zero" if kind == "truncates O" else "upward") in text
        mean = float(text.split("in the mean, by ")[1].split()[0])
        # Half a spacing; 16 heads of 64 rows and 32 features, which V may share, know it to a few per cent.
        assert mean == pytest.approx(-0.5 if kind == "truncates O" else 0.5, abs=0.03)
    if not sentence and "biased" in found.labels:
        assert "Biased beyond correct rounding: " in text
    assert found.assumptions.ok == (kind not in ("returns zeros", "is not causal"))


@pytest.mark.parametrize("fn", [TRUNCATING, CAST_PROBS], ids=["truncates O", "casts P"])
def test_one_normaliser_probe_alone_gives_numbers_and_no_pointer(fn: Fn) -> None:
    found = run(fn, shape=(2, 8, 64, 32), probes=["constant-rows", "normaliser-down"])
    assert "biased" in found["normaliser-down"].labels
    assert "In the normaliser probes O is off by" in " ".join(found.summary)
    assert not pointers(found.findings)


def step(x: Tensor, dtype: torch.dtype, how: str) -> Tensor:
    rounded: Tensor = round_to(x, parse(f"{'bf16' if dtype == torch.bfloat16 else 'fp16'}:{how}"), 7)
    return rounded.double()


def l_of(q: Tensor, k: Tensor) -> Tensor:
    scores: Tensor = q.double() @ k.double().mT / q.shape[-1] ** 0.5
    return scores.logsumexp(-1)


LARGE_L = kernel(row_sum=lambda p: 1.01 * p.sum(-1, keepdim=True))
# A kernel with L, and the sites of pointers.TABLE that may speak of it; more are in benchmarks/study_probe.py.
POINTED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]], set[str]]] = {
    "O is truncated": (lambda q, k, v: (TRUNCATING(q, k, v), l_of(q, k)), {"O"}),
    "O is 0.27 % too small": (lambda q, k, v: (kernel(out=lambda o: o * 0.9973)(q, k, v), l_of(q, k)), set()),
    "P is cast for PV alone": (lambda q, k, v: (CAST_PROBS(q, k, v), l_of(q, k)), {"l sums P̄ uncast"}),
    "P is truncated for PV alone": (
        lambda q, k, v: (kernel(probs=lambda p: step(p, q.dtype, "toward-zero"))(q, k, v), l_of(q, k)), {"P̄"},
    ),
    "l is too large by 0.01": (
        lambda q, k, v: (LARGE_L(q, k, v), l_of(q, k) + math.log(1.01)),
        {"row sum"},
    ),
    "1/l is too small by 0.01": (
        lambda q, k, v: (LARGE_L(q, k, v), l_of(q, k)), set(),
    ),
    "L is stored in BF16": (lambda q, k, v: (kernel()(q, k, v), l_of(q, k).bfloat16().float()), {"LSE"}),
    "L is stored in FP16": (lambda q, k, v: (kernel()(q, k, v), l_of(q, k).half().float()), {"LSE"}),
    "L is returned in BF16": (lambda q, k, v: (kernel()(q, k, v), l_of(q, k).bfloat16()), set()),
}  # fmt: skip


@pytest.mark.parametrize("kind", POINTED)
def test_a_pointer_is_given_to_its_own_site_alone(kind: str) -> None:
    fn, sites = POINTED[kind]
    found = run(fn, probes=[n for n, p in PROBES.items() if p.build is not None])
    by_name = {f.name: f for f in found.findings}
    assert {p.site for p in TABLE if p.speaks(by_name) is not None} == sites, found.summary
    assert {words for words in found.summary if words in pointers(found.findings)} == set(pointers(found.findings))


def fp32_lse(q: Tensor, k: Tensor, row_sum: Callable[[Tensor], Tensor] = lambda p: p.sum(-1)) -> Tensor:
    """L as kernels make it: exp2, everything in fp32."""
    scores = q.float() @ k.float().mT
    scale = torch.tensor(q.shape[-1] ** -0.5 / math.log(2)).float()
    largest = scores.amax(-1, keepdim=True)
    total = row_sum((scores * scale - largest * scale).exp2())
    return (largest[..., 0] * scale + total.log2()) * math.log(2)


# L from q, k; and what its labels must be.
LSE: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], set[str]]] = {
    "fp32": (fp32_lse, set()),
    "fp32, flushed": (lambda q, k: fp32_lse(q, k, lambda p: p.masked_fill(p < 2.0**-126, 0).sum(-1)), set()),
    "float64": (lambda q, k: (q.double() @ k.double().mT / q.shape[-1] ** 0.5).logsumexp(-1), set()),
    "bf16": (lambda q, k: fp32_lse(q, k).bfloat16(), set()),
    "zero": (lambda q, k: 0 * fp32_lse(q, k), {"lse-too-large", "lse-biased"}),
    "base 2": (lambda q, k: fp32_lse(q, k) / math.log(2), {"lse-too-large", "lse-biased"}),
    "no alpha": (lambda q, k: fp32_lse(q * q.shape[-1] ** 0.5, k), {"lse-too-large", "lse-biased"}),
    "m alone": (lambda q, k: (q.float() @ k.float().mT / q.shape[-1] ** 0.5).amax(-1), {"lse-too-large", "lse-biased"}),
    "a key lost": (lambda q, k: fp32_lse(q, k, lambda p: p[..., 1:].sum(-1)), {"lse-too-large", "lse-biased"}),
    # A cast of the P_bar that l sums may do as much, but not everywhere to one side.
    "l off by 1e-3": (lambda q, k: fp32_lse(q, k, lambda p: p.sum(-1) * 1.001), {"lse-biased"}),
    "nan": (lambda q, k: fp32_lse(q, k).index_fill(2, torch.tensor([3]), torch.nan), {"nonfinite", "broken"}),
}


@pytest.mark.parametrize("kind", LSE)
def test_lse_is_judged_where_it_comes(kind: str) -> None:
    lse, labels = LSE[kind]
    found = run(lambda q, k, v: (kernel()(q, k, v), lse(q, k)), probes=["normal", "ones", "tails"])
    assert found.assumptions.ok
    for finding in found.findings:
        assert set(finding.labels) == (labels or {"exact"}), finding
        judged = some(finding.lse)
        assert judged.fits_base_2 == (kind == "base 2")
        assert (judged.of_budget > 1) == ("lse-too-large" in labels)
    text = " ".join(found.summary)
    assert text.startswith("Nothing was found in O and L of" if not labels else "NaN" if kind == "nan" else "L (lse)")
    assert ("L ln 2 fits: return the natural logarithm" in text) == (kind == "base 2")
    report = found.report(80)
    assert "L of" in report
    assert max(map(cell_len, report.splitlines())) <= 80


def test_where_no_lse_comes_the_report_says_so() -> None:
    found = run(kernel(), probes=["normal"])
    assert found["normal"].lse is None
    assert "L (lse) was not judged" in " ".join(found.report().split())


def test_a_bias_of_constant_rows_alone_says_so_of_ordinary_ones() -> None:
    """P normalised before its cast: equal scores give every key the same error, N(0,1) rows a mean of none."""

    def normalised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        probs = (q.float() @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1).to(q.dtype)
        o: Tensor = (probs.float() @ v.float()).to(q.dtype)
        return o

    report = " ".join(run(normalised, probes=["normal", "constant-rows"]).report().split())
    assert report.startswith("FAIL")
    assert "In constant-rows by" in report
    assert "Ordinary rows (normal) show nothing." in report
