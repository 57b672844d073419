"""One capture on its way through: check, measure head by head, pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch

from attn_diag.analyses.inspection.by_rank import judge_ranks
from attn_diag.analyses.inspection.groups import (
    GroupMeasurement,
    HeadGroup,
    captured_backend,
    dq_error,
    read_together,
    takes_one_core,
    together,
)
from attn_diag.analyses.inspection.joint import measured
from attn_diag.analyses.inspection.pooled_errors import PooledErrors, Tested, tests
from attn_diag.analyses.inspection.pooling import Entry, dw_q_of, pool, unclustered
from attn_diag.analyses.inspection.unnamed_kernels import UnnamedKernels
from attn_diag.analyses.patterns.of_capture import CapturePatterns
from attn_diag.analyses.patterns.of_groups import with_others_faults
from attn_diag.analyses.patterns.of_nan import with_finite_rows
from attn_diag.analyses.patterns.of_scales import with_proven_scale, with_scales
from attn_diag.analyses.verdicts import judged
from attn_diag.analyses.verdicts import quality as judging
from attn_diag.analyses.verdicts.dmask import judge_sums
from attn_diag.captures.absorbed import WithoutAbsorbedRows
from attn_diag.captures.capture import Capture
from attn_diag.captures.selection import Selection, select_heads, select_observations
from attn_diag.captures.sources import KEYED
from attn_diag.head.baseline import Engine, Recognised, engine_backend, run_recipe, select_recipes
from attn_diag.head.certification import Certify
from attn_diag.head.counterfactual import covers
from attn_diag.head.declared import declared_recipe, is_undeclared, undeclared_words
from attn_diag.head.figure_sums import head_figures
from attn_diag.head.gradient_sums import GradientSums
from attn_diag.head.kept_truths import KeptTruths
from attn_diag.head.key_gradients import KeyGradient, KeyHead, KeyTerms
from attn_diag.head.measurement import HeadMeasurement
from attn_diag.head.open import OpenCapture
from attn_diag.head.read import HeadInputs, HeadTensors, NonFiniteCensus, inputs_of, outputs_of, read_key_outputs
from attn_diag.head.recipe_changes import coarse_words
from attn_diag.head.shared import SharedRows, shared_rows
from attn_diag.head.shown_ways import ShownWays
from attn_diag.head.streaming import ObservedHead, StreamedHead
from attn_diag.kernels import Recipe, emulate_head
from attn_diag.reference import HeadReference, format_of
from attn_diag.results.diagnosis import (
    Assumptions,
    CaptureDiagnosis,
    HeadDiagnosis,
    KvBias,
    KvHeadDiagnosis,
    NonFinite,
    ObservationDiagnosis,
    Propagation,
)
from attn_diag.results.quality import QuantityVerdict
from attn_diag.statistics.means import SignedErrors
from attn_diag.work import map_in_order


@dataclass(frozen=True)
class Runs:
    """Recipes to run, by which engine, and the recipes that captured observations are known to have."""

    recipes: tuple[str | Recipe, ...]
    engine: Engine
    made_by: dict[str, Recipe]


class CaptureJob:
    """One capture on its way through; once ``release``d it keeps what was found, and ``truths``, and little else."""

    def __init__(
        self,
        capture: Capture,
        selection: Selection,
        runs: Runs,
        device: torch.device,
        level: float,
        certify: Certify | None = None,
        keep: int = 0,
    ) -> None:
        """``keep``: so many bytes of truths are kept for whoever takes heads apart afterwards."""
        found = WithoutAbsorbedRows.of(capture)
        self.capture = capture = found.capture
        self.unknown, self.device, self.level, self.certify = found.unknown, device, level, certify
        if certify is not None:
            certify.require_rows(capture.source, capture.q_length)
        self.engine, self.captured = runs.engine, select_observations(capture, selection.observation)
        self.recipes = select_recipes(capture, runs.recipes, runs.engine, needed=not self.captured)
        self.heads, self.batches = select_heads(capture, selection)
        self.absorbed = found.items_by_output(self.batches)
        self.declared = declared_recipe(capture)
        tensors = read_together(capture, device, self.batches, self.heads, self.captured)
        self.opened = OpenCapture(capture, device, self.batches, self.heads, tensors)
        self.truths = KeptTruths(keep)
        self.group, self.census = capture.q_heads // capture.kv_heads, NonFiniteCensus()
        self.measured: dict[str, dict[int, list[HeadMeasurement]]] = {}
        # observation -> key head -> "dk" or "dv" -> one item a sequence, and keys with NaN or Inf
        self.key_sums: dict[str, dict[int, dict[str, list[KeyGradient]]]] = {}
        self.broken_keys: dict[str, dict[int, Counter[str]]] = {}
        self.entries, self.by_key_head = dict[str, list[Entry]](), dict[str, tuple[KvHeadDiagnosis, ...]]()
        self.shared, self.notes = dict[int, dict[int, SharedRows]](), list[str]()  # head -> sequence
        self.recognised = {name: Recognised(recipe, None, recipe.name) for name, recipe in runs.made_by.items()}
        self.patterns, self.unnamed = self._asked()
        self.assumptions: Assumptions
        self.ahead: list[GroupMeasurement] | None = None
        """Its groups, where they were measured together with those of other captures."""
        self.tested: dict[str, list[Tested]] = {}
        """The tests of its ``errors``, where they were made together with those of other captures."""
        self.first, self.shown, self._begun = (self.batches[0], self.heads[0]), ShownWays(), False

    @property
    def head_count(self) -> int:
        """How many heads it goes through, sequence by sequence."""
        return len(self.heads) * len(self.batches)

    @property
    def takes_one_core(self) -> bool:
        """Whether it is to leave other cores to others: Triton's interpreter runs one kernel at a time."""
        return self.device.type == "cpu" and takes_one_core(self.capture) and self.engine == "emulation"

    def begin(self) -> None:
        """Check the capture, and find its recipes; once."""
        if self._begun:
            return
        self.assumptions = self.opened.assumptions(self.captured)
        if (projection := self.opened.projection) is not None and projection.note is not None:
            self.notes.append(projection.note)
        for name in [n for n in self.captured if n not in self.recognised]:
            found = self.opened.recognise(name, *self.first)
            if found is not None and (self.assumptions.ok or is_undeclared(self.capture, found)):
                self.recognised[name] = found
        if len(self.batches) > 1:
            self.shared = {head: shared_rows(self.capture, self.batches, head) for head in self.heads}
        self._begun = True

    def groups(self) -> list[HeadGroup]:
        """What is measured together: dK and dV of a key head need all the query heads that share it."""
        by_kv: dict[int, list[int]] = {}
        for head in self.heads:
            by_kv.setdefault(head // self.group, []).append(head)
        return [HeadGroup(kv, batch, heads) for kv, heads in by_kv.items() for batch in self.batches]

    def run(self) -> Iterable[int]:
        """Do the work; yields the number of heads done since the last time."""
        yield from self.measure()
        self.pool()

    def measure(self) -> Iterable[int]:
        """The first part of it."""
        self.begin()
        sets = together(self.groups(), self.capture, self.device)
        found = map_in_order(lambda groups: measured([(self, groups)])[0], sets, parallel=self.takes_one_core)
        for result in chain.from_iterable(found) if self.ahead is None else self.ahead:
            self.census.merge(result.census)
            for name, parts in result.parts.items():
                for part in parts:
                    self.measured.setdefault(name, {}).setdefault(part.head, []).append(part)
            for name, sums in result.key_sums.items():
                of_head = self.key_sums.setdefault(name, {}).setdefault(result.group.kv_head, {})
                for output, gradient in sums.items():
                    of_head.setdefault(output, []).append(gradient)
            for name, counts in result.broken_keys.items():
                self.broken_keys.setdefault(name, {}).setdefault(result.group.kv_head, Counter()).update(counts)
            yield len(result.group.heads)

    def errors(self) -> dict[str, list[PooledErrors]]:
        """What is tested of each head and, of several, of all of them, by observation."""
        found = {}
        for name, by_head in self.measured.items():
            # The pooled entry of a single head repeats it, see ``result``.
            every = [[part for parts in by_head.values() for part in parts]] if len(by_head) > 1 else []
            shape = len(self.batches), self.capture.k_length
            found[name] = [PooledErrors.of(parts, *shape) for parts in (*by_head.values(), *every)]
        return found

    def pool(self) -> None:
        """The rest: entries of what was measured."""
        tested = self.tested or {name: tests(several, self.level) for name, several in self.errors().items()}
        for name, by_head in self.measured.items():
            self.entries[name] = self._pool(name, by_head, tested[name])
            self.by_key_head[name] = tuple(self._kv_heads(name))

    def release(self) -> None:
        """Forget what the entries were made from: about a hundred times as much as they are, with long sequences."""
        self.measured, self.key_sums, self.broken_keys, self.shared, self.tested, self.ahead = {}, {}, {}, {}, {}, None
        self.opened = replace(self.opened, tensors=None)  # what it knows of the recipes stays
        self.patterns, self.unnamed = self._asked()

    def _asked(self) -> tuple[CapturePatterns, UnnamedKernels]:
        return CapturePatterns(self.capture, self.device, self.recognised), UnnamedKernels(self.opened)

    def tested_entries(self) -> Iterable[Entry]:
        """Entries whose tests count: none where the assumptions fail; the pooled one only beside several heads."""
        if self.assumptions.refused:
            return
        for entries in self.entries.values():
            yield from entries[:-1] if len(entries) == 2 else entries

    def result(self, judged: dict[int, HeadDiagnosis]) -> CaptureDiagnosis:
        """What was found; ``judged`` holds the entries with their verdicts, by identity."""
        c = self.capture
        observations = []
        for name, entries in self.entries.items():
            heads = [judged.get(id(e), e.diagnosis) for e in entries]
            if len(heads) == 2:  # one head and its pooled twin
                heads[1] = replace(heads[0], head=None, figures=None)
            recipe, found = self.recipes.get(name), self.recognised.get(name)
            observations.append(
                ObservationDiagnosis(
                    name=name,
                    recipe=recipe.name if recipe else found.words if found else None,
                    agreement=found.agreement if found else None,
                    backend=engine_backend(self.engine, self.device) if recipe else captured_backend(c),
                    emulated=recipe is not None and self.engine == "emulation",
                    outputs=c.observations.get(name, ()),
                    heads=tuple(heads),
                    kv_heads=self.by_key_head[name],
                    coarse=coarse_words(self._recipe(name)),
                )
            )
        nonfinite = tuple(NonFinite(name, *found) for name, found in self.census.totals().items())
        return CaptureDiagnosis(c.source, c.in_text(), c.sizes(), self.assumptions, nonfinite, tuple(observations))

    def open_head(self, result: GroupMeasurement, head: int, tensors: HeadTensors) -> StreamedHead:
        """One query head, to be streamed and measured; its tensors are read with those of other heads."""
        batch, whole = result.group.batch, len(result.group.heads) == self.group
        inputs = inputs_of(tensors, batch, head, result.census)
        observed = self._observed(inputs, tensors, batch, head, result.census, want_keys=whole)
        projection = None if (found := self.opened.projection) is None else found.head(batch, head)
        return StreamedHead(inputs, observed, projection, partial(self.shown.of, first=(batch, head) == self.first))

    def complete(
        self, result: GroupMeasurement, measured: Iterator[tuple[StreamedHead, list[HeadMeasurement]]]
    ) -> dict[str, KeyHead]:
        """Take the heads of a group, as they come; returns by observation what its key head's gradients are made of."""
        group, collected = result.group, dict[str, list[tuple[HeadReference, KeyTerms]]]()
        usable = len(group.heads) == self.group
        for head, (passed, parts) in zip(group.heads, measured, strict=False):
            self.truths.offer((group.batch, head), passed.truth, max(map(dq_error, parts)))
            usable &= passed.inputs.sound or not bool(passed.inputs.unusable.any())
            for seen, part in zip(passed.observed, parts, strict=True):
                if part.keys is not None:
                    collected.setdefault(seen.name, []).append((passed.truth.reference, part.keys))
                part.keys = None
                result.parts.setdefault(seen.name, []).append(part)
        found = {}
        for name, pairs in collected.items() if usable else ():
            where = self.capture, name, group.batch, group.kv_head, self.device
            observed, formats, result.broken_keys[name] = read_key_outputs(*where, result.census)
            observed = {n: t for n, t in observed.items() if n not in self.unknown.get(group.batch, ())}
            found[name] = KeyHead(group.batch, observed, formats, [r for r, _ in pairs], [t for _, t in pairs])
        return found

    def _observed(
        self, inputs: HeadInputs, tensors: HeadTensors, batch: int, head: int, census: NonFiniteCensus,
        *, want_keys: bool,
    ) -> list[ObservedHead]:  # fmt: skip
        seen = [self._observation(name, tensors, batch, head, census, want_keys=want_keys) for name in self.captured]
        for observed in seen:
            if self._assumes_lse(observed.name):
                assert observed.recipe is not None
                # Coarse scores move L by far more than fp32 arithmetic does; the recipe tells by how much.
                observed.assumed_lse = emulate_head(observed.recipe, replace(inputs.head, do=None)).lse.double()
        for name, recipe in self.recipes.items():
            result = run_recipe(self.engine, recipe, inputs.head)
            made = {n: t for n in ("o", "lse", "delta", "dq") if (t := getattr(result, n)) is not None}
            formats = {n: format_of(t.dtype) for n, t in made.items()}
            seen.append(ObservedHead(name, {n: t.double() for n, t in made.items()}, formats, recipe))
        return seen

    def _observation(
        self, name: str, tensors: HeadTensors, batch: int, head: int, census: NonFiniteCensus, *, want_keys: bool
    ) -> ObservedHead:
        outputs, formats, finite = outputs_of(tensors, name, batch, head, census)
        keyed = want_keys and any(output in KEYED for output in self.capture.observations[name])
        return ObservedHead(name, outputs, formats, self._recipe(name), keyed, declared=self.declared, finite=finite)

    def _recipe(self, name: str) -> Recipe | None:
        """What an observation is known to be made by."""
        return self.recipes.get(name) or (self.recognised[name].recipe if name in self.recognised else None)

    def _pool(self, name: str, measured: dict[int, list[HeadMeasurement]], tested: Sequence[Tested]) -> list[Entry]:
        c, sequences = self.capture, len(self.batches)
        dw_q = {head: dw_q_of(parts) for head, parts in measured.items()}
        quantities = {head: self._quantities(name, head, parts) for head, parts in measured.items()}
        quantities, idle = judged.of_heads(with_others_faults(quantities, self.group, c.metadata.head_offset), measured)
        missing = judged.not_judged(
            {q.quantity for found in quantities.values() for q in found if q.answer != "stated"},
            captured=c.observations.get(name, ()),
            with_do="do" in c.tensors,
            idle=idle,
            covered=self.declared is not None or covers(format_of(c.tensors["q"].dtype)),
            of_a_rank="own_dk" in c.tensors,
            absorbed=self.absorbed,
        )
        sinks = {head: [p.sink for p in parts] for head, parts in measured.items()}
        missing += judge_sums(c, name, sinks, self.batches, self.device, quantities)
        entries = [
            pool(
                *of_head,
                layer=c.metadata.layer,
                head=head + c.metadata.head_offset,
                dw_q=None if (found := dw_q[head]) is None else found.sums,
                extra=self._extra(name, [head] if self.group == 1 else []),
                figures=head_figures(
                    [p.figures for p in parts],
                    [p.batch for p in parts],
                    [p.rows for p in parts],
                    None if found is None else found.by_feature,
                ),
                sequences=sequences,
                quantities=quantities[head],
                missing=missing,
            )
            for (head, parts), of_head in zip(measured.items(), tested, strict=False)
        ]
        known = [found.sums for found in dw_q.values() if found is not None]
        entries += [replace(entries[0])] if len(measured) == 1 else [
            pool(
                *tested[-1],
                layer=c.metadata.layer,
                head=None,
                dw_q=GradientSums.pool(known) if len(known) == len(measured) else None,
                extra=self._extra(name, sorted({head // self.group for head in measured})),
                sequences=sequences,
                quantities=judging.worst_of_all(quantities.values()),
                missing=missing,
            )
        ]  # fmt: skip
        for entry in entries:
            entry.remarks += undeclared_words(c, self.recognised.get(name))
        return entries

    def _quantities(self, name: str, head: int, parts: list[HeadMeasurement]) -> list[QuantityVerdict]:
        """Each captured quantity of a query head, dK and dV of its key head among them, judged."""
        kv, gradients, found = head // self.group, self.key_sums.get(name, {}), list[QuantityVerdict]()
        asked, own = name in self.capture.observations and not self.assumptions.refused, self.recognised.get(name)
        coarse = self.unnamed.coarse(name, parts, own, self.patterns) if asked else coarse_words(self._recipe(name))
        explain = partial(self.patterns.explain, name, head) if asked else None
        for quantity in judging.CAPTURED:
            if quantity in KEYED:
                known = [(f.batch, f.sample) for f in gradients.get(kv, {}).get(quantity, []) if f.sample is not None]
                broken = self.broken_keys.get(name, {}).get(kv, Counter())[quantity]
            else:
                known = [(p.batch, p.quality[quantity]) for p in parts if quantity in p.quality]
                broken = sum(p.broken_outputs.get(quantity, 0) for p in parts)
            effects = [p.effects[quantity] for p in parts if quantity in p.effects]
            if effects or (broken and quantity in ("lse", "delta")):
                verdict = judging.judge_effect(quantity, effects, broken)
                batches = [p.batch for p in parts if quantity in p.effects]
                found.append(with_scales(verdict if explain is None else explain(verdict, effects, batches), parts))
            elif known or broken:  # a sequence without usable rows, or keys, has none
                batches, samples = [b for b, _ in known], self.unnamed.known(name, head, quantity, known, coarse, parts)
                lengths = [self.capture.lengths(batch)[0] for batch in batches]
                summed = self.group * max(lengths, default=1) if quantity in KEYED else 1
                verdict = judging.judge_quantity(quantity, samples, batches, broken, summed=summed)
                verdict = judge_ranks(verdict, samples, batches, self.capture.metadata, summed)
                verdict = verdict if explain is None else explain(verdict, samples, batches)
                counts = [p.without_keys.get(quantity, (0, 0)) for p in parts]
                found.append(judging.with_empty_rows(verdict, counts, self.absorbed.get(quantity, ())))
        return with_proven_scale(with_finite_rows(found, parts) if asked else found)

    def _extra(self, name: str, kv_heads: list[int]) -> Propagation:
        """dK and dV over some key heads, and the notes."""
        found = {
            output: [f.sums for kv in kv_heads for f in self.key_sums.get(name, {}).get(kv, {}).get(output, [])]
            for output in ("dk", "dv")
        }
        results = {output: GradientSums.pool(sums).result() for output, sums in found.items() if sums}
        notes = self.notes
        if self._assumes_lse(name):
            notes = [*notes, f"LSE was not captured: that of recipe {self.recognised[name].recipe.name} is used"]
        return Propagation(**results, notes=tuple(notes))

    def _assumes_lse(self, name: str) -> bool:
        """Whether an uncaptured LSE is known, from the recipe, to be off: coarse scores in the forward only."""
        if (found := self.recognised.get(name)) is None or "lse" in self.capture.observations[name]:
            return False
        return found.recipe.scores != "fp32" and found.recipe.backward_scores == "fp32"

    def _kv_heads(self, name: str) -> Iterator[KvHeadDiagnosis]:
        by_head = sorted(self.key_sums.get(name, {}).items())
        every = [(kv_head, {o: found for o, found in sums.items() if o != "dkv"}) for kv_head, sums in by_head]
        errors = [SignedErrors.join([g.errors for g in found]) for _, sums in every for found in sums.values()]
        biases, offset = iter(unclustered(errors)), self.capture.metadata.head_offset
        for kv_head, sums in every:
            query_heads = tuple(offset + kv_head * self.group + i for i in range(self.group))
            bias = KvBias(**{output: next(biases) for output in sums})
            yield KvHeadDiagnosis(kv_head + offset // self.group, query_heads, bias, self._extra(name, [kv_head]))
