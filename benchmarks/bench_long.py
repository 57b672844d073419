"""How long ``inspect`` of one long head takes on one GPU, and dealt out over all GPUs of this machine.

    python benchmarks/bench_long.py [--lengths T …] [--alone T] [--json FILE]

One causal head of D = 128 in BF16: O is that of ``attn_diag.attention``, dQ the true one rounded. Seconds of a warm
call, and the most memory that was allocated on each GPU; up to ``--alone`` rows also on one GPU, and how far the
figures of both documents lie apart (two of one GPU do, too: sums by key have no fixed order there).
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch
from bench_inspect import head_of
from measuring import captured, made_by, normal, options_of, save, timed
from same_figures import differences

from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.captures.capture import Capture
from attn_diag.kernels.attention import attention
from attn_diag.reference.fused import reference_of
from attn_diag.reference.fused_inputs import dealt_over

DEVICES = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]


def capture_of(length: int) -> Capture:
    """One head."""
    inputs = normal(1, 1, length, 128)
    o = attention(*(t.cuda() for t in inputs[:3]), causal="top-left").cpu()
    with dealt_over(DEVICES[1:]):
        dq = reference_of(head_of(inputs, 0, "cuda"), key_gradients=False).dq
    assert dq is not None
    return captured(inputs, o=o, dq=dq.bfloat16().cpu()[None, None])


def measured(capture: Capture, device: str) -> tuple[dict[str, Any], Any]:
    """Seconds and memory, and the document."""
    torch.cuda.empty_cache()
    for one in DEVICES:
        torch.cuda.reset_peak_memory_stats(one)
    documents = []

    def run() -> None:
        documents.append(json.loads(inspect_captures([capture], device=device).to_json()))
        for one in DEVICES:
            torch.cuda.synchronize(one)

    first = timed(run)
    seconds = [timed(run) for _ in range(1 if first > 10 else 3)]
    peaks = [round(torch.cuda.max_memory_allocated(one) / 2**30, 1) for one in DEVICES]
    row = {"first [s]": round(first, 2), "warm [s]": round(statistics.median(seconds), 3), "peak [GiB]": peaks}
    return row, documents[-1]


def apart(one: Any, other: Any) -> float | str:
    """Of the numbers of two documents; in words, what else differs."""
    largest = 0.0
    for place, a, b in differences(one, other):
        if not (isinstance(a, float) and isinstance(b, float)):
            return f"{place}: {a!r} and {b!r}"
        largest = max(largest, abs(a - b) / max(abs(a), abs(b)))
    return float(f"{largest:.1e}")


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2**17, 2**18, 2**20])
    parser.add_argument("--alone", type=int, default=2**18)
    options = parser.parse_args()
    result: dict[str, Any] = made_by("cuda") | {"GPUs": len(DEVICES)}
    for length in options.lengths:
        capture = capture_of(length)
        found = {"all": measured(capture, "cuda:all")}
        if length <= options.alone:
            found["one"] = measured(capture, "cuda:0")
        row: dict[str, Any] = {name: of for name, (of, _) in found.items()}
        if len(found) > 1:
            row["one / all"] = round(row["one"]["warm [s]"] / row["all"]["warm [s]"], 2)
            row["largest relative difference of a figure"] = apart(found["one"][1], found["all"][1])
        result[f"T = {length}"] = row
        print(length, row, flush=True)
        save(result, options.json)


if __name__ == "__main__":
    main()
