"""flash-linear-attention's chunked kernels, and Mamba-2's own, judged on a GPU; captures and verdicts are kept.

    pip install fla-core==0.6.0 flash-linear-attention==0.6.0 einops mamba-ssm
    python benchmarks/study_linear_kernels.py OUT [--operators rwkv7 kda …] [--inputs gaussian trained] [--replay]
        [--monitored 300]
    python benchmarks/study_linear_kernels.py OUT --judge    # the captures that are in OUT, again, without a GPU
    python benchmarks/study_linear_kernels.py OUT --sums-in-fp32    # one line of fla's backward changed

OUT gets a capture and the verdict (JSON) of every operator, and a summary: per quantity answer, factor, error. An
operator's function for decoding (fused_recurrent_*) runs on the same inputs, as observation "recurrent". With
``--replay`` the first capture of each operator goes through ``replay_linear`` as well, on the GPU.

Inputs: *gaussian*, N(0,1) with k of length 1, the decays of half of the heads as at the start of training, those of the
other half as trained models have them (log decay about -0.05 and -0.003); *trained*, those of a model of fla's layers
that was trained (``linear_trained.py``). The backward of the gated delta rule refuses Triton 3.4 to 3.7.0 on Hopper,
where its gradients are wrong (fla #640); here the refusal is lifted, to see whether the verdict names it. Of the
configurations that a kernel would be tuned over, the one nearest to four warps and the fewest stages runs.

``--sums-in-fp32`` runs a copy of fla in which the sums over the state that a decay's gradient takes, ``tl.sum(b_h *
b_dh)`` of 16-bit tiles (products and sums are 16-bit then), are made in fp32.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from linear_kernels import one_configuration
from linear_trained import MODELS, Trained
from measuring import made_by, save, watched

from attn_diag import replay_linear
from attn_diag.analyses.linear.inspect import inspect_linear
from attn_diag.captures.linear import LinearCapture, load_linear
from attn_diag.testing.linear.function import LinearFunction
from attn_diag.testing.linear.inputs import LONG, linear_inputs, rounded

HEAD = 64
# Operator -> the functions for training and, where there is one, for decoding.
KERNELS: dict[str, tuple[str, ...]] = {
    name: tuple(f"fla.ops.{name}:{how}_{name}" for how in ("chunk", "fused_recurrent"))
    for name in ("rwkv7", "gated_delta_rule", "kda", "gla", "simple_gla", "delta_rule", "retention")
} | {"mamba2": ("mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined",)}


def lift_the_refusal() -> None:
    """Let the gated backward run on every Triton."""
    module: Any = import_module("fla.ops.common.chunk_o")
    module.TRITON_ABOVE_3_7_1 = True


def sum_states_in_fp32() -> None:
    """Put a copy of fla, in which the sums over the state are fp32's, before the installed one."""
    found, folder = find_spec("fla"), Path(tempfile.mkdtemp())
    assert found is not None
    assert found.origin is not None
    shutil.copytree(Path(found.origin).parent, folder / "fla")
    for file in ("common/chunk_o.py", "kda/chunk_bwd.py"):
        path = folder / "fla" / "ops" / file
        text = path.read_text()
        assert "tl.sum(b_h * b_dh" in text, file
        path.write_text(text.replace("tl.sum(b_h * b_dh", "tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32)"))
    sys.path.insert(0, str(folder))


def gaussian_call(operator: str, seed: int, options: argparse.Namespace) -> LinearCapture:
    """Inputs and dO of N(0,1), with the decays of two kinds; an initial state."""
    heads = options.heads // 2
    shape, make = (1, options.steps, heads, HEAD, HEAD), torch.Generator().manual_seed(seed)
    halves = [linear_inputs(operator, shape, seed * 2 + i, kind=kind) for i, kind in enumerate(("normal", LONG))]
    if operator == "mamba2":
        halves[1]["A"] /= 32
    dtype = torch.float16 if options.fp16 else torch.bfloat16
    tensors = rounded({n: torch.cat([half[n] for half in halves], 0 if n == "A" else 2) for n in halves[0]}, dtype)
    tensors["initial_state"] = torch.randn(1, options.heads, HEAD, HEAD, generator=make) * 0.1
    tensors["do"] = torch.randn(1, options.steps, options.heads, HEAD, generator=make).to(dtype)
    return LinearCapture.from_tensors(operator, tensors, kernel=KERNELS[operator][0])


def ran(call: LinearCapture, how: dict[str, Any]) -> LinearCapture:
    """The call with what the operator's functions return for it, gradients where they have a backward."""
    tensors = dict(call.tensors)
    for name in KERNELS[call.operator]:
        function = LinearFunction.of(name, call.operator, device=torch.device("cuda"))
        training = name == KERNELS[call.operator][0]
        function = replace(function, options=how if training else None)
        try:
            found, _ = function.run(call, gradients=training)
        except Exception as error:
            if training:
                raise
            print(f"    {name}: {type(error).__name__}: {error}", flush=True)
            continue
        tensors |= {n if training else f"recurrent.{n}": t for n, t in found.items()}
    return replace(call, tensors=tensors)


def captured(
    operator: str, inputs: str, seed: int, options: argparse.Namespace
) -> tuple[LinearCapture, dict[str, Any]]:
    """One call of the kernel, kept, and what is to be said of it."""
    begun, said, how = time.perf_counter(), dict[str, Any](), dict[str, Any]()
    if inputs == "gaussian":
        call = gaussian_call(operator, seed, options)
    else:
        trained = Trained.of(operator, options.train_steps, options.steps, seed)
        call, how = trained.inputs()
        own = f"{operator}_layer_{seed}"
        said |= {"loss": trained.loss, "options": how}
        if not options.unjudged:
            said["as the layer calls it"] = attempted(lambda: judged(trained.as_captured(), own, options), own)
    if options.safe_gate and operator == "rwkv7" and inputs == "gaussian":
        how = {"safe_gate": True, "chunk_size": 64}
    made = ran(call, how)
    made.save(options.out / f"{operator}_{inputs}_{seed}.safetensors")
    return made, said | {"seconds_on_gpu": time.perf_counter() - begun}


def judged(capture: LinearCapture, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Its verdict, kept and printed."""
    begun = time.perf_counter()
    verdict = inspect_linear(capture, device="cpu")
    seconds = time.perf_counter() - begun
    (options.out / f"{name}.json").write_text(verdict.to_json())
    print(f"{name}: {verdict.sentence} ({seconds:.1f} s)", flush=True)
    rows: dict[str, dict[str, Any]] = {}
    for observation in verdict.captures[0].observations:
        quantities = [q for head in observation.heads for q in head.quantities]
        prefix = "recurrent." if observation.name == "recurrent" else ""
        for n in dict.fromkeys(q.quantity for q in quantities):
            qs = [q for q in quantities if q.quantity == n]
            rows[f"{prefix}{n}"] = {
                "answers": sorted({q.answer for q in qs}),
                "causes": sorted({str(q.cause) for q in qs if q.cause}),
                "factor": [q.factor for q in qs],
                "relative_error": [q.relative_error for q in qs],
            }
    for n, row in rows.items():
        worst = max((f for f in row["factor"] if f is not None), default=float("nan"))
        error = max((f for f in row["relative_error"] if f is not None), default=float("nan"))
        answers = "/".join(row["answers"])
        print(f"    {n:24} {answers:12} factor {worst:.3g}, off {error:.2e} {row['causes'] or ''}", flush=True)
    return {"sentence": verdict.sentence, "labels": sorted(verdict.labels), "quantities": rows, "seconds": seconds}


def captured_and_judged(operator: str, inputs: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One call, and its verdict."""
    capture, said = captured(operator, inputs, seed, options)
    if options.unjudged:
        return said
    return {**said, **judged(capture, f"{operator}_{inputs}_{seed}", options)}


def replayed(capture: LinearCapture, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """What ``replay_linear`` says on the GPU."""
    begun = time.perf_counter()
    chunked = {n: t for n, t in capture.tensors.items() if not n.startswith("recurrent.")}
    found = replay_linear(replace(capture, tensors=chunked), against="installed", device="cuda", limit_s=options.limit)
    seconds = time.perf_counter() - begun
    (options.out / f"{name}_replay.json").write_text(found.to_json())
    one = found.captures[0]
    kernels = {k.name: [k.outcome, k.stage, k.message, list(k.labels), k.deterministic] for k in one.kernels}
    print(f"{name} replayed: {one.words} ({seconds:.1f} s)\n    {kernels}", flush=True)
    return {"words": one.words, "kernels": kernels, "seconds": seconds}


def monitored(operator: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """A model trained under the monitor."""
    begun = time.perf_counter()
    trained = Trained.of(operator, options.monitored, 256, seed, every=options.every)
    assert trained.monitor is not None
    seen = watched(trained.monitor)
    print(f"{operator} monitored, loss {trained.loss:.3f}: {seen}", flush=True)
    return {"loss": trained.loss, "seconds": time.perf_counter() - begun, **seen}


def attempted(what: Callable[[], Any], name: str) -> Any:
    """What it returns, or that it raised."""
    try:
        return what()
    except Exception as error:
        traceback.print_exc(limit=-3)
        print(f"{name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
        return {"raised": f"{type(error).__name__}: {error}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--operators", nargs="*", default=list(KERNELS))
    parser.add_argument("--inputs", nargs="*", default=["gaussian", "trained"])
    parser.add_argument("--steps", type=int, default=1024, help="T")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--train-steps", type=int, default=250)
    parser.add_argument("--monitored", type=int, default=0, help="steps of a training under the monitor, of each model")
    parser.add_argument("--every", type=int, default=50, help="steps from one look of the monitor to the next")
    parser.add_argument("--replay", action="store_true", help="the first capture of each operator, on the GPU")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds that a replayed function may take")
    parser.add_argument("--sums-in-fp32", action="store_true", help="change a line of fla's backward")
    parser.add_argument("--fp16", action="store_true", help="Gaussian inputs in FP16")
    parser.add_argument("--safe-gate", action="store_true", help="RWKV-7's other kernel, on Gaussian inputs")
    parser.add_argument("--unjudged", action="store_true", help="keep the captures alone")
    parser.add_argument("--judge", action="store_true", help="judge the captures that are there")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.judge:
        found = {p.stem: judged(load_linear(p), p.stem, options) for p in sorted(options.out.glob("*.safetensors"))}
        save(made_by() | found, options.out / "summary.json")
        return
    if options.sums_in_fp32:
        sum_states_in_fp32()
    lift_the_refusal()
    one_configuration()
    summary: dict[str, Any] = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    seeds = range(options.first, options.first + options.seeds)
    kept = options.out / f"summary_{'_'.join(options.operators)}.json"
    for operator in options.operators:
        trainable = operator in MODELS and "trained" in options.inputs
        jobs = [(inputs, seed) for inputs in options.inputs if inputs != "trained" for seed in seeds]
        jobs += [("trained", seed) for seed in (seeds if trainable else ())]
        for inputs, seed in jobs:
            name = f"{operator}_{inputs}_{seed}"
            summary[name] = attempted(partial(captured_and_judged, operator, inputs, seed, options), name)
            kept.write_text(json.dumps(summary, indent=2) + "\n")
        for seed in seeds if options.monitored and operator in MODELS else ():
            name = f"{operator}_monitored_{seed}"
            summary[name] = attempted(partial(monitored, operator, seed, options), name)
            kept.write_text(json.dumps(summary, indent=2) + "\n")
        if not jobs:
            continue
        first = f"{operator}_{jobs[0][0]}_{jobs[0][1]}"
        if options.replay and (options.out / f"{first}.safetensors").exists():
            capture = load_linear(options.out / f"{first}.safetensors")
            summary[f"{first}_replay"] = attempted(partial(replayed, capture, first, options), f"{first} replayed")
            kept.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
