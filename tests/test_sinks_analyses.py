"""Sinks in what takes heads apart, and in what runs kernels: right, or refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planted_sinks import captured, computed, drawn

import attn_diag
from attn_diag.analyses.microscopy.closed_form import predict_block
from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.kernels import PRESETS, Schedule, emulate_head, preset
from attn_diag.reference import AttentionHead, Masking, row_blocks

CAUSAL = Masking("top-left")


def made(seed: int = 2, rows: int = 96, **more: Any) -> Capture:
    call = drawn(seed, rows=rows, **more)
    return captured(call, computed(call, call.sinks, call.sinks, CAUSAL))


def head(sink: float | None = 1.25, rows: int = 80, d: int = 32) -> AttentionHead:
    g = torch.Generator().manual_seed(4)
    q, k, v, do = (torch.randn(rows, d, generator=g).bfloat16().double() for _ in range(4))
    return AttentionHead(2 * q, k, v, do, d**-0.5, CAUSAL, sink=sink)


def test_identify_recognises_a_recipe_by_its_bits() -> None:
    capture = made(rows=256, batch=1, heads=2)
    found = attn_diag.identify(capture)
    assert found.outcome in ("identified", "ambiguous")
    assert "fa2" in found.recipes
    assert found.candidates[0].agreement == 1.0
    # The same O without the sinks is nobody's.
    other = attn_diag.identify(replace(capture, tensors={n: t for n, t in capture.tensors.items()
                                                         if n not in ("sinks", "dsinks")}))  # fmt: skip
    assert other.outcome == "unknown"
    assert "sinks that the capture does not state" in (other.misfit or "")


@pytest.mark.parametrize("name", PRESETS)
def test_the_microscope_walks_to_the_emulated_bits(name: str) -> None:
    recipe, subject = preset(name, "bf16", 32), head()
    emulated = emulate_head(recipe, subject)
    for row, feature in ((0, 3), (41, 7), (79, 31)):
        found = attn_diag.microscope(subject, recipe=recipe, row=row, feature=feature, whole_head=False)
        assert found.bit_equal
        assert found.walked == float(emulated.o[row, feature])
        without = attn_diag.microscope(head(None), recipe=recipe, row=row, feature=feature, whole_head=False)
        assert abs(found.walked) < abs(without.walked)


def test_the_microscopes_refusals() -> None:
    recipe = replace(preset("fa2", "bf16", 32), schedule=Schedule(key_tile=16, split_keys=32))
    with pytest.raises(InputError, match="does not follow a sink through their merge; choose a recipe without splits"):
        attn_diag.microscope(head(), recipe=recipe, row=70, feature=1, whole_head=False)
    with pytest.raises(InputError, match="above the row's largest score and takes all of it"):
        attn_diag.microscope(head(200.0), recipe="fa2", row=70, feature=1, whole_head=False)


def test_the_closed_form_has_the_sink_in_its_row_sum() -> None:
    subject, recipe = head(), preset("qiu2025", "bf16", 32)
    (block,) = row_blocks(subject, block_rows=80)
    before = predict_block(recipe, subject, block).unrounded - block.out
    # Off by roundings of S and P, not by what the sink takes.
    assert before.norm() < 0.02 * block.out.norm()
    lost = predict_block(recipe, subject, replace(block, sink=None)).unrounded - block.out
    assert lost.norm() > 0.05 * block.out.norm()


def test_attribution_and_what_if_measure_their_recipes_with_the_sink() -> None:
    capture = made()
    attribution = attn_diag.attribute(capture, recipe="bf16-scores")
    assert "scores" in attribution.report()
    found = attn_diag.what_if(capture, recipe="bf16-scores")
    assert found.baseline.errors.o is not None
    # Half a unit of BF16 and BF16 scores, not the sink's own size (which is tens of per cent).
    assert found.baseline.errors.o < 0.02


def test_replay_runs_kernels_with_the_sinks_or_has_them_refused() -> None:
    found = attn_diag.replay(
        made(rows=48, batch=1, heads=2, kv_heads=1), against=["fa2", "sdpa", "attn_diag.attention"]
    )
    by_name = {kernel.name: kernel for kernel in found.captures[0].kernels}
    assert "wrong" not in by_name["captured"].labels
    assert "wrong" not in by_name["recipe fa2"].labels
    assert by_name["recipe fa2"].outcome == "ran"
    assert by_name["sdpa"].outcome == "refused"
    assert "SDPA has no sinks" in (by_name["sdpa"].message or "")
    assert by_name["attn_diag.attention"].outcome == "ran"
    assert "wrong" not in by_name["attn_diag.attention"].labels


def test_what_cannot_know_sinks_refuses_them_by_name() -> None:
    capture = made(rows=32)
    with pytest.raises(InputError, match="SDPA has no sinks"):
        attn_diag.check("sdpa", cases=[], captures=[capture], backward=False, causal="bottom-right", head_dim=32)
    bare = replace(capture, tensors={n: t for n, t in capture.tensors.items() if n not in ("sinks", "dsinks")},
                   metadata=replace(capture.metadata, softmax_offset=0.0))  # fmt: skip
    with pytest.raises(InputError, match="check knows no softmax_offset"):
        attn_diag.check(bare)


def test_certify_recomputes_rows_with_the_sink() -> None:
    found = attn_diag.inspect_captures([made(rows=32, batch=1)], certify=4, device="cpu")
    certificate = found.captures[0].observations[0].heads[0].certificate
    assert certificate is not None
    assert certificate.held
    assert "dsink" in certificate.worst_ratio
