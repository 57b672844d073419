"""What SGLang's dumper keeps becomes captures that hold what was computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds, some
from foreign_dumps import (
    SglangDumper,
    attention,
    inner,
    inputs,
    named,
    only,
    refused,
)
from torch import Tensor

from attn_diag import convert, load

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("version", [2025, 2026])
def test_sglang_layers_steps_and_ranks(tmp_path: Path, version: int) -> None:
    dumper, expected = SglangDumper(tmp_path / "d", version, world_size=2), {}
    for step in (1, 2):
        for rank in (0, 1):
            for layer in (0, 1):
                q, k, v = inputs(rows=20 + step + 2 * rank + 4 * layer, keys=20 + step + 2 * rank + 4 * layer)
                o, _ = attention(q, k, v, "top-left")
                expected[step, rank, layer] = o
                tags: dict[str, Any] = {"step": step, "rank": rank, "layer_id": layer}
                dumper.dump_heads({"attn_q": q, "attn_k": k, "attn_v": v}, **tags)
                # RadixAttention's output has heads and features together.
                dumper.dump_heads({"attn_output": o}, together=True, **tags)
                dumper.dump("mlp_output", torch.randn(5, 5), **tags)
    dumper.dump("input_ids", torch.arange(9), step=3)  # a forward pass without attention is passed over
    written = convert(tmp_path / "d", tmp_path / "c")
    assert len(written) == 8
    assert written[0].name == "step000001_rank0_layer00.safetensors"
    for path in written:
        capture = load(path)
        m = capture.metadata
        assert m.step is not None
        assert m.rank is not None
        assert torch.equal(inner(capture, "o"), expected[m.step, m.rank, some(m.layer)])
        assert (m.layout, m.causal, holds(capture)) == ("BTHD", "top-left", True)
        assert m.extra.get("world_size") == (None if version == 2025 else "2")
        assert "run" not in m.extra  # ranks may hold other heads: never to be stacked
        assert "tokens taken as one sequence" in str(m.notes)
    assert len(convert(tmp_path / "d", tmp_path / "one", layer=1)) == 4
    refused(tmp_path / "d", "no call is of layer 7: they are of 0, 1", layer=7)


def test_sglang_hooks_on_a_whole_model(tmp_path: Path) -> None:
    """``_NonIntrusiveDumper`` in mode "all": inputs and output of RadixAttention by number."""
    dumper, (q, k, v) = SglangDumper(tmp_path / "d"), inputs()
    o, _ = attention(q, k, v, "top-left")
    name = "non_intrusive__model.layers.3.self_attn"
    dumper.dump(f"{name}.qkv_proj.output", torch.randn(24, 128), layer_id=3)
    tensors = {f"{name}.attn.{n}": t for n, t in {"inputs.0": q, "inputs.1": k, "inputs.2": v, "output": o}.items()}
    dumper.dump_heads(tensors, together=True, layer_id=3)
    refused(tmp_path / "d", "say the features of a head with --head-dim")
    capture = only(convert(tmp_path / "d", tmp_path / "c", head_dim=16))
    assert torch.equal(inner(capture, "k"), k)
    assert (capture.metadata.layer, holds(capture)) == (3, True)


def test_sglang_gradients_and_recomputation(tmp_path: Path) -> None:
    """Under activation checkpointing everything is dumped twice; gradients come without the layer of ``set_ctx``."""
    dumper, (q, k, v) = SglangDumper(tmp_path / "d"), inputs()
    o, _ = attention(q, k, v, "top-left")
    names = {"q": q, "k": k, "v": v, "attn_output": o}
    for status in ("original", "recompute"):
        dumper.dump_heads(names, status=status, layer_id=5)
    dumper.dump_heads({f"grad__{name}": t * factor for factor, (name, t) in enumerate(names.items(), start=2)})
    capture = only(convert(tmp_path / "d", tmp_path / "c"))
    assert torch.equal(inner(capture, "do"), o * 5)
    assert torch.equal(inner(capture, "dq"), q * 2)
    assert torch.equal(inner(capture, "dv"), v * 4)
    # With a second layer nobody knows whose gradients those are.
    dumper.dump_heads(names, layer_id=6)
    captures = [load(path) for path in convert(tmp_path / "d", tmp_path / "e")]
    assert ["do" in c.tensors for c in captures] == [False, False]
    assert "left out, of no known layer: grad__q" in str(captures[0].metadata.notes)


def test_sglang_layers_told_by_the_order_of_the_dump(tmp_path: Path) -> None:
    dumper = SglangDumper(tmp_path / "d")
    calls = [inputs(rows=rows, keys=rows) for rows in (12, 14, 16)]
    for q, k, v in calls:
        dumper.dump_heads({"q": q, "k": k, "v": v})
    for q, _, _ in reversed(calls):
        dumper.dump_heads({"grad__q": q, "grad__attn_output": q})
    captures = [load(path) for path in convert(tmp_path / "d", tmp_path / "c")]
    assert [c.q_length for c in captures] == [12, 14, 16]
    assert all(torch.equal(c.tensors["dq"][...], c.tensors["q"][...]) for c in captures)
    assert "call 1 of 3 in this forward pass, by the order of the dump" in str(captures[1].metadata.notes)
    dumper.dump_heads({"k": calls[0][1]})
    refused(tmp_path / "d", "cannot tell which belong to one call: q 3 times, k 4 times, v 3 times")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("seq_lens", torch.tensor([10, 14]), "2 requests in one forward pass"),
        ("positions", torch.cat([torch.arange(10), torch.arange(14)]), "the positions are not 0, 1, 2"),
        ("positions", torch.arange(24) + 8, "keys in the KV cache that the dump does not hold"),
        ("cu_seqlens_q", torch.tensor([0, 10, 24]), "packed (varlen) sequences are not supported"),
    ],
    ids=["seq_lens", "positions", "prefix", "cu_seqlens"],
)
def test_sglang_packed_requests(tmp_path: Path, name: str, value: Tensor, why: str) -> None:
    dumper = SglangDumper(tmp_path / "d")
    dumper.dump_heads(named(inputs(), "q", "k", "v"), layer_id=0)
    dumper.dump("positions", torch.arange(24), step=1)
    dumper.dump("seq_lens", torch.tensor([24]), step=1)
    assert len(convert(tmp_path / "d", tmp_path / "c")) == 1
    dumper.dump(name, value)
    refused(tmp_path / "d", why)


def test_sglang_names_that_need_a_mapping(tmp_path: Path) -> None:
    dumper, (q, k, v) = SglangDumper(tmp_path / "d", 2025), inputs()
    names = {"layer0_q_pre_norm": k, "layer0_q_post_rope": q, "layer0_k_post_rope": k, "layer0_v": v}
    dumper.dump_heads(names)
    refused(tmp_path / "d", "cannot tell which tensors are q, k and v; found layer0_q_pre_norm [24, 2, 16] bfloat16")
    refused(tmp_path / "d", "--map q=NAME")
    mapping = {"q": "layer*_q_post_rope", "k": "layer*_k_post_rope"}
    capture = only(convert(tmp_path / "d", tmp_path / "c", names=mapping))
    assert torch.equal(inner(capture, "q"), q)
    assert capture.metadata.layer == 0
    refused(tmp_path / "d", "no tensor matches q=nothing; found layer0_q_pre_norm", names={"q": "nothing"})
    (first,) = (tmp_path / "d").rglob("*v___dump*")
    refused(first, "holds one tensor; name its folder")
