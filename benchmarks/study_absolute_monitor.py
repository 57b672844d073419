"""The monitor's alarm for what no rounding makes: silent on healthy models, raised at once where a kernel is wrong.

Four parts, each of which replaces its own rows of the file:

- healthy: tiny models of Hugging Face's classes train on a CPU, in BF16 autocast, in BF16 and in FP16 with a scaler,
  and with what is ordinary in training: activation checkpoints, accumulated gradients, frozen layers, padded rows,
  steps without a loss, tiny gradients, dropout, packed documents. No alarm of any kind is expected.
- planted: every kernel of ``verdicts.defects`` whose mathematics is wrong, forward or backward, in the second of two
  layers under ``attn_diag.observe``; the first has the same kernel without the defect. Is the second accused, and the
  first not? ``inspect`` is asked of the same call.
- cost: what a monitored step of a GPT-2 of 4 layers takes above its neighbours, in processor time of one thread; run it
  with the package of another commit before this one on PYTHONPATH, and ``--label``, to compare.
- fused: torch's fused kernel for CPUs is replaced in the dispatcher by one whose backward or forward is wrong, from the
  first step on or from a later one, while a model trains.

    python benchmarks/study_absolute_monitor.py --part healthy --json benchmarks/results/absolute_monitor_cpu.json
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measuring import made_by, options_of, save
from study_healthy_layouts import MODELS, batch_of, model_of
from torch import Tensor, nn
from verdicts.defects import DEFECTS, home
from verdicts.inputs import Inputs, draw
from verdicts.kernels import Outputs
from verdicts.planting import Defect

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from planted_operators import FAULTS, replaced

import attn_diag

_SIZES = {"vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_ROTARY = _SIZES | {"intermediate_size": 128, "num_key_value_heads": 2, "max_position_embeddings": 256, "head_dim": 16}
_GPT2 = {"vocab_size": 97, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "resid_pdrop": 0.0,
         "embd_pdrop": 0.0, "attn_pdrop": 0.0}  # fmt: skip
MODELS.update({
    "gpt2 sdpa": ("GPT2", "sdpa", False, _GPT2),
    "gpt2 eager": ("GPT2", "eager", False, _GPT2),
    "llama sdpa": ("Llama", "sdpa", False, _ROTARY),
    "llama eager": ("Llama", "eager", False, _ROTARY),
    "qwen3 sdpa": ("Qwen3", "sdpa", False, _ROTARY),
    "gemma sdpa": ("Gemma", "sdpa", False, _ROTARY),
})  # fmt: skip
# What is ordinary in training, on models whose kernel is fused and where it is not.
ORDINARY = (
    "plain", "checkpointed", "accumulated", "frozen", "padded", "without a loss", "tiny gradients",
)  # fmt: skip
_LATE = 20


class Heard(logging.Handler):
    """What attn_diag logs."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __enter__(self) -> Heard:
        logging.getLogger("attn_diag").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("attn_diag").removeHandler(self)


def shown(monitor: attn_diag.Monitor) -> dict[str, Any]:
    """Alarms and second looks of a run."""
    looks = [layer for check in monitor.history for layer in check.layers if layer.again]
    checks = [check for check in monitor.history if not check.again]
    largest: dict[str, float] = {}
    for layer in (layer for check in checks for layer in check.layers):
        for name in ("o_factor", "o_row_factor", "dq_factor", "dq_row_factor", "dk_factor", "dv_factor"):
            known = layer.values[name][layer.values[name] == layer.values[name]]
            if len(known):
                largest[name] = max(largest.get(name, 0.0), round(float(known.max()), 2))
    return {
        "checks": len(checks), "second looks": len(looks),
        "of them lossy": sum(bool((layer.values["lossy"] > 0).any()) for layer in looks),
        "largest factors": largest,
        "alarms": [{"step": a.step, "layer": a.layer, "head": a.head, "kind": a.kind, "why": a.reason}
                   for a in monitor.alarms],
    }  # fmt: skip


def healthy(name: str, mode: str, way: str, seed: int, steps: int, every: int) -> dict[str, Any]:
    """One run of a healthy model."""
    torch.manual_seed(seed)
    model = model_of(name, seed)
    if mode == "bf16":
        model.bfloat16()
    if way == "checkpointed":
        model.gradient_checkpointing_enable()  # type: ignore[operator]
        model.train()
    if way == "frozen":
        for part, parameter in model.named_parameters():
            parameter.requires_grad_(not any(n in part for n in ("q_proj", "c_attn", "embed_tokens", "wte")))
    dtype = torch.float16 if mode == "fp16" else torch.bfloat16
    scaler = torch.amp.GradScaler("cpu", enabled=mode == "fp16", init_scale=2.0**24)  # the first steps overflow
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    began, losses = time.perf_counter(), list[float]()
    with Heard() as heard, attn_diag.Monitor(model, every=every) as monitor:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
            for _ in range(2 if way == "accumulated" else 1):
                batch = batch_of(generator, flattened=MODELS[name][2])
                if way == "padded":
                    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
                    batch["attention_mask"][0, -20:] = 0
                    batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
                with torch.autocast("cpu", dtype, enabled=mode != "bf16"):
                    loss = model(**batch).loss
                losses.append(float(loss.detach()))
                if way == "without a loss" and step // every % 2:
                    loss = loss * 0
                scaler.scale(loss * (1e-12 if way == "tiny gradients" else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
    return {
        "model": name, "mode": mode, "way": way, "seed": seed, "steps": steps, **shown(monitor), "said": heard.said,
        "first loss": round(sum(losses[:5]) / 5, 3), "last loss": round(sum(losses[-5:]) / 5, 3),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


class _Made(torch.autograd.Function):
    """Returns what a planted kernel does."""

    @staticmethod
    def forward(context: Any, q: Tensor, k: Tensor, v: Tensor, made: Outputs) -> tuple[Tensor, Tensor]:  # noqa: ARG004
        context.made = made
        context.mark_non_differentiable(made.lse)
        return made.o.clone(), made.lse

    @staticmethod
    def backward(context: Any, *_: Any) -> Any:
        return context.made.dq.clone(), context.made.dk.clone(), context.made.dv.clone(), None


class Layer(nn.Module):
    """One attention layer whose q, k and v are its parameters."""

    def __init__(self, inputs: Inputs, made: Outputs) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(t.clone()) for t in (inputs.q, inputs.k, inputs.v))
        self.inputs = inputs

        @attn_diag.observe(causal=inputs.causal, scale=inputs.scale, window=inputs.window, softcap=inputs.softcap)
        def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Any:  # noqa: ARG001
            return _Made.apply(q, k, v, made)  # type: ignore[no-untyped-call]

        self.attention = attention

    def forward(self) -> Tensor:
        mask = self.inputs.key_mask
        o, _ = self.attention(self.q, self.k, self.v, None if mask is None else mask[:, None, None])
        result: Tensor = (o.float() * self.inputs.do.float()).sum()
        return result


class Two(nn.Module):
    """Two layers of the same inputs."""

    def __init__(self, inputs: Inputs, first: Outputs, second: Outputs) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(inputs, first), Layer(inputs, second)])

    def forward(self) -> Tensor:
        first, second = (layer() for layer in self.layers)
        result: Tensor = first + second
        return result


def planted(defect: Defect, family: str, rows: int) -> dict[str, Any]:
    """A few steps of a defect."""
    inputs = draw(family, home(defect))
    made = defect.run(inputs)
    model = Two(inputs, defect.healthy(inputs), made)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    began = time.perf_counter()
    with Heard() as heard, attn_diag.Monitor(model, every=5, rows=rows, sequences=2) as monitor:
        for _ in range(8):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
    found = shown(monitor)
    alarms = [a for a in found["alarms"] if a["kind"] in ("wrong", "nonfinite", "overwhelmed")]
    tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "do": inputs.do, "o": made.o, "lse": made.lse}
    tensors |= {"dq": made.dq, "dk": made.dk, "dv": made.dv}
    mask = inputs.key_mask
    capture = attn_diag.Capture.from_tensors(
        tensors | ({} if mask is None else {"mask": mask[:, None, None]}), causal=inputs.causal, scale=inputs.scale,
        window=inputs.window, softcap=inputs.softcap,
    )  # fmt: skip
    diagnosis = attn_diag.inspect_captures([capture]).captures[0]
    labels = {label for h in diagnosis.observations[0].heads if h.verdict is not None for label in h.verdict.labels}
    labels |= {"wrong"} if any(c.better for c in diagnosis.assumptions.checks) else set()
    return {
        "defect": defect.name, "where": defect.where, "pattern": defect.pattern, "family": family, "rows": rows,
        "setting": home(defect), "found": any(a["layer"] == 1 for a in alarms),
        "first layer accused": any(a["layer"] == 0 for a in found["alarms"]),
        "at step": min((a["step"] for a in alarms if a["layer"] == 1), default=None),
        "inspect": sorted(labels), **found, "said": heard.said, "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def fused(fault: str, seed: int, begins: int) -> dict[str, Any]:
    """A model that trains with torch's fused kernel, which is wrong from a step on."""
    name = ("gpt2 sdpa", "llama sdpa", "qwen3 sdpa")[seed % 3]
    torch.manual_seed(seed)
    model = model_of(name, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    generator, step = torch.Generator().manual_seed(seed), 0
    began = time.perf_counter()
    with replaced(fault, "cpu", lambda: step >= begins), attn_diag.Monitor(model, every=5) as monitor:
        for step in range(begins + 9):  # noqa: B007 - the replaced kernel reads it
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch_of(generator, flattened=False)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    found = shown(monitor)
    wrong = [a for a in found["alarms"] if a["kind"] in ("wrong", "nonfinite", "overwhelmed")]
    return {
        "fault": fault, "model": name, "seed": seed, "begins": begins, **found,
        "early": sum(a["step"] < begins for a in found["alarms"]), "layers": sorted({a["layer"] for a in wrong}),
        "found": bool(wrong), "at step": min((a["step"] for a in wrong), default=None),
        "seconds": round(time.perf_counter() - began, 1),
    }  # fmt: skip


def cost(label: str, rows: int, sequences: int, pairs: int = 5) -> dict[str, Any]:
    """Processor time of monitored steps and of those between."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 512,
        "n_embd": 256,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": rows,
        "use_cache": False,
    }
    quiet: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "attn_implementation": "sdpa"}
    model: Any = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **quiet))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 512, (sequences, rows))
    times: list[float] = []
    with attn_diag.Monitor(model, every=2) as monitor:
        for _ in range(2 * pairs + 4):
            began = time.process_time()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            times.append((time.process_time() - began) * 1e3)
    looked, plain = times[4::2], times[5::2]
    step, extra = median(plain), median(a - b for a, b in zip(looked, plain, strict=True))
    return {
        "label": label, "rows": rows, "sequences": sequences, "plain step ms": round(step, 1),
        "extra ms": round(extra, 1), "share of a step at every=50": round(extra / 50 / step, 5),
        "alarms": [vars(alarm) for alarm in monitor.alarms],
    }  # fmt: skip


def runs(part: str, options: Any) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """What names a row, and the run that makes it."""
    if part == "healthy":
        for seed in range(options.seeds):
            for name in ("gpt2 sdpa", "llama sdpa", "qwen3 sdpa", "llama eager"):
                for way in ORDINARY[1:]:
                    yield from _healthy(name, "autocast", way, seed, options)
            for name in MODELS:
                for mode in ("autocast", "bf16", "fp16"):
                    yield from _healthy(name, mode, "plain", seed, options)
    elif part == "cost":
        for rows, sequences in ((256, 8), (1024, 4)):
            which = {"label": options.label, "rows": rows, "sequences": sequences}
            yield which, lambda r=rows, s=sequences: cost(options.label, r, s)  # type: ignore[misc]
    elif part == "planted":
        both = ([d for d in DEFECTS.values() if d.pattern and d.where == w] for w in ("forward", "backward"))
        for family in options.families:
            # By turns, so that a study that is cut off has both.
            for pair in zip_longest(*both):
                for defect in filter(None, pair):
                    which = {"defect": defect.name, "family": family, "rows": options.rows}
                    yield which, lambda d=defect, f=family: planted(d, f, options.rows)  # type: ignore[misc]
    else:
        for seed in range(options.seeds):
            for fault in FAULTS:
                begins = _LATE if seed % 2 else 0
                which = {"fault": fault, "seed": seed, "begins": begins}
                yield which, lambda f=fault, s=seed, b=begins: fused(f, s, b)  # type: ignore[misc]


def _healthy(name: str, mode: str, way: str, seed: int, options: Any) -> Iterator[Any]:
    which = {"model": name, "mode": mode, "way": way, "seed": seed}
    yield which, lambda: healthy(name, mode, way, seed, options.steps, options.every)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--part", choices=("healthy", "planted", "fused", "cost"), required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--families", nargs="*", default=["gaussian"])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--label", default="now", help="of the rows of cost")
    parser.add_argument("--only", default="", help="rows whose names hold this")
    parser.add_argument("--missing", action="store_true", help="rows that are not there yet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    import warnings

    warnings.filterwarnings("ignore", message="Warning only once for all operators")
    result: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        result = json.loads(options.json.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = result.get(options.part, [])
    for which, run in runs(options.part, options):
        same = [r for r in rows if {key: r[key] for key in which} == which]
        if options.only not in str(which) or (options.missing and same):
            continue
        rows = [r for r in rows if r not in same]
        rows.append(run())
        short = {n: x for n, x in rows[-1].items() if n not in ("said", "largest factors", "alarms")}
        print(short, [(a["step"], a["layer"], a["kind"], a["why"][:80]) for a in rows[-1]["alarms"]][:2], flush=True)
        result = result | made_by() | {options.part: rows}
        save(result, options.json)


if __name__ == "__main__":
    main()
