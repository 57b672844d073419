"""What the tool says of one capture, taken at the alarm: the error, the guilty rounding site, and what would cure it.

    python benchmarks/failing_run/predictions.py captures/A_seed0_alarm --recipe A --out chain_A.json.xz \\
        [--summed summed_A.json --cures fp32-scores delta-from-dp]

The capture holds one head of several sequences. ``inspect`` pools them; ``identify``, ``attribute`` and ``what-if``
look at each by itself. The file holds the tool's own JSON: of inspect the head's entry, of the others a document a
sequence. ``--recipe``: an arm, its forward and backward as one recipe, taken as known; what ``identify`` finds
without it is written too. Nothing here has seen how training went on.

``Chain`` reads it back with the tool's own classes, as far as the experiment needs it. The stored ``chain_*.json.xz``
were cut down to the numbers that this experiment once kept; fields that are not read here are missing in them.

``--summed``: what-if ranks by the size of dQ's error in one sequence; an optimizer sees the sum over all of them. Of
the arm and of each cure (a mitigation of what-if), emulated on the capture's sequences, with E_n the error of dW_Q in
sequence n and G_n the exact dW_Q, both [D, C]: size and coherence of the sum (``Summed``).
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from arms import ARMS, arm, whole
from record import Record, listed, write_json
from runlog import plain
from torch import Tensor

import attn_diag
from attn_diag.captures.capture import Capture
from attn_diag.captures.files import require_writable
from attn_diag.captures.loading import find_captures
from attn_diag.errors import InputError
from attn_diag.head.baseline import observation_with_o
from attn_diag.head.machine import describe_tool
from attn_diag.head.read import NonFiniteCensus, read_head
from attn_diag.kernels import emulate_head
from attn_diag.kernels.recipe import FORMATS, Recipe
from attn_diag.reports.charts import Section
from attn_diag.results.attribution import Effect, SiteAttribution
from attn_diag.results.base import Number, Result, Tool
from attn_diag.results.diagnosis import Propagation
from attn_diag.results.what_if import Candidate, StabilisedLimits
from attn_diag.results.wording import DASH, percent

GRADIENTS = {"dq": "dQ", "dw_q": "dW_Q"}
# Shares and errors below it are not told apart.
_NOTHING = 1e-5
# Sequences whose errors are summed: all signs of more are too many.
_MOST = 16


@dataclass(frozen=True)
class Judged:
    """Of a ``Verdict``."""

    labels: tuple[str, ...]


@dataclass(frozen=True)
class Inspected:
    """Of a ``HeadDiagnosis``, over all sequences."""

    noise_factor: Number
    propagation: Propagation
    verdict: Judged


@dataclass(frozen=True)
class Best:
    """Of a ``RankedRecipe``."""

    agreement: Number


@dataclass(frozen=True)
class Identified:
    """Of an ``Identification``, of one sequence."""

    recipes: tuple[str, ...]
    verdict: str
    candidates: tuple[Best, ...]


@dataclass(frozen=True)
class Attributed(Result):
    """Of a ``HeadAttribution``, of one sequence."""

    sites: tuple[SiteAttribution, ...]
    guilty: dict[str, str]
    biased: dict[str, str]

    def effect(self, site: str, quantity: str = "dq") -> Effect:
        """What one site does to one quantity."""
        return next(s.effects[quantity] for s in self.sites if s.site == site)


@dataclass(frozen=True)
class Tried:
    """Of a ``WhatIf``, of one sequence."""

    baseline: Candidate
    candidates: tuple[Candidate, ...]
    stabilised: StabilisedLimits | None


@dataclass(frozen=True)
class Heads(Result):
    """Of an ``Attribution``."""

    heads: tuple[Attributed, ...]


@dataclass(frozen=True)
class Chain(Result):
    """What the tool said of one capture; a tuple has one item a sequence."""

    run: str
    arm: str
    """The recipe that was taken as known."""
    step: int
    layer: int
    """The model's number."""
    head: int
    """The model's number."""
    rows: int
    """Query rows of a sequence."""
    inspect: Inspected
    """All sequences together."""
    identify: tuple[Identified, ...]
    """The recipe, without being told."""
    attribute: Heads
    """The rounding sites' parts."""
    what_if: tuple[Tried, ...]

    @property
    def sequences(self) -> int:
        """How many were looked at."""
        return len(self.attribute.heads)

    def effects(self, site: str, quantity: str = "dq") -> list[Effect]:
        """What a site does to a quantity, in each sequence."""
        return [head.effect(site, quantity) for head in self.attribute.heads]

    def blamed(self, quantity: str = "dq") -> tuple[str, int]:
        """The site that most sequences blame, and how many do."""
        return Counter(head.guilty[quantity] for head in self.attribute.heads).most_common(1)[0]

    def candidates(self) -> dict[str, list[Candidate]]:
        """What-if's candidates by name, each in the sequences in which it was run."""
        found: dict[str, list[Candidate]] = {}
        for tried in self.what_if:
            for candidate in tried.candidates:
                found.setdefault(candidate.name, []).append(candidate)
        return found

    @property
    def where(self) -> str:
        """ "step 501, layer 1, head 5, 8 sequences of 1,024 tokens"."""
        count = f"{self.sequences} sequences" if self.sequences > 1 else "1 sequence"
        return f"step {self.step}, layer {self.layer}, head {self.head}, {count} of {self.rows:,} tokens"


def read_chains(record: Record) -> dict[str, Chain]:
    """What the tool said of the captures, by arm, or by ARM_seedN for other seeds."""
    names = sorted(path.name.partition(".")[0] for path in record.folder.glob("chain_*.json*"))
    return {name.removeprefix("chain_"): Chain.from_json(record.document(name) or b"") for name in names}


def predict(capture: Capture, recipe: Recipe) -> dict[str, Any]:
    """The tool's own documents.

    Args:
        capture: Of one head, with O and dO.
        recipe: What is taken to have made O and dQ.

    Returns:
        What ``Chain`` reads, but for the names of run and arm.

    Raises:
        InputError: The capture holds more than one head, no O or no dO.
    """
    if capture.q_heads != 1:
        raise InputError(f"{capture.source}: one head is expected, got {capture.q_heads}; capture the alarm's alone")
    observation = observation_with_o(capture, None)
    if observation is None or "do" not in capture.tensors:
        raise InputError(f"{capture.source}: an O and dO are needed; capture the step with its backward")
    batches, selection = range(capture.batch), attn_diag.Selection(observation=observation)
    diagnosis = attn_diag.inspect_captures([capture], selection=selection, made_by={observation: recipe})
    attributed = attn_diag.attribute(capture, recipe=recipe, selection=selection)
    identified = [attn_diag.identify(capture, observation=observation, batch=batch) for batch in batches]
    tried = [attn_diag.what_if(capture, observation=observation, recipe=recipe, batch=batch) for batch in batches]
    m = capture.metadata
    return {
        "source": Path(capture.source).name,
        "captured_on": m.device,
        "rows": capture.q_length,
        "inspect": json.loads(diagnosis.to_json())["captures"][0]["observations"][0]["heads"][0],
        "step": m.step,
        "layer": m.layer,
        "head": m.head_offset,
        "attribute": json.loads(attributed.to_json()),
        "identify": [json.loads(i.to_json()) for i in identified],
        "what_if": [json.loads(w.to_json()) for w in tried],
    }


def spread(values: Iterable[float]) -> str:
    """The median of fractions in percent, and their range where there are several: "98 % (97 to 99)"."""
    found = list(values)
    if max(map(abs, found)) < _NOTHING:
        return f"below {percent(_NOTHING)}"
    middle = percent(median(found))
    return middle if len(found) < 2 else f"{middle} ({100 * min(found):.3g} to {100 * max(found):.3g})"


def section(chains: Sequence[Chain], title: str) -> Section:
    """The tool's answer on each capture in words, and the sites' parts in a table."""
    table = [("site", "share of dQ's error", "share of dW_Q's", "dQ off: alone", "all but it", "random signs")]
    for chain in chains:
        first = {s.site: s for s in chain.attribute.heads[0].sites}
        order = sorted(first, key=lambda site: -median(e.share for e in chain.effects(site)))
        for site in order:
            effects, form = chain.effects(site), first[site].format
            signs = [e.sham for e in effects if e.sham is not None]
            table.append((
                f"{chain.arm}: {site}{f' ({form})' if form else ''}",
                spread(e.share for e in effects), spread(e.share for e in chain.effects(site, "dw_q")),
                spread(e.alone for e in effects), spread(e.repaired for e in effects), spread(signs) if signs else DASH,
            ))  # fmt: skip
    said = (
        "One capture of each run, taken right after its alarm; nothing that follows has seen how training went on.",
        *(f"Arm {chain.arm}. {_said(chain)}" for chain in chains),
        "In the table, by the recipe's fields: medians over the sequences, with their range. Alone: dQ's error with "
        "this site as the only one that rounds; all but it: with this site exact; random signs: with its own errors' "
        "signs drawn at random.",
    )
    return Section(title, said, tuple(table))


def _said(chain: Chain) -> str:
    looked, heads = chain.inspect, chain.attribute.heads
    off = [f"{of} is {percent(getattr(looked.propagation, key).relative_error)} off" for key, of in GRADIENTS.items()]
    named, count = Counter(" or ".join(i.recipes) for i in chain.identify).most_common(1)[0]
    agreement = f"{100 * median(i.candidates[0].agreement for i in chain.identify):.5g} %"
    known = f"{chain.identify[0].verdict.rstrip('.')} (median {agreement})"
    if named:
        known = f"{named}; it reproduces {agreement} of O's elements bit for bit"
    blamed = []
    for key, of in GRADIENTS.items():
        sites = Counter(head.guilty[key] for head in heads)
        blamed.append(f"{of} by " + ", ".join(f"{s} in {n} of {len(heads)} sequences" for s, n in sites.most_common()))
    biased = listed(sorted({head.biased["dq"] for head in heads if "dq" in head.biased}))
    return (
        f"Captured: {chain.where}. inspect: {listed(looked.verdict.labels)}; delta's error is "
        f"{looked.noise_factor:.3g} times what one correct rounding of O makes; {', '.join(off)}. identify, in {count} "
        f"of {len(chain.identify)} sequences, without being told: {known}. attribute: the largest part of the error of "
        f"{'; of '.join(blamed)}; mean errors of dQ that are significant: {biased or 'none'}."
    )


@dataclass(frozen=True)
class Summed:
    """One recipe's errors of dW_Q over the sequences."""

    name: str
    """The arm, or ARM+CURE."""
    sequences: int
    relative: float
    """Of the sequences, root mean square: (sum ||E_n||^2 / sum ||G_n||^2)^1/2."""
    relative_of_sum: float
    """Of the sum: ||sum E_n|| / ||sum G_n||."""
    coherence: float
    """||sum E_n||^2 / sum ||E_n||^2, which is 1 in the mean under random signs."""
    p_value: float
    """Of the coherence, exact, from all signs of the sequences."""


@dataclass(frozen=True)
class Batch(Result):
    """An arm and its cures on one capture."""

    arm: str
    """The arm that was captured."""
    source: str
    """The capture's file."""
    step: int | None
    layer: int | None
    head: int | None
    tool: Tool
    rows: tuple[Summed, ...]
    """The arm, then its cures."""


def dw_q(capture: Capture, recipe: Recipe, sequences: int) -> Tensor:
    """dW_Q of the capture's one head by the emulated recipe, float64 [sequences, D, C]."""
    found = []
    for batch in range(sequences):
        head = read_head(capture, batch, 0, torch.device("cpu"), NonFiniteCensus()).head
        dq = emulate_head(recipe, head, key_gradients=False).dq
        assert dq is not None
        found.append(dq.double().T @ capture.tensors["x"][batch].double())
    return torch.stack(found)


def summed(name: str, errors: Tensor, exact: Tensor) -> Summed:
    """``errors`` and ``exact`` gradients, [N, D, C]."""
    flat, total = errors.flatten(1).numpy(), errors.sum(0)
    gram = flat @ flat.T
    # A common sign does not count.
    signs = np.array([(1.0, *rest) for rest in product((1.0, -1.0), repeat=len(gram) - 1)])
    norms = np.einsum("ri,ij,rj->r", signs, gram, signs)
    return Summed(
        name=name,
        sequences=len(errors),
        relative=float(errors.norm() / exact.norm()),
        relative_of_sum=float(total.norm() / exact.sum(0).norm()),
        coherence=float(total.square().sum() / errors.square().sum()),
        p_value=float(np.mean(norms >= gram.sum() * (1 - 1e-9))),
    )


def summed_batch(capture: Capture, name: str, cures: Sequence[str]) -> Batch:
    """The arm of that name and its ``cures``. Raises ValueError where the capture is not of one head, with dO and x."""
    if capture.q_heads != 1 or not {"do", "x"} <= set(capture.tensors):
        raise ValueError(f"{capture.source}: one head with do and x is expected, got {capture.q_heads} heads")
    count = min(capture.batch, _MOST)
    sites: dict[str, Any] = {site: "fp32" for site in FORMATS if site != "input"}
    unrounded = replace(whole(ARMS[name]), name="exact", arithmetic="fp64", exp="exact", **sites)
    exact = dw_q(capture, unrounded, count)
    names = (name, *(f"{name}+{cure}" for cure in cures))
    rows = tuple(summed(full, dw_q(capture, whole(arm(full)), count) - exact, exact) for full in names)
    m, tool = capture.metadata, describe_tool(torch.device("cpu"))
    return Batch(name, Path(capture.source).name, m.step, m.layer, m.head_offset, tool, rows)


def read_summed(record: Record) -> dict[str, Batch]:
    """What was found of a record's captures, by arm."""
    paths = sorted(record.folder.glob("summed_*.json"))
    return {path.stem.removeprefix("summed_"): Batch.from_json(path.read_bytes()) for path in paths}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("capture", type=Path, help="a file, or a folder with one capture in it")
    parser.add_argument("--recipe", required=True, metavar="NAME", help=f"{', '.join(ARMS)}, or NAME+MITIGATION")
    parser.add_argument("--run", default=None, metavar="NAME", help="the run it is from; default: RECIPE_seed0")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=".json or .json.xz")
    parser.add_argument("--summed", type=Path, metavar="FILE", help="the sums over sequences, of an arm")
    parser.add_argument("--cures", nargs="*", default=[], metavar="MITIGATION", help="summed beside the arm")
    options = parser.parse_args()
    require_writable(options.out)
    files = find_captures([options.capture])
    if len(files) != 1:
        parser.error(f"one capture is expected, got {len(files)} in {options.capture.name}: name the file")
    capture = attn_diag.load(files[0])
    if options.summed:
        write_json(options.summed, asdict(summed_batch(capture, options.recipe, options.cures)))
    found = predict(capture, whole(arm(options.recipe)))
    found = {"run": options.run or f"{options.recipe}_seed0", "arm": options.recipe} | found
    write_json(options.out, found)
    print(_said(Chain.from_json(json.dumps(plain(found)))))


if __name__ == "__main__":
    main()
