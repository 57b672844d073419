"""What the bounds of the reference's error cost an inspection, beside one that does without.

    python benchmarks/bench_bounds.py [--device cpu|cuda] [--json FILE]

Both kinds alternate in one process, on one thread; the medians of processor time (on a GPU: of time) are compared, and
the median of the ratios of neighbours is given too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from measuring import CAPTURES, captured, made_by, normal, options_of, save, timed
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from attn_diag import Capture, load
from attn_diag.analyses.inspection.inspect import inspect_captures
from attn_diag.head.certification import RoundedBound
from attn_diag.reference import AttentionHead, HeadBounds, HeadReference, RowBlock, reference_head


class NoBounds:
    """In place of ``BoundCollector``: zeros that take no memory."""

    def __init__(self, head: AttentionHead) -> None:
        self._head = head

    def add(self, block: RowBlock) -> None:
        pass

    def take(self, *_: object) -> None:
        pass

    @staticmethod
    def each(collectors: Sequence[NoBounds], _: Sequence[HeadReference]) -> list[HeadBounds]:
        found = []
        for head in (c._head for c in collectors):
            zero, rows = head.q.new_zeros(()), len(head.q)
            out, dq = (zero.expand(rows, x.shape[1]) for x in (head.v, head.q))
            found.append(HeadBounds(out, zero.expand(rows), zero.expand(rows), dq))
        return found


def no_sums(of_heads: Tensor, *_: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.zeros(len(of_heads))


def without_sums(*arguments: Any, **options: Any) -> HeadReference:
    return reference_head(*arguments, **(options | {"gradient_sums": False}))


@contextmanager
def no_bounds() -> Iterator[None]:
    """Inspections in here do none of the bounds' work."""
    with (
        patch("attn_diag.head.streaming.BoundCollector", NoBounds),
        patch("attn_diag.head.truth.reference_head", without_sums),
        patch("attn_diag.head.measure.sums_of", no_sums),
        patch("attn_diag.head.measure.rounding_of_products", no_sums),
        patch.object(RoundedBound, "of", lambda truth, *_: RoundedBound(len(truth), None, None)),
    ):
        yield


def random_capture(heads: int, length: int, d: int) -> Capture:
    """N(0,1) in BF16, O rounded once."""
    inputs = normal(1, heads, length, d)
    q, k, v, _ = (x.double() for x in inputs)
    return captured(inputs, o=scaled_dot_product_attention(q, k, v, is_causal=True).bfloat16())


def compare(capture: Capture, device: str, pairs: int) -> dict[str, float]:
    clock = time.process_time if device == "cpu" else time.perf_counter
    full, bare = list[float](), list[float]()
    for i in range(pairs + 1):
        for times, context in ((full, nullcontext), (bare, no_bounds))[:: 1 if i % 2 else -1]:
            with context():
                times.append(timed(lambda: inspect_captures([capture], device=device), clock))
    full, bare = full[1:], bare[1:]  # the first pair warms up
    return {
        "with": round(median(full), 3),
        "without": round(median(bare), 3),
        "ratio": round(median(full) / median(bare), 3),
        "of neighbours": round(median(a / b for a, b in zip(full, bare, strict=True)), 3),
    }


def main() -> None:
    options = options_of(__doc__, device="cpu").parse_args()
    torch.set_num_threads(1)
    captures = {
        "kernels_gauss_T512, 2 heads, 4 kernels": (load(CAPTURES / "kernels_gauss_T512.safetensors"), 20),
        "gpt2_step731_L2H4, T = 1024": (load(CAPTURES / "gpt2_step731_L2H4.safetensors"), 20),
        "N(0,1), [1, 4, 2048, 64]": (random_capture(4, 2048, 64), 14),
        "N(0,1), [1, 1, 4096, 128]": (random_capture(1, 4096, 128), 14),
    }
    result = made_by(options.device) | {"seconds": {}}
    for name, (capture, pairs) in captures.items():
        result["seconds"][name] = compare(capture, options.device, pairs)
        print(f"{name:40}", result["seconds"][name], flush=True)
    save(result, options.json)


if __name__ == "__main__":
    main()
