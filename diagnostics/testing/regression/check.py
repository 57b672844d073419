"""``attn_diag.check``: a kernel on a suite of inputs, against a baseline or against published recipes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from attn_diag.captures.capture import Capture
from attn_diag.errors import InputError
from attn_diag.head.baseline import DEFAULT_RECIPE
from attn_diag.head.declared import require_declarable
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.kernels import PRESETS, Recipe, preset
from attn_diag.results.baseline import BaselineCase, BaselineEntry, BaselineSize
from attn_diag.results.check import ARRANGED, BROKEN, GRADIENTS, CheckedCase, CheckReport, Failure, Kind
from attn_diag.statistics.means import MIN_SEQUENCES, require_level
from attn_diag.testing import suspects
from attn_diag.testing.case_inputs import CaseInputs, fingerprint
from attn_diag.testing.next_command import USUAL_SHAPE, Again
from attn_diag.testing.other_function import OtherFunction, as_counted, fit_of, nearly, origin_words
from attn_diag.testing.probing.search import row_factor
from attn_diag.testing.regression import cases as suite
from attn_diag.testing.regression import closer, judge
from attn_diag.testing.regression.arranged import Arranging
from attn_diag.testing.regression.baseline import (
    device_words,
    opened,
    require_consistent,
    store,
    versions,
    which_words,
)
from attn_diag.testing.regression.documented import words_of
from attn_diag.testing.regression.figures import Measured, measure_case
from attn_diag.testing.stated import PerHead, Stated
from attn_diag.testing.target import DTYPES, Attention, MisfitError, Target, emulate
from attn_diag.work import Progress

# So many failing cases are searched for what changed; the others are only asked about what was found there.
_SEARCHED = 2
# The case whose O tells a scale that is nearly right.
_ORDINARY = "normal"


@dataclass
class _Ran:
    """A case with what came back: from the kernel (None: nothing that could be judged) and from the yardstick."""

    inputs: CaseInputs
    outputs: dict[str, Tensor] | None
    case: CheckedCase
    measured: Measured | None
    failures: list[Failure]
    other: bool = False
    """It is of another function than was asked for."""


def check(
    target: Attention | str | Recipe | Capture | Sequence[Capture],
    *,
    baseline: Path | str | None = None,
    save: bool = False,
    update: bool = False,
    cases: Iterable[str] | None = None,
    captures: Sequence[Capture] = (),
    observation: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    causal: bool | str = "none",
    window: Sequence[int] | None = None,
    softcap: float | None = None,
    alibi_slopes: PerHead = None,
    sinks: PerHead = None,
    head_dim: int = 64,
    length: int = suite.LENGTH,
    scale: float | None = None,
    backward: bool | None = None,
    level: float = 0.01,
    exact: bool = False,
    seed: int = 0,
    device: str = "auto",
    declared: str | None = None,
    folder: Path | str | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """Run a kernel on a suite of inputs and say whether its errors are biased, too large, or no longer the baseline's.

        assert attn_diag.check(my_attention, baseline="attention.json", causal=True).passed

    The statistics are described in ``attn_diag.testing.regression``. The suite has one head and Tq = Tk: GQA, several
    heads and Tq other than Tk are checked through ``captures``.

    Args:
        target: fn(q, k, v) -> o, or (o, lse, …), with q, k, v [B, H, T, D] in ``dtype``, differentiable where its
            gradients are to be checked, and given a dropout mask and sinks where it has parameters for them
            (``testing.user_function``); "sdpa", "sdpa:flash" (efficient, cudnn, math); "MODULE:FUNCTION"; a recipe or
            its name, which is emulated; or captures, whose stored observation is judged and nothing is run.
        baseline: The file to compare with: a mean that moved (at ``level``, Holm over the whole run), an error that
            grew, and, with ``exact`` (or where the entry was saved so), other bits. Without it errors are held to those
            of a published recipe on the same inputs.
        save: Add this kernel's entry to the baseline, and compare with none.
        update: Replace it, and compare with none.
        cases: Only these of the suite; None: all ("dropout" and "sink-logits" of functions with a parameter
            ``dropout_mask`` or ``sinks`` alone), and of a declared kernel five of them.
        captures: Inputs of these as well.
        observation: Which stored observation is judged, where ``target`` is captures.
        dtype: torch.bfloat16 or torch.float16.
        causal: What fn masks: "none" or False; "top-left" or True; "bottom-right".
        window: (left, right): of row t it sees the keys t - left to t + right alone; -1: all on that side.
        softcap: c, where its scores are c tanh(alpha q.k / c).
        alibi_slopes: Of ALiBi, one a head: -slope |t - j| is added to the scores; the suite has as many heads.
        sinks: The logits of attention sinks (gpt-oss), likewise: fn's own, or those of its parameter ``sinks``.
        head_dim: D of the suite's inputs.
        length: T of the suite's inputs, for a kernel that takes some lengths alone; the real head has 192 rows, and is
            left out of longer ones.
        scale: What fn multiplies scores by; by default 1/sqrt(head_dim).
        backward: None checks gradients where autograd gives them, True demands them, False leaves them out.
        level: Chance of a false alarm of bias in a run.
        exact: Other bits than the baseline's fail.
        seed: Of the inputs.
        device: auto, cpu or cuda.
        declared: The recipe below 16 bits ("fa3-fp8", "sage2", …) that the kernel is meant to be, to whose errors
            its own are held; None: what captures say.
        folder: Where cases that fail go, each a capture for ``attn_diag.inspect`` or ``attribute``; None: nowhere.
        name: What reports and the baseline call the kernel.
        progress: Called with (done, total) after every case.

    Raises:
        InputError: Something cannot be run or compared at all, or there is no such recipe to declare. What the kernel
            does wrong is a failure in the report.
    """
    require_level(level)
    require_declarable(declared)
    require_consistent(baseline, dtype, head_dim, save=save, update=update, exact=exact)
    stated = Stated.of(causal, scale, head_dim, window, softcap, alibi_slopes, sinks)
    asked = suite.Asked(dtype, stated, head_dim, seed, length)
    where, path = pick_device(device), None if baseline is None else Path(baseline)
    stored, arranging = suite.captures_of(target), None
    if stored is not None:
        if cases is not None or captures:
            raise InputError("stored observations are judged as they are: cases and captures need a kernel to run")
        subject = suite.stored(stored, name, observation)
        declared = declared or suite.declared_by(stored)
    else:
        if observation is not None:
            raise InputError("observation is for captures whose stored outputs are judged; a kernel is run instead")
        kernel = Target.of(target, name, dtype=dtype, head_dim=head_dim, device=where)  # type: ignore[arg-type]
        names = suite.choose(cases, kernel, declared, length, stated, dtype)
        subject = suite.run_by(kernel, asked, names, suite.of_captures(captures), backward)
        if ARRANGED in names:
            arranging = Arranging(target, subject.source, asked, backward, where)  # type: ignore[arg-type]
    if (save or update) and not subject.inputs:
        raise InputError("a baseline holds numbers of cases: name at least one besides arrangements")
    if declared is not None:
        subject = replace(subject, key=f"{subject.key}, declared {declared}")
    key, entry = opened(path, subject.key, where, save=save, update=update)
    run = _Check(
        subject, asked, where, level, exact or (entry is not None and entry.exact), path, key, entry, arranging,
        save="update" if update else "save" if save else None, declared=declared,
        folder=None if folder is None else Path(folder),
    )  # fmt: skip
    return run.run(progress)


@dataclass
class _Check:
    """One run: cases, judgement, culprits, and the file."""

    subject: suite.Judged
    asked: suite.Asked
    where: torch.device
    level: float
    exact: bool
    path: Path | None
    key: str
    entry: BaselineEntry | None
    arranging: Arranging | None
    save: Literal["save", "update"] | None
    declared: str | None = None
    folder: Path | None = None
    notes: list[str] = field(default_factory=list)

    def run(self, progress: Progress | None) -> CheckReport:
        """Everything, and the report."""
        if self.path is not None and self.save is None:
            self.notes += which_words(self.path, self.subject.key, self.key, self.entry)
        ran: list[_Ran] = []
        count = len(self.subject.inputs) + (self.arranging is not None)
        for number, inputs in enumerate(self.subject.inputs):
            ran += self._runs(inputs)
            if progress is not None:
                progress(number + 1, count)
            if not number and all(r.other for r in ran) and not self.subject.stored:
                if count > 1:
                    self.notes.append(f"of another function nothing more is asked: {count - 1} cases were not run")
                break
        adjusted, tests = judge.adjusted([r.case for r in ran])
        for r, case in zip(ran, adjusted, strict=True):
            r.case = case
            r.failures += judge.failures_of(case, self.level)
        self._name_culprits(ran)
        self.notes += words_of([r.case for r in ran])
        self.notes += [] if self.subject.stored else origin_words([r.inputs for r in ran])
        failures = [f for r in ran for f in r.failures]
        arranged = None
        if self.arranging is not None and not any(r.other for r in ran):
            ordinary = [q for r in ran if r.inputs.name == _ORDINARY for q in r.case.quantities]
            arranged = self.arranging.run({q.quantity: q.factor for q in ordinary})
        if arranged is not None:
            failures, self.notes = [*failures, *arranged.failures], [*self.notes, *arranged.notes]
            if progress is not None:
                progress(count, count)
        failures, saved = (failures, None) if self.save is None else self._store(ran, failures)
        return CheckReport(
            tool=describe_tool(self.where),
            source=self.subject.source,
            backend=self.subject.backend,
            key=self.key,
            level=self.level,
            seed=self.asked.seed,
            exact=self.exact,
            baseline=None if self.path is None else str(self.path),
            baseline_key=None if self.entry is None else self.entry.key,
            cases=(*(r.case for r in ran), *([] if arranged is None else [arranged.case])),
            arrangements=() if arranged is None else arranged.paths,
            failures=tuple(failures),
            notes=tuple(dict.fromkeys(self.notes)),
            tests=tests,
            saved=saved,
            declared=self.declared,
        )

    def _runs(self, inputs: CaseInputs) -> list[_Ran]:
        """What the kernel made of a case; where a second run returned other bits, of that as well."""
        started = time.perf_counter()
        dtype = str(inputs.q.dtype).removeprefix("torch.")
        case = CheckedCase(inputs.name, tuple(inputs.q.shape), dtype, inputs_fingerprint=inputs.fingerprint)
        try:
            runs, deterministic, notes = self.subject.outputs(inputs)
        except MisfitError as error:
            self.notes += closer.other_inputs(error, inputs, self.asked.stated)
            return [_misfit(inputs, case, str(error))]
        self.notes += notes
        case = replace(case, deterministic=deterministic)
        found = []
        for name, outputs in zip((case.name, case.name + suite.SECOND), runs, strict=False):
            counted = inputs if self.subject.stored else as_counted(inputs, outputs, self.where)
            found.append(self._one(counted, replace(case, name=name), outputs, started))
            started = time.perf_counter()
        return found

    def _one(self, inputs: CaseInputs, case: CheckedCase, outputs: dict[str, Tensor], started: float) -> _Ran:
        if (broken := suite.nonfinite(outputs)) is not None:
            return _misfit(inputs, case, broken[1], "nonfinite", broken[0])
        recipe = preset(self.declared or DEFAULT_RECIPE, DTYPES[inputs.q.dtype], inputs.q.shape[3])
        gradients = any(n in outputs for n in ("dq", "dk", "dv"))
        yardstick = emulate(recipe, inputs, self.where, with_gradients=gradients)
        measured = measure_case(inputs, outputs, yardstick, recipe, self.where.type)
        bits = fingerprint(outputs)
        case = replace(case, outputs=tuple(outputs), fingerprint=bits)
        if (other := self._other_function(inputs, outputs["o"], measured)) is not None:
            file = None if other.known else self._saved(inputs.name, inputs, outputs)
            following = closer.of_other(other, inputs, self._asked_again(), self.declared, file, self.subject.stored)
            failure = Failure("fit", case.name, "o", other.sentence(inputs), f"it {other.words}", following)
            return _Ran(inputs, None, case, None, [failure], other=True)
        if measured.misfit is not None:
            return _misfit(inputs, case, measured.misfit)
        case = replace(case, worst=measured.worst, quantities=measured.quantities, documented=measured.documented)
        known = None if self.entry is None else self.entry.cases.get(inputs.name)
        if self.entry is not None and known is None:
            self.notes.append(f"the baseline has no case {inputs.name}: it is held to a published recipe's errors")
        if not measured.biases and inputs.name != suite.REAL_HEAD:
            self.notes.append(
                f"{inputs.name}: bias is not tested with fewer than {MIN_SEQUENCES} sequences; "
                "attn-diag inspect --fail-on biased does"
            )
        same_key = self.entry is not None and self.entry.key == self.key
        case, failures, notes = judge.compared(case, known, bits, exact=self.exact, same_key=same_key)
        self.notes += notes
        same_inputs = known is not None and case.inputs_fingerprint == known.inputs_fingerprint
        biases = judge.biases_of(measured, inputs.q.shape[2], known, same_key=same_key, same_inputs=same_inputs)
        if known is not None and same_inputs and bits == known.fingerprint:
            biases = {n: replace(b, p_value=None) for n, b in biases.items()}
        sizes = judge.sizes_of(measured, known, same_inputs=same_inputs)
        case = replace(case, biases=biases, sizes=sizes, seconds=time.perf_counter() - started)
        return _Ran(inputs, outputs, case, measured, failures)

    def _other_function(self, inputs: CaseInputs, o: Tensor, measured: Measured) -> OtherFunction | None:
        """What the kernel computes where it is not what was asked for, as a whole or nearly."""
        kernel = self.subject.kernel
        if measured.misfit is not None:
            return fit_of(inputs, o, kernel, self.where)[1]
        # What a scale that is nearly right makes of a declared kernel, its verdict says.
        of_o = None if self.declared else next((v for v in measured.quantities if v.quantity == "o"), None)
        return nearly(inputs, o, of_o, kernel, self.where, limits=inputs.name == _ORDINARY)

    def _saved(self, name: str, inputs: CaseInputs, outputs: dict[str, Tensor] | None) -> Path | None:
        """The capture of a failing case, where a folder for them was given."""
        if self.folder is None or outputs is None or self.subject.stored:
            return None
        return closer.save_case(self.folder, name, inputs, outputs, self.subject.source, self.declared)

    def _asked_again(self) -> Again:
        asked, source = self.asked, self.subject.source
        named = source in PRESETS or source.partition(":")[0] == "sdpa" or ":" in source
        length = None if asked.length == suite.LENGTH else asked.length
        shape = (*USUAL_SHAPE[:2], length or USUAL_SHAPE[2], asked.head_dim)
        target = source if named else None
        return Again(target, DTYPES[asked.dtype], asked.stated, shape, check_length=length)

    def _name_culprits(self, ran: list[_Ran]) -> None:
        """Fill in ``suspect`` and ``look_closer``."""
        known: str | None = None
        searched = 0
        for r in ran:
            if not r.failures or r.other:
                continue
            found: dict[str, tuple[str, str]] = {}
            if r.outputs is not None and self.declared is None and (searched < _SEARCHED or known is not None):
                searched += 1
                found = self._suspects(r, known)
                known = next((name for name, _ in found.values()), known)
            file = self._saved(r.case.name, r.inputs, r.outputs)
            r.failures = [
                replace(f, suspect=found.get(f.quantity, ("", None))[1], look_closer=self._look_closer(r, f, file))
                for f in r.failures
            ]

    def _suspects(self, r: _Ran, only: str | None) -> dict[str, tuple[str, str]]:
        assert r.outputs is not None
        entry, head_dim, dtype = self.entry, r.inputs.q.shape[3], r.inputs.q.dtype
        known = None
        if entry is not None and entry.recipe is not None:
            known = suspects.by_name(entry.recipe, dtype, head_dim)
        unchanged = suspects.published(dtype, head_dim) if known is None else [known]
        expected = None if known is None or entry is None else entry.agreement
        failed = {f.quantity for f in r.failures if f.kind not in ("fit", "determinism")}
        found = suspects.suspects(r.inputs, r.outputs, failed, unchanged, expected, self.where, only)
        if known is None:  # what makes no kernel worse is news beside a baseline, and else no cause
            found = {n: f for n, f in found.items() if not suspects.sound(f[0], r.inputs.k.shape[2])}
        # A wrong sink, and dropout before the row sum, give every row a factor of its own too.
        alone = r.inputs.sinks is None and r.inputs.dropout_mask is None
        unnamed = alone and only is None and "o" in failed and "o" not in found
        if unnamed and (factor := row_factor(r.inputs, r.outputs["o"], self.where)) is not None:
            found["o"] = factor.words, f"{factor.words}: {factor.evidence.removesuffix('.')}"
        return found

    def _look_closer(self, r: _Ran, failure: Failure, file: Path | None) -> str | None:
        capture = r.inputs.capture
        if file is not None:
            return closer.of_saved(file, r.failures)
        if self.declared is not None and (self.subject.stored or failure.quantity not in GRADIENTS):
            if not self.subject.stored or capture is None:
                return None
            return closer.of_capture(capture, "inspect", [f"--declared {self.declared}"])
        if capture is not None:
            return closer.of_capture(capture, "identify" if self.subject.stored else "inspect")
        return closer.of_kernel(failure, r.inputs.name, self._asked_again(), self.declared)

    def _store(
        self, ran: list[_Ran], failures: list[Failure]
    ) -> tuple[list[Failure], Literal["saved", "updated"] | None]:
        """Write the entry; what is merely inaccurate is accepted thereby, what is broken is not."""
        assert self.path is not None
        broken = [f for f in failures if f.kind in BROKEN]
        if broken:
            self.notes.append(f"nothing was written to {self.path}: what is broken cannot be a baseline")
            return failures, None
        self.notes += [f"accepted: {f.message}" for f in failures]
        first = next((r for r in ran if r.inputs.name == "normal"), ran[0])
        assert first.outputs is not None
        recipe = agreement = None
        if self.declared is None and first.outputs["o"].dtype == first.inputs.q.dtype:
            options = suspects.published(first.inputs.q.dtype, first.inputs.q.shape[3])
            alike, agreement = suspects.closest(first.inputs, first.outputs["o"], options, self.where)
            recipe = alike.name
        entry = BaselineEntry(
            subject=self.subject.key, device=device_words(self.where), versions=versions(), seed=self.asked.seed,
            exact=self.exact, recipe=recipe, agreement=agreement,
            cases={r.inputs.name: _accepted(r) for r in reversed(ran)},
        )  # fmt: skip
        replaced = store(self.path, entry, replace=self.save == "update")
        return [], "updated" if replaced else "saved"


def _misfit(inputs: CaseInputs, case: CheckedCase, words: str, kind: Kind = "fit", quantity: str = "o") -> _Ran:
    return _Ran(inputs, None, case, None, [Failure(kind, case.name, quantity, f"{case.name}: {words}")])


def _accepted(r: _Ran) -> BaselineCase:
    assert r.measured is not None
    c, sizes = r.case, {n: BaselineSize(s.error, s.yardstick, s.log_ratio) for n, s in r.measured.sizes.items()}
    return BaselineCase(c.inputs_fingerprint, c.fingerprint, c.outputs, c.deterministic, r.measured.biases, sizes)
