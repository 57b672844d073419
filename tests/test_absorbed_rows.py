"""Captures with rows that a finite additive mask hides wholly: they neither blind ``inspect`` nor drown its figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from attn_diag import identify, inspect
from attn_diag.captures.absorbed import WithoutAbsorbedRows
from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.results.diagnosis import Diagnosis
from attn_diag.results.heads import HeadDiagnosis
from attn_diag.results.identification import Identification

FEWER, LENGTH = 8, 40
LOWEST = torch.finfo(torch.bfloat16).min


def left_padded(value: float) -> Tensor:
    """Causal; the first rows and keys of the first of two sequences are padding."""
    mask = torch.zeros(2, 1, LENGTH, LENGTH)
    mask = mask.masked_fill(torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), value)
    mask[0, ..., :FEWER] = value
    mask[0, :, :FEWER] = value
    return mask.bfloat16()


def called(value: float, *, given: bool = False, eager: bool = False) -> dict[str, Any]:
    """Torch's own attention; ``given``: the last padded row has a gradient."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, LENGTH, 32).bfloat16().requires_grad_() for _ in range(3))
    do, mask = torch.randn(2, 2, LENGTH, 32).bfloat16(), left_padded(value)
    do[0, :, : FEWER - given] = 0
    if eager:
        o = ((q @ k.mT) * 32**-0.5 + mask).float().softmax(-1).bfloat16() @ v
    else:
        o = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.autograd.backward(o, do)
    found = {"q": q, "k": k, "v": v, "o": o, "mask": mask}
    return {name: t.detach() for name, t in found.items()} | {"do": do, "dq": q.grad, "dk": k.grad, "dv": v.grad}


def heads(found: Diagnosis) -> list[HeadDiagnosis]:
    return [head for head in found.captures[0].observations[0].heads if head.head is not None]


@pytest.mark.parametrize(("value", "given"), [(LOWEST, True), (-1e9, False)])
def test_a_sound_kernel_is_accused_of_nothing(value: float, given: bool) -> None:
    found = inspect(**called(value, given=given))
    assert found.captures[0].assumptions.ok
    assert any("8 rows" in said for said in found.captures[0].assumptions.defaults)
    for head in heads(found):
        assert head.verdict is not None
        assert not {"wrong", "lossy", "biased", "nonfinite"} & {*head.verdict.labels}
        assert {q.quantity for q in head.quantities} == {"o", "dq", "dk", "dv"}


@pytest.mark.parametrize(("quantity", "value"), [("o", -1e9), ("dv", LOWEST)])
def test_what_is_a_tenth_too_large_is_wrong(quantity: str, value: float) -> None:
    call = called(value, given=True)
    for head in heads(inspect(**{**call, quantity: call[quantity] * 1.1})):
        (wrong,) = (q for q in head.quantities if q.answer == "wrong")
        assert wrong.quantity == quantity
        assert "are 1.1 times the true ones" in wrong.words


def test_gradients_of_keys_are_judged_in_sequences_whose_part_is_known() -> None:
    call = called(-1e9, given=True)
    padded = {name: t[:1] for name, t in call.items()}
    (head, _) = heads(inspect(**padded))
    assert [said for said in head.not_judged if said.startswith(("dK", "dV"))] == [
        f"{name} (rows to which the mask leaves no key have a gradient)" for name in ("dK", "dV")
    ]
    eager = Capture.from_tensors(
        {n: t[:1] for n, t in called(LOWEST, given=True, eager=True).items()}, kernel="x eager"
    )
    (head, _) = heads(inspect(eager))
    assert {q.quantity for q in head.quantities} == {"o", "dq", "dv"}
    assert all(q.answer != "wrong" for q in head.quantities)


def test_gradients_of_keys_that_were_judged_in_other_sequences_alone_are_not_said_to_be_right() -> None:
    """A kernel ignores the padding: dK and dV of that sequence are wrong, and not known."""
    call = called(LOWEST, given=True)
    q, k, v = (call[name].clone().requires_grad_() for name in "qkv")
    o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.autograd.backward(o, call["do"])
    found = inspect(**{**call, "o": o.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad})
    text = " ".join(found.report().split())
    assert found.labels == {"wrong"}
    assert "dK and dV of batch item 0 (rows to which the mask leaves no key have a gradient)" in text
    for head in heads(found):
        assert head.verdict is not None
        assert not [said for said in head.verdict.reasons if " right" in said and ("dK" in said or "dV" in said)]
    assert "dV are right" not in text
    assert "dV is right" not in text


def test_nan_made_in_such_a_row_is_the_kernels() -> None:
    call = called(-1e9)
    call["o"][0, 1, 3, 5] = torch.nan
    sound, wrong = heads(inspect(**call))
    assert wrong.verdict is not None
    assert wrong.verdict.labels[0] == "nonfinite"
    assert sound.verdict is not None
    assert not {"wrong", "lossy", "nonfinite"} & {*sound.verdict.labels}


def test_a_file_in_another_layout_is_read_part_by_part(tmp_path: Path) -> None:
    call = called(-1e9, given=True)
    turned = {n: t if n == "mask" else t.transpose(1, 2).contiguous() for n, t in call.items()}
    path = Capture.from_tensors(turned, layout="BTHD").save(tmp_path / "turned.safetensors")
    capture = load(path)
    found = WithoutAbsorbedRows.of(capture).capture
    one, other = (c.read("o", 0, 1) for c in (found, capture))
    assert one is not None
    assert other is not None
    assert bool((one[:FEWER] == 0).all())
    assert torch.equal(one[FEWER:], other[FEWER:])
    assert WithoutAbsorbedRows.of(capture).unknown[0] == {"dk", "dv", "dkv", "dmask"}


def test_other_captures_are_left_alone() -> None:
    call = called(-1e9)
    for mask in (left_padded(-1e4), left_padded(-1e9) == 0, None):
        capture = Capture.from_tensors({**call, "mask": mask})
        assert WithoutAbsorbedRows.of(capture).capture is capture
    sinks = Capture.from_tensors({**call, "sinks": torch.zeros(2)})
    assert WithoutAbsorbedRows.of(sinks).capture is sinks


def test_bits_identify_the_kernel_beside_them() -> None:
    call = called(-1e9)
    found = identify(*(call[name] for name in "qkv"), o=call["o"], mask=call["mask"])
    assert isinstance(found, Identification)
    assert any("split" in name or "fa2" in name for name in found.recipes), found.verdict
