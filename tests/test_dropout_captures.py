"""Captures with dropout: written, read, refused; and what commands other than inspect make of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from planted_dropouts import captured, computed, drawn, memory_efficient

import attn_diag
from attn_diag import Capture
from attn_diag.captures.loading import load
from attn_diag.captures.merge import merged_over_ranks
from attn_diag.errors import InputError
from attn_diag.reference import Masking

CAUSAL = Masking("bottom-right")


def made(seed: int = 0, **metadata: Any) -> Capture:
    call = drawn(seed, p=0.25)
    return captured(call, computed(call, CAUSAL), causal="bottom-right", **metadata)


def test_a_capture_survives_its_file(tmp_path: Path) -> None:
    capture = made()
    again = load(capture.save(tmp_path / "c.safetensors"))
    assert capture.format_version == again.format_version == "1.1"
    assert again.metadata.dropout_p == 0.25
    for batch, head in ((0, 0), (1, 3)):
        ours, theirs = capture.dropout(batch, head), again.dropout(batch, head)
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours.kept, theirs.kept)


def test_a_p_of_zero_is_no_dropout(tmp_path: Path) -> None:
    call = drawn(0)
    capture = Capture.from_tensors({"q": call.q, "k": call.k, "v": call.v}, dropout_p=0.0)
    assert capture.format_version == "1"
    assert load(capture.save(tmp_path / "c.safetensors")).dropout(0, 0) is None


@pytest.mark.parametrize(("change", "p", "message"), [
    (lambda _: None, 0.1, "dropout_p=0.1 without 'dropout_mask'"),
    (lambda t: t, None, "without dropout_p"),
    (lambda t: t, 0.0, "without dropout_p"),
    (lambda t: t, 1.0, "below 1"),
    (lambda t: t.float(), 0.1, "must be bool.*S_dmask >= 0"),
    (lambda t: t[:, :1], 0.1, r"\[B, Hq, Tq, Tk\] = \[2, 4, 64, 64\], got \[2, 1, 64, 64\]"),
])  # fmt: skip
def test_what_cannot_be_is_refused(change: Any, p: float | None, message: str) -> None:
    call = drawn(0)
    tensors = {"q": call.q, "k": call.k, "v": call.v, "dropout_mask": change(call.kept)}
    with pytest.raises(InputError, match=message):
        Capture.from_tensors(tensors, dropout_p=p)


def test_packed_sequences_with_dropout_are_refused() -> None:
    q, k, v = (torch.randn(1, 2, 32, 16).bfloat16() for _ in range(3))
    given = {"cu_seqlens_q": torch.tensor([0, 10, 32]), "dropout_mask": torch.ones(1, 2, 32, 32, dtype=torch.bool)}
    with pytest.raises(InputError, match="not supported beside packed sequences"):
        Capture.from_tensors({"q": q, "k": k, "v": v, **given}, dropout_p=0.1)


@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
@pytest.mark.parametrize("axis", [0, 1])
def test_ranks_are_merged(axis: int, layout: str) -> None:
    """Data parallel (batch items) and tensor parallel (heads)."""
    whole = made()
    parts = []
    for rank in (0, 1):
        tensors = {}
        for name, source in whole.tensors.items():
            t = source[...]
            half = t.shape[axis] // 2
            t = t.narrow(axis, rank * half, half)
            tensors[name] = t.transpose(1, 2) if layout == "BTHD" and name not in ("lse", "dropout_mask") else t
        extra = {"run": "a", "world_size": "2"}
        offset = 2 * rank if axis else 0
        parts.append(
            Capture.from_tensors(
                tensors, causal="bottom-right", dropout_p=0.25, rank=rank, head_offset=offset, layout=layout, step=0,
                layer=0, extra=extra,
            )
        )  # fmt: skip
    (merged,), _ = merged_over_ranks(parts)
    assert torch.equal(merged.tensors["dropout_mask"][...], whole.tensors["dropout_mask"][...])


def test_inspect_takes_the_tensors_of_a_call() -> None:
    call = drawn(1, p=0.5)
    outputs: dict[str, Any] = {**computed(call, Masking())}
    found = attn_diag.inspect(call.q, call.k, call.v, **outputs, do=call.do, dropout_mask=call.kept, dropout_p=0.5,
                              device="cpu", certify=2)  # fmt: skip
    heads = found.captures[0].observations[0].heads
    assert all(q.answer == "good" for h in heads for q in h.quantities if q.quantity in ("o", "lse", "dq", "dk", "dv"))


def test_identify_names_the_recipe_and_attribute_its_sites() -> None:
    call = drawn(2, p=0.25, batch=1, rows=128, d=64)
    capture = captured(call, computed(call, CAUSAL), causal="bottom-right")
    found = attn_diag.identify(capture, device="cpu")
    assert "fa2" in found.report()
    shares = attn_diag.attribute(capture, device="cpu")
    assert "cast of P̄" in shares.report()


def test_the_rounded_factor_of_torch_s_efficient_kernel_is_known() -> None:
    call = drawn(2, p=0.1, batch=1, heads=2, kv_heads=2, rows=128, keys=128, d=64)
    capture = captured(call, memory_efficient(call, causal=True), causal="bottom-right")
    found = attn_diag.identify(capture, device="cpu")
    assert "efficient" in found.report()
    report = attn_diag.attribute(capture, device="cpu").report()
    assert "rounding of 1 / (1 - p) of dropout" in report


def test_details_have_the_microscope() -> None:
    found = attn_diag.inspect_captures([made()], device="cpu", details=1)
    assert any(h.microscope is not None for h in found.captures[0].observations[0].heads)
