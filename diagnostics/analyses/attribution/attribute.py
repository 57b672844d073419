"""``attribute``: a capture in, every rounding site's part in its heads' errors out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Unpack

from attn_diag.analyses.attribution.reasons import reasons
from attn_diag.analyses.attribution.site_shares import SiteTable, attribute_sites
from attn_diag.analyses.attribution.variants import take_truths
from attn_diag.analyses.several import answers
from attn_diag.captures.absorbed import WithoutAbsorbedRows
from attn_diag.captures.capture import Capture
from attn_diag.captures.given import Array, CallTensors, Named, One, Source
from attn_diag.captures.selection import Selection, select_heads
from attn_diag.errors import InputError
from attn_diag.head.baseline import observation_with_o
from attn_diag.head.emulated_together import alike, in_parts, joins
from attn_diag.head.fidelity import Fidelity, fidelities
from attn_diag.head.machine import backend_name, describe_tool, pick_device
from attn_diag.head.open import OpenCapture, OpenHead
from attn_diag.head.row_maxima import swamped_elements
from attn_diag.head.truth import observed_sizes
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.results.attribution import Attribution, HeadAttribution, RowKind
from attn_diag.results.several import Several
from attn_diag.results.wording import number
from attn_diag.statistics.means import require_level
from attn_diag.work import Progress, part_of

# A row with less than this part of P outside its top key is called near one-hot.
_NEAR_ONE_HOT = 0.05
# Errors of O below are float64's, 2^-53 each of a thousand sums. One ulp of FP16 in one of 10^7 elements is 8e-8.
_FLOAT64 = 2.0**-40
# Of a dQ that is so much smaller than its terms float64, which rounds these by 2^-53, does not know 1 part in 32.
_LOST = 2.0**48


@overload
def attribute(
    source: One, k: Array | None = None, v: Array | None = None, *, recipe: str | Recipe | None = None,
    selection: Selection | None = None, level: float = 0.01, device: str = "auto", progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> Attribution: ...  # fmt: skip
@overload
def attribute(
    source: Named | Sequence[Capture | Named], *, recipe: str | Recipe | None = None,
    selection: Selection | None = None, level: float = 0.01, device: str = "auto", progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> Attribution | Several[Attribution]: ...  # fmt: skip
def attribute(
    source: Source,
    k: Array | None = None,
    v: Array | None = None,
    *,
    recipe: str | Recipe | None = None,
    selection: Selection | None = None,
    level: float = 0.01,
    device: str = "auto",
    progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> Attribution | Several[Attribution]:
    """Attribute the errors of a kernel to its rounding sites, head by head.

    Args:
        source: q of a call, [B, H, T, D]; or a Capture, a capture's file, a folder of them, or a list of these.
        k, v: Of the call.
        recipe: What is emulated; None: the recipe that reproduces the O of the observation selected, else fa2.
        selection: The observation (default: the first with an O), heads and batch items (default: all).
        level: Significance of a site's mean error after Benjamini-Hochberg over the sites.
        device: auto, cpu or cuda.
        progress: Called with (done, total) query rows.
        **call: What else the call had and returned, as ``attn_diag.inspect`` takes it: o, lse, delta, do, dq, dk, dv,
            x, w_q, dq_pre, mask, causal, scale, window, softcap, layout.

    Returns:
        One answer; of a folder or a list ``Several``, an answer a capture.

    Raises:
        InputError: The selected does not exist, no recipe covers the inputs, or O contradicts the metadata; and as
            ``captures_of``.
    """
    require_level(level)
    where = pick_device(device)

    def of(capture: Capture, counted: Progress | None) -> Attribution:
        return _attributed(capture, recipe, selection or Selection(), level, where, counted)

    return answers("attribute", source, k, v, call, of, progress)


# Heads that a GPU holds together have so many elements of q: some forty times as many float64 numbers.
_HELD = 2**25


def _attributed(
    capture: Capture,
    recipe: str | Recipe | None,
    wanted: Selection,
    level: float,
    where: torch.device,
    progress: Progress | None,
) -> Attribution:
    """One capture's."""
    capture = WithoutAbsorbedRows.of(capture).capture
    name = observation_with_o(capture, wanted.observation)
    heads, batches = select_heads(capture, wanted)
    opened = OpenCapture(capture, where, batches, heads)
    opened.require_assumptions(name)
    places = [(batch, head) for batch in batches for head in heads]

    parts = []

    def attributed(counted: Progress | None, some: Sequence[tuple[int, int]]) -> list[HeadAttribution]:
        parts.append(some)
        read = [opened.open_head(name, recipe, batch, head) for batch, head in some]
        return attribute_heads(read, level, notes_of(opened), counted)

    largest = max(capture.lengths(batch)[0] for batch in batches) * capture.head_dim
    step = max(1, _HELD // max(largest, 1)) if joins(where) else 1
    starts = range(0, len(places), step)
    results: list[HeadAttribution] = []
    for i, start in enumerate(starts):
        some, counted = places[start : start + step], part_of(progress, i, len(starts))
        if recipe is None and name is not None:
            opened.identify_ahead(name, some)
        results += in_parts(partial(attributed, counted), some)
    in_smaller = "" if len(parts) == len(starts) else ", fewer heads at a time than meant: memory did not suffice"
    return Attribution(
        tool=describe_tool(where),
        source=capture.source,
        step=capture.metadata.step,
        observation=name,
        level=level,
        backend=f"emulation on {backend_name(where)}{in_smaller}",
        heads=tuple(results if capture.batch > 1 else (replace(found, batch=None) for found in results)),
    )


def notes_of(opened: OpenCapture) -> tuple[str, ...]:
    """What is not attributed in these heads, and why; how dW_Q follows, where that needs saying."""
    if opened.projection is None:
        return ("delta, dQ and dW_Q: not attributed, dO was not captured",)
    return () if opened.projection.note is None else (opened.projection.note,)


def attribute_heads(
    heads: Sequence[OpenHead], level: float, notes: tuple[str, ...] = (), progress: Progress | None = None
) -> list[HeadAttribution]:
    """Attribute the errors of some heads, sort their rows into kinds, and put it into words.

    On a GPU those that are alike, of one recipe, run together.

    Args:
        heads: The heads, opened.
        level: Significance of a site's mean error after Benjamini-Hochberg over the sites.
        notes: Of the capture, to be repeated.
        progress: Counts query rows.

    Raises:
        InputError: Of one of them no row is finite and sees a key.
    """
    take_truths(heads)
    groups: dict[object, list[int]] = {}
    for i, head in enumerate(heads):
        if not bool(head.truth.usable.any()):
            raise InputError(f"{head.source}: head {head.head}: no row is finite and sees a key: nothing to attribute")
        kind = alike(head.truth.head) or i, head.baseline.recipe.json, tuple(head.formats.items())
        groups.setdefault(kind, []).append(i)
    rows, done = sum(len(head.truth.head.q) for head in heads), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        # Runs come in two rounds.
        if progress is not None:
            progress(done, 2 * rows)

    found: dict[int, HeadAttribution] = {}
    for places in groups.values():
        some = [heads[i] for i in places]
        truths, recipe = [head.truth for head in some], some[0].baseline.recipe
        captured = [None if h.observation is None else observed_sizes(h.outputs, h.truth) for h in some]
        tables = attribute_sites(truths, recipe, level=level, captured=captured, advance=advance)
        for i, head, table, beside in zip(places, some, tables, fidelities(some), strict=True):
            found[i] = _told(head, table, beside, level, notes)
    return [found[i] for i in range(len(heads))]


def _told(head: OpenHead, table: SiteTable, beside: Fidelity, level: float, notes: tuple[str, ...]) -> HeadAttribution:
    """One head's attribution in numbers and words."""
    truth, recipe = head.truth, head.baseline.recipe
    table, lost = _above_float64(table, truth.conditioning)
    notes = (*notes, *lost)
    unfit = head.baseline.caution
    # Nothing is blamed for errors that the recipe does not make; those of a recipe asked for are its own.
    blameless = {"o", "delta", "dq", "dw_q"} if unfit else set(beside.differences)
    if head.baseline.origin == "given":
        blameless = set()
    elif "dq" in blameless:
        blameless.add("dw_q")
    found = HeadAttribution(
        layer=head.layer,
        batch=head.batch,
        head=head.head,
        rows=int(truth.usable.sum()),
        recipe=head.baseline.words,
        recipe_json=recipe.json,
        agreement=head.baseline.agreement,
        runs=table.runs,
        orders=table.orders,
        noise_factor=table.totals["delta"].error if "delta" in table.totals else None,
        conditioning=truth.conditioning,
        totals=table.totals,
        sites=table.sites,
        inert=table.inert,
        repairs=table.repairs,
        twin=table.twin,
        row_kinds=_row_kinds(head, table),
        guilty={q: site for q, site in table.guilty.items() if q not in blameless},
        biased={q: site for q, site in table.biased.items() if q not in blameless},
        recipe_from=head.baseline.origin,
        unfit=unfit,
        differences=dict(beside.differences),
        well_rounded={q: (r.factor, r.low, r.high) for q, r in beside.well_rounded.items()},
        notes=notes,
        norms=dict(truth.norms),
    )
    return replace(found, reasons=tuple(reasons(found, level)))


def _above_float64(table: SiteTable, conditioning: float | None) -> tuple[SiteTable, tuple[str, ...]]:
    """Without errors that float64's own roundings make, such as of a dQ that is 0; and what is said of these."""
    o, notes = table.totals["o"], tuple[str, ...]()
    if max(o.error, o.captured or 0.0) < _FLOAT64:
        exact = replace(o, error=0.0, captured=None if o.captured is None else 0.0)
        table = replace(table, totals=table.totals | {"o": exact})
    lost = {"dq", "dw_q"} & table.totals.keys()
    if lost and conditioning is not None and conditioning > _LOST:
        smaller = f"{number(conditioning)} times smaller than its terms"
        notes = (f"dQ and dW_Q: not attributed, float64 does not resolve the true dQ ({smaller})",)

        def of(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in lost}

        table = replace(
            table, totals=of(table.totals), guilty=of(table.guilty), biased=of(table.biased),
            sites=tuple(replace(site, effects=of(site.effects)) for site in table.sites),
            repairs=tuple(replace(step, left=of(step.left)) for step in table.repairs),
            twin=replace(table.twin, sizes=of(table.twin.sizes), bias=of(table.twin.bias)),
        )  # fmt: skip
    return table, notes


def _row_kinds(head: OpenHead, table: SiteTable) -> dict[str, RowKind]:
    """Rows with a repeated maximum (``exact``), swamped rows (of the captured O, else the emulated one), and near
    one-hot rows."""
    truth, rows = head.truth, head.truth.usable
    out = head.outputs.get("o")
    if out is None:
        out = emulate_head(head.baseline.recipe, replace(truth.head, do=None)).o.double()
    swamped = swamped_elements(out, truth.reference.out, truth.head.v[truth.top_key]).all(1)
    repeats = truth.maxima.repeats("exact")
    assert repeats is not None
    kinds = {
        "repeated_maximum": repeats.multiplicity > 1,
        "swamped": swamped & truth.maxima.several_keys,
        "near_one_hot": 1 - truth.top_prob < _NEAR_ONE_HOT,
    }
    dq = truth.reference.dq
    squares = torch.zeros_like(truth.top_prob) if dq is None else dq.square().sum(1)
    # In one copy from a GPU.
    usable, square, *members = torch.stack([t.double() for t in (rows, squares, *kinds.values())]).cpu().numpy()
    of_usable = usable > 0
    references = None if dq is None else square[of_usable]

    def share(values: npt.NDArray[np.float64] | None, kind: npt.NDArray[np.bool_]) -> float | None:
        total = 0.0 if values is None else float(values.sum())
        return float(values[kind].sum()) / total if values is not None and total else None

    return {
        name: RowKind(int(kind.sum()), share(table.whole.dq_square, kind), share(references, kind))
        for name, kind in ((name, member[of_usable] > 0) for name, member in zip(kinds, members, strict=True))
    }
