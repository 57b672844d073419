"""Heads of one layer that are off for different causes: what the finding that they share says of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from attn_diag import inspect
from attn_diag.kernels.quantize import quantize
from attn_diag.kernels.quantizers import PRESETS, quantizer
from attn_diag.reports.finding_words import fault, otherwise, sure
from attn_diag.results.estimates import Verdict
from attn_diag.results.findings import SharedFinding

T, D = 256, 64
HIDDEN = torch.ones(T, T, dtype=torch.bool).triu(1)


def plain(q: Tensor, k: Tensor, v: Tensor, *, coarse: bool = False) -> Tensor:
    """Causal attention whose P_bar is cast; ``coarse``: S too."""
    scores = q @ k.mT * D**-0.5
    scores = (scores.bfloat16().to(scores) if coarse else scores).masked_fill(HIDDEN, -torch.inf)
    probs = (scores - scores.amax(-1, keepdim=True)).exp()
    made: Tensor = (probs.bfloat16().to(v) @ v / probs.sum(-1, keepdim=True)).bfloat16()
    return made


def fp8(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e4m3fn).to(x)


def int4(x: Tensor) -> Tensor:
    return quantize(x, quantizer(PRESETS["int4"], block="tensor")).values


def zeroed(o: Tensor) -> Tensor:
    o[100:110] = 0
    return o


Kernel = Callable[[Tensor, Tensor, Tensor], Tensor]
KERNELS: dict[str, Kernel] = {
    "good": plain,
    "k in FP8": lambda q, k, v: plain(q, fp8(k), v),
    "v in FP8": lambda q, k, v: plain(q, k, fp8(v)),
    "v in INT4": lambda q, k, v: plain(q, k, int4(v)),
    "larger": lambda q, k, v: 1.05 * plain(q, k, v),
    "zeroed": lambda q, k, v: zeroed(plain(q, k, v)),
    "moved": lambda q, k, v: plain(q, k, v).roll(1, 0),
}


def findings(*names: str) -> tuple[tuple[SharedFinding, ...], Verdict, str]:
    """Of a capture of heads by these kernels; and its first head's verdict, and the report."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, len(names), T, D, generator=generator).bfloat16() for _ in range(3))
    o = torch.stack([KERNELS[name](*(t[0, h].double() for t in (q, k, v))) for h, name in enumerate(names)])[None]
    found = inspect(q, k, v, o=o, causal=True)
    verdict = found.captures[0].observations[0].heads[0].verdict
    assert verdict is not None
    return found.findings, verdict, found.report()


def test_each_cause_is_told_of_the_head_that_shows_it() -> None:
    (finding,), _, report = findings("larger", "zeroed", "moved", "good")
    assert finding.worst.head == 2
    assert finding.alike == 1
    told = {cause.head: cause.words for cause in finding.otherwise}
    assert set(told) == {0, 1}
    assert "1.05 times" in told[0]
    assert "rows 100-109 are zero" in told[1]
    assert "Others  H0: O is 5 % off" in report


def test_formats_differ_by_what_was_held_in_them() -> None:
    (finding,), _, _ = findings("v in FP8", "v in FP8", "k in FP8")
    assert finding.formats == {"v": "FP8 (E4M3)"}
    assert finding.alike == 2
    assert [(cause.head, cause.heads) for cause in finding.otherwise] == [(2, 1)]
    assert fault(finding) == "the fault of a kernel or cache below 16 bits in 2 of them"
    assert otherwise(finding).startswith("H2: O has ")


@pytest.mark.parametrize("name", ["k in FP8", "larger", "moved"])
def test_one_cause_has_no_others(name: str) -> None:
    (finding,), _, report = findings(*[name] * 4)
    assert finding.alike == finding.heads == 4
    assert not finding.otherwise
    assert "Others" not in report


def test_a_cache_of_four_bits_is_no_fault_that_no_rounding_makes() -> None:
    (finding,), verdict, report = findings("v in INT4")
    assert finding.label == "wrong"
    assert list(finding.formats) == ["v"]
    assert verdict.suggestions[0].startswith("q, k or v lost their bits")
    assert sure(finding) == "certain: the fault of a kernel or cache below 16 bits, not the inputs'."
    assert "No rounding" not in report
    assert "no rounding" not in report


def test_of_older_documents_no_more_is_said_than_they_hold() -> None:
    (finding,), _, _ = findings("moved")
    assert finding.pattern is not None
    older = replace(finding, cause=None, alike=None)
    assert sure(older) == sure(finding) == "certain: no rounding does that; kernel at fault, or capture damaged."


def test_what_8_bits_do_not_make_may_be_made_by_fewer() -> None:
    """P̄ in a few steps of its row, of which no pattern is known."""

    def coarse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT * D**-0.5).masked_fill(HIDDEN, -torch.inf)
        probs = (scores - scores.amax(-1, keepdim=True)).exp()
        probs = (5 * probs + 0.3).floor() / 5
        made: Tensor = (probs @ v / probs.sum(-1, keepdim=True)).bfloat16()
        return made

    KERNELS["coarse"] = coarse
    (finding,), verdict, _ = findings("coarse")
    assert finding.label == "wrong"
    assert "% off" in (finding.pattern or "")
    assert finding.words == "O is 49.5 % off: row 0 is right; rows 1-255 are 52 % off."
    assert sure(finding).startswith("certain: no rounding that was tried makes that; kernel")
    assert verdict.suggestions[0].endswith("inspect it as the kernel that it is (--declared).")
