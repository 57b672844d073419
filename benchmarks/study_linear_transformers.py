"""Hugging Face's own Qwen3-Next and Mamba-2 trained in plain torch under the monitor: in peace, and with a fault.

    python benchmarks/study_linear_transformers.py [--models qwen3_next mamba2] [--seeds 3] [--first 0] [--steps 300]
        [--every 10] [--arms whole bf16 autocast fp16] [--faults …] [--json FILE]

Two layers of linear attention each, tiny, on tokens that follow from the one before (``tests/linear_models.py``). Arms:
BF16 autocast with the functions in fp32, as kernels compute (whole); weights in BF16 (bf16); BF16 autocast (autocast)
and FP16 autocast with a scaler (fp16), under which torch rounds the functions' products to 16 bits as well. Faults are
lines of their functions that are changed (``tests/planted_linear.py``) from the middle of 80 steps on.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from linear_models import VOCABULARY, walks
from measuring import made_by, save, watched
from planted_linear import DELTA_RULE, MAMBA, planted

from attn_diag import Monitor

# Model -> its operator, its module and the function that its layers call there.
MODELS = {
    "qwen3_next": (
        "gated_delta_rule", "transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule",
    ),
    "mamba2": ("mamba2", "transformers.models.mamba2.modeling_mamba2", "mamba2_chunk_scan"),
}  # fmt: skip
FAULTS = {"qwen3_next": DELTA_RULE, "mamba2": MAMBA}


def model_of(name: str) -> nn.Module:
    """A tiny one, two layers of linear attention."""
    transformers = import_module("transformers")
    if name == "mamba2":
        config = transformers.Mamba2Config(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_heads=4, head_dim=32, expand=2,
            state_size=32, n_groups=2, chunk_size=32,
        )  # fmt: skip
        return transformers.Mamba2ForCausalLM(config)  # type: ignore[no-any-return]
    config = transformers.Qwen3NextConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, layer_types=["linear_attention"] * 2,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32, linear_value_head_dim=32,
        mlp_only_layers=[0, 1], intermediate_size=128, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)  # type: ignore[no-any-return]


def run(name: str, arm: str, fault: str | None, steps: int, every: int, seed: int) -> dict[str, Any]:
    """One training run, monitored."""
    torch.manual_seed(seed)
    operator, module, function = MODELS[name]
    model = model_of(name).train()
    if arm == "bf16":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=arm == "fp16")
    dtype = torch.float16 if arm == "fp16" else torch.bfloat16
    space, original = vars(import_module(module)), vars(import_module(module))[function]
    if arm == "whole":
        space[function] = in_fp32(original)
    begun, loss = time.perf_counter(), torch.zeros(())
    try:
        with Monitor(model, every) as monitor:
            for step in range(steps):
                # Between two looks: the monitor puts back what it found.
                if fault is not None and step == steps // 2 + 1:
                    made = changed(operator, name, fault)
                    space[function] = in_fp32(made) if arm == "whole" else made
                optimizer.zero_grad()
                loss = loss_of(model, walks(2, 96, seed * steps + step), dtype, autocast=arm != "bf16")
                scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                scaler.step(optimizer)
                scaler.update()
            monitor.metrics(wait=True)
    finally:
        space[function] = original
    seen = watched(monitor)
    return {"loss": round(float(loss.detach()), 4), "seconds": round(time.perf_counter() - begun), **seen}


def in_fp32(function: Callable[..., Any]) -> Callable[..., Any]:
    """It, out of reach of autocast."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return function(*args, **kwargs)

    return called


def changed(operator: str, name: str, fault: str) -> Callable[..., Any]:
    """Its function with a line of it changed, under its name."""
    return planted(operator, next(f for f in FAULTS[name] if f.name == fault))


def loss_of(model: nn.Module, ids: Tensor, dtype: torch.dtype, *, autocast: bool) -> Tensor:
    with torch.autocast("cpu", dtype, enabled=autocast):
        logits = model(ids[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--arms", nargs="*", default=["whole", "bf16", "autocast", "fp16"])
    parser.add_argument("--faults", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    table: dict[str, Any] = made_by() | {
        "transformers": import_module("transformers").__version__,
        "steps": options.steps,
    }
    for name in options.models:
        for fault in options.faults or [None]:
            if fault is not None and fault not in {f.name for f in FAULTS[name]}:
                continue
            for arm in options.arms:
                for seed in range(options.first, options.first + options.seeds):
                    steps = options.steps if fault is None else min(options.steps, 80)
                    found = run(name, arm, fault, steps, options.every, seed)
                    table.setdefault(name, {}).setdefault(fault or "healthy", {}).setdefault(arm, {})[seed] = found
                    alarms = [(a["step"], a["layer"], a["head"], a["kind"]) for a in found["alarms"]]
                    print(name, fault, arm, seed, found["seconds"], "s, loss", found["loss"], found["layers"], alarms,
                          found["largest_factors"], flush=True)  # fmt: skip
                    save(table, options.json)


if __name__ == "__main__":
    main()
