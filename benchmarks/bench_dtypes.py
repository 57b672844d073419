"""What trace_dtypes costs: a traced forward beside an untraced one, on a CPU under BF16 autocast.

A GPT-2-like decoder with embeddings, LayerNorms, SDPA and GELU, at a usual size and at one whose operations are so
small that nearly all time is spent in calling them. Runs alternate in one process; "first": each traced forward under a
trace of its own, as ``with trace_dtypes()`` around one forward has it; "later": the second forward under one trace,
when all lines are known; "bare": under a torch function mode that does nothing, the least that any such trace costs.
Medians of the ratios of neighbouring runs, on processor time of the thread (one thread; others may use the machine).

    python benchmarks/bench_dtypes.py --json benchmarks/results/dtypes_cpu.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from measuring import made_by, options_of, save, timed
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import BaseTorchFunctionMode

from attn_diag.watching.drift.trace import DtypeTrace, trace_dtypes

BOUND = 3.0
# layers, width, T
SHAPES = [(4, 256, 128), (4, 64, 16)]

CONTEXTS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "plain": nullcontext, "bare": BaseTorchFunctionMode, "first": trace_dtypes, "later": trace_dtypes,
}  # fmt: skip


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = (t.view(B, T, 4, C // 4).transpose(1, 2) for t in self.qkv(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + torch.as_tensor(self.down(F.gelu(self.up(self.ln_2(x)))))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int = 512) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(256, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return torch.as_tensor(self.head(self.ln(x)))


def measure(layers: int, width: int, length: int, pairs: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, tokens = Decoder(layers, width), torch.randint(512, (1, length))
    times: dict[str, list[float]] = {name: [] for name in CONTEXTS}
    trace = DtypeTrace()
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(5):
            model(tokens)
        for _ in range(pairs):
            for name, context in CONTEXTS.items():
                with context() as found:
                    if name == "later":
                        model(tokens)
                    times[name].append(timed(lambda: model(tokens), time.thread_time))
                    trace = found if isinstance(found, DtypeTrace) else trace
    ratios = {n: [t / p for t, p in zip(times[n], times["plain"], strict=True)] for n in times if n != "plain"}
    found = trace.result()
    return {
        "layers": layers, "width": width, "T": length, "pairs": pairs,
        # Of two forwards.
        "operations": found.operations // 2, "attention_calls": found.attention_calls // 2,
        "plain_ms": 1e3 * statistics.median(times["plain"]),
        **{f"ratio_{name}": statistics.median(values) for name, values in ratios.items()},
        "ratio_first_quartiles": statistics.quantiles(ratios["first"], n=4)[::2],
        "bound": BOUND, "held": statistics.median(ratios["first"]) <= BOUND,
    }  # fmt: skip


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--pairs", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        rows.append(measure(*shape, arguments.pairs))
        print(rows[-1], flush=True)
    save(made_by() | {"rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
