"""Is the model of the special function unit's exp2 bit-identical to this GPU's? All 2^32 fp32 numbers, counted.

torch.exp2 and Triton's tl.exp2 (ex2.approx) against ``attn_diag.kernels.hardware_exp2``. NaN equals NaN. Results below
the normal numbers, which Triton flushes to 0 and torch makes in another way, are counted apart.

    python benchmarks/bench_exp2.py --json benchmarks/results/exp2_h100.json
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from measuring import made_by, options_of, save
from torch import Tensor

from attn_diag.kernels.hardware_exp2 import hardware_exp2

AT_ONCE, BLOCK = 2**25, 1024
LEAST_NORMAL = torch.finfo(torch.float32).tiny


@triton.jit  # type: ignore[untyped-decorator]
def exp2_kernel(X: Any, Y: Any, BLOCK: tl.constexpr) -> None:
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + at, tl.exp2(tl.load(X + at)))


def by_triton(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    exp2_kernel[(x.numel() // BLOCK,)](x, y, BLOCK)
    return y


PATHS: dict[str, Callable[[Tensor], Tensor]] = {"torch.exp2": torch.exp2, "tl.exp2": by_triton}


def main() -> None:
    options = options_of(__doc__).parse_args()
    counts = {path: {"normal": 0, "subnormal": 0} for path in PATHS}
    compared, normal, largest = 0, 0, 0
    for start in range(-(2**31), 2**31, AT_ONCE):
        x = torch.arange(start, start + AT_ONCE, dtype=torch.int64, device="cuda").int().view(torch.float32)
        model = hardware_exp2(x)
        is_normal = (model >= LEAST_NORMAL) | model.isnan()
        compared, normal = compared + x.numel(), normal + int(is_normal.sum())
        exact = torch.exp2(x.double()).float()
        off = (model.view(torch.int32).long() - exact.view(torch.int32).long()).abs()
        largest = max(largest, _most(off, model))
        for path, function in PATHS.items():
            made = function(x)
            differ = (made != model) & ~(made.isnan() & model.isnan())
            counts[path]["normal"] += int((differ & is_normal).sum())
            counts[path]["subnormal"] += int((differ & ~is_normal).sum())
    result = made_by("cuda") | {
        "inputs": compared,
        "normal results, infinities and NaN": normal,
        "mismatches": counts,
        "largest error of the model [ulp]": largest,
    }
    print(result)
    save(result, options.json)


def _most(off: Tensor, model: Tensor) -> int:
    """The largest error of finite normal results."""
    counted = off[(model >= LEAST_NORMAL) & model.isfinite()]
    return int(counted.max()) if counted.numel() else 0


if __name__ == "__main__":
    main()
