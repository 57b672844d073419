"""FlashInfer's logged calls become captures that hold what was computed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import holds
from foreign_dumps import (
    DECODE,
    PREFILL,
    attention,
    flashinfer_dump,
    inner,
    inputs,
    only,
    refused,
    single_prefill,
    tokens_first,
)

from attn_diag import InputError, convert, inspect_captures

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kv_layout", ["NHD", "HND"])
@pytest.mark.parametrize("safetensors", [False, True])
@pytest.mark.parametrize("keys", [24, 37])
def test_flashinfer_prefill(tmp_path: Path, kv_layout: str, safetensors: bool, keys: int) -> None:
    root = tmp_path / "dumps"
    expected = single_prefill(root, kv_layout=kv_layout, safetensors=safetensors, keys=keys)
    written = convert(root, tmp_path / "captures")
    capture = only(written)
    assert written[0].name == "20260420_101500_001_pid77_single_prefill_with_kv_cache_call0001.safetensors"
    for name, tensor in zip(("q", "k", "v", "o"), expected, strict=False):
        assert torch.equal(inner(capture, name), tensor), name
    torch.testing.assert_close(capture.tensors["lse"][...] * math.log(2), expected[4])
    m = capture.metadata
    assert (m.layout, m.causal, m.lse_base, m.scale) == ("BTHD", "bottom-right", "2", None)
    assert (m.kernel, m.device, m.torch) == ("flashinfer.single_prefill_with_kv_cache (auto)", "cuda:0", "2.11.0")
    assert "lse_base=2: FlashInfer's convention" in str(m.notes)
    assert holds(capture) is True


@pytest.mark.parametrize(
    ("wrong", "why"),
    [({"base": math.e}, "lse_base=e fits"), ({"align": "top-left", "keys": 37}, "causal=top-left fits")],
    ids=["natural-lse", "top-left"],
)
def test_inspect_sees_where_flashinfer_were_otherwise(tmp_path: Path, wrong: dict[str, Any], why: str) -> None:
    single_prefill(tmp_path / "dumps", **wrong)
    capture = only(convert(tmp_path / "dumps", tmp_path / "captures"))
    assumptions = inspect_captures([capture], device="cpu").captures[0].assumptions
    assert assumptions.ok is False
    assert why in assumptions.message


def test_flashinfer_arguments_by_position_and_their_options(tmp_path: Path) -> None:
    nhd = tokens_first(*inputs())
    # Positions as the signature has them: causal is the tenth, sm_scale the fourteenth, window_left the next.
    args = (*nhd, None, None, None, torch.bfloat16, None, None, True, "NHD", "NONE", False, 0.125, 7, 30.0)
    flashinfer_dump(tmp_path / "d", "single_prefill_with_kv_cache", args, {"backend": "fa3"}, nhd[0])
    m = only(convert(tmp_path / "d", tmp_path / "c")).metadata
    assert (m.causal, m.scale, m.window, m.softcap) == ("bottom-right", 0.125, (7, -1), 30.0)
    assert str(m.kernel).endswith("(fa3)")
    shuffled = PREFILL.replace("causal: bool = False, ", "").replace("q: torch", "causal: bool, q: torch", 1)
    flashinfer_dump(tmp_path / "s", "single_prefill_with_kv_cache", args, {}, nhd[0], signature=shuffled)
    refused(tmp_path / "s", "the dump has no tensor v")


def test_flashinfer_decode(tmp_path: Path) -> None:
    q, k, v = inputs(rows=1, keys=30)
    window = torch.zeros(1, 30, dtype=torch.bool)
    window[:, 30 - 1 - 9 :] = True
    o, lse = attention(q, k, v, mask=window)
    args = (q[0, :, 0], *tokens_first(k, v))
    result, kwargs = (o[0, :, 0], lse[0, :, 0] / math.log(2)), {"window_left": 9, "return_lse": True}
    flashinfer_dump(tmp_path / "d", "single_decode_with_kv_cache", args, kwargs, result, signature=DECODE)
    capture = only(convert(tmp_path / "d", tmp_path / "c"))
    assert torch.equal(inner(capture, "q"), q)
    assert torch.equal(inner(capture, "o"), o)
    assert tuple(capture.tensors["lse"].shape) == (1, 4, 1)
    assert capture.metadata.window == (9, -1)
    assert holds(capture) is True


def test_flashinfer_custom_mask_counts_instead_of_causal(tmp_path: Path) -> None:
    q, k, v = inputs()
    mask = torch.rand(24, 24, generator=torch.Generator().manual_seed(3)) > 0.4
    mask |= torch.eye(24, dtype=torch.bool)
    (o,) = tokens_first(attention(q, k, v, mask=mask)[0])
    kwargs = {"custom_mask": mask, "causal": True}
    flashinfer_dump(tmp_path / "d", "single_prefill_with_kv_cache", tokens_first(q, k, v), kwargs, o)
    capture = only(convert(tmp_path / "d", tmp_path / "c"))
    assert torch.equal(capture.tensors["mask"][...], mask)
    assert (capture.metadata.causal, holds(capture)) == ("none", True)


def test_flashinfer_fp8_and_its_factors(tmp_path: Path) -> None:
    q, k, v = (t.to(torch.float8_e4m3fn) for t in inputs())
    scales = [torch.tensor([0.5, 1.0, 1.5, 2.0]), torch.tensor([0.25, 0.5]), torch.tensor([1.0, 2.0])]
    exact = [t.float() * s[None, :, None, None] for t, s in zip((q, k, v), scales, strict=True)]
    (o,) = tokens_first(attention(exact[0], exact[1], exact[2])[0].bfloat16())
    args = (*tokens_first(q, k, v), *scales, torch.bfloat16)
    flashinfer_dump(tmp_path / "d", "single_prefill_with_kv_cache", args, {}, o)
    capture = only(convert(tmp_path / "d", tmp_path / "c"))
    assert torch.equal(capture.tensors["k_descale"][...], scales[1][None])
    assert holds(capture) is True


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "paged": ("BatchPrefillWithPagedKVCacheWrapper.run", {}, "a paged KV cache: the dump holds pages"),
    "paged-decode": ("BatchDecodeWithPagedKVCacheWrapper.run", {}, "a paged KV cache"),
    "ragged": ("BatchPrefillWithRaggedKVCacheWrapper.run", {}, "packed (varlen) sequences"),
    "jit": ("single_prefill_with_kv_cache_with_jit_module", {}, "a kernel of the caller's own"),
    "rope": ("single_prefill_with_kv_cache", {"pos_encoding_mode": "ROPE_LLAMA"}, "the kernel itself rotates q and k"),
    "bits": ("single_prefill_with_kv_cache", {"packed_custom_mask": torch.zeros(9)}, "dump a call with custom_mask"),
}


@pytest.mark.parametrize(("function", "kwargs", "why"), REFUSED.values(), ids=REFUSED)
def test_flashinfer_calls_that_are_refused(tmp_path: Path, function: str, kwargs: dict[str, Any], why: str) -> None:
    args = tokens_first(*inputs())
    flashinfer_dump(tmp_path / "d", function, args, kwargs, args[0], number=2)
    refused(tmp_path / "d", why)
    # Beside a call that can be converted it is named, and the other is converted.
    single_prefill(tmp_path / "d")
    errors: list[InputError] = []
    assert len(convert(tmp_path / "d", tmp_path / "c", skip=errors.append)) == 1
    assert [why in str(error) for error in errors] == [True]


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"sm_scale": "big"}, "sm_scale='big' cannot be read as a number"),
        ({"sm_scale": [0.5]}, "sm_scale=[0.5] cannot be read as a number"),
        ({"sm_scale": 2**2000}, "cannot be read as a number"),
        ({"sm_scale": torch.ones(3)}, "sm_scale=tensor [3] float32 cannot be read as a number"),
        ({"logits_soft_cap": {"a": 1}}, "logits_soft_cap={'a': 1} cannot be read as a number"),
        ({"window_left": math.inf}, "window_left=inf cannot be read as an integer"),
        ({"window_left": 2.5}, "window_left=2.5 cannot be read as an integer"),
        ({"causal": "yes"}, "causal='yes' cannot be read as true or false"),
        ({"kv_layout": "DHN"}, "kv_layout must be NHD or HND, got 'DHN'"),
        ({"custom_mask": torch.ones(3, 3) > 0}, "custom_mask must be a bool tensor [24, 24], got tensor [3, 3] bool"),
        ({"custom_mask": "causal"}, "custom_mask must be a bool tensor [24, 24], got 'causal'"),
        ({"scale_k": "half"}, "the scale of k, 'half', cannot be read as numbers"),
    ],
)
def test_flashinfer_arguments_that_are_refused(tmp_path: Path, kwargs: dict[str, Any], why: str) -> None:
    flashinfer_dump(tmp_path / "d", "single_prefill_with_kv_cache", tokens_first(*inputs()), kwargs, None)
    refused(tmp_path / "d", why)


@pytest.mark.parametrize("key", ["input_metadata", "tensor_details", "versions"])
def test_flashinfer_records_of_another_form(tmp_path: Path, key: str) -> None:
    folder = flashinfer_dump(tmp_path / "d", "single_prefill_with_kv_cache", tokens_first(*inputs()), {}, None)
    record = json.loads((folder / "metadata.jsonl").read_text())
    (folder / "metadata.jsonl").write_text(json.dumps({**record, key: ["a"]}))
    refused(tmp_path / "d", f"{key} must be a JSON object, got ['a']")
    (folder / "metadata.jsonl").write_text(json.dumps({**record, key: None}))
    assert len(convert(tmp_path / "d", tmp_path / "c")) == 1


def test_flashinfer_calls_of_other_kinds_are_passed_over(tmp_path: Path) -> None:
    args = tuple(t[0] for t in inputs())
    for number, name in enumerate(("rmsnorm", "BatchPrefillWithPagedKVCacheWrapper.plan", "mm_fp8"), start=2):
        flashinfer_dump(tmp_path / "d", name, args, {}, args[0], number=number)
    refused(tmp_path / "d", "no attention call among the 3 calls")
    single_prefill(tmp_path / "d")
    assert len(convert(tmp_path / "d", tmp_path / "c")) == 1


def test_flashinfer_process_that_died_in_the_call(tmp_path: Path) -> None:
    folder = flashinfer_dump(tmp_path / "d", "single_prefill_with_kv_cache", tokens_first(*inputs()), {}, None)
    with (folder / "metadata.jsonl").open("a") as file:
        file.write('{"function_name": "single_prefi')
    capture = only(convert(folder / "inputs.pt", tmp_path / "one.safetensors"))
    assert "o" not in capture.tensors
    assert "no output: execution_status is inputs_saved" in str(capture.metadata.notes)
    (folder / "inputs.pt").unlink()
    refused(folder, "the process died before they were written")
    (folder / "metadata.jsonl").write_text("{")
    refused(folder, "no complete record")


def test_flashinfer_replays_of_a_cuda_graph(tmp_path: Path) -> None:
    """``flush_graph_dumps``: a folder a replay, and the last of them again in the call's own folder."""
    args = tokens_first(*inputs())
    name = "single_prefill_with_kv_cache"
    base = flashinfer_dump(tmp_path / "d", name, args, {}, args[0])
    for flush in (1, 2):
        folder = base / "graph_flushes" / f"flush_{flush:04d}"
        flashinfer_dump(tmp_path / "d", name, args, {}, args[0], folder=folder)
    written = convert(tmp_path / "d", tmp_path / "c")
    assert [path.stem for path in written] == [f"{base.name}_flush_0001", f"{base.name}_flush_0002"]
