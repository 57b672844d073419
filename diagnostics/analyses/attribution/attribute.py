"""``attribute``: a capture in, every rounding site's part in its heads' errors out."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from attn_diag.analyses.attribution.site_shares import SiteTable, attribute_sites
from attn_diag.analyses.attribution.words import reasons
from attn_diag.captures.capture import Capture
from attn_diag.captures.selection import Selection, select_heads
from attn_diag.errors import InputError
from attn_diag.head.assumptions import check_assumptions
from attn_diag.head.collectors import collector_of
from attn_diag.head.machine import backend_name, describe_tool, pick_device
from attn_diag.head.projection import Projection, find_projection
from attn_diag.head.read import NonFiniteCensus, read_float64, read_head
from attn_diag.head.recipe.baseline import Baseline, find_baseline, observation_with_o
from attn_diag.head.row_maxima import RowMaximaCollector, swamped_elements
from attn_diag.head.truth import head_truth, observed_sizes
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.reference import RowBlock
from attn_diag.results.attribution import Attribution, HeadAttribution, RowKind
from attn_diag.work import Progress, part_of

# A row with less than this part of P outside its top key is called near one-hot.
_NEAR_ONE_HOT = 0.05


def attribute(
    capture: Capture,
    *,
    recipe: str | Recipe | None = None,
    selection: Selection | None = None,
    level: float = 0.01,
    device: str = "auto",
    progress: Progress | None = None,
) -> Attribution:
    """Attribute the errors of a kernel to its rounding sites, head by head.

    The kernel is emulated: ``recipe``, else the recipe that reproduces the O of the observation selected, else fa2.
    ``selection``: the observation (default: the first with an O), heads and batch items (default: all). ``level``:
    significance of a site's mean error after Benjamini-Hochberg over the sites. ``progress(done, total)`` counts query
    rows.

    Raises InputError for what does not exist, for inputs no recipe covers, and where O contradicts the metadata.
    """
    if not 0 < level < 1:
        raise InputError(f"level must lie between 0 and 1, got {level}; 0.01 is usual")
    where = pick_device(device)
    wanted = selection or Selection()
    name = observation_with_o(capture, wanted.observation)
    heads, batches = select_heads(capture, wanted)
    if name is not None:
        found = check_assumptions(capture, [name], where)
        if found.ok is False:
            raise InputError(f"{capture.source}: {found.message}")
    notes: list[str] = []
    projection = None
    if "do" in capture.tensors:
        projection = find_projection(capture, batches, heads, where)
        notes += [] if projection.note is None else [projection.note]
    else:
        notes.append("delta, dQ and dW_Q: not attributed, dO was not captured")
    results = []
    places = [(batch, head) for batch in batches for head in heads]
    for number, (batch, head) in enumerate(places):
        baseline = find_baseline(capture, recipe, name, batch, head, where)
        job = _HeadJob(capture, name, baseline, batch, head, where, projection)
        results.append(job.run(level, tuple(notes), part_of(progress, number, len(places))))
    return Attribution(
        tool=describe_tool(where),
        source=capture.source,
        observation=name,
        level=level,
        backend=f"emulation on {backend_name(where)}",
        heads=tuple(results),
    )


class _HeadJob:
    def __init__(
        self,
        capture: Capture,
        observation: str | None,
        baseline: Baseline,
        batch: int,
        head: int,
        device: torch.device,
        projection: Projection | None,
    ) -> None:
        self.capture, self.observation, self.baseline = capture, observation, baseline
        self.batch, self.number, self.device = batch, head, device
        self.inputs = read_head(capture, batch, head, device, NonFiniteCensus())
        self._maxima = collector_of(self.inputs, None)
        self._direction = 0.0
        found = None if projection is None else projection.head(batch, head)
        self.truth = head_truth(self.inputs, found, self._observe)
        if not bool(self.truth.usable.any()):
            number = head + capture.metadata.head_offset
            raise InputError(f"{capture.source}: head {number}: no row is finite and sees a key: nothing to attribute")

    def _observe(self, block: RowBlock) -> None:
        self._maxima.add(block)
        if block.delta is not None:
            head = self.inputs.head
            product = block.unnormalised_probs @ head.k[block.keys]
            scaled = product * (block.delta * block.inverse_row_sum * head.scale)[:, None]
            usable = ~(self.inputs.unusable[block.rows] | block.fully_masked)
            self._direction += float(scaled[usable].square().sum())

    def run(self, level: float, notes: tuple[str, ...], progress: Progress | None) -> HeadAttribution:
        """Attribute, sort the rows into kinds, and put it into words."""
        rows = len(self.inputs.head.q)
        done = 0

        def advance(count: int) -> None:
            nonlocal done
            done += count
            # Runs come in two rounds.
            if progress is not None:
                progress(done, 2 * rows)

        captured = None
        if self.observation is not None:
            captured = observed_sizes(self.capture, self.observation, self.batch, self.number, self.truth)
        table = attribute_sites(self.truth, self.baseline.recipe, level=level, captured=captured, advance=advance)
        dq = self.truth.norms.get("dq")
        found = HeadAttribution(
            layer=self.capture.metadata.layer,
            batch=self.batch if self.capture.batch > 1 else None,
            head=self.number + self.capture.metadata.head_offset,
            rows=int(self.truth.usable.sum()),
            recipe=self.baseline.words,
            recipe_json=self.baseline.recipe.json,
            agreement=self.baseline.agreement,
            runs=table.runs,
            orders=table.orders,
            noise_factor=table.totals["delta"].error if "delta" in table.totals else None,
            conditioning=math.sqrt(self._direction) / dq if dq else None,
            totals=table.totals,
            sites=table.sites,
            inert=table.inert,
            repairs=table.repairs,
            twin=table.twin,
            row_kinds=self._row_kinds(table),
            guilty=table.guilty,
            biased=table.biased,
            notes=notes,
        )
        return replace(found, reasons=tuple(reasons(found, level)))

    def _read(self, output: str) -> Tensor | None:
        if self.observation is None:
            return None
        return read_float64(
            self.capture, self.capture.key(self.observation, output), self.batch, self.number, self.device
        )

    def _row_kinds(self, table: SiteTable) -> dict[str, RowKind]:
        """Rows with a repeated maximum (``exact``), swamped rows (of the captured O, else the emulated one), and near
        one-hot rows."""
        truth, rows = self.truth, self.truth.usable
        out = self._read("o")
        if out is None:
            out = emulate_head(self.baseline.recipe, replace(self.inputs.head, do=None)).o.double()
        swamped = swamped_elements(out, truth.reference.out, self.inputs.head.v, truth.top_key).all(1)
        kinds = {
            "repeated_maximum": _repeated(self._maxima),
            "swamped": swamped & self._maxima.several_keys,
            "near_one_hot": 1 - truth.top_prob < _NEAR_ONE_HOT,
        }
        errors, reference = table.whole.dq_square, truth.reference.dq
        reference_square = None if reference is None else reference[rows].square().sum(1)

        def share(values: Tensor | None, kind: Tensor) -> float | None:
            total = 0.0 if values is None else float(values.sum())
            return float(values[kind[rows]].sum()) / total if values is not None and total else None

        return {
            name: RowKind(int((kind & rows).sum()), share(errors, kind), share(reference_square, kind))
            for name, kind in kinds.items()
        }


def _repeated(maxima: RowMaximaCollector) -> Tensor:
    found = maxima.repeats("exact")
    assert found is not None
    return found.multiplicity > 1
