"""The Triton kernels beside SDPA's backends and compiled FlexAttention on one GPU, as ratios in one run.

    python benchmarks/bench_kernels.py [--json FILE]

Times are medians of CUDA-graph replays (no launch cost, which an eager caller of short kernels pays on top), in
milliseconds, on N(0,1) BF16 inputs. Ours: recipe fa2. "second pass" counts the multiplicities of the rows that the
forward flagged; its worst case is every key equal. "full" dumps S (fp32) and P_bar (BF16) of every visible tile.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch._functorch.config as functorch_config
import triton
from measuring import made_by, options_of, save
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from attn_diag.kernels import Recipe, preset
from attn_diag.kernels.geometry import Level, Visibility
from attn_diag.kernels.triton_backward import backward
from attn_diag.kernels.triton_forward import forward
from attn_diag.kernels.triton_multiplicity import multiplicities

SHAPES = {"8x12x1024x64": (8, 12, 1024, 64), "4x16x4096x128": (4, 16, 4096, 128), "1x32x16384x128": (1, 32, 16384, 128)}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def replay_ms(work: Callable[[], object]) -> float:
    work()
    torch.cuda.synchronize()
    return float(triton.testing.do_bench_cudagraph(work, rep=60, return_mode="median"))


def event_ms(work: Callable[[], object]) -> float:
    """For work that a graph cannot capture: events around eager calls."""
    return float(triton.testing.do_bench(work, warmup=20, rep=80, return_mode="median"))


class Ours:
    """Forward, second pass and backward of one shape and recipe."""

    def __init__(self, tensors: list[Tensor], recipe: Recipe, *, causal: bool) -> None:
        self.q, self.k, self.v, self.do = tensors
        self.recipe, self.visibility = recipe, Visibility("top-left" if causal else "none")
        self.options: dict[str, Any] = {"scale": self.q.shape[-1] ** -0.5, "softcap": None}

    def forward(self, level: Level = "none", slots: Tensor | None = None) -> Any:
        n = 0 if slots is None else slots.numel()
        return forward(
            self.q, self.k, self.v, self.recipe, self.visibility, level=level, slots=slots, n_slots=n, **self.options
        )

    def second_pass(self, rows: Tensor) -> Tensor:
        return multiplicities(self.q, self.k, rows[2], rows[0], self.recipe, self.visibility, **self.options)

    def backward(self, o: Tensor, lse: Tensor) -> Any:
        return backward(self.q, self.k, self.v, o, lse, self.do, self.recipe, self.visibility, **self.options)


def measure(shape: tuple[int, ...], *, causal: bool, copy_tb_s: float) -> dict[str, float]:
    generator = torch.Generator("cuda").manual_seed(0)
    tensors = [torch.randn(shape, device="cuda", generator=generator).bfloat16() for _ in range(4)]
    row = others(tensors, causal=causal)
    ours = Ours(tensors, preset("fa2", head_dim=shape[-1]), causal=causal)
    found = ours.forward("rows")
    row["none"] = replay_ms(ours.forward)
    row["rows"] = replay_ms(lambda: ours.forward("rows"))
    row["second pass"] = replay_ms(lambda: ours.second_pass(found.rows))
    row["flagged rows [%]"] = float((found.rows[2] > 1.5).float().mean()) * 100
    tied = Ours([tensors[0], tensors[1][:, :, :1].expand(shape).contiguous(), *tensors[2:]], ours.recipe, causal=causal)
    tied_rows = tied.forward("rows").rows
    row["second pass, all tied"] = replay_ms(lambda: tied.second_pass(tied_rows))
    row["backward"] = replay_ms(lambda: ours.backward(found.o, found.lse))
    elements = shape[0] * shape[1] * shape[2] ** 2 * (0.5 if causal else 1.0)
    if elements * 6 / (0.5 if causal else 1.0) < 60e9:
        slots = torch.arange(shape[0] * shape[1] * shape[2], device="cuda", dtype=torch.int32).view(shape[:3])
        row["full"] = replay_ms(lambda: ours.forward("full", slots))
        row["full: bytes / copy bandwidth"] = elements * 6 / copy_tb_s / 1e9
    return {name: round(value, 4) for name, value in row.items()}


def others(tensors: list[Tensor], *, causal: bool) -> dict[str, float]:
    """Forward and backward of SDPA's backends and of compiled FlexAttention."""
    q, k, v = (t.clone().requires_grad_() for t in tensors[:3])
    torch.compiler.reset()  # each shape compiles anew; their number is limited
    row = {}
    for name, backend in BACKENDS.items():
        with sdpa_kernel(backend):
            with torch.no_grad():
                row[f"{name} fwd"] = replay_ms(lambda: scaled_dot_product_attention(q, k, v, is_causal=causal))
            out = scaled_dot_product_attention(q, k, v, is_causal=causal)
            row[f"{name} bwd"] = event_ms(partial(torch.autograd.grad, out, (q, k, v), tensors[3], retain_graph=True))
    functorch_config.donated_buffer = False  # so that the backward can be repeated
    flex = torch.compile(flex_attention)
    length = q.shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length) if causal else None  # noqa: ARG005
    with torch.no_grad():
        row["flex fwd"] = event_ms(lambda: flex(q, k, v, block_mask=mask))
    out = flex(q, k, v, block_mask=mask)
    row["flex bwd"] = event_ms(lambda: torch.autograd.grad(out, (q, k, v), tensors[3], retain_graph=True))
    return row


def ratios(row: dict[str, float]) -> dict[str, float]:
    """What the project aims for, as ratios of this row."""
    both = row["rows"] + row["backward"]
    found = {
        "none / flash (<= 0.75)": row["none"] / row["flash fwd"],
        "none / cudnn (<= 1.25)": row["none"] / row["cudnn fwd"],
        "rows / none (<= 1.10)": row["rows"] / row["none"],
        "(rows + second pass) / none": (row["rows"] + row["second pass"]) / row["none"],
        "(rows + backward) / flash (<= 1.0)": both / (row["flash fwd"] + row["flash bwd"]),
    }
    if "full" in row:
        found["full / larger of none and bytes (<= 1.25)"] = row["full"] / max(
            row["none"], row["full: bytes / copy bandwidth"]
        )
    return {name: round(value, 3) for name, value in found.items()}


def copy_bandwidth() -> float:
    """TB/s, bytes read plus bytes written."""
    source = torch.randn(2**29, device="cuda")
    target = torch.empty_like(source)
    # By a kernel: a graph's copy node reached two thirds of this.
    return 2 * 2**31 / replay_ms(lambda: torch.neg(source, out=target)) / 1e9


def longest() -> dict[str, float]:
    """T = 131072, 8 heads, D 128 with rows: time, and memory above the inputs in bytes a query row."""
    tensors = [torch.randn(1, 8, 131072, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    ours = Ours(tensors, preset("fa2", head_dim=128), causal=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = ours.forward("rows")
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "rows [ms]": round(event_ms(lambda: ours.forward("rows")), 2),
        "backward [ms]": round(event_ms(lambda: ours.backward(found.o, found.lse)), 2),
        "second pass [ms]": round(event_ms(lambda: ours.second_pass(found.rows)), 2),
        "memory above the inputs [bytes a query row and head]": peak / (8 * 131072),
    }


def main() -> None:
    options = options_of(__doc__).parse_args()
    result = made_by("cuda") | {"copy [TB/s]": round(copy_bandwidth(), 2)}
    for name, shape in SHAPES.items():
        for causal in (True, False):
            row = measure(shape, causal=causal, copy_tb_s=result["copy [TB/s]"])
            key = f"{name} {'causal' if causal else 'full'}"
            result[key] = {"ms": row, "ratios": ratios(row)}
            print(key, json.dumps(result[key], indent=1), flush=True)
            torch.cuda.empty_cache()
            save(result, options.json)
    result["1x8x131072x128 causal"] = longest()
    print(result["1x8x131072x128 causal"], flush=True)
    save(result, options.json)


if __name__ == "__main__":
    main()
