"""Other tools' dumps, written the way those tools write them, become captures that hold what was computed."""

from __future__ import annotations

import functools
import json
import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from builders import Explosive, holds, some
from command_line import Run
from safetensors.torch import save_file
from torch import Tensor

from attn_diag import InputError, convert, inspect_captures, load
from attn_diag.captures.capture import Capture
from attn_diag.captures.dumps.names import Leaf, choose, parse_map, role_of

pytestmark = pytest.mark.slow

# The upstream files that the writers below follow, line by line where it matters.
FLASHINFER = "flashinfer-ai/flashinfer 008a2836 flashinfer/api_logging.py"
SGLANG_2025 = "sgl-project/sglang 5a7255c6 python/sglang/srt/debug_utils/dumper.py"
SGLANG_2026 = "sgl-project/sglang 00d35548 python/sglang/srt/debug_utils/dumper.py"


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: str = "none", scale: float | None = None, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """O (in q's dtype) and natural LSE (float32) of [B, H, T, D] tensors, computed in float64."""
    group, rows, keys = q.shape[1] // k.shape[1], q.shape[2], k.shape[2]
    wide_k, wide_v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = (scale or q.shape[3] ** -0.5) * q.double() @ wide_k.mT
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if causal != "none":
        seen = seen.tril(keys - rows if causal == "bottom-right" else 0)
    if mask is not None:
        seen = seen & mask
    scores = scores.masked_fill(~seen, -math.inf)
    return (scores.softmax(-1) @ wide_v).to(q.dtype), scores.logsumexp(-1).float()


def inputs(heads: int = 4, kv_heads: int = 2, rows: int = 24, keys: int = 24, batch: int = 1) -> tuple[Tensor, ...]:
    """q, k, v in BF16, [B, H, T, D] with D = 16."""
    generator = torch.Generator().manual_seed(rows + 100 * heads)
    shapes = ((batch, heads, rows, 16), (batch, kv_heads, keys, 16), (batch, kv_heads, keys, 16))
    return tuple(torch.randn(shape, generator=generator).bfloat16() for shape in shapes)


def inner(capture: Capture, name: str) -> Tensor:
    """A tensor of a capture as [B, H, T, D]."""
    tensor = capture.tensors[name][...]
    return tensor.transpose(1, 2) if capture.metadata.layout == "BTHD" and tensor.ndim == 4 else tensor


def tokens_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[1, H, T, D] as [T, H, D]."""
    return tuple(tensor[0].transpose(0, 1).contiguous() for tensor in tensors)


def only(paths: list[Path]) -> Capture:
    (path,) = paths
    return load(path)


def refused(source: Path, why: str, **options: Any) -> None:
    """Converting the dump says why it cannot be, and writes nothing."""
    target = source.parent / "refused"
    with pytest.raises(InputError, match=re.escape(why)):
        convert(source, target, **options)
    assert not target.exists()


PREFILL = (
    "(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale_q: Optional[torch.Tensor] = None, "
    "scale_k: Optional[torch.Tensor] = None, scale_v: Optional[torch.Tensor] = None, "
    "o_dtype: Optional[torch.dtype] = None, custom_mask: Optional[torch.Tensor] = None, "
    "packed_custom_mask: Optional[torch.Tensor] = None, causal: bool = False, kv_layout: str = 'NHD', "
    "pos_encoding_mode: str = 'NONE', use_fp16_qk_reduction: bool = False, sm_scale: Optional[float] = None, "
    "window_left: int = -1, logits_soft_cap: Optional[float] = None, rope_scale: Optional[float] = None, "
    "rope_theta: Optional[float] = None, backend: str = 'auto', return_lse: bool = False) "
    "-> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]"
)
DECODE = (
    "(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_layout: str = 'NHD', pos_encoding_mode: str = 'NONE', "
    "use_tensor_cores: bool = False, q_scale: Optional[float] = None, k_scale: Optional[float] = None, "
    "v_scale: Optional[float] = None, window_left: int = -1, logits_soft_cap: Optional[float] = None, "
    "sm_scale: Optional[float] = None, rope_scale: Optional[float] = None, rope_theta: Optional[float] = None, "
    "return_lse: bool = False) -> Union[torch.Tensor, Tuple[torch.Tensor, torch.Tensor]]"
)


def flashinfer_dump(
    root: Path,
    function: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    *,
    signature: str = PREFILL,
    number: int = 1,
    safetensors: bool = False,
    folder: Path | None = None,
) -> Path:
    """As ``_dump_function_inputs`` and ``_dump_function_outputs`` write a call; ``result`` None: it never returned."""
    folder = folder or root / f"20260420_101500_{number:03d}_pid77_{function}_call{number:04d}"
    folder.mkdir(parents=True)

    def extract(named: list[tuple[str, Any]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {key: value for key, value in named if isinstance(value, Tensor)}
        others = {key: value for key, value in named if not isinstance(value, Tensor)}
        return tensors, {
            key: {"type": "torch.dtype", "value": str(value)} if isinstance(value, torch.dtype) else value
            for key, value in others.items()
        }

    def write(tensors: dict[str, Tensor], kind: str) -> None:
        if safetensors:
            save_file({key: t.contiguous() for key, t in tensors.items()}, folder / f"{kind}.safetensors")
        else:
            torch.save(tensors, folder / f"{kind}.pt")

    given = [(f"arg_{i}", value) for i, value in enumerate(args)] + [(f"kwarg_{k}", v) for k, v in kwargs.items()]
    tensors, metadata = extract(given)
    write(tensors, "inputs")
    record: dict[str, Any] = {
        "function_name": function,
        "module": "flashinfer.prefill",
        "call_sequence": number,
        "process_id": 77,
        "input_metadata": metadata,
        "output_metadata": {},
        "tensor_info": {"input_tensor_keys": list(tensors), "output_tensor_keys": []},
        "tensor_details": {key: {"shape": list(t.shape), "device": "cuda:0"} for key, t in tensors.items()},
        "tensor_format": "safetensors" if safetensors else "torch",
        "function_signature": signature,
        "versions": {"torch": "2.11.0", "python": "3.12", "flashinfer": "0.6.4"},
        "execution_status": "inputs_saved",
    }
    lines = [json.dumps(record)]
    if result is not None:
        results = (
            [("result", result)] if isinstance(result, Tensor) else [(f"result_{i}", r) for i, r in enumerate(result)]
        )
        outputs, record["output_metadata"] = extract(results)
        write(outputs, "outputs")
        lines.append(json.dumps({**record, "execution_status": "completed"}))
    (folder / "metadata.jsonl").write_text("".join(f"{line}\n" for line in lines))
    with (root / "session.jsonl").open("a") as session:
        session.writelines(f"{line}\n" for line in lines)
    return folder


def single_prefill(
    root: Path,
    *,
    kv_layout: str = "NHD",
    keys: int = 24,
    base: float = 2.0,
    align: str = "bottom-right",
    **options: Any,
) -> tuple[Tensor, ...]:
    """A call of ``single_prefill_with_kv_cache``: [T, H, D] tensors, LSE of base 2 as [T, H]."""
    q, k, v = inputs(keys=keys)
    o, lse = attention(q, k, v, align, options.pop("sm_scale", None))
    of_kv = (k[0], v[0]) if kv_layout == "HND" else tokens_first(k, v)
    result = *tokens_first(o), (lse[0].T / math.log(base)).contiguous()
    args = (*tokens_first(q), *of_kv)
    kwargs = {"causal": True, "return_lse": True, "kv_layout": kv_layout}
    flashinfer_dump(root, "single_prefill_with_kv_cache", args, kwargs, result, **options)
    return q, k, v, o, lse


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


class SglangDumper:
    """Writes as ``_Dumper.dump`` of SGLang does: 2025's bare tensors, or 2026's value and meta."""

    def __init__(self, root: Path, version: int = 2026, world_size: int = 1, **kept: Any) -> None:
        self.root, self.version, self.world_size, self.context = root, version, world_size, kept
        self.index = 0

    def dump(self, name: str, value: Any, *, step: int = 1, rank: int = 0, status: str = "disabled", **kw: Any) -> None:
        self.index += 1
        if self.version == 2025:
            tags = {"forward_pass_id": step, "rank": rank, "name": name, "dump_index": self.index, **kw}
            folder, content = self.root / "sglang_dump_1771.5", value
        else:
            tags = {"step": step, "rank": rank, "dump_index": self.index, "name": name}
            tags |= {} if name.startswith("grad__") else {"recompute_status": status}
            tags |= kw
            folder = self.root / "dump_20260420_101500_123456"
            meta = {**tags, "world_rank": rank, "world_size": self.world_size}
            content = {"value": value, "meta": meta}
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(content, folder / ("___".join(f"{k}={v}" for k, v in tags.items()) + ".pt"))

    def dump_heads(self, tensors: dict[str, Tensor], *, together: bool = False, **tags: Any) -> None:
        """Tensors [1, H, T, D] as [T, H, D], or [T, H * D] with heads and features ``together``."""
        for name, first in zip(tensors, tokens_first(*tensors.values()), strict=True):
            self.dump(name, first.flatten(1) if together else first, **tags)


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


def named(tensors: tuple[Tensor, ...], *names: str) -> dict[str, Any]:
    return dict(zip(names, tensors, strict=True))


def layer_tensors(layers: int = 3) -> list[tuple[Tensor, ...]]:
    """(q, k, v, o) of several layers, causal, each of its own length."""
    found: list[tuple[Tensor, ...]] = []
    for layer in range(layers):
        q, k, v = inputs(rows=12 + 2 * layer, keys=12 + 2 * layer)
        found.append((q, k, v, attention(q, k, v, "top-left")[0]))
    return found


def hugging_face(tensors: tuple[Tensor, ...]) -> dict[str, Any]:
    """Hugging Face's names; attn_output is [B, T, H, D] there, the others [B, H, T, D]."""
    return named(
        (*tensors[:3], tensors[3].transpose(1, 2)), "query_states", "key_states", "value_states", "attn_output"
    )


QKVO = ("q", "k", "v", "o")


def converted(folder: Path, content: Any, **options: Any) -> Capture:
    """The capture made of what was given to ``torch.save``, in folder / "dump.pt"."""
    torch.save(content, folder / "dump.pt")
    return only(convert(folder / "dump.pt", folder / "captures", force=True, **options))


def flat(layers: list[tuple[Tensor, ...]], key: str) -> dict[str, Tensor]:
    """One dict for all layers; ``key`` with the places {n} and {i} for the name and the layer."""
    return {key.format(n=n, i=i): x for i, t in enumerate(layers) for n, x in zip(QKVO, t, strict=True)}


NESTINGS: dict[str, Callable[[list[tuple[Tensor, ...]]], Any]] = {
    "list-of-dicts": lambda layers: [named(t, *QKVO) for t in layers],
    "list-of-tuples": lambda layers: [tuple(t) for t in layers],
    "dict-of-lists": lambda layers: {n: [t[i] for t in layers] for i, n in enumerate(QKVO)},
    "numbered-dicts": lambda layers: {i: named(t, "query", "key", "value", "out") for i, t in enumerate(layers)},
    "named-dicts": lambda layers: {f"layer_{i}": hugging_face(t) for i, t in enumerate(layers)},
    "dotted": lambda layers: flat(layers, "layers.{i}.attn.{n}"),
    "suffixed": lambda layers: flat(layers, "{n}_{i}"),
    "prefixed": lambda layers: {
        k.replace("_o", "_attn_out"): t for k, t in flat(layers, "layer{i}_{n}").items()
    },
    "inputs-outputs": lambda layers: {
        "model": [{"inputs": named(t[:3], "q", "k", "v"), "outputs": {"attn_output": t[3]}} for t in layers]
    },
}  # fmt: skip


@pytest.mark.parametrize("nest", NESTINGS.values(), ids=NESTINGS)
def test_torch_dumps_of_several_layers(tmp_path: Path, nest: Callable[..., Any]) -> None:
    layers = layer_tensors()
    torch.save(nest(layers), tmp_path / "dump.pt")
    captures = [load(path) for path in convert(tmp_path / "dump.pt", tmp_path / "c")]
    assert [c.metadata.layer for c in captures] == [0, 1, 2]
    for capture, tensors in zip(captures, layers, strict=True):
        for name, tensor in zip(QKVO, tensors, strict=True):
            assert torch.equal(inner(capture, name), tensor), name
        assert (capture.metadata.causal, capture.metadata.layout, holds(capture)) == ("top-left", "BHTD", True)


def test_torch_dicts_told_apart_by_their_own_names(tmp_path: Path) -> None:
    first, second = (named(t, *QKVO) for t in layer_tensors(2))
    torch.save({"encoder": first, "decoder": second}, tmp_path / "dump.pth")
    written = convert(tmp_path / "dump.pth", tmp_path / "c")
    assert [path.name for path in written] == ["dump_encoder.safetensors", "dump_decoder.safetensors"]


def test_torch_metadata_of_each_call(tmp_path: Path) -> None:
    """What a dict states is of the calls below it; what lies beside them is of all."""
    first, second = (named(t[:3], "q", "k", "v") for t in layer_tensors(2))
    content = {
        "encoder": {**first, "causal": False},
        "decoder": {**second, "is_causal": torch.tensor(True), "sm_scale": torch.tensor(0.5)},
        "config": {"softcap": 30.0, "window_size": torch.tensor([4, 0])},
    }
    torch.save(content, tmp_path / "dump.pt")
    encoder, decoder = (load(path).metadata for path in convert(tmp_path / "dump.pt", tmp_path / "c"))
    assert (encoder.causal, encoder.scale, encoder.softcap, encoder.window) == ("none", None, 30.0, (4, 0))
    assert (decoder.causal, decoder.scale, decoder.softcap, decoder.window) == ("top-left", 0.5, 30.0, (4, 0))


@pytest.mark.parametrize("layout", ["BHTD", "BTHD"])
@pytest.mark.parametrize("causal", ["none", "top-left", "bottom-right"])
@pytest.mark.parametrize("batched", [True, False], ids=["batched", "unbatched"])
def test_torch_layout_and_alignment_are_found_by_what_fits(
    tmp_path: Path, layout: str, causal: str, batched: bool
) -> None:
    # Equal numbers of heads and square: shapes tell nothing. Rows and keys differ, so that alignments do.
    q, k, v = inputs(heads=12, kv_heads=12, rows=12, keys=12 if causal != "bottom-right" else 18)
    o, lse = attention(q, k, v, causal, scale=0.2)
    tensors = [t if layout == "BHTD" else t.transpose(1, 2).contiguous() for t in (q, k, v, o)]
    tensors = tensors if batched else [t[0] for t in tensors]
    content = {**named(tuple(tensors), *QKVO), "softmax_lse": lse if batched else lse[0], "softmax_scale": 0.2}
    capture = converted(tmp_path, content)
    m = capture.metadata
    assert (m.layout, m.causal, m.lse_base, m.scale) == (layout, causal, "e", 0.2)
    assert "O agrees within" in str(m.notes)
    assert holds(capture) is True
    # What the user says counts, fitting or not, and the notes say that it does not.
    other = "none" if causal != "none" else "top-left"
    forced = converted(tmp_path, content, causal=other, layout=layout)
    assert (forced.metadata.causal, holds(forced)) == (other, False)
    assert "O does not agree with attention on q, k and v" in str(forced.metadata.notes)


@pytest.mark.parametrize("shape", ["BTH", "HT", "TH", "BHT1", "(BH)T"])
@pytest.mark.parametrize("base", ["e", "2"])
def test_torch_lse_of_other_shapes_and_bases(tmp_path: Path, shape: str, base: str) -> None:
    q, k, v = inputs()
    o, lse = attention(q, k, v, "top-left")
    dumped = lse if base == "e" else lse / math.log(2)
    forms = {"BTH": dumped.mT, "HT": dumped[0], "TH": dumped[0].T, "BHT1": dumped[..., None], "(BH)T": dumped[0]}
    content = {**named((q, k, v, o), *QKVO), "logsumexp": forms[shape]}
    capture = converted(tmp_path, content)
    assert torch.equal(capture.tensors["lse"][...], dumped)
    assert (capture.metadata.lse_base, holds(capture)) == (base, True)
    assert holds(converted(tmp_path, content, lse_base={"e": "2", "2": "e"}[base])) is False


def test_torch_heads_and_features_in_one_axis(tmp_path: Path) -> None:
    q, k, v = inputs(batch=2)
    o, _ = attention(q, k, v, "top-left")
    together = tuple(t.transpose(1, 2).flatten(2) for t in (q, k, v, o))
    capture = converted(tmp_path, named(together, *QKVO), head_dim=16)
    assert all(torch.equal(inner(capture, n), t) for n, t in zip(QKVO, (q, k, v, o), strict=True))
    assert holds(capture) is True
    refused(tmp_path / "dump.pt", "which heads of 7 do not divide; correct --head-dim", head_dim=7, layout="BTHD")


def test_torch_gradients_and_metadata(tmp_path: Path) -> None:
    q, k, v = inputs()
    o, _ = attention(q, k, v, "top-left")
    content = {
        **named((q, k, v, o), *QKVO), "grad_out": o, "d_q": q * 2, "k_grad": k * 3, "grad_v": v * 4,
        "is_causal": True, "layer_idx": 7, "step": 500, "window_size": (-1, -1), "dropout_p": 0.0,
    }  # fmt: skip
    capture = converted(tmp_path, content)
    for name, tensor in {"do": o, "dq": q * 2, "dk": k * 3, "dv": v * 4}.items():
        assert torch.equal(capture.tensors[name][...], tensor), name
    m = capture.metadata
    assert (m.causal, m.layer, m.step, m.window) == ("top-left", 7, 500, None)
    assert converted(tmp_path, {**content, "sliding_window": 4}, window=(5, 0)).metadata.window == (5, 0)


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"cu_seqlens_q": torch.tensor([0, 12, 24])}, "packed (varlen) sequences are not supported"),
        ({"qo_indptr": torch.tensor([0, 12])}, "packed (varlen) sequences are not supported"),
        ({"block_table": torch.zeros(2, 2)}, "a paged KV cache is not supported"),
        ({"dropout_p": 0.1}, "'dropout_p': expected which probabilities were kept"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes must have shape [4]"),
        ({"alibi": torch.ones(4)}, "expected ALiBi's slopes as a tensor 'alibi_slopes'"),
        ({"o": torch.zeros(1, 4, 9, 16)}, "o must have shape [1, 4, 24, 16]"),
        ({"lse": torch.zeros(3, 3)}, "lse must have shape [B, H, T] = [1, 4, 24], got [3, 3]"),
        ({"causal": "sometimes"}, "causal must be true, false or one of none"),
        ({"scale": "big"}, "scale='big' cannot be read as a number"),
        ({"cfg": {"scale": torch.empty(0)}}, "cfg.scale=tensor [0] float32 cannot be read as a number"),
        ({"scale": math.inf}, "scale must be a finite number other than 0"),
        ({"softcap": [1, 2]}, "softcap=[1, 2] cannot be read as a number"),
        ({"window": (math.inf, -1)}, "window=(inf, -1) cannot be read as one or two integers"),
        ({"window": (4.5, -1)}, "window=(4.5, -1) cannot be read as one or two integers"),
        ({"window": "wide"}, "window='wide' cannot be read as one or two integers"),
        ({"layer": 2.5}, "layer=2.5 cannot be read as an integer"),
        ({"layer": "7" * 5000}, f"layer='{'7' * 79}… cannot be read as an integer"),
        ({"q": torch.ones(2, 2).to_sparse()}, "q is sparse, nested or without data"),
    ],
)
def test_torch_dumps_that_are_refused(tmp_path: Path, extra: dict[str, Any], why: str) -> None:
    content = named(inputs(), "q", "k", "v")
    assert converted(tmp_path, content)
    torch.save({**content, **extra}, tmp_path / "dump.pt")
    refused(tmp_path / "dump.pt", why)
    refused(tmp_path / "dump.pt", str(tmp_path / "dump.pt"))


def cyclic() -> list[Any]:
    found: list[Any] = []
    found.append({"x": found})
    return found


@functools.cache
def odd_values() -> dict[str, Any]:
    """What may stand where a tensor, or what a call is told by, should be."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of nested, quantized and sparse tensors
        return {
            "empty": torch.empty(0),
            "no rows": torch.empty(1, 4, 0, 16).bfloat16(),
            "no axes": torch.tensor(1.0),
            "five axes": torch.ones(1, 1, 4, 24, 16),
            "sparse": torch.eye(4).to_sparse(),
            "csr": torch.eye(4).to_sparse_csr(),
            "meta": torch.empty(1, 4, 24, 16, device="meta"),
            "complex": torch.ones(1, 4, 24, 16, dtype=torch.complex64),
            "quantized": torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
            "bool": torch.ones(1, 4, 24, 16) > 0,
            "nested": torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]),
            "uint16": torch.ones(24).to(torch.uint16),
            "complex half": torch.ones(24).to(torch.complex32),
            "bits": torch.ones(24).to(torch.uint8).view(torch.bits8),
            "fp4": torch.ones(24).to(torch.uint8).view(torch.float4_e2m1fn_x2),
            "other shape": torch.ones(1, 3, 23, 15),
            "repeated": torch.ones(1).bfloat16().expand(1, 4, 24, 16),
            "bomb": torch.ones(1).expand(1, 4, 2**34, 16),
            "parameter": torch.nn.Parameter(torch.ones(1, 4, 24, 16)),
            "NaN": torch.full((1, 4, 24, 16), math.nan),
            "None": None,
            "text": "q",
            "escape": "\x1b[31m\n::error ::x",
            "half a pair": "\ud800",
            "number": 0.5,
            "huge": 10**400,
            "infinite": math.inf,
            "not a number": math.nan,
            "list": [1, 2],
            "dict": {"a": 1},
            "cyclic": cyclic(),
            "cyclic dict": {"a": cyclic()},
            "set": {1},
            "bytes": b"q",
            "dtype": torch.float32,
        }


PLACES = {
    "torch": ("q", "o", "scale", "window", "is_causal", "layer", "notes", "metadata"),
    "sglang": ("q", "attn_output", "positions", "seq_lens", "meta", "world_size"),
    "flashinfer": ("arg_0", "result", "result_1", "kwarg_custom_mask", "kwarg_sm_scale", "kwarg_window_left"),
}


def faulty(folder: Path, kind: str, place: str, value: Any) -> Path:
    """A dump that holds ``value`` in that place."""
    (folder / "d").mkdir(parents=True)
    q, k, v = inputs()
    o, _ = attention(q, k, v)
    first = tokens_first(q, k, v, o)
    if kind == "torch":
        torch.save({**named((q, k, v, o), *QKVO), place: value}, folder / "d" / "dump.pt")
    elif kind == "sglang":
        tensors: dict[str, Any] = named(first, "q", "k", "v", "attn_output")
        meta = value if place == "meta" else {"world_size": value if place == "world_size" else 2}
        tensors |= {place: value} if place not in ("meta", "world_size") else {}
        for number, (name, held) in enumerate(tensors.items()):
            path = folder / "d" / f"step=0___rank=0___dump_index={number}___name={name}___layer_id=2.pt"
            torch.save({"value": held, "meta": meta}, path)
    else:
        made = flashinfer_dump(folder / "d", "single_prefill_with_kv_cache", first[:3], {}, first[3])
        for file, names in {"inputs": ("arg_", "kwarg_"), "outputs": ("result",)}.items():
            if place.startswith(names):
                held = torch.load(made / f"{file}.pt")
                held |= {"result_0": held.pop("result")} if place == "result_1" else {}
                torch.save({**held, place: value}, made / f"{file}.pt")
    return folder / "d"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(("kind", "place"), [(kind, place) for kind, places in PLACES.items() for place in places])
def test_whatever_stands_there_is_read_or_refused_in_one_line(tmp_path: Path, run: Run, kind: str, place: str) -> None:
    codes = set()
    for title, value in odd_values().items():
        folder = tmp_path / title
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on saving some of them
            dump = faulty(folder, kind, place, value)
        code, out, err = run("convert", dump, folder / "c")
        codes.add(code)
        assert code in (0, 2), title
        assert ".safetensors" in out if code == 0 else re.fullmatch(r"attn-diag: .+\n", err), f"{title}: {err}"
        assert not any(word in err for word in ("internal error", "damaged", "memory")), f"{title}: {err}"
        assert [file.suffix for file in folder.glob("c/*") if file.is_file()] == [".safetensors"] * (code == 0), title
        assert (folder / "c").exists() == (code == 0), title
        for file in folder.glob("c/*"):
            load(file)
        if place in ("q", "scale", "window") and kind == "torch":
            code, _, err = run("inspect", dump / "dump.pt", "--device", "cpu")
            assert code in (0, 2), title
            assert not any(word in err for word in ("internal error", "damaged", "memory")), f"{title}: {err}"
    assert 2 in codes or place in ("notes", "world_size", "meta")


def test_torch_ambiguous_names_and_mappings(tmp_path: Path) -> None:
    q, k, v = inputs()
    content = {"attn": {"query": q, "key": k, "value": v, "q": q.flip(2)}, "other": [torch.ones(2), torch.ones(3)]}
    for key in ("attn.query", "query", "*.query"):
        assert torch.equal(converted(tmp_path, content, names={"q": key}).tensors["q"][...], q)
    dump = tmp_path / "dump.pt"
    refused(dump, "several tensors may be q; found attn.query [1, 4, 24, 16] bfloat16, attn.q [1, 4, 24, 16]")
    refused(dump, "no tensor matches q=nope; found attn.query", names={"q": "nope"})
    refused(dump, "'quark' is no tensor of a capture; known: q, k, v", names={"quark": "q"})
    mapped = {"q": "a", "k": "b", "v": "b", "flash.o": "a"}
    assert converted(tmp_path, {"a": q, "b": k}, names=mapped).observations == {"flash": ("o",)}
    refused(dump, "cannot tell which tensors are q, k and v; found a [1, 4, 24, 16] bfloat16, b")


@pytest.mark.parametrize("kind", ["flashinfer", "sglang", "torch"])
def test_a_pickle_that_would_run_code(kind: str, tmp_path: Path) -> None:
    bomb, dump = Explosive(tmp_path / "boom"), tmp_path / "d"
    if kind == "flashinfer":
        path = flashinfer_dump(dump, "single_prefill_with_kv_cache", inputs(), {}, None) / "inputs.pt"
        torch.save({"arg_0": bomb}, path)
    elif kind == "sglang":
        SglangDumper(dump, 2025).dump_heads(named(inputs(), "q", "k", "v"))
        (path,) = dump.rglob("*name=q___*")
        torch.save(bomb, path)
    else:
        path = dump = tmp_path / "dump.pt"
        torch.save({**named(inputs(), "q", "k", "v"), "boom": bomb}, path)
    refused(dump, f"{path}: this pickle holds more than tensors and was not executed")
    assert not (tmp_path / "boom").exists()
    # It would have run: the fixture is not harmless.
    torch.load(path, weights_only=False)
    assert (tmp_path / "boom").exists()


def test_a_folder_of_torch_dumps(tmp_path: Path) -> None:
    for name, tensors in zip(("a/x.pt", "b/x.pt"), layer_tensors(2), strict=True):
        (tmp_path / "d" / name).parent.mkdir(parents=True)
        torch.save(named(tensors, *QKVO), tmp_path / "d" / name)
    written = convert(tmp_path / "d", tmp_path / "c")
    assert [path.name for path in written] == ["a_x.safetensors", "b_x.safetensors"]
    with pytest.raises(InputError, match=r"the dump holds several calls .*: name a folder"):
        convert(tmp_path / "d", tmp_path / "one.safetensors")
    with pytest.raises(InputError, match=r"several calls state no layer .*: --layer can name that of one call only"):
        convert(tmp_path / "d", tmp_path / "other", layer=3)
    assert only(convert(tmp_path / "d" / "a", tmp_path / "e", layer=3)).metadata.layer == 3
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no dump in this directory")
    refused(tmp_path / "nowhere", "no such file or directory")
    refused(written[0], "expected a file ending in .pt, .pth")


def test_names_that_are_too_long_for_files(tmp_path: Path) -> None:
    calls = {f"layers.{number}.{'9' * 400}": named(tensors, *QKVO) for number, tensors in enumerate(layer_tensors(2))}
    torch.save(calls, tmp_path / "dump.pt")
    written = convert(tmp_path / "dump.pt", tmp_path / "c")
    assert [load(path).metadata.layer for path in written] == [0, 1]
    dumper = SglangDumper(tmp_path / "d", 2025)
    dumper.dump_heads(named(inputs(), "q", "k", "v"), layer_id=0, tag="a" * 140, more="b" * 20)
    (tmp_path / ("deep" * 60)).mkdir()
    with pytest.raises(InputError, match="File name too long; convert it alone"):
        convert(tmp_path / "d", tmp_path / ("deep" * 60) / ("x" * 256))
    assert len(convert(tmp_path / "d", tmp_path / "one.safetensors")) == 1


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    first, second = layer_tensors(2)
    target = tmp_path / "c.safetensors"
    torch.save(named(first, *QKVO), tmp_path / "dump.pt")
    convert(tmp_path / "dump.pt", target)
    before = target.read_bytes()
    torch.save(named(second, *QKVO), tmp_path / "dump.pt")
    with pytest.raises(InputError, match="exists; choose another place, or say --force"):
        convert(tmp_path / "dump.pt", target)
    assert target.read_bytes() == before
    convert(tmp_path / "dump.pt", target, force=True)
    assert target.read_bytes() != before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.safetensors", "dump.pt"]


def test_the_kind_can_be_forced(tmp_path: Path) -> None:
    dumper = SglangDumper(tmp_path / "d", 2025)
    dumper.dump_heads(named(inputs(), "q", "k", "v"))
    assert len(convert(tmp_path / "d", tmp_path / "c", kind="sglang")) == 1
    refused(tmp_path / "d", "cannot tell which tensors are q, k and v", kind="torch")
    refused(tmp_path / "d", "no attention call among the 0 calls", kind="flashinfer")
    refused(tmp_path / "d", "kind must be one of auto", kind="vllm")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("q", ("q", True)), ("attn_q", ("q", False)), ("Query-States", ("q", True)), ("w_q", ("w_q", True)),
        ("grad__attn_output", ("do", True)), ("grad_attn_q", ("dq", False)), ("q_grad", ("dq", True)),
        ("attn_out", ("o", True)), ("mlp_out", None), ("grad_mlp", None), ("hidden_states", ("x", True)), ("seq", None),
    ],
)  # fmt: skip
def test_names_in_use(name: str, role: tuple[str, bool] | None) -> None:
    assert role_of(name) == role


def test_exact_names_come_before_endings() -> None:
    leaves = [Leaf(n, n, (), functools.partial(torch.ones, 1)) for n in ("rope_q", "q", "k")]
    assert choose(leaves, {})["q"].path == "q"
    with pytest.raises(InputError, match=r"several tensors may be q; found rope_q \[1\] float32, norm_q \[1\] float32"):
        choose([leaves[0], Leaf("norm_q", "norm_q", (), leaves[0].read)], {})
    assert parse_map(["q=a.b", "k=c"]) == {"q": "a.b", "k": "c"}
    with pytest.raises(InputError, match="--map must be NAME=KEY"):
        parse_map(["q"])


def test_on_the_command_line(tmp_path: Path, run: Run) -> None:
    single_prefill(tmp_path / "d")
    code, out, err = run("convert", tmp_path / "d", tmp_path / "c")
    assert (code, err) == (0, "")
    (path,) = (tmp_path / "c").iterdir()
    assert out.splitlines()[0] == f"OK 1 capture of {tmp_path / 'd'}; next: attn-diag inspect {tmp_path / 'c'}"
    assert out.splitlines()[1] == str(path)
    # Every guess that is printed is in the file too.
    assert [line.strip() for line in out.splitlines()[2:]] == str(load(path).metadata.notes).split("; ")
    assert run("inspect", path)[0] == 0
    code, out, err = run("convert", tmp_path / "d", tmp_path / "c")
    assert code == 2
    assert "exists; choose another place, or say --force" in err
    args = tuple(t[0] for t in inputs())
    flashinfer_dump(tmp_path / "d", "BatchDecodeWithPagedKVCacheWrapper.run", args, {}, args[0], number=2)
    code, out, err = run("convert", tmp_path / "d", tmp_path / "c", "--force", "--from", "flashinfer")
    assert (code, out.count(".safetensors")) == (2, 1)
    assert "BatchDecodeWithPagedKVCacheWrapper.run is not supported: a paged KV cache" in err
    torch.save(named(inputs(), *"abc"), tmp_path / "dump.pt")
    options = ("--map", "q=a", "--map", "k=b", "--map", "v=c", "--layer", 3, "--scale", 0.5)
    code, out, _ = run("convert", tmp_path / "dump.pt", tmp_path / "m.safetensors", *options)
    assert (code, load(tmp_path / "m.safetensors").metadata.layer) == (0, 3)
    assert "layout=BHTD and causal=none assumed: no O to check with" in out


def test_an_o_that_cannot_be_compared_is_not_called_missing(tmp_path: Path, run: Run) -> None:
    q, k, v = inputs(heads=2)
    torch.save({"q": q * math.nan, "k": k, "v": v, "o": q}, tmp_path / "dump.pt")
    code, out, _ = run("convert", tmp_path / "dump.pt", tmp_path / "captures")
    assert code == 0
    assert "assumed: in no row can O be compared (NaN, Inf or no key)" in out
