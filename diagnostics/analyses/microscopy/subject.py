"""What a close look is taken at: one head, the recipe that is followed, and the O that is explained."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.analyses.microscopy.walk import require_walkable, site_format
from attn_diag.captures.capture import Capture
from attn_diag.captures.selection import select_place
from attn_diag.errors import InputError
from attn_diag.head.assumptions import check_assumptions
from attn_diag.head.engines import DEFAULT_RECIPE, require_known
from attn_diag.head.machine import pick_device
from attn_diag.head.read import HeadInputs, NonFiniteCensus, read_float64, read_head
from attn_diag.head.recipe.baseline import Baseline, find_baseline, observation_with_o
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.reference import AttentionHead, FloatFormat, format_of


@dataclass(frozen=True)
class MicroscopeSubject:
    """One head of one sequence, with the O to explain.

    ``out`` [Tq, Dv] float64: O as captured, or as the recipe makes it where none was (``observation`` is None then), in
    ``out_format``. ``recipe_reason``: where the recipe comes from. ``layer``, ``head``: the model's numbers.
    """

    source: str
    observation: str | None
    recipe: Recipe
    recipe_reason: str
    layer: int | None
    batch: int
    head: int
    inputs: HeadInputs
    out: Tensor
    out_format: FloatFormat


def subject_of(
    source: Capture | AttentionHead,
    *,
    recipe: str | Recipe | None = None,
    observation: str | None = None,
    observed: Tensor | None = None,
    batch: int = 0,
    head: int | None = None,
    device: str = "auto",
) -> MicroscopeSubject:
    """The subject of a capture, or of a head with ``observed`` O [Tq, Dv].

    Of a capture, ``batch`` is the index of the batch item and ``head`` the model's number of the head (default: the
    capture's first). ``recipe``: to follow (default: what the captured O is recognised as, else fa2).

    Raises InputError for what does not exist or cannot be followed, and where the metadata do not describe the captured
    O.
    """
    if isinstance(source, AttentionHead):
        return _of_head(source, recipe, observed)
    where = pick_device(device)
    batch, index = select_place(source, batch, head)
    name = observation_with_o(source, observation)
    if name is not None:
        assumptions = check_assumptions(source, [name], where)
        if assumptions.ok is False:
            raise InputError(f"{source.source}: {assumptions.message}")
    baseline = find_baseline(source, recipe, name, batch, index, where)
    require_walkable(baseline.recipe)
    inputs = read_head(source, batch, index, where, NonFiniteCensus())
    out, out_format = None, None
    if name is not None:
        key = source.key(name, "o")
        out, out_format = read_float64(source, key, batch, index, where), format_of(source.tensors[key].dtype)
    number = index + source.metadata.head_offset
    return _complete(
        MicroscopeSubject(
            source.source, name, baseline.recipe, baseline.words, source.metadata.layer, batch, number, inputs,
            torch.empty(0), inputs.input_format,
        ),
        out, out_format,
    )  # fmt: skip


def _of_head(head: AttentionHead, recipe: str | Recipe | None, observed: Tensor | None) -> MicroscopeSubject:
    from attn_diag.kernels import preset

    if isinstance(recipe, str):
        require_known("emulation", [recipe])
    known = recipe if isinstance(recipe, Recipe) else preset(recipe or DEFAULT_RECIPE, "bf16", head.q.shape[1])
    shape = [len(head.q), head.v.shape[1]]
    if observed is not None and list(observed.shape) != shape:
        raise InputError(f"observed must have shape [Tq, Dv] = {shape}, got {list(observed.shape)}")
    require_walkable(known)
    none = torch.zeros(len(head.q), dtype=torch.bool, device=head.q.device)
    fmt = site_format(known.input) or format_of(torch.float32)
    inputs = HeadInputs(head, none, none.new_empty(0, dtype=torch.int64), fmt)
    reason = Baseline(known, known.name, "assumed" if recipe is None else "given").words
    found = MicroscopeSubject(
        "memory", None if observed is None else "observed", known, reason, None, 0, 0, inputs, torch.empty(0), fmt
    )
    if observed is None:
        return _complete(found, None, None)
    return _complete(found, observed.double().to(head.q.device), format_of(observed.dtype))


def _complete(subject: MicroscopeSubject, out: Tensor | None, out_format: FloatFormat | None) -> MicroscopeSubject:
    """With the O to explain: as captured, else as the recipe makes it."""
    if out is None or out_format is None:
        out = emulate_head(subject.recipe, replace(subject.inputs.head, do=None)).o.double()
        out_format = site_format(subject.recipe.out) or format_of(torch.float32)
    return replace(subject, out=out, out_format=out_format)
