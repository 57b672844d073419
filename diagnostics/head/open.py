"""Opening a capture, and a head of it: what every analysis of a head starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.head.assumptions import check_observation, judge_checks, wrong_among
from attn_diag.head.baseline import Baseline, Recognised, find_baseline, recognise
from attn_diag.head.by_kernels import identify_by_kernels
from attn_diag.head.identification import IdentifiedHead, identify_head, nothing_fits
from attn_diag.head.output_fit import OutputFit
from attn_diag.head.projection import HeadProjection, Projection, find_projection
from attn_diag.head.read import HeadInputs, HeadTensors, NonFiniteCensus, read_head, read_outputs
from attn_diag.head.recipe_search import SearchedHead
from attn_diag.head.scale_fit import fit_scale
from attn_diag.head.tiled_loops import with_loop
from attn_diag.head.truth import HeadTruth, head_truth
from attn_diag.head.unfused_bits import UnfusedMatch, find_unfused
from attn_diag.kernels import Recipe
from attn_diag.reference import FloatFormat
from attn_diag.results.diagnosis import Assumptions, Misfit


@dataclass
class OpenHead:
    """One head of one sequence, ready to be taken apart."""

    source: str
    """The capture's."""
    layer: int | None
    """The model's number of the layer."""
    batch: int
    """Index of the batch item."""
    head: int
    """The model's number of the head."""
    observation: str | None
    """The observation looked at; None where none has an O."""
    outputs: dict[str, Tensor]
    """What the observation holds of it: o, lse, delta and dq in float64, as far as captured."""
    formats: dict[str, FloatFormat]
    """The formats in which ``outputs`` were stored."""
    baseline: Baseline
    """The recipe that its O is taken to come from."""
    inputs: HeadInputs
    """q, k, v and dO."""
    projection: HeadProjection | None = None
    """How dW_Q follows from dQ; None where it does not."""
    measured: HeadTruth | None = None
    """The truth, where a pass over the head has been made."""

    @property
    def truth(self) -> HeadTruth:
        """The float64 reference and what goes with it; the first call streams it, unless it is known already."""
        if self.measured is None:
            self.measured = head_truth(self.inputs, self.projection)
        return self.measured


@dataclass(frozen=True)
class OpenCapture:
    """Some heads of a capture: its metadata are checked, and its recipes recognised, once for all who ask."""

    capture: Capture
    """Where they are."""
    device: torch.device
    """Where float64 is computed."""
    batches: Sequence[int]
    """Indices of the batch items."""
    heads: Sequence[int]
    """Indices in the capture, not the model's numbers."""
    tensors: HeadTensors | None = None
    """These heads' tensors, where they are read once for all who ask."""
    _fits: dict[str, OutputFit | None] = field(default_factory=dict)
    _checks: dict[str, tuple[Misfit, ...]] = field(default_factory=dict)
    _recognised: dict[tuple[str, int, int], Recognised | None] = field(default_factory=dict)
    _identified: dict[tuple[str, int, int], IdentifiedHead | None] = field(default_factory=dict)
    _not_fused: list[UnfusedMatch] = field(default_factory=list)

    def only(self, batch: int, head: int) -> OpenCapture:
        """This head of this batch item alone."""
        return replace(self, batches=[batch], heads=[head])

    @cached_property
    def projection(self) -> Projection | None:
        """How dW_Q follows from dQ in these heads; None without dO."""
        if "do" not in self.capture.tensors:
            return None
        return find_projection(self.capture, self.batches, self.heads, self.device)

    def assumptions(self, observations: Sequence[str]) -> Assumptions:
        """Whether these observations agree with the metadata; see ``check_assumptions``."""
        for name in observations:
            if name not in self._checks:
                fit = self._fits.get(name)
                self._checks[name] = check_observation(self.capture, name, self.device, self.tensors, fit)
        return judge_checks(self.capture, observations, [c for name in observations for c in self._checks[name]])

    def take_fit(self, observation: str, found: OutputFit | None) -> None:
        """Know how well an observation's O fits the metadata, which ``assumptions`` would ask for."""
        self._fits[observation] = found

    def require_assumptions(self, observation: str | None) -> None:
        """Raise InputError where the metadata contradict an observation in these heads."""
        if observation is None or (found := self.assumptions([observation])).ok is not False:
            return
        places = list(product(self.batches, self.heads))
        if found.refused:
            raise InputError(f"{self.capture.source}: {found.message}")
        if (words := wrong_among(self.capture, found, self.device, places)) is not None:
            raise InputError(f"{self.capture.source}: {words}")

    def recognise(self, observation: str, batch: int, head: int) -> Recognised | None:
        """The known recipe that made an observation's O, from a few rows of this head; None where none fits."""
        place = observation, batch, head
        if place not in self._recognised:
            self._recognised[place] = recognise(self.capture, observation, batch, head)
        return self._recognised[place]

    def take_recognised(self, observation: str, batch: int, head: int, found: Recognised | None) -> None:
        """Know what ``recognise`` would look for."""
        self._recognised[observation, batch, head] = found

    def identify(self, observation: str, batch: int, head: int) -> IdentifiedHead | None:
        """As ``identify_head``: the whole search, with every schedule and mixture of roundings, in all rows."""
        place = observation, batch, head
        if place not in self._identified:
            self._identified[place] = identify_head(self.capture, observation, batch, head, self.device)
        return self._identified[place]

    def fitting(self, observation: str, batch: int, head: int) -> IdentifiedHead | None:
        """As ``identify``; None where a few rows show that nothing fits, which the whole search would take long to."""
        place = observation, batch, head
        if place not in self._identified and nothing_fits(self.capture, *place, self.device):
            return None
        return self.identify(*place)

    def identify_ahead(self, observation: str, places: Sequence[tuple[int, int]]) -> None:
        """Look for the kernels of some heads (batch item, head) together, as ``identify_by_kernels`` does.

        For those that it does not know ``identify`` searches.
        """
        known = identify_by_kernels([(self.capture, observation, *place) for place in places], self.device)
        for place, found in zip(places, known, strict=True):
            if found is not None:
                self._identified[observation, *place] = found

    def _find_unfused(self, subject: SearchedHead) -> UnfusedMatch | None:
        """The attention that is not fused which has all of a head's bits; None: none has."""
        found = find_unfused(subject, *self._not_fused[-1:])
        if found is None or found.flaw is not None:
            return None
        self._not_fused.append(found)
        return found

    def open_head(
        self,
        observation: str | None,
        recipe: str | Recipe | None,
        batch: int,
        head: int,
        *,
        measured: HeadTruth | None = None,
    ) -> OpenHead:
        """Open one of its heads.

        Args:
            observation: The observation to look at; None where none has an O.
            recipe: The recipe to take it as made by, a name or a Recipe; None: as recognised by its bits, else fa2.
            batch: Index of the batch item.
            head: Index of the head in the capture.
            measured: Its truth, where a pass over it has been made.

        Raises:
            InputError: The metadata contradict the observation, the recipe does not exist, or no recipe covers the
                inputs.
        """
        c = self.capture
        self.require_assumptions(observation)
        found = None if observation is None or recipe is not None else self.identify(observation, batch, head)
        if observation is not None:
            found = with_loop(found, c, observation, batch, head)
        scale, not_fused = None, ""
        if found is not None and found.recipe is None and not found.loop:
            plain = self._find_unfused(found.subject) if found.outcome == "unknown" else None
            not_fused = "" if plain is None else plain.words
            fit = fit_scale(found.subject.inputs, found.subject.observed.double()) if plain is None else None
            scale = fit if fit is not None and fit.alone else None
        baseline = find_baseline(c, recipe, found, scale, not_fused)
        projection = None if self.projection is None else self.projection.head(batch, head)
        census = NonFiniteCensus()
        inputs = read_head(c, batch, head, self.device, census) if measured is None else measured.inputs
        outputs: dict[str, Tensor] = {}
        formats: dict[str, FloatFormat] = {}
        if observation is not None:
            outputs, formats = read_outputs(c, observation, batch, head, self.device, census)
        return OpenHead(
            source=c.source,
            layer=c.metadata.layer,
            batch=batch,
            head=head + c.metadata.head_offset,
            observation=observation,
            outputs=outputs,
            formats=formats,
            baseline=baseline,
            inputs=inputs,
            projection=projection,
            measured=None if measured is None else replace(measured, projection=projection),
        )
