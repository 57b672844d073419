"""Models of Hugging Face's classes train 500 healthy steps under the monitor: does it see them, and is it silent?

Six layers of width 512 on real tokens, BF16 autocast, eager and compiled (whole model), under deterministic algorithms.
Every run is made twice without the monitor: where these two are the same bits, so has to be the one with it.

    python benchmarks/study_healthy_models.py --tokens tokens.npy.xz --processes 4 --json FILE
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor

sys.path.insert(0, str(Path(__file__).with_name("failing_run")))
import train

import attn_diag

# What transformers calls it -> options beside the sizes.
MODELS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {"n_embd": 512, "n_layer": 6, "n_head": 8, "n_positions": 512},
    "LlamaForCausalLM": {"num_key_value_heads": 8},
    "Qwen3ForCausalLM": {"num_key_value_heads": 2, "head_dim": 64},
    "GemmaForCausalLM": {"num_key_value_heads": 2, "head_dim": 64},
}
MODES = ("eager", "compiled", "reduce-overhead")
VOCABULARY, CONTEXT, SEQUENCES, EVERY = 16384, 512, 16, 25


def model_of(name: str, attention: str) -> torch.nn.Module:
    """A randomly initialised one."""
    import transformers

    plain: dict[str, Any] = {
        "hidden_size": 512,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "intermediate_size": 1376,
    }
    if name.startswith("GPT2"):
        plain = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        made: Any = transformers.GPT2LMHeadModel
    else:
        made = getattr(transformers, name)
    options = {**plain, **MODELS[name], "vocab_size": VOCABULARY, "attn_implementation": attention}
    torch.manual_seed(0)
    model: torch.nn.Module = made(made.config_class(use_cache=False, **options))
    return model


def trained(
    name: str, attention: str, mode: str, steps: int, tokens: Path, device: str, *, watched: bool
) -> dict[str, Any]:
    """One run."""
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True)  # with warn_only=True cuDNN's attention is not deterministic
    torch.set_float32_matmul_precision("high")
    data = torch.from_numpy(train.load_tokens(tokens, VOCABULARY).astype("int32")).to(device)
    model = model_of(name, attention).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
    monitor = attn_diag.Monitor(model, every=EVERY) if watched else None
    run: Callable[..., Any] = model
    if mode != "eager":
        run = torch.compile(model, dynamic=False, mode=None if mode == "compiled" else mode)
    losses: list[Tensor] = []
    began = time.perf_counter()
    offsets = torch.arange(CONTEXT, device=device)
    for step in range(steps):
        starts = train.sequence_starts(0, step, SEQUENCES, len(data), CONTEXT).to(device)
        ids = data[starts[:, None] + offsets].long()
        for group in optimizer.param_groups:
            group["lr"] = 3e-4 * min(1.0, (step + 1) / 50)
        with torch.autocast(device, torch.bfloat16):
            loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach().clone())
    bits = hashlib.sha256(torch.stack(losses).cpu().numpy().tobytes())
    for parameter in model.parameters():
        bits.update(parameter.detach().cpu().numpy().tobytes())
    found: dict[str, Any] = {
        "first loss": float(losses[0]), "last loss": float(losses[-1]), "bits": bits.hexdigest(),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip
    if monitor is not None:
        monitor.close()
        found |= {
            "checks": [check.step for check in monitor.history],
            "layers": sorted({str(layer.module) for check in monitor.history for layer in check.layers}),
            "alarms": [f"step {a.step}, layer {a.layer}, head {a.head}: {a.reason}" for a in monitor.alarms],
        }
    return found


def both(name: str, attention: str, mode: str, steps: int, tokens: Path, device: str) -> dict[str, Any]:
    """Two runs without the monitor and one with it, and whether they are the same."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("attn_diag").addHandler(handler)
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    what = {"model": name, "attention": attention, "mode": mode, "steps": steps}
    try:
        runs = [trained(name, attention, mode, steps, tokens, device, watched=w) for w in (False, False, True)]
    except Exception as error:
        return what | {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        logging.getLogger("attn_diag").removeHandler(handler)
    first, again, with_monitor = (run.pop("bits") for run in runs)
    bits = {"repeats itself": first == again, "same bits": first == with_monitor}
    return what | runs[-1] | {"seconds alone": runs[1]["seconds"], **bits, "said": said}


def main() -> None:
    parser = options_of(__doc__, device="cuda")
    parser.add_argument("--tokens", type=Path, required=True, metavar="FILE", help="1-D integers, .npy or .npy.xz")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--attention", nargs="*", default=["sdpa"], help="sdpa, flex_attention")
    parser.add_argument("--modes", nargs="*", default=["eager", "compiled"], choices=MODES)
    parser.add_argument("--processes", type=int, default=4)
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        todo = [
            pool.submit(both, name, attention, mode, options.steps, options.tokens.resolve(), options.device)
            for attention, mode, name in product(options.attention, options.modes, options.models)
        ]
        for future in todo:
            runs.append(future.result())
            print({n: x for n, x in runs[-1].items() if n != "checks"}, file=sys.stderr, flush=True)
            save({**made_by(options.device), "runs": runs}, options.json)


if __name__ == "__main__":
    main()
