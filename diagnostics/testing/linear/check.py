"""``attn_diag.check_linear``: a function of linear attention on a suite of inputs, against float64 or a baseline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from attn_diag.analyses.linear.inspect import inspect_linear_captures
from attn_diag.analyses.linear.words import in_words
from attn_diag.captures.lent import written_words
from attn_diag.captures.linear import LINEAR_OUTPUTS, LinearCapture
from attn_diag.errors import InputError
from attn_diag.head.machine import describe_tool, pick_device
from attn_diag.results.baseline import BaselineEntry
from attn_diag.results.check import BROKEN, CheckedCase, CheckReport, Failure, Kind
from attn_diag.results.linear import LinearDiagnosedCapture, LinearQuantity
from attn_diag.statistics.means import require_level
from attn_diag.testing.case_inputs import fingerprint
from attn_diag.testing.linear.baseline import entry_of, sizes_of
from attn_diag.testing.linear.calls import How
from attn_diag.testing.linear.cases import (
    CASES,
    MAY_REFUSE,
    SHAPE,
    choose,
    draw,
    fingerprint_of,
    how,
    inputs_alone,
    of_captures,
    usable_length,
    with_outputs,
)
from attn_diag.testing.linear.function import LinearFunction, LinearFunctionGiven
from attn_diag.testing.regression import judge
from attn_diag.testing.regression.baseline import (
    opened,
    require_consistent,
    store,
    which_words,
)
from attn_diag.testing.regression.cases import SECOND
from attn_diag.testing.regression.figures import Measured
from attn_diag.testing.target import DTYPES, MisfitError, NoGradientError
from attn_diag.work import Progress

_GRAVEST: tuple[Kind, ...] = ("nonfinite", "wrong", "lossy")
_ANSWERS = (*_GRAVEST, "undecided", "good", "stated")


def check_linear(
    target: LinearFunctionGiven | str | LinearCapture | Sequence[LinearCapture],
    operator: str | None = None,
    *,
    baseline: Path | str | None = None,
    save: bool = False,
    update: bool = False,
    cases: Iterable[str] | None = None,
    captures: Sequence[LinearCapture] = (),
    observation: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = SHAPE[3],
    backward: bool | None = None,
    level: float = 0.01,
    exact: bool = False,
    seed: int = 0,
    device: str = "auto",
    name: str | None = None,
    progress: Progress | None = None,
) -> CheckReport:
    """As ``attn_diag.check``, of linear attention: is a function the mathematics, well rounded, unbiased, as before?

        assert attn_diag.check_linear(my_chunk_kda, "kda").passed

    Every case is run twice, and each output (o, the last state, every gradient) is judged as ``inspect`` judges a
    capture; all means of O are tested together. An argument that autograd has no way to has the gradient zero.

    Args:
        target: A function with flash-linear-attention's arguments, [B, T, H, D], that returns o or (o, final_state, …);
            "MODULE:FUNCTION"; "recipe" or "recipe:16", the well-rounded kernel emulated (in chunks of 16); or captures,
            whose stored outputs are judged and nothing is run.
        operator: Whose arguments it has: "gated_delta_rule", "kda", "mamba2", …; of captures their own.
        baseline: The file to compare with: an error that grew, and with ``exact`` other bits.
        save: Add this function's entry to the baseline, and compare with none.
        update: Replace it, and compare with none.
        cases: Only these of ``attn_diag.testing.linear.cases.CASES``; None: all that the operator has.
        captures: Inputs of these as well.
        observation: Which stored observation is judged, where ``target`` is captures.
        dtype: torch.bfloat16 or torch.float16.
        head_dim: D of the suite's inputs.
        backward: None checks gradients where autograd gives them, True demands them, False leaves them out.
        level: Significance of the means, after Benjamini-Hochberg.
        exact: Other bits than the baseline's fail.
        seed: Of the inputs.
        device: auto, cpu or cuda.
        name: What reports and the baseline call the function.
        progress: Called with (done, total) after every case.

    Raises:
        InputError: Something cannot be run or compared at all. What the function does wrong is a failure in the report.
    """
    require_level(level)
    require_consistent(baseline, dtype, head_dim, save=save, update=update, exact=exact)
    where = pick_device(device)
    stored = _captures(target)
    function, source, backend, notes = None, name or "stored outputs", "stored", list[str]()
    called: dict[str, How] = {}
    if stored is not None:
        if cases is not None or captures:
            raise InputError("stored outputs are judged as they are: cases and captures need a function to run")
        inputs = [_observed(c, observation) for c in stored]
        options = ", ".join(dict.fromkeys(c.operator for c in inputs))
    else:
        if operator is None:
            raise InputError("name the operator whose arguments the function has (operator='kda')")
        if observation is not None:
            raise InputError("observation is for captures whose stored outputs are judged; a function is run instead")
        function = LinearFunction.of(target, operator, name, device=where)  # type: ignore[arg-type]
        length, notes = usable_length(function, operator, dtype, head_dim, seed)
        shape = (SHAPE[0], length, SHAPE[2], head_dim)
        names = choose(cases, operator)
        inputs = [draw(n, operator, seed, dtype=dtype, shape=shape) for n in names]
        called = {n: how(n, operator, seed, shape) for n in names}
        inputs += of_captures(captures, operator)
        source, backend = function.name, function.backend
        options = f"{operator}, {DTYPES[dtype]}, D {head_dim}"
    if not inputs:
        raise InputError("nothing to check: name at least one case or capture")
    subject, path = f"{source} ({options})", None if baseline is None else Path(baseline)
    key, entry = opened(path, subject, where, save=save, update=update)
    run = _Check(
        function, where, level, exact or (entry is not None and entry.exact), entry, key, backward,
        suite=frozenset(() if stored is not None else choose(cases, str(operator))) if cases is None else frozenset(),
        called=called,
    )  # fmt: skip
    run.notes += notes
    if path is not None and not save and not update:
        run.notes += which_words(path, subject, key, entry)
    ran = run.every(inputs, progress)
    failures = [f for r in ran for f in r.failures]
    saved: Literal["saved", "updated"] | None = None
    if (save or update) and path is not None:
        if any(f.kind in BROKEN for f in failures):
            run.notes.append(f"nothing was written to {path}: what is broken cannot be a baseline")
        else:
            run.notes += [f"accepted: {f.message}" for f in failures]
            measured = [(r.case, r.measured) for r in reversed(ran) if not r.case.name.endswith(SECOND)]
            entry_ = entry_of(subject, where, measured, seed=seed, exact=run.exact)
            failures, saved = [], "updated" if store(path, entry_, replace=update) else "saved"
    return CheckReport(
        tool=describe_tool(where), source=source, backend=backend, key=key, level=level, seed=seed, exact=run.exact,
        baseline=None if path is None else str(path), baseline_key=None if entry is None else entry.key,
        cases=tuple(r.case for r in ran), failures=tuple(failures), notes=tuple(dict.fromkeys(run.notes)),
        tests=run.tests, saved=saved, operator=operator or inputs[0].operator,
    )  # fmt: skip


def _captures(target: object) -> list[LinearCapture] | None:
    """The captures whose stored outputs are to be judged; None where ``target`` is something that is run."""
    if isinstance(target, LinearCapture):
        return [target]
    if isinstance(target, str) or not isinstance(target, Sequence):
        return None
    found = [c for c in target if isinstance(c, LinearCapture)]
    return found if found and len(found) == len(target) else None


def _observed(capture: LinearCapture, observation: str | None) -> LinearCapture:
    """The capture with one observation, the plain one."""
    _, outputs = capture.observation(observation)
    return with_outputs(inputs_alone(capture), dict(outputs))


@dataclass
class _Ran:
    """A case, the capture of what came back (None: nothing that could be judged), and what is wrong."""

    case: CheckedCase
    capture: LinearCapture | None
    failures: list[Failure] = field(default_factory=list)
    measured: Measured | None = None


@dataclass
class _Check:
    """One run."""

    function: LinearFunction | None
    where: torch.device
    level: float
    exact: bool
    entry: BaselineEntry | None
    key: str
    backward: bool | None
    suite: frozenset[str]
    """Cases that nobody asked for by name: some may be refused."""
    called: Mapping[str, How] = field(default_factory=dict)
    """How the function is called in a case, beside its tensors."""
    notes: list[str] = field(default_factory=list)
    tests: int = 0

    def every(self, inputs: Sequence[LinearCapture], progress: Progress | None) -> list[_Ran]:
        """All cases: run, judged together, and compared with the baseline."""
        ran: list[_Ran] = []
        for number, one in enumerate(inputs):
            ran += self._run(one)
            if progress is not None:
                progress(number + 1, len(inputs))
        if inputs and not ran:
            raise InputError(f"it takes none of these inputs: {'; '.join(self.notes)}")
        judged = [r for r in ran if r.capture is not None]
        captures = [r.capture for r in judged if r.capture is not None]
        found = inspect_linear_captures(captures, level=self.level, device=self.where.type) if captures else None
        for r, diagnosed in zip(judged, () if found is None else found.captures, strict=True):
            self._judge(r, diagnosed)
        adjusted, growth = judge.adjusted([r.case for r in ran])
        self.tests = growth + (0 if found is None else found.tests)
        for r, case in zip(ran, adjusted, strict=True):
            r.case = case
            r.failures += judge.failures_of(case, self.level)
        return ran

    def _run(self, inputs: LinearCapture) -> list[_Ran]:
        """What the function made of a case; where a second run returned other bits, of that as well."""
        q = inputs.tensors["q"]
        b, t, _, d = q.shape
        case = CheckedCase(
            inputs.source, (b, inputs.tensors["v"].shape[2], t, d), str(q.dtype).removeprefix("torch."),
            inputs_fingerprint=fingerprint_of(inputs_alone(inputs)),
        )  # fmt: skip
        if self.function is None:
            return [self._one(case, inputs, dict(inputs.observation(None)[1]))]
        optional = inputs.source in MAY_REFUSE and inputs.source in self.suite
        if "initial_state" in inputs.tensors and not self.function.takes("initial_state") and optional:
            self.notes.append(f"{case.name} was not run: it takes no initial state")
            return []
        try:
            first = self._outputs(inputs)
            again = self._outputs(inputs)
        except MisfitError as error:
            if optional:
                self.notes.append(f"{case.name} was not run: {error}")
                return []
            return [_Ran(case, None, [Failure("fit", case.name, "o", f"{case.name}: {error}")])]
        same = fingerprint(first) == fingerprint(again)
        case = replace(case, deterministic=same)
        found = [self._one(case, inputs, first)]
        return found if same else [*found, self._one(replace(case, name=case.name + SECOND), inputs, again)]

    def _outputs(self, inputs: LinearCapture) -> dict[str, Tensor]:
        assert self.function is not None
        called = self.called.get(inputs.source)
        try:
            outputs, changed = self.function.run(inputs, gradients=self.backward is not False, how=called)
        except NoGradientError as error:
            if self.backward:
                raise
            self.notes.append(f"no gradients were checked: {error}")
            outputs, changed = self.function.run(inputs, gradients=False, how=called)
        if changed:
            raise MisfitError(written_words(changed))
        return outputs

    def _one(self, case: CheckedCase, inputs: LinearCapture, outputs: dict[str, Tensor]) -> _Ran:
        case = replace(case, outputs=tuple(outputs), fingerprint=fingerprint(outputs))
        made = with_outputs(inputs, outputs)
        # Without gradients there is none of dO to start from.
        if not any(name.startswith("d") for name in outputs):
            kept = {n: x for n, x in made.tensors.items() if n not in ("do", "dfinal_state")}
            made = replace(made, tensors=kept)
        return _Ran(case, replace(made, source=case.name))

    def _judge(self, r: _Ran, found: LinearDiagnosedCapture) -> None:
        assert r.capture is not None
        started = time.perf_counter()
        (observation,) = found.observations
        gravest = gravest_of([q for head in observation.heads for q in head.quantities])
        r.measured = Measured({}, {}, sizes_of(gravest, r.capture), None)
        known = None if self.entry is None else self.entry.cases.get(r.case.name)
        if self.entry is not None and known is None:
            self.notes.append(f"the baseline has no case {r.case.name}: it is held to a well-rounded kernel's errors")
        same_key = self.entry is not None and self.entry.key == self.key
        case = replace(r.case, linear=tuple(gravest.values()))
        case, failures, notes = judge.compared(case, known, case.fingerprint, exact=self.exact, same_key=same_key)
        same_inputs = known is not None and case.inputs_fingerprint == known.inputs_fingerprint
        sizes = judge.sizes_of(r.measured, known, same_inputs=same_inputs)
        r.case = replace(case, sizes=sizes, seconds=time.perf_counter() - started)
        self.notes += notes
        r.failures += failures
        closer = f"attn-diag inspect {r.capture.source}" if self.function is None else None
        for quantity in gravest.values():
            kept = quantity.quantity in sizes and sizes[quantity.quantity].limit is not None
            if quantity.answer in _GRAVEST and not (quantity.answer == "lossy" and kept):
                r.failures.append(_failure(r.case, quantity, closer, backward=_is_of_backward(quantity, gravest)))
        biased = [h for h in observation.heads if "biased" in h.labels]
        if biased:
            said = next(x for x in biased[0].reasons if " in the mean, " in x).rstrip(".")
            r.failures.append(Failure("bias", r.case.name, "o", f"{r.case.name}: {said}", look_closer=closer))
        if any("ill_conditioned" in head.labels for head in observation.heads):
            self.notes.append(f"{r.case.name}: a well-rounded kernel is over 2 % off on these inputs too")


def gravest_of(quantities: Sequence[LinearQuantity]) -> dict[str, LinearQuantity]:
    """Of every quantity the head that is worst."""
    found: dict[str, LinearQuantity] = {}
    for q in quantities:
        before = found.get(q.quantity)
        order = (_ANSWERS.index(q.answer), -(q.factor or 0.0))
        if before is None or order < (_ANSWERS.index(before.answer), -(before.factor or 0.0)):
            found[q.quantity] = q
    return found


def _is_of_backward(q: LinearQuantity, gravest: Mapping[str, LinearQuantity]) -> bool:
    """Whether a gradient is behind a forward that is right."""
    forward = [gravest[name].answer for name in LINEAR_OUTPUTS if name in gravest]
    return q.quantity not in LINEAR_OUTPUTS and "o" in gravest and "wrong" not in forward


def _failure(case: CheckedCase, q: LinearQuantity, closer: str | None, *, backward: bool) -> Failure:
    # What the answer's own words say of a factor, a sign or zeros is said once.
    named = q.cause if q.cause not in ("zero", "sign", "factor") else None
    kind: Kind = q.answer  # type: ignore[assignment]
    words = f"{case.name}: {q.words.removesuffix('.')}"
    culprit = None if named is None else in_words(named, backward=backward)
    return Failure(kind, case.name, q.quantity, words, culprit, closer, q.factor)


def capture_of_linear_case(
    target: LinearFunctionGiven | str | LinearCapture | Sequence[LinearCapture],
    operator: str | None,
    case: str,
    *,
    captures: Sequence[LinearCapture] = (),
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int = SHAPE[3],
    backward: bool | None = None,
    seed: int = 0,
    device: str = "auto",
    name: str | None = None,
    **_: Any,
) -> LinearCapture | None:
    """A case's inputs and what the function returns for them once more: where a closer look at a failure starts.

    Args:
        target: As for ``check_linear``, and so are all options, of which the others change no output.
        operator: Likewise.
        case: The name of the failing case.

    Returns:
        None where there is nothing to inspect: the function raises, or ``target`` is captures.
    """
    if operator is None or _captures(target) is not None:
        return None
    try:
        function = LinearFunction.of(target, operator, name, device=pick_device(device))  # type: ignore[arg-type]
        case = case.removesuffix(SECOND)
        if case in CASES:
            shape = (SHAPE[0], usable_length(function, operator, dtype, head_dim, seed)[0], SHAPE[2], head_dim)
            inputs, called = draw(case, operator, seed, dtype=dtype, shape=shape), how(case, operator, seed, shape)
        else:
            (inputs,) = (c for c in of_captures(captures, operator) if c.source == case)
            called = None
        outputs, _changed = function.run(inputs, gradients=backward is not False, how=called)
    except (InputError, MisfitError, ValueError):
        return None
    return with_outputs(inputs, outputs)
