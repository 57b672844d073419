"""The gradient of a latent that k and v share (absorbed MLA): dK and dV of both uses, each counted once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import labels_of
from torch import Tensor

import attn_diag
from attn_diag import Capture
from attn_diag.captures.loading import load
from attn_diag.errors import InputError
from attn_diag.kernels import emulate_head, preset
from attn_diag.reference import AttentionHead, Masking
from attn_diag.results.diagnosis import CaptureDiagnosis

SCALE = 0.2


@dataclass(frozen=True)
class Call:
    """A call on one latent, as a well-rounded kernel returns it."""

    inputs: dict[str, Tensor]
    dk: Tensor
    """[B, 1, T, D] float64, sums over the query heads before any rounding but that of each head's own."""
    dv: Tensor


def drawn(seed: int, *, heads: int = 2, rows: int = 96, d: int = 24, dv: int = 16, batch: int = 1) -> Call:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, rows, d, generator=g).bfloat16()
    latent = torch.randn(batch, 1, rows, d, generator=g).bfloat16()
    do = torch.randn(batch, heads, rows, dv, generator=g).bfloat16()
    o, dq = torch.empty_like(do), torch.empty_like(q)
    lse = torch.empty(batch, heads, rows)
    sums = torch.zeros(batch, 1, rows, d, dtype=torch.float64), torch.zeros(batch, 1, rows, dv, dtype=torch.float64)
    for b in range(batch):
        for h in range(heads):
            k, v = latent[b, 0].double(), latent[b, 0, :, :dv].double()
            one = AttentionHead(q[b, h].double(), k, v, do[b, h].double(), SCALE, Masking("bottom-right"))
            out = emulate_head(preset("fa2", "bf16", d), one)
            assert out.dq is not None
            assert out.dk is not None
            assert out.dv is not None
            o[b, h], lse[b, h], dq[b, h] = out.o, out.lse, out.dq
            sums[0][b, 0] += out.dk.double()
            sums[1][b, 0] += out.dv.double()
    inputs = {"q": q, "k": latent, "v": latent[..., :dv], "do": do, "o": o, "lse": lse, "dq": dq}
    return Call(inputs, *sums)


def padded(dv: Tensor, dk: Tensor) -> Tensor:
    return torch.nn.functional.pad(dv, (0, dk.shape[-1] - dv.shape[-1]))


def inspected(call: Call, dkv: Tensor) -> CaptureDiagnosis:
    capture = Capture.from_tensors({**call.inputs, "dkv": dkv.bfloat16()}, causal="bottom-right", scale=SCALE)
    return attn_diag.inspect_captures([capture], device="cpu").captures[0]


def of_latent(found: CaptureDiagnosis) -> Any:
    return next(q for q in found.observations[0].heads[0].quantities if q.quantity == "dkv")


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sizes", [{}, {"heads": 1, "batch": 2}, {"d": 40, "dv": 40, "rows": 70}])
def test_a_healthy_gradient_is_good(seed: int, sizes: dict[str, int]) -> None:
    call = drawn(seed, **sizes)
    found = inspected(call, call.dk + padded(call.dv, call.dk))
    assert not labels_of(found) & {"wrong", "lossy", "nonfinite"}
    assert of_latent(found).answer == "good"
    # Of two gradients that are each rounded before they are added, as autograd does.
    found = inspected(call, call.dk.bfloat16() + padded(call.dv, call.dk).bfloat16())
    assert of_latent(found).answer in ("good", "undecided")


FAULTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "dV missing": (lambda dk, _: dk, "miss dV"),
    "dK missing": (lambda _, dv: dv, "miss dK"),
    "dV twice": (lambda dk, dv: dk + 2 * dv, "count dV twice"),
    "dK twice": (lambda dk, dv: 2 * dk + dv, "count dK twice"),
    "both twice": (lambda dk, dv: 2 * (dk + dv), "count both uses twice"),
    "the sign of dV": (lambda dk, dv: dk - dv, "dV with the wrong sign"),
    "dV in the last features": (lambda dk, dv: dk + dv.roll(8, -1), "last features"),
    "never written": (lambda dk, _: 0 * dk, "are zero"),
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_wrong_by_name(fault: str, seed: int) -> None:
    change, words = FAULTS[fault]
    call = drawn(10 + seed)
    found = inspected(call, change(call.dk, padded(call.dv, call.dk)))
    assert "wrong" in labels_of(found)
    verdict = of_latent(found)
    assert verdict.answer == "wrong"
    assert words in verdict.words


def test_one_wrong_key_is_wrong_and_one_batch_item() -> None:
    call = drawn(3, batch=2)
    right = call.dk + padded(call.dv, call.dk)
    one = right.clone()
    one[0, 0, 17] *= 1.5
    assert of_latent(inspected(call, one)).answer == "wrong"
    item = right.clone()
    item[1] = call.dk[1]
    assert of_latent(inspected(call, item)).answer == "wrong"


def test_a_coarse_sum_is_lossy_and_not_wrong() -> None:
    call = drawn(5, rows=192)
    right = call.dk + padded(call.dv, call.dk)
    coarse = right * (1 + 0.03 * torch.randn(right.shape, generator=torch.Generator().manual_seed(1)))
    assert of_latent(inspected(call, coarse)).answer == "lossy"


def test_absorbed_sizes_are_read_from_a_file(tmp_path: Path) -> None:
    call = drawn(1, d=576, dv=512, rows=40)
    tensors = {**call.inputs, "dkv": (call.dk + padded(call.dv, call.dk)).bfloat16()}
    capture = Capture.from_tensors(tensors, causal="bottom-right", scale=SCALE)
    path = capture.save(tmp_path / "c.safetensors")
    assert load(path).format_version == "1.1"
    found = attn_diag.inspect(path)
    assert of_latent(found.captures[0]).answer == "good"
    report = found.report()
    assert "dKV" in report
    assert "dK (" not in report  # what stands in for it is there


def test_what_is_no_latent_is_refused() -> None:
    call = drawn(0)
    dkv = call.dk.bfloat16()
    with pytest.raises(InputError, match=r"v is not k\[..., :16\]"):
        inspected(replace(call, inputs={**call.inputs, "v": call.inputs["v"] + 1}), dkv)
    with pytest.raises(InputError, match="dkv must have shape"):
        Capture.from_tensors({**call.inputs, "dkv": dkv[..., :16]})
    wide = torch.cat([call.inputs["v"]] * 2, -1)
    with pytest.raises(InputError, match="v has 32, k 24"):
        Capture.from_tensors({"q": call.inputs["q"], "k": call.inputs["k"], "v": wide, "dkv": dkv})


def test_a_report_without_a_latent_says_nothing_of_it() -> None:
    call = drawn(0)
    capture = Capture.from_tensors(call.inputs, causal="bottom-right", scale=SCALE)
    assert "dKV" not in attn_diag.inspect_captures([capture], device="cpu").report()
