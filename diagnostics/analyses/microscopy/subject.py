"""What a close look is taken at: one head, the recipe that is followed, and the O that is explained."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attn_diag.analyses.microscopy.walk import require_walkable, site_format
from attn_diag.captures.capture import Capture
from attn_diag.captures.selection import select_place
from attn_diag.errors import InputError
from attn_diag.head.engines import DEFAULT_RECIPE, require_known
from attn_diag.head.machine import pick_device
from attn_diag.head.open import OpenCapture, OpenHead
from attn_diag.head.read import HeadInputs
from attn_diag.head.recipe.baseline import Baseline, observation_with_o
from attn_diag.kernels import Recipe, emulate_head, preset
from attn_diag.reference import AttentionHead, FloatFormat, format_of


@dataclass(frozen=True)
class MicroscopeSubject:
    """One head of one sequence, with the O to explain."""

    opened: OpenHead
    """The head, and the recipe that is followed."""
    out: Tensor
    """O, [Tq, Dv] float64: as captured, or as the recipe makes it where none was."""
    out_format: FloatFormat
    """The format of O."""

    @property
    def recipe(self) -> Recipe:
        """The recipe that is followed."""
        return self.opened.baseline.recipe

    @property
    def inputs(self) -> HeadInputs:
        """The head's inputs."""
        return self.opened.inputs


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
    """The subject of a capture, or of a head with an observed O.

    Args:
        source: A capture, or one head.
        recipe: The recipe to follow; None: what the captured O is recognised as, else fa2.
        observation: Of a capture: the observation; None: the first with an O.
        observed: Of a head: its O, [Tq, Dv]; None: what the recipe makes is explained.
        batch: Of a capture: index of the batch item.
        head: Of a capture: the model's number of the head; None: the capture's first.
        device: Where a capture is computed.

    Raises:
        InputError: Something does not exist or cannot be followed, or the metadata do not describe the captured O.
    """
    if isinstance(source, AttentionHead):
        return _of_head(source, recipe, observed)
    where = pick_device(device)
    batch, index = select_place(source, batch, head)
    opened = OpenCapture(source, where, [batch], [index])
    return of_open_head(opened.open_head(observation_with_o(source, observation), recipe, batch, index))


def of_open_head(opened: OpenHead) -> MicroscopeSubject:
    """The subject of a head: the O to explain is the captured one, else what the recipe makes.

    Raises:
        InputError: The recipe cannot be followed.
    """
    recipe = opened.baseline.recipe
    require_walkable(recipe)
    if "o" in opened.outputs:
        return MicroscopeSubject(opened, opened.outputs["o"], opened.formats["o"])
    out = emulate_head(recipe, replace(opened.inputs.head, do=None)).o.double()
    return MicroscopeSubject(opened, out, site_format(recipe.out) or format_of(torch.float32))


def _of_head(head: AttentionHead, recipe: str | Recipe | None, observed: Tensor | None) -> MicroscopeSubject:
    if isinstance(recipe, str):
        require_known("emulation", [recipe])
    known = recipe if isinstance(recipe, Recipe) else preset(recipe or DEFAULT_RECIPE, "bf16", head.q.shape[1])
    shape = [len(head.q), head.v.shape[1]]
    if observed is not None and list(observed.shape) != shape:
        raise InputError(f"observed must have shape [Tq, Dv] = {shape}, got {list(observed.shape)}")
    none = torch.zeros(len(head.q), dtype=torch.bool, device=head.q.device)
    fmt = site_format(known.input) or format_of(torch.float32)
    return of_open_head(
        OpenHead(
            source="memory",
            layer=None,
            batch=0,
            head=0,
            observation=None if observed is None else "observed",
            outputs={} if observed is None else {"o": observed.double().to(head.q.device)},
            formats={} if observed is None else {"o": format_of(observed.dtype)},
            baseline=Baseline(known, known.name, "assumed" if recipe is None else "given"),
            inputs=HeadInputs(head, none, none.new_empty(0, dtype=torch.int64), fmt),
        )
    )
