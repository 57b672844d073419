"""How often ``attn-diag mismatch`` names a planted fault and its layer, and accuses nothing where there is none.

Random models of three layers (``mismatch_runs``), a trainer's forward beside an engine's decoding from several caches.

    python benchmarks/study_mismatch.py --seeds 60 --json benchmarks/results/mismatch_cpu.json
    python benchmarks/study_mismatch.py --seeds 12 --faults unseen --json benchmarks/results/mismatch_cpu.json
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
from mismatch_runs import FAULTS, LAYERS, LAYOUTS, PROMPT, UNSEEN, both_runs, tokens_of
from torch import Tensor

import attn_diag

KINDS = {
    "qk-norm": {"norm"}, "rope-base": {"position", "unnamed-input"}, "late-keys": {"unnamed-o"},
    "late-cache": {"unnamed-o", "mask"}, "other-cache": {"unnamed-o"}, "other-heads": {"unnamed-o"},
    "stale": {"weights"}, "late-window": {"window"}, "temperature": {"unnamed-o"},
    "stale-mlp": {"unnamed-input"}, "mlp-norm": {"unnamed-input"},
}  # fmt: skip
"""By fault that the analysis was not made for: what is right to say, with no other culprit."""
BEHIND = {"stale-mlp", "mlp-norm"}
"""Faults behind attention: they show in the next layer, or in no call of attention."""


def said(fault: str | None, layer: int, causes: list[tuple[int, str]]) -> str:
    """named, wrong, or silent."""
    if not causes:
        return "named" if fault is None else "silent"
    layer += fault in BEHIND
    kinds = KINDS.get(fault or "", {fault})
    return "named" if {at for at, _ in causes} == {layer} and {kind for _, kind in causes} <= kinds else "wrong"


def given(hidden: Tensor | None) -> Tensor:
    """What the last layer gives, of an engine that has run."""
    assert hidden is not None
    return hidden


def case(seed: int, fault: str | None, *, explained: bool) -> dict[str, Any]:
    """What is said of one pair of runs."""
    # The first layer has none below it to borrow from, and the last none above it to show in.
    few = {"other-cache": (1, LAYERS), **dict.fromkeys(BEHIND, (0, LAYERS - 1))}
    first, stop = few.get(fault or "", (0, LAYERS))
    layer, layout = first + seed % (stop - first), LAYOUTS[seed // 3 % len(LAYOUTS)]
    with tempfile.TemporaryDirectory() as folder:
        train, rollout, logprobs, engines = both_runs(seed, fault, layer, layout, Path(folder))
        if explained:
            mask = torch.zeros(logprobs[0].shape)
            mask[:, PROMPT - 1 :] = 1
            found = attn_diag.explain_logprobs(
                engines[0].model, tokens_of(seed), train, rollout, logprobs=logprobs, mask=mask,
                hidden=(given(engines[0].hidden), given(engines[1].hidden)),
            )  # fmt: skip
        else:
            found = attn_diag.mismatch(train, rollout)
    causes: list[tuple[int, str]] = [(cause.layer, cause.kind) for cause in found.causes]
    result: dict[str, Any] = {
        "seed": seed, "fault": fault, "layer": layer, "layout": layout, "causes": causes,
        "said": said(fault, layer, causes),
    }  # fmt: skip
    if found.logprobs is not None:
        shares = {(share.layer, share.place): share.share for share in found.logprobs.shares}
        rest = shares.pop((None, "rest"))
        inside = sum(share for (layer, _), share in shares.items() if layer is not None)
        result |= {
            "sum_of_shares": sum(shares.values()), "of_layers": inside, "rest": rest, "rms": found.logprobs.noise,
            "predicted": found.logprobs.predicted,
            "outside": [(o.layer, o.place, o.factor, o.low, o.high) for o in found.logprobs.outside],
        }  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--faults", nargs="*", default=["none", *FAULTS])
    parser.add_argument("--explained", type=int, default=0, help="seeds of each with shares of log-probabilities")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.monotonic()
    faults = [name for given in options.faults for name in (UNSEEN if given == "unseen" else [given])]
    for name in faults:
        mine = [
            case(seed, None if name == "none" else name, explained=seed < options.explained)
            for seed in range(options.seeds)
        ]
        others = Counter(str(c["causes"]) for c in mine if c["said"] != "named")
        counts = Counter(c["said"] for c in mine)
        sums = [c["sum_of_shares"] for c in mine if "sum_of_shares" in c]
        shown = f"shares {min(sums):.3f} to {max(sums):.3f}" if sums else ""
        print(f"{name:11} {dict(counts)} of {len(mine)} {shown} {dict(others)}", flush=True)
        if options.json is not None:
            # Faults that another run of the study looked at stay.
            before = json.loads(options.json.read_text())["cases"] if options.json.exists() else []
            kept = [c for c in before if (c["fault"] or "none") != name]
            save({**made_by(), "seconds": round(time.monotonic() - started), "cases": [*kept, *mine]}, options.json)


if __name__ == "__main__":
    main()
