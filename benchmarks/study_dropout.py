"""Dropout or sinks with a mistake in them: is it named, and does the monitor alarm where it comes in training?

check runs the functions of tests/dropout_functions.py and sinks_functions.py on its cases for them; the
monitor watches a Llama (eager, two layers) whose dropout's backward is right for 30 steps and then has the mistake;
inspect is given an O of which some keys are missing, or counted twice.
Healthy trainings are in study_healthy_layouts.py.

    python benchmarks/study_dropout.py --part check --json benchmarks/results/dropout_cpu.json
    python benchmarks/study_dropout.py --part monitor --json …      # other parts of the file stay
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from measuring import made_by, options_of, save

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import dropout_functions as planted
import planted_dropouts as dropouts
import sinks_functions as of_sinks
import study_healthy_layouts as trainings
import test_dropout_faults as faults
import torch
from builders import labels_of

import attn_diag
from attn_diag.reference import Masking

_FIRST_SEED = 1000  # of no test
_STEPS, _FROM, _EVERY = 60, 30, 5
CHECKED: dict[str, tuple[Any, str]] = {
    "healthy: in fp32": (planted.sound, ""),
    "healthy: SDPA's math": ("sdpa:math", ""),
    "without the factor": (planted.without_factor, "dropout without the factor 1/(1-p)"),
    "mask of another batch item": (planted.of_other_items, "the dropout mask of batch item"),
    "mask of the next row": (planted.next_row, "the dropout mask of the next row"),
    "before the row sum": (planted.before_the_row_sum, "dropout before the row sum"),
    "forgotten in the backward": (planted.not_in_the_backward, "no dropout (the mask forgotten)"),
}


SINKS: dict[str, tuple[Any, str]] = {
    "healthy": (of_sinks.sound, ""),
    "dropped": (of_sinks.dropped, "no sink (the sink dropped)"),
    "times the scale": (of_sinks.scaled, "the sink's logit times the scale"),
    "dSink of the wrong sign": (of_sinks.wrong_sign, "it has the wrong sign"),
    "dSink twice": (of_sinks.twice, "it is twice the true one"),
    "dSink never written": (of_sinks.never_written, "it is zero, as if never written"),
    "dSink a mean over the batch": (of_sinks.mean_over_the_batch, "it is a mean over the batch, not a sum"),
}


def checked(table: dict[str, tuple[Any, str]], case: str, fault: str, seed: int) -> dict[str, Any]:
    """One check of a case."""
    target, words = table[fault]
    found = attn_diag.check(target, cases=[case], seed=seed, device="cpu")
    said = [f.message for f in found.failures]
    return {"failed": bool(said), "named": bool(words) and any(words in s for s in said),
            "suspects": [f.suspect for f in found.failures if f.suspect and words not in f.suspect]}  # fmt: skip


def watched(fault: str, seed: int) -> dict[str, Any]:
    """One training whose dropout has a mistake from a step on."""
    sound, broken, calls = planted.with_backward("none"), planted.with_backward(fault), [0]
    layers = 2

    def dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        calls[0] += bool(training and p)
        step = (calls[0] - 1) // layers
        return (broken if step >= _FROM else sound)(x, p, training, inplace)

    functional: Any = torch.nn.functional
    before, functional.dropout = functional.dropout, dropout
    mode = trainings.MODES[seed % 2]
    try:
        run = trainings.trained("llama dropout eager", mode, seed, _STEPS, _EVERY, 1e-3)
    finally:
        functional.dropout = before
    steps = [int(alarm.split()[1].rstrip(",")) for alarm in run["alarms"]]
    late = [s for s in steps if s >= _FROM]
    return {"mode": mode, "failed": bool(late), "early": len(steps) - len(late),
            "after": min(late) - _FROM if late else None}  # fmt: skip


def misses_keys(fault: str, seed: int) -> dict[str, Any]:
    """One O with dropout whose kernel counts some keys not once."""
    found, words = faults.lost(fault, seed)
    patterns = [p for h in found.observations[0].heads for q in h.quantities for p in q.patterns if p.kind == "part"]
    others = sorted({p.words for p in patterns if words not in p.words})
    return {"failed": "wrong" in labels_of(found), "named": any(words in p.words for p in patterns),
            "suspects": others}  # fmt: skip


def walked(recipe: str, seed: int) -> dict[str, Any]:
    """One element of a call with dropout: is the microscope's walk the emulation's bits, and the captured O's?"""
    call = dropouts.drawn(seed, p=(0.1, 0.25, 0.5)[seed % 3], batch=1, heads=2, rows=160)
    masking = Masking("top-left")
    capture = dropouts.captured(call, dropouts.computed(call, masking, recipe=recipe), causal="top-left")
    found: Any = attn_diag.microscope(capture, recipe=recipe, row=(37 * seed) % 160, feature=seed % 32, device="cpu")
    return {"failed": not found.bit_equal or found.walked != found.observed}


REPLAYED: dict[str, tuple[Any, str]] = {
    "healthy": (planted.sound, ""),
    "mask of another head": (planted.of_other_heads, "the dropout mask of head"),
    "mask of the next row": (planted.next_row, "the dropout mask of the next row"),
    "forgotten in the backward": (planted.not_in_the_backward, "no dropout (the mask forgotten)"),
}


def replayed(fault: str, seed: int) -> dict[str, Any]:
    """A function of tests/dropout_functions.py on a sound capture."""
    target, words = REPLAYED[fault]
    call = dropouts.drawn(seed, p=(0.1, 0.25, 0.5)[seed % 3], batch=1, rows=96)
    capture = dropouts.captured(call, dropouts.computed(call, Masking()))
    captured, kernel = attn_diag.replay(capture, against=[target], device="cpu").captures[0].kernels
    said = [q.words for q in kernel.quantities if q.at_fault]
    return {"failed": bool(kernel.faults or captured.faults), "suspects": [],
            "named": bool(words) and any(words in s for s in said)}  # fmt: skip


PARTS: dict[str, tuple[tuple[str, ...], Callable[[str, int], dict[str, Any]]]] = {
    "check": (tuple(CHECKED), partial(checked, CHECKED, "dropout")),
    "check sinks": (tuple(SINKS), partial(checked, SINKS, "sink-logits")),
    "monitor": (planted.BACKWARD, watched),
    "replay": (tuple(REPLAYED), replayed),
    "microscope": (("fa2", "cudnn", "flex", "bf16-forward"), walked),
    "lost": (tuple(faults.LOST), misses_keys),
}


def main() -> None:
    parser = options_of(__doc__)
    parser.add_argument("--part", choices=list(PARTS), required=True)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--faults", nargs="*")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    if options.json is not None and options.json.exists():
        found = json.loads(options.json.read_text(encoding="utf-8"))["parts"]
    faults, run = PARTS[options.part]
    rows = found.setdefault(options.part, {})
    for fault in options.faults or faults:
        each = [run(fault, _FIRST_SEED + seed) for seed in range(options.seeds)]
        rows[fault] = {"seeds": len(each), "failed": sum(one["failed"] for one in each)}
        if "named" in each[0]:
            rows[fault]["named"] = sum(one["named"] for one in each)
            rows[fault]["other suspects"] = sorted({s for one in each for s in one["suspects"]})
        elif "early" in each[0]:
            rows[fault]["alarms before it"] = sum(one["early"] for one in each)
            rows[fault]["steps until the alarm"] = sorted(one["after"] for one in each if one["after"] is not None)
        print(options.part, fault, rows[fault], file=sys.stderr, flush=True)
        save({**made_by(), "first seed": _FIRST_SEED, "parts": found}, options.json)


if __name__ == "__main__":
    main()
