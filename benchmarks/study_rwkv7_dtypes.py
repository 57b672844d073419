"""The line of RWKV-7 that promotes k under FP16 autocast (fla issue #301): where, to what, what it does to the numbers.

    pip install fla-core==0.6.0 flash-linear-attention==0.6.0 einops
    python benchmarks/study_rwkv7_dtypes.py [--seeds 5] [--steps 256] [--json FILE]

Two of flash-linear-attention's own RWKV7Attention layers, on a CPU. Their Triton kernels do not run there; what stands
for them is fla's reference in torch out of the same file (token_shift_ref, torch_addcmul_rwkv7, k_update_ref,
gate_output_correction_ref), and for chunk_rwkv7 an emulated chunked kernel (chunks of 64, products of FP16 operands,
or of fp32 operands) that takes every argument as it comes. Three arms: k promoted (k_update_ref: what #301 reports,
and what 0.6.0 still calls for a single step), repaired (k_a cast to k's dtype), and one rounding (computed in fp32 and
rounded to k's dtype, as 0.6.0's fused kernel for training stores it). Errors are beside the same layers in float64.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from linear_kernels import recurrent
from linear_models import chunked

from attn_diag import capture_linear, inspect_linear, trace_dtypes
from attn_diag.kernels.linear_recipe import LinearFormat, LinearRecipe

HIDDEN, HEAD = 128, 64


class Kernel:
    """What chunk_rwkv7 does, and what it was given."""

    def __init__(self, operands: LinearFormat | None) -> None:
        self.operands = operands
        self.dtypes: list[dict[str, str]] = []
        self.causes: list[str] = []
        self.trace: Any = None

    def __call__(self, r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **_: Any) -> Any:
        given = {"r": r, "w": w, "k": k, "v": v, "a": a, "b": b}
        self.dtypes.append({name: str(t.dtype).removeprefix("torch.") for name, t in given.items()})
        if self.trace is not None and (cause := self.trace.cause(k)) is not None:
            place = cause.source
            where = "" if place is None else f"{Path(place.file).name}:{place.line}: {place.text.strip()}"
            self.causes.append(f"{cause.operation} at {where}; {cause.fix}")
        x = {"q": r, "g": w, "k": k, "v": v, "a": a, "b": b}
        if self.operands is None:
            return recurrent(x, scale=1.0)[0].to(v.dtype), None
        out: LinearFormat = "fp16" if v.dtype == torch.float16 else "fp32"
        return chunked("rwkv7", x, LinearRecipe(operands=self.operands, out=out)), None


def chunk_rwkv7(
    r: Tensor, w: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, scale: float = 1.0, initial_state: Any = None,
    output_final_state: bool = False, cu_seqlens: Any = None, **rest: Any,
) -> Any:  # fmt: skip
    """With fla's arguments."""
    del scale, initial_state, output_final_state, cu_seqlens, rest
    return KERNEL(r, w, k, v, a, b)


KERNEL = Kernel("fp16")


class Layers(nn.Module):
    """Two of fla's layers with norms between them."""

    def __init__(self, attention: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN) for _ in range(2)])
        self.layers = nn.ModuleList(
            [
                attention(hidden_size=HIDDEN, head_dim=HEAD, layer_idx=i, num_hidden_layers=2, fuse_norm=False)
                for i in range(2)
            ]
        )
        made: list[Any] = list(self.layers)
        for layer in made:
            nn.init.orthogonal_(layer.o_proj.weight)  # zero at first, which lets no gradient through

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, C] as well."""
        first = None
        for norm, layer in zip(self.norms, self.layers, strict=True):
            o, _, _, first = layer(norm(x), v_first=first)
            x = x + o
        return x


def ran(model: Layers, x: Tensor, dy: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Output and gradients of the weights, float64."""
    model.zero_grad()
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        y = model(x)
    (y * dy).sum().backward()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return {"y": y.detach().double(), **gradients}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    global KERNEL
    fla: Any = import_module("fla.layers.rwkv7")
    ref = import_module("fla.ops.rwkv7.fused_k_update").k_update_ref
    arms: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "k promoted": ref,
        "repaired": lambda k, a, ka: ref(k, a, ka.to(k.dtype)),
        "one rounding": lambda k, a, ka: ref(k.float(), a.float(), ka.float()).to(k.dtype),
    }
    spaces: dict[str, Any] = {
        "token_shift": lambda x, *_, **__: (import_module("fla.modules.token_shift").token_shift_ref(x), None),
        "fused_addcmul_rwkv7": import_module("fla.ops.rwkv7.fused_addcmul").torch_addcmul_rwkv7,
        "gate_output_correction": import_module("fla.ops.rwkv7.gate_output_correction").gate_output_correction_ref,
        "chunk_rwkv7": chunk_rwkv7,
    }
    vars(fla).update(spaces)
    table: dict[str, Any] = {"versions": {n: version(n) for n in ("torch", "fla-core", "flash-linear-attention")}}
    errors: dict[str, dict[str, list[float]]] = {}
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        model = Layers(fla.RWKV7Attention)
        x, dy = torch.randn(1, options.steps, HIDDEN), torch.randn(1, options.steps, HIDDEN)
        exact = copy.deepcopy(model).double()
        KERNEL, fla.fused_k_rwkv7 = Kernel(None), ref
        true = ran(exact, x.double(), dy.double(), None)
        for operands in ("fp16", "fp32"):
            for arm, update in arms.items():
                KERNEL, fla.fused_k_rwkv7 = Kernel(operands), update
                found = ran(model, x, dy, torch.float16)
                for name in ("y", "layers.0.k_proj.weight", "layers.0.k_a", "layers.1.k_proj.weight"):
                    error = float((found[name] - true[name]).norm() / true[name].norm())
                    errors.setdefault(f"{arm}, {operands} operands", {}).setdefault(name, []).append(error)
                table.setdefault("dtypes at chunk_rwkv7", {})[arm] = KERNEL.dtypes[0]
    table["relative error, median of the seeds"] = {
        arm: {name: float(np.median(found)) for name, found in by_name.items()} for arm, by_name in errors.items()
    }
    table["relative error by seed"] = errors
    # The line, by attn-diag's own means.
    KERNEL, fla.fused_k_rwkv7 = Kernel("fp16"), ref
    with torch.autocast("cpu", torch.float16), trace_dtypes() as trace:
        KERNEL.trace = trace
        model(x)
    table["the line"] = KERNEL.causes[0]
    # The calls, judged.
    captures = {}
    for arm, update in arms.items():
        KERNEL, fla.fused_k_rwkv7 = Kernel("fp16"), update
        with capture_linear(functions={"rwkv7": chunk_rwkv7}) as calls:
            ran(model, x, dy, torch.float16)
        captures[arm] = calls[0]
        verdict = inspect_linear(list(calls))
        table.setdefault("inspect", {})[arm] = verdict.sentence
        k = calls[0].tensors["k"]
        table.setdefault("bytes of k", {})[arm] = k.numel() * k.element_size()
    k, repaired = (captures[arm].tensors["k"].double() for arm in ("k promoted", "repaired"))
    table["k: repaired beside promoted"] = float((repaired - k).norm() / k.norm())
    print(json.dumps(table, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
