"""``attribute``: a capture in, every rounding site's part in its heads' errors out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from attn_diag.analyses.attribution.reasons import reasons
from attn_diag.analyses.attribution.site_shares import SiteTable, attribute_sites
from attn_diag.analyses.several import answers
from attn_diag.captures.absorbed import WithoutAbsorbedRows
from attn_diag.captures.capture import Capture
from attn_diag.captures.given import Array, CallTensors, Named, One, Source
from attn_diag.captures.selection import Selection, select_heads
from attn_diag.errors import InputError
from attn_diag.head.baseline import observation_with_o
from attn_diag.head.fidelity import fidelity
from attn_diag.head.machine import backend_name, describe_tool, pick_device
from attn_diag.head.open import OpenCapture, OpenHead
from attn_diag.head.row_maxima import swamped_elements
from attn_diag.head.truth import observed_sizes
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.results.attribution import Attribution, HeadAttribution, RowKind
from attn_diag.results.several import Several
from attn_diag.statistics.means import require_level
from attn_diag.work import Progress, part_of

# A row with less than this part of P outside its top key is called near one-hot.
_NEAR_ONE_HOT = 0.05


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
    notes = notes_of(opened)
    results = []
    places = [(batch, head) for batch in batches for head in heads]
    for place, (batch, head) in enumerate(places):
        found = attribute_head(
            opened.open_head(name, recipe, batch, head), level, notes, part_of(progress, place, len(places))
        )
        results.append(found if capture.batch > 1 else replace(found, batch=None))
    return Attribution(
        tool=describe_tool(where),
        source=capture.source,
        step=capture.metadata.step,
        observation=name,
        level=level,
        backend=f"emulation on {backend_name(where)}",
        heads=tuple(results),
    )


def notes_of(opened: OpenCapture) -> tuple[str, ...]:
    """What is not attributed in these heads, and why; how dW_Q follows, where that needs saying."""
    if opened.projection is None:
        return ("delta, dQ and dW_Q: not attributed, dO was not captured",)
    return () if opened.projection.note is None else (opened.projection.note,)


def attribute_head(
    head: OpenHead, level: float, notes: tuple[str, ...] = (), progress: Progress | None = None
) -> HeadAttribution:
    """Attribute the errors of one head, sort its rows into kinds, and put it into words.

    Args:
        head: The head, opened.
        level: Significance of a site's mean error after Benjamini-Hochberg over the sites.
        notes: Of the capture, to be repeated.
        progress: Counts query rows.

    Raises:
        InputError: No row is finite and sees a key.
    """
    truth, recipe = head.truth, head.baseline.recipe
    if not bool(truth.usable.any()):
        raise InputError(f"{head.source}: head {head.head}: no row is finite and sees a key: nothing to attribute")
    rows, done = len(truth.head.q), 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        # Runs come in two rounds.
        if progress is not None:
            progress(done, 2 * rows)

    captured = None if head.observation is None else observed_sizes(head.outputs, truth)
    table = attribute_sites(truth, recipe, level=level, captured=captured, advance=advance)
    beside = fidelity(head)
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
    errors, reference = table.whole.dq_square, truth.reference.dq
    reference_square = None if reference is None else reference[rows].square().sum(1)

    def share(values: Tensor | None, kind: Tensor) -> float | None:
        total = 0.0 if values is None else float(values.sum())
        return float(values[kind[rows]].sum()) / total if values is not None and total else None

    return {
        name: RowKind(int((kind & rows).sum()), share(errors, kind), share(reference_square, kind))
        for name, kind in kinds.items()
    }
