"""Which recipe and schedule made a captured O: the one whose emulation has its bits.

On N(0,1) inputs the right recipe and schedule reproduce 99.8 to 99.98 % of O's elements, wrong ones 65 to 94 %; on near
one-hot rows many agree, and are then named together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.captures.selection import Selection, select_heads, select_observations, select_place
from attn_diag.errors import InputError
from attn_diag.head import recipe_search as search
from attn_diag.head.assumptions import check_assumptions
from attn_diag.head.machine import backend_name, pick_device
from attn_diag.head.recipe_candidates import describe_schedule, family_name, known_name, same_forward
from attn_diag.head.recipe_search import LEVEL, Match, SearchedHead, Trial, choose_rows
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.kernels.recipe import BACKWARD
from attn_diag.results.identification import BackwardMatch, HardwareMatch, Identification, Identifications, RankedRecipe
from attn_diag.results.wording import percent
from attn_diag.work import Progress, map_in_order, part_of, silent

# Rows that are compared: as many as have so many scores together, and at least so many.
_FINAL_SCORES, _FINAL_ROWS = 2**20, 128
_COARSE_ROWS = 64
# dQ needs whole heads; above so many scores it is not looked at.
_BACKWARD_SCORES = 2**22
# Up to so many scores, over all heads of a sequence, presets not told apart are run with the tensor core's sums.
_HARDWARE_SCORES = 2**20
# The number of recipes is known only as the search goes on; a usual one for the progress bar.
_USUAL_STEPS = 160


def identify(
    capture: Capture,
    observation: str | None = None,
    *,
    batch: int = 0,
    head: int | None = None,
    device: str = "auto",
    rows: int | None = None,
    progress: Progress | None = None,
) -> Identification:
    """Rank recipes and schedules by the fraction of O's elements of which they reproduce every bit.

    Args:
        capture: The capture.
        observation: Its name, not needed where there is one only.
        batch: Index of the batch item.
        head: The model's number of the head; None: the capture's first.
        device: auto, cpu or cuda.
        rows: So many query rows are compared at the end; None: as many as have 2^20 scores together, at least 128.
        progress: Called with (done, total) after each recipe; the total is an estimate until the end.

    Raises:
        InputError: The observation has no O, inputs are neither BF16 nor FP16, O has another dtype than q, or no row
            can be compared.
    """
    where = pick_device(device)
    name = _observation(capture, observation)
    batch, index = select_place(capture, batch, head)
    if rows is not None and rows < 1:
        raise InputError(f"rows must be at least 1, got {rows}")
    subject = search.read_subject(capture, name, batch, index, where)
    if subject is None:
        raise InputError(f"{capture.source}: {_why_not(capture, name)}")
    report = progress or silent
    steps = count(1)

    def step() -> None:
        done = next(steps)
        report(done, max(_USUAL_STEPS, done + 1))

    subject.step = step
    many = rows or max(_FINAL_ROWS, _FINAL_SCORES // capture.k_length)
    coarse, final = choose_rows(subject.inputs, subject.observed, min(_COARSE_ROWS, many), many)
    if not len(final):
        raise InputError(
            f"{capture.source}: no row of '{name}' can be compared: each has NaN or Inf or is fully masked"
        )
    trials, tried = search.search(subject, coarse, final)
    result = _Judgement(capture, name, batch, index, subject, trials, tried, where).result(len(final))
    done = next(steps) - 1
    report(done, done)
    return result


class _Judgement:
    """From ranked trials to words."""

    def __init__(
        self, capture: Capture, observation: str, batch: int, head: int, subject: SearchedHead, trials: list[Trial],
        tried: int, device: torch.device,
    ) -> None:  # fmt: skip
        self.capture, self.observation, self.batch, self.head = capture, observation, batch, head
        self.subject, self.trials, self.tried, self.device = subject, trials, tried, device
        self.elements = trials[0].match.equal.numel()
        self.threshold = search.threshold(subject.fmt, self.elements)
        # The best trial of every preset.
        self.named = {known_name(t.recipe, capture.head_dim): t.recipe for t in reversed(trials)}

    def result(self, rows: int) -> Identification:
        c, ranking = self.capture, self._ranking()
        best = ranking[0]
        as_good = [r for r in ranking if not r.told_apart and r.agreement >= self.threshold]
        names = list(dict.fromkeys(r.recipe for r in as_good if r.recipe is not None))
        names, backward, note = self._by_backward(names)
        names, hardware = self._by_hardware(names)
        runner_up = next((r for r in ranking if r.told_apart), None)
        outcome: Literal["identified", "ambiguous", "unnamed", "unknown"] = (
            "unknown" if not as_good else "unnamed" if not names else "identified" if len(names) == 1 else "ambiguous"
        )
        fitting = [t.out for t, r in zip(self.trials, ranking, strict=True) if r in as_good]
        contested = int(torch.stack([(out != fitting[0]) for out in fitting]).any(0).sum()) if fitting else 0
        return Identification(
            source=c.source,
            observation=self.observation,
            layer=c.metadata.layer,
            batch=self.batch,
            head=self.head + c.metadata.head_offset,
            shape={"B": c.batch, "Hq": c.q_heads, "Hk": c.kv_heads,
                   "Tq": c.q_length, "Tk": c.k_length, "D": c.head_dim},
            dtype=str(c.tensors["q"].dtype).removeprefix("torch."),
            backend=f"emulation on {backend_name(self.device)}",
            rows=rows,
            rows_all=c.q_length,
            elements=self.elements,
            contested=contested,
            tried=self.tried,
            threshold=self.threshold,
            level=LEVEL,
            outcome=outcome,
            recipes=tuple(names),
            verdict=self._verdict(outcome, names, as_good, best, contested, hardware),
            margin=None if runner_up is None else best.agreement - runner_up.agreement,
            margin_p_value=None if runner_up is None else runner_up.p_value,
            notes=self._notes(note),
            candidates=tuple(ranking),
            backward=backward,
            hardware=hardware,
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

    def _by_backward(self, names: list[str]) -> tuple[list[str], tuple[BackwardMatch, ...], str]:
        """The names whose backward agrees best with the captured dQ: presets with one forward may differ there."""
        c, fmt, d = self.capture, self.subject.fmt, self.capture.head_dim
        ways: dict[tuple[object, ...], list[Recipe]] = {}
        for name in names:
            for recipe in same_forward(name, fmt, d):
                made = replace(recipe, schedule=self.named[name].schedule)
                ways.setdefault(_backward_of(recipe), []).append(made)
        dq = c.read(c.key(self.observation, "dq"), self.batch, self.head)
        if len(ways) < 2:
            return names, (), ""
        if dq is None or dq.dtype != c.tensors["q"].dtype:
            return names, (), "dQ was not captured: presets that differ in the backward only go by the first's name"
        if c.q_length * c.k_length > _BACKWARD_SCORES:
            return names, (), "the head is too long to compare dQ: presets that differ there go by the first's name"
        observed = dq.to(self.device)
        good = ~self.subject.inputs.unusable & observed.isfinite().all(1)
        head = self.subject.inputs.head

        def match(recipes: list[Recipe]) -> Match:
            emulated = emulate_head(recipes[0], head, key_gradients=False).dq
            assert emulated is not None
            return Match((emulated == observed)[good])

        parallel = self.device.type == "cpu"
        matches = dict(zip(ways, map_in_order(match, list(ways.values()), parallel=parallel), strict=True))
        order = sorted(ways, key=lambda way: -matches[way].agreement)
        best = matches[order[0]]
        p_values = {way: best.compare(matches[way]).p_value for way in order}
        backward = tuple(
            BackwardMatch(
                " or ".join(dict.fromkeys(r.name for r in ways[way])),
                matches[way].agreement,
                None if way == order[0] else p_values[way],
                way != order[0] and p_values[way] <= LEVEL,
            )
            for way in order
        )
        kept = [way for way in order if way == order[0] or p_values[way] > LEVEL]
        left = [r.name for way in kept for r in ways[way]]
        # What fits through the forward alone keeps its name, where its backward is as good as any.
        chosen = [n for n in names if n in left] or list(dict.fromkeys(left))
        return chosen, backward, ""

    def _by_hardware(self, names: list[str]) -> tuple[list[str], tuple[HardwareMatch, ...]]:
        """The names that hold under the tensor core's own sums: its truncation is what moves the last few elements.

        Where some have every observed bit, they alone are left.
        """
        c = self.capture
        scores = c.q_length * c.k_length
        if len(names) < 2 or scores > _HARDWARE_SCORES:
            return names, ()
        heads = list(dict.fromkeys([self.head, *range(c.q_heads)]))[: max(1, _HARDWARE_SCORES // scores)]
        subjects = [search.read_subject(c, self.observation, self.batch, head, self.device) for head in heads]

        def match(name: str) -> HardwareMatch:
            exact, missed, elements = replace(self.named[name], accumulation="nvidia-tensor-core"), 0, 0
            for subject in subjects:
                assert subject is not None
                out = emulate_head(exact, replace(subject.inputs.head, do=None)).o
                good = ~subject.inputs.unusable & subject.observed.isfinite().all(1)
                missed += int((out != subject.observed)[good].sum())
                elements += int(good.sum()) * out.shape[1]
            return HardwareMatch(name, missed, elements)

        known = [name for name in names if name in self.named]
        parallel = self.device.type == "cpu"
        matches = sorted(map_in_order(match, known, parallel=parallel), key=lambda m: m.missed)
        complete = [m.recipe for m in matches if not m.missed]
        return (complete or names), tuple(matches)

    def _verdict(
        self, outcome: str, names: list[str], as_good: list[RankedRecipe], best: RankedRecipe, contested: int,
        hardware: tuple[HardwareMatch, ...],
    ) -> str:  # fmt: skip
        equal = percent(best.agreement, ".3f")
        looks = f"the roundings of {best.roundings}, {best.schedule}"
        if outcome == "unknown":
            return (
                f"Unknown: nothing tried has the observed bits in {percent(self.threshold, '.2f')} of O's elements. "
                f"Nearest, with {equal}: {looks}. A rounding site or an order of keys that is not modelled may be "
                "missing."
            )
        if outcome == "unnamed":
            return f"No published kernel that is known here, but its parts are: {looks} ({equal} of O's elements)."
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
            nearest = f"{names[0]} comes nearest with {equal} of O's elements"
            if hardware:
                nearest = f"{hardware[0].recipe} comes nearest (see the sums of a tensor core)"
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
        unnamed = f"; this input does not exclude {len(others)} schedules that no preset has" if others else ""
        return f"{names[0]} reproduces {equal} of O's elements bit for bit{unnamed}."

    def _notes(self, backward: str) -> tuple[str, ...]:
        notes = [backward] if backward else []
        if not self.subject.diagonal and self.capture.metadata.causal != "none":
            notes.append(
                "q_positions: the query blocks are not known, so that schedules with the diagonal first were not tried"
            )
        if self.trials[0].match.agreement < self.threshold:
            assumptions = check_assumptions(self.capture, [self.observation], self.device)
            if assumptions.ok is False:
                notes.append(assumptions.message)
        return tuple(notes)


def _backward_of(recipe: Recipe) -> tuple[object, ...]:
    again = recipe.scores if recipe.backward_scores == "as-forward" else "fp32"
    return again, *(getattr(recipe, site) for site in BACKWARD)


def _observation(capture: Capture, wanted: str | None) -> str:
    known = select_observations(capture, wanted)
    if not known:
        raise InputError(f"{capture.source}: no observation; it has none")
    if len(known) > 1:
        raise InputError(f"{capture.source}: name one of its observations: {', '.join(known)}")
    return known[0]


def _why_not(capture: Capture, observation: str) -> str:
    """Why an observation's bits cannot be compared."""
    dtype, key = capture.tensors["q"].dtype, capture.key(observation, "o")
    if key not in capture.tensors:
        return f"observation '{observation}' has no o: bits of O are what is compared, capture it too"
    if dtype not in search.FORMATS:
        named = str(dtype).removeprefix("torch.")
        return f"recipes are known for bfloat16 and float16 inputs, q is {named}: there is nothing to identify"
    got, expected = (str(t).removeprefix("torch.") for t in (capture.tensors[key].dtype, dtype))
    return f"{key} is {got} and q is {expected}: save O as the kernel returned it, in {expected}"


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
    chosen, skipped = list(captures), list(unreadable)
    jobs: list[tuple[Capture, str, int, int]] = []
    errors: list[InputError] = []
    for capture in chosen:
        try:
            jobs += _jobs(capture, selection or Selection())
        except InputError as error:
            errors.append(error)
    results: list[Identification] = []
    for number, (capture, observation, batch, head) in enumerate(jobs):
        part = part_of(progress, number, len(jobs))
        try:
            found = identify(capture, observation, batch=batch, head=head, device=device, rows=rows, progress=part)
            results.append(found)
        except InputError as error:
            errors.append(error)
    if errors and (skip is None or not results):
        raise errors[0]
    for problem in errors:
        if skip is not None:
            skip(problem)
        skipped.append(str(problem))
    return Identifications(tuple(results), tuple(skipped))


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
