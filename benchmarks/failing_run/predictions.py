"""What the tool says of one capture, taken at the alarm: the error, the guilty rounding site, and what would cure it.

    python benchmarks/failing_run/predictions.py captures/A_seed0_alarm --recipe A --out chain_A.json

The capture holds one head of several sequences. ``inspect`` pools them; ``identify``, ``attribute`` and ``what-if``
look at each by itself, so that lists in the JSON have one item a sequence and show the spread. ``--recipe``: an arm
(its forward and backward as one recipe) or a preset, taken as known; what ``identify`` finds without it is written too.
Nothing here has seen how training went on.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from arms import ARMS, whole
from folder import write_json

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.captures.files import require_writable
from attn_diag.captures.loading import find_captures
from attn_diag.errors import InputError
from attn_diag.head.baseline import observation_with_o
from attn_diag.kernels.recipe import PRESETS, Recipe, preset
from attn_diag.results.attribution import HeadAttribution
from attn_diag.results.diagnosis import BiasEstimate, Diagnosis
from attn_diag.results.identification import Identification
from attn_diag.results.what_if import Candidate, WhatIf

Say = Callable[[str], object]

_ESTIMATED = ("n", "n_clusters", "n_eff", "mean", "mean_ulp", "rms", "standard_error", "t", "p_value", "p_adjusted",
              "ci95", "minimum_detectable")  # fmt: skip
_MAXIMA = ("exact", "as_run", "window", "unit")
_ERRORS = ("o", "delta", "dq", "dw_q")
_EFFECTS = ("share", "share_error", "alone", "repaired", "sham")
_KINDS = ("rows", "error_share", "reference_share")


def recipe_of(name: str) -> Recipe:
    """An arm's forward and backward as one recipe, or a preset. Raises ValueError for anything else."""
    if name in PRESETS:
        return preset(name)
    arm = ARMS.get(name)
    if arm is None or arm.forward is None:
        known = [*(key for key, value in ARMS.items() if value.forward is not None), *PRESETS]
        raise ValueError(f"no recipe {name!r}; there are {', '.join(dict.fromkeys(known))}")
    return whole(arm)


def predict(
    capture: Capture, recipe: Recipe, sequences: int | None = None, say: Say = lambda _: None
) -> dict[str, Any]:
    """Everything as plain numbers; lists have one item for each of the first ``sequences`` sequences.

    Raises InputError where the capture holds more than one head, no O or no dO.
    """
    if capture.q_heads != 1:
        raise InputError(f"{capture.source}: one head is expected, got {capture.q_heads}; capture the alarm's alone")
    observation = observation_with_o(capture, None)
    if observation is None or "do" not in capture.tensors:
        raise InputError(f"{capture.source}: an O and dO are needed; capture the step with its backward")
    batches = range(capture.batch if sequences is None else min(sequences, capture.batch))
    diagnosis = _inspected(capture, observation, recipe, batches)
    single, identified, attributed, tried = (
        list[Diagnosis](),
        list[Identification](),
        list[HeadAttribution](),
        list[WhatIf](),
    )
    for batch in batches:
        say(f"sequence {batch + 1} of {len(batches)}")
        single.append(_inspected(capture, observation, recipe, range(batch, batch + 1)))
        identified.append(attn_diag.identify(capture, observation, batch=batch))
        wanted = attn_diag.Selection(observation, batches=frozenset([batch]))
        attributed += attn_diag.attribute(capture, recipe=recipe, selection=wanted).heads
        tried.append(attn_diag.what_if(capture, observation, recipe=recipe, batch=batch))
    metadata = capture.metadata
    return {
        "tool": asdict(diagnosis.tool),
        "backend": f"emulation on {diagnosis.tool.backend}",
        "source": Path(capture.source).name,
        "captured_on": metadata.device,
        "step": metadata.step,
        "layer": metadata.layer,
        "head": metadata.head_offset,
        "sequences": len(batches),
        "rows": capture.q_length,
        "recipe": {"name": recipe.name, "sites": recipe.sites()},
        "inspect": inspected(diagnosis) | {"by_sequence": columns([inspected(d) for d in single], _BY_SEQUENCE)},
        "identify": {
            "outcome": [i.outcome for i in identified],
            "recipes": [list(i.recipes) for i in identified],
            "agreement": [i.best.agreement for i in identified],
            "threshold": [i.threshold for i in identified],
            "margin": [i.margin for i in identified],
            "verdict": [i.verdict for i in identified],
        },
        "attribute": attribution(attributed),
        "what_if": mitigations(tried),
    }


def inspected(diagnosis: Diagnosis) -> dict[str, Any]:
    """The one head's numbers, over all sequences that were looked at."""
    ((_, observation, head),) = diagnosis.entries()
    verdict = head.verdict
    return {
        "labels": [] if verdict is None else list(verdict.labels),
        "evidence": None if verdict is None else verdict.evidence,
        "reasons": [] if verdict is None else list(verdict.reasons),
        "family": asdict(diagnosis.family),
        "delta_source": head.delta_source,
        "noise_factor": head.noise_factor,
        "conditioning": head.conditioning,
        "bias": {name: _estimate(getattr(head.bias, name)) for name in vars(head.bias)},
        "rounding_bias": {name: _estimate(getattr(head.rounding_bias, name)) for name in vars(head.rounding_bias)},
        "row_maxima": {n: None if (c := getattr(head.row_maxima, n)) is None else asdict(c) for n in _MAXIMA},
        "propagation": {n: None if (g := getattr(head.propagation, n)) is None else asdict(g) for n in ("dq", "dw_q")},
        "notes": list(head.propagation.notes),
        "recipe": observation.recipe,
    }


_BY_SEQUENCE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "labels": lambda found: found["labels"],
    "noise_factor": lambda found: found["noise_factor"],
    "conditioning": lambda found: found["conditioning"],
    "repeated_as_run": lambda found: (found["row_maxima"]["as_run"] or {}).get("rows"),
    "dq_relative_error": lambda found: (found["propagation"]["dq"] or {}).get("relative_error"),
    "dq_predicted_relative_error": lambda found: (found["propagation"]["dq"] or {}).get("predicted_relative_error"),
    "dw_q_relative_error": lambda found: (found["propagation"]["dw_q"] or {}).get("relative_error"),
    "dw_q_predicted_relative_error": lambda found: (found["propagation"]["dw_q"] or {}).get("predicted_relative_error"),
    "coherence": lambda found: (found["propagation"]["dw_q"] or {}).get("coherence"),
}  # fmt: skip


def attribution(heads: Sequence[HeadAttribution]) -> dict[str, Any]:
    """Rounding sites' parts; lists have one item a sequence. Sizes are ||error|| / ||reference||, delta's in floors."""
    quantities = list(heads[0].totals)
    sites = {}
    for number, site in enumerate(heads[0].sites):
        sites[site.site] = {"words": site.words, "format": site.format} | {
            q: {name: [getattr(h.sites[number].effects[q], name) for h in heads] for name in _EFFECTS}
            for q in quantities
        }
    return {
        "totals": {
            q: {name: [getattr(h.totals[q], name) for h in heads] for name in ("error", "exact", "captured")}
            for q in quantities
        },
        "sites": sites,
        "guilty": {q: [h.guilty.get(q) for h in heads] for q in quantities},
        "guilty_words": {q: unanimous([h.guilty.get(q) for h in heads]) for q in quantities},
        "biased": {q: [h.biased.get(q) for h in heads] for q in quantities},
        "inert": {"site": heads[0].inert[0], "largest_change": [h.inert[1] for h in heads]},
        "repairs": [[{"site": r.site, "left": r.left} for r in h.repairs] for h in heads],
        "noise_factor": [h.noise_factor for h in heads],
        "conditioning": [h.conditioning for h in heads],
        "row_kinds": {
            kind: {n: [getattr(h.row_kinds[kind], n) for h in heads] for n in _KINDS} for kind in heads[0].row_kinds
        },
        "runs": [h.runs for h in heads],
    }  # fmt: skip


def mitigations(found: Sequence[WhatIf]) -> dict[str, Any]:
    """What-if's candidates; lists have one item a sequence, null where a candidate was not run on it."""
    names = dict.fromkeys(c.name for w in found for c in w.candidates)

    def each(name: str) -> list[Candidate | None]:
        return [next((c for c in w.candidates if c.name == name), None) for w in found]

    limits = [w.stabilised for w in found]
    return {
        "ranked_by": found[0].ranked_by,
        "max_logit": [w.max_logit for w in found],
        "baseline": _candidate([w.baseline for w in found]),
        "candidates": {name: _candidate(each(name)) for name in names},
        "stabilised": {
            name: [None if s is None else getattr(s, name) for s in limits]
            for name in ("rows", "rows_all", "largest", "clamp", "flush", "subnormal", "best", "best_helps")
        },
        "notes": list(dict.fromkeys(note for w in found for note in w.notes)),
    }


def _candidate(runs: Sequence[Candidate | None]) -> dict[str, Any]:
    first = next(c for c in runs if c is not None)

    def each(read: Callable[[Candidate], Any]) -> list[Any]:
        return [None if c is None else read(c) for c in runs]

    return {
        "description": first.description,
        "kind": first.kind,
        "changes": first.changes,
        "rank": each(lambda c: c.rank),
        "left": each(lambda c: c.left),
        "removed": each(lambda c: c.removed),
        "errors": {name: each(lambda c, name=name: getattr(c.errors, name)) for name in _ERRORS},  # type: ignore[misc]
        "finite": each(lambda c: c.finite),
        "equivalence": each(lambda c: c.equivalence.status),
        "reason": next((c.equivalence.reason for c in runs if c is not None and c.equivalence.reason), None),
        "biased": each(lambda c: list(c.biased)),
        "cost": None if first.cost is None else asdict(first.cost),
    }


def columns(
    rows: Sequence[dict[str, Any]], readers: dict[str, Callable[[dict[str, Any]], Any]]
) -> dict[str, list[Any]]:
    """What the readers read of every row, column by column."""
    return {name: [read(row) for row in rows] for name, read in readers.items()}


def unanimous(values: Sequence[str | None]) -> str:
    """ "scores in 8 of 8 sequences", the most frequent first."""
    counts = Counter(str(value) for value in values)
    return ", ".join(f"{value} in {count} of {len(values)} sequences" for value, count in counts.most_common())


def _inspected(capture: Capture, observation: str, recipe: Recipe, batches: range) -> Diagnosis:
    selection = attn_diag.Selection(observation=observation, batches=frozenset(batches))
    return attn_diag.inspect_captures([capture], selection=selection, made_by={observation: recipe})


def _estimate(estimate: BiasEstimate | None) -> dict[str, Any] | None:
    return None if estimate is None else {name: getattr(estimate, name) for name in _ESTIMATED}


def summary(found: dict[str, Any]) -> str:
    """The prediction in a few lines."""
    looked, sites, what_if, known = (found[name] for name in ("inspect", "attribute", "what_if", "identify"))
    named = [" or ".join(r) or outcome for r, outcome in zip(known["recipes"], known["outcome"], strict=True)]
    ranked = {n: median(c["left"]) for n, c in what_if["candidates"].items() if all(r is not None for r in c["rank"])}
    best = sorted(ranked, key=ranked.__getitem__)[:5]
    error = median(what_if["baseline"]["errors"]["dq"])
    lines = [
        f"{found['source']}: step {found['step']}, layer {found['layer']}, head {found['head']}; "
        f"sequences: {found['sequences']}",
        f"{', '.join(looked['labels'])}: noise factor {looked['noise_factor']:.3g}, "
        f"conditioning {looked['conditioning']:.3g}",
        f"identify: {unanimous(named)}",
        f"guilty of dQ: {sites['guilty_words']['dq']}; of dW_Q: {sites['guilty_words'].get('dw_q', 'not known')}",
        f"dQ is {100 * error:.3g} % off; least is left by "
        + ", ".join(f"{name} ({100 * ranked[name]:.3g} %)" for name in best),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capture", type=Path, help="a file, or a folder with one capture in it")
    parser.add_argument("--recipe", required=True, metavar="NAME", help=f"of {', '.join(ARMS)}, or a preset")
    parser.add_argument("--run", default=None, metavar="NAME", help="the run it is from; default: RECIPE_seed0")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--sequences", type=int, metavar="N", help="look at the first N only")
    options = parser.parse_args()
    require_writable(options.out)
    files = find_captures([options.capture])
    if len(files) != 1:
        parser.error(f"one capture is expected, got {len(files)} in {options.capture.name}: name the file")
    found = predict(
        attn_diag.load(files[0]),
        recipe_of(options.recipe),
        options.sequences,
        lambda text: print(text, file=sys.stderr),
    )
    write_json(options.out, {"run": options.run or f"{options.recipe}_seed0", "arm": options.recipe} | found)
    print(summary(found))


if __name__ == "__main__":
    main()
