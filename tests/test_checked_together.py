"""O of several captures checked in one go, and ratios of several sets of errors, are what each of them gives alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import stored
from scipy.special import stdtrit
from test_side_by_side import Counted

from attn_diag.head import output_fit
from attn_diag.head.output_fit import FitSubject, OutputFit, out_fit, out_fits
from attn_diag.head.read import HeadTensors
from attn_diag.reference import Alibi, AttentionHead, Masking, reference_rows
from attn_diag.reference.heads import out_and_lse, stacked
from attn_diag.statistics.ratios import Carriers, RatioCase, RatioEstimate, paired_ratios


def jackknife(case: RatioCase) -> RatioEstimate | None:
    """``paired_ratio``, one group left out after the other."""
    observed, yardstick = case.by_group()
    a, b, n = float(observed.sum()), float(yardstick.sum()), len(observed)
    if not b > 0 or not math.isfinite(a) or n < 2:
        return None
    groups = min(float(x.sum() ** 2 / np.square(x).sum()) if x.any() else n for x in (observed, yardstick))
    if case.carriers is not None and case.carriers.share > 0.5:
        groups = min(groups, case.carriers.count)
    if not a:
        return RatioEstimate(0.0, 0.0, 0.0, groups)
    rest = [((a - x), (b - y)) for x, y in zip(observed, yardstick, strict=True)]
    factor = math.sqrt(a / b)
    if any(x <= 0 or y <= 0 for x, y in rest):
        return RatioEstimate(factor, 0.0, math.inf, groups)
    logs = np.array([0.5 * (math.log(x) - math.log(y)) for x, y in rest])
    variance = (n - 1) * float(logs.var())
    if (shared := case.carriers) is not None:
        variance += shared.share**2 * max(1 - shared.correlation**2, 0.0) / max(shared.count, 1.0)
    half = float(stdtrit(max(groups - 1, 1.0), 0.975)) * math.sqrt(variance)
    return RatioEstimate(factor, factor * math.exp(-half), factor * math.exp(half), groups)


def test_ratios_of_several_sets_of_errors() -> None:
    rng = np.random.default_rng(0)

    def errors(n: int) -> np.ndarray:
        return rng.standard_normal(n) ** 2

    one = np.zeros(8)
    one[3] = 1.0
    cases = [RatioCase(errors(n), errors(n)) for n in (8, 8, 33, 1, 0)]
    cases += [RatioCase(np.zeros(8), errors(8)), RatioCase(errors(8), np.zeros(8)), RatioCase(one, errors(8))]
    cases += [RatioCase(errors(8) * np.inf, errors(8)), RatioCase(errors(64), errors(64), np.arange(64) // 8)]
    cases += [RatioCase(errors(8), errors(8), None, Carriers(count, 0.7, 0.3)) for count in (1.5, 40.0)]
    found = paired_ratios(cases)
    for got, case in zip(found, cases, strict=True):
        expected = jackknife(case)
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            pairs = [(getattr(x, n) for x in (got, expected)) for n in ("factor", "low", "high", "groups")]
            assert all(math.isclose(x, y, rel_tol=1e-12) for x, y in pairs), (got, expected)
    # What lies beside a case does not change it.
    assert found == [paired_ratios([case])[0] for case in cases]


VARIANTS: dict[str, tuple[Masking, float | None, bool]] = {
    "causal": (Masking("top-left"), None, False),
    "window, softcap": (Masking("bottom-right", (40, 0)), 5.0, False),
    "sink": (Masking(), None, True),
    "alibi": (Masking("bottom-right", alibi=Alibi(0.25)), None, False),
    "mask": (Masking(mask=torch.arange(333 * 300).view(300, 333) % 7 > 0), None, False),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_rows_of_several_heads(name: str) -> None:
    masking, softcap, sink = VARIANTS[name]
    generator = torch.Generator().manual_seed(0)
    heads = []
    for i in range(3):
        q, k, v = (torch.randn(n, 32, generator=generator).double() for n in (300, 333, 333))
        own = replace(masking, alibi=Alibi(0.25 * (i + 1))) if masking.alibi else masking
        heads.append(AttentionHead(q, k, v, None, 0.17, own, softcap, 0.5 * i if sink else None))
    rows = torch.tensor([0, 7, 150, 299])
    out, lse = out_and_lse(heads, rows)
    for head, of_head, of_rows in zip(heads, out, lse, strict=True):
        block = reference_rows(head, rows)
        torch.testing.assert_close(of_head, block.out, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(of_rows, block.lse, rtol=1e-12, atol=1e-14)


def test_outputs_of_several_captures_are_checked_together(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    captures = [stored(name) for name in ("gqa_T200", "gpt2_step731_L2H4", "gqa_T200")]
    asked = [FitSubject(c, next(n for n, found in c.observations.items() if "o" in found)) for c in captures]
    alone = [out_fit(one.capture, one.observation, torch.device("cpu")) for one in asked]
    monkeypatch.setattr(output_fit, "_at_once", lambda *_: 64)
    together = out_fits(asked, torch.device(device))
    for one, other in zip(alone, together, strict=True):
        assert isinstance(one, OutputFit)
        assert isinstance(other, OutputFit)
        assert math.isclose(one.error, other.error, rel_tol=1e-12)
        assert math.isclose(one.rounding, other.rounding, rel_tol=1e-12)
        assert one.few == other.few


def test_more_captures_take_hardly_more_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """All heads are recomputed at once; what is left for each is to take its rows, and the head's own inputs."""
    monkeypatch.setattr(output_fit, "_at_once", lambda *_: 64)
    capture, counts = stored("gqa_T200"), list[int]()
    name = next(n for n, found in capture.observations.items() if "o" in found)
    places = [(0, head) for head in range(capture.q_heads)]
    tensors = HeadTensors(capture, places, torch.device("cpu"))
    for times in (1, 1, 9):  # the first reads
        with Counted() as operations:
            out_fits([FitSubject(capture, name, tensors)] * times, torch.device("cpu"))
        counts.append(operations.count)
    _, one, nine = counts
    assert nine < 5 * one


def test_heads_that_lie_one_after_the_other_are_stacked_without_a_copy() -> None:
    every = torch.arange(4 * 6.0, dtype=torch.float64).view(4, 3, 2)
    one_after_the_other = stacked(every.unbind()[1:])
    assert one_after_the_other.data_ptr() == every[1].data_ptr()
    assert torch.equal(one_after_the_other, every[1:])
    others = {
        "in another order": [every[1], every[0], every[2]],
        "with one left out": [every[0], every[1], every[3]],
        "the same twice": [every[0], every[0]],
        "turned round": [every[0].T.contiguous().T, every[1]],
        "of other numbers": [every[0], every[1].view(torch.int64).double()],
        "columns": list(every.unbind(1)),
        "with gradients": [t.clone().requires_grad_() for t in every],
        "empty": [every[0, :0], every[1, :0]],
    }
    for kind, tensors in others.items():
        assert torch.equal(stacked(tensors), torch.stack(tensors)), kind
        assert stacked(tensors).untyped_storage().data_ptr() != every.data_ptr(), kind
