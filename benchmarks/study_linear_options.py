"""flash-linear-attention's chunked functions through the whole suite of ``check_linear``, on a GPU.

    pip install fla-core==0.6.0 flash-linear-attention==0.6.0 einops
    python benchmarks/study_linear_options.py --operators kda gla … [--json FILE]

Each case is a way to call a function: packed, with shared heads, its own scale, normalising q and k, making its gates.
Kernels run in one configuration, and the refusal of the gated delta rule's backward is lifted, as in
``study_linear_kernels.py``.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from linear_kernels import one_configuration
from measuring import made_by, options_of, save
from study_linear_kernels import KERNELS, attempted, lift_the_refusal

import attn_diag


def checked(operator: str) -> dict[str, Any]:
    """What became of each case."""
    begun = time.perf_counter()
    found = attn_diag.check_linear(KERNELS[operator][0], operator, head_dim=64, device="cuda")
    seconds = time.perf_counter() - begun
    print(f"{operator}: {'passed' if found.passed else 'failed'} ({seconds:.0f} s)", flush=True)
    for line in (*(f.message for f in found.failures), *found.notes):
        print(f"    {line[:300]}", flush=True)
    cases = {
        case.name: {
            q.quantity: {"answer": q.answer, "factor": q.factor, "relative_error": q.relative_error, "cause": q.cause}
            for q in case.linear
        }
        for case in found.cases
    }
    failures = [[f.case, f.quantity, f.kind, f.message] for f in found.failures]
    return {"passed": found.passed, "failures": failures, "notes": list(found.notes), "cases": cases}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--operators", nargs="*", default=[n for n in KERNELS if n != "mamba2"])
    options = parser.parse_args()
    lift_the_refusal()
    one_configuration()
    kept = made_by("cuda")
    for operator in options.operators:
        kept[operator] = attempted(partial(checked, operator), operator)
        save(kept, options.json)


if __name__ == "__main__":
    main()
