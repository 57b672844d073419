"""How often ``attn-diag mismatch`` names a planted fault and its layer, and accuses nothing where there is none.

Random models of three layers (``mismatch_runs``), a trainer's forward beside an engine's decoding from several caches.

    python benchmarks/study_mismatch.py --seeds 20 --json benchmarks/results/mismatch_cpu.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from measuring import made_by, save
from mismatch_runs import FAULTS, LAYERS, LAYOUTS, PROMPT, both_runs, tokens_of

import attn_diag


def case(seed: int, fault: str | None, *, explained: bool) -> dict[str, Any]:
    """What is said of one pair of runs."""
    layer, layout = seed % LAYERS, LAYOUTS[seed % len(LAYOUTS)]
    with tempfile.TemporaryDirectory() as folder:
        train, rollout, logprobs, engines = both_runs(seed, fault, layer, layout, Path(folder))
        if explained:
            mask = torch.zeros(logprobs[0].shape)
            mask[:, PROMPT - 1 :] = 1
            found = attn_diag.explain_logprobs(
                engines[0].model, tokens_of(seed), train, rollout, logprobs=logprobs, mask=mask
            )
        else:
            found = attn_diag.mismatch(train, rollout)
    causes = [(cause.layer, cause.kind) for cause in found.causes]
    result: dict[str, Any] = {
        "seed": seed, "fault": fault, "layer": layer, "layout": layout, "causes": causes,
        "right": causes == ([] if fault is None else [(layer, fault)]),
    }  # fmt: skip
    if found.logprobs is not None:
        layers = [share.share for share in found.logprobs.shares if share.layer is not None]
        result |= {"sum_of_shares": sum(layers), "rms": found.logprobs.noise, "predicted": found.logprobs.predicted}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--faults", nargs="*", default=["none", *FAULTS])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    cases = []
    for name in options.faults:
        mine = [
            case(seed, None if name == "none" else name, explained=seed < options.seeds // 4)
            for seed in range(options.seeds)
        ]
        cases += mine
        said = Counter(str(c["causes"]) for c in mine if not c["right"])
        sums = [c["sum_of_shares"] for c in mine if "sum_of_shares" in c]
        shown = f"shares {min(sums):.2f} to {max(sums):.2f}" if sums else ""
        print(f"{name:9} right {sum(c['right'] for c in mine)}/{len(mine)} {shown} {dict(said)}", flush=True)
    if options.json is not None:
        # Faults that another run of the study looked at stay.
        before = json.loads(options.json.read_text())["cases"] if options.json.exists() else []
        kept = [c for c in before if (c["fault"] or "none") not in options.faults]
        save({**made_by(), "seconds": round(time.monotonic() - started), "cases": [*kept, *cases]}, options.json)


if __name__ == "__main__":
    main()
