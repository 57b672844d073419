"""How much of P_bar becomes 0 in E4M3: predicted and counted (arXiv 2606.06521), on sinks, pairs and real heads.

python benchmarks/study_underflow.py --json benchmarks/results/underflow_cpu.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, options_of, save

sys.path.append(str(Path(__file__).parent.parent / "tests"))
from low_bit_heads import FORWARD, real_head, sink_head

from attn_diag.head.underflow import probs_underflow
from attn_diag.reference import AttentionHead

REAL = ("gpt2_step637_L2H6", "failing_step500_L2H7", "gpt2_step731_L2H4")


def heads(seeds: int) -> Iterator[tuple[str, str, Callable[[], AttentionHead]]]:
    """Kind, name, head."""
    for gap in (2.0, 4.0, 6.0, 8.0):
        for seed in range(seeds):
            yield "sinks", f"sink {gap:g}, seed {seed}", partial(sink_head, gap, seed=seed)
    yield "pairs", "pair_T256", partial(real_head, "pair_T256")
    captures = Path(__file__).parent.parent / "tests" / "captures"
    for name in REAL:
        if (captures / f"{name}.safetensors").exists():
            yield "real heads", name, partial(real_head, name)


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = [
        {
            "kind": kind,
            "head": name,
            "variant": found.words,
            "counted": round(found.counted, 5),
            "predicted": round(found.predicted, 5),
            "closed form": None if found.closed_form is None else round(found.closed_form, 5),
        }
        for kind, name, head in heads(arguments.seeds)
        for found in probs_underflow(FORWARD, head())
    ]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        those = [row for row in rows if row["kind"] == kind]
        apart = max(abs(row["counted"] - row["predicted"]) for row in those)
        print(f"{kind}: {len(those)} fractions, up to {max(r['counted'] for r in those):.1%}, within {apart:.2%}")
    save(made_by() | {"rows": rows}, arguments.json)


if __name__ == "__main__":
    main()
