"""Which recipe and schedule made a captured O: the one whose emulation has its bits.

On N(0,1) inputs the right recipe and schedule reproduce 99.8 to 99.98 % of O's elements, wrong ones 65 to 94 %; on near
one-hot rows many agree, and are then named together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import overload

import torch
from torch import Tensor
from typing_extensions import Unpack

from attn_diag.analyses.several import answered, answers
from attn_diag.captures.absorbed import WithoutAbsorbedRows
from attn_diag.captures.capture import Capture
from attn_diag.captures.given import Array, CallTensors, Named, One, Source, require_captures
from attn_diag.captures.selection import Selection, select_heads, select_observations, select_place
from attn_diag.errors import InputError
from attn_diag.head.assumptions import check_assumptions, wrong_among
from attn_diag.head.baseline import engine_backend
from attn_diag.head.by_kernels import Place, identify_by_kernels
from attn_diag.head.identification import IdentifiedHead, identify_head, why_not_compared
from attn_diag.head.machine import pick_device
from attn_diag.head.other_metadata import better_reading
from attn_diag.head.output_fit import out_fit
from attn_diag.head.recipe_candidates import describe_schedule, family_name, known_name
from attn_diag.head.recipe_search import LEVEL
from attn_diag.head.scale_fit import fit_scale
from attn_diag.head.tiled_loops import with_loop
from attn_diag.head.unfused_bits import find_unfused
from attn_diag.results.identification import Identification, Identifications, Misfitting, RankedRecipe
from attn_diag.results.several import Several
from attn_diag.results.wording import percent, plural, share
from attn_diag.work import Progress, part_of

# The number of recipes is known only as the search goes on; a usual one for the progress bar.
_USUAL_STEPS = 160


@overload
def identify(
    source: One, k: Array | None = None, v: Array | None = None, *, observation: str | None = None, batch: int = 0,
    head: int | None = None, device: str = "auto", rows: int | None = None, progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> Identification: ...  # fmt: skip
@overload
def identify(
    source: Named | Sequence[Capture | Named], *, observation: str | None = None, batch: int = 0,
    head: int | None = None, device: str = "auto", rows: int | None = None, progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> Identification | Several[Identification]: ...  # fmt: skip
def identify(
    source: Source,
    k: Array | None = None,
    v: Array | None = None,
    *,
    observation: str | None = None,
    batch: int = 0,
    head: int | None = None,
    device: str = "auto",
    rows: int | None = None,
    progress: Progress | None = None,
    **call: Unpack[CallTensors],
) -> Identification | Several[Identification]:
    """Rank recipes and schedules by the fraction of O's elements of which they reproduce every bit.

    Args:
        source: q of a call, [B, H, T, D]; or a Capture, a capture's file, a folder of them, or a list of these.
        k, v: Of the call.
        observation: Its name, not needed where there is one only.
        batch: Index of the batch item.
        head: The model's number of the head; None: the capture's first.
        device: auto, cpu or cuda.
        rows: So many query rows are compared at the end; None: as many as have 2^20 scores together, at least 128.
        progress: Called with (done, total) after each recipe; the total is an estimate until the end.
        **call: What else the call had and returned, as ``attn_diag.inspect`` takes it: o, lse, delta, do, dq, dk, dv,
            x, w_q, dq_pre, mask, causal, scale, window, softcap, layout.

    Returns:
        One answer; of a folder or a list ``Several``, an answer a capture.

    Raises:
        InputError: The observation has no O, inputs are neither BF16 nor FP16, O has another dtype than q, or no row
            can be compared; and as ``captures_of``.
    """
    where = pick_device(device)
    if rows is not None and rows < 1:
        raise InputError(f"rows must be at least 1, got {rows}")

    def of(capture: Capture, counted: Progress | None) -> Identification:
        return _identified(capture, observation, batch, head, where, rows, counted)

    return answers("identify", source, k, v, call, of, progress)


def _identified(
    capture: Capture,
    observation: str | None,
    batch: int,
    head: int | None,
    where: torch.device,
    rows: int | None,
    progress: Progress | None,
) -> Identification:
    """One capture's."""
    capture = WithoutAbsorbedRows.of(capture).capture
    name = _observation(capture, observation)
    batch, index = select_place(capture, batch, head)
    steps = _Steps(progress)
    place = capture, name, batch, index
    found = None if rows is not None else _by_own_kernel(place, where)
    if found is None:
        found = with_loop(identify_head(*place, where, rows=rows, step=steps), *place)
    if found is None:
        raise InputError(f"{capture.source}: {why_not_compared(capture, name)}")
    result = _Report(capture, name, batch, index, found, where).result()
    steps.finish()
    return result


def _by_own_kernel(place: Place, where: torch.device) -> IdentifiedHead | None:
    """The published kernel that has every bit, run on a GPU: no other schedule could fit better. None: search."""
    (found,) = identify_by_kernels([place], where)
    return found if found is not None and found.best.match.agreement == 1.0 else None


class _Steps:
    """Counts recipes for a progress bar."""

    def __init__(self, progress: Progress | None) -> None:
        self.progress, self.done = progress, 0

    def __call__(self) -> None:
        self.done += 1
        if self.progress is not None:
            self.progress(self.done, max(_USUAL_STEPS, self.done + 1))

    def finish(self) -> None:
        if self.progress is not None:
            self.progress(self.done, self.done)


class _Report:
    """From what was found to a result in words."""

    def __init__(
        self, capture: Capture, observation: str, batch: int, head: int, found: IdentifiedHead, device: torch.device
    ) -> None:
        self.capture, self.observation, self.batch, self.head = capture, observation, batch, head
        self.found, self.device = found, device
        self.trials = found.trials
        self.elements = found.trials[0].match.equal.numel()

    def result(self) -> Identification:
        c, found, ranking = self.capture, self.found, self._ranking()
        misfit, options = self._misfit() if found.outcome == "unknown" else (None, ())
        plain = find_unfused(found.subject) if found.outcome == "unknown" and misfit is None else None
        best, names, flaw = ranking[0], found.names, found.flaw
        outcome = "unnamed" if found.loop else found.outcome
        if plain is not None:
            outcome, flaw = "unnamed" if plain.flaw is None else "flawed", plain.flaw
        as_good = [r for t, r in zip(self.trials, ranking, strict=True) if t in found.as_good]
        runner_up = next((r for r in ranking if r.told_apart), None)
        fitting = [t.out for t in found.as_good]
        contested = int(torch.stack([(out != fitting[0]) for out in fitting]).any(0).sum()) if fitting else 0
        q_length, _ = c.lengths(self.batch)
        return Identification(
            source=c.source,
            observation=self.observation,
            layer=c.metadata.layer,
            batch=self.batch,
            head=self.head + c.metadata.head_offset,
            shape=c.sizes(self.batch),
            dtype=str(c.tensors["q"].dtype).removeprefix("torch."),
            backend=engine_backend("triton" if found.by_kernel else "emulation", self.device),
            rows=found.rows,
            rows_all=q_length,
            elements=self.elements,
            contested=contested,
            tried=found.tried,
            threshold=found.threshold,
            level=LEVEL,
            outcome=outcome,
            recipes=tuple(names),
            verdict=plain.verdict(best.agreement) if plain is not None
            else self._verdict(as_good, best, contested) if misfit is None
            else f"Another function: {misfit}",
            margin=None if runner_up is None else best.agreement - runner_up.agreement,
            margin_p_value=None if runner_up is None else runner_up.p_value,
            notes=(*self._notes(), *([] if misfit is None else [misfit])),
            candidates=tuple(ranking),
            backward=found.backward,
            hardware=found.hardware,
            misfit=misfit,
            options=options,
            not_fused=None if plain is None else plain.words,
            loop=found.loop or None,
            flaw=None if flaw is None else Misfitting(
                flaw.rows, flaw.features, flaw.elements, flaw.largest_ulp, flaw.words
            ),
        )  # fmt: skip

    def _ranking(self) -> list[RankedRecipe]:
        ranking, d = [], self.capture.head_dim
        outs: list[Tensor] = []
        for rank, trial in enumerate(self.trials, 1):
            against = self.trials[0].match.compare(trial.match)
            group = next((i for i, out in enumerate(outs) if torch.equal(out, trial.out)), len(outs))
            if group == len(outs):
                outs.append(trial.out)
            recipe, schedule = trial.recipe, trial.recipe.schedule
            ranking.append(
                RankedRecipe(
                    rank=rank,
                    recipe=known_name(recipe, d),
                    roundings=family_name(recipe, d),
                    schedule=describe_schedule(schedule),
                    query_block=schedule.query_block,
                    key_tile=schedule.key_tile,
                    order=schedule.order,
                    split_keys=schedule.split_keys,
                    exp=recipe.exp,
                    row_sum_of=recipe.row_sum_of,
                    agreement=trial.match.agreement,
                    standard_error=trial.match.standard_error,
                    group=group + 1,
                    won=against.lost,
                    lost=against.won,
                    disputed_rows=against.rows,
                    p_value=None if group == 0 else against.p_value,
                    told_apart=group > 0 and against.p_value <= LEVEL,
                )
            )
        return ranking

    def _verdict(self, as_good: list[RankedRecipe], best: RankedRecipe, contested: int) -> str:
        outcome, names, hardware = self.found.outcome, self.found.names, self.found.hardware
        equal, looks = percent(best.agreement, ".3f"), f"the roundings of {best.roundings}, {best.schedule}"
        if self.found.loop:
            return f"No recipe known here, but {self.found.loop}, has these bits. Nearest, with {equal}: {looks}."
        if outcome == "unknown":
            least = percent(self.found.threshold, ".2f")
            return (
                f"Unknown: nothing tried has the observed bits in {least} of O's elements. Nearest, with {equal}: "
                f"{looks}. A rounding site or an order of keys that is not modelled may be missing."
            )
        if outcome == "flawed":
            flaw = self.found.flaw
            assert flaw is not None
            who = " or ".join(names) or looks
            return f"{who}, but {flaw.words}; elsewhere it has {share(flaw.agreement)} of O's bits."
        if outcome == "unnamed":
            orders = {r.schedule for r in as_good if r.roundings == best.roundings}
            if len(orders) > 1:
                return (
                    f"No published kernel that is known here, but its roundings are: those of {best.roundings} "
                    f"({equal} of O's elements{self._summed}), in an order of keys that this input does not tell "
                    f"apart: {best.schedule}, or {plural(len(orders) - 1, 'other')}."
                )
            return (
                f"No published kernel that is known here, but its parts are: {looks} ({equal} of O's elements"
                f"{self._summed})."
            )
        differ = f"they differ in {contested} of {self.elements} elements" if contested else "their bits are the same"
        if outcome == "ambiguous":
            together = " or ".join(names)
            missed = [m for m in hardware if m.missed]
            if hardware and len(missed) < len(hardware):
                other = f", {missed[0].recipe} misses {missed[0].missed}" if missed else ""
                return (
                    f"{together}: with sums of products as a Hopper tensor core makes them each has every bit of "
                    f"{hardware[0].elements} elements{other}; this input does not tell them apart."
                )
            by_bits = f"{names[0]} comes nearest with {equal} of O's elements{self._summed}"
            nearest = f"{hardware[0].recipe} comes nearest (see the sums of a tensor core)" if hardware else by_bits
            return f"{together}: {nearest}, but this input does not tell them apart: {differ}."
        if hardware:
            second = next(m for m in hardware if m.missed)
            return (
                f"{names[0]}: with sums of products as a Hopper tensor core makes them it has every bit of "
                f"{second.elements} elements, {second.recipe} misses {second.missed}. (Without that, this input does "
                f"not tell them apart: {differ}.)"
            )
        named = {r.group for r in as_good if r.recipe is not None}
        others = {r.schedule for r in as_good if r.group not in named}
        rest = plural(len(others), "schedule")
        unnamed = f"; this input does not exclude {rest} that no preset has" if others else ""
        return f"{names[0]} reproduces {equal} of O's elements bit for bit{self._summed}{unnamed}."

    @property
    def _summed(self) -> str:
        """How the best recipe's products are summed, with a comma before; empty where in fp32."""
        best = self.found.best
        made = f", with sums of products as a Hopper tensor core makes them, {best.recipe.mma_k} at a time"
        return made if best.cut_off else ""

    def _notes(self) -> tuple[str, ...]:
        found = self.found
        notes = [found.note] if found.note else []
        if " with the backward of " in found.name:
            notes.append(f"dQ is not as {found.names[0] if found.names else 'FlashAttention-2'} makes it: {found.name}")
        if found.subject.made is not None:
            how = "published kernels were run themselves"
            if found.best.cut_off:
                how += ", and those that came near were emulated with sums as a tensor core makes them"
            notes.append(
                f"{how}; schedules and mixtures that none of them has were not tried (--device cpu, or --rows, tries "
                "them)"
            )
        if not found.subject.diagonal and self.capture.metadata.causal != "none":
            notes.append(
                "q_positions: the query blocks are not known, so that schedules with the diagonal first were not tried"
            )
        return tuple(notes)

    def _misfit(self) -> tuple[str | None, tuple[str, ...]]:
        """Why O is not the attention that the metadata state, if so, and the options that would make it that."""
        capture, name = self.capture, self.observation
        assumptions = check_assumptions(capture, [name], self.device)
        if assumptions.ok is False and not assumptions.refused:
            words = wrong_among(capture, assumptions, self.device, [(self.batch, self.head)])
            if words is not None:
                return words, ()
        elif assumptions.refused:
            stated = out_fit(capture, name, self.device)
            if stated is None or stated.ok:
                return assumptions.message, ()
            other = better_reading(capture, name, self.device, stated)
            return assumptions.message, () if other is None else other.options(capture.metadata)
        scale = fit_scale(self.found.subject.inputs, self.found.subject.observed.double())
        if scale is None or not scale.alone:
            return None, ()
        return f"{scale.words}.", (f"--scale {scale.scale:.9g}",)


def _observation(capture: Capture, wanted: str | None) -> str:
    known = select_observations(capture, wanted)
    if not known:
        raise InputError(f"{capture.source}: no observation; it has none")
    if len(known) > 1:
        raise InputError(f"{capture.source}: name one of its observations: {', '.join(known)}")
    return known[0]


def identify_captures(
    captures: Iterable[Capture],
    *,
    selection: Selection | None = None,
    rows: int | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    unreadable: Sequence[str] = (),
    skip: Callable[[InputError], None] | None = None,
) -> Identifications:
    """Identify every observation of every capture, from its first head and sequence unless others are selected.

    Args:
        captures: The captures.
        selection: Observations, heads and batch items.
        rows: As in ``identify``.
        device: As in ``identify``.
        progress: Called with (done, total) hundredths of an observation.
        unreadable: Complaints about captures that could not be opened.
        skip: Called with what cannot be identified where there is more; without it, that is raised.

    Raises:
        InputError: Nothing can be identified, and as ``identify`` does.
    """
    jobs: list[tuple[Capture, str, int, int]] = []
    errors: list[InputError] = []
    for capture in require_captures(captures, "identify"):
        try:
            jobs += _jobs(capture, selection or Selection())
        except InputError as error:
            errors.append(error)

    def identified(job: tuple[int, tuple[Capture, str, int, int]]) -> Identification:
        number, (capture, observation, batch, head) = job
        part = part_of(progress, number, len(jobs))
        return identify(
            capture, observation=observation, batch=batch, head=head, device=device, rows=rows, progress=part
        )

    results, said = answered(enumerate(jobs), identified, skip, errors)
    return Identifications(tuple(results), (*unreadable, *said))


def _jobs(capture: Capture, selection: Selection) -> list[tuple[Capture, str, int, int]]:
    observations = select_observations(capture, selection.observation)
    if not observations:
        raise InputError(f"{capture.source}: no observation; capture at least o, the kernel's output")
    heads, batches = select_heads(capture, selection)
    heads = heads if selection.heads is not None else heads[:1]
    batches = batches if selection.batches is not None else batches[:1]
    # ``identify`` takes the model's numbers.
    offset = capture.metadata.head_offset
    return [(capture, o, b, h + offset) for o in observations for b in batches for h in heads]
