"""flash_attn 2 with ALiBi slopes in a running model: captured with the slopes, judged, monitored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import foreign_kernels
import foreign_varlen
import pytest
import torch
from tiny_models import only
from torch import Tensor

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.head.read import read_head
from attn_diag.reference import reference_head
from attn_diag.watching.live.call import AttentionCall, CallPlace
from attn_diag.watching.live.kernels import alibi_origin
from attn_diag.watching.monitoring.rows import measure_rows
from attn_diag.watching.monitoring.sample import Sample

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch.library
HEADS, DIM, ROWS = 4, 16, 40
SLOPES = 2.0 ** -torch.arange(1.0, HEADS + 1)
ENDS = torch.tensor([0, 17, 40], dtype=torch.int32)
CASES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "not causal": {},
    "window": {"causal": True, "window_size": (9, 0)},
    "longer keys": {"causal": True, "keys": 56},
    "a batch's own": {"causal": True, "alibi_slopes": torch.stack([SLOPES, SLOPES.roll(1)])},
    "zero and negative": {"causal": True, "alibi_slopes": SLOPES * torch.tensor([0.0, -0.5, 1.0, 0.0])},
    "softcap": {"softcap": 20.0},
}


def drawn(rows: int, keys: int, *, batch: int | None = 2, kv_heads: int = HEADS) -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    lead = () if batch is None else (batch,)
    shapes = [(rows, HEADS), (keys, kv_heads), (keys, kv_heads)]
    return [torch.randn(*lead, *s, DIM, generator=g).bfloat16().requires_grad_() for s in shapes]


def caught(function: Any, given: list[Tensor], folder: Path, *more: Any, **options: Any) -> Capture:
    with attn_diag.capture(None, folder, batch=None) as recorder:
        o = function(*given, *more, **options)
        torch.autograd.backward(o, torch.randn(o.shape, generator=torch.Generator().manual_seed(4)).to(o.dtype))
    return only(recorder)


def require_sound(capture: Capture) -> None:
    diagnosis = attn_diag.inspect_captures([capture], device="cpu").captures[0]
    assert diagnosis.assumptions.ok, diagnosis.assumptions.message
    heads = diagnosis.observations[0].heads
    assert {h.verdict.labels for h in heads if h.verdict} <= {("clean",), ("undecided",)}
    assert all(q.answer == "good" for h in heads for q in h.quantities if q.quantity in ("o", "lse"))


@pytest.mark.parametrize("case", CASES)
def test_slopes_are_captured_and_sound(case: str, tmp_path: Path) -> None:
    options = {"alibi_slopes": SLOPES, **CASES[case]}
    keys = options.pop("keys", ROWS)
    with foreign_kernels.flash_attn_2() as function:
        capture = caught(function, drawn(ROWS, keys), tmp_path, **options)
    assert torch.equal(capture.tensors["alibi_slopes"][...], options["alibi_slopes"])
    plain = options.get("causal") and "window_size" not in options
    assert capture.metadata.alibi_origin == ("first-key" if plain else "row")
    assert {"lse", "dq", "dk", "dv"} <= capture.tensors.keys()
    assert capture.format_version == "1.1"
    require_sound(capture)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_slopes_of_packed_documents(own: bool, causal: bool, tmp_path: Path) -> None:
    slopes = torch.stack([SLOPES, SLOPES.roll(1)]) if own else SLOPES
    given = drawn(ROWS, ROWS, batch=None, kv_heads=2)
    with foreign_varlen.flash_attn() as function:
        capture = caught(function, given, tmp_path, ENDS, ENDS, 23, causal=causal, alibi_slopes=slopes)
    assert [capture.lengths(b)[0] for b in range(capture.batch)] == [17, 23]
    assert capture.alibi_slope(1, 0) == (0.0625 if own else 0.5)
    require_sound(capture)


def test_a_part_of_heads_and_batch_keeps_its_slopes(tmp_path: Path) -> None:
    slopes = torch.stack([SLOPES, SLOPES.roll(1)])
    with foreign_kernels.flash_attn_2() as function, attn_diag.capture(None, tmp_path, heads=[2], batch=[1]) as found:
        function(*drawn(ROWS, ROWS), causal=True, alibi_slopes=slopes)
    capture = only(found)
    assert capture.metadata.head_offset == 2
    assert torch.equal(capture.tensors["alibi_slopes"][...], slopes[1:, 2:3])
    require_sound(capture)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("case", ["causal", "not causal", "window", "a batch's own"])
def test_monitor_measures_what_inspect_does(case: str, packed: bool) -> None:
    options = {"alibi_slopes": SLOPES, **CASES[case]}
    window = options.get("window_size", (-1, -1))
    q, k, v = (t.detach().transpose(1, 2) for t in drawn(ROWS, ROWS, batch=1 if packed else 2))
    ends = ENDS if packed else None
    call = AttentionCall(
        CallPlace(0, 0, None, 0, True), "flash_attn", q, k, v, q,
        causal="bottom-right" if "causal" in options else "none",
        window=None if window == (-1, -1) else window, alibi_slopes=options["alibi_slopes"],
        alibi_origin=alibi_origin("causal" in options, window, ROWS), do=q,
        cu_seqlens_q=ends, cu_seqlens_k=ends,
    )  # fmt: skip
    sample = Sample.of(call, sequences=2, rows=ROWS)
    capture = call.capture()
    at = 0
    for b in range(capture.batch):
        rows = capture.lengths(b)[0]
        for h in range(HEADS):
            truth = reference_head(read_head(capture, b, h, torch.device("cpu")).head)
            found = measure_rows(sample, 0 if packed else b, slice(0, HEADS))
            assert found.gradient is not None
            part = slice(at, at + rows)
            torch.testing.assert_close(found.gradient.dq[h, part], truth.dq, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(found.gradient.delta[h, part], truth.delta, rtol=1e-10, atol=1e-12)
            if not (packed and call.alibi_origin != "row"):
                torch.testing.assert_close(found.lse[h, part], truth.lse, rtol=1e-10, atol=1e-12)
        at += rows if packed else 0


def test_layers_with_slopes_are_stacked() -> None:
    q, k, v = (t.detach().transpose(1, 2) for t in drawn(ROWS, ROWS))
    call = AttentionCall(CallPlace(0, 0, None, 0, True), "x", q, k, v, q, causal="bottom-right",
                         alibi_slopes=SLOPES, do=q)  # fmt: skip
    samples = [Sample.of(call, rows=16), Sample.of(call, rows=16)]
    assert samples[0].likeness == samples[1].likeness
    both, one = (measure_rows(s, 0, slice(0, s.k.shape[1])) for s in (Sample.stacked(samples), samples[0]))
    torch.testing.assert_close(both.lse, one.lse.repeat(2, 1))


def test_the_origin_follows_flash_attns_own_rule() -> None:
    assert alibi_origin(True, (-1, -1), 64) == alibi_origin(False, (-1, 0), 64) == "first-key"
    assert alibi_origin(True, (64, 0), 64) == "first-key"
    assert alibi_origin(True, (63, 0), 64) == alibi_origin(False, (-1, -1), 64) == "row"
