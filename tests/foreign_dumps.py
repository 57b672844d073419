"""Dumps of other tools, written the way those tools write them, of tensors whose attention is computed here.

The writers follow these upstream files, line by line where it matters: flashinfer-ai/flashinfer 008a2836
``flashinfer/api_logging.py``; sgl-project/sglang 5a7255c6 (of 2025) and 00d35548 (of 2026)
``python/sglang/srt/debug_utils/dumper.py``.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from attn_diag import InputError, convert, load
from attn_diag.captures.capture import Capture


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


def named(tensors: tuple[Tensor, ...], *names: str) -> dict[str, Any]:
    return dict(zip(names, tensors, strict=True))


QKVO = ("q", "k", "v", "o")


def converted(folder: Path, content: Any, **options: Any) -> Capture:
    """The capture made of what was given to ``torch.save``, in folder / "dump.pt"."""
    torch.save(content, folder / "dump.pt")
    return only(convert(folder / "dump.pt", folder / "captures", force=True, **options))
