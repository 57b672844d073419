"""Healthy models with sinks, MLA, a softcap, ALiBi, packed documents and dropout train on a CPU: is the monitor silent?

Tiny models of Hugging Face's classes learn sequences of a seeded grammar by AdamW, in BF16 autocast or with parameters
in BF16. FlexAttention has no backward on a CPU, so it is not among them.

    python benchmarks/study_healthy_layouts.py --seeds 3 --json benchmarks/results/healthy_layouts_cpu.json
    python benchmarks/study_healthy_layouts.py --models bloom mpt --json …   # these alone; the other rows stay
    python benchmarks/study_healthy_layouts.py --models gemma-2 --fp32 --json …   # the same with S, P, dP, dS in fp32
    python benchmarks/study_healthy_layouts.py --first 20 --seeds 2 --json …      # seeds 20 and 21

"counted" is the largest averaged share that condition 2 of the alarm saw, "off" the largest error of dQ where it was
measured, and "whole" the alarms of "rounding" if all of that error counted.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from measuring import made_by, options_of, save
from torch import Tensor

import attn_diag
from attn_diag.watching.monitoring.alarm import AlarmState, replay
from attn_diag.watching.monitoring.record import MonitorCheck

VOCABULARY, LENGTH, BATCH = 97, 64, 4
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROTARY = _SIZES | {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16}
# Class of transformers, implementation of attention, whether sequences are flattened into one, and options.
MODELS: dict[str, tuple[str, str, bool, dict[str, Any]]] = {
    "gpt-oss": ("GptOss", "eager", False, _ROTARY | {"sliding_window": 16, "num_local_experts": 2,
                                                      "num_experts_per_tok": 1}),
    "deepseek-v3 sdpa": ("DeepseekV3", "sdpa", False, {}),
    "deepseek-v3 eager": ("DeepseekV3", "eager", False, {}),
    "gemma-2": ("Gemma2", "eager", False, _ROTARY | {"sliding_window": 16, "attn_logit_softcapping": 20.0,
                                                      "query_pre_attn_scalar": 16}),
    "bloom": ("Bloom", "eager", False, {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4,
                                         "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "mpt": ("Mpt", "eager", False, {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 2, "n_heads": 4,
                                     "max_seq_len": 256}),
    "packed llama sdpa": ("Llama", "sdpa", True, _ROTARY),
    "packed llama eager": ("Llama", "eager", True, _ROTARY),
    "llama dropout eager": ("Llama", "eager", False, _ROTARY | {"attention_dropout": 0.1}),
    "llama dropout sdpa": ("Llama", "sdpa", False, _ROTARY | {"attention_dropout": 0.1}),
    "bloom dropout": ("Bloom", "eager", False, {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 2, "n_head": 4,
                                                 "hidden_dropout": 0.0, "attention_dropout": 0.1}),
}  # fmt: skip
_MLA = _SIZES | {
    "intermediate_size": 128, "max_position_embeddings": 256, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "q_lora_rank": 48, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24, "v_head_dim": 24, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip
MODES = ("autocast", "bf16")


def model_of(name: str, seed: int) -> torch.nn.Module:
    """A randomly initialised one of two layers."""
    import transformers

    family, attention, _, options = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        **(options or _MLA), attn_implementation=attention, use_cache=False
    )
    torch.manual_seed(seed)
    head = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model: torch.nn.Module = getattr(transformers, f"{family}{head}")(config)
    return model


def sequences(generator: torch.Generator) -> Tensor:
    """[B, T]: each token is that of eight before plus one, one in ten anything: attention has to look back."""
    ids = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
    noise = torch.rand(BATCH, LENGTH, generator=generator) < 0.1
    for t in range(8, LENGTH):
        ids[:, t] = torch.where(noise[:, t], ids[:, t], (ids[:, t - 8] + 1) % VOCABULARY)
    return ids


def batch_of(generator: torch.Generator, *, flattened: bool) -> dict[str, Tensor]:
    """What the model is given; flattened as Hugging Face's collator does: documents of 8 to 64 tokens in one row."""
    ids = sequences(generator)
    if not flattened:
        return {"input_ids": ids, "labels": ids}
    import transformers

    lengths = torch.randint(8, LENGTH + 1, (BATCH,), generator=generator).tolist()
    documents = [{"input_ids": row[:n].tolist()} for row, n in zip(ids, lengths, strict=True)]
    flatten: Any = transformers.DataCollatorWithFlattening
    return dict(flatten()(documents))


@contextmanager
def inside_in_fp32(model: torch.nn.Module) -> Iterator[None]:
    """The model's eager attention from the same BF16 q, k and v to a BF16 O, with nothing rounded to BF16 between."""
    home = vars(sys.modules[type(model).__module__])
    inner = home["eager_attention_forward"]

    def eager_attention_forward(module: Any, q: Tensor, k: Tensor, v: Tensor, *given: Any, **options: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            q, k, v = (t.bfloat16().float() for t in (q, k, v))
            o, probs = inner(module, q, k, v, *given, **options)
        return o.bfloat16(), probs

    home["eager_attention_forward"] = eager_attention_forward
    try:
        yield
    finally:
        home["eager_attention_forward"] = inner


def figures(checks: Iterable[MonitorCheck]) -> dict[str, Any]:
    """What the rule saw, and what it would have said if all of a measured error counted."""
    state, counted, off, whole = AlarmState(), 0.0, 0.0, list[MonitorCheck]()
    for check in checks:
        state.update(check)
        counted = max(counted, state.share)
        layers = [layer for layer in check.layers if not layer.is_judged]
        for layer in layers:
            measured = layer.values["dq_share"][layer.values["measured"] > 0]
            off = max([off, *measured[measured > 0].tolist()])
        without = [
            replace(one, values={n: v for n, v in one.values.items() if "share_delta" not in n}) for one in layers
        ]
        whole.append(replace(check, layers=tuple(without)))
    before = [f"step {a.step}, layer {a.layer}, head {a.head}" for a in replay(whole) if a.kind == "rounding"]
    return {"counted": round(counted, 4), "off": round(off, 4), "whole": before}


def trained(
    name: str, mode: str, seed: int, steps: int, every: int, rate: float, begins: Callable[[int], None] = lambda _: None
) -> dict[str, Any]:
    """One run under the monitor; ``begins`` is told of each step."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("attn_diag").addHandler(handler)
    model = model_of(name, seed)
    if mode == "bf16":
        model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    began = time.perf_counter()
    with attn_diag.Monitor(model, every=every) as monitor:
        for step in range(steps):
            begins(step)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 20)
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                loss = model(**batch_of(generator, flattened=MODELS[name][2])).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            losses.append(float(loss.detach()))
    logging.getLogger("attn_diag").removeHandler(handler)
    return {
        "model": name, "mode": mode, "rate": rate, "seed": seed, "steps": steps, "checks": len(monitor.history),
        "layers": sorted({str(layer.module) for check in monitor.history for layer in check.layers}),
        "first loss": round(sum(losses[:5]) / 5, 3), "last loss": round(sum(losses[-5:]) / 5, 3),
        "alarms": [f"step {a.step}, layer {a.layer}, head {a.head}: {a.reason}" for a in monitor.alarms],
        **figures(monitor.history), "said": said, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--rates", nargs="*", type=float, default=[1e-3, 3e-3])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fp32", action="store_true", help="eager attention in fp32 inside")
    options = parser.parse_args()
    import transformers

    runs: list[dict[str, Any]] = []
    if options.json is not None and options.json.exists():
        runs = json.loads(options.json.read_text(encoding="utf-8"))["runs"]
    seeds = range(options.first, options.first + options.seeds)
    for rate, seed, mode, name in product(options.rates, seeds, options.modes, options.models):
        which = {"model": name, "mode": mode, "rate": rate, "seed": seed} | ({"fp32": True} if options.fp32 else {})
        runs = [r for r in runs if {key: r.get(key) for key in which} != which or r.get("fp32", False) != options.fp32]
        with inside_in_fp32(model_of(name, seed)) if options.fp32 else nullcontext():
            runs.append(which | trained(name, mode, seed, options.steps, options.every, rate))
        print(runs[-1], file=sys.stderr, flush=True)
        save({**made_by(), "transformers": transformers.__version__, "runs": runs}, options.json)


if __name__ == "__main__":
    main()
