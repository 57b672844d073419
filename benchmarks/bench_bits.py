"""Which bits of real outputs an emulated recipe misses, and what they are due to.

Every shared capture is emulated with fp32 sums in the library's order, with exact sums, and with the tensor core's
truncation; on CUDA torch's exp2 is the hardware's, on a CPU it is correctly rounded but for 1 ulp. What the last column
still misses on CUDA is neither the sums nor exp2.

    python benchmarks/bench_bits.py --device cuda --json benchmarks/results/bits_h200.json
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from measuring import CAPTURES, made_by, options_of, save

from attn_diag.captures.capture import Capture
from attn_diag.captures.loading import load
from attn_diag.head.machine import pick_device
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.kernels import Recipe, Schedule, emulate_head, preset

SPLIT = replace(preset("fa2"), schedule=Schedule(key_tile=256, split_keys=256))
CASES: list[tuple[str, str, Recipe]] = [
    (f"kernels_{inputs}_T512", observation, recipe)
    for inputs in ("gauss", "pair")
    for observation, recipe in (
        ("paper", preset("qiu2025")),
        ("stable", preset("qiu2025-stabilised")),
        ("flash", SPLIT),
        ("flex", preset("flex")),
    )
] + [
    ("pair_T256", "flash", preset("fa2")),
    ("pair_T256", "cudnn", preset("cudnn")),
    ("pair_T256", "efficient", preset("efficient")),
    ("gpt2_step731_L2H4", "observed", preset("cudnn")),
    ("gpt2_step637_L2H6", "observed", preset("cudnn")),
    ("gqa_T200", "observed", preset("cudnn")),
    ("failing_step500_L2H7", "observed", preset("bf16-forward")),
]
Model = Literal["fp32-nearest", "exact", "nvidia-tensor-core"]
MODELS: tuple[Model, ...] = get_args(Model)


def missed(capture: Capture, observation: str, recipe: Recipe, device: torch.device) -> dict[str, Any]:
    """Elements of O and dQ that the emulation misses, over all heads."""
    counts = {"o": 0, "o_of": 0, "dq": 0, "dq_of": 0}
    for batch in range(capture.batch):
        for head in range(capture.q_heads):
            inputs = read_head(capture, batch, head, device, NonFiniteCensus()).head
            found = emulate_head(recipe, inputs, key_gradients=False)
            for output in ("o", "dq"):
                observed = capture.read(capture.key(observation, output), batch, head)
                emulated = getattr(found, output)
                if observed is not None and emulated is not None:
                    counts[output] += int((emulated.cpu() != observed.cpu()).sum())
                    counts[f"{output}_of"] += observed.numel()
    return counts


def main() -> None:
    arguments = options_of(__doc__, device="auto").parse_args()
    device = pick_device(arguments.device)
    rows = []
    for name, observation, recipe in CASES:
        capture = load(CAPTURES / f"{name}.safetensors")
        by_model = {m: missed(capture, observation, replace(recipe, accumulation=m), device) for m in MODELS}
        rows.append({"capture": name, "observation": observation, "recipe": recipe.name, "missed": by_model})
        shown = "  ".join(f"{m} O {c['o']}/{c['o_of']} dQ {c['dq']}/{c['dq_of']}" for m, c in by_model.items())
        print(f"{name}:{observation} {shown}", flush=True)
    exp2 = "hardware (torch on CUDA)" if device.type == "cuda" else "torch on the CPU"
    save(made_by(device) | {"exp2": exp2, "rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
