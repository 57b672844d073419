"""Gemma-2 of transformers runs: its softcap is captured, judged and monitored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import captured, healthy, transformers_model

import attn_diag
from attn_diag.captures.capture import Capture

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def labels(captures: list[Capture]) -> set[str]:
    found = attn_diag.inspect_captures(captures).captures
    assert all(c.assumptions.ok for c in found)
    return {w for c in found for h in c.observations[0].heads if h.verdict for w in h.verdict.labels}


@pytest.mark.parametrize("how", ["fp32", "autocast", "bf16"])
def test_gemma_2_is_captured_with_its_softcap_and_never_wrong(how: str, tmp_path: Path) -> None:
    tiny = transformers_model("gemma2", "eager")
    tiny.model.to(torch.bfloat16 if how == "bf16" else torch.float32)
    captures = captured(tiny, tmp_path / "c", autocast=how == "autocast")
    assert [c.metadata.softcap for c in captures] == [2.0, 2.0]
    assert all({"do", "dq", "dk", "dv", "x", "w_q"} <= c.tensors.keys() for c in captures)
    # In 16 bits eager attention rounds scores, their tanh and P, where a fused kernel rounds P alone.
    assert labels(captures) <= ({"undecided", "clean"} if how == "fp32" else {"lossy", "undecided", "clean"})


def test_a_softcap_that_is_not_stated_is_found(tmp_path: Path) -> None:
    capture = captured(transformers_model("gemma2", "eager"), tmp_path / "c")[0]
    bare = replace(capture, metadata=replace(capture.metadata, softcap=None))
    found = attn_diag.inspect_captures([bare], device="cpu").captures[0]
    assert not found.assumptions.ok


def test_a_short_healthy_training_raises_no_alarm() -> None:
    """200 steps by hand: none either, in autocast and in pure BF16."""
    healthy(transformers_model("gemma2", "eager"), 6)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers 5.17 of torch's block masks
@pytest.mark.parametrize("how", ["fp32", "bf16"])
def test_gemma_2_with_flex_attention_on_a_gpu(how: str, tmp_path: Path) -> None:
    """On a CPU FlexAttention has no backward; its forward was captured there by hand, O as good as it can be."""
    tiny = transformers_model("gemma2", "flex_attention")
    tiny.model.to("cuda", torch.bfloat16 if how == "bf16" else torch.float32)
    captures = captured(tiny, tmp_path / "c")
    assert [c.metadata.softcap for c in captures] == [2.0, 2.0]
    assert "wrong" not in labels(captures)
