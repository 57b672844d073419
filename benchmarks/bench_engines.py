"""How long attribute, what-if and identify take, and which functions take it.

    python benchmarks/bench_engines.py [--device cpu|cuda] [--only NAME] [--captures N] [--heads N] [--length T]
                                       [--long T] [--kernels NAME …] [--profile] [--json FILE]

attribute: every head of N causal captures (1, heads, T, 64) with x, so that dW_Q follows. what-if and identify: one
head of (1, 1, long, 128). O and dQ are those of each of the ``--kernels``: fa2's own, by its Triton kernels on CUDA and
emulated on a CPU, or those of torch's flash, cudnn or efficient, on CUDA. Inputs are N(0,1) in BF16. Each is run twice:
the first run may compile kernels. ``--profile`` samples the second by function.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import torch
from measuring import captured, made_by, normal, options_of, save, timed
from profile_inspect import ours
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.kernels import emulate_head, preset
from attn_diag.kernels.attention import attention
from attn_diag.reference import AttentionHead, Masking

EVERY = 2e-3
LINES = 45
TORCHS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def capture_of(heads: int, length: int, width: int, seed: int, device: str, kernel: str, *, x: bool) -> Capture:
    """N(0,1), and what a kernel makes of it."""
    inputs = normal(1, heads, length, width, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    extra = {"x": torch.randn(1, length, 12 * 64, generator=generator).bfloat16()} if x else {}
    if device == "cuda":
        q, k, v, do = (t.cuda().requires_grad_() for t in inputs)
        if kernel == "fa2":
            o = attention(q, k, v, causal="top-left")
        else:
            with sdpa_kernel(TORCHS[kernel]):
                o = scaled_dot_product_attention(q, k, v, is_causal=True)
        (dq,) = torch.autograd.grad(o, q, do)
        return captured(inputs, o=o.detach().cpu(), dq=dq.cpu(), **extra)
    made = []
    for h in range(heads):
        q, k, v, do = (t[0, h].double() for t in inputs)
        head = AttentionHead(q, k, v, do, width**-0.5, Masking("top-left"))
        made.append(emulate_head(preset("fa2", "bf16", width), head, key_gradients=False))
    o = torch.stack([m.o for m in made])[None]
    dq = torch.stack([m.dq for m in made if m.dq is not None])[None]
    return captured(inputs, o=o, dq=dq, **extra)


def sampled(run: Callable[[], object]) -> None:
    """Print milliseconds of one call by the functions of this package: their own, and with all that they call."""
    own, whole = Counter[str](), Counter[str]()

    def sample(_: int, frame: FrameType | None) -> None:
        stack = list(ours(frame))
        own[stack[0] if stack else "elsewhere"] += 1
        whole.update(set(stack))

    before = signal.signal(signal.SIGALRM, sample)
    signal.setitimer(signal.ITIMER_REAL, EVERY, EVERY)
    seconds = timed(run)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
    each = seconds * 1e3 / max(own.total(), 1)
    print(f"profiled: {seconds:.2f} s")
    for title, found in (("own", own), ("with all that it calls", whole)):
        print(f"{title} [ms]:", flush=True)
        for place, count in found.most_common(LINES):
            print(f"{count * each:10.1f}  {place}")


def main() -> None:
    parser = options_of(__doc__, device="cuda")
    parser.add_argument("--only", choices=["attribute", "what-if", "identify"])
    for name, usual in (("captures", 12), ("heads", 12), ("length", 1024), ("long", 8192)):
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--kernels", nargs="+", choices=["fa2", *TORCHS], default=["fa2"])
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = options.device
    result: dict[str, Any] = made_by(device)
    result |= {
        "attribute of": [options.captures, options.heads, options.length, 64],
        "one head of": [options.long, 128],
    }
    for kernel in options.kernels:
        made = partial(capture_of, device=device, kernel=kernel)
        short = [made(options.heads, options.length, 64, i, x=True) for i in range(options.captures)]
        long = made(1, options.long, 128, 0, x=False)
        runs: dict[str, Callable[[], object]] = {
            "attribute": partial(attn_diag.attribute, short, device=device),
            "identify": partial(attn_diag.identify, long, device=device),
            "what-if": partial(attn_diag.what_if, long, device=device),
        }
        found = result[f"of {kernel}"] = {}
        for name, run in runs.items():
            if options.only in (None, name):
                found[name] = {"first [s]": round(timed(run), 3)}
                again = partial(sampled, run) if options.profile else run
                found[name]["again [s]"] = round(timed(again), 3)
                print(kernel, name, found[name], flush=True)
                save(result, options.json)


if __name__ == "__main__":
    main()
